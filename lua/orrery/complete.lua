--- Completion of names, fields and methods, for the REPL's tab key.
-- Invariant: looking never calls the user's code, but for the __index of userdata (tensor fields).
-- To make an object's fields known whose __index is a function: put their table (or tables) in its
-- metatable under `__methods`.
local scan = require "orrery.scan"

--- Calls visit(key, value) for each string key reachable from `object` through tables.
local function each_field(object, visit)
  local seen = {}
  local function walk(t)
    if type(t) ~= "table" or seen[t] then return end
    seen[t] = true
    for key, value in next, t do
      if type(key) == "string" then visit(key, value) end
    end
    local mt = debug.getmetatable(t)
    if mt then walk(rawget(mt, "__index")) end
    if mt then walk(rawget(mt, "__methods")) end
  end
  walk(object)
  local mt = type(object) ~= "table" and debug.getmetatable(object)
  if mt then
    walk(rawget(mt, "__index"))
    walk(rawget(mt, "__methods"))
  end
end

local function field(object, name)
  if type(object) == "userdata" then
    local ok, value = pcall(function() return object[name] end)
    return ok and value or nil
  end
  local found
  each_field(object, function(key, value)
    if key == name and found == nil then found = value end
  end)
  return found
end

--- The ways to complete `word`.
---@param env table the session's names
---@param word string what stands before the cursor: names joined by '.' or ':'
---@return string[] words whole words, sorted
return function(env, word)
  local path, separator, prefix = word:match("^(.-)([.:]?)([%w_]*)$")
  local object, head = env, path .. separator
  if separator ~= "" then
    if path == "" then return {} end
    for name in path:gmatch("[^.:]+") do
      object = field(object, name)
      if object == nil then return {} end
    end
  elseif path ~= "" then
    return {}
  end
  local found, words = {}, {}
  local function offer(name, value)
    local callable = type(value) == "function"
    if name:sub(1, #prefix) == prefix and name:find("^[%a_][%w_]*$") and not found[name]
      and not scan.keywords[name] and (separator ~= ":" or callable)
      and (name:sub(1, 1) ~= "_" or prefix ~= "") then
      found[name] = true
      words[#words + 1] = head .. name
    end
  end
  each_field(object, offer)
  if separator == "" then
    for keyword in pairs(scan.keywords) do
      if keyword:sub(1, #prefix) == prefix then words[#words + 1] = keyword end
    end
  end
  table.sort(words)
  return words
end
