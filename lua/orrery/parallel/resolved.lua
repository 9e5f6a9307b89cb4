-- The text of a plan once its stages are balanced: counts written behind the children of its model
-- nodes, so that it can be pasted.
-- Invariant: the text differs from the plan's only in counts; a plan whose stages cannot be written as
-- counts (nested model nodes, several chunks a device, counts or names given) keeps its text.
-- To add what is resolved: here, called by Module:plan through apply.lua.
local resolved = {}

-- The parts of "a, b<c, d>" at depth 0.
local function parts_of(text)
  local parts, depth, from = {}, 0, 1
  for at = 1, #text do
    local c = text:sub(at, at)
    if c == "<" then depth = depth + 1
    elseif c == ">" then depth = depth - 1
    elseif c == "," and depth == 0 then
      parts[#parts + 1] = text:sub(from, at - 1)
      from = at + 1
    end
  end
  parts[#parts + 1] = text:sub(from)
  for k, part in ipairs(parts) do parts[k] = part:match "^%s*(.-)%s*$" end
  return parts
end

-- "0..3" as its devices.
local function expanded(parts)
  local list = {}
  for _, part in ipairs(parts) do
    local kind, first, last = part:match "^(%a*:?)(%d+)%.%.%a*:?(%d+)$"
    for k = tonumber(first) or 1, tonumber(last) or 1 do
      list[#list + 1] = first and kind .. k or part
    end
  end
  return list
end

-- The end of the options of a node's inner text: the ';' at depth 0, or nil.
local function options_at(text)
  local depth = 0
  for at = 1, #text do
    local c = text:sub(at, at)
    if c == "<" then depth = depth + 1
    elseif c == ">" then depth = depth - 1
    elseif c == ";" and depth == 0 then return at end
  end
  return nil
end

local function write(text, counts)
  local kind, inner = text:match "^(%a+)<(.*)>$"
  if not kind then return text end
  local at = options_at(inner)
  local options = at and inner:sub(at) or ""
  local parts = parts_of(at and inner:sub(1, at - 1) or inner)
  if kind == "model" then
    parts = expanded(parts)
    if #parts ~= #counts then return nil end
    for k, part in ipairs(parts) do parts[k] = part .. ": " .. counts[k] end
  else
    for k, part in ipairs(parts) do
      parts[k] = write(part, counts)
      if not parts[k] then return nil end
    end
  end
  return kind .. "<" .. table.concat(parts, ", ") .. options .. ">"
end

--- The plan's text with counts[s] layers on stage s, or the text as it is.
---@param text string
---@param counts integer[]
---@return string
function resolved.text(text, counts)
  if not text:find("model<", 1, true) or text:find("model<[^>]*model<") or text:find("[^;]: ") then
    return text
  end
  return write(text, counts) or text
end

return resolved
