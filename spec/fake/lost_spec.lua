-- Devices that are lost in the middle of a step, and input that no device can take: one error that says so,
-- what the other devices hold is as it was, and they compute.
-- To add a moment: a row of `moments`; an input: a case of "what devices cannot do".
local behave = require "spec.support.behave"
local fakes = require "spec.fake.prelude"

-- A step of data<0,1> in which the device of one call is lost; prints the error, how far the weights of the
-- device that is left are from those before the step and from those after it, and a later step's loss.
local step = [[
  local orrery = require "orrery"
  local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel
  orrery.devices()
  local x, y = orrery.randn(8, 6), orrery.randint(1, 3, 8)
  local function make(text)
    orrery.manual_seed(3)
    local plan = parallel(text)
    local net = plan(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), x)
    return plan, net, optim.SGD(net:parameters(), { lr = 0.5 })
  end
  local armed = false
  local function lose(moment, name, n)
    if armed and moment == "%s" then fake.orr_fake_fail_at(name, n, 1) end
  end
  local function train(net, opt)
    opt:zero_grad()
    orrery.synchronize()
    lose("forward", "kernel launch", 3)
    local loss = nn.cross_entropy(net(x), y)
    orrery.synchronize()
    lose("backward", "kernel launch", 4)
    lose("all-reduce", "ncclAllReduce", 3)
    loss:backward()
    orrery.synchronize()
    lose("optimizer", "kernel launch", 1)
    opt:step()
    orrery.synchronize()
    return loss:item()
  end
  local _, want, opt = make "data<2,3>"
  local loss, _, net = train(want, opt)
  _, net, opt = make "data<0,1>"
  local before = {}
  for k, w in ipairs(net:parameters()) do before[k] = w:to("cpu"):clone() end
  armed = true
  print(pcall(train, net, opt))
  armed = false
  print("again", pcall(orrery.synchronize))
  local left
  for k = 0, 1 do
    if pcall(function() return orrery.ones(1, { device = "cuda:" .. k }):sum():item() end) then
      assert(not left, "no device was lost")
      left = k
    end
  end
  local old, new = 0, 0
  for k, w in ipairs(net:parameters()) do
    local mine = w:shards()[left + 1].tensor:to "cpu"
    old = math.max(old, (mine - before[k]):abs():max():item())
    new = math.max(new, (mine - want:parameters()[k]:to "cpu"):abs():max():item())
  end
  print("old", old, "new", new)
  _, net, opt = make("data<" .. left .. ",2>")
  print("loss", math.abs(train(net, opt) - loss) < 1e-6 and "as ever" or "another")
]]

describe("a device that is lost", function()
  for _, moment in ipairs { "forward", "backward", "all-reduce", "optimizer" } do
    it(("in %s of a step is one error, and the other one's weights are whole"):format(moment), function()
      local text = behave.run(fakes.text .. step:format(moment), { ORRERY_FAKE_GPUS = "4" })
      assert.matches("^false%s+%S+:%d+: .*cuda:[01] is lost: .*restart the process", text)
      local old, new = text:match "old%s+(%S+)%s+new%s+(%S+)"
      if moment == "optimizer" then -- the step was taken, or not
        assert.is_true(tonumber(old) == 0 or tonumber(new) < 1e-6, text)
      else
        assert.equal(0, tonumber(old), text)
      end
      assert.matches("loss%s+as ever", text)
    end)
  end
end)

describe("what devices cannot do", function()
  it("a batch that is too large ends in behaviour 37's words, and a smaller one trains", function()
    local text = behave.run([[
      local orrery = require "orrery"
      local nn, optim = orrery.nn, orrery.optim
      local net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)):to "cuda:0"
      local opt = optim.SGD(net:parameters(), { lr = 0.1 })
      local function train(n)
        opt:zero_grad()
        local loss = nn.cross_entropy(net(orrery.ones(n, 256, { device = "cuda:0" })),
          orrery.ones(n, { dtype = "i64", device = "cuda:0" }))
        loss:backward()
        opt:step()
        return loss:item()
      end
      local before = net:parameters()[1]:to("cpu"):clone()
      print(pcall(train, 2 ^ 14))
      print((net:parameters()[1]:to "cpu" - before):abs():max():item())
      print(train(16) > 0)
    ]], { ORRERY_FAKE_MEMORY = "24", ORRERY_FAKE_GPUS = "1" })
    for _, words in ipairs { "^false", "cuda:0 is out of memory: asked for 16.0 MiB", "16.3 MiB in use",
      "on the device 24.0 MiB", "in or after layer '1'", "largest: 1 x 16.0 MiB", "use a smaller batch",
      "\n0%s+true" } do
      assert.matches(words, text)
    end
  end)

  it("devices that do not mix are named", function()
    local text = behave.run([[
      local orrery = require "orrery"
      local core = require "orrery.core"
      local function say(f, ...) print(select(2, pcall(f, ...))) end
      local a, b = orrery.ones(2, { device = "cuda:0" }), orrery.ones(2, { device = "cuda:1" })
      say(function() return a + b end)
      say(function() return a + orrery.ones(2, { device = "cpu:0" }) end)
      say(orrery.parallel, "data<cuda:0, cpu:0>")
      say(orrery.parallel, "data<0, 9>")
      say(core.mesh, { "data" }, { 2 }, { "cuda:0", "cpu:1" })
      say(orrery.zeros, 2, { device = "cuda:-1" })
      print((a + orrery.ones(2)):sum():item(), (a + b:to "cuda:0"):sum():item())
    ]], { ORRERY_FAKE_GPUS = "2" })
    local list = {}
    for line in text:gmatch "[^\n]+" do list[#list + 1] = line end
    assert.matches("cuda:0.*cuda:1", list[1])
    assert.matches("cuda:0.*cpu:0", list[2])
    assert.matches("devices of one kind", list[3], 1, true)
    assert.matches("there is no device 9; 2 cuda devices are visible", text, 1, true)
    assert.matches("'cuda:-1' is unknown", text, 1, true)
    assert.matches("a mesh holds devices of one kind: cuda:0, cpu:1", text, 1, true)
    assert.matches("\n4%s+4%s*$", text)
  end)

  it("a sum in place that NCCL does not do is refused with the reason, without peer access", function()
    local text = behave.run([[
      local orrery, core = require "orrery", require "orrery.core"
      local mesh = core.mesh({ "data" }, { 2 }, { "cuda:0", "cuda:1" })
      local function parts(word, dtype)
        local list = {}
        for k = 1, 2 do list[k] = orrery.full(k, 4, { dtype = dtype, device = "cuda:" .. k - 1 }) end
        return core.from_shards(mesh, { 4 }, list, word)
      end
      print(pcall(core.all_reduce_, parts("partial(max)", "bool")))
      print(parts("partial(sum)", "f32"):redistribute("replicate"):sum():item())
    ]], { ORRERY_FAKE_GPUS = "2", ORRERY_FAKE_PEERS = "0" })
    assert.matches("^false.*cuda:0 and the devices beside it cannot use each other's memory", text)
    assert.matches("\n12%s*$", text)
  end)
end)
