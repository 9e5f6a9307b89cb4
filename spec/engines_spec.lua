-- The engines run one program: a training run in a process of its own under thread, inline and
-- shuffle:1 to 8 gives identical numbers; memory that queued work still reads is not written early.
-- To add a case: a row in `programs`: code that prints numbers.
local behave = require "spec.support.behave"

local engines = { "inline" }
for seed = 1, 8 do engines[#engines + 1] = "shuffle:" .. seed end

local head = [[
  local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data
  local core = require "orrery.core"
  local function show(x)
    if type(x) ~= "number" then
      local function walk(v)
        if type(v) == "table" then for _, w in ipairs(v) do walk(w) end
        elseif type(v) == "number" then io.write(("%.17g "):format(v))
        else io.write(tostring(v), " ") end
      end
      walk(x:totable())
    else
      io.write(("%.17g "):format(x))
    end
    io.write("\n")
  end
  orrery.manual_seed(5)
]]

local programs = {
  { "training under data<0..2>: batch norm, dropout, clipping, an uneven last batch, accumulation", [[
    local o = { dtype = "f64" }
    local net = nn.Sequential(nn.Linear(6, 8, o), nn.BatchNorm1d(8, o), nn.ReLU(), nn.Dropout(0.25),
      nn.Linear(8, 4, o))
    local plan = parallel "data<0..2; bucket=256>"
    plan(net)
    local opt = optim.AdamW(net:parameters(), { lr = 0.01 })
    local X, Y = orrery.randn(23, 6, o), orrery.randint(1, 4, 23)
    for epoch = 1, 3 do
      for x, y in data.batches({ X, Y }, { batch = 5, shuffle = true, plan = plan }) do
        opt:zero_grad()
        local loss = nn.cross_entropy(net(x), y)
        loss:backward()
        optim.clip_grad_norm(net:parameters(), 0.5)
        opt:step()
        show(loss:item())
      end
    end
    opt:zero_grad()
    show(orrery.accumulate({ { 1, 9 }, { 10, 11 }, { 12, 23 } }, function(r)
      return nn.cross_entropy(net(X[{ r }]), Y[{ r }], { reduction = "sum" }), r[2] - r[1] + 1
    end))
    for _, p in ipairs(net:parameters()) do show(p) show(p.grad) end
    net:eval()
    show(net(X))
  ]] },
  { "a convolution net under data<0,1>, in f32", [[
    local net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
      nn.Flatten(), nn.Linear(16, 3))
    parallel "data<0,1>" (net)
    local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
    local x, y = orrery.randn(5, 2, 6, 6), orrery.randint(1, 3, 5)
    for k = 1, 6 do
      opt:zero_grad()
      local loss = nn.cross_entropy(net(x), y)
      loss:backward()
      opt:step()
      show(loss:item())
    end
    for _, p in ipairs(net:parameters()) do show(p) end
  ]] },
  { "plan:place(x), then x:zero_() or x:copy_(): what was placed keeps its values", [[
    local plan = parallel "data<0..3>"
    local x = orrery.arange(1, 40, { dtype = "f32" }):view(10, 4)
    for k = 1, 5 do
      local p = plan:place(x)
      x:zero_()
      x:add_(k)
      local q = plan:place(x)
      x:copy_(orrery.arange(1, 40, { dtype = "f32" }):view(10, 4) * k)
      show(p)
      show(q)
    end
  ]] },
  { "memory freed while queued work still reads it, and taken again", [[
    local plan = parallel "data<0,1>"
    local sum = plan:place(orrery.zeros(64))
    for k = 1, 40 do
      local a = plan:place(orrery.full(k, 64))
      local b = a * 2
      a:free()
      local c = plan:place(orrery.full(-k, 64)) -- takes a's blocks
      sum = sum + b + c
      b:free()
      c:zero_()
    end
    show(sum)
  ]] },
  { "copies between devices and the host, in place", [[
    local x = orrery.arange(1, 12, { dtype = "f64" })
    local a = x:to "cpu:0"
    for k = 1, 6 do
      local b = a:to "cpu:1"
      a:mul_(3)
      local c = b:to "cpu"
      b:sub_(1)
      a:add_(b:to "cpu:0")
      x:copy_(c)
      show(a) show(b) show(c) show(x)
    end
  ]] },
  { "redistributions chained without waiting", [[
    local plan = parallel "data<0..4>"
    local x = plan:place(orrery.arange(1, 77, { dtype = "f64" }):view(11, 7))
    for k = 1, 4 do
      x = x:redistribute("shard(2)") + 1
      x = x:redistribute("replicate") * 2
      x = x:redistribute("partial(sum)"):redistribute("shard(1)") - k
      show(x)
      x:div_(2)
    end
    show(x:sum(1)) show(x:mean()) show(x:max())
  ]] },
  { "an error of queued work, cleared, and the step after it", [[
    local net = nn.Sequential(nn.Linear(3, 4, { dtype = "f64" }))
    local plan = parallel "data<0..2>"
    plan(net)
    local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
    local x = orrery.randn(7, 3, { dtype = "f64" })
    local good = plan:place(orrery.randint(1, 4, 7))
    local bad = plan:place(orrery.tensor({ 1, 2, 3, 4, 1, 2, 9 }, { dtype = 'i64' }))
    for _, y in ipairs { good, bad, good } do
      opt:zero_grad()
      nn.cross_entropy(net(x), y):backward()
      opt:step()
      local ok = pcall(orrery.synchronize)
      show(ok and 1 or 0)
      show(net:parameters()[1])
    end
  ]] },
}

describe("the engines", function()
  for _, program in ipairs(programs) do
    it("give identical numbers: " .. program[1], function()
      local environment = { ORRERY_CPU_DEVICES = "5", ORRERY_ENGINE = "thread" }
      local want = behave.run(head .. program[2], environment)
      assert.truthy(want:find "%d", "nothing was printed")
      assert.is_nil(want:find("nan", 1, true), want)
      for _, engine in ipairs(engines) do
        environment.ORRERY_ENGINE = engine
        assert.equal(want, behave.run(head .. program[2], environment), engine)
      end
    end)
  end

  it("refuse a name they do not know", function()
    for _, name in ipairs { "fast", "shuffle", "shuffle:x", "thread:2" } do
      local output, status = behave.script("", { ORRERY_ENGINE = name })
      assert.not_equal(0, status)
      assert.truthy(output:find("ORRERY_ENGINE='" .. name .. "'", 1, true), output)
      assert.truthy(output:find("shuffle:SEED", 1, true), output)
    end
  end)
end)
