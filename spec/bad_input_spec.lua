-- Bad input: each mistake is a Lua error at the user's line with the words that name it, nothing
-- changes, and the next step works.
-- To add a mistake: an `it` with behave.raises, which checks file, line and words.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

local counts = { 0, 1, 2, 3, 5 } -- 0: the host alone

local function make(n)
  orrery.manual_seed(91)
  local net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
  local plan = n > 0 and behave.plan(n)
  if plan then plan(net) end
  local opt = optim.Adam(net:parameters(), { lr = 0.01 })
  local x, y = orrery.randn(13, 6), orrery.randint(1, 4, 13)
  local function step(a, b)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(a or x), b or y)
    loss:backward()
    opt:step()
    return loss:item()
  end
  return net, step, plan, x, y
end

-- f gets (net, step, plan, x, y), and raises; afterwards weights are what they were and a step works.
local function survives(f)
  for _, n in ipairs(counts) do
    local net, step, plan, x, y = make(n)
    local first = step()
    local weights = net:state()
    f(net, step, plan, x, y)
    for name, w in pairs(net:state()) do
      if not name:find "running" then behave.near(weights[name], w, 0, name) end
    end
    local loss = step()
    assert(loss == loss and loss < first + 0.5, ("%d devices: the next step gives %g after %g"):format(n,
      loss, first))
    orrery.synchronize()
  end
end

describe("bad shapes", function()
  it("name the op and the shapes, and the next step works", function()
    survives(function(net)
      behave.raises(function() net(orrery.randn(13, 5)) end, "linear", "(13, 5)", "(8, 6)")
      behave.raises(function() net(orrery.randn(13)) end)
    end)
    survives(function(net, _, _, x)
      local out = net(x)
      behave.raises(function() nn.cross_entropy(out, orrery.ones(12, { dtype = "i64" })) end, "cross_entropy",
        "(13, 4)", "(12)")
    end)
  end)

  it("of single ops", function()
    for _, device in ipairs { "cpu", "cpu:1" } do
      local a, b = orrery.ones(2, 3, { device = device }), orrery.ones(4, 5, { device = device })
      behave.raises(function() local _ = a + b end, "add", "(2, 3)", "(4, 5)")
      behave.raises(function() a:matmul(b) end, "matmul", "(2, 3)", "(4, 5)")
      behave.raises(function() a:view(7) end, "view", "(2, 3)")
      behave.raises(function() a:reshape(4, -1) end, "reshape", "(2, 3)")
      behave.raises(function() orrery.cat({ a, b }, 1) end, "cat", "(2, 3)", "(4, 5)")
      behave.raises(function() a:sum(3) end, "sum", "dimension 3")
      behave.raises(function() a:sum(0) end, "sum", "dimension 0")
      behave.raises(function() a:permute(1, 1) end, "permute")
      behave.raises(function() a:expand(5, 3) end, "expand", "(2, 3)")
      behave.raises(function() local _ = a[3] end, "index 3", "dimension 1", "2")
      behave.raises(function() local _ = a[{ 1, { 2, 9 } }] end, "index 9", "dimension 2", "3")
      behave.raises(function() a:narrow(1, 2, 5) end, "narrow")
      behave.raises(function() a:conv2d(b) end, "conv2d", "(2, 3)")
      behave.raises(function() a:copy_(b) end, "copy_", "(2, 3)", "(4, 5)")
      behave.raises(function() a:item() end, "item", "6 elements", "(2, 3)")
      behave.raises(function() a:backward() end, "backward", "does not require grad")
      behave.raises(function() orrery.tensor { { 1, 2 }, { 3 } } end, "ragged")
      behave.raises(function() orrery.tensor { 1, "two" } end, "element 2", "string")
      behave.raises(function() orrery.zeros(2, -1) end, "size")
      behave.raises(function() orrery.zeros(2.5) end, "size")
      behave.near({ { 2, 2, 2 }, { 2, 2, 2 } }, a + a, 0)
    end
  end)

  it("of a batch whose arguments differ in length, under a plan", function()
    local net, step, plan = make(2)
    behave.raises(function() plan:place { orrery.zeros(4), orrery.zeros(5) } end, "samples")
    behave.raises(function() net(orrery.zeros(4, 6), orrery.zeros(5)) end, "argument 2 has 5 samples",
      "parallel.whole")
    assert.is_true(step() > 0)
  end)
end)

describe("bad dtypes", function()
  it("name the dtypes, and the next step works", function()
    survives(function(net, _, _, x, y)
      local out = net(x)
      behave.raises(function() nn.cross_entropy(out, y:to "f32") end, "cross_entropy", "i64", "f32")
      behave.raises(function() net(y) end)
      behave.raises(function() orrery.zeros(2, { dtype = "float" }) end, "float", "f32")
      behave.raises(function() orrery.zeros(2, { dtype = "i64", requires_grad = true }) end, "i64")
      behave.raises(function() orrery.zeros(2, { dtyp = "f32" }) end, "dtyp", "dtype")
      behave.raises(function() x:to "f31" end, "f31")
      behave.raises(function() net:parameters()[1]:add_("x") end, "add", "string")
      behave.raises(function() local _ = x + nil end)
      behave.raises(function() local _ = x + {} end, "add", "table")
      behave.raises(function() x:matmul(3) end, "matmul", "number")
    end)
  end)
end)

describe("bad devices", function()
  it("name the device, and the next step works", function()
    survives(function(net, _, plan, x)
      behave.raises(function() orrery.zeros(2, { device = "cpu:64" }) end, "64", "8 CPU devices")
      behave.raises(function() x:to "tpu" end, "tpu")
      behave.raises(function() x:to(77) end, "77")
      if plan then -- a plan takes a batch from wherever it is
        assert.same({ 13, 4 }, net(orrery.ones(13, 6, { device = "cpu:7" })):size())
      else
        behave.raises(function() net(orrery.ones(13, 6, { device = "cpu:7" })) end, "linear", "cpu:7")
      end
      behave.raises(function() orrery.zeros(2, { device = {} }) end, "device")
    end)
  end)

  for text, words in pairs {
    ["data<0,99>"] = { "99", "8" }, ["data<0,0>"] = { "device 0", "twice" }, ["data<>"] = { "data<>", "^" },
    ["data<0"] = { "data<0", "^" }, ["data<0,>"] = { "^" }, ["data<0;zero=9>"] = { "zero", "^" },
    ["data<0; color=1>"] = { "color", "^" }, ["date<0,1>"] = { "date", "^" }, ["data<0>>"] = { "^" },
      ["data<a>"] = { "^" },
    [""] = {}, ["data<3..1>"] = { "^" },
  } do
    it("in the plan '" .. text .. "'", function()
      behave.raises(function() parallel(text) end, behave.unpack(words))
      behave.near({ 1, 2 }, parallel "data<0,1>":place(orrery.tensor { 1, 2 }), 0)
    end)
  end

  it("in constructors and in the literal form that was not rewritten", function()
    behave.raises(function() parallel.data(0, 99) end, "99")
    behave.raises(function() parallel.data(0, 0) end, "twice")
    behave.raises(function() parallel.data() end)
    behave.raises(function() parallel.data(0, { color = 1 }) end, "color")
    behave.raises(function() parallel.data("0", {}, 3) end)
    behave.raises(function() local _ = parallel.data < 0 end) -- in Lua 5.1 and LuaJIT in Lua's own words
    behave.raises(function() parallel "data<0,1>" (orrery.ones(3)) end, "module", "plan:place")
    behave.raises(function() parallel "data<0,1>" (nil) end, "module")
  end)

  it("a script with a wrong literal plan names line and column", function()
    local command = os.getenv "ORRERY_COMMAND" or (os.getenv "ORRERY_ROOT" or ".") .. "/bin/orrery"
    for text, word in pairs { ["data<0,0>"] = "twice", ["data<>"] = "data<>", ["data<0"] = "data<0",
      ["data<0,99>"] = "99" } do
      local path = os.tmpname()
      local file = assert(io.open(path, "w"))
      file:write("local orrery = require 'orrery'\nlocal parallel = orrery.parallel\n\n",
        "local plan = parallel.", text, "\nprint(plan)\n")
      file:close()
      local pipe = assert(io.popen(("'%s' '%s' 2>&1; echo status $?"):format(command, path)))
      local output = pipe:read "*a"
      pipe:close()
      os.remove(path)
      assert.truthy(output:find("status 1", 1, true), output)
      assert.truthy(output:find(path .. ":[45]:"), text .. ": " .. output)
      assert.truthy(text == "data<0" or output:find(word, 1, true), text .. ": " .. output)
    end
  end)
end)

describe("bad labels", function()
  it("out of range, on the host: raised at the call, with value and place", function()
    for _, bad in ipairs { 0, 5, -3, 1000000 } do
      survives(function(net, step, _, x, y)
        local wrong = y:clone()
        wrong[7] = bad
        local out = net(x)
        behave.raises(function() nn.cross_entropy(out, wrong) end, "cross_entropy", tostring(bad), "7", "4")
        assert.is_false((pcall(step, x, wrong)))
      end)
    end
  end)

  it("NaN labels: raised where they become integers, or where they are used", function()
    survives(function(net, _, _, x)
      local out = net(x)
      behave.raises(function()
        local labels = orrery.full(0 / 0, 13):to "i64"
        nn.cross_entropy(out, labels)
        orrery.synchronize()
      end, "cross_entropy")
      behave.raises(function() nn.cross_entropy(out, orrery.full(0 / 0, 13)) end, "i64")
    end)
  end)

  it("NaN targets of a regression reach the loss; anomaly mode names the op and the line", function()
    survives(function(_, _, plan)
      local a, b = orrery.ones(4, { requires_grad = true }), orrery.tensor { 1, 0 / 0, 1, 1 }
      if plan then
        a, b = plan:place(orrery.ones(4)):clone(), plan:place(b)
        a.requires_grad = true
      end
      local loss = nn.mse_loss(a, b):item()
      assert.is_true(loss ~= loss)
      orrery.anomaly(true)
      local ok, message = pcall(function() return nn.mse_loss(a, b):item() end)
      orrery.anomaly(false)
      assert.is_false(ok)
      assert.truthy(tostring(message):find("NaN", 1, true), tostring(message))
      assert.truthy(tostring(message):find("bad_input_spec.lua:", 1, true), tostring(message))
    end)
  end)

  it("token ids out of range", function()
    for _, n in ipairs(counts) do
      orrery.manual_seed(92)
      local net = nn.Sequential(nn.Embedding(5, 3))
      if n > 0 then behave.plan(n)(net) end
      -- On the host at the call; once placed, when the queues are waited for.
      behave.raises(function()
        net(orrery.tensor({ 1, 5, 6 }, { dtype = "i64" }))
        orrery.synchronize()
      end, "embedding", "6", "5")
      behave.raises(function()
        net(orrery.tensor({ 0 }, { dtype = "i64" }))
        orrery.synchronize()
      end, "embedding", "0")
      assert.same({ 2, 3 }, net(orrery.tensor({ 5, 1 }, { dtype = "i64" })):size())
    end
  end)
end)

describe("queued errors", function()
  it("a label out of range on a device raises at the next synchronise with op and line; weights keep",
    function()
    for _, n in ipairs(behave.counts) do
      for _, bad in ipairs { 0, 9 } do
        local net, step, plan, x, y = make(n)
        step()
        local weights = net:state()
        local wrong = y:clone()
        wrong[13] = bad -- on the last device
        wrong = plan:place(wrong)
        orrery.synchronize()
        local line
        local message = behave.raises(function()
          local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
          opt:zero_grad()
          line = debug.getinfo(1, "l").currentline + 1
          local loss = nn.cross_entropy(net(x), wrong)
          loss:backward()
          opt:step() -- in place: skipped on every device
          orrery.synchronize()
        end, "cross_entropy", "cpu:" .. n - 1, tostring(bad), "bad_input_spec.lua:")
        assert.truthy(message:find("queued at [^)]*bad_input_spec%.lua:" .. line), message)
        for name, w in pairs(net:state()) do
          if not name:find "running" then behave.near(weights[name], w, 0, name) end
        end
        orrery.synchronize() -- raised once
        local a, b = step(), step()
        assert(a == a and b == b and b < a, ("%d devices: %g then %g"):format(n, a, b))
        for _, p in ipairs(net:parameters()) do
          for _, shard in ipairs(p:shards()) do behave.near(p, shard.tensor, 0, shard.device) end
        end
      end
    end
  end)

  it("reading the loss raises it too", function()
    for _, n in ipairs(behave.counts) do
      local net, step, plan, x, y = make(n)
      local wrong = y:clone()
      wrong[1] = 77
      wrong = plan:place(wrong)
      local loss
      behave.raises(function()
        loss = nn.cross_entropy(net(x), wrong)
        local _ = loss:item()
      end, "77")
      assert.is_true(step() > 0)
    end
  end)

  it("on a single device: index out of range in queued work", function()
    local x = orrery.arange(1, 5, { dtype = "f32" }):to "cpu:1"
    local at = orrery.tensor({ 1, 9 }, { dtype = "i64" }):to "cpu:1"
    behave.raises(function()
      local y = x:index_select(1, at)
      local z = y * 2
      local _ = z:totable()
    end, "index_select", "9", "cpu:1")
    behave.near({ 1, 2, 3, 4, 5 }, x, 0)
    behave.near({ 2, 1 }, x:index_select(1, orrery.tensor({ 2, 1 }, { dtype = "i64" }):to "cpu:1"), 0)
  end)

  it("values made before the error are intact; what hung on it is poisoned until it is raised", function()
    local plan = behave.plan(3)
    local good = plan:place(orrery.arange(1, 7, { dtype = "f32" }))
    local total = plan:place(orrery.zeros(7))
    total:add_(good)
    local bad = plan:place(orrery.arange(1, 7, { dtype = "f32" }):view(7, 1))
      :gather(2, plan:place(orrery.tensor({ { 1 }, { 1 }, { 1 }, { 1 }, { 1 }, { 1 }, { 3 } },
        { dtype = "i64" })))
    total:add_(bad:view(7)) -- skipped where it is poisoned
    assert.is_false((pcall(orrery.synchronize)))
    behave.near({ 1, 2, 3, 4, 5, 6, 7 }, good, 0)
    assert.equal(7, total[7]:item()) -- the poisoned shard kept its values
    total:copy_(good)
    behave.near({ 1, 2, 3, 4, 5, 6, 7 }, total, 0)
  end)
end)

describe("bad files", function()
  local function with(bytes, f)
    local path = os.tmpname()
    local file = assert(io.open(path, "wb"))
    file:write(bytes)
    file:close()
    f(path)
    os.remove(path)
  end

  local idx = "\0\0\8\2\0\0\0\2\0\0\0\3abcdef"

  it("an IDX file that is truncated, corrupt or too long names the byte", function()
    with(idx, function(path) assert.same({ 2, 3 }, data.idx(path):size()) end)
    for cut = 0, #idx - 1 do
      with(idx:sub(1, cut), function(path) behave.raises(function() data.idx(path) end, path, "byte") end)
    end
    with("\1" .. idx:sub(2), function(path) behave.raises(function() data.idx(path) end, path, "byte 0") end)
    with(idx .. "x", function(path) behave.raises(function() data.idx(path) end, path, "byte 18") end)
    behave.raises(function() data.idx "/no/such/file" end, "/no/such/file")
  end)

  it("a CSV file with a bad cell or a short row names row or byte", function()
    with("1,2\n3,4\n", function(path) assert.same({ { 1, 2 }, { 3, 4 } }, data.csv(path):totable()) end)
    with("1,2\n3,x\n", function(path) behave.raises(function() data.csv(path) end, path, "x") end)
    with("1,2\n3\n", function(path) behave.raises(function() data.csv(path) end, path) end)
  end)

  it("an NPY file that is not one, or is cut", function()
    with("not numpy", function(path) behave.raises(function() data.npy(path) end, path, "byte") end)
    with("\147NUMPY\1\0\118\0{'descr': '<f4'", function(path)
      behave.raises(function() data.npy(path) end, path, "byte")
    end)
  end)
end)

describe("use after an error", function()
  it("a script error inside a step: forward, loss, hooks, custom backward, accumulate, no_grad", function()
    survives(function(net, _, _, x, y)
      local handle = net:children()[3]:register_forward_hook(function() error "hook broke" end)
      assert.is_false((pcall(net, x)))
      handle:remove()
      assert.is_false((pcall(orrery.no_grad, function() error "inside" end)))
      assert.is_true(core.grad_mode())
      local broken = orrery.custom {
        forward = function(_, a) return a * 2 end,
        backward = function() error "backward broke" end,
      }
      local loss = nn.cross_entropy(broken(net(x)), y)
      local ok, message = pcall(function() loss:backward() end)
      assert.is_false(ok)
      assert.truthy(tostring(message):find("backward broke", 1, true), tostring(message))
      local w = net:parameters()[1]
      w:register_hook(function(g)
        if broken then error "gradient hook broke" end
        return g
      end)
      assert.is_false((pcall(function() nn.cross_entropy(net(x), y):backward() end)))
      broken = nil
      assert.is_false((pcall(orrery.accumulate, { 1 }, function() error "in accumulate" end)))
      behave.raises(function() orrery.accumulate({ 1 }, function() return 3 end) end, "accumulate")
      assert.is_true(core.grad_mode())
    end)
  end)

  it("backward twice, a freed tensor, an in-place write over a saved value", function()
    survives(function(net, _, _, x, y)
      local loss = nn.cross_entropy(net(x), y)
      loss:backward()
      behave.raises(function() loss:backward() end, "backward", "second time")
      local w = orrery.ones(3, { requires_grad = true })
      local a = w * 2
      local b = (a * a):sum()
      a:add_(1)
      behave.raises(function() b:backward() end, "in-place", "mul")
      local gone = orrery.ones(3)
      gone:free()
      behave.raises(function() local _ = gone + 1 end, "free")
      behave.raises(function() w:add_(1) end, "leaf", "no_grad")
      net:zero_grad()
    end)
  end)

  it("a plan's step with the wrong net, and a module with a wrong field", function()
    local net, step, plan, x, y = make(2)
    local other = nn.Linear(6, 4)
    behave.raises(function() plan:step(other, nn.cross_entropy, x, y) end, "not placed by this plan")
    behave.raises(function() other.parameters = 3 end, "parameters")
    behave.raises(function() nn.Linear(0, 3) end, "Linear")
    behave.raises(function() nn.Linear(3, 2, { bais = false }) end, "bais", "bias")
    behave.raises(function() optim.SGD({}, { lr = 0.1 }) end, "SGD", "empty")
    behave.raises(function() optim.SGD(net:parameters(), { lr = -1 }) end, "lr")
    behave.raises(function() net:load_state { nothing = x } end, "load_state", "missing", "unexpected")
    assert.is_true(step() > 0)
  end)

  it("the error of a coroutine is at the coroutine's line", function()
    local thread = coroutine.create(function()
      local a = orrery.ones(2)
      local _ = a + orrery.ones(3)
    end)
    local ok, message = coroutine.resume(thread)
    assert.is_false(ok)
    assert.truthy(tostring(message):find("bad_input_spec.lua:", 1, true), tostring(message))
  end)
end)
