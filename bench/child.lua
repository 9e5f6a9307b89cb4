--- A child process that answers one line for each line it is sent.
-- Invariant: plain Lua: commands go through a pipe that popen gives, answers come back through a FIFO
-- in the folder of the run. An answer that starts with "error", or none, raises with the child's log.
-- A child keeps its own time limits (peer.py); `kill` ends one that has not.
-- To add a kind of child: start(folder, name, command).
local child = {}
child.__index = child

---@param text string
---@return string for the shell
local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

child.quote = quote

--- What a command writes, without the blanks at its end.
---@param command string for the shell
---@return string
function child.output(command)
  local pipe = assert(io.popen(command .. " 2>/dev/null"))
  local text = pipe:read "*a"
  pipe:close()
  return (text:gsub("%s+$", ""))
end

--- Starts a command that reads its standard input.
---@param folder string where the FIFO and the log go
---@param name string unique in the folder
---@param command string for the shell
function child.start(folder, name, command)
  local path = folder .. "/" .. name
  os.execute("rm -f " .. quote(path) .. " && mkfifo " .. quote(path))
  local self = setmetatable({ name = name, path = path, log = path .. ".log" }, child)
  -- What is sent to a child that has ended goes to cat: writing to a pipe without a reader would end us.
  local script = quote(("echo $$ > %s; exec %s"):format(quote(path .. ".pid"), command))
  self.to = assert(io.popen(("sh -c %s > %s 2> %s; cat > %s"):format(script, quote(path), quote(self.log),
    quote(path .. ".rest")), "w"))
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

function child:kill()
  os.execute(("kill -9 $(cat %s) 2> %s"):format(quote(self.path .. ".pid"), quote(self.path .. ".kill")))
end

function child:close()
  self.to:close()
  self.from:close()
end

return child
