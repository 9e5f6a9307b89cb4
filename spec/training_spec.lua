-- The loss curve over 200 steps under data<0,1>, data<0..2> and data<0..4> is one device's: within
-- 1e-4 (loss + 0.01) in f32 and 1e-9 in f64, batch norm and dropout on, the last batch uneven.
-- To add a net: a row in `nets`; keep it small, every run takes 200 steps.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

local steps = os.getenv "ORRERY_SANITIZER" and 40 or 200
local samples, batch = 103, 20 -- batches of 20 and one of 3

-- Samples of four classes whose centres lie apart: something to learn.
local function make_data(dtype, shape)
  orrery.manual_seed(81)
  local size = 1
  for _, n in ipairs(shape) do size = size * n end
  local y = orrery.randint(1, 4, samples)
  local centres = orrery.randn(4, size, { dtype = "f64" })
  local x = centres:index_select(1, y) * 0.7 + orrery.randn(samples, size, { dtype = "f64" })
  return x:to(dtype):view(samples, behave.unpack(shape)), y
end

local nets = {
  { "an MLP with AdamW", { 6 }, function(o)
    return nn.Sequential(nn.Linear(6, 16, o), nn.BatchNorm1d(16, o), nn.ReLU(), nn.Dropout(0.25),
      nn.Linear(16, 16, o),
      nn.LayerNorm(16, o), nn.GELU(), nn.Linear(16, 4, o))
  end, function(params) return optim.AdamW(params, { lr = 3e-3 }) end },
  { "a CNN with SGD, momentum and clipping", { 1, 6, 6 }, function(o)
    return nn.Sequential(nn.Conv2d(1, 4, 3, { padding = 1, dtype = o.dtype }), nn.BatchNorm2d(4, o),
      nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 4, o))
  end, function(params) return optim.SGD(params, { lr = 0.02, momentum = 0.9, weight_decay = 1e-4 }) end, 1 },
}

-- Losses of all steps, and predictions at the end.
local function train(row, dtype, text)
  local _, shape, make, optimizer, clip = behave.unpack(row)
  local X, Y = make_data(dtype, shape)
  orrery.manual_seed(82)
  local net = make { dtype = dtype }
  local plan = text and parallel(text)
  if plan then plan(net) end
  local opt = optimizer(net:parameters())
  local batches = data.batches({ X, Y }, { batch = batch, shuffle = true, plan = plan })
  local losses = {}
  while #losses < steps do
    for x, y in batches do
      opt:zero_grad()
      local loss = nn.cross_entropy(net(x), y)
      loss:backward()
      if clip then optim.clip_grad_norm(net:parameters(), clip) end
      opt:step()
      losses[#losses + 1] = loss:item()
      if #losses == steps then break end
    end
  end
  net:eval()
  return losses, behave.list(net(X):argmax(2)), behave.list(Y)
end

local function correct(predicted, labels)
  local right = 0
  for k, label in ipairs(labels) do right = right + (predicted[k] == label and 1 or 0) end
  return right
end

describe("training under data<>", function()
  for _, row in ipairs(nets) do
    for _, dtype in ipairs { "f32", "f64" } do
      it(("%s, %s: the curve of %d steps is one device's"):format(row[1], dtype, steps), function()
        local want, predicted, labels = train(row, dtype)
        local last = 0
        for k = #want - 9, #want do last = last + want[k] / 10 end
        assert.is_true(steps < 200 or last < 0.8 * want[1], ("it does not learn: %g then %g"):format(want[1],
          last))
        for _, text in ipairs { "data<0,1>", "data<0..2>", "data<0..4>" } do
          local got, other = train(row, dtype, text)
          for k, loss in ipairs(want) do
            local tolerance = dtype == "f64" and 1e-9 or 1e-4 * (loss + 0.01)
            assert(math.abs(loss - got[k]) <= tolerance,
              ("%s, step %d: %.12g, one device %.12g, apart by %.3g, allowed %.3g")
              :format(text, k, got[k], loss, math.abs(loss - got[k]), tolerance))
          end
          assert.is_true(math.abs(correct(predicted, labels) - correct(other, labels)) <= 2, text)
        end
      end)
    end
  end
end)
