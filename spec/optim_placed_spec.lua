-- Optimisers, clipping and random numbers over every layout: the numbers of one device.
-- To add an optimiser: its row in `optimisers`.
local orrery = require "orrery"
local core = require "orrery.core"
local array = require "spec.support.array"
local placed = require "spec.support.placed"
local matrix = require "spec.support.matrix"

local optim = orrery.optim

local optimisers = {
  { "SGD", { lr = 0.1 } },
  { "SGD", { lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 0.2 } },
  { "SGD", { lr = 0.1, momentum = 0.5, dampening = 0.3 } },
  { "Adam", { lr = 0.1, weight_decay = 0.1 } },
  { "AdamW", { lr = 0.1, weight_decay = 0.3 } },
  { "RMSprop", { lr = 0.02, alpha = 0.9, momentum = 0.8, weight_decay = 0.1 } },
}

local shapes = { { 7, 3 }, { 2, 4 }, { 1 }, {}, { 0, 3 } }

local function drawn(seed)
  local rand, list = array.random(seed), {}
  for k, shape in ipairs(shapes) do list[k] = rand.grid(shape) end
  return list
end

local function host(a) return placed.host(a) end

local function same(where, want, tensor, tolerance)
  local difference = matrix.difference(placed.array(tensor), want, tolerance or 1e-12)
  if difference then error(where .. ": " .. difference, 0) end
end

-- place(array, k) gives a parameter, place_grad(array, k) a gradient; gives the parameters after 3 steps.
local function train(kind, place, place_grad)
  local params = {}
  for k, a in ipairs(drawn(3)) do params[k] = place(a, k):requires_grad_() end
  local options = {}
  for key, value in pairs(kind[2]) do options[key] = value end
  local opt = optim[kind[1]](params, options)
  for step = 1, 3 do
    for k, g in ipairs(drawn(10 + step)) do params[k].grad = place_grad(g, k) end
    opt:step()
  end
  return params
end

-- A parameter is never partial, its gradient may be.
local function words(m, a, partial, rand)
  local list = {}
  for _, word in ipairs(placed.words(a, partial)) do
    if not word:find "cut" then list[#list + 1] = word end
  end
  return rand.pick(placed.choices(list, m))
end

describe("over every layout,", function()
  for _, kind in ipairs(optimisers) do
    it(kind[1] .. " steps as on one device", function()
      local want = {}
      for k, p in ipairs(train(kind, host, host)) do want[k] = placed.array(p) end
      local rand = array.random(5)
      for _, m in ipairs(placed.meshes) do
        for round = 1, 12 do
          local at = {}
          local params = train(kind, function(a, k)
            at[k] = words(m, a, false, rand)
            return placed.place(a, m, at[k])
          end, function(g)
            return placed.place(g, m, words(m, g, true, rand))
          end)
          for k, p in ipairs(params) do
            same(("%s, round %d, parameter %d"):format(m.name, round, k), want[k], p)
            assert.same(at[k], core.placements(p))
          end
        end
      end
    end)
  end

  it("norms, scaling and finiteness count every element once", function()
    local rand = array.random(6)
    for _, m in ipairs(placed.meshes) do
      for _, p in ipairs { 2, 1, 3, math.huge } do
        local total, arrays, list = 0, drawn(20), {}
        for k, a in ipairs(arrays) do
          list[k] = placed.place(a, m, words(m, a, true, rand))
          for _, v in ipairs(a.data) do
            total = p == math.huge and math.max(total, math.abs(v)) or total + math.abs(v) ^ p
          end
        end
        local want = p == math.huge and total or total ^ (1 / p)
        local got = core.grad_norm(list, p):item()
        assert.is_true(math.abs(got - want) < 1e-9 * want,
          ("%s: norm %g is %.12g, not %.12g"):format(m.name, p, got, want))
        assert.is_true(core.all_finite(list))
        core.scale_(list, 0.25)
        for k, t in ipairs(list) do
          same(m.name, array.map(function(v) return v / 4 end, arrays[k]), t)
        end
      end
      for _, bad in ipairs { 0 / 0, 1 / 0 } do
        local a = array.new({ 5, 3 }, rand.grid({ 5, 3 }).data)
        a.data[14] = bad
        assert.is_false(core.all_finite { placed.place(a, m, words(m, a, false, rand)) })
      end
    end
  end)

  it("clipping gives what one device gives", function()
    local rand = array.random(8)
    local function clipped(place, clip)
      local params = {}
      for k, a in ipairs(drawn(30)) do
        params[k] = place(a, true):requires_grad_()
        params[k].grad = place(a, false)
      end
      local value = clip(params)
      local grads = {}
      for k, p in ipairs(params) do grads[k] = placed.array(p.grad) end
      return grads, value
    end
    local clips = {
      function(params) return optim.clip_grad_norm(params, 1.5) end,
      function(params) optim.clip_grad_value(params, 0.5) end,
    }
    for which, clip in ipairs(clips) do
      local want, norm = clipped(host, clip)
      for _, m in ipairs(placed.meshes) do
        for _ = 1, 10 do
          local got, value = clipped(function(a, parameter)
            return placed.place(a, m, words(m, a, not parameter, rand))
          end, clip)
          if norm then assert.is_true(math.abs(value - norm) < 1e-12) end
          for k, g in ipairs(got) do
            local difference = matrix.difference(g, want[k], 1e-12)
            assert.is_nil(difference, ("clip %d on %s: %s"):format(which, m.name, tostring(difference)))
          end
        end
      end
    end
  end)

  it("dropout of one seed drops the same elements, twice different ones", function()
    local a = array.full({ 13, 7 }, 1)
    local function masks(x)
      orrery.manual_seed(4)
      return placed.array(core.dropout(x, 0.5)), placed.array(core.dropout(x, 0.5))
    end
    local first, second = masks(placed.host(a))
    assert.is_not_nil(matrix.difference(first, second, 0))
    for _, m in ipairs(placed.meshes) do
      for _, w in ipairs(placed.choices(placed.words(a, true), m)) do
        local one, two = masks(placed.place(a, m, w))
        assert.is_nil(matrix.difference(one, first, 0), m.name .. " " .. table.concat(w, " "))
        assert.is_nil(matrix.difference(two, second, 0), m.name .. " " .. table.concat(w, " "))
      end
    end
  end)

  it("random tensors of one seed are the same on every device", function()
    local makers = {
      function(o) return orrery.rand(5, 3, o) end, function(o) return orrery.randn(5, 3, o) end,
      function(o) return orrery.bernoulli(0.4, 5, 3, o) end,
      function(o) return orrery.randint(1, 9, 5, 3, { device = o.device }) end,
    }
    for k, make in ipairs(makers) do
      orrery.manual_seed(9)
      local want = placed.array(make { device = "cpu" })
      for _, device in ipairs { "cpu:0", "cpu:3" } do
        orrery.manual_seed(9)
        same("maker " .. k .. " on " .. device, want, make { device = device }, 0)
      end
      local again = make { device = "cpu" }
      assert.is_not_nil(matrix.difference(placed.array(again), want, 0))
    end
  end)

  it("parts, stacks and indices give what one device gives", function()
    -- split, chunk and stack are made of ops that the matrix covers; here with placements.
    local a = array.random(2).grid { 7, 4 }
    for _, m in ipairs(placed.meshes) do
      for _, w in ipairs(placed.choices(placed.words(a, true), m)) do
        local x = placed.place(a, m, w)
        same(m.name, a, orrery.cat(x:chunk(3, 1), 1))
        same(m.name, a, orrery.cat(x:split({ 1, 3 }, 2), 2))
        local both = orrery.stack({ x, x }, 2)
        same(m.name, a, (both:select(2, 2)))
        same(m.name, a, (both[{ {}, 1, {} }]))
        local row = array.reshape(array.narrow(a, 1, 6, 1), { 4 })
        same(m.name, row, x[6])
        same(m.name, array.narrow(a, 2, 2, 2), x[{ {}, { 2, 3 } }])
        assert.equal(28, x:numel())
        assert.same({ 7, 4 }, x:size())
        assert.is_truthy(tostring(x):find "%(7, 4%) f64")
      end
    end
  end)
end)
