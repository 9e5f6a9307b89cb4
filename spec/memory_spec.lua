-- Memory over thousands of steps (behaviour 38): resident memory of a process that trains for 5,000
-- steps and never calls collectgarbage.
-- To add a case: a row in `cases`: a name, and code that defines step().
local behave = require "spec.support.behave"

local steps = 5000

local head = [[
  local nn, optim = orrery.nn, orrery.optim
  local function resident()
    orrery.synchronize()
    for line in io.lines "/proc/self/status" do
      local kilobytes = line:match "^VmRSS:%s*(%d+)"
      if kilobytes then return tonumber(kilobytes) end
    end
  end
  orrery.manual_seed(1)
]]

-- Resident memory swings with the collector: the most of each half is compared.
local tail = ([[
  local most = { 0, 0 }
  for k = 1, %d do
    step()
    local half = k <= %d and 1 or 2
    if k %% %d == 0 then most[half] = math.max(most[half], resident()) end
  end
  print(most[1], most[2])
]]):format(steps, steps / 2, steps / 20)

local mlp = [[
  local net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
  PLAN
  local opt = optim.Adam(net:parameters(), { lr = 1e-3 })
  local function step()
    local x, y = orrery.randn(32, 64), orrery.randint(1, 10, 32)
    opt:zero_grad()
    nn.cross_entropy(net(x), y):backward()
    opt:step()
  end
]]

local cases = {
  { "an MLP on the host", (mlp:gsub("PLAN", "")) },
  { "an MLP under data<0,1>", (mlp:gsub("PLAN", 'orrery.parallel "data<0,1>" (net)')) },
  { "an MLP under data<0..2>, loss read each step", (mlp:gsub("PLAN", 'orrery.parallel "data<0..2>" (net)')
    :gsub("nn.cross_entropy%(net%(x%), y%):backward%(%)",
      "local loss = nn.cross_entropy(net(x), y); loss:backward(); assert(loss:item() > 0)")) },
  { "errors in every step", [[
    local x = orrery.ones(64, 64, { requires_grad = true })
    local function step()
      local y = (x * 2):relu()
      assert(not pcall(function() return y:matmul(orrery.ones(3, 3)) end))
      assert(not pcall(function() return orrery.parallel "data<0,99>" end))
      assert(not pcall(function() error "a script error" end))
    end
  ]] },
  { "meshes, layouts and redistributions", [[
    local plan = orrery.parallel "data<0,1>"
    local function step()
      local x = plan:place(orrery.ones(7, 64))
      x = x:redistribute("shard(2)"):redistribute("replicate")
      assert(x:sum():item() == 7 * 64)
    end
  ]] },
}

describe("memory", function()
  for _, case in ipairs(cases) do
    -- A sanitizer keeps freed memory back, so that resident memory says nothing there.
    local test = os.getenv "ORRERY_SANITIZER" and pending or it
    test(("stays flat over %d steps: %s (behaviour 38)"):format(steps, case[1]), function()
      local early, late
      for _ = 1, 4 do -- a leak shows in every run, a swing of the allocator in one
        local output = behave.run(head .. case[2] .. tail, { ORRERY_CPU_DEVICES = "3" })
        early, late = output:match "^(%d+)%s+(%d+)"
        early, late = tonumber(early), tonumber(late)
        assert.is_truthy(early and late, output)
        if late <= early * 1.05 then break end
      end
      assert.is_true(late <= early * 1.05, ("%d KiB early, %d KiB at the end"):format(early, late))
    end)
  end
end)
