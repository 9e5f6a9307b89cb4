-- The nets that plans and captured steps are tried on: name, constructor, batch of n samples.
-- Invariant: small, and of every kind of layer that is placed in a way of its own.
-- To add a net: a row in `nets`; `across` where a layer looks across the batch.
local orrery = require "orrery"
local nn = orrery.nn

-- A GPT: embeddings tied to the output, dropout. Its biases are left out where the loss does not
-- depend on them (that of keys): AdamW would turn their rounding noise into steps.
local GPT = nn.class("GPT", function(self, o)
  self.tokens = nn.Embedding(12, 12, o)
  self.positions = nn.Embedding(5, 12, o)
  self.dropout = nn.Dropout(0.1)
  self.blocks = nn.Sequential()
  for k = 1, 2 do
    self.blocks[k] = nn.TransformerBlock(12, 3,
      { causal = true, dropout = 0.1, bias = false, dtype = o.dtype })
  end
  self.norm = nn.LayerNorm(12, o)
end)

function GPT:forward(ids)
  local x = self.tokens(ids) + self.positions(orrery.arange(1, ids:size(2)))
  x = self.norm(self.blocks(self.dropout(x)))
  return x:matmul(self.tokens.weight:t())
end

-- Name, net, batch of n samples. Layers before batch norm have no bias, for the reason above.
local nets = {
  { "an MLP", function(o)
    return nn.Sequential(nn.Linear(6, 16, o), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 16, o),
      nn.LayerNorm(16, o), nn.GELU(), nn.Linear(16, 12, o), nn.Tanh(), nn.Linear(12, 4, o))
  end, function(n, o) return orrery.randn(n, 6, o), orrery.randint(1, 4, n) end },
  { "a CNN with batch norm", function(o)
    local plain = { padding = 1, bias = false, dtype = o.dtype }
    return nn.Sequential(nn.Conv2d(1, 6, 3, plain), nn.BatchNorm2d(6, o), nn.ReLU(), nn.MaxPool2d(2),
      nn.Conv2d(6, 5, 3, plain), nn.BatchNorm2d(5, o), nn.ReLU(), nn.Flatten(), nn.Linear(45, 4, o))
  end, function(n, o) return orrery.randn(n, 1, 6, 6, o), orrery.randint(1, 4, n) end, across = true },
  { "a GPT with tied embeddings", GPT, function(n)
    return orrery.randint(1, 12, n, 5), orrery.randint(1, 12, n, 5)
  end },
}

return nets
