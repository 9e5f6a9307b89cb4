--- Walks Lua source token by token, just far enough to tell code from strings and comments.
-- Invariant: strings (quoted, long brackets of every level) are one token, comments are none, so a
-- rewriter that looks at names and operators alone never touches either.
-- To add a kind of token: a branch in `scan.next`, and a row in spec/syntax_spec.lua.
local scan = {}

local keywords = {}
for word in ([[and break do else elseif end false for function goto if in local nil not or repeat
return then true until while]]):gmatch("%a+") do
  keywords[word] = true
end

--- The reserved words of Lua.
scan.keywords = keywords

--- Where the comment that opens at `pos` ends.
---@param text string
---@param pos integer position of the "--"
---@return integer last position of its last character (a line comment ends before its newline)
function scan.comment_end(text, pos)
  local level = text:match("^%-%-%[(=*)%[", pos)
  if level then
    local _, last = text:find("]" .. level .. "]", pos + 4 + #level, true)
    return last or #text
  end
  return (text:find("\n", pos, true) or #text + 1) - 1
end

--- The first position at or after `pos` that is neither blank nor comment.
local function skip(text, pos)
  while true do
    pos = text:find("%S", pos) or #text + 1
    if text:sub(pos, pos + 1) ~= "--" then return pos end
    pos = scan.comment_end(text, pos) + 1
  end
end

--- Where the quoted string that opens at `pos` ends; an unfinished one ends with its line.
local function quoted_end(text, pos)
  local quote = text:sub(pos, pos)
  local at = pos + 1
  while true do
    at = text:find("[\\\n" .. quote .. "]", at)
    if not at then return #text end
    local c = text:sub(at, at)
    if c == quote then return at end
    if c == "\n" then return at - 1 end
    if text:sub(at + 1, at + 1) == "z" then
      at = text:find("%S", at + 2) or #text + 1
    elseif text:sub(at + 1, at + 2) == "\r\n" then
      at = at + 3
    else
      at = at + 2
    end
  end
end

--- The token at or after `pos`.
---@param text string Lua source
---@param pos integer
---@return "name"|"keyword"|"number"|"string"|"op"|nil kind nil at the end
---@return integer first
---@return integer last
function scan.next(text, pos)
  pos = skip(text, pos)
  if pos > #text then return nil, pos, pos end
  local last = select(2, text:find("^[%a_\128-\255][%w_\128-\255]*", pos))
  if last then return keywords[text:sub(pos, last)] and "keyword" or "name", pos, last end
  last = select(2, text:find("^%.?%d[%w_%.]*", pos))
  if last then return "number", pos, last end
  local c = text:sub(pos, pos)
  if c == "'" or c == '"' then return "string", pos, quoted_end(text, pos) end
  local level = text:match("^%[(=*)%[", pos)
  if level then
    last = select(2, text:find("]" .. level .. "]", pos + 2 + #level, true))
    return "string", pos, last or #text
  end
  last = select(2, text:find("^%.%.%.?", pos))
  return "op", pos, last or pos
end

--- Iterates over the tokens of `text`: kind, first, last.
---@param text string Lua source
---@return fun(): string?, integer, integer
function scan.tokens(text)
  local pos = 1
  return function()
    local kind, first, last = scan.next(text, pos)
    pos = last + 1
    return kind, first, last
  end
end

return scan
