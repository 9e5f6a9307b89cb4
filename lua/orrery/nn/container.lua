-- Layers made of layers, and those that only rearrange: Sequential, ModuleList, Residual,
-- Flatten, Identity.
-- Invariant: the children of a list are its array fields, so their order is their position.
-- To add one: a class that sets its children as fields.
local core = require "orrery.core"
local check = require "orrery.check"
local modules = require "orrery.nn.module"

local class, is_module = modules.class, modules.is_module

local function as_module(who, position, value)
  if type(value) == "function" then return modules.from(value) end
  if not is_module(value) then
    check.raise("%s: argument %d must be a module or a function, got %s", who, position, type(value))
  end
  return value
end

--- Adds a module (or a function of one tensor) at the end of a list.
local function add(self, value)
  local position = #self + 1
  self[position] = as_module(self._class, position, value)
  return self
end

--- Runs its modules one after another; `net[i]` is the i-th and `#net` their number. A function
--- among the arguments becomes a module: nn.Sequential(nn.Linear(4, 2), function(x) return x *
--- 2 end).
---@param ... orrery.Module|function
local Sequential = class("Sequential", function(self, ...)
  for i = 1, select("#", ...) do self[i] = as_module("Sequential", i, (select(i, ...))) end
end)

Sequential.add = add

function Sequential:forward(x)
  for i = 1, #self do x = self[i](x) end
  return x
end

--- A list of modules that are children of the one that holds the list; it has no forward.
---@param list? (orrery.Module|function)[]
local ModuleList = class("ModuleList", function(self, list)
  for i = 1, #(list or {}) do self[i] = as_module("ModuleList", i, list[i]) end
end)

ModuleList.add = add

--- y = x + m(x) (He et al. 2016).
---@param inner orrery.Module|function
local Residual = class("Residual", function(self, inner)
  self.inner = as_module("Residual", 1, inner)
end)

function Residual:forward(x) return x + self.inner(x) end

--- Joins the dimensions from `first` (default 2) to the last into one.
---@param first? integer
local Flatten = class("Flatten", function(self, first)
  self.first = check.count("Flatten", "the first dimension", first or 2)
end)

function Flatten:forward(x) return core.flatten(x, self.first) end
function Flatten:describe() return self.first == 2 and "" or tostring(self.first) end

local Identity = class("Identity")
function Identity:forward(...) return ... end -- luacheck: ignore self

return {
  Sequential = Sequential,
  ModuleList = ModuleList,
  Residual = Residual,
  Flatten = Flatten,
  Identity = Identity,
}
