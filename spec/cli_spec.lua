-- The `orrery` command, run in this process with a stand-in for the library and captured streams.
local cli = require "orrery.cli"

local fake = {
  _VERSION = "9.9",
  nn = {}, optim = {}, data = {},
  devices = function() return setmetatable({}, { __tostring = function() return "id name\n0 cpu:0" end }) end,
  parallel = {
    data = function(text) return function(net) return text .. net end end,
    selftest = function() return "all equal" end,
  },
}

-- Runs the command: its status, standard output, standard error.
local function run(args, input)
  local out, err, at = {}, {}, 0
  local function stream(list)
    return { flush = function() end, write = function(_, ...)
      for i = 1, select("#", ...) do list[#list + 1] = tostring((select(i, ...))) end
    end }
  end
  local saved = { stdout = io.stdout, stderr = io.stderr, read = io.read, print = print, arg = arg,
    loaded = package.loaded.orrery, core = package.loaded["orrery.core"] }
  local function set(name, value) rawset(io, name, value) end
  set("stdout", stream(out))
  set("stderr", stream(err))
  set("read", function(format)
    if format == "*a" then return input end
    at = at + 1
    return input and input[at]
  end)
  _G.print = function(...) io.stdout:write(table.concat({ ... }, "\t"), "\n") end
  package.loaded.orrery, package.loaded["orrery.core"] = fake, {}
  args[0] = "orrery"
  local ok, status = pcall(cli.run, args)
  for _, name in ipairs { "stdout", "stderr", "read" } do set(name, saved[name]) end
  _G.print, _G.arg = saved.print, saved.arg
  package.loaded.orrery, package.loaded["orrery.core"] = saved.loaded, saved.core
  assert(ok, status)
  return status, table.concat(out), table.concat(err)
end

local function with_script(text, use)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  use(path)
  os.remove(path)
end

describe("the orrery command", function()
  it("runs a script with its arguments", function()
    with_script("#!/usr/bin/env orrery\nprint(arg[0], arg[1], #arg, ...)", function(path)
      local status, out, err = run { path, "--steps", "5" }
      assert.equal("", err)
      assert.equal(0, status)
      assert.equal(path .. "\t--steps\t2\t--steps\t5\n", out)
    end)
  end)

  it("runs the literal form of a plan", function()
    with_script("local parallel = require('orrery').parallel\nprint(parallel.data<0,1>('net'))",
      function(path)
        local status, out = run { path }
        assert.equal(0, status)
        assert.equal("<0,1>net\n", out)
      end)
  end)

  it("a failing script names the user's line and gives 1", function()
    with_script("local function step()\n  error 'bad shape'\nend\nstep()\n", function(path)
      local status, _, err = run { path }
      assert.equal(1, status)
      assert.truthy(err:find("orrery: " .. path .. ":2: bad shape\nstack traceback:\n", 1, true))
      assert.truthy(err:find(path .. ":4: in main chunk", 1, true))
      assert.falsy(err:find("cli.lua", 1, true))
    end)
  end)

  it("a script that does not compile or is not there gives 1", function()
    with_script("\nlocal p = parallel.data<0(net)\n", function(path)
      local status, _, err = run { path }
      assert.equal(1, status)
      assert.truthy(err:find(path .. ":2: '>' is missing", 1, true))
    end)
    local status, _, err = run { "/no/such.lua" }
    assert.equal(1, status)
    assert.truthy(err:find("/no/such.lua", 1, true))
  end)

  it("-e runs code with the session's names, then a script", function()
    local status, out = run { "-e", "print(orrery._VERSION, parallel.data<0>('x'))" }
    assert.equal(0, status)
    assert.equal("9.9\t<0>x\n", out)
    with_script("print(...)", function(path)
      status, out = run { "-e", "print 'first'", path, "a" }
      assert.equal(0, status)
      assert.equal("first\na\n", out)
    end)
    local failed, _, err = run { "-e", "error 'x'" }
    assert.equal(1, failed)
    assert.truthy(err:find("(command line):1: x", 1, true))
  end)

  it("- runs standard input", function()
    local status, out = run({ "-", "a" }, "print(arg[0], ...)")
    assert.equal(0, status)
    assert.equal("-\ta\n", out)
    local failed, _, err = run({ "-" }, "x = = 1")
    assert.equal(1, failed)
    assert.truthy(err:find("stdin:1:", 1, true))
  end)

  it("without arguments is a session over standard input", function()
    local status, out, err = run({}, { "local x = 20", "x + 1", "error 'no'", "x" })
    assert.equal("", err)
    assert.equal(0, status)
    assert.truthy(out:find("^21\nstdin:1: no\n.*\n20\n$"))
  end)

  it("prints devices, the self-test, version and help", function()
    local _, out = run { "devices" }
    assert.equal("id name\n0 cpu:0\n", out)
    local _, report = run { "selftest" }
    assert.equal("all equal\n", report)
    local _, version = run { "--version" }
    assert.truthy(version:find("^Orrery 9.9 %(Lua"))
    local _, help = run { "--help" }
    assert.truthy(help:find("^usage: orrery"))
  end)

  it("a wrong command line gives 2", function()
    for _, args in ipairs { { "--nope" }, { "-e" }, { "devices", "x" } } do
      local status, _, err = run(args)
      assert.equal(2, status)
      assert.truthy(err:find("^orrery: .*\ntry orrery %-%-help\n$"))
    end
    local _, _, err = run { "--nope" }
    assert.truthy(err:find("unknown option '--nope'", 1, true))
  end)
end)
