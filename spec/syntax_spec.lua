-- The literal plan form: what is rewritten, what is left alone, and where errors point.
local syntax = require "orrery.syntax"

local unpack = table.unpack or unpack

local function rewritten(text) return (assert(syntax.rewrite(text, "=test"))) end

local function refused(text)
  local plain, message = syntax.rewrite(text, "=test")
  assert.is_nil(plain)
  return message
end

-- A `parallel` whose nodes record the text they are given.
local function fake_parallel()
  local calls = {}
  local function node(kind)
    return function(text)
      calls[#calls + 1] = kind .. text
      return function(net) return { plan = kind .. text, net = net } end
    end
  end
  return { data = node "data", model = node "model", tensor = node "tensor" }, calls
end

local function in_temporary_file(text, use)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  local results = { pcall(use, path) }
  os.remove(path)
  return unpack(results, 1, 3)
end

describe("orrery.syntax", function()
  describe("rewrites", function()
    local cases = {
      { 'net = parallel.data<0,1>(net)', 'net = parallel.data"<0,1>"(net)' },
      { 'p = orrery.parallel.model<0: 3, 1: 5>', 'p = orrery.parallel.model"<0: 3, 1: 5>"' },
      { 'parallel.tensor <0..3> (net)', 'parallel.tensor "<0..3>" (net)' },
      { 'f(parallel.data < 0, 1 > (net))', 'f(parallel.data "< 0, 1 >" (net))' },
      { 'parallel.data<tensor<0,1>, tensor<2,3>>(net)',
        'parallel.data"<tensor<0,1>, tensor<2,3>>"(net)' },
      { 'parallel.data<0..7; zero=3, bucket=25MiB>(net)',
        'parallel.data"<0..7; zero=3, bucket=25MiB>"(net)' },
      { 'parallel.model<0: conv*, 1: fc*>(net)', 'parallel.model"<0: conv*, 1: fc*>"(net)' },
      { 'parallel.data<cpu:0, cuda:1>(net)', 'parallel.data"<cpu:0, cuda:1>"(net)' },
      { [[parallel.data<"0000:65:00.0", 'GPU-1a'>(net)]],
        [[parallel.data"<\"0000:65:00.0\", 'GPU-1a'>"(net)]] },
      { 'parallel.data<>(net)', 'parallel.data"<>"(net)' },
      { 'if p == parallel.data<0> then', 'if p == parallel.data"<0>" then' },
      { 'a = parallel.data<0>(x) b = parallel.model<1>(y)',
        'a = parallel.data"<0>"(x) b = parallel.model"<1>"(y)' },
    }
    for _, case in ipairs(cases) do
      it(case[1], function() assert.equal(case[2], rewritten(case[1])) end)
    end
  end)

  describe("leaves alone", function()
    local cases = {
      'if parallel.data < x then y() end',
      'if a.data<b then y() end',
      'if data<0 then y() end',
      'local c = parallel.data < 0',
      'f(parallel.data < 1, x > (2))',
      'f(parallel.data < 0, 1 > 2)',
      'while parallel.data<0 do y() end',
      'if parallel.data<limit then y() end',
      'if parallel.data<=0 then y() end',
      'c = parallel.data < 0 == (3 >= 2)',
      'c = parallel.data<0>=1',
      'c = parallel.database<0',
      'c = myparallel.data<0',
      'c = parallel.data.x<0',
      's = "parallel.data<0,1>(net)"',
      "s = 'it\\'s parallel.data<0,1>(net)'",
      's = "a\\\nparallel.data<0,1>(net)"',
      's = "a\\z  \n  parallel.data<0,1>(net)"',
      's = [[parallel.data<0,1>(net)]]',
      's = [==[ ]] parallel.data<0,1>(net) ]=] ]==]',
      '-- parallel.data<0,1>(net)',
      '--[[ parallel.data<0,1>(net) \n parallel.data<0 ]]',
      '--[=[ ]] parallel.data<0,1>(net) ]=]',
      '\27Lua parallel.data<0,1>(net)',
    }
    for _, text in ipairs(cases) do
      it(text, function()
        local plain, found = syntax.rewrite(text)
        assert.equal(text, plain)
        assert.equal(0, found)
      end)
    end

    it("code after a string or comment is still rewritten", function()
      assert.equal('s = "\\"" .. x --[[<]] p = parallel.data"<0>"(n)',
        rewritten('s = "\\"" .. x --[[<]] p = parallel.data<0>(n)'))
    end)
  end)

  describe("mistakes", function()
    it("an unclosed literal names line and column", function()
      local message = refused("x = 1\nnet = parallel.data<0(net)")
      assert.equal("test:2: '>' is missing after parallel.data< "
        .. "(a comparison is written with blanks, parallel.data < x), column 20", message)
    end)

    it("an unclosed literal at the end of the text says so", function()
      assert.truthy(refused("p = parallel.data<0,"):find("column 18 near <eof>$"))
    end)

    it("a variable names the constructor", function()
      for _, body in ipairs { "n", "0, n", "0..n", "first..last", "cfg.gpus", "unpack(ids)", "d[1]" } do
        local message = refused("net = parallel.data<" .. body .. ">(net)")
        assert.truthy(message:find("names a variable", 1, true), body)
        assert.truthy(message:find("write parallel.data(" .. body .. ")", 1, true), message)
      end
    end)

    it("load gives the message and no chunk", function()
      local chunk, message = syntax.load("\n\nreturn parallel.tensor<n>(x)", "@user.lua")
      assert.is_nil(chunk)
      assert.truthy(message:find("^user.lua:3: parallel.tensor<n> names a variable"))
    end)
  end)

  describe("load", function()
    it("passes the exact text of the plan on", function()
      local parallel, calls = fake_parallel()
      local text = [[return parallel.data<tensor<0, 1>,
          tensor<2,"GPU-\3">; zero=3>("net")]]
      local chunk = assert(syntax.load(text, "=t", "t", { parallel = parallel }))
      local placed = chunk()
      assert.equal("net", placed.net)
      assert.same({ 'data<tensor<0, 1>,\n          tensor<2,"GPU-\\3">; zero=3>' }, calls)
    end)

    it("keeps line numbers behind a literal that spans lines", function()
      local parallel, calls = fake_parallel()
      local text = "local p = parallel.data<0, -- the first\n  1 --[[ and\n the second ]]>\nerror 'here'"
      local chunk = assert(syntax.load(text, "@user.lua", nil,
        { parallel = parallel, error = error }))
      local ok, message = pcall(chunk)
      assert.is_false(ok)
      assert.equal("user.lua:4: here", message)
      local blanked = calls[1]:gsub("%s", "")
      assert.equal("data<0,1>", blanked)
      assert.equal(#"data<0, -- the first\n  1 --[[ and\n the second ]]>", #calls[1])
    end)

    it("passes vararg, globals and syntax errors as load does", function()
      assert.equal(3, assert(syntax.load("return ... + 1"))(2))
      local env = {}
      assert(syntax.load("x = 5", "=t", "t", env))()
      assert.equal(5, env.x)
      local chunk, message = syntax.load("x = = 1", "=t")
      assert.is_nil(chunk)
      assert.truthy(message:find("^t:1: "))
      assert.is_nil((syntax.load("return 1", "=t", "b")))
    end)
  end)

  describe("loadfile", function()
    it("skips a first line that starts with '#'", function()
      local ok, value, line = in_temporary_file(
        "#!/usr/bin/env orrery '\nlocal parallel = ...\n"
        .. "return parallel.data<0>, debug.getinfo(1).currentline",
        function(path) return assert(syntax.loadfile(path))({ data = tostring }) end)
      assert.is_true(ok)
      assert.equal("<0>", value)
      assert.equal(3, line)
    end)

    it("says which file is missing", function()
      local chunk, message = syntax.loadfile("/no/such/file.lua")
      assert.is_nil(chunk)
      assert.truthy(message:find("/no/such/file.lua", 1, true))
    end)
  end)

  describe("the package searcher", function()
    local saved_path
    before_each(function() saved_path = package.path end)
    after_each(function()
      package.path = saved_path
      package.loaded.orrery_syntax_probe = nil
    end)

    local function require_text(text)
      return in_temporary_file(text, function(path)
        package.path = path
        return require "orrery_syntax_probe"
      end)
    end

    it("rewrites a module that holds a literal", function()
      local ok, value = require_text "local parallel = { data = tostring }\nreturn parallel.data<0,1>"
      assert.is_true(ok)
      assert.equal("<0,1>", value)
    end)

    it("leaves other modules to Lua", function()
      local ok, value = require_text "return { name = ... }"
      assert.is_true(ok)
      assert.equal("orrery_syntax_probe", value.name)
      assert.is_nil((syntax.searcher "no.such.module"))
    end)

    it("names the module and the line of a wrong literal", function()
      local ok, message = require_text "local parallel\nreturn parallel.data<0(x)"
      assert.is_false(ok)
      assert.truthy(message:find("error loading module 'orrery_syntax_probe'", 1, true))
      assert.truthy(message:find(":2: '>' is missing", 1, true))
    end)
  end)

  describe("required by a chunk that holds a literal itself", function()
    local function count() return #(rawget(package, "searchers") or rawget(package, "loaders")) end

    local function run(text)
      local loaded, before = package.loaded["orrery.syntax"], count()
      package.loaded["orrery.syntax"] = nil
      local ok, message = in_temporary_file(text, dofile)
      package.loaded["orrery.syntax"] = loaded
      local searchers = rawget(package, "searchers") or rawget(package, "loaders")
      local added = count() - before
      if added > 0 then table.remove(searchers, 2) end
      return ok, message, added
    end

    it("raises 'too late here' with the line and the remedy", function()
      local ok, message, added = run(
        'require "orrery.syntax"\nlocal parallel = {}\nlocal f = print\nf(parallel.data<0,1>(2))')
      assert.is_false(ok)
      assert.truthy(message:find(":4: too late here", 1, true))
      assert.truthy(message:find("run it with `orrery ", 1, true))
      assert.truthy(message:find('parallel.data "<...>"', 1, true))
      assert.equal(0, added)
    end)

    it("installs the searcher for a chunk without one", function()
      local ok, message, added = run('require "orrery.syntax" -- parallel.data<0,1>(net)')
      assert.is_true(ok, message)
      assert.equal(1, added)
    end)
  end)
end)
