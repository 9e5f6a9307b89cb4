-- orrery.timeline: what ran when, on which device and queue, as a trace file that Chrome
-- (chrome://tracing) and Perfetto (ui.perfetto.dev) show: the Trace Event Format, complete events.
-- Invariant: times are the workers' own, in microseconds since the first event; a file is written
-- whole or not at all.
-- To add what an event says: timeline_event in csrc/lua_device.c, and `args` here.
local core = require "orrery.core"
local check = require "orrery.check"

local names = { ['"'] = '\\"', ["\\"] = "\\\\" }

-- A JSON string; names of ops and devices hold no bytes above 127.
local function text(s)
  return '"' .. s:gsub('[%c"\\]', function(c) return names[c] or ("\\u%04x"):format(c:byte()) end) .. '"'
end

local function args(stage, micro, backward)
  local list = {}
  if stage > 0 then list[#list + 1] = ('"stage":%d'):format(stage) end
  if micro > 0 then list[#list + 1] = ('"micro":%d'):format(micro) end
  if backward then list[#list + 1] = '"pass":"backward"'
  elseif stage > 0 then list[#list + 1] = '"pass":"forward"' end
  return "{" .. table.concat(list, ",") .. "}"
end

-- Rows are numbered 2 * device for its compute queue, one more for its communication queue.
local function row_name(row)
  local thread = '{"name":"thread_name","ph":"M","pid":1,"tid":%d,"args":{"name":%s}},\n'
    .. '{"name":"thread_sort_index","ph":"M","pid":1,"tid":%d,"args":{"sort_index":%d}}'
  return thread:format(row.tid, text(row.name), row.tid, row.tid)
end

local event = '{"name":%s,"cat":"%s","ph":"X","pid":1,"tid":%d,"ts":%.3f,"dur":%.3f,"args":%s}'

local function lines_of(n)
  local origin, rows, order, lines = math.huge, {}, {}, {}
  for k = 1, n do
    local _, device, index, comm, start = core.timeline_event(k)
    origin = math.min(origin, start)
    local tid = 2 * index + (comm and 1 or 0)
    if not rows[tid] then
      rows[tid] = { tid = tid, name = device .. (comm and " communication" or " compute") }
      order[#order + 1] = tid
    end
  end
  table.sort(order)
  lines[1] = '{"name":"process_name","ph":"M","pid":1,"args":{"name":"orrery"}}'
  for _, tid in ipairs(order) do lines[#lines + 1] = row_name(rows[tid]) end
  for k = 1, n do
    local name, _, index, comm, start, stop, stage, micro, backward = core.timeline_event(k)
    local queue, tid = comm and "communication" or "compute", 2 * index + (comm and 1 or 0)
    lines[#lines + 1] = event:format(text(name), queue, tid, (start - origin) * 1e6,
      (stop - start) * 1e6, args(stage, micro, backward))
  end
  return lines
end

--- Runs f and writes what ran on the devices meanwhile to a file: a row a device and queue, an event
--- an op or a device's part of a collective, with the stage, the micro-batch and the pass where
--- they are known. Waits for the devices. Where f fails no file is written.
---@param f fun()
---@param path string
---@return integer events
return function(f, path)
  if type(f) ~= "function" then check.raise("timeline: expected a function, got %s", type(f)) end
  if type(path) ~= "string" then check.raise("timeline: expected a file name, got %s", type(path)) end
  core.synchronize()
  core.timeline_start()
  local ok, message = pcall(f)
  local stopped, n, lost = pcall(core.timeline_stop)
  if not ok then error(message, 0) end
  if not stopped then error(n, 0) end
  local lines = lines_of(n)
  local file, reason = io.open(path, "w")
  if not file then check.raise("timeline: %s", reason) end
  local written, why = file:write('{"displayTimeUnit":"ms","otherData":{"lost":', ("%d"):format(lost),
    '},"traceEvents":[\n', table.concat(lines, ",\n"), "\n]}\n")
  local closed, why_not = file:close()
  if not (written and closed) then
    os.remove(path)
    check.raise("timeline: %s: %s", path, tostring(why or why_not))
  end
  return n
end
