-- Ops on sizes that fill a GPU: many blocks, tails, rows longer than a block, strides, more than one pass.
-- Inputs are drawn on the CPU and rounded to the dtype; results and gradients on the first CUDA device are
-- compared with the CPU's by relative norm, in f64.
-- Invariant: the same work on both sides. On fake GPUs, whose lanes are slow, sizes are a part of it.
-- To add a row: op (its row in spec/ops.lua), name, shapes of the inputs, f of the tensors. `draw` makes
-- what is not a float of about 1.
local orrery = require "orrery"
local core = require "orrery.core"
local against = require "spec.support.against_cpu"

local unpack = table.unpack or unpack
local large = { dtypes = { "f32", "tf32", "bf16" }, rows = {} }

local first = orrery.devices()[1]
local fake = first.kind ~= "cuda" or first.model:find "Fake" ~= nil

local function row(op, name, shapes, f, fields)
  fields = fields or {}
  fields.op, fields.name, fields.shapes, fields.f = op, name, shapes, f
  large.rows[#large.rows + 1] = fields
end

-- n, or on fake GPUs a part of it that is as odd.
local function size(n, part) return fake and math.max(3, math.floor(n / (part or 1000))) or n end

local long = size(3000017)
local rows, columns = size(4099, 300), size(2051, 30)
local function ids(n)
  return function(shape) return orrery.randint(1, n, unpack(shape)) end
end

for _, name in ipairs { "exp", "gelu", "tanh", "relu", "silu", "square" } do
  row(name, "long", { { long } }, function(x) return core[name](x) end)
end
for _, name in ipairs { "add", "mul", "sub", "maximum" } do
  row(name, "long", { { long }, { long } }, function(x, y) return core[name](x, y) end)
end
row("mul", "a row and a column broadcast", { { rows, columns }, { columns }, { rows, 1 } },
  function(x, y, z) return x * y * z end)
row("add", "strided", { { rows, columns }, { columns, rows } }, function(x, y) return x:t() + y end)
row("cast", "to f32 and back", { { long } }, function(x) return x:to("f32"):to(x:dtype()) end)
for _, name in ipairs { "sum", "mean", "max", "min" } do
  row(name, "rows", { { rows, columns } }, function(x) return (x[name](x, 2)) end)
  row(name, "columns", { { rows, columns } }, function(x) return (x[name](x, 1)) end)
  row(name, "all", { { rows, columns } }, function(x) return (x[name](x)) end)
end
row("sum", "few long rows", { { 3, long } }, function(x) return x:sum(2) end)
row("sum", "the middle", { { 17, columns, 33 } }, function(x) return x:sum(2) end)
row("cumsum", "rows", { { rows, columns } }, function(x) return x:cumsum(2) end)
row("var", "rows", { { rows, columns } }, function(x) return x:var(2) end)
for _, name in ipairs { "softmax", "log_softmax", "logsumexp" } do
  for _, width in ipairs { 7, 128, 1023, size(50257, 20) } do
    row(name, "width " .. width, { { size(515, 50), width } }, function(x) return x[name](x, 2) end)
  end
  row(name, "columns", { { rows, columns } }, function(x) return x[name](x, 1) end)
end
for _, width in ipairs { 7, 768, size(8193, 8) } do
  row("layer_norm", "width " .. width, { { size(515, 50), width }, { width }, { width } },
    function(x, w, b) return core.layer_norm(x, w, b) end)
  row("rms_norm", "width " .. width, { { size(515, 50), width }, { width } },
    function(x, w) return core.rms_norm(x, w) end)
end
row("cross_entropy", "a vocabulary", { { size(515, 50), size(50257, 20) }, { size(515, 50) } },
  function(x, y) return orrery.nn.cross_entropy(x, y) end, { draw = { [2] = ids(size(50257, 20)) } })
row("embedding", "a vocabulary", { { size(50257, 50), 96 }, { size(4096, 50) } },
  function(w, i) return core.embedding(w, i) end, { draw = { [2] = ids(size(50257, 50)) } })
row("index_select", "rows", { { rows, columns }, { size(5000, 100) } },
  function(x, i) return x:index_select(1, i) end, { draw = { [2] = ids(rows) } })
row("sort", "rows", { { size(33, 8), size(5003, 10) } }, function(x) return (x:sort(2)) end)
row("matmul", "square", { { size(1023, 20), size(769, 20) }, { size(769, 20), size(511, 20) } },
  function(x, y) return x:matmul(y) end)
row("matmul", "batches, transposed", { { 5, size(129, 8), size(257, 8) }, { 5, size(65, 8), size(257, 8) } },
  function(x, y) return x:matmul(y:transpose(2, 3)) end)
row("linear", "with bias", { { 4, size(257, 20), 64 }, { size(129, 8), 64 }, { size(129, 8) } },
  function(x, w, b) return core.linear(x, w, b) end)
row("conv2d", "3 x 3", { { size(16, 8), 32, size(56, 8), size(56, 8) }, { 64, 32, 3, 3 }, { 64 } },
  function(x, w, b) return core.conv2d(x, w, b, 1, 1, 1, 1, 1, 1, 1) end)
row("max_pool2d", "2 x 2", { { size(16, 8), 32, size(56, 4), size(56, 4) } },
  function(x) return core.max_pool2d(x, 2, 2, 2, 2, 0, 0, 1, 1) end)
for _, d in ipairs { 32, 64, 128 } do
  local t = size(517, 16)
  local shape = { 2, 3, t, d }
  row("scaled_dot_product_attention", "causal, heads of " .. d, { shape, shape, shape },
    function(q, k, v) return core.scaled_dot_product_attention(q, k, v, true) end)
end

-- Inputs on the CPU in `dtype`, the weights of the loss, and what the op gives of them on `name`.
local function evaluate(r, inputs, weight, name)
  local tensors = {}
  for k, x in ipairs(inputs) do
    tensors[k] = name and x:to(name) or x:clone()
    if not (r.draw and r.draw[k]) then tensors[k].requires_grad = true end
  end
  local y = r.f(unpack(tensors))
  weight = weight or orrery.rand(y:size()):to(y:dtype())
  local loss = (y * (name and weight:to(name) or weight)):sum()
  loss:backward()
  local results = { y:detach():to "cpu" }
  for _, x in ipairs(tensors) do
    if x.requires_grad then results[#results + 1] = x.grad:to "cpu" end
  end
  return results, weight
end

local function distance(a, b)
  a, b = a:to "f64", b:to "f64"
  local apart, norm = (a - b):square():sum():item(), b:square():sum():item()
  return math.sqrt(apart) / (norm > 0 and math.sqrt(norm) or 1)
end

--- A row on the first CUDA device and on the CPU, as against.check gives it.
function large.check(r, dtype)
  local problems, worst = {}, { error = 0, where = r.op }
  local float = dtype == "tf32" and "f32" or dtype
  orrery.manual_seed(3)
  local inputs = {}
  for k, shape in ipairs(r.shapes) do
    local draw = r.draw and r.draw[k]
    inputs[k] = draw and draw(shape) or orrery.randn(shape):to(float)
  end
  local want, weight = evaluate(r, inputs)
  local allowed = core.allow_tf32(dtype == "tf32")
  local ok, got = pcall(evaluate, r, inputs, weight, "cuda:0")
  core.allow_tf32(allowed)
  if not ok then return { tostring(got) }, worst end
  for k, w in ipairs(want) do
    local where = ("%s, %s, %s %d"):format(r.op, r.name, k == 1 and "result" or "gradient",
      math.max(1, k - 1))
    local apart = distance(got[k], w)
    if apart > worst.error then worst = { error = apart, where = where } end
    if apart > against.tolerances[dtype] or apart ~= apart then
      problems[#problems + 1] = ("%s: relative norm %.3g, at most %g"):format(where, apart,
        against.tolerances[dtype])
    end
  end
  return problems, worst
end

return large
