-- Rows of spec/ops.lua on a CUDA device against the CPU: values and gradients of the same inputs in the
-- same dtype, by the norm of the difference over the norm of what the CPU gave.
-- Invariant: whole numbers, booleans and shapes are equal; "tf32" is f32 whose products may be rounded.
-- To add a dtype: its tolerance; f32's, tf32's and bf16's are what the project promises.
local core = require "orrery.core"
local matrix = require "spec.support.matrix"
local device = require "spec.support.device"

local against = {}

against.order = { "f64", "f32", "tf32", "f16", "bf16" }
against.tolerances = { f64 = 1e-11, f32 = 1e-5, tf32 = 1e-3, f16 = 5e-3, bf16 = 1e-2 }

-- Whether numbers are the same as numbers, where neither or both are finite.
local function same(a, b) return a == b or (a ~= a and b ~= b) end

--- |a - b| / |b| of two arrays, or |a - b| where b is zero; nil and a reason where they cannot be compared.
---@param a spec.Array what is checked
---@param b spec.Array what it should be
---@return number? error, string? reason
function against.distance(a, b)
  local shape_a, shape_b = table.concat(a.shape, ","), table.concat(b.shape, ",")
  if shape_a ~= shape_b then return nil, ("shape (%s), the CPU's (%s)"):format(shape_a, shape_b) end
  if a.dtype ~= b.dtype then return nil, ("dtype %s, the CPU's %s"):format(a.dtype, b.dtype) end
  local exact = not a.dtype:find("f", 1, true)
  local apart, size = 0, 0
  for k, want in ipairs(b.data) do
    local got = a.data[k]
    if not same(got, want) then
      if exact or want - want ~= 0 or got - got ~= 0 then
        return nil, ("element %d is %.9g, the CPU's %.9g"):format(k, got, want)
      end
      apart = apart + (got - want) ^ 2
    end
    if want - want == 0 then size = size + want * want end
  end
  return math.sqrt(apart) / (size > 0 and math.sqrt(size) or 1)
end

-- f() with the one device named, and products in tf32 where asked.
local function on(name, tf32, f)
  local single, allowed = device.single, core.allow_tf32(tf32)
  device.single = name
  local results = { pcall(f) }
  device.single = single
  core.allow_tf32(allowed)
  if not results[1] then error(results[2], 0) end
  return results[2], results[3]
end

local function has_float(sample)
  for _, a in ipairs(sample.inputs) do
    if a.dtype:find("f", 1, true) then return true end
  end
  return false
end

--- Whether a row is computed in a dtype at all.
function against.takes(row, dtype)
  if dtype == "f64" or not row.dtypes then return true end
  for _, name in ipairs(row.dtypes) do
    if name == dtype or (dtype == "tf32" and name == "f32") then return true end
  end
  return false
end

-- Compares lists of arrays; `seen` gets (error, where) of each.
local function compare(kind, got, want, tolerance, seen, problems)
  for k, w in ipairs(want) do
    if w or got[k] then
      local where = kind .. " " .. k
      local apart, reason = nil, "one side has none"
      if w and got[k] then apart, reason = against.distance(got[k], w) end
      if apart then seen(apart, where) end
      if apart and (apart > tolerance or apart ~= apart) then
        reason = ("relative norm %.3g, at most %g"):format(apart, tolerance)
      end
      if reason then problems[#problems + 1] = where .. ": " .. reason end
    end
  end
end

--- Every sample of a row in one dtype on the first CUDA device and on the CPU.
---@param row table
---@param dtype string of against.order
---@return string[] problems, {error: number, where: string} worst
function against.check(row, dtype)
  local problems, worst = {}, { error = 0, where = row.name }
  local tf32 = dtype == "tf32"
  local float = tf32 and "f32" or dtype
  for _, sample in ipairs(matrix.samples(row)) do
    if has_float(sample) or dtype == "f64" then
      local function evaluate() return matrix.evaluate(row, sample, matrix.host_tensors(sample, float)) end
      local ok, message = pcall(function()
        local want, want_grads = on(nil, false, evaluate)
        local got, got_grads = on("cuda:0", tf32, evaluate)
        local found = {}
        local function seen(apart, where)
          if apart > worst.error then
            worst = { error = apart, where = ("%s, %s, %s"):format(row.name, sample.name, where) }
          end
        end
        compare("result", got, want, against.tolerances[dtype], seen, found)
        compare("gradient of input", got_grads, want_grads, against.tolerances[dtype], seen, found)
        for _, text in ipairs(found) do problems[#problems + 1] = sample.name .. ", " .. text end
      end)
      if not ok then problems[#problems + 1] = sample.name .. ": " .. tostring(message) end
    end
  end
  return problems, worst
end

return against
