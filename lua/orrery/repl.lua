--- The interactive session: reads chunks of one or more lines, runs them, prints their values.
-- Invariant: whatever a chunk does, the session goes on until its input ends; variables that a chunk
-- declares at its top level, local or not, live in the session's table and not in _G.
-- To change how values look: `repl.format`. To change what completes: orrery/complete.lua.
local complete = require "orrery.complete"
local scan = require "orrery.scan"
local syntax = require "orrery.syntax"
local terminal = require "orrery.terminal"
local traceback = require "orrery.traceback"

local repl = {}
local Repl = {}
Repl.__index = Repl

local unpack = table.unpack or unpack
local shown = 20 -- entries of a table
local history_lines = 1000

--- The names a session starts with: orrery, nn, optim, parallel, data, and Lua's own.
---@return table env
function repl.session()
  local orrery = require "orrery"
  local env = { orrery = orrery, nn = orrery.nn, optim = orrery.optim,
    parallel = orrery.parallel, data = orrery.data }
  return setmetatable(env, { __index = _G })
end

-- values --------------------------------------------------------------------------------------------

local function has_tostring(value)
  local mt = debug.getmetatable(value)
  return type(mt) == "table" and rawget(mt, "__tostring") ~= nil
end

local function brief(value)
  if type(value) == "string" then
    if #value > 60 then value = value:sub(1, 57) .. "..." end
    return (("%q"):format(value):gsub("\\\n", "\\n"))
  end
  if type(value) == "table" and not has_tostring(value) then return "{...}" end
  local text = tostring(value)
  return text:match("^[^\n]*") .. (text:find("\n", 1, true) and " ..." or "")
end

local key_ranks = { string = 1, number = 2 }

local function key_order(a, b)
  local rank_a, rank_b = key_ranks[type(a)] or 3, key_ranks[type(b)] or 3
  if rank_a ~= rank_b then return rank_a < rank_b end
  if rank_a < 3 then return a < b end
  return tostring(a) < tostring(b)
end

local function format_table(value)
  local entries, length, keys = {}, 0, {}
  while rawget(value, length + 1) ~= nil do length = length + 1 end
  for key in next, value do
    local in_list = type(key) == "number" and key >= 1 and key <= length and key % 1 == 0
    if not in_list then keys[#keys + 1] = key end
  end
  table.sort(keys, key_order)
  for i = 1, math.min(length, shown) do entries[i] = brief(rawget(value, i)) end
  for _, key in ipairs(keys) do
    if #entries >= shown then break end
    local name = type(key) == "string" and key:find("^[%a_][%w_]*$") and not scan.keywords[key]
      and key or "[" .. brief(key) .. "]"
    entries[#entries + 1] = name .. " = " .. brief(rawget(value, key))
  end
  local rest = length + #keys - #entries
  if rest > 0 then entries[#entries + 1] = ("... %d more"):format(rest) end
  local text = "{" .. table.concat(entries, ", ") .. "}"
  if #text > 76 then text = "{\n  " .. table.concat(entries, ",\n  ") .. "\n}" end
  return text
end

--- How a value is printed: tables one level deep, whatever has __tostring (tensors, modules, plans)
--- through it.
---@param value any
---@return string
function repl.format(value)
  if type(value) == "table" and not has_tostring(value) then return format_table(value) end
  if type(value) == "string" then return (("%q"):format(value):gsub("\\\n", "\\n")) end
  return tostring(value)
end

-- chunks --------------------------------------------------------------------------------------------

local opens = { ["function"] = 1, ["do"] = 1, ["if"] = 1, ["repeat"] = 1, ["end"] = -1, ["until"] = -1 }

--- The attributes of 5.4's `local x <const>` after `pos` made blank, and whether a value follows.
local function declared(text, pos)
  local blanks = {}
  local kind, first, last = scan.next(text, pos)
  while kind == "name" do
    kind, first, last = scan.next(text, last + 1)
    if kind and text:sub(first, last) == "<" then
      local close = text:find(">", last, true)
      if not close then return nil end
      blanks[#blanks + 1] = { first, close }
      kind, first, last = scan.next(text, close + 1)
    end
    if not kind or text:sub(first, last) ~= "," then break end
    pos = last + 1
    kind, first, last = scan.next(text, pos)
  end
  local assigned = kind and text:sub(first, last) == "="
  return blanks, assigned, first
end

--- `text` with its top-level locals made variables of the session; positions stay.
---@param text string Lua source
---@return string
function repl.persist_locals(text)
  local parts, done, depth = {}, 1, 0
  local function put(upto, replacement, resume)
    parts[#parts + 1] = text:sub(done, upto) .. replacement
    done = resume
  end
  for kind, first, last in scan.tokens(text) do
    local word = text:sub(first, last)
    if kind == "keyword" then
      if word == "local" and depth == 0 then
        put(first - 1, "     ", last + 1)
        local after, _, stop = scan.next(text, last + 1)
        local is_function = after == "keyword" and text:sub(stop - 7, stop) == "function"
        local blanks, assigned, behind = declared(text, last + 1)
        if blanks and not is_function then
          for _, blank in ipairs(blanks) do
            put(blank[1] - 1, (" "):rep(blank[2] - blank[1] + 1), blank[2] + 1)
          end
          if not assigned then put(behind - 1, "= nil ", behind) end
        end
      end
      depth = depth + (opens[word] or 0)
    end
  end
  return table.concat(parts) .. text:sub(done)
end

local function is_incomplete(message)
  return message ~= nil and message:find("near '?<eof>'?$") ~= nil
end

--- `text` without the ';' that ends it, and whether there was one.
local function strip_semicolon(text)
  local kind, first, last
  for k, f, l in scan.tokens(text) do kind, first, last = k, f, l end
  if kind == "op" and text:sub(first, last) == ";" then
    return text:sub(1, first - 1) .. " " .. text:sub(last + 1), true
  end
  return text, false
end

--- Compiles what was typed, as an expression if it is one.
---@param text string
---@param env table
---@return function? chunk
---@return string|boolean problem "incomplete", a message, or whether values are to stay unprinted
function repl.compile(text, env)
  local body, quiet = strip_semicolon(text:gsub("^%s*=", "", 1))
  local expression, reason = syntax.load("return " .. body, "=stdin", "t", env)
  if expression then
    -- called as an argument and not by `return`, so that the chunk's line stays on the stack
    return syntax.load("return (function(...) return ... end)(" .. body .. "\n)", "=stdin", "t", env),
      quiet
  end
  local chunk, message = syntax.load(repl.persist_locals(text), "=stdin", "t", env)
  if chunk then return chunk, quiet end
  if is_incomplete(message) or is_incomplete(reason) then return nil, "incomplete" end
  return nil, message
end

-- the session ---------------------------------------------------------------------------------------

---@class orrery.repl.options
---@field read fun(prompt: string): string|nil|false a line; nil at the end; false to drop the chunk
---@field write fun(text: string)
---@field env? table the session's names; default `repl.session()`
---@field remember? fun(chunk: string) called with each complete chunk

--- A session over functions that read and write.
---@param options orrery.repl.options
---@return table session with `run`
function repl.new(options)
  local self = setmetatable({}, Repl)
  self.read, self.write = options.read, options.write
  self.remember = options.remember or function() end
  self.env = options.env or repl.session()
  return self
end

--- Reads until a chunk is complete: its text, the chunk or nil, and quiet or the message.
-- nil at the end of input, false after Ctrl-C.
function Repl:read_chunk()
  local text
  while true do
    local line = self.read(text and ">> " or "> ")
    if line == nil and text then
      local _, message = syntax.load(text, "=stdin", "t", self.env)
      return text, nil, message
    end
    if not line then return line end
    text = text and text .. "\n" .. line or line
    local chunk, problem = repl.compile(text, self.env)
    if chunk or problem ~= "incomplete" then return text, chunk, problem end
  end
end

--- Runs a chunk and prints its values or its error.
function Repl:evaluate(chunk, quiet)
  local jit = rawget(_G, "jit")
  if jit then jit.off(chunk, true) end -- compiled loops never look whether Ctrl-C was typed
  local function pack(...) return { n = select("#", ...), ... } end
  local results = pack(traceback.call(chunk))
  if not results[1] then
    local trace, message = results[2], results[3]
    self.write((message:find("interrupted$") and message or trace) .. "\n")
    return
  end
  if quiet or results.n == 1 then return end
  local shown_values = pack(traceback.call(function()
    local texts = {}
    for i = 2, results.n do texts[#texts + 1] = repl.format(results[i]) end
    return unpack(texts)
  end))
  if shown_values[1] then
    self.write(table.concat(shown_values, "\n", 2) .. "\n")
  else
    self.write("cannot print the value: " .. shown_values[2] .. "\n")
  end
end

--- Runs the session to the end of its input.
function Repl:run()
  while true do
    local text, chunk, problem = self:read_chunk()
    if text == nil then return end
    if text then
      if text:find("%S") then self.remember(text) end
      if chunk then self:evaluate(chunk, problem) else self.write(tostring(problem) .. "\n") end
    end
  end
end

--- Reads with io.read; a read that Ctrl-C ended gives false.
local function plain_reader(line, with_prompt)
  return function(prompt)
    if line then line.interrupt_clear() end
    if with_prompt then
      io.stdout:write(prompt)
      io.stdout:flush()
    end
    local text = io.read()
    if text == nil and line and line.interrupt_pending() then
      line.interrupt_clear()
      io.stdout:write("\n")
      return false
    end
    return text
  end
end

--- The session of the `orrery` command: line editing and history on a terminal, plain lines elsewhere.
---@param banner string printed on a terminal
function repl.main(banner)
  local line, on_terminal = terminal.line(), terminal.isatty(0)
  local options = { env = repl.session() }
  function options.write(text)
    io.stdout:write(text)
    io.stdout:flush()
  end
  options.read = plain_reader(line, on_terminal)
  if line then line.interrupt_install() end
  local home, save = os.getenv("HOME"), function() end
  if on_terminal then
    options.write(banner .. "\n")
    if line.edit(line) then
      options.read = line.read
      line.set_completer(function(word) return complete(options.env, word) end)
      function options.remember(text) line.add_history((text:gsub("\n", " "))) end
      if home then
        local path = home .. "/.orrery_history"
        line.load_history(path)
        function save() line.save_history(path, history_lines) end
      end
    end
  end
  repl.new(options):run()
  save()
  if on_terminal then options.write("\n") end
end

return repl
