-- Products large enough for the blocked kernels, with either operand transposed, on one thread
-- and two, against sums of products in f64.
-- To add a size: a row of `sizes`; the blocks are 12 rows, 32 columns and 256 steps.
local orrery = require "orrery"

local sizes = {
  { 96, 100, 64 }, { 97, 129, 300 }, { 512, 40, 128 }, { 25, 333, 257 }, { 200, 96, 20 },
  { 65, 65, 512 },
}

-- (m, n) values, stored by columns where `turned`.
local function matrix(m, n, turned, dtype)
  if turned then return orrery.randn(n, m, { dtype = dtype }):t() end
  return orrery.randn(m, n, { dtype = dtype })
end

-- Sums of products, element by element, by another road than matmul.
local function expected(a, b)
  local m, n = a:size(1), b:size(2)
  local rows = {}
  for i = 1, m, 50 do
    local part = a:narrow(1, i, math.min(50, m - i + 1)):unsqueeze(3)
    rows[#rows + 1] = (part * b:unsqueeze(1)):sum(2)
  end
  local whole = orrery.cat(rows, 1)
  assert(whole:size(1) == m and whole:size(2) == n)
  return whole
end

describe("matmul", function()
  local before = orrery.get_threads and orrery.get_threads()
  after_each(function() if before then orrery.set_threads(before) end end)

  for _, threads in ipairs { 1, 2 } do
    for _, dtype in ipairs { "f32", "f64" } do
      it(("of %s on %d threads agrees with sums of products"):format(dtype, threads), function()
        orrery.manual_seed(5)
        orrery.set_threads(threads)
        for _, s in ipairs(sizes) do
          for which = 0, 3 do
            local a = matrix(s[1], s[3], which % 2 == 1, dtype)
            local b = matrix(s[3], s[2], which >= 2, dtype)
            local error = a:matmul(b):to("f64") - expected(a:to("f64"), b:to("f64"))
            assert.is_true(error:abs():max():item() < (dtype == "f32" and 1e-3 or 1e-11))
          end
        end
      end)
    end
  end
end)
