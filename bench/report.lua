--- The table of results, on the terminal and in bench/results.
-- Invariant: what is printed and what is stored come from the same lines.
-- To add a column: in `columns`.
local report = {}

---@param seconds number
function report.time(seconds)
  if seconds < 1e-6 then return ("%.0f ns"):format(seconds * 1e9) end
  if seconds < 1e-3 then return ("%.2f us"):format(seconds * 1e6) end
  if seconds < 1 then return ("%.2f ms"):format(seconds * 1e3) end
  return ("%.2f s"):format(seconds)
end

---@param n number tokens a second
function report.rate(n) return ("%.0f tokens/s"):format(n) end

---@param n number
function report.bytes(n) return ("%.1f MB"):format(n / 1e6) end

local columns = { "case", "orrery", "pytorch", "ratio", "goal", "met", "repetitions" }

---@param lines table<string, string>[]
---@return string in Markdown
function report.table(lines)
  local width, out = {}, {}
  for _, name in ipairs(columns) do
    width[name] = #name
    for _, line in ipairs(lines) do width[name] = math.max(width[name], #line[name]) end
  end
  local function add(value)
    local cells = {}
    for k, name in ipairs(columns) do
      local text = value(name)
      cells[k] = text .. (" "):rep(width[name] - #text)
    end
    out[#out + 1] = "| " .. table.concat(cells, " | ") .. " |"
  end
  add(function(name) return name end)
  add(function(name) return ("-"):rep(width[name]) end)
  for _, line in ipairs(lines) do add(function(name) return line[name] end) end
  return table.concat(out, "\n")
end

local function slug(text)
  return (text:lower():gsub("%(r%)", ""):gsub("[^%w]+", "-"):gsub("^%-+", ""):gsub("%-+$", ""))
end

local notes = [[
A ratio is PyTorch's time over Orrery's in one repetition (or what the row names), and the median over
repetitions; the sides run in turn, with the same threads, dtype, batch, data and first weights, and their
first losses are equal. A repetition counts where two threads of arithmetic, run before, between and after
the sides, did more than 1.9 times the work of one; "dropped" counts the others. "noisy": too few counted
in the time allowed, and the line holds repetitions that were not chosen. Ratios are what is compared:
absolute times are noise of this machine and moment.
]]

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

--- The table with its machine and notes; writes FOLDER/<date>-<cpu>.md, and .json where lua-cjson is there.
---@param folder string? nothing is written where there is none
---@param machine {cpu: string, cores: integer, date: string, versions: string[]}
---@param lines table[]
---@return string text, string? path
function report.save(folder, machine, lines)
  local head = ("%s, %d cores, %s"):format(machine.cpu, machine.cores, machine.date)
  local text = ("# Bench: %s\n\n%s\n\n%s\n\n%s"):format(head, table.concat(machine.versions, "; "),
    report.table(lines), notes)
  if not folder then return text end
  local path = ("%s/%s-%s"):format(folder, machine.date:sub(1, 10), slug(machine.cpu))
  write(path .. ".md", text)
  local found, cjson = pcall(require, "cjson")
  if found then
    local plain = {}
    for k, line in ipairs(lines) do plain[k] = line.data end
    write(path .. ".json", cjson.encode { machine = machine, lines = plain } .. "\n")
  else
    text = text .. "\nno JSON: lua-cjson is not installed\n"
  end
  return text, path .. ".md"
end

return report
