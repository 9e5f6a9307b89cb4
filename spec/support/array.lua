-- Plain-Lua arrays for references: {shape = {…}, data = {flat, row-major}, dtype = "f64"}.
-- Invariant: nothing here uses the library under test; data holds numbers only (true is 1).
-- To add a helper: build it on each(), map() or along().
local array = {}

---@class spec.Array
---@field shape integer[]
---@field data number[]
---@field dtype string

---@param shape integer[]
---@return integer
function array.count(shape)
  local n = 1
  for _, s in ipairs(shape) do n = n * s end
  return n
end

---@return spec.Array
function array.new(shape, data, dtype)
  assert(#data == array.count(shape), "array: data does not fill the shape")
  return { shape = shape, data = data, dtype = dtype or "f64" }
end

--- Calls f(index, k) for every index of the shape, in row-major order; index is reused.
function array.each(shape, f)
  local n, index = array.count(shape), {}
  for d = 1, #shape do index[d] = 1 end
  for k = 1, n do
    f(index, k)
    for d = #shape, 1, -1 do
      index[d] = index[d] + 1
      if index[d] <= shape[d] then break end
      index[d] = 1
    end
  end
end

--- Position in data of an index.
function array.at(a, index)
  local at = 0
  for d = 1, #a.shape do at = at * a.shape[d] + index[d] - 1 end
  return at + 1
end

function array.get(a, ...) return a.data[array.at(a, { ... })] end

---@return spec.Array whose elements are f(index)
function array.build(shape, f, dtype)
  local data = {}
  array.each(shape, function(index, k) data[k] = f(index) end)
  return array.new(shape, data, dtype)
end

function array.full(shape, value, dtype)
  return array.build(shape, function() return value end, dtype)
end

function array.copy(a, dtype)
  local data = {}
  for k = 1, #a.data do data[k] = a.data[k] end
  return array.new(a.shape, data, dtype or a.dtype)
end

function array.reshape(a, shape) return array.new(shape, a.data, a.dtype) end

local function broadcast(arrays)
  local shape, n = {}, 0
  for _, a in ipairs(arrays) do n = math.max(n, #a.shape) end
  for d = 1, n do
    shape[d] = 1
    for _, a in ipairs(arrays) do
      local s = a.shape[d - n + #a.shape]
      if s and s ~= 1 then shape[d] = s end
    end
  end
  return shape
end

--- The element of a at an index of a shape that a broadcasts to.
function array.broadcast_get(a, index)
  local at, lead = 0, #index - #a.shape
  for d = 1, #a.shape do
    local i = a.shape[d] == 1 and 1 or index[d + lead]
    at = at * a.shape[d] + i - 1
  end
  return a.data[at + 1]
end

--- f over the elements of arrays, broadcast as the library does; booleans become 1 and 0.
---@return spec.Array
function array.map(f, a, b, c)
  local arrays = { a, b, c }
  local shape = broadcast(arrays)
  local get = array.broadcast_get
  return array.build(shape, function(index)
    local v
    if c then v = f(get(a, index), get(b, index), get(c, index))
    elseif b then v = f(get(a, index), get(b, index))
    else v = f(get(a, index)) end
    if v == true then v = 1 elseif v == false then v = 0 end
    return v
  end, a.dtype)
end

--- f(list) gives another list for every line along dim d (the same length on every line).
---@return spec.Array
function array.along(a, d, f)
  local lines, shape = {}, {}
  for k, s in ipairs(a.shape) do shape[k] = s end
  shape[d] = 1
  local length = array.count(shape) == 0 and a.shape[d] or 0
  array.each(shape, function(index, k)
    local line, at = {}, {}
    for e = 1, #shape do at[e] = index[e] end
    for i = 1, a.shape[d] do
      at[d] = i
      line[i] = a.data[array.at(a, at)]
    end
    lines[k] = f(line)
    length = #lines[k]
  end)
  local one = { shape = shape }
  local out = {}
  for k, s in ipairs(shape) do out[k] = s end
  out[d] = length
  return array.build(out, function(index)
    local at = {}
    for e = 1, #shape do at[e] = e == d and 1 or index[e] end
    return lines[array.at(one, at)][index[d]]
  end, a.dtype)
end

--- f(list) gives a number for every set of elements that dims d (nil: all) run through.
---@param d integer|nil
---@param keep boolean|nil
---@return spec.Array
function array.reduce(a, d, keep, f)
  if not d then
    local shape = {}
    for k = 1, keep and #a.shape or 0 do shape[k] = 1 end
    return array.new(shape, { f(a.data) }, a.dtype)
  end
  local y = array.along(a, d, function(line) return { f(line) } end)
  if keep then return y end
  local shape = {}
  for k, s in ipairs(y.shape) do
    if k ~= d then shape[#shape + 1] = s end
  end
  return array.reshape(y, shape)
end

--- order[k]: which dim of a becomes dim k.
function array.permute(a, order)
  local shape = {}
  for k, d in ipairs(order) do shape[k] = a.shape[d] end
  return array.build(shape, function(index)
    local from = {}
    for k, d in ipairs(order) do from[d] = index[k] end
    return a.data[array.at(a, from)]
  end, a.dtype)
end

--- Elements first to first + n - 1 of dim d.
function array.narrow(a, d, first, n)
  local shape = {}
  for k, s in ipairs(a.shape) do shape[k] = s end
  shape[d] = n
  return array.build(shape, function(index)
    local from = {}
    for k = 1, #shape do from[k] = index[k] end
    from[d] = from[d] + first - 1
    return a.data[array.at(a, from)]
  end, a.dtype)
end

-- ---- random arrays ----

--- Numbers that are the same everywhere: the generator of Park and Miller (1988).
function array.random(seed)
  local s = seed % 2147483646 + 1
  local rand = {}
  --- A whole number from lo to hi.
  function rand.int(lo, hi)
    s = (s * 16807) % 2147483647
    return lo + s % (hi - lo + 1)
  end
  --- Odd multiples of 1/128 in (lo, hi): never whole, never 0, and exact in bf16 for |x| < 2.
  function rand.grid(shape, lo, hi, dtype)
    lo, hi = lo or -2, hi or 2
    return array.build(shape, function()
      return (2 * rand.int(lo * 64, hi * 64 - 1) + 1) / 128
    end, dtype)
  end
  --- The same without repetition, for ops that compare elements; at most 256 of them.
  function rand.distinct(shape, dtype)
    local pool = {}
    for k = -128, 127 do pool[#pool + 1] = (2 * k + 1) / 128 end
    for k = #pool, 2, -1 do
      local j = rand.int(1, k)
      pool[k], pool[j] = pool[j], pool[k]
    end
    local at = 0
    return array.build(shape, function()
      at = at + 1
      return pool[at]
    end, dtype)
  end
  --- Whole numbers in [lo, hi].
  function rand.ints(shape, lo, hi, dtype)
    return array.build(shape, function() return rand.int(lo, hi) end, dtype or "i64")
  end
  function rand.bools(shape)
    return array.build(shape, function() return rand.int(0, 1) end, "bool")
  end
  function rand.pick(list) return list[rand.int(1, #list)] end
  return rand
end

return array
