-- ResNet for CIFAR-10 (He et al. 2016, section 4.2), under any plan.
--
--   orrery examples/resnet.lua --data DIR [--plan "data<0,1>"] [--depth 20] [--epochs 10]
--                              [--batch 128] [--lr 0.1] [--steps N] [--seed 1]
--
-- DIR holds the binary version of CIFAR-10: data_batch_1.bin to data_batch_5.bin and test_batch.bin.
local orrery = require "orrery"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

local options = { plan = "data<0,1>", depth = 20, epochs = 10, batch = 128, lr = 0.1, seed = 1,
  steps = math.huge, data = false }
for k = 1, #arg, 2 do
  local name, value = arg[k]:match "^%-%-(%a+)$", arg[k + 1]
  if options[name] == nil or value == nil then error("unknown or incomplete option " .. arg[k]) end
  options[name] = (name == "plan" or name == "data") and value or tonumber(value)
end
if not options.data then error "give the folder of CIFAR-10's binary files: --data DIR" end

-- ---- the network ----

local function conv(from, to, size, stride)
  return nn.Conv2d(from, to, size, { stride = stride, padding = (size - 1) / 2, bias = false })
end

-- y = relu(f(x) + x), where x is brought to f's shape if it must.
local Block = nn.class("Block", function(self, from, to, stride)
  self.f = nn.Sequential(conv(from, to, 3, stride), nn.BatchNorm2d(to), nn.ReLU(),
    conv(to, to, 3, 1), nn.BatchNorm2d(to))
  if from ~= to or stride ~= 1 then
    self.shortcut = nn.Sequential(conv(from, to, 1, stride), nn.BatchNorm2d(to))
  end
end)

function Block:forward(x)
  return (self.f(x) + (self.shortcut and self.shortcut(x) or x)):relu()
end

local function resnet(depth)
  local layers = { conv(3, 16, 3, 1), nn.BatchNorm2d(16), nn.ReLU() }
  local from = 16
  for stage, to in ipairs { 16, 32, 64 } do
    for block = 1, math.max(1, math.floor((depth - 2) / 6)) do
      layers[#layers + 1] = Block(from, to, stage > 1 and block == 1 and 2 or 1)
      from = to
    end
  end
  layers[#layers + 1] = nn.Module(function(x) return x:mean(4):mean(3) end)
  layers[#layers + 1] = nn.Linear(64, 10)
  return nn.Sequential((table.unpack or unpack)(layers))
end

-- ---- data ----

local mean, deviation = { 0.4914, 0.4822, 0.4465 }, { 0.2470, 0.2435, 0.2616 }

local function prepare(x) return data.augment.normalize(x:to("f32") / 255, mean, deviation) end

local function augment(x, y) return data.augment.flip(data.augment.random_crop(x, 4)), y end

-- ---- training ----

orrery.manual_seed(options.seed)
local X, Y, Xtest, Ytest = data.cifar10(options.data)
X, Xtest = prepare(X), Xtest and prepare(Xtest)

local plan = parallel(options.plan)
local net = plan(resnet(options.depth), X:narrow(1, 1, math.min(options.batch, X:size(1))))
local opt = optim.SGD(net:parameters(), { lr = options.lr, momentum = 0.9, nesterov = true,
  weight_decay = 5e-4 })
local train = data.batches({ X, Y }, { batch = options.batch, shuffle = true, plan = plan,
  transform = augment })
local total = math.min(options.steps, options.epochs * train:len())
local schedule = optim.schedule.cosine(opt, { warmup = math.floor(total / 20), total = total })

local function accuracy()
  net:eval()
  local right = 0
  orrery.no_grad(function()
    for x, y in data.batches({ Xtest, Ytest }, { batch = options.batch, plan = plan }) do
      right = right + net(x):argmax(2):eq(y):sum():item()
    end
  end)
  net:train()
  return 100 * right / Xtest:size(1)
end

local step = 0
for epoch = 1, options.epochs do
  local loss
  local show = function() return { loss = loss } end
  local label = ("epoch %d/%d"):format(epoch, options.epochs)
  for x, y in orrery.progress(train, { label = label, show = show }) do
    opt:zero_grad()
    loss = plan:step(net, nn.cross_entropy, x, y)
    opt:step()
    schedule:step()
    step = step + 1
    if step >= total then break end
  end
  print(("epoch %d  loss %.4f%s"):format(epoch, loss:item(),
    Xtest and ("  test accuracy %.2f %%"):format(accuracy()) or ""))
  if step >= total then break end
end
