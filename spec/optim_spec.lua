-- Optimisers against plain-Lua formulas, their state, groups and clipping; schedules against theirs.
local orrery = require "orrery"
local core = require "orrery.core"
local nn, optim = orrery.nn, orrery.optim

local function flat(value, list)
  list = list or {}
  if type(value) == "table" then
    for i = 1, #value do flat(value[i], list) end
  else
    list[#list + 1] = value
  end
  return list
end

local function values(tensor) return flat(tensor:detach():totable()) end

local function assert_close(expected, actual, tolerance)
  assert.equal(#expected, #actual)
  for i = 1, #expected do
    local limit = (tolerance or 1e-6) * math.max(1, math.abs(expected[i]))
    local difference = math.abs(expected[i] - actual[i])
    if difference > limit or difference ~= difference then
      error(("element %d: expected %.12g, got %.12g"):format(i, expected[i], actual[i]), 2)
    end
  end
end

local function assert_error(pattern, fn)
  local ok, message = pcall(fn)
  assert.is_false(ok)
  message = tostring(message)
  assert.is_truthy(message:find(pattern, 1, true), message)
  assert.is_truthy(message:find("optim_spec.lua:", 1, true), message)
end

local function parameter(list) return orrery.tensor(list, { dtype = "f64", requires_grad = true }) end

-- The gradient used throughout: that of sum(k p + p^2 / 2), k + p, so that it depends on p.
local function set_gradient(p, k)
  p.grad = nil
  ((p * p) * 0.5 + p * k):sum():backward()
end

local start = { 1, -2, 0.5, 3 }

-- Plain-Lua references: each gives a function of (p, g, step, memory) for one number.
local references = {}

function references.SGD(o)
  return function(p, g, step, s)
    g = g + (o.weight_decay or 0) * p
    local momentum = o.momentum or 0
    if momentum > 0 then
      s.b = step == 1 and g or momentum * s.b + (1 - (o.dampening or 0)) * g
      g = o.nesterov and g + momentum * s.b or s.b
    end
    return p - o.lr * g
  end
end

local function adam(o, decoupled)
  local b1, b2 = (o.betas or {})[1] or 0.9, (o.betas or {})[2] or 0.999
  local decay = o.weight_decay or (decoupled and 0.01 or 0)
  return function(p, g, step, s)
    if decoupled then p = p - o.lr * decay * p else g = g + decay * p end
    s.m = b1 * (s.m or 0) + (1 - b1) * g
    s.v = b2 * (s.v or 0) + (1 - b2) * g * g
    local m, v = s.m / (1 - b1 ^ step), s.v / (1 - b2 ^ step)
    return p - o.lr * m / (math.sqrt(v) + (o.eps or 1e-8))
  end
end

function references.Adam(o) return adam(o, false) end
function references.AdamW(o) return adam(o, true) end

function references.RMSprop(o)
  local alpha, momentum = o.alpha or 0.99, o.momentum or 0
  return function(p, g, _, s)
    g = g + (o.weight_decay or 0) * p
    s.v = alpha * (s.v or 0) + (1 - alpha) * g * g
    local u = g / (math.sqrt(s.v) + (o.eps or 1e-8))
    if momentum > 0 then
      s.b = momentum * (s.b or 0) + u
      u = s.b
    end
    return p - o.lr * u
  end
end

local cases = {
  { "SGD", { lr = 0.1 } },
  { "SGD", { lr = 0.1, momentum = 0.9 } },
  { "SGD", { lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 0.2 } },
  { "SGD", { lr = 0.1, momentum = 0.5, dampening = 0.3 } },
  { "Adam", { lr = 0.1 } },
  { "Adam", { lr = 0.05, betas = { 0.8, 0.95 }, eps = 1e-4, weight_decay = 0.1 } },
  { "AdamW", { lr = 0.1 } },
  { "AdamW", { lr = 0.1, weight_decay = 0.5 } },
  { "RMSprop", { lr = 0.01 } },
  { "RMSprop", { lr = 0.01, alpha = 0.9, momentum = 0.8, weight_decay = 0.1, eps = 1e-3 } },
}

describe("optimisers", function()
  for _, case in ipairs(cases) do
    local name, options = case[1], case[2]
    local parts = {}
    for key, value in pairs(options) do
      local text = type(value) == "table" and table.concat(value, "/") or tostring(value)
      parts[#parts + 1] = key .. "=" .. text
    end
    table.sort(parts)

    it(name .. " " .. table.concat(parts, " ") .. " follows its formula", function()
      local p, expected, memory = parameter(start), {}, {}
      local reference = references[name](options)
      for i, v in ipairs(start) do expected[i], memory[i] = v, {} end
      local opt = optim[name]({ p }, options)
      for step = 1, 6 do
        for i, v in ipairs(expected) do expected[i] = reference(v, v + step, step, memory[i]) end
        set_gradient(p, step)
        opt:step()
        assert_close(expected, values(p), 1e-12)
      end
    end)
  end

  it("21, 23: skip parameters without a gradient, whose step counts stand still", function()
    local a, b = parameter(start), parameter(start)
    local options = { lr = 0.1, weight_decay = 0.1 }
    local opt = optim.Adam({ a, b }, options)
    local reference, memory, expected = references.Adam(options), {}, {}
    for i, v in ipairs(start) do expected[i], memory[i] = v, {} end
    local taken = 0
    for step = 1, 5 do
      set_gradient(a, step)
      b.grad = nil
      if step % 2 == 0 then
        taken = taken + 1
        for i, v in ipairs(expected) do expected[i] = reference(v, v + step, taken, memory[i]) end
        set_gradient(b, step)
      end
      opt:step()
      assert_close(expected, values(b), 1e-12)
    end
    assert.is_true(values(a)[1] ~= start[1])
    local frozen = nn.Linear(2, 2)
    local before = values(frozen.weight)
    local mixed = optim.SGD({ a, frozen.weight }, { lr = 1, weight_decay = 1 })
    frozen:freeze()
    set_gradient(a, 1)
    mixed:step()
    assert_close(before, values(frozen.weight), 0)
  end)

  it("22: update a parameter that is listed twice once", function()
    local a = parameter(start)
    set_gradient(a, 1)
    local g = values(a.grad)
    optim.SGD({ a, a }, { lr = 0.5 }):step()
    local expected = {}
    for i, v in ipairs(start) do expected[i] = v - 0.5 * g[i] end
    assert_close(expected, values(a), 1e-12)
  end)

  it("take groups with their own hyperparameters", function()
    local a, b, c = parameter(start), parameter(start), parameter(start)
    local opt = optim.SGD({ { params = { a } }, { params = { b }, lr = 0.25 } }, { lr = 0.5 })
    opt:add_param_group { params = { c }, lr = 1 }
    assert.equal(0.5, opt.param_groups[1].lr)
    for _, p in ipairs { a, b, c } do set_gradient(p, 0) end
    opt:step()
    for p, lr in pairs { [a] = 0.5, [b] = 0.25, [c] = 1 } do
      local expected = {}
      for i, v in ipairs(start) do expected[i] = v - lr * v end
      assert_close(expected, values(p), 1e-12)
    end
    opt:zero_grad()
    assert.is_nil(a.grad)
    assert.is_nil(c.grad)
  end)

  it("resume bit for bit from a state", function()
    for _, name in ipairs { "SGD", "Adam", "AdamW", "RMSprop" } do
      local options = { lr = 0.1 }
      if name == "SGD" or name == "RMSprop" then options.momentum = 0.9 end
      local a = parameter(start)
      local opt = optim[name]({ a }, options)
      local function run(o, p, from, to)
        for step = from, to do
          set_gradient(p, step)
          o:step()
        end
      end
      run(opt, a, 1, 3)
      local saved, state = values(a), opt:state()
      run(opt, a, 4, 6)
      local b = parameter(saved)
      local resumed = optim[name]({ b }, { lr = 7 }):load_state(state)
      assert.equal(0.1, resumed.param_groups[1].lr)
      run(resumed, b, 4, 6)
      assert_close(values(a), values(b), 0)
      -- the state is a snapshot: loading it again starts from step 3
      local c = parameter(saved)
      run(optim[name]({ c }, options):load_state(state), c, 4, 6)
      assert_close(values(a), values(c), 0)
    end
  end)

  it("24: go on when parameters are converted or moved in place", function()
    for _, target in ipairs { "f64", "cpu:1" } do
      local layer = nn.Linear(2, 2, { dtype = target == "f64" and "f32" or "f64" })
      local same = nn.Linear(2, 2, { dtype = "f64" })
      same:load_state(layer:state())
      local a = optim.Adam(layer:parameters(), { lr = 0.1 })
      local b = optim.Adam(same:parameters(), { lr = 0.1 })
      for step = 1, 4 do
        if step == 3 then layer:to(target) end
        for _, p in ipairs(layer:parameters()) do set_gradient(p, step) end
        for _, p in ipairs(same:parameters()) do set_gradient(p, step) end
        a:step()
        b:step()
      end
      assert_close(values(same.weight), values(layer.weight), target == "f64" and 1e-5 or 1e-12)
    end
  end)

  it("refuse a state that does not fit", function()
    local opt = optim.Adam({ parameter(start) })
    set_gradient(opt.param_groups[1].params[1], 1)
    opt:step()
    local state = opt:state()
    assert_error("the state is of Adam", function() optim.SGD({ parameter(start) }):load_state(state) end)
    assert_error("expected (2)", function() optim.Adam({ parameter({ 1, 2 }) }):load_state(state) end)
    assert_error("1 parameters, the state", function()
      state.groups[1].count = 2
      optim.Adam({ parameter(start) }):load_state(state)
    end)
  end)

  it("refuse mistakes at the caller's line", function()
    assert_error("the list of parameters is empty", function() optim.SGD({}) end)
    assert_error("unknown option 'learning_rate'", function()
      optim.SGD({ parameter(start) }, { learning_rate = 1 })
    end)
    assert_error("lr must be at least 0", function() optim.SGD({ parameter(start) }, { lr = -1 }) end)
    assert_error("nesterov needs momentum", function()
      optim.SGD({ parameter(start) }, { nesterov = true })
    end)
    assert_error("betas must be below 1", function()
      optim.Adam({ parameter(start) }, { betas = { 0.9, 1 } })
    end)
    assert_error("stands in groups 1 and 2", function()
      local a = parameter(start)
      optim.SGD { { params = { a } }, { params = { a } } }
    end)
    assert_error("is not a leaf", function() optim.SGD({ parameter(start) * 2 }) end)
    assert_error("not a tensor", function() optim.SGD({ 3 }) end)
  end)

  it("make no Lua table in a steady step", function()
    local a, b = parameter(start), parameter(start)
    local opt = optim.Adam({ a, b }, { lr = 0.1 })
    local ga, gb = parameter(start):detach(), parameter(start):detach()
    a.grad, b.grad = ga, gb
    local function garbage(step)
      for _ = 1, 500 do step() end -- compiled traces are memory, too
      collectgarbage()
      collectgarbage()
      collectgarbage("stop")
      local before = collectgarbage("count")
      for _ = 1, 200 do step() end
      local grown = (collectgarbage("count") - before) * 1024
      collectgarbage("restart")
      return grown / 200
    end
    local params, grads, t = { a, b }, {}, 0
    local first, second = { a:zeros_like(), b:zeros_like() }, { a:zeros_like(), b:zeros_like() }
    local bare = garbage(function()
      t = t + 1
      grads[1], grads[2] = a.grad, b.grad
      core.adam_(params, grads, first, second, t, 0.1, 0.9, 0.999, 1e-8, 0, false)
    end)
    local step = garbage(function() opt:step() end)
    -- an empty table is 32 bytes or more
    assert.is_true(step < bare + 16, ("%g bytes a step, the bare kernel %g"):format(step, bare))
  end)

  it("train a small network", function()
    orrery.manual_seed(2)
    local net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    local x = orrery.tensor { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 } }
    local y = orrery.tensor({ 1, 2, 2, 1 }, { dtype = "i64" })
    local opt = optim.Adam(net:parameters(), { lr = 0.05 })
    local first, last
    for _ = 1, 100 do
      local loss = nn.cross_entropy(net(x), y)
      opt:zero_grad()
      loss:backward()
      opt:step()
      last = loss:item()
      first = first or last
    end
    assert.is_true(last < 0.05 and first > 0.4, ("%g to %g"):format(first, last))
  end)
end)

describe("clipping", function()
  it("30: scales by the global norm and returns the norm before", function()
    local a, b, c = parameter { 0, 0 }, parameter { 0 }, parameter { 5 }
    a.grad, b.grad = parameter({ 3, 0 }):detach(), parameter({ 4 }):detach()
    assert_close({ 5 }, { optim.clip_grad_norm({ a, b, c }, 1) }, 1e-12)
    assert_close({ 0.6, 0 }, values(a.grad), 1e-5)
    assert_close({ 0.8 }, values(b.grad), 1e-5)
    local before = values(a.grad)
    assert_close({ 1 }, { optim.clip_grad_norm({ a, b, c }, 2) }, 1e-5)
    assert_close(before, values(a.grad), 0)
    assert.equal(0, optim.clip_grad_norm({ c }, 1))
  end)

  it("takes other norms, and limits values", function()
    local a = parameter { 0, 0, 0 }
    a.grad = parameter({ 1, -2, 4 }):detach()
    assert_close({ 7 }, { optim.clip_grad_norm({ a }, 100, { p = 1 }) }, 1e-12)
    assert_close({ 4 }, { optim.clip_grad_norm({ a }, 100, { p = math.huge }) }, 1e-12)
    optim.clip_grad_value({ a }, 1.5)
    assert_close({ 1, -1.5, 1.5 }, values(a.grad), 0)
  end)
end)

describe("schedules", function()
  local function rates(make, count)
    local opt = optim.SGD({ parameter(start) }, { lr = 2 })
    local schedule, list = make(opt), {}
    for i = 1, count do
      list[i] = opt.param_groups[1].lr
      schedule:step()
    end
    return list
  end

  it("cosine: a warm-up, then half a cosine to min", function()
    local list = rates(function(opt)
      return optim.schedule.cosine(opt, { warmup = 2, total = 6, min = 0.5 })
    end, 9)
    local function at(share) return 0.5 + 1.5 * (1 + math.cos(math.pi * share)) / 2 end
    assert_close({ 1, 2, at(0), at(0.25), at(0.5), at(0.75), 0.5, 0.5, 0.5 }, list, 1e-12)
  end)

  it("linear, step and lambda", function()
    assert_close({ 2, 1.5, 1, 0.5, 0, 0 },
      rates(function(opt) return optim.schedule.linear(opt, { total = 4 }) end, 6), 1e-12)
    assert_close({ 2, 2, 0.2, 0.2, 0.02 },
      rates(function(opt) return optim.schedule.step(opt, { size = 2 }) end, 5), 1e-12)
    assert_close({ 2, 1, 2 / 3 },
      rates(function(opt)
        return optim.schedule.lambda(opt, function(n) return 1 / (n + 1) end)
      end, 3), 1e-12)
  end)

  it("39: resume from a state, each group by its own base rate", function()
    local function make()
      local groups = { { params = { parameter(start) } }, { params = { parameter(start) }, lr = 4 } }
      local opt = optim.SGD(groups, { lr = 2 })
      return opt, optim.schedule.linear(opt, { total = 4 })
    end
    local opt, schedule = make()
    schedule:step()
    assert_close({ 1.5, 3 }, { opt.param_groups[1].lr, opt.param_groups[2].lr }, 1e-12)
    local other, resumed = make()
    resumed:load_state(schedule:state())
    assert_close({ 1.5, 3 }, { other.param_groups[1].lr, other.param_groups[2].lr }, 1e-12)
    resumed:step()
    assert_close({ 1, 2 }, { other.param_groups[1].lr, other.param_groups[2].lr }, 1e-12)
    assert_error("the state is of linear", function()
      optim.schedule.step(opt, { size = 1 }):load_state(schedule:state())
    end)
  end)

  it("refuse mistakes", function()
    local opt = optim.SGD({ parameter(start) })
    assert_error("total must be a whole number", function() optim.schedule.cosine(opt, {}) end)
    assert_error("longer than total", function() optim.schedule.linear(opt, { warmup = 5, total = 4 }) end)
    assert_error("must be an optimiser", function() optim.schedule.step({}, { size = 1 }) end)
  end)
end)
