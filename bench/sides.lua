--- The processes of the bench and the sides that they run.
-- Invariant: a process starts when a side first needs it; `close` ends all that were started. What a
-- process of PyTorch fails at is raised as {who=, message=}: its sides can be left out.
-- To add who may run a side: a function in `makers` that gives {time=, n=, loss=, drop=}.
local child = require "child"

local quote = child.quote
local sides = {}
sides.__index = sides

-- Kinds of two gloo processes of one thread, each with the words for it in the table.
sides.gloo = { ddp = "DDP", tensor_parallel = "tensor parallel", pipelining = "pipelining" }

local Failure = { __tostring = function(failure) return failure.message end }

---@param folder string for FIFOs and logs
---@param bench string the folder of these files
---@param interpreter string command of Lua
---@param python {command: string}? how PyTorch's Python is called
---@param clock fun(): number seconds
---@param commands? table<string, string> of processes that are started in another way, by who
function sides.new(folder, bench, interpreter, python, clock, commands)
  return setmetatable({ folder = folder, bench = bench, lua = interpreter, python = python, clock = clock,
    commands = commands or {}, running = {}, serial = 0 }, sides)
end

-- The processes of one kind, started at need: one, or the two of a gloo group.
function sides:group(who)
  if self.running[who] then return self.running[who] end
  local group = {}
  local peer = self.python and self.python.command .. " " .. quote(self.bench .. "peer.py")
  if self.commands[who] then
    group[1] = child.start(self.folder, who, self.commands[who])
  elseif who == "orrery" then
    group[1] = child.start(self.folder, who, self.lua .. " " .. quote(self.bench .. "worker.lua"))
  elseif who == "pytorch" then
    group[1] = child.start(self.folder, who, peer)
  elseif sides.gloo[who] then
    local store = self.folder .. "/store-" .. who
    os.remove(store)
    for rank = 0, 1 do
      group[rank + 1] = child.start(self.folder, who .. rank,
        ("%s %d 2 %s"):format(peer, rank, quote(store)))
    end
  else
    group[1] = child.start(self.folder, who, quote(self.folder .. "/control.bin"))
  end
  self.running[who] = group
  return group
end

-- Sends one line to every process of one kind; their answers.
local function ask(self, who, line)
  local answers = {}
  local ok, problem = pcall(function()
    local group = self:group(who)
    for _, process in ipairs(group) do process:send(line) end
    for k, process in ipairs(group) do answers[k] = process:receive() end
  end)
  if not ok then error(setmetatable({ who = who, message = tostring(problem) }, Failure), 0) end
  return answers
end

function sides:ask(who, line) return ask(self, who, line)[1] end

--- Ends the processes of one kind, or all.
---@param who? string
---@param kill? boolean without waiting for what they do
function sides:close(who, kill)
  for name, group in pairs(self.running) do
    if not who or name == who then
      for _, process in ipairs(group) do
        if kill then process:kill() end
      end
      for _, process in ipairs(group) do process:close() end
      self.running[name] = nil
    end
  end
end

--- How much two threads of arithmetic do in the time of one.
function sides:scale() return tonumber(self:ask("control", "scale")) end

local function worker_side(self, spec)
  local who, case, size = spec[1], spec[2], spec[5]
  local threads, devices = spec[3] or 1, spec[4] or 0
  self.serial = self.serial + 1
  local key = "k" .. self.serial
  local words = ("prepare %s %s %d %d %d"):format(key, case, threads, devices, size or 0)
  local answer = ask(self, who, words)[1]
  return {
    n = spec.n, loss = tonumber(answer:match "^ok (.*)"),
    time = function(n)
      local most = 0
      for _, seconds in ipairs(ask(self, who, ("time %s %d"):format(key, n))) do
        most = math.max(most, tonumber(seconds))
      end
      return most
    end,
    drop = function() ask(self, who, "drop " .. key) end,
  }
end

-- spec[2] is the command of the control.
local function control_side(self, spec)
  return {
    n = spec.n,
    time = function(n)
      return tonumber(self:ask("control", ("%s %d %d"):format(spec[2], spec[5] or 0, n)))
    end,
  }
end

-- Each writes a line when it starts and one when it has loaded.
local lua_loading = [[io.write("\n") io.flush() require "orrery" io.write("\n") io.flush()]]
local python_loading = [[print(flush=True); import torch; print(flush=True)]]

-- spec[2] is "orrery" or "pytorch", from the start of the process on, or "require", without that.
local function import_side(self, spec)
  local what = spec[2]
  local command = what == "pytorch" and self.python.command .. " -c " .. quote(python_loading)
    or self.lua .. " -e " .. quote(lua_loading)
  return {
    n = spec.n,
    time = function()
      local start = self.clock()
      local pipe = assert(io.popen("exec " .. command))
      local started = pipe:read "*l" and self.clock()
      local loaded = pipe:read "*l" and self.clock()
      pipe:close()
      if not loaded then error("bench: this failed: " .. command, 0) end
      return loaded - (what == "require" and started or start)
    end,
  }
end

local makers = {
  orrery = worker_side, logical = worker_side, pytorch = worker_side, control = control_side,
  memcpy = control_side, import = import_side,
}
for who in pairs(sides.gloo) do makers[who] = worker_side end

--- A side ready to run.
---@param spec table as in rows.lua
---@return {time: (fun(n: integer): number), n?: integer, loss?: number, drop?: fun()}
function sides:make(spec) return makers[spec[1]](self, spec) end

--- Whether a side needs PyTorch.
function sides.is_peer(spec)
  return spec[1] == "pytorch" or spec[2] == "pytorch" or sides.gloo[spec[1]] ~= nil
end

return sides
