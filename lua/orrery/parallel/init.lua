-- Plans: the three coats of the plan language, and what helps to see a plan work.
-- Invariant: text, literal and constructors are one language, read by one parser.
-- To add a function: here, its work in a file beside this one.
local core = require "orrery.core"
local check = require "orrery.check"
local Plan = require "orrery.parallel.plan"
local batch = require "orrery.parallel.place"

-- parallel.data "<0,1>", parallel.data(0, 1, {bucket = ...}), and what says why parallel.data < 0 is
-- not a plan.
local function constructor(kind)
  local function refuse()
    check.raise("parallel.%s<...> is the literal form: run the script with `orrery`, or load it after "
      .. "require \"orrery.syntax\"; plain Lua has parallel.%s \"<0,1>\" and parallel.%s(0, 1)",
      kind, kind, kind)
  end
  return setmetatable({}, {
    __call = function(_, first, ...)
      if type(first) == "string" and first:find("<", 1, true) then return Plan.parse(first, kind) end
      return Plan.make(kind, first, ...)
    end,
    __lt = refuse,
    __le = refuse,
    __tostring = function() return "parallel." .. kind end,
  })
end

local parallel = {
  data = constructor "data",
  model = constructor "model",
  tensor = constructor "tensor",
  whole = batch.whole,
}

--- The collectives that f queued, summed by kind and axis. `bytes` are those of the whole values; `moved`
--- is what each device sends of them around a ring of n: 2(n-1)/n in an all-reduce, (n-1)/n in an
--- all-gather or a reduce-scatter.
---@param f fun()
---@return {op: string, axis: string, bytes: integer, count: integer, moved: number}[]
function parallel.trace(f)
  core.trace_start()
  local ok, message = pcall(f)
  local rows = core.trace_stop()
  if not ok then error(message, 0) end
  return rows
end

--- Names of the parameters that got no gradient since zero_grad.
---@param net orrery.Module
---@return string[]
function parallel.unused(net)
  local names = {}
  for name, p in net:named_parameters() do
    if p.requires_grad and not p.grad then names[#names + 1] = name end
  end
  return names
end

--- How a pipeline of k stages would be cut: the stages are runs of layers (children of the net after
--- nested Sequentials are flattened), and the largest cost of a stage is the least possible.
---@param net orrery.Module not placed
---@param x any an example batch
---@param k integer
---@param options? {limit?: number, time?: boolean} limit: bytes that a stage may hold of parameters,
---  gradients and activations. time: measure the layers' forward instead of counting operations and bytes
---@return integer[] ends the last layer of each stage
---@return table[] rows one a layer: {name=, flops=, bytes=, parameters=, activations=, cost=, share=,
---  stage=}; prints as a table
function parallel.balance(net, x, k, options)
  return require("orrery.parallel.balance").show(net, x, k, options)
end

--- Draws where a placed net stands and what moves: see picture.lua. Prints as text.
---@param net orrery.Module
---@param x? orrery.Tensor an example batch, on which forward and backward run once
---@param options? {file?: string} file: where to write it as SVG
---@return {text: string, svg: string, devices: string[], blocks: table[]}
function parallel.picture(net, x, options)
  return require("orrery.parallel.picture")(net, x, options)
end

--- Trains a small net on one device and under the plan (default: data over all devices), compares
--- losses and weights, and sends a tensor between every two devices and back. Prints what it finds;
--- raises where something differs.
---@param plan? orrery.Plan|string
---@return boolean
function parallel.selftest(plan) return require("orrery.parallel.selftest")(plan) end

return setmetatable(parallel, { __call = function(_, text) return Plan.parse(text) end })
