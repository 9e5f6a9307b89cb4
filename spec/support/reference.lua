-- What ops compute, in plain Lua: loops over spec.support.array, written from the definitions.
-- Invariant: nothing here uses the library under test. Dims and indices count from 1.
-- To add one: a function of arrays that gives arrays; rows of spec/ops.lua name it.
local array = require "spec.support.array"

local reference = {}

local exp, log, sqrt, floor, abs, huge = math.exp, math.log, math.sqrt, math.floor, math.abs, math.huge

-- ---- of numbers ----

function reference.sign(x) return x > 0 and 1 or x < 0 and -1 or 0 end
function reference.sigmoid(x) return 1 / (1 + exp(-x)) end
function reference.tanh(x)
  local e = exp(-2 * abs(x))
  return reference.sign(x) * (1 - e) / (1 + e)
end

--- The error function, by its series 2/sqrt(pi) exp(-x^2) sum of 2^n x^(2n+1) / (2n+1)!!
--- (Abramowitz and Stegun, 7.1.6).
function reference.erf(x)
  local term, sum, n = x, x, 0
  repeat
    n = n + 1
    term = term * 2 * x * x / (2 * n + 1)
    sum = sum + term
  until abs(term) < 1e-18
  return 2 / sqrt(math.pi) * exp(-x * x) * sum
end

function reference.gelu(x) return 0.5 * x * (1 + reference.erf(x / sqrt(2))) end
function reference.gelu_tanh(x)
  return 0.5 * x * (1 + reference.tanh(sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3)))
end
function reference.trunc(x) return x < 0 and math.ceil(x) or floor(x) end
--- Half to even.
function reference.round(x)
  local low = floor(x)
  local rest = x - low
  if rest < 0.5 then return low end
  if rest > 0.5 then return low + 1 end
  return low % 2 == 0 and low or low + 1
end

function reference.fmod(a, b)
  if b == 0 then return 0 / 0 end
  return a - reference.trunc(a / b) * b
end
function reference.remainder(a, b)
  if b == 0 then return 0 / 0 end
  return a - floor(a / b) * b
end
reference.atan2 = rawget(math, "atan2") or math.atan -- one function of two numbers since Lua 5.3

-- ---- of lists ----

function reference.sum(list)
  local s = 0
  for _, v in ipairs(list) do s = s + v end
  return s
end
function reference.prod(list)
  local s = 1
  for _, v in ipairs(list) do s = s * v end
  return s
end
function reference.mean(list) return reference.sum(list) / #list end
function reference.any(list)
  for _, v in ipairs(list) do
    if v ~= 0 then return 1 end
  end
  return 0
end
function reference.all(list)
  for _, v in ipairs(list) do
    if v == 0 then return 0 end
  end
  return 1
end
function reference.var(list, unbiased)
  local mean, s = reference.mean(list), 0
  for _, v in ipairs(list) do s = s + (v - mean) ^ 2 end
  return s / (#list - (unbiased == false and 0 or 1))
end
function reference.norm(list, p)
  local s, largest, smallest = 0, 0, huge
  for _, v in ipairs(list) do
    v = abs(v)
    largest, smallest = math.max(largest, v), math.min(smallest, v)
    if p == 0 then s = s + (v ~= 0 and 1 or 0) else s = s + v ^ p end
  end
  if p == huge then return largest elseif p == -huge then return smallest elseif p == 0 then return s end
  return s ^ (1 / p)
end
function reference.logsumexp(list)
  local m, s = -huge, 0
  for _, v in ipairs(list) do m = math.max(m, v) end
  for _, v in ipairs(list) do s = s + exp(v - m) end
  return m + log(s)
end
function reference.softmax(list)
  local lse, out = reference.logsumexp(list), {}
  for k, v in ipairs(list) do out[k] = exp(v - lse) end
  return out
end
function reference.log_softmax(list)
  local lse, out = reference.logsumexp(list), {}
  for k, v in ipairs(list) do out[k] = v - lse end
  return out
end
function reference.cumsum(list)
  local s, out = 0, {}
  for k, v in ipairs(list) do
    s = s + v
    out[k] = s
  end
  return out
end
function reference.cumprod(list)
  local s, out = 1, {}
  for k, v in ipairs(list) do
    s = s * v
    out[k] = s
  end
  return out
end
--- Positions of the first largest (or smallest) element.
function reference.first(list, smallest)
  local at = 1
  for k, v in ipairs(list) do
    if smallest and v < list[at] or not smallest and v > list[at] then at = k end
  end
  return at
end
--- Values in order, and where they stood; equal ones keep their order.
function reference.sorted(list, descending)
  local order, values = {}, {}
  for k = 1, #list do order[k] = k end
  table.sort(order, function(i, j)
    if list[i] ~= list[j] then
      if descending then return list[i] > list[j] end
      return list[i] < list[j]
    end
    return i < j
  end)
  for k, i in ipairs(order) do values[k] = list[i] end
  return values, order
end

-- ---- products ----

--- As torch.matmul: vectors, matrices, batches that broadcast.
function reference.matmul(a, b)
  local va, vb = #a.shape == 1, #b.shape == 1
  if va then a = array.reshape(a, { 1, a.shape[1] }) end
  if vb then b = array.reshape(b, { b.shape[1], 1 }) end
  local na, nb = #a.shape, #b.shape
  local m, k, n = a.shape[na - 1], a.shape[na], b.shape[nb]
  assert(b.shape[nb - 1] == k)
  local shape = {}
  local batch = math.max(na, nb) - 2
  for d = 1, batch do
    local sa, sb = a.shape[d - batch + na - 2] or 1, b.shape[d - batch + nb - 2] or 1
    shape[d] = sa == 1 and sb or sa
  end
  shape[batch + 1], shape[batch + 2] = m, n
  local y = array.build(shape, function(index)
    local s, ia, ib = 0, {}, {}
    for d = 1, #index do ia[d], ib[d] = index[d], index[d] end
    for j = 1, k do
      ia[#index], ib[#index - 1] = j, j
      s = s + array.broadcast_get(a, ia) * array.broadcast_get(b, ib)
    end
    return s
  end)
  local out = {}
  for d = 1, batch do out[d] = shape[d] end
  if not va then out[#out + 1] = m end
  if not vb then out[#out + 1] = n end
  return array.reshape(y, out)
end

--- x (…, in), w (out, in), b (out) or nil.
function reference.linear(x, w, b)
  local y = reference.matmul(x, array.permute(w, { 2, 1 }))
  return b and array.map(function(p, q) return p + q end, y, b) or y
end

--- softmax(scale q k^T) v; causal: row i sees positions up to i.
function reference.attention(q, k, v, causal, scale)
  scale = scale and scale ~= 0 and scale or 1 / sqrt(q.shape[4])
  local t, s = q.shape[3], k.shape[3]
  local p = reference.matmul(q, array.permute(k, { 1, 2, 4, 3 }))
  p = array.build(p.shape, function(i)
    if causal and i[4] > i[3] then return -huge end
    return scale * p.data[array.at(p, i)]
  end)
  assert(not causal or t == s)
  return reference.matmul(array.along(p, 4, reference.softmax), v)
end

-- ---- convolution and pooling: o holds sh sw ph pw dh dw groups (and oph opw) ----

function reference.conv2d(x, w, b, o)
  local cin, cout = x.shape[2] / o.groups, w.shape[1] / o.groups
  local kh, kw = w.shape[3], w.shape[4]
  local function size(n, k, s, p, d) return floor((n + 2 * p - d * (k - 1) - 1) / s) + 1 end
  local shape = { x.shape[1], w.shape[1], size(x.shape[3], kh, o.sh, o.ph, o.dh),
    size(x.shape[4], kw, o.sw, o.pw, o.dw) }
  return array.build(shape, function(i)
    local group = floor((i[2] - 1) / cout)
    local s = b and b.data[i[2]] or 0
    for c = 1, cin do
      for p = 1, kh do
        for q = 1, kw do
          local r = (i[3] - 1) * o.sh - o.ph + (p - 1) * o.dh + 1
          local t = (i[4] - 1) * o.sw - o.pw + (q - 1) * o.dw + 1
          if r >= 1 and r <= x.shape[3] and t >= 1 and t <= x.shape[4] then
            s = s + array.get(x, i[1], group * cin + c, r, t) * array.get(w, i[2], c, p, q)
          end
        end
      end
    end
    return s
  end)
end

--- w (in, out / groups, kh, kw): every input element adds a scaled kernel to the output.
function reference.conv_transpose2d(x, w, b, o)
  local cin, cout, kh, kw = x.shape[2] / o.groups, w.shape[2], w.shape[3], w.shape[4]
  local function size(n, k, s, p, d, op) return (n - 1) * s - 2 * p + d * (k - 1) + op + 1 end
  local y = array.full({ x.shape[1], cout * o.groups, size(x.shape[3], kh, o.sh, o.ph, o.dh, o.oph),
    size(x.shape[4], kw, o.sw, o.pw, o.dw, o.opw) }, 0)
  array.each(x.shape, function(i, at)
    local group = floor((i[2] - 1) / cin)
    for c = 1, cout do
      for p = 1, kh do
        for q = 1, kw do
          local r = (i[3] - 1) * o.sh - o.ph + (p - 1) * o.dh + 1
          local t = (i[4] - 1) * o.sw - o.pw + (q - 1) * o.dw + 1
          if r >= 1 and r <= y.shape[3] and t >= 1 and t <= y.shape[4] then
            local to = array.at(y, { i[1], group * cout + c, r, t })
            y.data[to] = y.data[to] + x.data[at] * array.get(w, i[2], c, p, q)
          end
        end
      end
    end
  end)
  if not b then return y end
  return array.map(function(u, v) return u + v end, y, array.reshape(b, { b.shape[1], 1, 1 }))
end

-- f(list of the window's elements, how many places it has within the padding)
local function pool(x, o, f)
  local function size(n, k, s, p, d) return floor((n + 2 * p - d * (k - 1) - 1) / s) + 1 end
  local shape = { x.shape[1], x.shape[2], size(x.shape[3], o.kh, o.sh, o.ph, o.dh or 1),
    size(x.shape[4], o.kw, o.sw, o.pw, o.dw or 1) }
  return array.build(shape, function(i)
    local list, places = {}, 0
    for p = 1, o.kh do
      for q = 1, o.kw do
        local r = (i[3] - 1) * o.sh - o.ph + (p - 1) * (o.dh or 1) + 1
        local t = (i[4] - 1) * o.sw - o.pw + (q - 1) * (o.dw or 1) + 1
        if r <= x.shape[3] + o.ph and t <= x.shape[4] + o.pw then places = places + 1 end
        if r >= 1 and r <= x.shape[3] and t >= 1 and t <= x.shape[4] then
          list[#list + 1] = array.get(x, i[1], i[2], r, t)
        end
      end
    end
    return f(list, places)
  end)
end

function reference.max_pool2d(x, o)
  return pool(x, o, function(list) return list[reference.first(list)] end)
end
function reference.avg_pool2d(x, o)
  return pool(x, o, function(list, places)
    return reference.sum(list) / (o.include_pad and places or #list)
  end)
end

-- ---- norms ----

-- (x - mean) / sqrt(var + eps), over the elements for which key(index) is the same.
local function standardise(x, eps, key, centred)
  local sum, square, count, keys = {}, {}, {}, {}
  array.each(x.shape, function(index, k)
    local name = key(index)
    keys[k] = name
    sum[name] = (sum[name] or 0) + x.data[k]
    count[name] = (count[name] or 0) + 1
  end)
  for name, s in pairs(sum) do sum[name] = centred and s / count[name] or 0 end
  for k, name in ipairs(keys) do square[name] = (square[name] or 0) + (x.data[k] - sum[name]) ^ 2 end
  local data = {}
  for k, name in ipairs(keys) do
    data[k] = (x.data[k] - sum[name]) / sqrt(square[name] / count[name] + eps)
  end
  return array.new(x.shape, data), sum, square, count
end

-- times w and plus b along dim d.
local function affine(y, w, b, d)
  return array.build(y.shape, function(index)
    local v = y.data[array.at(y, index)]
    if w then v = v * w.data[index[d]] end
    if b then v = v + b.data[index[d]] end
    return v
  end)
end

local function row_key(index) return table.concat(index, ",", 1, #index - 1) end

function reference.layer_norm(x, w, b, eps)
  return affine(standardise(x, eps or 1e-5, row_key, true), w, b, #x.shape)
end
function reference.rms_norm(x, w, eps)
  return affine(standardise(x, eps or 1e-6, row_key, false), w, nil, #x.shape)
end
function reference.group_norm(x, groups, w, b, eps)
  local size = x.shape[2] / groups
  local function key(index) return index[1] .. "," .. floor((index[2] - 1) / size) end
  return affine(standardise(x, eps or 1e-5, key, true), w, b, 2)
end
--- Gives the result and the running statistics after it; rm and rv may be nil.
function reference.batch_norm(x, w, b, rm, rv, training, momentum, eps)
  if not training then
    local y = array.build(x.shape, function(index)
      local c = index[2]
      return (x.data[array.at(x, index)] - rm.data[c]) / sqrt(rv.data[c] + eps)
    end)
    return affine(y, w, b, 2), rm, rv
  end
  local y, mean, square, count = standardise(x, eps, function(index) return index[2] end, true)
  y = affine(y, w, b, 2)
  if not rm then return y end
  local function mix(old, new)
    return array.build(old.shape, function(index)
      return (1 - momentum) * old.data[index[1]] + momentum * new(index[1])
    end)
  end
  return y, mix(rm, function(c) return mean[c] end),
    mix(rv, function(c) return square[c] / (count[c] - 1) end)
end

-- ---- losses: x (N, C, …), target (N, …) ----

-- values(line of classes, target) gives a loss and its weight in the mean.
local function class_loss(x, target, reduction, values)
  local order = { 1 }
  for d = 3, #x.shape do order[#order + 1] = d end
  order[#order + 1] = 2
  if #x.shape == 1 then order = { 1 } end
  local rows = array.permute(x, order)
  local classes, losses, total, count = rows.shape[#rows.shape], {}, 0, 0
  for k, t in ipairs(target.data) do
    local line = {}
    for c = 1, classes do line[c] = rows.data[(k - 1) * classes + c] end
    local loss, weight = values(line, t)
    losses[k] = loss
    total, count = total + loss, count + weight
  end
  if reduction == "none" then return array.new(target.shape, losses) end
  return array.new({}, { reduction == "sum" and total or total / math.max(count, 1) })
end

function reference.cross_entropy(x, target, ignore, smoothing, reduction)
  return class_loss(x, target, reduction or "mean", function(line, t)
    if t == ignore then return 0, 0 end
    local p = reference.log_softmax(line)
    return -(1 - smoothing) * p[t] - smoothing * reference.mean(p), 1
  end)
end
function reference.nll_loss(x, target, ignore, reduction)
  return class_loss(x, target, reduction or "mean", function(line, t)
    if t == ignore then return 0, 0 end
    return -line[t], 1
  end)
end

-- ---- indices ----

local function replaced(index, d, value)
  local copy = {}
  for k = 1, #index do copy[k] = index[k] end
  copy[d] = value
  return copy
end

function reference.index_select(x, d, ids)
  local shape = replaced(x.shape, d, #ids.data)
  return array.build(shape, function(index)
    return x.data[array.at(x, replaced(index, d, ids.data[index[d]]))]
  end, x.dtype)
end
function reference.index_add(x, d, ids, source)
  local y = array.copy(x)
  array.each(source.shape, function(index, k)
    local at = array.at(y, replaced(index, d, ids.data[index[d]]))
    y.data[at] = y.data[at] + source.data[k]
  end)
  return y
end
function reference.gather(x, d, ids)
  return array.build(ids.shape, function(index)
    return x.data[array.at(x, replaced(index, d, ids.data[array.at(ids, index)]))]
  end, x.dtype)
end
function reference.scatter_add(x, d, ids, source)
  local y = array.copy(x)
  array.each(ids.shape, function(index, k)
    local at = array.at(y, replaced(index, d, ids.data[k]))
    y.data[at] = y.data[at] + source.data[k]
  end)
  return y
end
function reference.embedding(w, ids)
  local shape = replaced(ids.shape, #ids.shape + 1, w.shape[2])
  return array.build(shape, function(index)
    return array.get(w, array.get(ids, (table.unpack or unpack)(index, 1, #index - 1)), index[#index])
  end, w.dtype)
end
function reference.roll(x, shift, d)
  return array.build(x.shape, function(index)
    return x.data[array.at(x, replaced(index, d, (index[d] - 1 - shift) % x.shape[d] + 1))]
  end, x.dtype)
end
function reference.cat(list, d)
  local lengths, total = {}, 0
  for k, a in ipairs(list) do
    lengths[k] = total
    total = total + a.shape[d]
  end
  return array.build(replaced(list[1].shape, d, total), function(index)
    for k = #list, 1, -1 do
      if index[d] > lengths[k] then
        return list[k].data[array.at(list[k], replaced(index, d, index[d] - lengths[k]))]
      end
    end
  end, list[1].dtype)
end

return reference
