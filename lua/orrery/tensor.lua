-- Tensor methods and functions that are made of others, and the text of a tensor.
-- Invariant: everything here goes through the core's ops, so it is placed and differentiable as
-- they are. To add a method: a function in `methods`; a function of the module: in `functions`.
local core = require "orrery.core"
local check = require "orrery.check"
local moved = require "orrery.moved"

local unpack = table.unpack or unpack
local methods, functions = {}, {}

-- ---- grad mode ----

local function restore(was, ok, ...)
  core.set_grad_mode(was)
  if not ok then error((...), 0) end
  return ...
end

--- Calls f without recording for backward; gives what f returns. Errors pass, the mode is put back.
---@param f fun(...): any
---@return any
function functions.no_grad(f, ...)
  return restore(core.set_grad_mode(false), pcall(f, ...))
end

--- Calls f with recording on, inside no_grad too.
---@param f fun(...): any
---@return any
function functions.enable_grad(f, ...)
  return restore(core.set_grad_mode(true), pcall(f, ...))
end

--- A differentiable function of your own: forward(ctx, ...) gives one or more tensors; backward(ctx,
--- g, ...) gets their gradients (nil where none came) and gives one gradient, or nil, for every
--- tensor argument of forward in order. ctx is a table for what backward needs.
---@param definition {forward: function, backward: function}
---@return fun(...): orrery.Tensor
function functions.custom(definition)
  if type(definition) ~= "table" or type(definition.forward) ~= "function"
    or type(definition.backward) ~= "function" then
    check.raise("custom: needs {forward = function(ctx, ...), backward = function(ctx, g, ...)}")
  end
  return function(...)
    local ctx, inputs = {}, {}
    for k = 1, select("#", ...) do
      local value = select(k, ...)
      if core.is_tensor(value) then inputs[#inputs + 1] = value end
    end
    local outputs = { functions.no_grad(definition.forward, ctx, ...) }
    for k, y in ipairs(outputs) do
      if not core.is_tensor(y) then
        check.raise("custom: result %d of forward is a %s, not a tensor", k, type(y))
      end
      for _, x in ipairs(inputs) do
        if rawequal(x, y) then outputs[k] = core.no_grad(core.clone, y) end
      end
    end
    if core.grad_mode() then
      core.record(inputs, outputs, function(...) return definition.backward(ctx, ...) end)
    end
    return unpack(outputs)
  end
end

--- Calls f with the gradient of this tensor when it is known; what f returns replaces it. Hooks run
--- in the order they were registered.
---@param f fun(g: orrery.Tensor): orrery.Tensor?
---@return {remove: fun()} handle
function methods.register_hook(x, f)
  if type(f) ~= "function" then check.raise("register_hook: needs a function, got %s", type(f)) end
  local before = core.get_hook(x)
  local active = true
  core.set_hook(x, function(g)
    local changed = before and before(g) or g
    return active and f(changed) or changed
  end)
  if x.is_leaf then moved.changed() end
  return {
    remove = function()
      active = false
      if x.is_leaf then moved.changed() end
    end,
  }
end

-- ---- shapes ----

--- Parts of at most `size` along dimension d (default 1); a table of sizes gives those parts.
---@param size integer|integer[]
---@param d? integer
---@return orrery.Tensor[]
function methods.split(x, size, d)
  d = d or 1
  local n, first, parts = x:size(d), 1, {}
  local sizes = size
  if type(size) == "number" then
    if size < 1 then check.raise("split: parts must have at least 1, got %g", size) end
    sizes = {}
    for at = 1, n, size do sizes[#sizes + 1] = math.min(size, n - at + 1) end
    if n == 0 then sizes[1] = 0 end
  end
  local total = 0
  for _, s in ipairs(sizes) do total = total + s end
  if total ~= n then
    check.raise("split: parts of %d in all from dimension %d, which has %d", total, d, n)
  end
  for k, s in ipairs(sizes) do
    parts[k] = x:narrow(d, first, s)
    first = first + s
  end
  return parts
end

--- n parts along dimension d (default 1), sizes differing by at most 1, larger first; fewer parts
--- where the dimension has fewer.
---@param n integer
---@param d? integer
---@return orrery.Tensor[]
function methods.chunk(x, n, d)
  d = d or 1
  check.count("chunk", "the number of parts", n)
  local size = x:size(d)
  local base, more, sizes = math.floor(size / n), size % n, {}
  for k = 1, n do
    local s = base + (k <= more and 1 or 0)
    if s > 0 or k == 1 then sizes[k] = s end
  end
  return x:split(sizes, d)
end

--- Joins tensors of one shape along a new dimension d (default 1).
---@param list orrery.Tensor[]
---@param d? integer
---@return orrery.Tensor
function functions.stack(list, d)
  local parts = {}
  for k, x in ipairs(list) do parts[k] = x:unsqueeze(d or 1) end
  if #parts == 0 then check.raise("stack: needs at least one tensor") end
  return core.cat(parts, d or 1)
end

--- A view of this tensor with y's shape.
function methods.view_as(x, y) return x:view(y:size()) end
--- This tensor with y's shape, copied where a view is not possible.
function methods.reshape_as(x, y) return x:reshape(y:size()) end
--- This tensor repeated to y's shape.
function methods.expand_as(x, y) return x:expand(y:size()) end

-- ---- text ----

local function number_text(v)
  if type(v) == "boolean" then return tostring(v) end
  if v ~= v then return "nan" end
  if v == math.huge then return "inf" end
  if v == -math.huge then return "-inf" end
  if v == math.floor(v) and math.abs(v) < 1e15 then return string.format("%d", v) end
  return (string.format("%.4g", v))
end

local edge = 3 -- rows shown at each end of a long dimension

-- The rows of x that are shown: first and last ones, with a gap between.
local function shown(n)
  local rows = {}
  if n <= 2 * edge + 2 then
    for k = 1, n do rows[k] = k end
  else
    for k = 1, edge do rows[k] = k end
    rows[edge + 1] = false
    for k = edge, 1, -1 do rows[#rows + 1] = n - k + 1 end
  end
  return rows
end

local function trim(x)
  local n = x:size(1)
  if n <= 2 * edge + 2 then return x end
  return core.cat({ x:narrow(1, 1, edge), x:narrow(1, n - edge + 1, edge) }, 1)
end

-- Cuts every dimension to its ends, so that printing a large tensor gathers little of it on the
-- host; the caller knows the true sizes.
local function ends(x)
  for _ = 1, x:dim() do
    local order = {}
    x = trim(x)
    for d = 2, x:dim() do order[#order + 1] = d end
    order[#order + 1] = 1
    x = x:permute(order)
  end
  return x
end

local function width_of(values, width)
  if type(values) ~= "table" then return math.max(width, #number_text(values)) end
  for _, v in ipairs(values) do width = width_of(v, width) end
  return width
end

local function lines(values, sizes, depth, indent, width, out)
  if type(values) ~= "table" then
    out[#out + 1] = number_text(values)
    return
  end
  local rows, at, last = shown(sizes[depth]), 0, depth == #sizes
  out[#out + 1] = "["
  for k, row in ipairs(rows) do
    if k > 1 then out[#out + 1] = last and " " or "\n" .. (" "):rep(indent + 1) end
    if row then
      at = at + 1
      if last then
        local text = number_text(values[at])
        out[#out + 1] = (" "):rep(width - #text) .. text
      else
        lines(values[at], sizes, depth + 1, indent + 1, width, out)
      end
    else
      out[#out + 1] = "..."
    end
  end
  out[#out + 1] = "]"
end

local function size_text(sizes)
  local texts = {}
  for k, n in ipairs(sizes) do texts[k] = string.format("%d", n) end
  return "(" .. table.concat(texts, ", ") .. ")"
end

--- Values (the ends of long dimensions), shape, dtype and layout.
local function text(x)
  local sizes = x:size()
  local head = size_text(sizes) .. " " .. x:dtype() .. " " .. x:layout()
  if x:device() == "meta" then return "tensor " .. head end
  local values = functions.no_grad(function()
    return (x:numel() == 0 and x or x:dim() == 0 and x or ends(x)):totable()
  end)
  local out = {}
  lines(values, sizes, 1, 0, width_of(values, 1), out)
  if x.requires_grad then head = head .. " requires_grad" end
  return table.concat(out) .. "\n" .. head
end

--- Adds all of this to the core's tensors and to `module`.
local function install(module)
  local meta = core.tensor_metatable()
  for name, f in pairs(methods) do meta.__methods[name] = f end
  for name, f in pairs(functions) do
    core[name] = f
    module[name] = f
  end
  meta.__tostring = text
end

return { install = install }
