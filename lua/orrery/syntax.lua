--- The literal plan form, `parallel.data<0,1>(net)`, rewritten to plain Lua: `parallel.data"<0,1>"(net)`.
-- Requiring this module puts a package searcher behind `package.preload` that rewrites modules loaded
-- afterwards; `orrery script.lua` and the REPL load their chunks with `syntax.load`.
-- Invariant: line numbers never change, the text between '<' and '>' reaches the plan parser as written
-- (comments in it become blanks, so columns hold), and code without the form is returned untouched.
-- To add a node kind: a row in `kinds`; the grammar inside belongs to the parser in csrc/plan.c.
local scan = require "orrery.scan"

local syntax = {}

local kinds = { data = true, model = true, tensor = true }
local devices = { cpu = true, cuda = true, meta = true }

--- Whether the word at `pos` of a plan is a Lua variable and not a device or a node.
local function is_variable(text, word, after)
  if word:find("^%d") then return word:find("%.%.[%a_]") ~= nil end
  if devices[word] then return false end
  local kind = word:match("^parallel%.(%a+)$") or word:match("%.parallel%.(%a+)$") or word
  return not (kinds[kind] and text:find("^%s*<", after))
end

--- Walks plan text from its '<'.
---@param text string
---@param open integer position of the '<'
---@return integer? close position of the matching '>'; nil where plan text ends before one
---@return integer stop position at which the walk ended
---@return boolean variable whether an item names a variable
local function walk_plan(text, open)
  local in_options, depth, expecting, variable = { false }, 1, true, false
  local pos = open + 1
  while pos <= #text do
    local c = text:sub(pos, pos)
    local word = text:match("^[%w_][%w_%.]*", pos)
    local last = pos
    if word then
      last = pos + #word - 1
      if scan.keywords[word] then return nil, pos, variable end
      if expecting and is_variable(text, word, last + 1) then variable = true end
      expecting = false
    elseif c == '"' or c == "'" then
      last = text:find("[" .. c .. "\n]", pos + 1)
      if not last or text:sub(last, last) == "\n" then return nil, pos, variable end
      expecting = false
    elseif text:find("^%-%-", pos) then
      last = scan.comment_end(text, pos)
    elseif c == "<" then
      depth, expecting = depth + 1, true
      in_options[depth] = false
    elseif c == ">" then
      if depth == 1 then return pos, pos, variable end
      depth, expecting = depth - 1, false
    elseif c == "," then
      expecting = not in_options[depth]
    elseif c == ";" then
      in_options[depth], expecting = true, false
    elseif not (c:find("[%s%.:%*%?%-%[%]/]") or c == "=" and in_options[depth]) then
      return nil, pos, variable
    end
    pos = last + 1
  end
  return nil, pos, variable
end

--- The Lua expressions between the '<' at `open` and a '>' on the same line, and where that '>' is.
local function expressions(text, open)
  local body, close = text:match("^<([%w_%.,: %(%)%[%]#%+%-%*/]-)()>", open)
  if not body then return nil end
  for word in body:gmatch("[%a_][%w_]*") do
    if scan.keywords[word] then return nil end
  end
  if body:gsub("%b()", ""):find("[()]") then return nil end
  return body, close
end

--- Whether what follows the '>' at `close` makes it the operator of a comparison.
local function compares(text, close)
  if text:find("^=", close + 1) then return true end
  local after = text:match("^[ \t]*([^\n]*)", close + 1)
  local word = after:match("^[%a_][%w_]*")
  if word then return word == "not" or word == "nil" or not scan.keywords[word] end
  return after:find("^[%d\"'{#~]") ~= nil or after:find("^%-[^%-]") ~= nil
end

local function position(text, pos)
  local line, start = 1, 1
  for newline in text:gmatch("()\n") do
    if newline >= pos then break end
    line, start = line + 1, newline + 1
  end
  return line, pos - start + 1
end

--- Decides what the '<' after `parallel.<kind>` means.
-- Written without blanks around '<' (`parallel.data<0`) the literal is meant: what is wrong in it is an
-- error. Written with blanks it is a comparison unless it reads as a whole literal.
---@return integer? close end of a literal; nil for a comparison
---@return string? mistake what is wrong in a literal
local function classify(text, kind, open)
  local tight = not text:find("^%s", open - 1) and text:find("^%S", open + 1) ~= nil
  local close, stop, variable = walk_plan(text, open)
  if close and not variable then
    if text:find("^=", close + 1) or not tight and compares(text, close) then return nil end
    return close
  end
  local literal = "parallel." .. kind
  if variable then
    local body, last = expressions(text, open)
    if not (tight and body) or compares(text, last) then return nil end
    return nil, ("%s<%s> names a variable: the literal form takes devices and nodes only; write %s(%s)")
      :format(literal, body, literal, body)
  end
  if not tight or scan.keywords[text:match("^%a+", stop) or ""] then return nil end
  return nil, ("'>' is missing after %s< (a comparison is written with blanks, %s < x)%s")
    :format(literal, literal, stop > #text and " near <eof>" or "")
end

--- The plan text from `open` to `close` with its comments blanked.
local function plan_text(text, open, close)
  local parts, pos = {}, open
  while pos <= close do
    local first = text:find("--", pos, true)
    if not first or first > close then break end
    local last = scan.comment_end(text, first)
    parts[#parts + 1] = text:sub(pos, first - 1)
    parts[#parts + 1] = text:sub(first, last):gsub("[^\n]", " ")
    pos = last + 1
  end
  parts[#parts + 1] = text:sub(pos, close)
  return table.concat(parts)
end

--- Rewrites every literal plan in `text` to plain Lua; lines stay where they are.
---@param text string Lua source
---@param chunkname? string named in errors, as for `load` ("@file", "=name")
---@return string? rewritten nil when a literal is wrong
---@return string|integer found the message "file:line: …, column N"; else the number of literals
---@return integer? line of the first literal
function syntax.rewrite(text, chunkname)
  if not text:find("parallel", 1, true) or text:sub(1, 1) == "\27" then return text, 0 end
  local parts, done, found = {}, 1, 0
  local a, b, c, first_line -- a, b, c: the three tokens before this one
  for token, first, last in scan.tokens(text) do
    local word = text:sub(first, last)
    if first >= done then
      if word == "<" and token == "op" and a == "parallel" and b == "." and kinds[c]
        and not text:find("^[<=]", last + 1) then
        local close, mistake = classify(text, c, first)
        if mistake then
          local line, column = position(text, first)
          local name = (chunkname or "=?"):gsub("^[@=]", "")
          local near = mistake:match(" near <eof>$") or ""
          mistake = mistake:sub(1, #mistake - #near)
          return nil, ("%s:%d: %s, column %d%s"):format(name, line, mistake, column, near)
        elseif close then
          parts[#parts + 1] = text:sub(done, first - 1)
          parts[#parts + 1] = ("%q"):format(plan_text(text, first, close))
          done, found = close + 1, found + 1
          first_line = first_line or position(text, first)
        end
      end
      a, b, c = b, c, token == "string" and "" or word
    end
  end
  parts[#parts + 1] = text:sub(done)
  return table.concat(parts), found, first_line
end

--- As Lua's `load`, for text that may hold literal plans.
---@param text string Lua source, or a precompiled chunk
---@param chunkname? string default `=(load)`
---@param mode? "t"|"b"|"bt"
---@param env? table the chunk's globals
---@return function? chunk
---@return string? message "file:line: …" when it does not compile
function syntax.load(text, chunkname, mode, env)
  chunkname = chunkname or "=(load)"
  local form = text:sub(1, 1) == "\27" and "b" or "t"
  if mode and not mode:find(form, 1, true) then
    return nil, ("cannot load a %s chunk: the mode is '%s'")
      :format(form == "b" and "binary" or "text", mode)
  end
  local plain, message = syntax.rewrite(text, chunkname)
  if not plain then return nil, message end
  local load51 = rawget(_G, "loadstring")
  if not load51 then
    if env then return load(plain, chunkname, form, env) end
    return load(plain, chunkname, form)
  end
  local chunk, reason = load51(plain, chunkname)
  if chunk and env then rawget(_G, "setfenv")(chunk, env) end
  return chunk, reason
end

--- The text of a source file; a first line that starts with '#' becomes a comment.
local function read_source(path)
  local file, message = io.open(path, "rb")
  if not file then return nil, message end
  local text, reason = file:read("*a")
  file:close()
  if text and text:sub(1, 1) == "#" then text = "--" .. text end
  return text, reason and ("cannot read %s: %s"):format(path, reason)
end

--- As Lua's `loadfile`, for a file that may hold literal plans.
---@param path string
---@param mode? "t"|"b"|"bt"
---@param env? table
---@return function? chunk
---@return string? message
function syntax.loadfile(path, mode, env)
  local text, message = read_source(path)
  if not text then return nil, message end
  return syntax.load(text, "@" .. path, mode, env)
end

local function find_module(name)
  local file = name:gsub("%.", "/")
  for template in package.path:gmatch("[^;]+") do
    local path = template:gsub("%?", (file:gsub("%%", "%%%%")))
    local text = read_source(path)
    if text then return path, text end
  end
end

--- A package searcher: claims the modules that hold a literal plan and leaves all others alone.
---@param name string
---@return function? loader
---@return string? path
function syntax.searcher(name)
  local path, text = find_module(name)
  if not path then return nil end
  local plain, found = syntax.rewrite(text, "@" .. path)
  if plain and found == 0 then return nil end
  local chunk, message = syntax.load(text, "@" .. path)
  if not chunk then
    error(("error loading module '%s' from file '%s':\n\t%s"):format(name, path, message), 0)
  end
  return chunk, path
end

--- Raises when the chunk that requires this module holds a literal itself: Lua has compiled it as a
-- comparison by then.
local function refuse_late()
  local level = 3 -- past this function and this chunk
  local info = debug.getinfo(level, "S")
  while info and info.what == "C" do
    level = level + 1
    info = debug.getinfo(level, "S")
  end
  if not info then return end
  local source = info.source
  local text = source:sub(1, 1) == "@" and read_source(source:sub(2))
    or not source:find("^[@=]") and source
  if not text then return end
  local plain, found, line = syntax.rewrite(text)
  if not plain then line = found:match("^%?:(%d+):") end
  if line then
    error(("%s:%d: too late here: this chunk was compiled before orrery.syntax was loaded, so its "
      .. "parallel.data<...> is a comparison; run it with `orrery %s`, require it from a chunk that "
      .. "has loaded orrery.syntax, or write parallel.data \"<...>\""):format(info.short_src, line,
      source:sub(1, 1) == "@" and source:sub(2) or "script.lua"), 0)
  end
end

refuse_late()
local searchers = rawget(package, "searchers") or rawget(package, "loaders")
table.insert(searchers, 2, syntax.searcher)

return syntax
