-- Captured steps that do what is easily recorded wrong: each row runs twice from one seed, as a function and
-- captured, and gives the same values; `replays` or `reason` says which of the two ways was taken.
-- To add one: a row {name, replays or reason, function(wrap)}: it makes its step by wrap and returns values.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local function on(values) return orrery.tensor(values, { dtype = "f64", device = device.single }) end
local function noise(...) return orrery.randn(..., f64):to(device.single or "cpu") end
local function linear(n, m)
  local net = nn.Linear(n, m, f64)
  return device.single and net:to(device.single) or net
end

local function weight()
  local w = on { 2 }
  w.requires_grad = true
  return w
end

local function values_of(list, out)
  out = out or {}
  for _, value in ipairs(list) do
    if type(value) == "table" then values_of(value, out)
    elseif type(value) == "number" then out[#out + 1] = value
    else for _, v in ipairs(behave.list(value)) do out[#out + 1] = v end end
  end
  return out
end

-- n values of f(k).
local function each(n, f)
  local list = {}
  for k = 1, n do list[k] = f(k) end
  return list
end

-- Twelve steps of a net with an optimizer that `change` changes before the seventh.
local function changed(make, change)
  return function(wrap)
    local net = linear(4, 3)
    local opt = make(net)
    local step = wrap(function(x)
      opt:zero_grad()
      local loss = net(x):square():mean()
      loss:backward()
      opt:step()
      return loss
    end)
    return each(12, function(k)
      if k == 7 then change(opt.param_groups[1], net) end
      return step(noise { 5, 4 }):item()
    end)
  end
end

local quick = { lr = 0.1, momentum = 0.9 }
local function of(class, options) return function(net) return class(net, options) end end

local function clipped(limits)
  return function(wrap)
    local net, n = linear(4, 3), 0
    local opt = optim.SGD(net, { lr = 0.1 })
    local step = wrap(function(x)
      opt:zero_grad()
      net(x):square():mean():backward()
      n = n + 1
      optim.clip_grad_norm(limits(net, n))
      opt:step()
    end)
    return each(9, function()
      step(noise { 5, 4 })
      return { net.weight * 1, net.bias * 1 }
    end)
  end
end

local optimizers = {
  { "momentum is switched on", 9, changed(of(optim.SGD, { lr = 0.1 }), function(g) g.momentum = 0.9 end) },
  { "momentum is switched off", 9, changed(of(optim.SGD, quick), function(g) g.momentum = 0 end) },
  { "nesterov is switched on", 9, changed(of(optim.SGD, quick), function(g) g.nesterov = true end) },
  { "RMSprop gets momentum", 9, changed(of(optim.RMSprop, {}), function(g) g.momentum = 0.5 end) },
  { "betas and decay change", 9, changed(of(optim.AdamW, {}), function(g)
    g.betas[1], g.weight_decay = 0.5, 0.4
  end) },
  { "a parameter goes", 9, changed(of(optim.Adam, {}), function(g, net) g.params = { net.weight } end) },
  { "a parameter stops asking for gradients", "is not wanted", changed(of(optim.SGD, {}), function(_, net)
    net.weight.requires_grad = false
  end) },
  { "a hook is registered", 6, changed(of(optim.SGD, { lr = 0.1 }), function(_, net)
    net.weight:register_hook(function(g) return g * 2 end)
  end) },
  { "a forward hook is registered", 6, changed(of(optim.SGD, { lr = 0.1 }), function(_, net)
    net:register_forward_hook(function(_, _, y) return y * 2 end)
  end) },
  { "parameters have taken other numbers of steps than when recorded", 14, function(wrap)
    local trunk, heads = linear(4, 3), { a = linear(3, 1), b = linear(3, 1) }
    local list = {}
    for _, net in ipairs { trunk, heads.a, heads.b } do
      for _, p in ipairs(net:parameters()) do list[#list + 1] = p end
    end
    local opt = optim.Adam(list, { lr = 0.1 })
    local step = wrap(function(head, x)
      opt:zero_grad()
      local loss = heads[head](trunk(x)):square():mean()
      loss:backward()
      opt:step()
      return loss
    end)
    return each(20, function(k) return step((k <= 5 or k > 11) and "a" or "b", noise { 5, 4 }):item() end)
  end },
  { "the norm to clip at changes", "clipping, an optimizer or a schedule", clipped(function(net, n)
    return net, 0.5 * 0.8 ^ n
  end) },
  { "what is clipped changes", "clipping, an optimizer or a schedule", clipped(function(net, n)
    return { n % 2 == 0 and net.weight or net.bias }, 0.01
  end) },
  { "two optimizers of the same parameters take turns", "clipping, an optimizer or a schedule", function(wrap)
    local w, n = weight(), 0
    local opts = { [0] = optim.SGD({ w }, { lr = 0.1 }), optim.SGD({ w }, { lr = 0.3 }) }
    local step = wrap(function(x)
      w.grad = nil
      (w * x):square():sum():backward()
      n = n + 1
      opts[n % 2]:step()
    end)
    return each(9, function()
      step(on { 1 })
      return w:item()
    end)
  end },
  { "a loss is scaled, and the scale set by hand", 6, function(wrap)
    local w, scaler = weight(), orrery.amp.Scaler { scale = 8, interval = 4 }
    scaler.factor = 4
    local step = wrap(function(x)
      w.grad = nil
      scaler:scale((w * x):sum()):backward()
    end)
    return each(9, function(k)
      if k == 8 then scaler.factor = 2 end
      step(on { 1 })
      scaler:update()
      return w.grad:item()
    end)
  end },
}

local arguments = {
  { "is written", "writes into an argument", function(wrap)
    local f = wrap(function(x)
      x:add_(1)
      return x * 2
    end)
    return each(6, function(k)
      local x = on { k }
      return { f(x), x }
    end)
  end },
  { "is written through a view, and given twice", "writes into an argument", function(wrap)
    local f = wrap(function(x, y)
      x[1]:mul_(3)
      return x + y
    end)
    return each(6, function(k)
      local x = on { k, k }
      return { f(x, x), x }
    end)
  end },
  { "is a tensor that the step writes elsewhere", "writes into an argument", function(wrap)
    local sum = on { 0 }
    local f = wrap(function(x)
      sum:add_(1)
      return x * 2
    end)
    return { each(6, function(k) return f(on { k }) end), each(3, function() return f(sum) end) }
  end },
  { "is returned", "keeps or returns an argument", function(wrap)
    return each(6, (function()
      local f = wrap(function(x) return x, x:reshape(2, 1) end)
      return function(k) return { f(on { k, k }) } end
    end)())
  end },
  { "is kept until the next call", "keeps or returns an argument", function(wrap)
    local before
    local f = wrap(function(x)
      local y = before and x - before or x * 1
      before = x
      return y
    end)
    return each(7, function(k) return f(on { k * k }) end)
  end },
  { "is a table that gets an entry", "writes into an argument", function(wrap)
    local f = wrap(function(batch)
      batch.twice = batch.x * 2
      return batch.x + 1
    end)
    return each(6, function(k)
      local batch = { x = on { k } }
      return { f(batch), batch.twice }
    end)
  end },
}

local function penalty(wrap)
  local net = linear(4, 1)
  local opt = optim.Adam(net, { lr = 0.1 })
  local step = wrap(function(x)
    opt:zero_grad()
    local inner = x * 0.5
    inner = inner:detach()
    inner.requires_grad = true
    local slope = orrery.grad(net(inner):tanh():sum(), { inner }, { create_graph = true })
    local loss = ((type(slope) == "table" and slope[1] or slope):square():sum(2) - 1):square():mean()
    loss:backward()
    opt:step()
    return loss
  end)
  return each(9, function() return step(noise { 5, 4 }):item() end)
end

local gradients = {
  { "are set by the script to another tensor", "is another tensor", function(wrap)
    local w, g = weight(), on { 0 }
    local f = wrap(function(x) (w * x):sum():backward() end)
    return each(10, function(k)
      w.grad = k < 7 and g or on { 100 }
      g:zero_()
      f(on { k })
      return w.grad:item()
    end)
  end },
  { "decide what the step does", "is there", function(wrap)
    local w = weight()
    local f = wrap(function(x) return w.grad and x * 2 or x * 1 end)
    return each(9, function(k)
      if k == 6 then w.grad = on { 1 } end
      return f(on { k })
    end)
  end },
  { "of tensors that the step makes are nobody's", 6, penalty },
  { "of one form outlive a call of another", 10, function(wrap)
    local net = linear(8, 8)
    local f = wrap(function(train, x)
      if not train then return orrery.no_grad(function() return (net(net(x)) + net(x:t())):sum() end) end
      net:zero_grad()
      local loss = net(x):square():mean()
      loss:backward()
      return loss
    end)
    local first = each(8, function() return f(false, noise { 8, 8 }) end)
    return { first, each(8, function()
      local a, b = f(true, noise { 8, 8 }), f(false, noise { 8, 8 })
      return { a, b, net.weight.grad:sum(), net.bias.grad:sum() }
    end) }
  end, 18 },
  { "accumulate within orrery.accumulate", "orrery.accumulate", function(wrap)
    local net = linear(4, 3)
    local f = wrap(function(x)
      net(x):square():sum():backward()
      return (x * 1):sum()
    end)
    for _ = 1, 4 do
      net:zero_grad()
      f(noise { 5, 4 })
    end
    return each(3, function()
      net:zero_grad()
      orrery.accumulate({ noise { 5, 4 } }, function(x)
        f(x)
        return net(x):square():sum(), 15
      end)
      return net.weight.grad * 1
    end)
  end },
}

local memory = {
  { "partial sums, given and taken, stay the same parts", 10, function(wrap)
    local net = nn.Linear(4, 4)
    parallel("data<0,1>")(net)
    local f = wrap(function(x, y)
      return orrery.no_grad(function()
        y = y or net(x):sum(1)
        return y * 1, (y * 3):sum(), y + 1
      end)
    end)
    return each(8, function()
      local part = f(orrery.randn(6, 4))
      return { part, { f(orrery.zeros(1), part * 1.5) } }
    end)
  end },
  { "what a refused form gave is not written by a replay of another", 9, function(wrap)
    local w, kept = weight(), {}
    local f = wrap(function(graph, x)
      if graph then return (w * x):exp() end
      for _ = 1, 6 do x = (x + 1) * 0.2 end
      return x
    end)
    for _ = 1, 6 do f(false, noise { 4 }) end
    for k = 1, 6 do
      kept[k] = f(true, noise { 4 })
      f(false, noise { 4 })
    end
    return kept
  end },
}

local function check(row)
  local _, want, make = behave.unpack(row)
  orrery.manual_seed(17)
  local plain, captured = values_of(make(function(f) return f end)), nil
  orrery.manual_seed(17)
  local got = values_of(make(function(f)
    captured = orrery.capture(f)
    return captured
  end))
  assert.same(plain, got)
  if type(want) == "number" then assert.equal(row[4] or want, captured.replays, tostring(captured))
  else assert.matches(want, tostring(captured), 1, true) end
end

for _, group in ipairs { { "where", optimizers }, { "whose argument", arguments },
  { "whose gradients", gradients }, { "in memory:", memory } } do
  describe("a captured step " .. group[1], function()
    for _, row in ipairs(group[2]) do
      it(row[1], function() check(row) end)
    end
  end)
end

describe("a captured step that yields", function()
  it("is refused, and what runs meanwhile is not recorded", function()
    local f = orrery.capture(function(x)
      coroutine.yield()
      return x * 2
    end)
    local thread = coroutine.create(function() return pcall(f, on { 1 }) end)
    local _, ok, message = coroutine.resume(thread)
    assert.is_false(ok)
    assert.matches("yield", message)
    local w = weight()
    local opt = optim.SGD({ w }, { lr = 1 })
    w.grad = on { 1 }
    opt:step()
    assert.equal(1, w:item())
  end)
end)

describe("captured steps that are dropped", function()
  it("give their memory back", function()
    local name = device.single or "cpu"
    local function live()
      for _ = 1, 3 do collectgarbage() end
      orrery.synchronize()
      local m = orrery.memory(name)
      return m.live, m.live + m.cached
    end
    local function some(n)
      for k = 1, n do
        local f, y = orrery.capture(function(x) return x * 2 + k end), nil
        for _ = 1, 5 do y = f(on { 1, 2, 3 }) end
        assert.equal(2, f.replays)
        assert.equal(2 + k, y[1]:item())
      end
    end
    some(20)
    local before, all_before = live()
    some(200)
    local after, all = live()
    assert.is_true(after <= before + 1024, ("%d, %d"):format(before, after))
    assert.is_true(all <= all_before + 2 ^ 16, ("%d, %d"):format(all_before, all))
  end)

  it("under a plan, while replays of them wait", function()
    local net = nn.Linear(16, 16)
    parallel("data<0,1>")(net)
    local function last(captured)
      orrery.manual_seed(3)
      local f = function(x) return orrery.no_grad(function() return net(net(net(x))):sum() end) end
      f = captured and orrery.capture(f) or f
      local y
      for _ = 1, 6 do y = f(orrery.randn(64, 16)) end
      return y
    end
    local y = last(true)
    collectgarbage()
    collectgarbage()
    behave.near({ last(false):item() }, { y:item() }, device.kind == "cuda" and 1e-4 or 0)
  end)
end)
