--- A child process that answers one line for each line it is sent.
-- Invariant: plain Lua: commands go through a pipe that popen gives, answers come back through a FIFO
-- in the folder of the run. An answer that starts with "error", or none, raises with the child's log.
-- To add a kind of child: start(folder, name, command).
local child = {}
child.__index = child

---@param text string
---@return string for the shell
local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

child.quote = quote

--- Starts a command that reads its standard input.
---@param folder string where the FIFO and the log go
---@param name string unique in the folder
---@param command string for the shell
function child.start(folder, name, command)
  local path = folder .. "/" .. name
  os.execute("rm -f " .. quote(path) .. " && mkfifo " .. quote(path))
  local self = setmetatable({ name = name, path = path, log = path .. ".log" }, child)
  self.to = assert(io.popen(("exec %s > %s 2> %s"):format(command, quote(path), quote(self.log)), "w"))
  self.from = assert(io.open(path, "r"))
  return self
end

function child:send(line)
  self.to:write(line, "\n")
  self.to:flush()
end

function child:receive()
  local line = self.from:read "*l"
  if line and line:sub(1, 5) ~= "error" then return line end
  local log = io.open(self.log, "r")
  local text = log and log:read "*a" or ""
  if log then log:close() end
  error(("bench: %s: %s\n%s"):format(self.name, line or "ended", text:sub(-2000)), 0)
end

function child:ask(line)
  self:send(line)
  return self:receive()
end

function child:close()
  self.to:close()
  self.from:close()
end

return child
