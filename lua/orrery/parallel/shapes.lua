-- One run of a net on the meta device, where ops infer shapes and do not run: which ops it makes, on
-- which tensors, and which of them belong to which layer.
-- Invariant: the net is as it was afterwards, and so are the random streams; the record depends on
-- shapes alone.
-- To add a fact of an op: its case in `flops`, or a field in csrc/lua_record.c.
local core = require "orrery.core"
local check = require "orrery.check"

local shapes = {}

---@class orrery.Record
---@field calls table[] in order: {op=, ins=, outs=, in_labels=, out_labels=}, tensors by number
---@field values table[] by number: {sizes..., bytes=, grad=}
---@field index table<orrery.Tensor, integer> numbers of the parameters and buffers
---@field outputs integer[] numbers of the tensors that the net gives
---@field segments {layer: integer, last: integer}[] in order: the calls up to `last` ran in that layer

local function meta_like(t)
  return core.zeros(t:size(), { dtype = t:dtype(), device = "meta" })
end

-- The arguments with meta tensors for tensors; what parallel.whole marks is passed as it is.
local function meta_args(value)
  if core.is_tensor(value) then return meta_like(value) end
  if type(value) ~= "table" then return value end
  local mark = getmetatable(value)
  if mark == require("orrery.parallel.place").Whole then return meta_args(value.value) end
  if mark ~= nil then return value end
  local copy = {}
  for k, inner in pairs(value) do copy[k] = meta_args(inner) end
  return copy
end

local function tensors_in(value, list)
  if core.is_tensor(value) then
    list[#list + 1] = value
  elseif type(value) == "table" and getmetatable(value) == nil then
    local keys = {}
    for k in pairs(value) do keys[#keys + 1] = k end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    for _, k in ipairs(keys) do tensors_in(value[k], list) end
  end
  return list
end

local function state_of(net)
  local list, seen = {}, {}
  local function add(t)
    if not seen[t] then
      seen[t] = true
      list[#list + 1] = t
    end
  end
  for _, t in ipairs(net:parameters()) do add(t) end
  for _, t in net:named_buffers() do add(t) end
  return list
end

-- f() while the tensors are on the meta device; they and the random streams are put back.
local function on_meta(tensors, f)
  local kept, random = {}, core.random_state()
  for k, t in ipairs(tensors) do
    kept[k] = t:detach()
    core.replace_(t, meta_like(kept[k]))
  end
  local ok, message = pcall(f)
  for k, t in ipairs(tensors) do core.replace_(t, kept[k]) end
  core.set_random_state(random)
  return ok, message
end

--- Runs the net on meta tensors like `args` and records its ops.
---@param net orrery.Module not placed
---@param args table the arguments of a call; #args of them
---@param layers? {module: orrery.Module}[] whose calls are told apart
---@return orrery.Record
function shapes.record(net, args, layers)
  local tensors, outputs, handles, segments = state_of(net), {}, {}, {}
  local unpack = table.unpack or unpack
  local inputs = meta_args(args)
  for k, layer in ipairs(layers or {}) do
    handles[k] = layer.module:register_forward_hook(function()
      segments[#segments + 1] = { layer = k, last = core.record_count() }
    end)
  end
  local calls, values, numbers
  local ok, message = on_meta(tensors, function()
    core.record_ops()
    tensors_in({ net:run_placed(unpack(inputs, 1, #args)) }, outputs)
    local known = {}
    for k, t in ipairs(tensors) do known[k] = t end
    for _, t in ipairs(outputs) do known[#known + 1] = t end
    calls, values, numbers = core.record_stop(known)
  end)
  for _, handle in ipairs(handles) do handle:remove() end
  if not ok then
    core.record_stop {}
    check.raise("plan: the net cannot be run on shapes alone, which the plan needs to see what its "
      .. "layers cost: %s", tostring(message))
  end
  local record = { calls = calls, values = values, index = {}, outputs = {}, segments = segments }
  for k, t in ipairs(tensors) do record.index[t] = k end
  for k in ipairs(outputs) do record.outputs[k] = numbers[#tensors + k] end
  return record
end

local function numel(v)
  local n = 1
  for d = 1, #v do n = n * v[d] end
  return n
end

shapes.numel = numel

--- Floating-point operations of a call's forward, a product and a sum counting two; elementwise ops
--- count one an element.
---@param record orrery.Record
---@return number
function shapes.flops(record, call)
  local values = record.values
  local y, a, b = values[call.outs[1] or 0], values[call.ins[1] or 0], values[call.ins[2] or 0]
  if not y then return 0 end
  if call.op == "linear" then return 2 * numel(y) * b[2] end
  if call.op == "matmul" then return 2 * numel(y) * a[#a] end
  if call.op == "conv2d" then return 2 * numel(y) * b[2] * b[3] * b[4] end
  if call.op == "conv2d_grad_x" then return 2 * numel(a) * b[2] * b[3] * b[4] end
  if call.op == "scaled_dot_product_attention_stats" then return 4 * numel(a) * b[3] end
  return numel(y)
end

return shapes
