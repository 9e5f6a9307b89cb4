-- orrery.amp.autocast: which ops run in the narrow type, that parameters and gradients stay f32, that plans
-- agree, and that the mode ends with the function.
-- To add an op: the dtype that it gives, under `gives`.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel, amp = orrery.nn, orrery.optim, orrery.parallel, orrery.amp

describe("autocast", function()
  local gives = {
    { "linear", "bf16", function(x) return core.linear(x, orrery.ones(3, 4)) end },
    { "matmul", "bf16", function(x) return x:matmul(orrery.ones(4, 3)) end },
    { "softmax of a product", "f32", function(x) return x:matmul(orrery.ones(4, 3)):softmax(2) end },
    { "sum of a product", "f32", function(x) return x:matmul(orrery.ones(4, 3)):sum(1) end },
    { "layer norm of a product", "f32", function(x) return nn.LayerNorm(3)(x:matmul(orrery.ones(4, 3))) end },
    { "a bf16 and an f32 added", "f32", function(x) return x:matmul(orrery.ones(4, 4)) + x end },
    { "relu of a product", "bf16", function(x) return x:matmul(orrery.ones(4, 4)):relu() end },
    { "f64 products", "f64", function(x)
      return x:to("f64"):matmul(orrery.ones(4, 3, { dtype = "f64" }))
    end },
  }
  for _, case in ipairs(gives) do
    it(case[1] .. " gives " .. case[2], function()
      assert.equal(case[2], amp.autocast("bf16", case[3], orrery.randn(2, 4)):dtype())
    end)
  end

  local function train(text)
    orrery.manual_seed(3)
    local net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    local x, y = orrery.randn(32, 8), orrery.randint(1, 4, 32)
    local plan = text and parallel(text)
    if plan then plan(net, x) end
    local opt, losses = optim.AdamW(net:parameters(), { lr = 0.01 }), {}
    for k = 1, 20 do
      opt:zero_grad()
      losses[k] = amp.autocast("bf16", function()
        if plan then return plan:step(net, nn.cross_entropy, x, y) end
        local loss = nn.cross_entropy(net(x), y)
        loss:backward()
        return loss
      end):item()
      for _, p in ipairs(net:parameters()) do
        assert.equal("f32", p:dtype())
        assert.equal("f32", p.grad:dtype())
      end
      opt:step()
    end
    return losses
  end

  it("trains, with f32 parameters and gradients, within bf16's rounding of f32", function()
    local losses = train()
    assert.is_true(losses[20] < 0.8 * losses[1])
  end)

  for _, text in ipairs { "data<0,1>", "tensor<0,1>", "model<0,1; micro=2, recompute=true>" } do
    it(text .. " agrees with one device to bf16's rounding", function()
      local want, got = train(), train(text)
      for k, loss in ipairs(want) do assert.near(loss, got[k], 0.03 * math.max(1, loss)) end
    end)
  end

  it("belongs to the micro-batch in which it was begun, where a pipeline changes between them", function()
    local losses = {}
    if _VERSION == "Lua 5.1" and not rawget(_G, "jit") then return end -- no yield crosses its pcall
    local plans = { "data<0; micro=4>", "model<0,1; micro=4>", "model<0,1; micro=4, schedule=1f1b>" }
    for k, plan in ipairs(plans) do
      orrery.manual_seed(3)
      local net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
      local seen = {}
      local forward = net.forward
      function net.forward(self, x)
        seen[#seen + 1] = tostring(core.autocast())
        return orrery.amp.autocast("bf16", forward, self, x)
      end
      plan = parallel(plan)
      plan(net)
      local loss = plan:step(net, function(y)
        seen[#seen + 1] = tostring(core.autocast())
        return y:to("f32"):square():sum()
      end, orrery.randn(8, 8))
      for _, mode in ipairs(seen) do assert.equal("nil", mode) end
      assert.is_nil(core.autocast())
      losses[k] = loss:item()
    end
    assert.equal(losses[1], losses[2])
    assert.equal(losses[1], losses[3])
  end)

  it("ends with the function, also when that fails", function()
    behave.raises(function() amp.autocast("bf16", function() error("inner", 0) end) end, "inner")
    assert.is_nil(core.autocast())
    assert.equal("f32", orrery.ones(2, 2):matmul(orrery.ones(2, 2)):dtype())
  end)

  it("refuses another dtype by name", function()
    behave.raises(function() amp.autocast("i32", print) end, "autocast", "bf16")
  end)
end)
