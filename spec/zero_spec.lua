-- Sharded state, data<...; zero=1|2|3>: the numbers of one device, a device's share of the memory, no
-- more traffic than data<> (1.5 times with sharded parameters), and nothing else that a script sees.
-- To add a plan, a net or a way to train: a row in `plans`, `nets`, `recipes`.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local steps = os.getenv "ORRERY_SANITIZER" and 3 or 20

-- A and B stand for the counts of layers of two stages.
local plans = {
  "data<model<0: A, 1: B>, model<2: A, 3: B>; zero=1>",
  "data<model<0: A, 1: B>, model<2: A, 3: B>; zero=3>",
  "data<tensor<0,1>, tensor<2,3>; zero=1>",
  "data<tensor<0,1>, tensor<2,3>; zero=2>",
  "data<tensor<0,1>, tensor<2,3>; zero=3>",
  "tensor<data<0,1; zero=1>, data<2,3; zero=1>>",
  "tensor<data<0,1; zero=3>, data<2,3; zero=3>>",
  "data<model<tensor<0,1>: A, tensor<2,3>: B>, model<tensor<4,5>: A, tensor<6,7>: B>; zero=3>",
}
for k = 1, 3 do
  for _, devices in ipairs { "0,1", "0..2", "0..3" } do
    plans[#plans + 1] = ("data<%s; zero=%d>"):format(devices, k)
  end
end

-- Weights that are longest in either dimension, one that two layers share, one frozen, tiny ones, and
-- one that nothing uses.
local Mixed = nn.class("Mixed", function(self)
  self.wide = nn.Linear(33, 130, f64)
  self.narrow = nn.Linear(130, 66, f64)
  self.tied = nn.Linear(66, 66, f64)
  self.again = nn.Linear(66, 66, f64)
  self.again.weight = self.tied.weight
  self.frozen = nn.Linear(66, 66, f64):freeze()
  self.last = nn.Linear(66, 4, f64)
  self.unused = nn.Linear(70, 70, f64)
end)

function Mixed:forward(x)
  x = self.narrow(self.wide(x):tanh()):tanh()
  x = self.again(self.tied(x):tanh()) + self.frozen(x)
  return self.last(x:tanh())
end

local function cnn()
  local plain = { padding = 1, bias = false, dtype = "f64" }
  return nn.Sequential(nn.Conv2d(1, 20, 3, plain), nn.BatchNorm2d(20, f64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(20, 24, 3, plain), nn.BatchNorm2d(24, f64), nn.ReLU(), nn.Flatten(),
    nn.Linear(216, 40, f64), nn.ReLU(), nn.Linear(40, 4, f64))
end

local nets = {
  { "an MLP with tied, frozen, tiny and unused parameters", Mixed,
    function(n) return orrery.randn(n, 33, f64) end, counts = { A = 3, B = 4 } },
  { "a CNN with batch norm", cnn, function(n) return orrery.randn(n, 1, 6, 6, f64) end,
    counts = { A = 5, B = 6 }, across = true },
}

local recipes = {
  { "SGD with momentum, clipping", function(p)
    return optim.SGD(p, { lr = 0.05, momentum = 0.9, weight_decay = 1e-3 })
  end, clip = 0.5 },
  { "AdamW, backward three times a step", function(p)
    return optim.AdamW(p, { lr = 2e-3, eps = 1e-6 })
  end, every = 3 },
  { "AdamW, accumulated over 3 uneven batches, clipping", function(p)
    return optim.AdamW(p, { lr = 2e-3, eps = 1e-6 })
  end, joined = true, clip = 0.5 },
}

local function criterion(net, x, y) return nn.cross_entropy(net(x), y) end

local function backward(net, batch, joined)
  if not joined then
    local loss = criterion(net, batch(11), orrery.randint(1, 4, 11))
    loss:backward()
    return loss:item()
  end
  local batches = {}
  for k = 1, 3 do batches[k] = { batch(8 - k), orrery.randint(1, 4, 8 - k) } end
  return orrery.accumulate(batches, function(pair)
    return nn.cross_entropy(net(pair[1]), pair[2], { reduction = "sum" }), pair[2]:size(1)
  end)
end

-- Trains `net` with `opt`; losses, and what the net and the optimizer hold at the end.
local function go_on(net, opt, recipe, batch, n)
  local losses = {}
  for k = 1, n do
    local loss = backward(net, batch, recipe.joined)
    losses[k] = type(loss) == "number" and loss or loss:item()
    if k % (recipe.every or 1) == 0 then
      if recipe.clip then optim.clip_grad_norm(net, recipe.clip) end
      opt:step()
      opt:zero_grad()
    end
  end
  return losses
end

local function train(row, recipe, plan, n)
  orrery.manual_seed(5)
  local net = row[2]()
  local opt = recipe[2](net:parameters())
  if plan then parallel((plan:gsub("[AB]", row.counts)))(net) end
  orrery.manual_seed(6)
  return { losses = go_on(net, opt, recipe, row[3], n or steps), net = net, opt = opt, state = net:state() }
end

local function same(want, got, what)
  behave.near(want.losses, got.losses, 1e-9, what)
  for name, tensor in pairs(want.state) do
    behave.near(tensor, got.state[name], 1e-9, what .. ", " .. name)
  end
end

local known = {}
local function reference(row, recipe)
  local key = row[1] .. recipe[1]
  known[key] = known[key] or train(row, recipe)
  return known[key]
end

describe("sharded state", function()
  for _, plan in ipairs(plans) do
    for _, row in ipairs(nets) do
      it(("under %s trains %s as one device does"):format(plan, row[1]), function()
        for _, recipe in ipairs(recipes) do
          if not (row.across and recipe.joined) then
            same(reference(row, recipe), train(row, recipe, plan), recipe[1])
          end
        end
      end)
    end
  end

  it("shards the longest dimension and leaves tiny parameters whole", function()
    local net = parallel "data<0,1; zero=3>"(Mixed())
    assert.equal("data<0,1>: shard(1)", net.wide.weight:layout())
    assert.equal("data<0,1>: shard(2)", net.narrow.weight:layout())
    assert.equal("data<0,1>: shard(1)", net.frozen.weight:layout())
    assert.equal("data<0,1>: replicate", net.last.weight:layout())
    assert.equal("data<0,1>: replicate", net.wide.bias:layout())
    for _, k in ipairs { 1, 2 } do
      net = parallel(("data<0,1; zero=%d>"):format(k))(Mixed())
      assert.equal("data<0,1>: replicate", net.wide.weight:layout())
      criterion(net, orrery.randn(4, 33, f64), orrery.randint(1, 4, 4)):backward()
      assert.equal("data<0,1>: shard(1)", net.wide.weight.grad:layout())
    end
  end)

  it("gives an unused parameter no gradient and a frozen one no update", function()
    for k = 1, 3 do
      local net = Mixed()
      local frozen = behave.list(net.frozen.weight)
      local opt = optim.AdamW(net, { lr = 0.1 })
      parallel(("data<0..2; zero=%d>"):format(k))(net)
      criterion(net, orrery.randn(5, 33, f64), orrery.randint(1, 4, 5)):backward()
      assert.same({ "unused.weight", "unused.bias" }, parallel.unused(net))
      opt:step()
      behave.near(frozen, net.frozen.weight, 0)
    end
  end)

  it("goes on from a state saved under another plan", function()
    local row, recipe = nets[1], recipes[1]
    local want = train(row, recipe, nil, 12)
    for _, pair in ipairs { { "data<0,1; zero=3>", "data<0..2; zero=1>" },
      { "data<0,1; zero=2>", "data<0..3; zero=3>" }, { "data<0,1>", "data<0,1; zero=3>" },
      { "data<0..3; zero=3>", "data<0>" } } do
      local first = train(row, recipe, pair[1], 6)
      local net_state, opt_state, random = first.net:state(), first.opt:state(), orrery.random_state()
      orrery.manual_seed(99)
      local net = parallel(pair[2])(row[2]())
      local opt = recipe[2](net:parameters())
      net:load_state(net_state)
      opt:load_state(opt_state)
      orrery.set_random_state(random)
      local losses = go_on(net, opt, recipe, row[3], 6)
      for k = 1, 6 do behave.near(want.losses[6 + k], losses[k], 1e-9, pair[1] .. " then " .. pair[2]) end
      for name, tensor in pairs(net:state()) do behave.near(want.state[name], tensor, 1e-9, name) end
    end
  end)

  it("moves a net with its optimizer from one plan to another", function()
    local row, recipe = nets[1], recipes[1]
    local want = train(row, recipe, nil, 12)
    local run = train(row, recipe, "data<0..2; zero=3>", 4)
    local weight = run.net.wide.weight
    parallel "data<0,1; zero=1>"(run.net)
    go_on(run.net, run.opt, recipe, row[3], 4)
    parallel "data<0..3; zero=3>"(run.net)
    go_on(run.net, run.opt, recipe, row[3], 4)
    assert.equal(weight, run.net.wide.weight)
    for name, tensor in pairs(run.net:state()) do behave.near(want.state[name], tensor, 1e-9, name) end
  end)

  it("refuses to write what was gathered, and lets a script write parameters", function()
    local net = parallel "data<0,1; zero=3>"(Mixed())
    core.no_grad(function()
      behave.raises(function()
        net.wide.weight:t():zero_()
        return nil
      end, "gathered from a parameter")
      net.wide.weight:mul_(0):add_(2)
    end)
    behave.near(2 * 33 * 130, net.wide.weight:sum(), 1e-9)
  end)

  it("has gradients of gradients through gathered parameters", function()
    local function of(plan)
      orrery.manual_seed(2)
      local layer = nn.Linear(70, 66, f64)
      if plan then parallel(plan)(layer) end
      local x = orrery.randn(3, 70, f64)
      local y = (layer(x):tanh() * layer(x)):sum()
      local g = orrery.grad(y, { layer.weight }, { create_graph = true })[1]
      g:square():sum():backward()
      return layer.weight.grad
    end
    behave.near(of(nil), of "data<0,1; zero=3>", 1e-9)
  end)
end)

-- ---- memory and traffic ---------------------------------------------------------------------

local width, layers = 512, 8
local layer_bytes = 4 * width * width

-- A deep net of equal layers and one step of it; run here, and alone in a process whose memory is
-- measured: what a test has left on Lua's stack would count.
local source = ([[
local nn, optim = orrery.nn, orrery.optim
local function deep()
  local net = nn.Sequential()
  for k = 1, %d do net[2 * k - 1], net[2 * k] = nn.Linear(%d, %d, { bias = false }), nn.Tanh() end
  return net
end
local function momentum(net) return optim.SGD(net, { lr = 0.01, momentum = 0.9 }) end
local function adamw(net) return optim.AdamW(net, { lr = 0.001 }) end
local function one_step(net, opt)
  opt:zero_grad()
  collectgarbage()
  net(orrery.randn(8, %d)):square():mean():backward()
  opt:step()
  orrery.synchronize()
end
]]):format(layers, width, width, width)

local deep, adamw, one_step = (loadstring or load)("local orrery = ...\n" .. source
  .. "return deep, adamw, one_step")(orrery)

-- The largest peak of a step, in bytes a device.
local function peak_of(plan, optimizer)
  return tonumber(behave.run(source .. ([[
local net = orrery.parallel "%s"(deep())
local opt = %s(net)
for _ = 1, 2 do one_step(net, opt) end
orrery.reset_peak()
for _ = 1, 2 do one_step(net, opt) end
local peak = 0
for _, device in ipairs(net:plan():devices()) do peak = math.max(peak, orrery.memory(device).peak) end
io.write(("%%d"):format(peak))
]]):format(plan, optimizer)))
end

local function at_most(bound, got)
  assert(got <= bound, ("%.4g layers, at most %.4g"):format(got / layer_bytes, bound / layer_bytes))
end

describe("sharded state over four devices", function()
  it("holds 0.30 of parameters, gradients and state, and the largest layer, at zero=3", function()
    for _, case in ipairs { { "momentum", 3 }, { "adamw", 4 } } do
      local whole = case[2] * layers * layer_bytes
      local peak = peak_of("data<0..3; zero=3>", case[1])
      at_most(0.30 * whole + layer_bytes, peak)
    end
  end)

  it("holds a quarter of the state at zero=1, and of the gradients, but for what waits, at zero=2", function()
    local rest = layers * layer_bytes
    local whole, first, second = peak_of("data<0..3>", "adamw"), peak_of("data<0..3; zero=1>", "adamw"),
      peak_of("data<0..3; zero=2>", "adamw")
    at_most(whole, 4 * rest)
    at_most(2.8 * rest, first)
    at_most(2.1 * rest, second)
  end)

  it("moves no more than data<> at zero=1 and 2, and 1.5 times as much at zero=3", function()
    local function moved(plan)
      local net, bytes = parallel(plan)(deep()), 0
      local opt = adamw(net)
      one_step(net, opt)
      for _, row in ipairs(parallel.trace(function() one_step(net, opt) end)) do
        if row.axis == "data" then bytes = bytes + row.moved end
      end
      return bytes
    end
    local plain = moved "data<0..3>"
    behave.near(layers * layer_bytes * 2 * 3 / 4, plain, 64)
    at_most(plain, moved "data<0..3; zero=1>")
    at_most(plain, moved "data<0..3; zero=2>")
    at_most(1.5 * plain, moved "data<0..3; zero=3>")
  end)

  it("leaves nothing behind", function()
    local before = behave.live()
    do
      local net = parallel "data<0..3; zero=3>"(deep())
      one_step(net, adamw(net))
    end
    assert.equal(before, behave.live())
  end)
end)
