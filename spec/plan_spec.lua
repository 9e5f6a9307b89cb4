-- Every plan computes what one device computes: 20 training steps from one seed, losses and final
-- weights within 1e-4 in f32 and 1e-9 in f64 of those of one device without a plan. Micro-batched
-- plans are compared with one device under the same micro-batches, and nets without batch norm with
-- the whole batch as well.
-- To add a plan: a line in `plans`. To add a net or a way to train: a row in `nets`, `recipes`.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nets = require "spec.support.nets"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

-- Under sanitizers and on fake GPUs, where a call costs tens of times as much: fewer steps, f64 alone.
local few = os.getenv "ORRERY_SANITIZER"
local steps = few and 3 or 20

-- The plans; `micro` is what is in the text.
local plans = {
  { "data<0,1>" },
  { "data<0..2>" },
  { "data<0,1; micro=3>", micro = 3 },
  { "data<0,1; bucket=1KiB>" },
  { "tensor<0,1>" },
  { "tensor<0..2>" },
  { "tensor<0,1; sequence=true>" },
  { "tensor<0..2; sequence=true>" },
  { "model<0,1>", micro = "default" },
  { "model<0..2; micro=5>", micro = 5 },
  { "model<0..2; micro=5, schedule=1f1b>", micro = 5 },
  { "model<0,1; micro=5, schedule=interleaved, chunks=2>", micro = 5 },
  { "model<0,1; micro=4, schedule=1f1b, recompute=true>", micro = 4 },
  { "data<tensor<0,1>, tensor<2,3>>" },
  { "tensor<data<0,1>, data<2,3>>" },
  { "data<tensor<0,1; sequence=true>, tensor<2,3; sequence=true>>" },
  { "model<tensor<0,1>, tensor<2,3>>", micro = "default" },
  { "model<tensor<0,1; sequence=true>, tensor<2,3; sequence=true>>", micro = "default" },
  { "data<model<0,1>, model<2,3>>", micro = "default" },
  { "model<data<0,1>, data<2,3>; micro=3, schedule=1f1b>", micro = 3 },
  { "data<model<tensor<0,1>, tensor<2,3>>, model<tensor<4,5>, tensor<6,7>>>", micro = "default" },
  { "model<data<tensor<0,1>, tensor<2,3>>, data<tensor<4,5>, tensor<6,7>>; micro=3, schedule=1f1b>",
    micro = 3 },
  { "data<0,1; zero=1>" },
  { "data<0..2; zero=2>" },
  { "data<0..2; zero=3>" },
  { "data<tensor<0,1>, tensor<2,3>; zero=1>" },
  { "data<tensor<0,1>, tensor<2,3>; zero=3>" },
}

local function flat(logits, y) -- (N, C) and (N), of (N, T, C) and (N, T) as well
  if logits:dim() == 3 then return logits:reshape(-1, logits:size(3)), y:reshape(-1) end
  return logits, y
end

local function mean(logits, y) return nn.cross_entropy(flat(logits, y)) end

-- The sum over samples whose label is not 2, and their number.
local function masked(logits, y)
  logits, y = flat(logits, y)
  return nn.cross_entropy(logits, y, { ignore_index = 2, reduction = "sum" }), y:ne(2):sum()
end

local function sgd(params) return optim.SGD(params, { lr = 0.05, momentum = 0.9, weight_decay = 1e-3 }) end
local function adamw(params) return optim.AdamW(params, { lr = 2e-3, eps = 1e-6 }) end

-- Name, optimizer, criterion, samples of a batch; clip: the norm; every: gradients of so many steps
-- are added up.
local recipes = {
  { "SGD with momentum, clipping", sgd, mean, 12, clip = 0.5 },
  { "AdamW, an uneven batch", adamw, mean, 11 },
  { "AdamW, a masked loss, accumulation by 3, clipping", adamw, masked, 11, every = 3, clip = 0.5 },
  { "SGD with momentum, orrery.accumulate over 3 uneven batches", sgd, masked, 7, joined = true },
}

-- One step's loss without a plan, cut into micro-batches by hand: the definition.
local function one_device(net, criterion, x, y)
  local loss, count = criterion(net(x), y)
  if count then loss = loss / count end
  loss:backward()
  return loss
end

local function joined_step(net, criterion, batch, o, n)
  local batches = {}
  for k = 1, 3 do batches[k] = { batch(n - k, o) } end
  return orrery.accumulate(batches, function(pair) return criterion(net(pair[1]), pair[2]) end)
end

-- Losses, final weights and buffers by name, trained under `plan` (nil: no plan).
local function train(row, recipe, dtype, plan)
  local _, make, batch = behave.unpack(row)
  local _, optimizer, criterion, n = behave.unpack(recipe)
  local o = { dtype = dtype }
  orrery.manual_seed(41)
  local net = make(o)
  if plan then plan(net) end
  local opt = optimizer(net:parameters())
  local losses = {}
  for k = 1, steps do
    local loss
    if recipe.joined then
      loss = joined_step(net, criterion, batch, o, n)
    else
      local x, y = batch(n, o)
      loss = plan and plan:step(net, criterion, x, y) or one_device(net, criterion, x, y)
    end
    losses[k] = type(loss) == "number" and loss or loss:item()
    if k % (recipe.every or 1) == 0 then
      if recipe.clip then optim.clip_grad_norm(net:parameters(), recipe.clip) end
      opt:step()
      opt:zero_grad()
    end
  end
  local state = {}
  for name, tensor in pairs(net:state()) do state[name] = behave.list(tensor) end
  return { losses = losses, state = state }
end

local function largest(list)
  local top = 0
  for _, v in ipairs(list) do top = math.max(top, math.abs(v)) end
  return top
end

local function compare(want, got, dtype, what)
  local relative = dtype == "f64" and 1e-9 or 1e-4
  for k, loss in ipairs(want.losses) do
    behave.near(loss, got.losses[k], relative * math.max(1, math.abs(loss)),
      ("%s, loss of step %d"):format(what, k))
  end
  for name, values in pairs(want.state) do
    assert(got.state[name], what .. ": no " .. name)
    behave.near(values, got.state[name], relative * math.max(1, largest(values)), what .. ", " .. name)
  end
end

-- What one device gives, each once.
local known = {}
local function reference(row, recipe, dtype, micro)
  local key = table.concat({ row[1], recipe[1], dtype, tostring(micro) }, "/")
  if not known[key] then
    known[key] = train(row, recipe, dtype, micro and parallel(("data<0; micro=%d>"):format(micro)) or nil)
  end
  return known[key]
end

local function check(entry, row, recipe, dtype)
  local got = train(row, recipe, dtype, parallel(entry[1]))
  local what = ("%s, %s, %s under %s"):format(row[1], recipe[1], dtype, entry[1])
  local micro = type(entry.micro) == "number" and entry.micro or nil
  if micro and not recipe.joined then
    compare(reference(row, recipe, dtype, micro), got, dtype, what .. " and micro-batches on one device")
    if row.across then return end
  end
  compare(reference(row, recipe, dtype), got, dtype, what)
end

describe("a plan", function()
  it("has references that learn", function()
    for _, row in ipairs(nets) do
      local losses = reference(row, recipes[1], "f64").losses
      for _, loss in ipairs(losses) do assert.is_true(loss > 0 and loss < 20) end
      assert.is_true(losses[1] ~= losses[2])
    end
  end)
  for _, entry in ipairs(plans) do
    for _, row in ipairs(nets) do
      it(("%s: %s trains as on one device"):format(entry[1], row[1]), function()
        for k, recipe in ipairs(recipes) do
          check(entry, row, recipe, "f64")
          if k <= 2 and not few then check(entry, row, recipe, "f32") end
        end
      end)
    end
  end
end)
