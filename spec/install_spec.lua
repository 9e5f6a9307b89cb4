-- install_spec.lua: `luarocks make` and `make install` give a module and a command that work alone.
--
-- Invariant: the installs live in a temporary folder, and the scripts run with none of the tree's
-- paths. To add a way of installing: a `describe` with its own prefix.
local root = os.getenv "ORRERY_ROOT" or "."
local interpreter = os.getenv "ORRERY_LUA" or "luajit"

---Runs a shell command; gives its output, errors included, and whether it succeeded.
local function shell(command)
  local pipe = assert(io.popen("{ " .. command .. "; } 2>&1; echo \"status $?\""))
  local text = pipe:read "*a"
  pipe:close()
  local output, status = text:match "^(.*)status (%d+)\n$"
  return output, status == "0"
end

---The same, without what the tree's own environment tells Lua.
local function outside(command)
  return shell("cd / && unset LUA_PATH LUA_CPATH ORRERY_ROOT ORRERY_BUILD ORRERY_LUA && " .. command)
end

local function temporary()
  local path = shell "mktemp -d":match "^(%S+)"
  assert.is_truthy(path)
  return path
end

local program = [[
local orrery = require "orrery"
local x = orrery.tensor({{1, 2}, {3, 4}})
print("sum", x:matmul(x):sum():item(), arg[1])
]]

---Writes the script and runs it with the command of an install.
local function run_script(bin, folder)
  local file = assert(io.open(folder .. "/script.lua", "w"))
  file:write(program)
  file:close()
  return outside(("%s/orrery %s/script.lua word"):format(bin, folder))
end

describe("an install by luarocks", function()
  local folder

  setup(function() folder = temporary() end)
  teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

  it("runs a script with the command and with plain Lua", function()
    local output, good = shell(("cd '%s' && luarocks make --deps-mode=none --tree '%s/rock' "
      .. "orrery-scm-1.rockspec"):format(root, folder))
    assert.is_true(good, output)
    output, good = run_script(folder .. "/rock/bin", folder)
    assert.is_true(good, output)
    assert.are.equal("sum\t54\tword\n", (output:gsub("54%.0", "54")))
    output, good = outside(("LUA_PATH='%s/rock/share/lua/5.1/?.lua;%s/rock/share/lua/5.1/?/init.lua' "
      .. "LUA_CPATH='%s/rock/lib/lua/5.1/?.so' lua5.1 -e 'print(require(\"orrery\").zeros(3):numel())'")
      :format(folder, folder, folder))
    assert.is_true(good, output)
    assert.are.equal("3\n", output)
  end)
end)

describe("an install by make", function()
  local folder

  setup(function() folder = temporary() end)
  teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

  it("works, also after it was moved, and is under 15 MB", function()
    local output, good = shell(("make -s --no-print-directory -C '%s' install LUA='%s' PREFIX='%s/a'")
      :format(root, interpreter, folder))
    assert.is_true(good, output)
    assert.is_true(os.execute(("mv '%s/a' '%s/b'"):format(folder, folder)) ~= nil)
    output, good = run_script(folder .. "/b/bin", folder)
    assert.is_true(good, output)
    assert.are.equal("sum\t54\tword\n", (output:gsub("54%.0", "54")))
    local kilobytes = tonumber((shell(("du -sk '%s/b'"):format(folder)):match "^%d+"))
    assert.is_true(kilobytes < 15 * 1024, kilobytes .. " KiB")
  end)
end)
