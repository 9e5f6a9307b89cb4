--- What is known of the terminal: whether there is one, its width, a clock, the line editor.
-- Invariant: works without the core, as one that has no terminal and a clock of whole seconds.
-- To add a question: a function here over a field of `core.line` (csrc/lua_line.c).
local terminal = {}

--- The core's table of terminal functions, or nil without the core.
---@return table?
function terminal.line()
  local ok, core = pcall(require, "orrery.core")
  return ok and type(core) == "table" and core.line or nil
end

--- Whether a file descriptor is a terminal.
---@param fd integer 0 standard input, 1 output, 2 errors
---@return boolean
function terminal.isatty(fd)
  local line = terminal.line()
  return line ~= nil and line.isatty ~= nil and line.isatty(fd)
end

--- Columns of the terminal: the variable COLUMNS, or 80.
---@return integer
function terminal.width()
  return tonumber(os.getenv("COLUMNS") or "") or 80
end

--- A clock for durations.
---@return fun(): number seconds
function terminal.clock()
  local line = terminal.line()
  return line and line.now or os.time
end

return terminal
