-- Buckets of gradients go while backward goes on: on the communication queue of each device, so on a stream
-- of their own, and before the last ops of backward are issued. The inline engine issues in the controller's
-- order, which is the order of the streams on GPUs however their threads come to run.
-- To add a plan: a row of `plans`.
local behave = require "spec.support.behave"

-- Prints for each device, of one step: how many collectives of that name went on the communication queue, and
-- "within" where the first came before the last product of backward.
local step = [[
  local orrery, core = require "orrery", require "orrery.core"
  local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel
  local plan = parallel "%s"
  local net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
  plan(net, orrery.ones(8, 64))
  local x, y = plan:place(orrery.randn(8, 64)), plan:place(orrery.randint(1, 64, 8))
  local opt = optim.SGD(net:parameters(), { lr = 0.1 })
  local function step()
    opt:zero_grad()
    nn.cross_entropy(net(x), y):backward()
    opt:step()
  end
  step()
  core.synchronize()
  core.timeline_start()
  step()
  local seen = {}
  for k = 1, (core.timeline_stop()) do
    local name, device, _, comm, start = core.timeline_event(k)
    local row = seen[device] or { n = 0, first = math.huge, last = 0 }
    seen[device] = row
    if name == "%s" and comm then row.n, row.first = row.n + 1, math.min(row.first, start)
    elseif name == "matmul" then row.last = math.max(row.last, start) end
  end
  for k = 0, 1 do
    local row = seen["cuda:" .. k]
    print(row.n, row.first < row.last and "within" or "after")
  end
]]

local plans = {
  { "data<0,1; bucket=20KiB>", "all_reduce" },
  { "data<0,1; zero=2, bucket=20KiB>", "reduce_scatter" },
}

describe("gradients of data<0,1>", function()
  for _, case in ipairs(plans) do
    it(("go by %s beside backward, under %s"):format(case[2], case[1]), function()
      local text = behave.run(step:format(case[1], case[2]),
        { ORRERY_ENGINE = "inline", ORRERY_FAKE_GPUS = "2" })
      local n = tonumber(text:match "^(%d+)")
      assert.is_true(n >= 2, text)
      assert.equal(("%d\twithin\n%d\twithin\n"):format(n, n), text)
    end)
  end

  it("go after it in one bucket that holds them all", function()
    local text = behave.run(step:format("data<0,1; bucket=1GiB>", "all_reduce"),
      { ORRERY_ENGINE = "inline", ORRERY_FAKE_GPUS = "2" })
    assert.equal("1\tafter\n1\tafter\n", text)
  end)
end)
