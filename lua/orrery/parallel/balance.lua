-- Balance: which runs of layers are the stages of a pipeline, so that the slowest stage is as fast as
-- can be.
-- Invariant: the partition is the exact optimum of min max over contiguous runs, under the limits of
-- memory; it depends on shapes alone, but for balance=time, which asks the clock.
-- To add a column: `columns`. To add a cost: a field of the rows in `balance.table`.
local core = require "orrery.core"
local check = require "orrery.check"
local shapes = require "orrery.parallel.shapes"
local stages = require "orrery.parallel.stages"

local balance = {}
local huge = math.huge

-- A byte read or written costs as much time as ten operations.
local operations_a_byte = 10

-- The partition ---------------------------------------------------------------------------------

local function sums_of(list, n)
  local sums = { [0] = 0 }
  for i = 1, n do sums[i] = sums[i - 1] + (list and list[i] or 0) end
  return sums
end

-- best[s][j]: the least possible maximum of score(s, i, j) when stage s ends with layer j; from[s][j]:
-- where the stage before it ends then. Equal maxima take the earliest end.
local function minimise(n, k, score)
  local best, from = { [0] = { [0] = -huge } }, {}
  for s = 1, k do
    best[s], from[s] = {}, {}
    for j = s, n - (k - s) do
      local least, at = huge, nil
      for i = s - 1, j - 1 do
        local before = best[s - 1][i]
        local worst = before and math.max(before, score(s, i, j)) or huge
        if worst < least then least, at = worst, i end
      end
      if at then best[s][j], from[s][j] = least, at end
    end
  end
  if not from[k][n] then return nil end
  local ends, j = {}, n
  for s = k, 1, -1 do
    ends[s] = j
    j = from[s][j]
  end
  return ends, best[k][n]
end

--- Cuts layers 1..n into k runs so that the largest sum of costs is least; no run is empty, and none
--- holds more memory than its limit.
---@param costs number[]
---@param k integer 1 to #costs
---@param memory? number[] bytes of each layer
---@param limits? number[] bytes of each stage
---@return integer[]? ends the last layer of each run; nil where no partition keeps the limits
---@return number worst the largest sum; without ends, the bytes that the best attempt is over its limit
function balance.partition(costs, k, memory, limits)
  local n = #costs
  local sums, bytes = sums_of(costs, n), sums_of(memory, n)
  local function over(s, i, j) return limits and limits[s] and bytes[j] - bytes[i] - limits[s] or -huge end
  local ends, worst = minimise(n, k, function(s, i, j)
    return over(s, i, j) > 0 and huge or sums[j] - sums[i]
  end)
  if ends then return ends, worst end
  local _, excess = minimise(n, k, over)
  return nil, excess
end

-- The table ---------------------------------------------------------------------------------------

-- Seconds that each layer's forward took, by the profile: the least of three runs.
local function times_of(net, layers, args)
  local best, handles, now = {}, {}, nil
  local unpack = table.unpack or unpack
  local function lap()
    local seconds = 0
    for _, row in ipairs(core.profile_stop()) do seconds = seconds + row.time end
    core.profile_start()
    return seconds
  end
  for k, layer in ipairs(layers) do
    handles[k] = layer.module:register_forward_hook(function() now[k] = (now[k] or 0) + lap() end)
  end
  local kept, random = {}, core.random_state()
  for _, t in net:named_buffers() do kept[t] = t:clone() end
  local ok, message = pcall(core.no_grad, function()
    for _ = 1, 3 do
      now = {}
      core.profile_start()
      net:run_placed(unpack(args, 1, #args))
      local tail, last = lap(), #layers
      now[last] = (now[last] or 0) + tail
      for k in ipairs(layers) do best[k] = math.min(best[k] or huge, now[k] or 0) end
    end
  end)
  core.profile_stop()
  core.no_grad(function()
    for t, value in pairs(kept) do t:copy_(value) end
  end)
  core.set_random_state(random)
  for _, handle in ipairs(handles) do handle:remove() end
  if not ok then error(message, 0) end
  return best
end

local function add_calls(rows, record)
  local values, at = record.values, 1
  local segments = record.segments
  for s, segment in ipairs(segments) do
    local row = rows[segment.layer]
    local last = s == #segments and #record.calls or segment.last
    for k = at, last do
      local call = record.calls[k]
      row.flops = row.flops + shapes.flops(record, call)
      for _, id in ipairs(call.ins) do row.bytes = row.bytes + (id and values[id].bytes or 0) end
      for _, id in ipairs(call.outs) do
        row.bytes = row.bytes + values[id].bytes
        if values[id].grad then row.activations = row.activations + values[id].bytes end
      end
    end
    at = math.max(at, last + 1)
  end
end

--- What every layer costs: operations and bytes moved in its forward, bytes of its parameters and
--- buffers, bytes of the activations it keeps for backward. A parameter counts in the first layer that
--- holds it.
---@param net orrery.Module not placed
---@param args table the arguments of a call
---@param layers? {name: string, module: orrery.Module}[] default: the flattened children of the net
---@param timed? boolean measure seconds too, and let them be the cost
---@return table[] rows {name=, flops=, bytes=, parameters=, activations=, cost=, seconds=}
function balance.table(net, args, layers, timed)
  layers = layers or stages.layers(net)
  local record, rows, counted = shapes.record(net, args, layers), {}, {}
  for k, layer in ipairs(layers) do
    local row = { name = layer.name, flops = 0, bytes = 0, parameters = 0, activations = 0 }
    local function count(t)
      if not counted[t] then
        counted[t] = true
        row.parameters = row.parameters + record.values[record.index[t]].bytes
      end
    end
    for _, t in ipairs(layer.module:parameters()) do count(t) end
    for _, t in layer.module:named_buffers() do count(t) end
    rows[k] = row
  end
  add_calls(rows, record)
  local seconds = timed and times_of(net, layers, args)
  for k, row in ipairs(rows) do
    row.seconds = seconds and seconds[k]
    row.cost = row.seconds or row.flops + operations_a_byte * row.bytes
  end
  return rows
end

-- Plans -------------------------------------------------------------------------------------------

local function axis_size(stage, name)
  for _, axis in ipairs(stage.axes) do
    if axis.name == name then return axis.size end
  end
  return 1
end

-- The bytes that each stage may hold: the least that is set for one of its devices; nil where none is.
local function limits_of(plan, n)
  local limits, real, any = {}, plan:stages(), false
  local room = {}
  for _, d in ipairs(core.devices()) do room[d.name] = d.limit and d.free end
  for s = 1, n do
    local stage = real[(s - 1) % #real + 1]
    for _, name in ipairs(stage.devices) do
      if room[name] then
        limits[s], any = math.min(limits[s] or huge, room[name] / (n / #real)), true
      end
    end
  end
  return any and limits or nil
end

-- Parameters and their gradients, and the activations of one micro-batch, on a device of the stages.
local function memory_of(plan, rows)
  local memory, stage = {}, plan:stages()[1]
  local data, tensor = axis_size(stage, "data"), axis_size(stage, "tensor")
  local micro = plan:micro() or 1
  for k, row in ipairs(rows) do
    memory[k] = 2 * row.parameters / tensor + row.activations / data / tensor / micro
  end
  return memory
end

local function mebibytes(n) return ("%.1f MiB"):format(n / 2 ^ 20) end

-- What would satisfy the limits: more stages, or the layer that no stage can hold.
local function remedy(costs, k, memory, limits)
  local least = huge
  for s = 1, k do least = math.min(least, limits[s] or huge) end
  for more = k + 1, #costs do
    local same = {}
    for s = 1, more do same[s] = least end
    if balance.partition(costs, more, memory, same) then return ("%d such stages would do"):format(more) end
  end
  return "a single layer is larger than a device: split it by tensor<>, or its state by data<..; zero=3>"
end

--- The stage of each layer of a plan without counts or patterns.
---@param plan orrery.Plan
---@param layers {name: string, module: orrery.Module}[]
---@param x any the first argument of a call
---@param n integer stages
---@return integer[]
function balance.assign(plan, net, layers, x, n)
  local rows = balance.table(net, { x }, layers, plan:options("model").balance == "time")
  local costs = {}
  for k, row in ipairs(rows) do costs[k] = row.cost end
  local memory, limits = memory_of(plan, rows), limits_of(plan, n)
  local ends, excess = balance.partition(costs, n, memory, limits)
  if not ends then
    check.raise("plan: no split of %d layers into %d stages keeps the memory limits: the best is %s "
      .. "(%d bytes) over; %s", #layers, n, mebibytes(excess), excess, remedy(costs, n, memory, limits))
  end
  local assigned, s = {}, 1
  for k = 1, #layers do
    if k > ends[s] then s = s + 1 end
    assigned[k] = s
  end
  return assigned
end

local columns = {
  { "layer", function(r) return r.name end },
  { "MFLOP", function(r) return ("%.2f"):format(r.flops / 1e6) end },
  { "MiB moved", function(r) return ("%.2f"):format(r.bytes / 2 ^ 20) end },
  { "MiB parameters", function(r) return ("%.2f"):format(r.parameters / 2 ^ 20) end },
  { "MiB activations", function(r) return ("%.2f"):format(r.activations / 2 ^ 20) end },
  { "ms", function(r) return r.seconds and ("%.3f"):format(r.seconds * 1e3) or "" end },
  { "share", function(r) return ("%.1f %%"):format(100 * r.share) end },
  { "stage", function(r) return tostring(r.stage) end },
}

local table_meta = {
  __tostring = function(rows)
    local lines, width = {}, {}
    for k, column in ipairs(columns) do
      width[k] = #column[1]
      for _, row in ipairs(rows) do width[k] = math.max(width[k], #column[2](row)) end
    end
    for i = 0, #rows do
      local cells = {}
      for k, column in ipairs(columns) do
        local text = i == 0 and column[1] or column[2](rows[i])
        local blank = (" "):rep(width[k] - #text)
        cells[k] = k == 1 and text .. blank or blank .. text
      end
      lines[#lines + 1] = (table.concat(cells, "  "):gsub("%s+$", ""))
    end
    return table.concat(lines, "\n")
  end,
}

--- See parallel.balance.
function balance.show(net, x, k, options)
  options = check.options("balance", options, { limit = true, time = true })
  local rows = balance.table(net, { x }, nil, options.time)
  check.count("balance", "the number of stages", k)
  if k > #rows then check.raise("balance: %d stages for a net of %d layers", k, #rows) end
  local costs, memory, limits, total = {}, {}, options.limit and {}, 0
  for i, row in ipairs(rows) do
    costs[i], total = row.cost, total + row.cost
    memory[i] = 2 * row.parameters + row.activations
  end
  for s = 1, limits and k or 0 do limits[s] = options.limit end
  local ends, excess = balance.partition(costs, k, memory, limits)
  if not ends then
    check.raise("balance: no split of %d layers into %d stages keeps %s a stage: the best is %s (%d bytes) "
      .. "over; %s", #rows, k, mebibytes(options.limit), mebibytes(excess), excess,
      remedy(costs, k, memory, limits))
  end
  local s = 1
  for i, row in ipairs(rows) do
    if i > ends[s] then s = s + 1 end
    row.stage, row.share = s, total > 0 and row.cost / total or 0
  end
  return ends, setmetatable(rows, table_meta)
end

return balance
