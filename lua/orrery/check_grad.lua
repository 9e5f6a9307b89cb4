-- gradcheck: analytic gradients against central differences.
-- Invariant: inputs are left as they were. To change a tolerance: the options of gradcheck.
local core = require "orrery.core"
local check = require "orrery.check"

local unpack = table.unpack or unpack

-- A fixed weight for every element of every output, so that one backward checks all of them.
local function weighted(outputs)
  local total
  for k, y in ipairs(outputs) do
    local floating = core.is_tensor(y) and y:dtype():find("f", 1, true)
    if floating then
      local w = core.arange(1, y:numel(), { dtype = y:dtype() }):mul(0.37 * k):sin():add(1.1)
      local part = (y * w:view(y:size())):sum()
      total = total and total + part or part
    end
  end
  return total
end

--- Compares the gradient of f with central differences, (f(x + e) - f(x - e)) / 2 e, element by
--- element; true, or an error with the element, the numeric and the analytic value. Inputs that
--- require grad should be f64.
---@param f fun(...): orrery.Tensor
---@param inputs orrery.Tensor[]
---@param options? {eps?: number, rtol?: number, atol?: number}
---@return boolean
local function gradcheck(f, inputs, options)
  options = options or {}
  local eps, rtol, atol = options.eps or 1e-6, options.rtol or 1e-5, options.atol or 1e-7
  local wanted = {}
  for k, x in ipairs(inputs) do
    if core.is_tensor(x) and x.requires_grad then
      if x:dtype() ~= "f64" then check.raise("gradcheck: input %d is %s; use f64", k, x:dtype()) end
      wanted[#wanted + 1] = k
    end
  end
  if #wanted == 0 then check.raise("gradcheck: no input requires grad") end
  local function value() return weighted({ f(unpack(inputs)) }) end
  local loss = value()
  if not (loss and loss.requires_grad) then check.raise("gradcheck: no result requires grad") end
  local targets = {}
  for k, index in ipairs(wanted) do targets[k] = inputs[index] end
  local grads = core.grad(loss, targets)
  for k, index in ipairs(wanted) do
    local x = inputs[index]
    local flat = x:detach():view(-1)
    local analytic = grads[k] and grads[k]:full():reshape(-1):totable() or {}
    for i = 1, x:numel() do
      local was = flat[i]:item()
      local numeric = core.no_grad(function()
        flat[i] = was + eps
        local up = value():item()
        flat[i] = was - eps
        local down = value():item()
        flat[i] = was
        return (up - down) / (2 * eps)
      end)
      local a = analytic[i] or 0
      local difference = math.abs(numeric - a)
      if difference > atol + rtol * math.abs(numeric) or difference ~= difference then
        check.raise("gradcheck: input %d, element %d: numeric %.10g, analytic %.10g", index, i,
          numeric, a)
      end
    end
  end
  return true
end

--- Adds gradcheck to `module`.
local function install(module) module.gradcheck = gradcheck end

return { install = install }
