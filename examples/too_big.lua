-- A model that is too large for one device, and the one line that makes it fit.
--
-- Every device gets a memory limit. The model's weights, gradients and momentum do not fit under it on
-- one device: the first plan fails, says by how much, and leaves everything intact. Then the same
-- script trains it split between layers, inside layers, and with sharded state.
--
--   ORRERY_CPU_DEVICES=4 orrery examples/too_big.lua [--steps 10] [--width 512] [--limit 20]
local orrery = require "orrery"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local options = { steps = 10, width = 512, limit = 20 }
for k = 1, #arg, 2 do
  local name = arg[k]:match "^%-%-(%a+)$"
  if not options[name] then error("unknown option " .. arg[k]) end
  options[name] = tonumber(arg[k + 1]) or error(arg[k] .. " needs a number")
end

local MiB = 2 ^ 20
local n_devices = #orrery.devices()
local last = math.min(n_devices, 4) - 1

-- Eight equal blocks: 8 w^2 weights of 4 bytes, and as much again for gradients and for momentum.
local function new_net(width)
  local layers = {}
  for k = 1, 8 do layers[k] = nn.Sequential(nn.Linear(width, width), nn.Tanh()) end
  layers[9] = nn.Linear(width, 10)
  return nn.Sequential((table.unpack or unpack)(layers))
end

local function train(plan)
  orrery.manual_seed(1)
  local net = plan(new_net(options.width), orrery.zeros(16, options.width))
  local opt = optim.SGD(net:parameters(), { lr = 0.02, momentum = 0.9 })
  local x, y = orrery.randn(16, options.width), orrery.randint(1, 10, 16)
  local first, loss
  for _ = 1, options.steps do
    opt:zero_grad()
    loss = plan:step(net, nn.cross_entropy, x, y):item()
    opt:step()
    first = first or loss
  end
  return first, loss
end

local function attempt(text)
  collectgarbage()
  collectgarbage()
  orrery.empty_cache()
  for k = 0, last do
    orrery.set_memory_limit("cpu:" .. k, options.limit * MiB)
    orrery.reset_peak("cpu:" .. k)
  end
  local ok, first, loss = pcall(train, parallel(text))
  io.write(text, "\n")
  if ok then
    io.write(("  trained: loss %.4f, then %.4f after %d steps\n"):format(first, loss, options.steps))
  else
    io.write("  ", tostring(first):gsub("\n", "\n  "), "\n")
  end
  for k = 0, last do
    io.write(("  cpu:%d peak %.1f MiB\n"):format(k, orrery.memory("cpu:" .. k).peak / MiB))
  end
  return ok
end

local weights = 3 * 4 * (8 * options.width ^ 2 + 10 * options.width) / MiB
io.write(("weights, gradients and momentum: %.1f MiB; a device may hold %.1f MiB\n\n"):format(weights,
  options.limit))
local fits = attempt "data<0>"
io.write(fits and "it fits on one device: raise --width or lower --limit\n" or "", "\n")
local all = "0.." .. last
if last == 1 then all = "0,1" end
for _, text in ipairs { "model<" .. all .. ">", "tensor<" .. all .. ">", "data<" .. all .. "; zero=3>" } do
  if not attempt(text) then os.exit(1) end
end
