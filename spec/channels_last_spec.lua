-- Ops whose fast paths look at the strides of (N, C, H, W): channels-last input, and gradients
-- that arrive in either order, against the same op on NCHW in f64.
-- To add an op: a case that names how it is called.
local orrery = require "orrery"
local core = require "orrery.core"

-- The same values in (N, C, H, W) order and with the channels last, each a leaf.
local function both(shape)
  local n, c, h, w = shape[1], shape[2], shape[3], shape[4]
  local base = orrery.randn(n, h, w, c):mul(2):floor():mul(0.5) -- equal values are common
  local last = base:clone():requires_grad_()
  local first = base:to("f64"):permute(1, 4, 2, 3):contiguous():requires_grad_()
  return first, last, last:permute(1, 4, 2, 3)
end

-- weights give every output its own gradient; flat sends the gradient back in NCHW order.
local function run(f, leaf, x, weights, flat)
  local y = f(x)
  local out = flat and y:flatten(2) or y
  local factor = weights:to(y:dtype())
  local loss = (out * (flat and factor:flatten(2) or factor)):sum()
  loss:backward()
  return y, leaf.grad
end

local function difference(a, b) return (a:to("f64") - b:to("f64")):abs():max():item() end

local function check(name, f, shape)
  for _, flat in ipairs { false, true } do
    local sizes, after = table.concat(shape, ", "), flat and ", then flatten" or ""
    it(("%s of (%s)%s"):format(name, sizes, after), function()
      orrery.manual_seed(3)
      local first, leaf, last = both(shape)
      local weights = orrery.randn(f(first:detach()):size())
      local y1, g1 = run(f, first, first, weights, flat)
      local y2, g2 = run(f, leaf, last, weights, flat)
      assert.is_true(difference(y1, y2) <= 1e-5)
      assert.is_true(difference(g1, g2:permute(1, 4, 2, 3)) <= 1e-5)
    end)
  end
end

describe("channels-last", function()
  local shapes = {
    { 3, 8, 6, 6 }, { 2, 70, 7, 37 }, { 1, 1, 5, 4 }, { 2, 3, 4, 4 }, { 4, 64, 24, 24 },
  }
  local function pool(k, s, p, d)
    return function(x) return core.max_pool2d(x, k, k, s, s, p, p, d, d) end
  end
  for _, shape in ipairs(shapes) do
    check("max_pool2d 2", pool(2, 2, 0, 1), shape)
    check("max_pool2d 3", pool(3, 3, 0, 1), shape)
    check("max_pool2d 3, stride 2, padding 1", pool(3, 2, 1, 1), shape)
    check("relu", function(x) return x:relu() end, shape)
  end

  it("max_pool2d gives a NaN on and its gradient to it", function()
    local x = orrery.ones(1, 2, 2, 8)
    x[1][1][2]:fill_(0 / 0)
    x:requires_grad_()
    local y = core.max_pool2d(x:permute(1, 4, 2, 3), 2, 2, 2, 2, 0, 0, 1, 1)
    assert.is_true(y[1][8][1][1]:item() ~= y[1][8][1][1]:item())
    y:sum():backward()
    assert.are.equal(1, x.grad[1][1][2][8]:item())
    assert.are.equal(0, x.grad[1][1][1][8]:item())
  end)
end)
