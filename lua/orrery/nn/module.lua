-- nn.Module: what every layer is. A module is a table; the modules and tensors among its fields
-- are its children and parameters. Nothing is registered by hand.
-- Invariant: children and parameters are listed by position (array fields), then by creation
-- serial, so the order is one fact of the script: it does not depend on pairs(), time or the
-- collector.
-- To add a layer: `local Block = class("Block", function(self, dim) ... end)` and `function
-- Block:forward(x)`.
local core = require "orrery.core"
local check = require "orrery.check"
local moved = require "orrery.moved"

local raise = check.raise
local scopes_on, push_scope, pop_scope = core.scopes_on, core.push_scope, core.pop_scope
local is_tensor = core.is_tensor
local unpack = table.unpack or unpack

---@class orrery.Module
---@field training boolean true in training, false after :eval()
local Module = {}
Module._name = false
Module._plan = false
Module._stage = false
Module._resolved = false
Module._hooks = false
Module._buffers = false
Module._note = false

-- Creation serials. Modules keep theirs in `_serial`; tensors are userdata, so a weak table
-- holds theirs. A tensor with a serial is a parameter, also while it is frozen.
local next_serial = 0
local tensor_serial = setmetatable({}, { __mode = "k" })

local function new_serial()
  next_serial = next_serial + 1
  return next_serial
end

local function is_module(value)
  return type(value) == "table" and rawget(value, "_serial") ~= nil
end

local function adopt(tensor)
  if not tensor_serial[tensor] then tensor_serial[tensor] = new_serial() end
  return tensor
end

--- Makes a tensor a parameter: it asks for a gradient, and modules that hold it list it.
---@param tensor orrery.Tensor a leaf of any shape
---@return orrery.Tensor the same tensor
local function parameter(tensor)
  if not is_tensor(tensor) then
    raise("nn.parameter: expected a tensor, got %s", type(tensor))
  end
  if not tensor.requires_grad then tensor.requires_grad = true end
  return adopt(tensor)
end

local function is_parameter(value)
  if not is_tensor(value) then return false end
  if tensor_serial[value] then return true end
  return value.requires_grad and value.is_leaf
end

-- Listing -------------------------------------------------------------------------------------

local function by_order(a, b)
  if a.index ~= b.index then return a.index < b.index end
  if a.serial ~= b.serial then return a.serial < b.serial end
  return a.name < b.name
end

-- The fields of one module that `want` accepts: array fields by position, then the others by
-- serial.
local function fields_of(module, want)
  local list, fresh = {}, nil
  for key, value in pairs(module) do
    if want(value) then
      local number = type(key) == "number"
      local entry = { name = tostring(key), value = value, index = number and key or math.huge }
      entry.serial = rawget(tensor_serial, value) or (type(value) == "table" and value._serial)
      if not entry.serial then
        fresh = fresh or {}
        fresh[#fresh + 1] = entry
        entry.serial = 0
      end
      list[#list + 1] = entry
    end
  end
  if fresh then
    table.sort(fresh, by_order)
    for _, entry in ipairs(fresh) do
      adopt(entry.value)
      entry.serial = tensor_serial[entry.value]
    end
  end
  table.sort(list, by_order)
  return list
end

-- Calls visit(module, path) for the module and all below it, each module once, in order.
local function walk(module, visit, path, seen)
  if seen[module] then return end
  seen[module] = true
  visit(module, path)
  for _, entry in ipairs(fields_of(module, is_module)) do
    walk(entry.value, visit, path == "" and entry.name or path .. "." .. entry.name, seen)
  end
end

-- Every (path, tensor) of parameters, or of buffers; a shared tensor comes as often as it is
-- named.
local function each_tensor(module, buffers, visit)
  walk(module, function(owner, path)
    local prefix = path == "" and "" or path .. "."
    if buffers then
      for _, name in ipairs(owner._buffers or {}) do
        if owner[name] then visit(prefix .. name, owner[name]) end
      end
    else
      for _, entry in ipairs(fields_of(owner, is_parameter)) do
        if not owner:is_buffer(entry.name) then visit(prefix .. entry.name, entry.value) end
      end
    end
  end, "", {})
end

local function iterate_once(module, buffers)
  local names, tensors, seen = {}, {}, {}
  each_tensor(module, buffers, function(name, tensor)
    if not seen[tensor] then
      seen[tensor] = true
      names[#names + 1], tensors[#tensors + 1] = name, tensor
    end
  end)
  local i = 0
  return function()
    i = i + 1
    return names[i], tensors[i]
  end
end

--- The parameters of the module and all below it, each once even when shared.
---@return orrery.Tensor[]
function Module:parameters()
  local list = {}
  for _, tensor in iterate_once(self, false) do list[#list + 1] = tensor end
  return list
end

--- Iterates over name, parameter; names are dotted: "fc1.weight". A shared parameter comes
--- once.
---@return fun(): string, orrery.Tensor
function Module:named_parameters() return iterate_once(self, false) end

--- Iterates over name, buffer: state that is not trained, such as running statistics.
---@return fun(): string, orrery.Tensor
function Module:named_buffers() return iterate_once(self, true) end

--- The direct children, in order.
---@return orrery.Module[]
function Module:children()
  local list = {}
  for _, entry in ipairs(fields_of(self, is_module)) do list[#list + 1] = entry.value end
  return list
end

--- Iterates over name, child.
---@return fun(): string, orrery.Module
function Module:named_children()
  local list, i = fields_of(self, is_module), 0
  return function()
    i = i + 1
    if list[i] then return list[i].name, list[i].value end
  end
end

--- The module and all below it, each once, parents first.
---@return orrery.Module[]
function Module:modules()
  local list = {}
  walk(self, function(module) list[#list + 1] = module end, "", {})
  return list
end

--- Iterates over path, module; the path of the module itself is "".
---@return fun(): string, orrery.Module
function Module:named_modules()
  local paths, list, i = {}, {}, 0
  walk(self, function(module, path) list[#list + 1], paths[#list + 1] = module, path end, "", {})
  return function()
    i = i + 1
    return paths[i], list[i]
  end
end

--- Calls fn(module) for the module and all below it.
---@return orrery.Module self
function Module:apply(fn)
  for _, module in ipairs(self:modules()) do fn(module) end
  return self
end

--- The names of parameters that ask for a gradient and have none: what the last backward did
--- not reach.
---@return string[]
function Module:unused_parameters()
  local list = {}
  for name, tensor in self:named_parameters() do
    if tensor.requires_grad and not tensor.grad then list[#list + 1] = name end
  end
  return list
end

-- Modes, state --------------------------------------------------------------------------------

--- Sets training mode for the module and all below it.
---@param on? boolean default true
---@return orrery.Module self
function Module:train(on)
  if on == nil then on = true end
  for _, module in ipairs(self:modules()) do moved.switch(module, on) end
  return self
end

--- Sets evaluation mode: dropout is off, batch norm uses its running statistics.
---@return orrery.Module self
function Module:eval() return self:train(false) end

--- Drops the gradients of all parameters.
function Module:zero_grad()
  for _, tensor in iterate_once(self, false) do tensor.grad = nil end
end

--- Parameters stop asking for gradients, and drop those they have, so optimisers leave them
--- alone.
---@return orrery.Module self
function Module:freeze()
  for _, tensor in iterate_once(self, false) do
    tensor.grad = nil
    tensor.requires_grad = false
  end
  moved.changed()
  return self
end

--- Undoes freeze.
---@return orrery.Module self
function Module:unfreeze()
  for _, tensor in iterate_once(self, false) do tensor.requires_grad = true end
  moved.changed()
  return self
end

--- Sets a field that is state but not a parameter: saved, moved and placed, never trained.
---@param name string
---@param tensor orrery.Tensor
---@return orrery.Tensor tensor
function Module:buffer(name, tensor)
  if not is_tensor(tensor) then
    raise("%s: buffer '%s' must be a tensor, got %s", self._class, tostring(name), type(tensor))
  end
  local names = rawget(self, "_buffers") or {}
  local known = false
  for _, other in ipairs(names) do known = known or other == name end
  if not known then names[#names + 1] = name end
  rawset(self, "_buffers", names)
  rawset(self, name, tensor)
  return tensor
end

function Module:is_buffer(name)
  for _, other in ipairs(self._buffers or {}) do
    if other == name then return true end
  end
  return false
end

--- Moves or converts parameters and buffers in place: their identity is kept, so an optimiser
--- made before still updates them. Gradients are dropped. A dtype applies to floating tensors
--- only.
---@param target string a dtype ("f64") or a device ("cpu:1")
---@return orrery.Module self
function Module:to(target)
  local floating = { f64 = true, f32 = true, f16 = true, bf16 = true }
  for _, buffers in ipairs { false, true } do
    for _, tensor in iterate_once(self, buffers) do
      if not floating[target] or floating[tensor:dtype()] then
        tensor.grad = nil
        core.replace_(tensor, tensor:detach():to(target))
      end
    end
  end
  moved.note()
  return self
end

--- A snapshot of parameters and buffers as logical tensors on the host: training on does not
--- change it, and it does not depend on the plan. A shared tensor stands under each of its
--- names.
---@return table<string, orrery.Tensor>
function Module:state()
  local state, copies = {}, {}
  local function put(name, tensor)
    copies[tensor] = copies[tensor] or core.snapshot(tensor)
    state[name] = copies[tensor]
  end
  each_tensor(self, false, put)
  each_tensor(self, true, put)
  return state
end

local function complaints(own, order, given, strict)
  local missing, unexpected, wrong = {}, {}, {}
  for _, name in ipairs(order) do
    local tensor = given[name]
    if tensor == nil then
      missing[#missing + 1] = name
    elseif not is_tensor(tensor) then
      wrong[#wrong + 1] = name .. " is a " .. type(tensor)
    elseif not check.same_shape(own[name], tensor) then
      wrong[#wrong + 1] = ("%s is %s, expected %s"):format(name, check.shape(tensor), check.shape(own[name]))
    end
  end
  for name in pairs(given) do
    if own[name] == nil then unexpected[#unexpected + 1] = tostring(name) end
  end
  table.sort(unexpected)
  local lines = {}
  if strict and #missing > 0 then lines[#lines + 1] = "missing: " .. table.concat(missing, ", ") end
  if strict and #unexpected > 0 then lines[#lines + 1] = "unexpected: " .. table.concat(unexpected, ", ") end
  if #wrong > 0 then lines[#lines + 1] = "wrong: " .. table.concat(wrong, "; ") end
  return #lines > 0 and table.concat(lines, "\n  ") or nil
end

--- Loads a state. All is checked before anything is written, so a failing call changes nothing.
---@param state table<string, orrery.Tensor>
---@param options? {strict?: boolean} strict=false allows missing and unexpected names
---@return orrery.Module self
function Module:load_state(state, options)
  if type(state) ~= "table" then raise("load_state: expected a table, got %s", type(state)) end
  local strict = check.options("load_state", options, { strict = true }).strict ~= false
  local own, order = {}, {}
  local function put(name, tensor)
    own[name] = tensor
    order[#order + 1] = name
  end
  each_tensor(self, false, put)
  each_tensor(self, true, put)
  local text = complaints(own, order, state, strict)
  if text then raise("load_state: the state does not fit %s\n  %s", self._class, text) end
  core.no_grad(function()
    for _, name in ipairs(order) do
      if state[name] then own[name]:copy_(state[name]) end
    end
  end)
  return self
end

-- Calling -------------------------------------------------------------------------------------

--- Calls f(module, inputs, output) after each forward; a non-nil return value replaces the
--- output. `inputs` is a table of the arguments; `output` is the value, or a table when forward
--- returns several.
---@param f fun(module: orrery.Module, inputs: table, output: any): any
---@return {remove: fun(self)} handle
function Module:register_forward_hook(f)
  if type(f) ~= "function" then raise("register_forward_hook: expected a function, got %s", type(f)) end
  local hooks = { unpack(self._hooks or {}) }
  local entry = { call = f }
  hooks[#hooks + 1] = entry
  rawset(self, "_hooks", hooks)
  moved.changed()
  return {
    remove = function()
      local rest = {}
      for _, other in ipairs(self._hooks or {}) do
        if other ~= entry then rest[#rest + 1] = other end
      end
      rawset(self, "_hooks", #rest > 0 and rest)
      moved.changed()
    end,
  }
end

local function pack(...)
  return { n = select("#", ...), ... }
end

local function forward_hooked(self, hooks, ...)
  local outputs = pack(self:forward(...))
  local inputs = pack(...)
  for _, hook in ipairs(hooks) do
    local several = outputs.n > 1
    local replaced = hook.call(self, inputs, several and outputs or outputs[1])
    if replaced ~= nil then
      if several and type(replaced) == "table" then
        outputs = replaced
        outputs.n = outputs.n or #replaced
      else
        outputs = { n = 1, replaced }
      end
    end
  end
  return unpack(outputs, 1, outputs.n)
end

local function leave_scope(ok, ...)
  pop_scope()
  if not ok then error((...), 0) end
  return ...
end

-- Names the layer while anomaly mode or a profile wants to know; the scope is left on errors as
-- well.
local function forward_scoped(self, ...)
  push_scope(self._name or self._class)
  if self._hooks then return leave_scope(pcall(forward_hooked, self, self._hooks, ...)) end
  return leave_scope(pcall(self.forward, self, ...))
end

local function run(self, ...)
  if scopes_on() then return forward_scoped(self, ...) end
  if self._hooks then return forward_hooked(self, self._hooks, ...) end
  return self:forward(...)
end

-- The module called last, for messages of memory; weak, so that it keeps none alive.
local called = setmetatable({}, { __mode = "v" })

core.watch_layer(function()
  local module = called[1]
  return module and ("or after layer '%s' (%s)"):format(module._name or "net", module._class)
end)

-- A layer on a stage of a plan: what follows runs there.
local function call_on_stage(self, stage, ...)
  local enter = require("orrery.parallel.stages").enter
  if self._recompute then return require("orrery.parallel.recompute")(self, run, enter(stage, ...)) end
  return run(self, enter(stage, ...))
end

--- Calls the module on arguments that its plan has placed already.
function Module:run_placed(...) return run(self, ...) end

-- The one seam to plans: a placed module has its arguments placed first, a layer enters its stage.
local function call(self, ...)
  local plan, stage = self._plan, self._stage
  if stage then return call_on_stage(self, stage, ...) end
  called[1] = self
  if plan then return run(self, plan:place_args(self, ...)) end
  if self._hooks or scopes_on() then return run(self, ...) end
  return self:forward(...)
end

--- The plan that placed this module, resolved: with the balance of stages that was found; or nil.
function Module:plan() return self._resolved or self._plan or nil end

--- Overrides what a tensor<> plan does with the layer's weight, before the plan is applied: "out"
--- splits what the layer gives (columns, output channels), "in" what it takes (rows, input channels, a
--- vocabulary), "none" leaves it whole.
---@param how "out"|"in"|"none"
---@return orrery.Module self
function Module:split(how) return require("orrery.parallel.split").set(self, how) end

function Module:forward()
  raise("%s has no forward: define function %s:forward(x) ... end", self._class, self._class)
end

-- Printing ------------------------------------------------------------------------------------

--- The constructor's arguments as text; layers give their own.
---@return string
function Module:describe() return "" end -- luacheck: ignore self

local function render(module, lines, indent, label, seen)
  local text = module:describe()
  local head = indent .. label .. module._class
  if seen[module] then
    lines[#lines + 1] = head .. " (shared)"
    return
  end
  seen[module] = true
  lines[#lines + 1] = head .. (text ~= "" and "(" .. text .. ")" or "")
    .. (module._note and "  -- " .. module._note or "")
  for _, entry in ipairs(fields_of(module, is_parameter)) do
    local tensor = entry.value
    lines[#lines + 1] = ("%s    %s %s %s %s%s"):format(indent, entry.name, check.shape(tensor),
      tensor:dtype(), tostring(tensor:layout()), tensor.requires_grad and "" or " frozen")
  end
  for _, entry in ipairs(fields_of(module, is_module)) do
    render(entry.value, lines, indent .. "  ", entry.name .. ": ", seen)
  end
end

local function to_text(module)
  local lines, count = {}, 0
  render(module, lines, "", "", {})
  for _, tensor in ipairs(module:parameters()) do count = count + tensor:numel() end
  lines[#lines + 1] = ("%d parameter%s"):format(count, count == 1 and "" or "s")
  return table.concat(lines, "\n")
end

-- Classes -------------------------------------------------------------------------------------

-- Setting a field: a leaf that asks for a gradient becomes a parameter, a child learns its
-- name. A value that would hide a method is refused, because the next call of that method would
-- fail far from here.
local function set_field(self, key, value)
  if type(value) ~= "function" and type(Module[key]) == "function" then
    raise("%s: a field cannot be called '%s', which is a method", self._class, tostring(key))
  end
  if is_parameter(value) then
    adopt(value)
  elseif is_module(value) and not value._name then
    rawset(value, "_name", tostring(key))
  end
  rawset(self, key, value)
end

local function construct(class, ...)
  local self = setmetatable({ _serial = new_serial(), training = true }, class._instance)
  if class._init then class._init(self, ...) end
  return self
end

--- Makes a class of layers. Calling it makes a module and runs `init(self, ...)`, which sets
--- fields:
---
---     local Block = nn.class("Block", function(self, dim)
---       self.norm = nn.LayerNorm(dim)
---       self.fc = nn.Linear(dim, dim)
---       self.scale = nn.parameter(orrery.ones(1))
---     end)
---     function Block:forward(x) return x + self.fc(self.norm(x)):relu() * self.scale end
---     local block = Block(64)
---
---@param name string shown by tostring and in errors
---@param init? fun(self: orrery.Module, ...)
---@param base? table a class whose methods are inherited (its init is not run)
---@return table class
local function class(name, init, base)
  if type(name) ~= "string" then raise("nn.class: the name must be a string, got %s", type(name)) end
  local new = { _class = name, _init = init }
  new._instance = { __index = new, __newindex = set_field, __call = call, __tostring = to_text }
  return setmetatable(new, { __index = base or Module, __call = construct })
end

-- Whether a function's first parameter is called self. PUC Lua 5.1 tells names only of running
-- functions, so a coroutine enters the function under a hook that stops it before its first
-- line.
local function takes_self(fn)
  local ok, name = pcall(debug.getlocal, fn, 1)
  if not ok then
    local thread = coroutine.create(fn)
    debug.sethook(thread, function()
      name = debug.getlocal(2, 1)
      error("stop")
    end, "c")
    coroutine.resume(thread)
  end
  return name == "self"
end

local Plain = class("Module")

--- A module from a function or from a table of fields.
---   nn.Module(function(x) return x:mean(2) end)                no state of its own
---   nn.Module(function(self, x) return self.fc(x) end)         first parameter called self: the module,
---                                                              whose fields (net.fc = ...) are set later
---   nn.Module{ fc = nn.Linear(4, 2), forward = function(self, x) return self.fc(x) end }
---@param body function|table
---@return orrery.Module
local function from(body)
  local module = Plain()
  if type(body) == "function" then
    if takes_self(body) then
      rawset(module, "forward", body)
    else
      rawset(module, "forward", function(_, ...) return body(...) end)
    end
  elseif type(body) == "table" and not is_module(body) then
    local keys = {}
    for key in pairs(body) do keys[#keys + 1] = key end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    for _, key in ipairs(keys) do module[key] = body[key] end
  else
    raise("nn.Module: expected a function or a table of fields, got %s",
      is_module(body) and "a module" or type(body))
  end
  return module
end

return {
  Module = Module,
  class = class,
  from = from,
  parameter = parameter,
  is_module = is_module,
}
