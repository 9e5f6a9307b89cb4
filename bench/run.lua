--- make bench: ratios to PyTorch from one run.
--   LUA bench/run.lua [--only PATTERN] [--no-peer] [--quick] [--limit SECONDS] [--total SECONDS]
--     [--out FOLDER]
-- PATTERN is a Lua pattern on the names of lines; --quick takes one short repetition and no control;
-- --limit is what a block may take while it waits for repetitions that count (default 60), --total all
-- blocks together (default 330): blocks late in the list wait less where earlier ones took long.
-- Results are written to FOLDER, and of a whole run to bench/results where none is given.
-- ORRERY_BENCH_VENV is the folder of PyTorch's environment, as in deps.sh; CC the C compiler.
-- Invariant: every number printed was measured in this run; a side of PyTorch that fails or takes longer
-- than peer.py allows is left out, and its lines say so. To add a row: rows.lua.
local bench = arg[0]:match "^(.*/)" or "./"
package.path = bench .. "?.lua;" .. package.path
local measure, report, rows, sides = require "measure", require "report", require "rows", require "sides"
local child = require "child"
local quote, output = child.quote, child.output
local clock = require("orrery.terminal").clock()

local options = { repetitions = 9, least = 0.1, limit = 60, total = 330, peer = true, only = "" }
local flags = {
  ["--quick"] = function() options.repetitions, options.least, options.quick = 1, 0.001, true end,
  ["--no-peer"] = function() options.peer = false end,
}
local at = 1
while arg[at] do
  local name = arg[at]:match "^%-%-(.+)$"
  if flags[arg[at]] then
    flags[arg[at]]()
  elseif (name == "only" or name == "out") and arg[at + 1] then
    at = at + 1
    options[name] = arg[at]
  elseif (name == "limit" or name == "total") and tonumber(arg[at + 1]) then
    at = at + 1
    options[name] = tonumber(arg[at])
  else
    io.stderr:write("usage: run.lua [--only PATTERN] [--no-peer] [--quick] [--limit S] [--total S]\n",
      "  [--out FOLDER]\n")
    os.exit(2)
  end
  at = at + 1
end

local function note(...) io.stderr:write("bench: ", string.format(...), "\n") end

-- ---- the peer, the machine, the control ----

local function find_peer()
  if not options.peer then return nil end
  local venv = os.getenv "ORRERY_BENCH_VENV"
    or (os.getenv "XDG_CACHE_HOME" or (os.getenv "HOME" or "") .. "/.cache") .. "/orrery/bench-venv"
  local ask = " -c 'import torch; print(torch.__version__)'"
  local wheel = quote(venv .. "/bin/python")
  local version = output(wheel .. ask)
  if version ~= "" then return { command = wheel, name = "PyTorch " .. version .. " (wheel)" } end
  local debian = "env OPENBLAS_CORETYPE=SKYLAKEX python3"
  version = output(debian .. ask)
  if version ~= "" then
    return { command = debian,
      name = "PyTorch " .. version .. " (Debian's python3-torch, OPENBLAS_CORETYPE=SKYLAKEX)" }
  end
  note "no PyTorch here (make bench-deps): its side is skipped"
  return nil
end

local function interpreter()
  local first = 0
  while arg[first - 1] do first = first - 1 end
  return quote(arg[first])
end

local function machine_of(set, python)
  local cpu = "unknown"
  for line in io.lines "/proc/cpuinfo" do
    local model = line:match "^model name%s*:%s*(.+)$"
    if model then cpu = model break end
  end
  local versions = { "Orrery " .. set:ask("orrery", "version"), output "cc --version | head -1",
    "Linux " .. output "uname -r" }
  versions[#versions + 1] = python and python.name or "no PyTorch"
  return { cpu = cpu, cores = tonumber(output "getconf _NPROCESSORS_ONLN") or 1,
    date = os.date "%Y-%m-%d %H:%M", versions = versions }
end

local function build_control(folder)
  local command = ("%s -O2 -pthread %s -o %s"):format(os.getenv "CC" or "cc", quote(bench .. "control.c"),
    quote(folder .. "/control.bin"))
  local status = os.execute(command)
  if status ~= true and status ~= 0 then error("bench: the control does not compile: " .. command, 0) end
end

-- ---- lines ----

local function line_of(name, texts, data)
  data.case = name
  return {
    case = name, orrery = texts[1], pytorch = texts[2] or "",
    ratio = data.ratio and ("%.2f"):format(data.ratio) or "",
    goal = texts.goal or "", met = texts.goal and (data.met and "yes" or "no") or "",
    repetitions = texts.repetitions or "1", data = data,
  }
end

-- Seconds of a run as the line shows them.
local function amount(line, seconds)
  return line.tokens and report.rate(line.tokens / seconds) or report.time(seconds)
end

-- The line of one pair of sides in a block's result.
local function line_of_pair(line, result)
  local a, b = line[2], line[3]
  local own = measure.median(result.seconds[a])
  local data = { orrery_seconds = own, repetitions = result.used, dropped = result.dropped,
    noisy = result.noisy }
  local texts = { (line.own and line.own .. " " or "") .. amount(line, own) }
  if line.failed then
    texts[2] = (line.beside or "PyTorch") .. " does not run"
    data.other, data.other_failed = line.beside or "pytorch", line.failed
  elseif b > 0 and result.seconds[b] then
    data.other_seconds = measure.median(result.seconds[b])
    data.ratio, data.other = measure.ratio(result, a, b), line.beside or "pytorch"
    texts[2] = (line.beside and line.beside .. " " or "") .. amount(line, data.other_seconds)
  end
  if line.ratio and data.ratio then
    texts.goal = (">= %g"):format(line.ratio) .. (line.hope and line.hope ~= line.ratio
      and (", wish %g"):format(line.hope) or "")
    data.goal, data.met = line.ratio, data.ratio >= line.ratio
  elseif line.most then
    texts.goal, data.goal, data.met = "< " .. report.time(line.most), line.most, own < line.most
  end
  texts.repetitions = ("%d, %d dropped%s"):format(result.used, result.dropped,
    result.noisy and ", noisy" or "")
  return line_of(line[1], texts, data)
end

local function wanted(name) return name:find(options.only) ~= nil end

-- Losses of the first step must be equal, or the sides do not do the same work.
local function compare_losses(block, list)
  local first
  for k, side in ipairs(list) do
    if side.loss then
      first = first or side.loss
      local equal = math.abs(side.loss - first) <= 1e-4 * math.abs(first)
      if not equal then
        error(("bench: %s: the first losses differ: %g and %g (side %d)"):format(block.lines[1][1], first,
          side.loss, k), 0)
      end
    end
  end
end

-- f(...), or false where a process of PyTorch fails: then failed[k] is the reason of each of its sides.
local function survive(set, block, failed, f, ...)
  local ok, result = pcall(f, ...)
  if ok then return result end
  local who = type(result) == "table" and result.who
  if not who or who == "orrery" or who == "control" then error(result, 0) end
  note("%s: %s does not run: %s", block.lines[1][1], who, tostring(result):gsub("%s*\n.*", ""))
  for k, spec in ipairs(block.sides) do
    if spec[1] == who then failed[k] = tostring(result):match "[^\n]*" end
  end
  set:close(who, true)
  return false
end

-- The sides that run, in a list and by their places in it, and what measuring them gave.
local function measure_block(set, block, python, control, failed, limit)
  local list, place = {}, { [0] = 0 }
  for k, spec in ipairs(block.sides) do
    if (python or not sides.is_peer(spec)) and not failed[k] then
      local side = survive(set, block, failed, set.make, set, spec)
      if side then
        list[#list + 1] = side
        place[k] = #list
      end
    end
  end
  compare_losses(block, list)
  local result = survive(set, block, failed, measure.interleave, list, { repetitions = options.repetitions,
    least = options.least, limit = limit, clock = clock, control = control })
  for k in ipairs(block.sides) do
    local side = place[k] and not failed[k] and list[place[k]]
    if side and side.drop then side.drop() end
  end
  if not result then return measure_block(set, block, python, control, failed, limit) end
  return place, result
end

-- The line of a side that does not run.
local function line_of_failure(line, reason)
  local word = (line.own or "PyTorch") .. " does not run"
  return line_of(line[1], { word, repetitions = "0" }, { failed = reason })
end

-- Without the peer, its sides are left out and so are the lines that are about it.
local function run_block(set, block, python, control, limit)
  local failed, lines = {}, {}
  local place, result = measure_block(set, block, python, control, failed, limit)
  for _, line in ipairs(block.lines) do
    if wanted(line[1]) and failed[line[2]] then
      lines[#lines + 1] = line_of_failure(line, failed[line[2]])
    elseif wanted(line[1]) and place[line[2]] then
      local moved = { line[1], place[line[2]], place[line[3]] or 0, failed = failed[line[3]] }
      for name, value in pairs(line) do
        if type(name) == "string" then moved[name] = value end
      end
      lines[#lines + 1] = line_of_pair(moved, result)
    end
  end
  return lines
end

local function is_wanted(block)
  for _, line in ipairs(block.lines) do
    if wanted(line[1]) then return true end
  end
  return false
end

-- The peak of resident memory of a new process that trains a little at two threads.
local function peak(set, who, case)
  set:close(who)
  local side = set:make { who, case, 2, 0 }
  side.time(options.quick and 1 or 20)
  local bytes = tonumber(set:ask(who, "memory"))
  set:close(who)
  return bytes
end

local function bytes_line(name, own, other, most)
  local data = { orrery_bytes = own, other_bytes = other, ratio = other and other / own, goal = most,
    met = most and own < most }
  return line_of(name, { report.bytes(own), other and report.bytes(other),
    goal = most and "< " .. report.bytes(most) }, data)
end

-- Bytes of what `make install` writes, and of the Python package.
local function installed(folder, python)
  local prefix = quote(folder .. "/prefix")
  output(("make -s -C %s install PREFIX=%s"):format(quote(bench .. ".."), prefix))
  local own = tonumber(output("du -sb " .. prefix):match "^%d+")
  if not own or own < 1e5 then error("bench: make install left nothing to weigh", 0) end
  local other
  if python then
    local path = output(python.command .. " -c 'import torch; print(torch.__path__[0])'")
    other = tonumber(output("du -sb " .. quote(path)):match "^%d+")
  end
  return own, other
end

-- ---- the run ----

local function run(set, folder, python)
  local lines, control = {}, nil
  local machine = machine_of(set, python)
  if not options.quick and machine.cores > 1 then control = function() return set:scale() end end
  local function add(line)
    note("%-48s %-14s %-20s ratio %-6s %s %s", line.case, line.orrery, line.pytorch, line.ratio, line.goal,
      line.repetitions)
    lines[#lines + 1] = line
  end
  local blocks, stop = {}, clock() + options.total
  for _, block in ipairs(rows) do
    if is_wanted(block) then blocks[#blocks + 1] = block end
  end
  for k, block in ipairs(blocks) do
    local share = 2 * (stop - clock()) / (#blocks - k + 1)
    local limit = math.min(options.limit, math.max(share, 2))
    for _, line in ipairs(run_block(set, block, python, control, limit)) do add(line) end
  end
  for _, row in ipairs(rows.memory) do
    if wanted(row[1]) then
      add(bytes_line(row[1], peak(set, "orrery", row[2]), python and peak(set, "pytorch", row[2])))
    end
  end
  if wanted "size installed" then
    local own, other = installed(folder, python)
    add(bytes_line("size installed", own, other, rows.installed))
  end
  return machine, lines
end

local folder = output "mktemp -d"
local python = find_peer()
local set = sides.new(folder, bench, interpreter(), python, clock)
local ok, machine, lines = pcall(function()
  build_control(folder)
  return run(set, folder, python)
end)
set:close(nil, true) -- nothing that they hold is wanted any more
os.execute("rm -rf " .. quote(folder))
if not ok then
  io.stderr:write(tostring(machine), "\n")
  os.exit(1)
end
if not options.out and options.only == "" and not options.quick then options.out = bench .. "results" end
if options.out then os.execute("mkdir -p " .. quote(options.out)) end
local text, path = report.save(options.out, machine, lines)
print(text)
if path then print("in " .. path) end
