-- Attention: scaled_dot_product_attention, rotary positions, MultiheadAttention, TransformerBlock.
-- Invariant: queries, keys and values are separate linear layers whose outputs are heads side by
-- side, so a split of their outputs between heads is a split of the heads. Without a mask and
-- without dropout of weights the fused op runs, which keeps no matrix of queries by keys.
-- To add an option: name it in the layer's `known` table, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class
local init = require "orrery.nn.initialize"
local Linear = require("orrery.nn.linear").Linear
local Dropout = require("orrery.nn.dropout").Dropout
local norms = require "orrery.nn.norm"

local sqrt, huge = math.sqrt, math.huge
local exports = {}

-- Attention as a function ---------------------------------------------------------------------

local known_attention = { causal = true, mask = true, scale = true, dropout = true }

-- true where query i may see key j <= i: (T, S).
local function causal_mask(queries, keys)
  return core.arange(1, queries):unsqueeze(2):ge(core.arange(1, keys):unsqueeze(1))
end

-- The same value by ops of their own, for what the fused op does not take.
local function composed(q, k, v, options, scale)
  local scores = q:matmul(k:transpose(3, 4)) * scale
  local hidden = core.full(-huge, 1, { dtype = scores:dtype() })
  local mask = options.mask
  if options.causal then
    scores = core.where(causal_mask(q:size(3), k:size(3)), scores, hidden)
  end
  if mask and mask:dtype() == "bool" then
    scores = core.where(mask, scores, hidden)
  elseif mask then
    scores = scores + mask
  end
  local weights = scores:softmax(4)
  if options.dropout and options.dropout > 0 then weights = core.dropout(weights, options.dropout) end
  return weights:matmul(v)
end

--- softmax(scale q k^T) v per head (Vaswani et al. 2017, eq. 1). Without mask and dropout it runs
--- tile by tile (Dao et al. 2022) and keeps no (T, S) matrix; its gradient is fused then, and cannot
--- be differentiated again.
---@param q orrery.Tensor (N, H, T, D)
---@param k orrery.Tensor (N, H, S, D)
---@param v orrery.Tensor (N, H, S, E)
---@param options? {causal?: boolean, mask?: orrery.Tensor, scale?: number, dropout?: number} causal:
---  query i sees keys 1..i. mask: broadcasts to (N, H, T, S); bool: true where a query sees a key, else
---  added to the scores. scale: default 1 / sqrt(D). dropout: the chance that a weight is dropped
---@return orrery.Tensor (N, H, T, E)
function exports.scaled_dot_product_attention(q, k, v, options)
  local who = "scaled_dot_product_attention"
  options = check.options(who, options, known_attention)
  if options.scale then check.number(who, "scale", options.scale) end
  if options.dropout then check.number(who, "dropout", options.dropout, 0, 1) end
  local plain = not options.mask and (options.dropout or 0) == 0 and options.scale ~= 0
  if plain then
    return core.scaled_dot_product_attention(q, k, v, options.causal or false, options.scale or 0)
  end
  for i, x in ipairs { q or false, k or false, v or false } do
    local name = ("qkv"):sub(i, i)
    if check.tensor(who, name, x):dim() ~= 4 then
      check.raise("%s: %s must be (N, H, T, D), got shape %s", who, name, check.shape(x))
    end
  end
  if options.mask then check.tensor(who, "mask", options.mask) end
  return composed(q, k, v, options, options.scale or 1 / sqrt(q:size(4)))
end

-- Rotary positions ----------------------------------------------------------------------------

local tables = {} -- by size, base and dtype: { cos, sin, length }, the longest asked for so far

-- cos and sin of (t - 1) base^(-2 (i - 1) / size), each (length, 1, size / 2).
local function turns(length, size, base, dtype)
  local key = ("%d %.17g %s"):format(size, base, dtype)
  local kept = tables[key]
  if not kept or kept.length < length then
    local wide = { dtype = "f64" }
    local speed = (core.arange(0, size / 2 - 1, wide) * (-2 / size * math.log(base))):exp()
    local angle = core.arange(0, length - 1, wide):unsqueeze(2):unsqueeze(3) * speed
    kept = { cos = angle:cos():to(dtype), sin = angle:sin():to(dtype), length = length }
    tables[key] = kept
  end
  return kept.cos:narrow(1, 1, length), kept.sin:narrow(1, 1, length)
end

-- x (N, T, H, D) turned by its positions.
local function rotate(x, base)
  local size = x:size(4)
  local cos, sin = turns(x:size(2), size, base, x:dtype())
  local a, b = x:narrow(4, 1, size / 2), x:narrow(4, size / 2 + 1, size / 2)
  return core.cat({ a * cos - b * sin, b * cos + a * sin }, 4)
end

local function check_even(who, size)
  if size % 2 ~= 0 then check.raise("%s: rotary positions need an even size of heads, got %d", who, size) end
end

--- Rotary positions (Su et al. 2021, eq. 34): the pair of features i and i + D/2 at position t is
--- turned by the angle (t - 1) base^(-2 (i - 1) / D), so that the product of a query and a key depends
--- on their distance alone.
---@param x orrery.Tensor (N, H, T, D), D even
---@param base? number default 10000
---@return orrery.Tensor of the shape of x
function exports.rotary(x, base)
  base = check.number("rotary", "the base", base or 10000, 1)
  if check.tensor("rotary", "x", x):dim() ~= 4 then
    check.raise("rotary: expected x (N, H, T, D), got shape %s", check.shape(x))
  end
  check_even("rotary", x:size(4))
  return rotate(x:transpose(2, 3), base):transpose(2, 3)
end

-- Multi-head attention ------------------------------------------------------------------------

local known_heads = {
  causal = true, bias = true, rotary = true, dropout = true, dtype = true, device = true,
}

--- Attention of `heads` heads of dim / heads features each (Vaswani et al. 2017, section 3.2.2):
--- o(attention(q(x), k(x), v(x))). The weights of q, k and v start from U(-b, b), b = sqrt(6 / (4 dim)),
--- as PyTorch's joint (3 dim, dim) projection does (Glorot & Bengio 2010, eq. 16), that of o as any
--- Linear; biases from 0.
---@param dim integer
---@param heads integer must divide dim
---@param options? {causal?: boolean, bias?: boolean, rotary?: boolean|number, dropout?: number} rotary:
---  turn queries and keys by their positions (a number: the base). dropout: of attention weights, in
---  training; it takes the path that keeps a (T, T) matrix
local MultiheadAttention = class("MultiheadAttention", function(self, dim, heads, options)
  local who = "MultiheadAttention"
  options = check.options(who, options, known_heads)
  self.dim = check.count(who, "the dimension", dim)
  self.heads = check.count(who, "the number of heads", heads)
  if dim % heads ~= 0 then check.raise("%s: %d heads do not divide the dimension %d", who, heads, dim) end
  self.causal = options.causal or false
  self.p = check.number(who, "dropout", options.dropout or 0, 0, 1)
  if options.rotary then
    check_even(who, dim / heads)
    self.base = check.number(who, "rotary", options.rotary == true and 10000 or options.rotary, 1)
  end
  local layer = { bias = options.bias ~= false, dtype = options.dtype, device = options.device }
  for _, name in ipairs { "q", "k", "v", "o" } do
    self[name] = Linear(dim, dim, layer)
    local bound = sqrt(6 / (4 * dim))
    if name ~= "o" then init.uniform_(self[name].weight, -bound, bound) end
    if layer.bias then init.zeros_(self[name].bias) end
  end
end)

-- (N, T, dim) -> (N, T, heads, dim / heads), turned by the positions where asked.
local function split_heads(self, x, turned)
  local y = x:reshape(x:size(1), x:size(2), self.heads, self.dim / self.heads)
  if turned and self.base then return rotate(y, self.base) end
  return y
end

local function check_input(name, x, dim)
  if check.tensor("MultiheadAttention", name, x):dim() ~= 3 or x:size(3) ~= dim then
    check.raise("MultiheadAttention: expected %s (N, T, %d), got shape %s", name, dim, check.shape(x))
  end
end

---@param x orrery.Tensor (N, T, dim)
---@param memory? orrery.Tensor (N, S, dim) what keys and values are made of; default: x
---@param mask? orrery.Tensor broadcasts to (N, heads, T, S), as of scaled_dot_product_attention
---@return orrery.Tensor (N, T, dim)
function MultiheadAttention:forward(x, memory, mask)
  memory = memory or x
  check_input("x", x, self.dim)
  if not rawequal(memory, x) then check_input("memory", memory, self.dim) end
  local q = split_heads(self, self.q(x), true):transpose(2, 3)
  local k = split_heads(self, self.k(memory), true):transpose(2, 3)
  local v = split_heads(self, self.v(memory)):transpose(2, 3)
  local p = self.training and self.p or 0
  local y
  if mask or p > 0 then
    y = exports.scaled_dot_product_attention(q, k, v, { causal = self.causal, mask = mask, dropout = p })
  else
    y = core.scaled_dot_product_attention(q, k, v, self.causal)
  end
  return self.o(y:transpose(2, 3):reshape(x:size(1), x:size(2), self.dim))
end

function MultiheadAttention:describe()
  return ("%d, heads=%d%s%s"):format(self.dim, self.heads, self.causal and ", causal" or "",
    self.base and ", rotary" or "")
end

-- A transformer block -------------------------------------------------------------------------

local known_block = {
  mlp = true, causal = true, dropout = true, norm = true, activation = true, bias = true, rotary = true,
  dtype = true, device = true,
}
local norm_of = { layer = norms.LayerNorm, rms = norms.RMSNorm }
local activation_of = { gelu = core.gelu, silu = core.silu, relu = core.relu }

--- x + attention(norm1(x)), then x + fc2(f(fc1(norm2(x)))): the block of Vaswani et al. 2017 (section
--- 3.1) with its norms before the branches (Xiong et al. 2020), as in GPT-2. Dropout is of what the
--- branches add (Vaswani et al. 2017, section 5.4).
---@param dim integer
---@param heads integer must divide dim
---@param options? {mlp?: number, causal?: boolean, dropout?: number, norm?: "layer"|"rms", activation?:
---  "gelu"|"silu"|"relu", bias?: boolean, rotary?: boolean|number} mlp: the width of fc1 over dim,
---  default 4
local TransformerBlock = class("TransformerBlock", function(self, dim, heads, options)
  local who = "TransformerBlock"
  options = check.options(who, options, known_block)
  local place = { dtype = options.dtype, device = options.device }
  local layer = { bias = options.bias ~= false, dtype = place.dtype, device = place.device }
  local inner = check.number(who, "mlp", options.mlp or 4, 0) * check.count(who, "the dimension", dim)
  check.count(who, "the width of fc1", inner)
  local norm = check.word(who, "norm", options.norm or "layer", { "layer", "rms" })
  self.activation = check.word(who, "activation", options.activation or "gelu", { "gelu", "silu", "relu" })
  self.norm1 = norm_of[norm](dim, place)
  self.attention = MultiheadAttention(dim, heads, {
    causal = options.causal, rotary = options.rotary, bias = options.bias,
    dtype = place.dtype, device = place.device,
  })
  self.norm2 = norm_of[norm](dim, place)
  self.fc1 = Linear(dim, inner, layer)
  self.fc2 = Linear(inner, dim, layer)
  self.dropout = Dropout(check.number(who, "dropout", options.dropout or 0, 0, 1))
end)

---@param x orrery.Tensor (N, T, dim)
---@param mask? orrery.Tensor broadcasts to (N, heads, T, T)
---@return orrery.Tensor (N, T, dim)
function TransformerBlock:forward(x, mask)
  x = x + self.dropout(self.attention(self.norm1(x), nil, mask))
  return x + self.dropout(self.fc2(activation_of[self.activation](self.fc1(self.norm2(x)))))
end

function TransformerBlock:describe() return self.activation end

exports.MultiheadAttention = MultiheadAttention
exports.TransformerBlock = TransformerBlock
return exports
