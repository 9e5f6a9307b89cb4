-- net:plan() gives the plan back with the balance that was found, as text that can be pasted.
-- To add a form: a row in `forms`.
local orrery = require "orrery"
local nn, parallel = orrery.nn, orrery.parallel
local resolved = require "orrery.parallel.resolved"

local forms = {
  { "model<0,1>", "model<0: 4, 1: 4>" },
  { "model<0..3; micro=2>", "model<0: 2, 1: 2, 2: 2, 3: 2; micro=2>" },
  { "data<model<0,1>, model<2,3>>", "data<model<0: 4, 1: 4>, model<2: 4, 3: 4>>" },
  { "model<tensor<0,1>, tensor<2,3>>", "model<tensor<0,1>: 4, tensor<2,3>: 4>" },
  { "data<0,1>", "data<0,1>" },
  { "model<0: 2, 1: 6>", "model<0: 2, 1: 6>" },
}

local function blocks(n)
  local layers = {}
  for k = 1, n do layers[k] = nn.Linear(4, 4) end
  return nn.Sequential((table.unpack or unpack)(layers))
end

describe("a placed net's plan", function()
  for _, form in ipairs(forms) do
    it("of " .. form[1] .. " is " .. form[2], function()
      local net = parallel(form[1])(blocks(8), orrery.zeros(4, 4))
      assert.equal(form[2], tostring(net:plan()))
      local again = parallel(tostring(net:plan()))(blocks(8), orrery.zeros(4, 4))
      assert.equal(form[2], tostring(again:plan()))
      local loss = net:plan():step(net, nn.mse_loss, orrery.zeros(8, 4), orrery.zeros(8, 4))
      assert.equal(0, loss:dim())
    end)
  end

  it("keeps its text where counts cannot say it", function()
    assert.equal("model<model<0,1>, 2>", resolved.text("model<model<0,1>, 2>", { 1, 1, 1 }))
    assert.equal("model<0,1>", resolved.text("model<0,1>", { 1, 1, 1, 1 }))
  end)

  it("replaces the stages of a plan that placed it before", function()
    local net = parallel "model<0,1>"(blocks(8), orrery.zeros(4, 4))
    net = parallel "data<2,3>"(net)
    local y = net(orrery.zeros(6, 4))
    assert.equal("data<2,3>: shard(1)", y:layout())
    y:sum():backward()
    assert.equal("data<2,3>: replicate", net:parameters()[1].grad:layout())
  end)
end)
