-- Two operations of one's own, with gradients of one's own.
--
--   orrery examples/custom_op.lua [--steps N]
local orrery = require "orrery"
local nn, optim = orrery.nn, orrery.optim

local steps = arg[1] == "--steps" and tonumber(arg[2]) or 300
orrery.manual_seed(1)

-- Swish with a slope beta that is learned: y = x s(beta x), s the logistic function (Ramachandran,
-- Zoph & Le 2017, section 4). forward returns the value and keeps in ctx what backward needs;
-- backward gets the gradient of the value and returns one for each argument.
local swish = orrery.custom {
  forward = function(ctx, x, beta)
    local s = (x * beta):sigmoid()
    ctx.x, ctx.beta, ctx.s = x, beta, s
    return x * s
  end,
  backward = function(ctx, g)
    local x, beta, s = ctx.x, ctx.beta, ctx.s
    local slope = s * (1 - s) -- s'(beta x)
    local gx = g * (s + x * beta * slope)
    local gbeta = (g * x * x * slope):sum():view(1)
    return gx, gbeta
  end,
}

-- gradcheck compares backward with differences of forward, in f64, and names the element that is off.
local x = orrery.randn(3, 4, { dtype = "f64", requires_grad = true })
local beta = orrery.tensor({ 0.7 }, { dtype = "f64", requires_grad = true })
assert(orrery.gradcheck(swish, { x, beta }))
print("swish: the gradients of x and beta are right")

-- The sign of x with the gradient of the identity where |x| <= 1, so that what stands before a step
-- can learn (the straight-through estimator: Bengio, Leonard & Courville 2013, section 4). It is no
-- derivative, so gradcheck would refuse it, and rightly.
local sign_through = orrery.custom {
  forward = function(ctx, v)
    ctx.inside = v:abs():le(1)
    return v:sign()
  end,
  backward = function(ctx, g) return g * ctx.inside:to(g:dtype()) end,
}

-- Both at work: is a point inside the circle of radius 0.8? The last layer sees eight signs only.
local Net = nn.class("Net", function(self)
  self.first, self.codes, self.last = nn.Linear(2, 32), nn.Linear(32, 8), nn.Linear(8, 2)
  self.beta = nn.parameter(orrery.ones(1))
end)

function Net:forward(points) -- (N, 2) -> (N, 2)
  return self.last(sign_through(self.codes(swish(self.first(points), self.beta))))
end

local points = orrery.rand(512, 2) * 2 - 1
local class = (points * points):sum(2):lt(0.64):to "i64" + 1 -- 1 outside, 2 inside
local net = Net()
local opt = optim.Adam(net:parameters(), { lr = 0.01 })

for step = 1, steps do
  opt:zero_grad()
  local logits = net(points)
  local loss = nn.cross_entropy(logits, class)
  loss:backward()
  opt:step()
  if step == 1 or step % 100 == 0 or step == steps then
    local right = logits:argmax(2):eq(class):to "f32":mean():item()
    print(("step %4d  loss %.4f  right %.1f %%  beta %.3f"):format(step, loss:item(), 100 * right,
      net.beta:item()))
  end
end
