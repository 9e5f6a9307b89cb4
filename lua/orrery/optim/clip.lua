-- Gradient clipping.
-- Invariant: the norm counts each logical element once, whatever the layouts, and is taken
-- before anything changes.
-- To add one: gather with `gradients`, then one multi-tensor call.
local core = require "orrery.core"
local check = require "orrery.check"
local host = require "orrery.host"

local clip = {}

local function gradients(params)
  if type(params) == "table" and type(params.parameters) == "function" then
    params = params:parameters()
  end
  if core.is_tensor(params) then params = { params } end
  if type(params) ~= "table" then
    check.raise("clip: expected a list of parameters or a module, got %s", type(params))
  end
  local list = {}
  for i = 1, #params do
    local grad = params[i].grad
    if grad then list[#list + 1] = grad end
  end
  return list
end

local function clip_norm(params, max, p)
  local list = gradients(params)
  if #list == 0 then return 0 end
  local norm = core.grad_norm(list, p):item()
  local factor = max / (norm + 1e-6)
  if factor < 1 then core.scale_(list, factor) end
  return norm
end

--- Scales all gradients by min(1, max / (norm + 1e-6)), norm being that of all of them as one
--- vector (Pascanu et al. 2013, Alg. 1). Waits for the norm.
---@param params orrery.Tensor[]|orrery.Module those without a gradient do not count
---@param max number the largest norm allowed
---@param options? {p?: number} the order of the norm, default 2; math.huge is the largest
---  magnitude
---@return number norm before the clipping; 0 when there is no gradient
function clip.clip_grad_norm(params, max, options)
  check.number("clip_grad_norm", "max", max, 0)
  options = check.options("clip_grad_norm", options, { p = true })
  return host.run("aside", clip_norm, params, max, options.p or 2)
end

--- Limits every element of every gradient to [-max, max].
---@param params orrery.Tensor[]|orrery.Module
---@param max number
function clip.clip_grad_value(params, max)
  check.number("clip_grad_value", "max", max, 0)
  local list = gradients(params)
  core.no_grad(function()
    for i = 1, #list do
      local limited = list[i]:clamp(-max, max)
      -- Partial sums are added up first, so that the gradient then stands elsewhere.
      if limited:layout() == list[i]:layout() then list[i]:copy_(limited)
      else core.replace_(list[i], limited) end
    end
  end)
end

return clip
