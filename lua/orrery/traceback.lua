--- Calls a function and, when it fails, tells where in the user's own files: library frames are hidden.
-- Invariant: the frames shown lie between the call made here and the error, and none is in the
-- directory of this file.
-- To hide more: extend `is_hidden`.
local traceback = {}

local unpack = table.unpack or unpack
local most = 20 -- frames shown
local directory = debug.getinfo(1, "S").source:match("^(@.*[/\\])[^/\\]*$") or "@"

local function is_hidden(info)
  return info.what == "C" or info.what == "tail" or info.source:sub(1, #directory) == directory
end

local function describe(info)
  local place = ("%s:%d: in "):format(info.short_src, info.currentline)
  if info.what == "main" then return place .. "main chunk" end
  if info.name then return ("%sfunction '%s'"):format(place, info.name) end
  return ("%sfunction <line %d>"):format(place, info.linedefined)
end

local function frames()
  local lines, level = {}, 3
  local info = debug.getinfo(level, "Slnf")
  while info and info.func ~= traceback.call do
    if not is_hidden(info) then
      if #lines == most then
        lines[#lines + 1] = "\t..."
        break
      end
      lines[#lines + 1] = "\t" .. describe(info)
    end
    level = level + 1
    info = debug.getinfo(level, "Slnf")
  end
  return lines
end

--- The words of an error value.
---@param value any
---@return string
function traceback.message(value)
  if type(value) == "string" then return value end
  local mt = debug.getmetatable(value)
  if type(value) == "number" or mt and rawget(mt, "__tostring") then return tostring(value) end
  return ("(the error is a %s value)"):format(type(value))
end

--- Calls `f(...)`.
---@param f function
---@return boolean ok
---@return any ... the results; after a failure the message with its traceback, then the message alone
function traceback.call(f, ...)
  local arguments, count = { ... }, select("#", ...)
  local function pack(...) return { n = select("#", ...), ... } end
  local results = pack(xpcall(function() return f(unpack(arguments, 1, count)) end,
    function(value)
      local message, lines = traceback.message(value), frames()
      if #lines > 0 then
        return { message, message .. "\nstack traceback:\n" .. table.concat(lines, "\n") }
      end
      return { message, message }
    end))
  if results[1] then return unpack(results, 1, results.n) end
  local failure = results[2]
  if type(failure) ~= "table" then failure = { tostring(failure), tostring(failure) } end
  return false, failure[2], failure[1]
end

return traceback
