-- Argument checks shared by the pure-Lua layers (nn, optim), and errors at the user's line.
-- Invariant: every error raised here names the first caller outside the library, never a
-- library line.
-- To add a check: a function that takes the caller's name first (`who`), as it appears in the
-- message.
local core = require "orrery.core"

local check = {}

local floor, format, getinfo = math.floor, string.format, debug.getinfo

-- The folder of this file, as chunk names spell it: frames below it belong to the library.
local home = getinfo(1, "S").source:match("^(.*)check%.lua$")

--- Raises an error at the first caller outside the library.
---@param pattern string as for string.format
---@param ... any
function check.raise(pattern, ...)
  local message = select("#", ...) > 0 and format(pattern, ...) or pattern
  local level = 2
  while true do
    local info = getinfo(level, "Sl")
    if not info then break end
    if info.currentline > 0 and info.source:sub(1, #home) ~= home then break end
    level = level + 1
  end
  error(message, level)
end

--- Raises what pcall or a coroutine gave, at the user's line where the message names none.
function check.again(message)
  if type(message) == "string" and not message:find "^[^:\n]+:%d+: " then check.raise("%s", message) end
  error(message, 0)
end

local raise = check.raise

--- A whole number of at least `least` (default 1).
---@return integer
function check.count(who, what, value, least)
  least = least or 1
  if type(value) ~= "number" or floor(value) ~= value or value < least then
    raise("%s: %s must be a whole number of at least %d, got %s", who, what, least,
      type(value) == "number" and format("%g", value) or type(value))
  end
  return value
end

--- A number in [low, high]; a bound may be nil.
---@return number
function check.number(who, what, value, low, high)
  if type(value) ~= "number" then
    raise("%s: %s must be a number, got %s", who, what, type(value))
  elseif value ~= value or (low and value < low) or (high and value > high) then
    raise("%s: %s must be %s, got %g", who, what,
      low and high and format("from %g to %g", low, high)
        or low and format("at least %g", low)
        or high and format("at most %g", high)
        or "a number", value)
  end
  return value
end

--- A pair of whole numbers given as one number or as {rows, columns}.
---@return integer, integer
function check.pair(who, what, value, least)
  if type(value) == "table" then
    if #value ~= 2 then raise("%s: %s must be a number or a pair, got %d values", who, what, #value) end
    return check.count(who, what, value[1], least), check.count(who, what, value[2], least)
  end
  check.count(who, what, value, least)
  return value, value
end

--- An options table (or nil) with no other keys than `known`, so that a typo is not ignored.
---@param who string
---@param options table|nil
---@param known table<string, boolean>
---@return table options
function check.options(who, options, known)
  if options == nil then return {} end
  if type(options) ~= "table" then
    raise("%s: options must be a table, got %s", who, type(options))
  end
  local unknown
  for key in pairs(options) do
    key = tostring(key)
    if not known[key] and (not unknown or key < unknown) then unknown = key end
  end
  if unknown then
    local names = {}
    for name in pairs(known) do names[#names + 1] = name end
    table.sort(names)
    raise("%s: unknown option '%s' (known: %s)", who, unknown, table.concat(names, ", "))
  end
  return options
end

--- One of the words of a set, for messages such as reduction "mean"|"sum"|"none".
---@return string
function check.word(who, what, value, words)
  for i = 1, #words do
    if words[i] == value then return value end
  end
  return raise("%s: %s must be one of '%s', got %s", who, what, table.concat(words, "', '"),
    type(value) == "string" and "'" .. value .. "'" or type(value))
end

--- A tensor.
---@return orrery.Tensor
function check.tensor(who, what, value)
  if not core.is_tensor(value) then raise("%s: %s must be a tensor, got %s", who, what, type(value)) end
  return value
end

--- The text of a tensor's shape: "(64, 10)".
---@return string
function check.shape(tensor)
  return "(" .. table.concat(tensor:size(), ", ") .. ")"
end

--- Whether two tensors have one shape; makes no garbage.
---@return boolean
function check.same_shape(a, b)
  local dims = a:dim()
  if dims ~= b:dim() then return false end
  for d = 1, dims do
    if a:size(d) ~= b:size(d) then return false end
  end
  return true
end

return check
