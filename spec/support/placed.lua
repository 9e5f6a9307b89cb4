-- Arrays as tensors of the library: on one device, and placed on meshes of devices.
-- Invariant: the parts of a partial(sum) tensor add up exactly (they lie on a grid), and the first
-- device of an axis holds 0.6 of it.
-- To add a mesh: its row in `meshes`.
local core = require "orrery.core"
local array = require "spec.support.array"

local unpack = table.unpack or unpack
local placed = {}

local device = require "spec.support.device"

local function mesh(names, sizes)
  local n, list = array.count(sizes), {}
  for k = 1, n do list[k] = device.name(k - 1) end
  local handle = core.mesh(names, sizes, list)
  return { name = table.concat(sizes, "x"), sizes = sizes, devices = list, handle = handle }
end

--- By name: "1", "2", "3", "5", "2x2".
placed.meshes = {
  mesh({ "data" }, { 1 }), mesh({ "data" }, { 2 }), mesh({ "data" }, { 3 }), mesh({ "data" }, { 5 }),
  mesh({ "data", "tensor" }, { 2, 2 }),
}

--- The array as a tensor on a device (the host).
function placed.host(a, dtype, on)
  dtype = dtype or a.dtype
  local options = { dtype = dtype, device = on }
  if #a.data == 0 then return core.zeros(a.shape, options) end
  if #a.shape == 0 then return core.tensor(a.data[1], options) end
  return core.tensor(a.data, options):view(unpack(a.shape))
end

--- The same values in memory whose dims run backwards.
function placed.backward_strides(a, dtype)
  local order = {}
  for d = #a.shape, 1, -1 do order[#order + 1] = d end
  if #order < 2 then return placed.host(a, dtype) end
  return placed.host(array.permute(a, order), dtype):permute(order)
end

local function flatten(value, data)
  if type(value) == "table" then
    for k = 1, #value do flatten(value[k], data) end
  else
    if value == true then value = 1 elseif value == false then value = 0 end
    data[#data + 1] = value
  end
  return data
end

--- The tensor's global value as an array.
function placed.array(t)
  return array.new(t:size(), flatten(t:detach():totable(), {}), t:dtype())
end

--- Words that a tensor of these dims may have on an axis; cut(d) is shard(d) with bounds that are
--- not balanced, on meshes of one axis.
function placed.words(a, grad)
  local words = { "replicate" }
  for d = 1, #a.shape do
    words[#words + 1] = ("shard(%d)"):format(d)
    words[#words + 1] = ("cut(%d)"):format(d)
  end
  if grad then words[#words + 1] = "partial(sum)" end
  return words
end

-- The range of balanced part i of n: sizes differ by at most one, larger first.
local function part(size, n, i)
  local base, more = math.floor(size / n), size % n
  local first = (i - 1) * base + math.min(i - 1, more) + 1
  return first, base + (i <= more and 1 or 0)
end

-- What device i of n adds to a partial sum: 0.6 of it is the first's, the last takes the rest.
local function share(v, i, n)
  if n == 1 then return v end
  local grid = 1048576
  local first = math.floor(0.6 * v * grid) / grid
  if i == 1 then return first end
  local rest = v - first
  local each = math.floor(rest / (n - 1) * grid) / grid
  if i < n then return each end
  return rest - (n - 2) * each
end

local function local_array(a, m, words, rank)
  local coordinate, r = {}, rank
  for k = #m.sizes, 1, -1 do
    coordinate[k] = r % m.sizes[k] + 1
    r = math.floor(r / m.sizes[k])
  end
  for k, word in ipairs(words) do
    local d = tonumber(word:match "^shard%((%d+)%)$")
    local i, n = coordinate[k], m.sizes[k]
    if d then
      local first, size = part(a.shape[d], n, i)
      a = array.narrow(a, d, first, size)
    elseif word == "partial(sum)" then
      a = array.map(function(v) return share(v, i, n) end, a)
    end
  end
  return a
end

-- Part of a longer tensor: what narrow leaves on each device of its shard.
local function cut(a, m, d)
  local shape = {}
  for k, s in ipairs(a.shape) do shape[k] = s end
  shape[d] = shape[d] + 4
  local long = array.build(shape, function(index)
    local from = {}
    for k, i in ipairs(index) do from[k] = i end
    from[d] = from[d] - 3
    if from[d] < 1 or from[d] > a.shape[d] then return 1 end
    return a.data[array.at(a, from)]
  end, a.dtype)
  return core.distribute(placed.host(long), m.handle, ("shard(%d)"):format(d)):narrow(d, 4, a.shape[d])
end

--- The array as a tensor on mesh m, one word an axis; "host" leaves it on the host.
---@param strided boolean|nil whether it starts with backward strides
---@return orrery.Tensor without grad
function placed.place(a, m, words, strided)
  local host = strided and placed.backward_strides or placed.host
  if words[1] == "host" then return host(a) end
  local dim = tonumber(words[1]:match "^cut%((%d+)%)$")
  if dim then return cut(a, m, dim) end
  local partial = false
  for _, word in ipairs(words) do partial = partial or word == "partial(sum)" end
  if not partial then return core.distribute(host(a), m.handle, unpack(words)) end
  local parts = {}
  for k, name in ipairs(m.devices) do
    local piece = local_array(a, m, words, k - 1)
    parts[k] = placed.host(piece, a.dtype, name):clone() -- a joined part must own its memory
  end
  return core.from_shards(m.handle, a.shape, parts, unpack(words))
end

--- Every word list of a mesh's axes.
function placed.choices(words, m)
  local list = {}
  if #m.sizes == 1 then
    for k, w in ipairs(words) do list[k] = { w } end
    return list
  end
  for _, a in ipairs(words) do
    for _, b in ipairs(words) do
      if not (a .. b):find "cut" then list[#list + 1] = { a, b } end
    end
  end
  return list
end

return placed
