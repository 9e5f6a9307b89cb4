-- The CUDA plug-in over fake runtimes (make fake): which devices are seen and how they are named, what
-- is refused, memory that runs out, peers that fail, bad labels, and errors injected at calls of CUDA and
-- its libraries. Numbers of ops and plans are the other specs', run on the same devices.
-- To add a failure: an environment of the fake (spec/fake/cudart.cpp lists them) and what must be said.
local behave = require "spec.support.behave"
local fakes = require "spec.fake.prelude"


local function lines(code, environment)
  local output = behave.run(code, environment)
  local list = {}
  for line in output:gmatch "[^\n]+" do list[#list + 1] = line end
  return list, output
end

local list_devices = [[
  local orrery = require "orrery"
  for _, d in ipairs(orrery.devices()) do
    if d.kind == "cuda" then print(d.name, d.bus_id, d.smi_index, d.gpu) end
  end
]]

local function devices(environment)
  local list = {}
  for _, line in ipairs(lines(list_devices, environment)) do list[#list + 1] = line:gsub("%s+", " ") end
  return list
end

describe("behaviour 33, CUDA devices", function()
  it("follow CUDA_VISIBLE_DEVICES: its order, UUIDs, an invalid entry hides the rest", function()
    local function buses(visible)
      local list = {}
      for k, line in ipairs(devices { CUDA_VISIBLE_DEVICES = visible, ORRERY_FAKE_GPUS = "4" }) do
        list[k] = line:match "0000:(%x+):"
      end
      return table.concat(list, " ")
    end
    assert.equal("12 13", buses "2,3")
    assert.equal("13 10", buses "3,0")
    assert.equal("11", buses "1,9,0")
    assert.equal("12 10", buses "GPU-fa4e0000-0000-4000-8000-000000000002,0")
  end)

  it("are several of one GPU by ORRERY_CUDA_DEVICES", function()
    local list = devices { ORRERY_CUDA_DEVICES = "0,0,1,1", ORRERY_FAKE_GPUS = "2" }
    assert.equal(4, #list)
    assert.matches("^cuda:1 0000:10", list[2])
    assert.matches("^cuda:2 0000:11", list[3])
  end)

  it("that are not there: says how many are, and why", function()
    local _, text = lines([[
      local orrery = require "orrery"
      print(select(2, pcall(orrery.zeros, 2, { device = "cuda:7" })))
      print(select(2, pcall(orrery.parallel, "data<0,5>")))
    ]], { ORRERY_FAKE_GPUS = "2" })
    assert.matches("device 7 is not there: 2 CUDA devices are visible", text, 1, true)
    assert.matches("2 cuda devices are visible", text, 1, true)
    _, text = lines([[print(select(2, pcall(require("orrery").zeros, 2, { device = "cuda:0" })))]],
      { CUDA_VISIBLE_DEVICES = "" })
    assert.matches("no CUDA device is visible", text, 1, true)
  end)

  it("do not mix with CPU devices in one mesh", function()
    local _, text = lines [[print(select(2, pcall(require("orrery").parallel, "data<cuda:0, cpu:0>")))]]
    assert.matches("devices of one kind", text, 1, true)
  end)

  it("are named by PCI bus id and UUID in a plan", function()
    local list = lines([[
      local orrery = require "orrery"
      for _, name in ipairs(orrery.parallel 'data<"0000:12:00.0", "GPU-fa4e0000-0000-4000-8000-000000000001">'
        :devices()) do print(name) end
    ]], { ORRERY_FAKE_GPUS = "4" })
    assert.same({ "cuda:2", "cuda:1" }, list)
  end)
end)

describe("on a CUDA device", function()
  it("memory that runs out is told with what would do, and a smaller batch then works", function()
    local _, text = lines([[
      local orrery = require "orrery"
      local ok, message = pcall(orrery.zeros, 64, 1024, 1024, { device = "cuda:0" })
      print(ok, message)
      print(orrery.ones(1024, 1024, { device = "cuda:0" }):sum():item())
    ]], { ORRERY_FAKE_MEMORY = "64" })
    assert.matches("false", text, 1, true)
    assert.matches("cuda:0 is out of memory: asked for 256.0 MiB", text, 1, true)
    assert.matches("1048576", text, 1, true)
  end)

  it("a label out of range is told with its place, and weights keep their values", function()
    local _, text = lines [[
      local orrery = require "orrery"
      local nn, optim = orrery.nn, orrery.optim
      local net = nn.Linear(4, 3):to "cuda:0"
      local opt = optim.SGD(net:parameters(), { lr = 1 })
      local before = net.weight:to("cpu"):clone()
      local labels = orrery.tensor({ 1, 9, 2 }, { dtype = "i64" }):to "cuda:0"
      local ok, message = pcall(function()
        nn.cross_entropy(net(orrery.randn(3, 4, { device = "cuda:0" })), labels):backward()
        opt:step()
        orrery.synchronize()
      end)
      print(ok, message)
      print((net.weight:to "cpu" - before):abs():max():item())
    ]]
    assert.matches("false", text, 1, true)
    assert.matches("9", text, 1, true)
    assert.matches("\n0\n?$", text)
  end)

  it("behaviour 36: partial values of any dtype, of odd sizes, are reduced without peer access", function()
    local list = lines([[
      local orrery, core = require "orrery", require "orrery.core"
      local mesh = core.mesh({ "data" }, { 3 }, { "cuda:0", "cuda:1", "cuda:2" })
      for _, dtype in ipairs { "i32", "u8", "bf16", "f32", "f64" } do
        for _, word in ipairs { "partial(sum)", "partial(max)", "partial(min)" } do
          local parts = {}
          for k = 1, 3 do
            parts[k] = orrery.full(k, 5, 2, { dtype = dtype }):to("cuda:" .. k - 1):clone()
          end
          local x = core.from_shards(mesh, { 5, 2 }, parts, word)
          for _, to in ipairs { "replicate", "shard(1)", "shard(2)" } do
            print(dtype, word, to, x:redistribute(to):to("f64"):sum():item())
          end
        end
      end
    ]], { ORRERY_FAKE_PEERS = "0", ORRERY_FAKE_GPUS = "3" })
    assert.equal(45, #list)
    local want = { sum = 60, max = 30, min = 10 }
    for _, line in ipairs(list) do
      assert.equal(want[line:match "partial%((%a+)%)"], tonumber(line:match "%S+$"), line)
    end
  end)

  it("takes what kernels may do before it is opened and after", function()
    local list = lines [[
      local orrery = require "orrery"
      print(orrery.deterministic(), orrery.allow_tf32(true), orrery.deterministic(false))
      local x = orrery.ones(8, 8, { device = "cuda:0" })
      print(orrery.deterministic(true), orrery.allow_tf32(false), x:matmul(x):sum():item())
      print(orrery.deterministic(), orrery.allow_tf32(), pcall(orrery.deterministic, 1))
    ]]
    assert.equal("true false true", (list[1]:gsub("%s+", " ")))
    assert.equal("false true 512", (list[2]:gsub("%s+", " ")))
    assert.matches("^true%s+false%s+false.*deterministic: expected true, false", list[3])
  end)

  for _, peers in ipairs { "0", "1" } do
    for _, plan in ipairs { "data<0,1>", "tensor<0,1>", "model<0,1>", "data<0..2; zero=3>" } do
      it(("behaviour 36: %s, peer access %s: the numbers of the host"):format(plan, peers), function()
        local code = [[
          local orrery = require "orrery"
          local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel
          local function losses(text)
            orrery.manual_seed(1)
            local net = nn.Sequential(nn.Linear(6, 12, { dtype = "f64" }), nn.Tanh(),
              nn.Linear(12, 3, { dtype = "f64" }))
            local x, y = orrery.randn(12, 6, { dtype = "f64" }), orrery.randint(1, 3, 12)
            local plan = text and parallel(text)
            if plan then plan(net, x) end
            local opt = optim.AdamW(net:parameters(), { lr = 0.01 })
            local list = {}
            for k = 1, 3 do
              opt:zero_grad()
              local loss
              if plan then loss = plan:step(net, nn.cross_entropy, x, y)
              else loss = nn.cross_entropy(net(x), y) loss:backward() end
              opt:step()
              list[k] = loss:item()
            end
            return list
          end
          local want, got, worst = losses(), losses "%s", 0
          for k, v in ipairs(want) do worst = math.max(worst, math.abs(v - got[k])) end
          print(worst < 1e-12 and "equal" or worst)
        ]]
        local list, text = lines(code:format(plan), { ORRERY_FAKE_PEERS = peers, ORRERY_FAKE_GPUS = "3" })
        assert.equal("equal", list[#list], text)
      end)
    end
  end
end)

-- Errors at calls ------------------------------------------------------------------------------------

-- Trains two steps under a plan with the n-th call failing, for many n: each time one error, or none where
-- the plug-in has another way; then the process works as before.
local sweep = [[
  local orrery = require "orrery"
  local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel
  orrery.devices()
  local plan = parallel "%s"
  local function train()
    local net = plan(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
      orrery.randn(4, 1, 4, 4))
    local opt = optim.SGD(net:parameters(), { lr = 0.1 })
    opt:zero_grad()
    local loss = nn.cross_entropy(net(orrery.randn(4, 1, 4, 4)), orrery.randint(1, 3, 4))
    loss:backward()
    opt:step()
    orrery.synchronize()
    return loss:item()
  end
  train()
  local before = fake.orr_fake_calls()
  train()
  local calls = tonumber(fake.orr_fake_calls() - before)
  local failed, quiet, names = 0, 0, {}
  for n = 1, calls, math.max(1, math.floor(calls / %d)) do
    fake.orr_fake_fail_after(n, 0)
    local ok, message = pcall(train)
    local name = ffi.string(fake.orr_fake_failed_call())
    fake.orr_fake_fail_after(0, 0)
    names[name] = true
    if ok then quiet = quiet + 1 else
      failed = failed + 1
      assert(type(message) == "string" and #message > 10, tostring(message))
    end
    pcall(orrery.synchronize)
    local fine, value = pcall(train)
    assert(fine and value == value, ("after a failure at call %%d (%%s; %%s): %%s"):format(n,
      name, tostring(message), tostring(value)))
  end
  local kinds = 0
  for _ in pairs(names) do kinds = kinds + 1 end
  print("swept", failed, quiet, kinds)
]]

describe("an error injected at a call of CUDA, cuBLASLt, cuDNN or NCCL", function()
  for _, case in ipairs { { "data<0>", 60 }, { "data<0,1>", 60 }, { "model<0,1>", 30 } } do
    it(("is one clear error under %s, and the process works after it"):format(case[1]), function()
      local list, text = lines(fakes.text .. sweep:format(case[1], case[2]), { ORRERY_FAKE_GPUS = "2" })
      local failed = (list[#list] or ""):match "^swept%s+(%d+)"
      assert.is_truthy(failed, text)
      assert.is_true(tonumber(failed) > 0, text)
    end)
  end
end)
