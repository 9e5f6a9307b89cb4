--- Lines of the GPU bench: a line a comparison, with its goal and whether it was met.
-- Invariant: a line's text and its data are made of the same numbers; "pass" and "miss" stand only where
-- both sides were measured. To add a kind of comparison: a function, called in `of_row`.
local measure = require "measure"
local machine = require "gpu_machine"
local lines = { small = false } -- small: tiny sizes, for which no goal is met or missed

local function time(seconds)
  if seconds < 1e-6 then return ("%.0f ns"):format(seconds * 1e9) end
  if seconds < 1e-3 then return ("%.2f us"):format(seconds * 1e6) end
  return seconds < 1 and ("%.2f ms"):format(seconds * 1e3) or ("%.2f s"):format(seconds)
end

-- Seconds of a run as the row shows them.
local function amount(row, seconds)
  if row.tokens then return ("%.0f tokens/s"):format(row.tokens / seconds) end
  if row.flops then return ("%.1f TFLOP/s"):format(row.flops / seconds / 1e12) end
  if row.bytes then return ("%.0f GB/s"):format(row.bytes / seconds / 1e9) end
  return time(seconds)
end

-- goal: {sign = ">=" or "<=", bound}; nil: none.
local function line(row, texts, data, goal)
  local value = data.ratio or data.value
  data.case, data.group, data.word = row.name, row.group, row.case
  if goal then
    data.goal = goal[2]
    if value and not lines.small then
      data.met = goal[1] == ">=" and value >= goal[2] or goal[1] == "<=" and value <= goal[2]
    end
  end
  return {
    case = row.name, orrery = texts[1] or "", pytorch = texts[2] or "",
    ratio = data.ratio and ("%.2f"):format(data.ratio) or "",
    goal = goal and ("%s %s"):format(goal[1], texts.goal or ("%.3g"):format(goal[2])) or "",
    met = data.met == nil and "" or (data.met and "pass" or "miss"),
    repetitions = data.repetitions and tostring(data.repetitions) or "", data = data,
  }
end

--- A row that cannot run here.
function lines.skipped(row, why) return line(row, { "", why }, { skipped = why }) end

-- The best rate of the copies in each repetition, as seconds for the row's bytes.
local function copy_seconds(row, list, result, bytes)
  local copies = {}
  for k = 1, result.used do
    local best
    for _, spec in ipairs(list) do
      if spec.role == "copy" and spec.at and not spec.failed then
        local rate = 2 * bytes / result.seconds[spec.at][k]
        best = math.max(best or 0, rate)
      end
    end
    copies[k] = best
  end
  local ratios = {}
  for k, rate in ipairs(copies) do ratios[k] = row.bytes / result.seconds[1][k] / rate end
  if #copies == 0 then return nil end
  return measure.median(copies), measure.median(ratios)
end

local counted = {} -- of products: {row=, own=, best=} a second, for shares of the peak

local function note_flops(row, list, result)
  local own = row.flops / measure.median(result.seconds[1])
  local best = own
  for _, spec in ipairs(list) do
    if spec.role == "peer" and spec.at and not spec.failed then
      best = math.max(best, row.flops / measure.median(result.seconds[spec.at]))
    end
  end
  counted[#counted + 1] = { row = row, own = own, best = best }
end

local function peer_line(row, spec, result, own)
  local label, goal = spec.what[2], spec.what[3] and { ">=", spec.what[3] } or nil
  if spec.failed then
    return line(row, { amount(row, own), label .. " does not run: " .. spec.failed },
      { orrery_seconds = own, other = label, other_failed = spec.failed, failed = spec.differs }, goal)
  end
  local other = measure.median(result.seconds[spec.at])
  local data = { orrery_seconds = own, other = label, other_seconds = other,
    ratio = measure.ratio(result, 1, spec.at), repetitions = result.used, wish = spec.what[4] }
  return line(row, { amount(row, own), label .. " " .. amount(row, other) }, data, goal)
end

-- Another side of this run: Orrery's time over its.
local function other_line(row, spec, result, own)
  local label, most = spec.what[2], spec.what[3]
  if spec.failed then
    return line(row, { time(own), label .. " does not run: " .. spec.failed }, { orrery_seconds = own })
  end
  local other = measure.median(result.seconds[spec.at])
  local data = { orrery_seconds = own, other = label, other_seconds = other,
    ratio = 1 / measure.ratio(result, 1, spec.at), repetitions = result.used }
  return line(row, { time(own), label .. " " .. time(other) }, data, most and { "<=", most })
end

--- The lines of a measured row; result is nil where Orrery's own side failed.
---@param list table[] sides with role, at (in the result), failed
function lines.of_row(row, list, result, has, sizes)
  if not result then
    return { line(row, { "does not run", list[1].failed }, { failed = list[1].failed }) }
  end
  local found, own = {}, measure.median(result.seconds[1])
  local function add(l) found[#found + 1] = l end
  if row.bytes then
    local rate, share = copy_seconds(row, list, result, sizes.copy)
    local data = { orrery_seconds = own, bytes = row.bytes, copy_bytes_a_second = rate, ratio = share,
      other = "copy", repetitions = result.used }
    add(line(row, { amount(row, own), rate and ("copy %.0f GB/s"):format(rate / 1e9) or "no copy ran" }, data,
      row.copy and { ">=", row.copy }))
  end
  if row.flops then note_flops(row, list, result) end
  if row.most then
    add(line(row, { time(own), goal = time(row.most) }, { orrery_seconds = own, value = own,
      repetitions = result.used }, { "<=", row.most }))
  end
  local peers = false
  for _, spec in ipairs(list) do
    if spec.role == "other" then add(other_line(row, spec, result, own)) end
    if spec.role == "peer" then
      peers = true
      add(peer_line(row, spec, result, own))
    end
  end
  if row.peers and not peers then
    local goal = row.peers[1][3]
    add(line(row, { amount(row, own), "no peer here: " .. (has.why or "left out") },
      { orrery_seconds = own, other = row.peers[1][2], repetitions = result.used }, goal and { ">=", goal }))
  end
  return found
end

--- The peak of device memory beside PyTorch's.
function lines.memory(row, own, other, has)
  local function text(bytes) return bytes and ("%.0f MB"):format(bytes / 1e6) end
  local data = { orrery_bytes = own, other = "PyTorch eager", other_bytes = other or nil,
    ratio = own and other and other > 0 and own / other or nil }
  if not own then data.failed = "the peak of memory could not be taken" end
  local beside = other and other > 0 and "PyTorch eager " .. text(other)
    or has.python and "its peak could not be taken" or "no peer here: " .. has.why
  return line({ name = row.name .. ", peak memory", group = row.group, case = row.case },
    { text(own) or data.failed, beside }, data, { "<=", 1 })
end

--- Products and convolutions as shares of the card's peak; where no data sheet is known here, of the largest
--- rate that this run saw in the dtype.
function lines.of_peaks(has)
  local found, largest = {}, {}
  for _, c in ipairs(counted) do
    largest[c.row.dtype] = math.max(largest[c.row.dtype] or 0, c.best)
  end
  for _, c in ipairs(counted) do
    local sheet = machine.peak(has.model, c.row.dtype)
    local peak = sheet or largest[c.row.dtype]
    local words = sheet and "data sheet " or "largest of this run "
    found[#found + 1] = line({ name = c.row.name .. ", of the peak", group = c.row.group, case = c.row.case },
      { ("%.1f TFLOP/s"):format(c.own / 1e12), words .. ("%.1f"):format(peak / 1e12) },
      { ratio = c.own / peak, peak = peak, peak_from = sheet and "data sheet" or "largest of this run" })
  end
  return found
end

local notes = [[
Sides run in turn; a number is the median of its repetitions. GB/s count what must be read and written at
least; "copy" is the faster of a copy kernel and cudaMemcpyAsync in the same repetitions. Ratios: the share
of the copy's rate; PyTorch's time over Orrery's (its memory: Orrery's over PyTorch's); Orrery's time over
another side's. Where both sides ran, their first losses (or results) were equal.
]]
local tiny = [[
**Tiny sizes, one repetition: this run shows that the bench works, and nothing of speed.**
]]

--- The table as text; with a folder also FOLDER/gpu.md and FOLDER/gpu.json.
---@param folder string?
---@param about {model: string, state: table, peer: string, control: string}
function lines.save(folder, about, list, report)
  local state = about.state
  local head = ("%s, driver %s, clocks %s of %s MHz (memory %s of %s), %s"):format(about.model,
    state.driver or "not known", state.clock_sm_mhz or "?", state.clock_sm_most_mhz or "?",
    state.clock_memory_mhz or "?", state.clock_memory_most_mhz or "?", state.date)
  local text = ("# GPU bench: %s\n\n%s; copies by %s\n\n%s\n\n%s"):format(head, about.peer, about.control,
    report.table(list), (lines.small and tiny or "") .. notes)
  if not folder then return text end
  local function write(name, content)
    local file = assert(io.open(folder .. "/" .. name, "w"))
    file:write(content)
    file:close()
  end
  write("gpu.md", text)
  local plain = {}
  for k, l in ipairs(list) do plain[k] = l.data end
  write("gpu.json", require("cjson").encode { machine = state, model = about.model, peer = about.peer,
    copies = about.control, small = lines.small, lines = plain } .. "\n")
  return text
end

return lines
