-- Trains a GPT on the bytes of a text, on one device or on many, and lets it write.
--
--   orrery examples/gpt.lua --plan "data<0,1>" --steps 500 --sample 400
--
-- The text is Newton's Opticks, Book One; --text takes any file. Without --plan all cores work on
-- each operation in turn; with one, losses are those of one device.
local orrery = require "orrery"
local now = require("orrery.terminal").clock() -- seconds
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

-- What can be said on the command line, and what holds when nothing is.
local options = {
  plan = "", text = (arg[0]:match "^(.*/)" or "") .. "data/opticks-book-one.txt", sample = 400, seed = 1,
  layers = 4, width = 128, heads = 4, context = 64, dropout = 0.1, -- the network
  batch = 16, steps = 500, lr = 1e-3, show = 50, -- the training
  dtype = "f32", capture = "no", -- how it is computed: products in bf16; steps recorded and replayed
}
for i = 1, #arg, 2 do
  local name, value = arg[i]:match "^%-%-(%a+)$", arg[i + 1]
  if options[name] == nil or not value then
    io.stderr:write("usage: gpt.lua [--plan PLAN] [--text FILE] [--steps N] [--layers N] [--width N]\n"
      .. "               [--heads N] [--context N] [--batch N] [--lr RATE] [--dropout P] [--sample BYTES]\n"
      .. "               [--seed N] [--show STEPS] [--dtype f32|bf16] [--capture yes|no]\n")
    os.exit(2)
  end
  local number = type(options[name]) == "number"
  options[name] = number and assert(tonumber(value), arg[i] .. " needs a number") or value
end
orrery.manual_seed(options.seed)
local context, batch = options.context, options.batch

-- The data: byte b is the token b + 1, so there are 256 of them. The last tenth is kept for testing.
local text = data.bytes(options.text)
local split = math.floor(text:numel() * 0.9)
if text:numel() - split < context + 1 then
  io.stderr:write(("gpt.lua: %s has %d bytes, and a context of %d needs %d\n"):format(options.text,
    text:numel(), context, 10 * (context + 1)))
  os.exit(1)
end
local train, test = text:narrow(1, 1, split), text:narrow(1, split + 1, text:numel() - split)

-- `batch` windows of the text, and the same a byte later: (batch, context) each.
local function windows(tokens)
  local first = orrery.randint(1, tokens:numel() - context, batch)
  local at = (first:unsqueeze(2) + orrery.arange(0, context)):flatten()
  local rows = tokens:index_select(1, at):reshape(batch, context + 1)
  return rows:narrow(2, 1, context):contiguous(), rows:narrow(2, 2, context):reshape(-1)
end

-- The network: (N, T) tokens -> (N * T, 256) logits. As GPT-2 (Radford et al. 2019): norms come before
-- the branches, the output weight is the embedding, weights start from N(0, 0.02^2), those that end a
-- branch smaller by sqrt(2 layers).
local GPT = nn.class("GPT", function(self)
  self.tokens = nn.Embedding(256, options.width)
  self.positions = nn.Embedding(context, options.width)
  self.dropout = nn.Dropout(options.dropout)
  self.blocks = nn.Sequential()
  for i = 1, options.layers do
    self.blocks[i] = nn.TransformerBlock(options.width, options.heads,
      { causal = true, dropout = options.dropout })
  end
  self.norm = nn.LayerNorm(options.width)
  for name, tensor in self:named_parameters() do
    local ends = name:find "attention%.o%.weight" or name:find "fc2%.weight"
    local deviation = ends and 0.02 / math.sqrt(2 * options.layers) or 0.02
    if tensor:dim() == 2 then nn.init.normal_(tensor, 0, deviation) end
    if name:find "%.bias" then nn.init.zeros_(tensor) end
  end
end)

function GPT:forward(ids)
  local x = self.tokens(ids) + self.positions(orrery.arange(1, ids:size(2)))
  x = self.norm(self.blocks(self.dropout(x)))
  return x:reshape(-1, options.width):matmul(self.tokens.weight:t())
end

local net = GPT()
local count = 0
for _, tensor in ipairs(net:parameters()) do count = count + tensor:numel() end

-- The plan: the only line that knows of devices.
if options.plan ~= "" then net = parallel(options.plan)(net) end

local function test_loss()
  local total, rounds = 0, 8
  net:eval()
  orrery.no_grad(function()
    for _ = 1, rounds do
      local x, y = windows(test)
      total = total + nn.cross_entropy(net(x), y):item()
    end
  end)
  net:train()
  return total / rounds
end

print(("%d parameters, %d bytes of text"):format(count, text:numel()))
local opt = optim.AdamW(net:parameters(), { lr = options.lr, weight_decay = 0.1 })
local schedule = optim.schedule.cosine(opt, { total = options.steps, warmup = math.min(20, options.steps) })
local function loss_of(x, y) return nn.cross_entropy(net(x), y) end

local function one_step(x, y)
  opt:zero_grad()
  local loss = options.dtype == "f32" and loss_of(x, y) or orrery.amp.autocast(options.dtype, loss_of, x, y)
  loss:backward()
  optim.clip_grad_norm(net:parameters(), 1)
  opt:step()
  schedule:step()
  return loss
end
if options.capture == "yes" then one_step = orrery.capture(one_step) end

local started, since = now(), 0
for step = 1, options.steps do
  local loss = one_step(windows(train))
  since = since + 1
  if step % options.show == 0 or step == options.steps then
    local value = loss:item() -- waits for the devices
    local rate = since * batch * context / (now() - started)
    print(("step %4d  loss %.4f  %6.0f tokens/s"):format(step, value, rate))
    started, since = now(), 0
  end
end
local tested = test_loss()
print(("test loss %.4f, %.3f bits a byte"):format(tested, tested / math.log(2)))

-- What it writes after "The ", each byte drawn by its probability: the largest of the logits with
-- Gumbel noise is such a draw (Gumbel 1954).
local function sample(prompt, bytes)
  local ids = { prompt:byte(1, -1) }
  for i, byte in ipairs(ids) do ids[i] = byte + 1 end
  net:eval()
  orrery.no_grad(function()
    for _ = 1, bytes do
      local first = math.max(1, #ids - context + 1)
      local last = {}
      for i = first, #ids do last[#last + 1] = ids[i] end
      local logits = net(orrery.tensor({ last }, { dtype = "i64" })):full():select(1, #last)
      local noise = -(-orrery.rand(256):clamp(1e-9, 1):log()):clamp(1e-9, 1e9):log()
      ids[#ids + 1] = (logits / 0.8 + noise):argmax():item()
    end
  end)
  for i, id in ipairs(ids) do ids[i] = string.char(id - 1) end
  return table.concat(ids)
end
if options.sample > 0 then print(sample("The ", options.sample)) end
