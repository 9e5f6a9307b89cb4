-- Captured steps on fake GPUs: from its second replay on, what stands between two collectives is launched
-- as a CUDA graph; where a graph cannot be made the calls are issued one by one; and faults are told.
-- To add a call that may fail: a row in `calls`.
local behave = require "spec.support.behave"
local fakes = require "spec.fake.prelude"

-- A net with dropout, trained by captured steps; prints its losses, replays, and how often `name` was called
-- to no avail.
local training = [[
  local orrery = require "orrery"
  local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel
  orrery.manual_seed(5)
  local plan = parallel "%s"
  local net = plan(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.Tanh(),
    nn.LayerNorm(12), nn.Linear(12, 3)), orrery.ones(8, 6))
  local opt = optim.AdamW(net:parameters(), { lr = 0.01 })
  local function step(x, y)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(x), y)
    loss:backward()
    opt:step()
    return loss
  end
  local f = %s and orrery.capture(step) or step
  for k = 1, 9 do
    local x, y = plan:place(orrery.randn(8, 6)), plan:place(orrery.randint(1, 3, 8))
    io.write(("%%.5f "):format(f(x, y):item()))
  end
  print(ffi.string(fake.orr_fake_failed_call()), f ~= step and f.replays or 0)
]]

local function train(plan, captured, environment)
  environment.ORRERY_FAKE_GPUS = "2"
  local text = behave.run(fakes.text .. training:format(plan, tostring(captured)), environment)
  local losses, failed, replays = text:match "([%d%. ]+) (%S*)%s+(%d+)%s*$"
  return losses, failed, tonumber(replays), text
end

describe("a captured step on GPUs", function()
  for _, plan in ipairs { "data<0>", "data<0,1>", "tensor<0,1>" } do
    it("computes under " .. plan .. " what the step computes, launched as graphs", function()
      local want = train(plan, false, {})
      local got, _, replays, text = train(plan, true, {})
      assert.equal(want, got, text)
      assert.equal(6, replays)
      -- The second launch of a graph is a call that is made, since it can fail; the step is then right too.
      local calls = { "cudaStreamBeginCapture", "cudaStreamEndCapture:2", "cudaGraphInstantiate:1",
        "cudaGraphLaunch:2" }
      for _, call in ipairs(calls) do
        local other, failed
        other, failed, replays, text = train(plan, true, { ORRERY_FAKE_FAIL = call })
        assert.equal(want, other, call .. ": " .. text)
        assert.equal(call:match "%a+", failed)
        assert.equal(6, replays)
      end
    end)
  end

  it("tells a bad label that a graph's kernel meets, once, with the op and where it was recorded", function()
    local text = behave.run([[
      local orrery = require "orrery"
      local weight = orrery.arange(1, 6, { dtype = "f32" }):to "cuda:0"
      local f = orrery.capture(function(at) return weight:index_select(1, at) * 2 + 1 end)
      local function at(k) return orrery.tensor({ k }, { dtype = "i64" }):to "cuda:0" end
      for k = 1, 6 do assert(f(at(k % 5 + 1)):item() == 2 * (k % 5 + 1) + 1) end
      local y = f(at(9))
      print(pcall(y.item, y))
      print(f(at(4)):item(), f.replays)
    ]], { ORRERY_FAKE_GPUS = "1" })
    assert.matches("index_select on cuda:0: index 9 at position 1 is out of range", text, 1, true)
    assert.matches("queued at", text)
    assert.matches("9%s+5", text:match "([^\n]*)%s*$")
  end)
end)
