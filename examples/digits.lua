-- Trains a classifier of hand-written digits, on one device or on many.
--
--   orrery examples/digits.lua --plan "data<0,1>" --net cnn --plot curves.svg
--
-- Each of the two devices of data<0,1> holds the whole network and half of every batch; losses and
-- weights are those of one device. Without --plan all cores work on each operation in turn.
local orrery = require "orrery"
local plot = require "orrery.plot"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

-- What can be said on the command line, and what holds when nothing is.
local options = {
  net = "cnn", plan = "", epochs = 20, batch = 64, lr = 3e-3, seed = 1, steps = math.huge, plot = "",
}
for i = 1, #arg, 2 do
  local name, value = arg[i]:match "^%-%-(%a+)$", arg[i + 1]
  if options[name] == nil or not value then
    io.stderr:write("usage: digits.lua [--net cnn|mlp] [--plan PLAN] [--epochs N] [--batch N] [--lr RATE]\n"
      .. "                  [--steps N] [--seed N] [--plot FILE.svg|FILE.png]\n")
    os.exit(2)
  end
  local number = type(options[name]) == "number"
  options[name] = number and assert(tonumber(value), arg[i] .. " needs a number") or value
end
orrery.manual_seed(options.seed)

-- The data: grey values from 0 to 16 become numbers from 0 to 1, digits become classes from 1 to 10.
local folder = (arg[0]:match "^(.*/)" or "") .. "data/digits-"

local function load_part(part)
  local images = data.idx(folder .. part .. "-images.idx") -- u8 (N, 8, 8)
  local digits = data.idx(folder .. part .. "-labels.idx") -- u8 (N)
  return { (images:to "f32" / 16):unsqueeze(2), digits:to "i64" + 1 } -- (N, 1, 8, 8) and (N)
end

local train, test = load_part "train", load_part "test"

-- The network: (N, 1, 8, 8) -> (N, 10).
local nets = {}

function nets.mlp()
  return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
end

function nets.cnn()
  return nn.Sequential(
    nn.Conv2d(1, 32, 3, { padding = 1 }), nn.BatchNorm2d(32), nn.ReLU(), -- (N, 32, 8, 8)
    nn.Conv2d(32, 64, 3, { padding = 1 }), nn.BatchNorm2d(64), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), -- (N, 64 * 4 * 4)
    nn.Linear(1024, 10))
end

local net = assert(nets[options.net], "--net is cnn or mlp")()

-- The plan: the only line that knows of devices. With the devices fixed in the script it would be
--   local plan = parallel.data<0,1>
local plan = options.plan ~= "" and parallel(options.plan) or nil
if plan then net = plan(net) end

-- The loops.
local batches = data.batches(train, { batch = options.batch, shuffle = true, plan = plan })
local test_batches = data.batches(test, { batch = 120, plan = plan })
local opt = optim.AdamW(net:parameters(), { lr = options.lr, weight_decay = 0.01 })
local total = math.min(options.steps, options.epochs * batches:len())
local schedule = optim.schedule.cosine(opt, { total = total, warmup = math.min(10, total) })

local losses, accuracies = { x = {}, y = {} }, { x = {}, y = {} }
local shares, samples, step = {}, 0, 0 -- {device=, samples=}, their sum, optimizer steps so far

local function count_share(x)
  samples = samples + x:size(1)
  for k, shard in ipairs(x:shards()) do
    shares[k] = shares[k] or { device = shard.device, samples = 0 }
    shares[k].samples = shares[k].samples + shard.tensor:size(1)
  end
end

-- Any iterator of (x, y) will do in a loop; this one is the batches up to the last step asked for.
local function batches_left(...)
  if step < total then return batches(...) end
end

local function train_epoch(epoch)
  local loss, pending = nil, {}
  net:train()
  for x, y in orrery.progress(batches_left, {
    label = ("epoch %2d/%d"):format(epoch, options.epochs),
    total = math.min(batches:len(), total - step),
    show = function() return { loss = loss } end,
  }) do
    opt:zero_grad()
    loss = nn.cross_entropy(net(x), y)
    loss:backward()
    opt:step()
    schedule:step()
    if plan then count_share(x) end
    pending[#pending + 1], step = loss:detach(), step + 1
  end
  -- Reading a loss waits for the devices, so it is done once an epoch.
  for i, value in ipairs(pending) do
    losses.y[#losses.y + 1], losses.x[#losses.x + 1] = value:item(), step - #pending + i
  end
end

local function accuracy()
  local right = 0
  net:eval()
  orrery.no_grad(function()
    for x, y in test_batches do right = right + net(x):argmax(2):eq(y):to("i64"):sum():item() end
  end)
  return 100 * right / test_batches.samples
end

local started = os.time()
for epoch = 1, options.epochs do
  if step == total then break end
  train_epoch(epoch)
  accuracies.y[#accuracies.y + 1], accuracies.x[#accuracies.x + 1] = accuracy(), step
  print(("epoch %2d  loss %.4f  test accuracy %.1f %%"):format(epoch, losses.y[#losses.y],
    accuracies.y[#accuracies.y]))
end

-- What came of it.
if options.plot ~= "" then
  losses.name, accuracies.name = "training", "test"
  plot.save({ title = ("digits, %s, %s"):format(options.net, plan and tostring(plan) or "cpu"), panels = {
    { title = "loss", x_label = "step", y_low = 0, series = { losses } },
    { title = "accuracy in %", x_label = "step", series = { accuracies } },
  } }, options.plot)
  print("curves in " .. options.plot)
end
print(("%d steps in %d s"):format(step, os.difftime(os.time(), started)))
for _, share in ipairs(shares) do
  print(("%s trained on %d samples, %.1f %% of the work"):format(share.device, share.samples,
    100 * share.samples / samples))
end
print(("test accuracy %.1f %%"):format(accuracies.y[#accuracies.y]))
