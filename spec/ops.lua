-- One row an op: samples, what they must give, tolerances. spec/op_matrix_spec.lua runs every row
-- through spec/support/matrix.lua, and fails for an op of the core's table that has no row.
--
-- A row: name; samples(rand) gives a list of {inputs = {arrays}, args = {after the tensors},
-- call = function(f, tensors…), ref = …}; ref(arrays…, args…) gives the expected arrays. Optional:
-- grad = false (gives no gradient), out (dtype of the result), int (whole numbers too), second (false:
-- a second derivative raises; "none": not asked), tolerance by dtype, numeric (of central
-- differences), rough (its gradient is not a derivative), before(core), property(values, sample),
-- dense (inputs are never strided), refuses (a pattern of errors that a placement may raise).
-- An input array: nograd, state (written by the op, replicated, checked after it), whole (no partials).
-- Invariant: floating samples are odd multiples of 1/128, so no step or kink is met.
-- To add an op: its row.
local array = require "spec.support.array"
local ref = require "spec.support.reference"

local map, along, reduce = array.map, array.along, array.reduce
local rows = {}

local function row(name, fields)
  fields.name = name
  rows[#rows + 1] = fields
end

local function inputs(...) return { inputs = { ... } } end
local function with(sample, fields)
  for key, value in pairs(fields) do sample[key] = value end
  return sample
end
local function no_grad(a)
  a.nograd = true
  return a
end

-- Uneven on 2, 3 and 5 devices, fewer rows than devices, no elements, no dims.
local shapes = { { 7, 3 }, { 2, 1, 4 }, { 0, 3 }, {} }

-- ---- functions of one number ----

local function unary(name, f, fields)
  fields = fields or {}
  local lo, hi = fields.lo or -2, fields.hi or 2
  fields.samples = fields.samples or function(rand)
    local list = {}
    for k, shape in ipairs(shapes) do list[k] = inputs(rand.grid(shape, lo, hi)) end
    return list
  end
  fields.ref = function(x) return map(f, x) end
  row(name, fields)
end

local function test(name, f, edges)
  local function samples(rand)
    local list = {}
    for k, shape in ipairs(shapes) do list[k] = inputs(rand.grid(shape)) end
    list[#list + 1] = with(inputs(no_grad(array.new({ #edges }, edges))), {})
    list[#list].inputs[1].whole = true -- a part of infinity is NaN
    return list
  end
  unary(name, f, { grad = false, out = "bool", int = name == "logical_not", samples = samples })
end

local edges = { 0, 1, -1.5, 1 / 0, -1 / 0, 0 / 0 }

unary("neg", function(x) return -x end, { int = true })
unary("abs", math.abs, { int = true })
unary("sign", ref.sign, { int = true })
unary("square", function(x) return x * x end, { int = true })
unary("relu", function(x) return math.max(x, 0) end, { int = true })
unary("exp", math.exp)
unary("expm1", function(x) return math.exp(x) - 1 end)
unary("log", math.log, { lo = 0 })
unary("log1p", function(x) return math.log(1 + x) end, { lo = -0.5 })
unary("sqrt", math.sqrt, { lo = 0 })
unary("rsqrt", function(x) return 1 / math.sqrt(x) end, { lo = 0.25 })
unary("reciprocal", function(x) return 1 / x end, { lo = 0.25 })
unary("sin", math.sin)
unary("cos", math.cos)
unary("tanh", ref.tanh)
unary("sigmoid", ref.sigmoid)
unary("softplus", function(x) return math.log(1 + math.exp(x)) end)
unary("silu", function(x) return x * ref.sigmoid(x) end)
unary("gelu", ref.gelu)
unary("gelu_tanh", ref.gelu_tanh)
unary("erf", ref.erf)
unary("floor", math.floor)
unary("ceil", math.ceil)
unary("round", ref.round)
unary("trunc", ref.trunc)
test("isnan", function(x) return x ~= x end, edges)
test("isinf", function(x) return x == 1 / 0 or x == -1 / 0 end, edges)
test("isfinite", function(x) return x - x == 0 end, edges)
test("logical_not", function(x) return x == 0 end, edges)

-- ---- functions of two numbers ----

local function binary(name, f, fields)
  fields = fields or {}
  local a_lo, b_lo = fields.a_lo or -2, fields.b_lo or -2
  local draw = fields.draw or function(rand, shape, lo) return rand.grid(shape, lo, 2) end
  fields.samples = function(rand)
    local function pair(s, t) return inputs(draw(rand, s, a_lo, 1), draw(rand, t, b_lo, 2)) end
    local list = { pair({ 7, 3 }, { 7, 3 }), pair({ 4, 1 }, { 3, 1, 5 }), pair({ 3 }, { 2, 3 }),
      pair({ 0, 3 }, { 3 }),
      pair({ 2, 2 }, {}) }
    local number = fields.number or 1.5
    list[#list + 1] = with(inputs(draw(rand, { 5, 3 }, a_lo)), {
      call = function(op, x) return op(x, number) end,
      ref = function(x) return map(function(v) return f(v, number) end, x) end,
    })
    if not fields.no_first then
      list[#list + 1] = with(inputs(draw(rand, { 5, 3 }, b_lo)), {
        call = function(op, x) return op(number, x) end,
        ref = function(x) return map(function(v) return f(number, v) end, x) end,
        functional = true,
      })
    end
    return list
  end
  fields.ref = function(a, b) return map(f, a, b) end
  row(name, fields)
end

local function compare(name, f)
  binary(name, f, { grad = false, out = "bool", number = 1,
    draw = function(rand, shape) return rand.ints(shape, -2, 2, "f64") end })
end

binary("add", function(a, b) return a + b end, { int = true, number = 2 })
binary("sub", function(a, b) return a - b end, { int = true, number = 2 })
binary("mul", function(a, b) return a * b end, { int = true, number = 2 })
binary("div", function(a, b) return a / b end, { b_lo = 0.25 })
binary("pow", function(a, b) return a ^ b end, { a_lo = 0.25 })
-- The operands never tie: numerators of 128 are 1 (the first's) and 3 (the second's) more than a
-- multiple of 4.
local function untied(rand, shape, lo, which)
  local offset = (which == 2 and 3 or 1) / 128
  return map(function(v) return math.floor(v * 32) / 32 + offset end, rand.grid(shape, lo, 2))
end
binary("maximum", math.max, { int = true, number = 1, draw = untied })
binary("minimum", math.min, { int = true, number = 1, draw = untied })
-- The operands of a remainder never divide each other: those of b lie between the grid's points.
local function off_grid(rand, shape, lo, which)
  local a = rand.grid(shape, lo, 2)
  return which == 2 and map(function(v) return v + 1 / 1024 end, a) or a
end
binary("fmod", ref.fmod, { b_lo = 0.5, draw = off_grid, dtypes = { "f32" }, number = 0.7501,
  no_first = true,
  tolerance = { f32 = 1e-4 } })
binary("remainder", ref.remainder, { b_lo = 0.5, draw = off_grid, dtypes = { "f32" }, number = 0.7501,
  no_first = true, tolerance = { f32 = 1e-4 } })
binary("atan2", ref.atan2, { a_lo = 0.25, b_lo = 0.25 })
compare("eq", function(a, b) return a == b end)
compare("ne", function(a, b) return a ~= b end)
compare("lt", function(a, b) return a < b end)
compare("le", function(a, b) return a <= b end)
compare("gt", function(a, b) return a > b end)
compare("ge", function(a, b) return a >= b end)
compare("logical_and", function(a, b) return a ~= 0 and b ~= 0 end)
compare("logical_or", function(a, b) return a ~= 0 or b ~= 0 end)
compare("logical_xor", function(a, b) return (a ~= 0) ~= (b ~= 0) end)

-- ---- copies ----

local function same(x) return x end
local function grids(rand)
  local list = {}
  for k, shape in ipairs(shapes) do list[k] = inputs(rand.grid(shape)) end
  return list
end

row("clone", { samples = grids, ref = same, int = true })
row("contiguous", { samples = function(rand)
  local list = grids(rand)
  list[#list + 1] = with(inputs(rand.grid { 5, 3 }), {
    call = function(f, x) return f(x:t()) end,
    ref = function(x) return array.permute(x, { 2, 1 }) end,
  })
  return list
end, ref = same })
-- The target of an op that is only in place is a copy, so that the gradient of what it held is seen.
row("copy_", { refuses = "in%-place write would land", samples = function(rand)
  return { inputs(rand.grid { 7, 3 }, rand.grid { 7, 3 }), inputs(rand.grid { 2, 4 }, rand.grid { 4 }),
    inputs(rand.grid { 3, 2 }, rand.grid {}) }
end, call = function(f, x, y) return f(x:clone(), y) end,
  ref = function(x, y) return map(function(_, v) return v end, x, y) end })
row("fill_", { refuses = "in%-place write would land", samples = function(rand)
  local list = grids(rand)
  for _, sample in ipairs(list) do sample.args = { 1.5 } end
  return list
end, call = function(f, x) return f(x:clone(), 1.5) end,
  ref = function(x) return map(function() return 1.5 end, x) end })
row("zero_", { samples = grids, call = function(f, x) return f(x:clone()) end,
  ref = function(x) return map(function() return 0 end, x) end })
row("where", { samples = function(rand)
  return { inputs(rand.bools { 7, 3 }, rand.grid { 7, 3 }, rand.grid { 7, 3 }),
    inputs(rand.bools { 3 }, rand.grid { 4, 1 }, rand.grid { 2, 1, 3 }),
    with(inputs(rand.bools { 2, 3 }, rand.grid { 2, 3 }), {
      call = function(f, c, x) return f(c, x, 0.5) end,
      ref = function(c, x) return map(function(p, v) return p == 1 and v or 0.5 end, c, x) end,
    }) }
end, out = "f64", ref = function(c, a, b)
  return map(function(p, v, w) return p == 1 and v or w end, c, a, b)
end })
row("clamp", { samples = function(rand)
  local list = grids(rand)
  for _, sample in ipairs(list) do sample.args = { -1, 0.5 } end
  return list
end, ref = function(x) return map(function(v) return math.min(math.max(v, -1), 0.5) end, x) end })
row("masked_fill", { samples = function(rand)
  return { with(inputs(rand.grid { 7, 3 }, rand.bools { 7, 3 }), { args = { 0.25 } }),
    with(inputs(rand.grid { 2, 4 }, rand.bools { 4 }), { args = { 3 } }) }
end, ref = function(x, m, value) return map(function(v, p) return p == 1 and value or v end, x, m) end })

-- ---- shapes ----

local function triangle(name, keep)
  row(name, { samples = function(rand)
    return { inputs(rand.grid { 5, 4 }), with(inputs(rand.grid { 5, 4 }), { args = { 1 } }),
      with(inputs(rand.grid { 2, 3, 5 }), { args = { -1 } }), inputs(rand.grid { 1, 2 }) }
  end, ref = function(x, k)
    return array.build(x.shape, function(i)
      return keep(i[#i] - i[#i - 1], k or 0) and x.data[array.at(x, i)] or 0
    end)
  end })
end
triangle("tril", function(distance, k) return distance <= k end)
triangle("triu", function(distance, k) return distance >= k end)

-- Samples of one tensor: {shape, args for the op, reference of it}.
local function shaped(name, list, fields)
  fields = fields or {}
  fields.samples = function(rand)
    local samples = {}
    for k, s in ipairs(list) do
      samples[k] = with(inputs(rand.grid(s[1])), { args = s[2], ref = function(x) return s[3](x) end })
    end
    return samples
  end
  fields.ref = false
  row(name, fields)
end
local function permuted(...)
  local order = { ... }
  return function(x) return array.permute(x, order) end
end
local function reshaped(...)
  local shape = { ... }
  return function(x) return array.reshape(x, shape) end
end

shaped("permute", { { { 5, 3 }, { 2, 1 }, permuted(2, 1) }, { { 2, 3, 7 }, { 3, 1, 2 }, permuted(3, 1, 2) },
  { { 1, 2, 3 }, { 2, -1, 1 }, permuted(2, 3, 1) } })
shaped("transpose", { { { 5, 3 }, { 1, 2 }, permuted(2, 1) },
  { { 2, 7, 3 }, { -1, 1 }, permuted(3, 2, 1) } })
shaped("t", { { { 5, 3 }, {}, permuted(2, 1) }, { { 1, 2 }, {}, permuted(2, 1) } })
local function expanded(...)
  local shape = { ... }
  return function(x) return array.build(shape, function(i) return array.broadcast_get(x, i) end) end
end
shaped("expand", { { { 7, 1 }, { 7, 4 }, expanded(7, 4) }, { { 3 }, { 5, -1 }, expanded(5, 3) },
  { { 1, 2 }, { 2, 3, 2 }, expanded(2, 3, 2) } })
shaped("narrow", { { { 7, 3 }, { 1, 3, 4 }, function(x) return array.narrow(x, 1, 3, 4) end },
  { { 7, 3 }, { 2, 2, 2 }, function(x) return array.narrow(x, 2, 2, 2) end },
  { { 3, 5, 2 }, { -2, 1, 1 }, function(x) return array.narrow(x, 2, 1, 1) end },
  { { 4, 2 }, { 1, 2, 0 }, function(x) return array.narrow(x, 1, 2, 0) end } })
shaped("unsqueeze", { { { 5, 3 }, { 1 }, reshaped(1, 5, 3) }, { { 5, 3 }, { 3 }, reshaped(5, 3, 1) },
  { { 2, 3 }, { -2 }, reshaped(2, 1, 3) } })
shaped("squeeze_dim", { { { 5, 1, 3 }, { 2 }, reshaped(5, 3) }, { { 1, 2 }, { 1 }, reshaped(2) } })
shaped("squeeze", { { { 1, 5, 1, 3 }, {}, reshaped(5, 3) }, { { 5, 1, 3 }, { 2 }, reshaped(5, 3) },
  { { 5, 3 }, { 1 }, reshaped(5, 3) } })
shaped("select", { { { 5, 3 }, { 1, 4 }, function(x) return array.reshape(array.narrow(x, 1, 4, 1),
  { 3 }) end },
  { { 5, 3 }, { 2, -1 }, function(x) return array.reshape(array.narrow(x, 2, 3, 1), { 5 }) end } })
shaped("view", { { { 6, 4 }, { 2, 3, 4 }, reshaped(2, 3, 4) }, { { 5, 2, 3 }, { 5, -1 }, reshaped(5, 6) },
  { { 2, 3 }, { 3, 2 }, reshaped(3, 2) }, { { 4, 6 }, { -1 }, reshaped(24) },
    { { 1, 7 }, { 7, 1 }, reshaped(7, 1) },
  { { 0, 3 }, { 3, 0 }, reshaped(3, 0) } }, { dense = true, refuses = "its strides do not allow this shape" })
row("reshape", { samples = function(rand)
  return { with(inputs(rand.grid { 6, 4 }), { args = { 3, 8 }, ref = reshaped(3, 8) }),
    with(inputs(rand.grid { 5, 4 }), {
      call = function(f, x) return f(x:t(), 2, 10) end,
      ref = function(x) return array.reshape(array.permute(x, { 2, 1 }), { 2, 10 }) end,
    }) }
end })
shaped("flatten", { { { 5, 2, 3 }, {}, reshaped(30) }, { { 5, 2, 3 }, { 2 }, reshaped(5, 6) },
  { { 2, 3, 4 }, { 1, 2 }, reshaped(6, 4) }, { {}, {}, reshaped(1) } })
shaped("flip", { { { 5, 3 }, { 1 }, function(x)
  return array.build(x.shape, function(i) return array.get(x, 6 - i[1], i[2]) end)
end }, { { 2, 4 }, { 1, 2 }, function(x)
  return array.build(x.shape, function(i) return array.get(x, 3 - i[1], 5 - i[2]) end)
end } })
shaped("roll", { { { 5, 3 }, { 2, 1 }, function(x) return ref.roll(x, 2, 1) end },
  { { 5, 3 }, { -1, 2 }, function(x) return ref.roll(x, -1, 2) end } })
row("cat", { samples = function(rand)
  local function sample(d, ...)
    return with(inputs(...), {
      call = function(f, ...) return f({ ... }, d) end,
      ref = function(...) return ref.cat({ ... }, d < 0 and d + #(...).shape + 1 or d) end,
    })
  end
  return { sample(1, rand.grid { 5, 3 }, rand.grid { 2, 3 }),
    sample(2, rand.grid { 4, 2 }, rand.grid { 4, 3 }),
    sample(1, rand.grid { 1 }, rand.grid { 3 }, rand.grid { 0 }), sample(-1, rand.grid { 2, 1, 3 }) }
end })

-- ---- reductions ----

-- f of a list gives a number; over all, over a dim, keeping it, fewer rows than devices, no dims.
local function reduction(name, f, fields)
  fields = fields or {}
  local draw = fields.draw or function(rand, shape) return rand.grid(shape) end
  fields.samples = fields.samples or function(rand)
    return { inputs(draw(rand, { 7, 3 })), with(inputs(draw(rand, { 7, 3 })), { args = { 1 } }),
      with(inputs(draw(rand, { 5, 2, 3 })), { args = { 2, true } }),
      with(inputs(draw(rand, { 5, 3 })), { args = { -1 } }),
      with(inputs(draw(rand, { 2, 4 })), { args = { 1, true } }) }
  end
  fields.ref = fields.ref or function(x, d, keep)
    return reduce(x, d and (d < 0 and d + #x.shape + 1 or d), keep, f)
  end
  row(name, fields)
end
local function distinct(rand, shape) return rand.distinct(shape) end

reduction("sum", ref.sum, { int = true })
reduction("prod", ref.prod, { int = true, int_low = -1 })
reduction("mean", ref.mean)
local function zeros_and_ones(rand, shape) return rand.ints(shape, 0, 1, "f64") end
reduction("any", ref.any, { grad = false, out = "bool", draw = zeros_and_ones })
reduction("all", ref.all, { grad = false, out = "bool", draw = zeros_and_ones })
local function spread(f)
  return { samples = function(rand)
    return { inputs(rand.grid { 7, 3 }), with(inputs(rand.grid { 7, 3 }), { args = { 1 } }),
      with(inputs(rand.grid { 5, 3 }), { args = { 2, false, true } }),
      with(inputs(rand.grid { 2, 4 }), { args = { 1 } }) }
  end, ref = function(x, d, unbiased, keep)
    return reduce(x, d, keep, function(list) return f(ref.var(list, unbiased)) end)
  end }
end
reduction("var", nil, spread(same))
reduction("std", nil, spread(math.sqrt))
row("norm", { samples = function(rand)
  return { inputs(rand.grid { 7, 3 }), with(inputs(rand.grid { 5, 3 }), { args = { 1 } }),
    with(inputs(rand.grid { 5, 3 }), { args = { 3, 1 } }),
    with(inputs(rand.grid { 2, 4 }), { args = { 2, 2, true } }),
    with(inputs(rand.distinct { 5, 3 }), { args = { math.huge, 1 }, rough = true }),
    with(inputs(rand.distinct { 5, 3 }), { args = { -math.huge, 2 }, rough = true }),
    with(inputs(rand.grid { 3, 2 }), { args = { 0, 1 } }) }
end, ref = function(x, p, d, keep)
  return reduce(x, d, keep, function(list) return ref.norm(list, p or 2) end)
end })

local function extreme(name, smallest)
  local function value(list) return list[ref.first(list, smallest)] end
  reduction(name, value, { draw = distinct, ref = function(x, d, keep)
    if not d then return reduce(x, nil, keep, value) end
    d = d < 0 and d + #x.shape + 1 or d
    local function at(list) return ref.first(list, smallest) end
    return reduce(x, d, keep, value), reduce(x, d, keep, at)
  end })
  reduction("arg" .. name, function(list) return ref.first(list, smallest) end,
    { grad = false, out = "i64", draw = distinct })
end
extreme("max", false)
extreme("min", true)

-- f(list) gives a list along a dim.
local function scan(name, f, fields)
  fields = fields or {}
  fields.samples = fields.samples or function(rand)
    return { with(inputs(rand.grid { 7, 3 }), { args = { 1 } }),
      with(inputs(rand.grid { 5, 2, 3 }), { args = { 2 } }),
      with(inputs(rand.grid { 2, 4 }), { args = { -1 } }),
      with(inputs(rand.grid { 0, 3 }), { args = { 2 } }) }
  end
  fields.ref = function(x, d) return along(x, d < 0 and d + #x.shape + 1 or d, f) end
  row(name, fields)
end
scan("cumsum", ref.cumsum, { int = true })
scan("cumprod", ref.cumprod, { int = true, int_low = -1, second = false })
scan("softmax", ref.softmax)
scan("log_softmax", ref.log_softmax)
row("logsumexp", { samples = function(rand)
  return { with(inputs(rand.grid { 7, 3 }), { args = { 1 } }),
    with(inputs(rand.grid { 5, 3 }), { args = { 2, true } }),
    with(inputs(rand.grid { 2, 4 }), { args = { 1 } }) }
end, ref = function(x, d, keep) return reduce(x, d, keep, ref.logsumexp) end })

-- ---- order ----

local function ordered(which)
  return function(x, d, descending)
    d = (d or -1) < 0 and (d or -1) + #x.shape + 1 or d
    return along(x, d, function(list) return (select(which, ref.sorted(list, descending))) end)
  end
end
local function order_samples(rand)
  return { inputs(rand.distinct { 7, 3 }), with(inputs(rand.distinct { 7, 3 }), { args = { 1 } }),
    with(inputs(rand.distinct { 2, 4 }), { args = { 2, true } }),
    with(inputs(rand.distinct { 1, 2 }), { args = { 1, true } }) }
end
row("sort", { samples = order_samples, ref = function(...) return ordered(1)(...), ordered(2)(...) end })
row("argsort", { samples = order_samples, ref = ordered(2), grad = false, out = "i64" })
row("topk", { samples = function(rand)
  return { with(inputs(rand.distinct { 5, 4 }), { args = { 2 } }),
    with(inputs(rand.distinct { 5, 4 }), { args = { 3, 1, false } }),
    with(inputs(rand.distinct { 2, 3 }), { args = { 1, 1 } }) }
end, ref = function(x, k, d, largest)
  d = d or #x.shape
  local values, places = ordered(1)(x, d, largest ~= false), ordered(2)(x, d, largest ~= false)
  return array.narrow(values, d, 1, k), array.narrow(places, d, 1, k)
end })

-- ---- indices ----

local function at_dim(d) return function(f, x, ...) return f(x, d, ...) end end
local function indexed(name)
  return function(d) return { call = at_dim(d), ref = function(x, ...) return ref[name](x, d, ...) end } end
end
local selected, added = indexed "index_select", indexed "index_add"
local gathered, scattered = indexed "gather", indexed "scatter_add"

row("index_select", { samples = function(rand)
  return { with(inputs(rand.grid { 7, 3 }, rand.ints({ 5 }, 1, 7)), selected(1)),
    with(inputs(rand.grid { 5, 3 }, rand.ints({ 4 }, 1, 3)), selected(2)),
    with(inputs(rand.grid { 2, 3 }, rand.ints({ 1 }, 1, 2)), selected(1)),
    with(inputs(rand.grid { 3, 2 }, rand.ints({ 0 }, 1, 2)), selected(1)) }
end })
row("index_add", { samples = function(rand)
  return { with(inputs(rand.grid { 5, 3 }, rand.ints({ 7 }, 1, 5), rand.grid { 7, 3 }), added(1)),
    with(inputs(rand.grid { 2, 4 }, rand.ints({ 3 }, 1, 4), rand.grid { 2, 3 }), added(2)) }
end })
row("gather", { samples = function(rand)
  return { with(inputs(rand.grid { 7, 3 }, rand.ints({ 7, 2 }, 1, 3)), gathered(2)),
    with(inputs(rand.grid { 4, 3 }, rand.ints({ 5, 3 }, 1, 4)), gathered(1)),
    with(inputs(rand.grid { 2, 5 }, rand.ints({ 1, 5 }, 1, 2)), gathered(1)) }
end })
row("scatter_add", { samples = function(rand)
  return { with(inputs(rand.grid { 5, 3 }, rand.ints({ 7, 3 }, 1, 5), rand.grid { 7, 3 }), scattered(1)),
    with(inputs(rand.grid { 2, 4 }, rand.ints({ 2, 2 }, 1, 4), rand.grid { 2, 2 }), scattered(2)) }
end })
row("one_hot", { samples = function(rand)
  return { with(inputs(rand.ints({ 7 }, 1, 4)), { args = { 4 } }),
    with(inputs(rand.ints({ 2, 3 }, 1, 5)), { args = { 5 } }) }
end, grad = false, out = "f32", ref = function(ids, n)
  local shape = {}
  for k, s in ipairs(ids.shape) do shape[k] = s end
  shape[#shape + 1] = n
  return array.build(shape, function(i)
    return i[#i] == ids.data[math.floor((array.at({ shape = shape }, i) - 1) / n) + 1] and 1 or 0
  end)
end })
row("embedding", { samples = function(rand)
  return { inputs(rand.grid { 7, 3 }, rand.ints({ 5 }, 1, 7)),
    inputs(rand.grid { 4, 2 }, rand.ints({ 2, 3 }, 1, 4)),
    inputs(rand.grid { 2, 5 }, rand.ints({}, 1, 2)), inputs(rand.grid { 3, 2 }, rand.ints({ 0 }, 1, 2)) }
end, ref = ref.embedding })

-- ---- losses ----

local function losses(name)
  local smoothing = name == "cross_entropy"
  return function(rand)
    local function sample(x, target, ignore, smooth, how)
      local args = smoothing and { ignore, smooth, how } or { ignore, how }
      return with(inputs(x, target), { args = args })
    end
    return { sample(rand.grid { 7, 4 }, rand.ints({ 7 }, 1, 4), -100, 0, "mean"),
      sample(rand.grid { 7, 4 }, rand.ints({ 7 }, 1, 4), 2, 0.2, "mean"),
      sample(rand.grid { 5, 3 }, rand.ints({ 5 }, 1, 3), 1, 0.1, "sum"),
      sample(rand.grid { 5, 3 }, rand.ints({ 5 }, 1, 3), 3, 0, "none"),
      sample(rand.grid { 2, 3, 2, 2 }, rand.ints({ 2, 2, 2 }, 1, 3), -100, 0.1, "mean"),
      sample(rand.grid { 2, 3 }, rand.ints({ 2 }, 1, 1), 1, 0, "mean"),
      sample(rand.grid { 3 }, rand.ints({}, 1, 3), -100, 0, "mean") }
  end
end
row("cross_entropy", { samples = losses "cross_entropy", ref = ref.cross_entropy, wide = true })
row("nll_loss", { samples = losses "nll_loss", ref = ref.nll_loss, wide = true })

for _, part in ipairs { "spec.ops_layers" } do require(part)(row, inputs, with) end

return rows
