-- The session: values, several lines, locals that stay, errors that are survived, completion.
local complete = require "orrery.complete"
local repl = require "orrery.repl"

-- Feeds lines to a session; gives all that it wrote, and its prompts.
local function session(lines, env)
  local written, prompts, at = {}, {}, 0
  env = setmetatable(env or {}, { __index = _G })
  repl.new {
    read = function(prompt)
      prompts[#prompts + 1] = prompt
      at = at + 1
      return lines[at]
    end,
    write = function(text) written[#written + 1] = text end,
    env = env,
  }:run()
  return table.concat(written), prompts, env
end

describe("the REPL", function()
  describe("values", function()
    it("prints what an expression gives", function()
      assert.equal("3\n", (session { "1 + 2" }))
      assert.equal('"a\\nb"\n', (session { '"a\\nb"' }))
      assert.equal("nil\n", (session { "nil" }))
      assert.equal("1\n2\n", (session { "1, 2" }))
      assert.equal("7\n", (session { "=7" }))
      assert.equal("", (session { "(function() end)()", "", "-- a comment" }))
    end)

    it("a trailing ';' suppresses", function()
      assert.equal("", (session { "1 + 2;", "1 + 2; -- note" }))
      assert.equal('";"\n', (session { '";"' }))
    end)

    it("tables are summarised one level deep", function()
      assert.equal('{1, "two", {...}, b = {...}, x = 1, [true] = 0}\n',
        (session { '{1, "two", {3}, x = 1, b = {}, [true] = 0}' }))
      assert.equal("{}\n", (session { "{}" }))
      local many = session { "(function() local t = {} for i = 1, 100 do t[i] = i end return t end)()" }
      assert.truthy(many:find("... 80 more", 1, true))
    end)

    it("objects print through __tostring, whose failure is survived", function()
      local env = {
        good = setmetatable({}, { __tostring = function() return "tensor [2]" end }),
        bad = setmetatable({}, { __tostring = function() error("broken", 0) end }),
      }
      assert.equal("tensor [2]\n{\"x\", tensor [2]}\n", (session({ "good", "{'x', good}" }, env)))
      assert.truthy((session({ "bad", "1" }, env)):find("cannot print the value: broken.*\n1\n$"))
    end)
  end)

  describe("several lines", function()
    it("reads on until the chunk is complete", function()
      local out, prompts = session { "function f(x)", "", "  return x * 2", "end", "f(", "21", ")" }
      assert.equal("42\n", out)
      assert.same({ "> ", ">> ", ">> ", ">> ", "> ", ">> ", ">> ", "> " }, prompts)
    end)

    it("knows unfinished strings, comments, expressions and plans", function()
      assert.equal('"a\\nb"\n', (session { "[[a", "b]]" }))
      assert.equal("3\n", (session { "1 +", "2" }))
      assert.equal("5\n", (session { "--[[ a", "b ]] 5" }))
      local env = { parallel = { data = function(text) return text end } }
      assert.equal('"<0,\\n1>"\n', (session({ "parallel.data<0,", "1>" }, env)))
    end)

    it("Ctrl-C drops the chunk, the end of input tells what is missing", function()
      assert.equal("1\n", (session { "f(", false, "1" }))
      assert.truthy((session { "f(" }):find("<eof>"))
    end)
  end)

  describe("top-level locals", function()
    it("stay for the next lines", function()
      local out, _, env = session { "local x, y = 1, 2", "local z", "x + y", "z",
        "local function f() return x end", "f()", "for i = 1, 1 do local inner = i end", "inner" }
      assert.equal("3\nnil\n1\nnil\n", out)
      assert.equal(1, env.x)
      assert.is_nil(rawget(_G, "x"))
    end)

    it("keep positions, and lose 5.4's attributes", function()
      assert.equal("      x = 1", repl.persist_locals("local x = 1"))
      assert.equal("      x         = 1", repl.persist_locals("local x <const> = 1"))
      assert.equal("      a, b = nil ", repl.persist_locals("local a, b "))
      assert.equal("do local x = 1 end       y = 2", repl.persist_locals("do local x = 1 end local y = 2"))
      assert.equal("f = function() local x end", repl.persist_locals("f = function() local x end"))
      assert.equal("s = 'local x'", repl.persist_locals("s = 'local x'"))
      assert.equal("if a then local b elseif c then local d end", repl.persist_locals(
        "if a then local b elseif c then local d end"))
    end)
  end)

  describe("errors", function()
    it("are survived, with the user's frames and none of the library's", function()
      local out = session { "function f() error('ouch') end", "f()", "1" }
      assert.truthy(out:find("stdin:1: ouch\nstack traceback:\n\tstdin:1: in ", 1, true))
      assert.falsy(out:find("repl.lua", 1, true))
      assert.falsy(out:find("traceback.lua", 1, true))
      assert.falsy(out:find("%[C%]"))
      assert.truthy(out:find("\n1\n$"))
    end)

    it("of any kind of value", function()
      assert.truthy((session { "error({})" }):find("the error is a table value", 1, true))
      assert.truthy((session { "error(setmetatable({}, {__tostring = function() return 'odd' end}))" })
        :find("^odd\n"))
      assert.truthy((session { "error(nil)", "2" }):find("\n2\n$"))
    end)

    it("in the syntax name the line", function()
      assert.truthy((session { "x = = 1", "1" }):find("^stdin:1: .*\n1\n$"))
      assert.truthy((session { "parallel.data<n>(net)" }):find("write parallel.data(n)", 1, true))
    end)

    it("an interrupted step is one word and the session goes on", function()
      assert.equal("interrupted\n1\n", (session { "error('interrupted', 0)", "1" }))
    end)
  end)

  it("runs literal plans", function()
    local env = { parallel = { data = function(text) return function(net) return text .. net end end } }
    assert.equal('"<0,1>net"\n', (session({ "parallel.data<0,1>('net')" }, env)))
  end)

  describe("completion", function()
    local base = { forward = print, shape = 1, _hidden = 1 }
    local env = setmetatable({
      net = setmetatable({ fc1 = setmetatable({}, { __index = base }), fc2 = 1 }, { __index = base }),
      noted = setmetatable({}, { __index = function() error "looked" end, __methods = { size = print } }),
    }, { __index = _G })

    it("of names and keywords", function()
      assert.same({ "net", "nil", "not", "noted" }, complete({ net = 1, noted = 1 }, "n"))
      assert.same({ "noted" }, complete(env, "note"))
      assert.same({ "tonumber", "tostring" }, complete(env, "to"))
    end)

    it("of fields and methods, through __index tables", function()
      assert.same({ "net.fc1", "net.fc2", "net.forward" }, complete(env, "net.f"))
      assert.same({ "net:forward" }, complete(env, "net:f"))
      assert.same({ "net.fc1:forward" }, complete(env, "net.fc1:"))
      assert.same({ "net._hidden" }, complete(env, "net._"))
      assert.same({ "string.rep", "string.reverse" }, complete(env, "string.re"))
      assert.same({ "noted:size" }, complete(env, "noted:"))
    end)

    it("of nothing that is not there", function()
      assert.same({}, complete(env, "no.such.thing"))
      assert.same({}, complete(env, ".x"))
      assert.same({}, complete(env, "net.fc2."))
      assert.same({ "io.stdout:close" }, complete(env, "io.stdout:cl"))
    end)
  end)
end)
