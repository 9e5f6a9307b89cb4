-- What the behaviour specs share: meshes and plans over k CPU devices, comparisons by value, errors
-- at the user's line, scripts in a process of their own.
-- Invariant: a comparison fails on NaN, and an error passes only when it names a line of the function
-- that was called.
-- To add a helper: a function that takes what it checks first and says in its message what differed.
local orrery = require "orrery"
local device = require "spec.support.device"
local core = require "orrery.core"

local unpack = table.unpack or unpack
local behave = {}

--- Device counts on which behaviours are checked.
behave.counts = { 1, 2, 3, 5 }

--- "data<0..n-1>" as a plan.
function behave.plan(n, options)
  local ids = n == 1 and "0" or "0.." .. n - 1
  return orrery.parallel("data<" .. ids .. (options and "; " .. options or "") .. ">")
end

--- The names of the first n devices.
function behave.names(n)
  local names = {}
  for k = 1, n do names[k] = device.name(k - 1) end
  return names
end

--- A mesh of one axis over the first n devices.
function behave.mesh(n, axis) return core.mesh({ axis or "data" }, { n }, behave.names(n)) end

--- x (a host tensor) on n devices under `word`; without grad.
function behave.place(x, n, word) return core.distribute(x, behave.mesh(n), word) end

--- A value that is Partial(sum) over n devices and sums to x; uneven terms, on a grid of 2^-20.
function behave.partial(x, n)
  local parts, rest = {}, x
  for k = 1, n do
    local part = k == n and rest or (x * ((k % 2 == 1 and 0.6 or -0.25) * 2 ^ 20 / k)):floor() * 2 ^ -20
    rest = rest - part
    parts[k] = part:to(device.name(k - 1)):clone()
  end
  return core.from_shards(behave.mesh(n), x:size(), parts, "partial(sum)")
end

local function flatten(value, list)
  if type(value) == "table" then
    for k = 1, #value do flatten(value[k], list) end
  else
    if type(value) == "boolean" then value = value and 1 or 0 end
    list[#list + 1] = value
  end
  return list
end

--- All elements of a tensor, a nested table or a number, row-major.
function behave.list(value)
  if core.is_tensor(value) then value = value:detach():totable() end
  return flatten(value, {})
end

--- Fails unless the two have one shape (where both are tensors) and every |difference| <= tolerance.
function behave.near(want, got, tolerance, what)
  what = what and what .. ": " or ""
  if core.is_tensor(want) and core.is_tensor(got) then
    assert(table.concat(want:size(), ",") == table.concat(got:size(), ","),
      ("%sshape (%s), want (%s)"):format(what, table.concat(got:size(), ","), table.concat(want:size(), ",")))
  end
  local a, b = behave.list(want), behave.list(got)
  assert(#a == #b, ("%s%d elements, want %d"):format(what, #b, #a))
  for k = 1, #a do
    if not (a[k] == b[k] or math.abs(a[k] - b[k]) <= tolerance) then
      error(("%selement %d is %.17g, want %.17g within %g"):format(what, k, b[k], a[k], tolerance), 2)
    end
  end
end

--- The gradients of a module by name; false where there is none. Values, not tensors.
function behave.gradients(net)
  local list = {}
  for name, p in net:named_parameters() do list[name] = p.grad and behave.list(p.grad) or false end
  return list
end

--- Compares what behave.gradients gave.
function behave.same_gradients(want, got, tolerance, what)
  for name, values in pairs(want) do
    if values and got[name] then
      behave.near(values, got[name], tolerance, (what or "") .. " gradient of " .. name)
    else
      assert((values and true) == (got[name] and true), (what or "") .. " gradient of " .. name
        .. ": one is nil")
    end
  end
end

--- Calls f, which must raise at one of its own lines, with every word in the message; gives it.
---@param f fun() its failing statement must not be a tail call
function behave.raises(f, ...)
  local ok, message = pcall(f)
  assert(not ok, "nothing was raised")
  message = tostring(message)
  local info = debug.getinfo(f, "S")
  local line = message:match("^" .. info.short_src:gsub("%p", "%%%0") .. ":(%d+): ")
  line = tonumber(line)
  assert(line and line >= info.linedefined and line <= info.lastlinedefined,
    ("not at lines %d to %d of %s: %s"):format(info.linedefined, info.lastlinedefined, info.short_src,
      message))
  for _, word in ipairs { ... } do
    assert(message:find(word, 1, true), ("no '%s' in: %s"):format(word, message))
  end
  return message
end

--- Live bytes of all devices, after collection and with nothing queued.
function behave.live()
  local _ = select("#", unpack({}, 1, 200)) -- nil over what ended calls left on the stack
  collectgarbage()
  collectgarbage()
  orrery.synchronize()
  return orrery.memory().live
end

--- Runs Lua code in a process of its own; gives its output (errors included) and its exit status.
---@param code string gets `orrery` as a local
---@param environment? table<string, string>
function behave.script(code, environment)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write("local orrery = require 'orrery'\n", code)
  file:close()
  local words = {}
  for name, value in pairs(environment or {}) do words[#words + 1] = ("%s='%s'"):format(name, value) end
  table.sort(words)
  local pipe = assert(io.popen(("env %s '%s' '%s' 2>&1; echo status $?"):format(table.concat(words, " "),
    os.getenv "ORRERY_LUA" or "luajit", path)))
  local text = pipe:read "*a"
  pipe:close()
  os.remove(path)
  local output, status = text:match "^(.*)status (%d+)\n$"
  return output, tonumber(status)
end

--- The same, failing with the output where the process failed.
function behave.run(code, environment)
  local output, status = behave.script(code, environment)
  assert(status == 0, ("status %s: %s"):format(tostring(status), output))
  return output
end

--- Collectives that f queued, as "op axis" -> count.
function behave.collectives(f)
  local counts = {}
  for _, row in ipairs(orrery.parallel.trace(f)) do
    local key = row.op .. " " .. row.axis
    counts[key] = (counts[key] or 0) + row.count
  end
  return counts
end

--- One training net: f64 unless said, batch norm and dropout on.
function behave.net(dtype, inputs, hidden, classes)
  local nn, o = orrery.nn, { dtype = dtype or "f64" }
  return nn.Sequential(nn.Linear(inputs or 6, hidden or 8, o), nn.BatchNorm1d(hidden or 8, o), nn.ReLU(),
    nn.Dropout(0.25), nn.Linear(hidden or 8, classes or 4, o))
end

behave.unpack = unpack
return behave
