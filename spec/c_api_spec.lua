-- The public C functions, through LuaJIT's ffi: values, numbers as the Lua method takes them, errors.
-- Invariant: the declarations are those of csrc/orrery.h itself, so the header stands alone.
-- To add a function: an `it` that calls it rightly and wrongly.
local root = os.getenv "ORRERY_ROOT" or "."
local build = os.getenv "ORRERY_BUILD" or root .. "/build"
local found, ffi = pcall(require, "ffi")

if not found then
  describe("orrery.h", function()
    it("is called by the C programs of embed_spec on this interpreter", function()
      assert.is_nil(rawget(_G, "jit"))
    end)
  end)
  return
end

local function declarations()
  local file = assert(io.open(root .. "/csrc/orrery.h"))
  local text = file:read "*a":gsub("/%*.-%*/", ""):gsub("\n#[^\n]*", "")
  file:close()
  return (text:gsub('extern "C" {', "", 1):gsub("}%s*$", "", 1):gsub("ORR_API ", ""))
end

ffi.cdef(declarations())
local c = ffi.load(build .. "/liborrery.so")

local function must(status)
  assert.equal(0, tonumber(status), ffi.string(c.orrery_last_error()))
end

-- The call fails with this status, and its words have `words` in them.
local function refused(status, kind, words)
  local message = ffi.string(c.orrery_last_error())
  assert.equal(tonumber(ffi.C[kind]), tonumber(status), message)
  assert.truthy(message:find(words, 1, true), message)
end

local function box() return ffi.new "orr_tensor *[1]" end

local live = {}
local function keep(out)
  live[#live + 1] = out[0]
  return out[0]
end

local function tensor(dtype, shape, values)
  local c_type = ({ f32 = "float[?]", f64 = "double[?]", i64 = "int64_t[?]" })[dtype]
  local out = box()
  must(c.orrery_tensor(dtype, #shape, ffi.new("int64_t[?]", math.max(#shape, 1), shape),
    ffi.new(c_type, #values, values), out))
  return keep(out)
end

local function call(name, inputs, numbers)
  local out = box()
  local status = c.orrery_call(name, ffi.new("orr_tensor *[?]", 8, inputs), #inputs,
    ffi.new("double[?]", 20, numbers or {}), #(numbers or {}), out, 1)
  if status ~= 0 then
    assert.is_true(out[0] == nil)
    return nil, status
  end
  return keep(out)
end

local function values(t, n)
  local data = ffi.new("float[?]", n)
  must(c.orrery_read(t, data, 4 * n))
  local list = {}
  for k = 1, n do list[k] = data[k - 1] end
  return list
end

local function describe_tensor(t)
  local text = ffi.new "char[300]"
  return ffi.string(c.orrery_describe(t, text, 300))
end

describe("orrery.h", function()
  setup(function() must(c.orrery_open()) end)
  teardown(function() c.orrery_close() end)
  after_each(function()
    for _, t in ipairs(live) do c.orrery_free(t) end
    live = {}
  end)

  local function matrix() return tensor("f32", { 2, 3 }, { 1, 2, 3, 4, 5, 6 }) end

  it("makes, describes and reads tensors", function()
    local x = matrix()
    assert.equal("(2, 3) f32 on cpu", describe_tensor(x))
    assert.equal(2, c.orrery_ndim(x))
    assert.equal(3, tonumber(c.orrery_size(x, 2)))
    assert.equal(0, tonumber(c.orrery_size(x, 3)))
    assert.equal("f32", ffi.string(c.orrery_dtype(x)))
    assert.same({ 1, 2, 3, 4, 5, 6 }, values(x, 6))
    local zeros = box()
    must(c.orrery_tensor("f32", 1, ffi.new("int64_t[1]", 2), nil, zeros))
    assert.same({ 0, 0 }, values(keep(zeros), 2))
    refused(c.orrery_read(x, ffi.new "float[5]", 20), "ORR_EARG", "read: 20 bytes are not the 24 of (2, 3)")
    refused(c.orrery_tensor("f33", 0, nil, nil, zeros), "ORR_EARG", "f33")
    refused(c.orrery_tensor("f32", 9, nil, nil, zeros), "ORR_EARG", "not 9")
    refused(c.orrery_tensor("f32", 1, ffi.new("int64_t[1]", -1), nil, zeros), "ORR_EARG", "-1")
    refused(c.orrery_tensor("f32", 2, ffi.new("int64_t[2]", { 2 ^ 40, 2 ^ 40 }), nil, zeros), "ORR_EARG",
      "dimension 2")
    refused(c.orrery_item(x, ffi.new "double[1]"), "ORR_EARG", "item: needs one element")
  end)

  it("calls ops with the numbers of the Lua method", function()
    local x = matrix()
    assert.same({ 6, 15 }, values(call("sum", { x }, { 2 }), 2))
    assert.same({ 6, 15 }, values(call("sum", { x }, { -1 }), 2))
    assert.equal("(2, 1) f32 on cpu", describe_tensor(call("sum", { x }, { 2, 1 })))
    assert.same({ 21 }, values(call("sum", { x }, { 0 / 0 }), 1))
    assert.same({ 21 }, values(call("sum", { x }), 1))
    assert.equal("(3, 2) f32 on cpu", describe_tensor(call("reshape", { x }, { 3, -1 })))
    assert.equal("(3, 2) f32 on cpu", describe_tensor(call("permute", { x }, { 2, 1 })))
    assert.equal("(4, 3) f32 on cpu", describe_tensor(call("cat", { x, x })))
    assert.same({ 2, 3, 4, 5, 6, 7 }, values(call("add", { x }, { 1 }), 6))
    local out, right = box(), ffi.new "orr_tensor *[2]"
    right[1] = x
    must(c.orrery_call("sub", right, 2, ffi.new("double[1]", 1), 1, out, 1))
    assert.same({ 0, -1, -2, -3, -4, -5 }, values(keep(out), 6))
    must(c.orrery_call("mul_", ffi.new("orr_tensor *[1]", { x }), 1, ffi.new("double[1]", 2), 1, nil, 0))
    assert.same({ 2, 4, 6, 8, 10, 12 }, values(x, 6))
    local both = ffi.new "orr_tensor *[2]"
    must(c.orrery_call("max", ffi.new("orr_tensor *[1]", { x }), 1, ffi.new("double[1]", 2), 1, both, 2))
    live[#live + 1], live[#live + 2] = both[0], both[1]
    assert.same({ 6, 12 }, values(both[0], 2))
    assert.equal("(2) i64 on cpu", describe_tensor(both[1]))
  end)

  it("refuses calls that do not fit, in words", function()
    local x = matrix()
    for words, wrong in pairs {
      ["there is no op 'no_such'"] = { "no_such", { x } },
      ["there is no op 'sum_'"] = { "sum_", { x } },
      ["there is no op ''"] = { "", {} },
      ["matmul: tensor 2 is missing"] = { "matmul", { x } },
      ["sum: dimension 3 of a tensor with 2"] = { "sum", { x }, { 3 } },
      ["sum: dimension 0 of a tensor with 2"] = { "sum", { x }, { 0 } },
      ["sum: number 1 must be whole and is 1.5"] = { "sum", { x }, { 1.5 } },
      ["cumsum: number 1 is missing"] = { "cumsum", { x } },
      ["add: number 1 is missing"] = { "add", { x } },
      ["are more than it takes"] = { "exp", { x }, { 1 } },
      ["at most 8 numbers, not 9"] = { "reshape", { x }, { 1, 1, 1, 1, 1, 1, 1, 1, 6 } },
      ["cat: needs a tensor"] = { "cat", {} },
      ["got (2, 3) f32 on cpu, (2, 3) f32 on cpu"] = { "matmul", { x, x } },
    } do
      local _, status = call(wrong[1], wrong[2], wrong[3])
      refused(status, "ORR_EARG", words)
    end
    assert.same({ 21 }, values(call("sum", { x }), 1))
  end)

  it("gives gradients, and none where recording is off", function()
    local x = matrix()
    must(c.orrery_require_grad(x, true))
    local y = call("sum", { call("mul", { x, x }) })
    must(c.orrery_backward(y, nil))
    assert.same({ 2, 4, 6, 8, 10, 12 }, values(c.orrery_grad(x), 6))
    must(c.orrery_backward(call("mul", { x, x }), x))
    assert.same({ 4, 12, 24, 40, 60, 84 }, values(c.orrery_grad(x), 6)) -- 2 x + 2 x^2
    c.orrery_zero_grad(x)
    assert.is_true(c.orrery_grad(x) == nil)
    assert.is_true(c.orrery_grad_mode(false))
    refused(c.orrery_backward(call("sum", { x }), nil), "ORR_EARG", "does not require grad")
    assert.is_false(c.orrery_grad_mode(true))
    refused(c.orrery_backward(call("add", { x }, { 1 }), nil), "ORR_EARG", "reduce it to one number")
    refused(c.orrery_require_grad(y, false), "ORR_EARG", "leaf")
    refused(c.orrery_require_grad(tensor("i64", { 1 }, { 1 }), true), "ORR_EARG", "i64 has no gradient")
  end)

  it("splits over the devices of a plan and sums gradients over them", function()
    local mesh, x, w = ffi.new "const orr_mesh *[1]", matrix(), tensor("f32", { 3 }, { 1, 2, 3 })
    must(c.orrery_mesh("data<0,1,2>", mesh))
    local xs, ws = box(), box()
    must(c.orrery_distribute(x, mesh[0], "shard(1)", xs))
    must(c.orrery_distribute(w, mesh[0], "replicate", ws))
    keep(xs)
    keep(ws)
    assert.equal("(2, 3) f32 on data<0,1,2>: shard(1)", describe_tensor(xs[0]))
    must(c.orrery_require_grad(ws[0], true))
    must(c.orrery_backward(call("sum", { call("mul", { xs[0], ws[0] }) }), nil))
    assert.same({ 5, 7, 9 }, values(c.orrery_grad(ws[0]), 3))
    must(c.orrery_mesh("cpu:1", mesh))
    local moved = box()
    must(c.orrery_distribute(xs[0], mesh[0], nil, moved))
    assert.equal("(2, 3) f32 on cpu:1", describe_tensor(keep(moved)))
    assert.same({ 1, 2, 3, 4, 5, 6 }, values(moved[0], 6))
    local wide = box()
    must(c.orrery_cast(moved[0], "f64", wide))
    assert.equal("f64", ffi.string(c.orrery_dtype(keep(wide))))
    must(c.orrery_mesh("data<0,1>", mesh))
    refused(c.orrery_distribute(x, mesh[0], "shard(3)", moved), "ORR_EARG", "3")
    refused(c.orrery_distribute(x, mesh[0], "halved", moved), "ORR_EARG", "halved")
  end)

  it("refuses plans and devices that are not there", function()
    local mesh = ffi.new "const orr_mesh *[1]"
    refused(c.orrery_mesh("data<0", mesh), "ORR_EARG", "at column 7")
    refused(c.orrery_mesh("data<0,0>", mesh), "ORR_EARG", "data<0,0>")
    refused(c.orrery_mesh("data<0,99>", mesh), "ORR_EARG", "no device 99")
    refused(c.orrery_mesh("model<0,1>", mesh), "ORR_EARG", "has 2 stages")
    refused(c.orrery_mesh("gpu", mesh), "ORR_EARG", "gpu")
    refused(c.orrery_synchronize("cpu:99"), "ORR_EARG", "99")
    assert.is_true(c.orrery_device_count() >= 2)
    must(c.orrery_synchronize(nil))
  end)

  it("counts memory, keeps to a limit, and stops when asked", function()
    local before, now = ffi.new "orr_memory[1]", ffi.new "orr_memory[1]"
    must(c.orrery_memory("cpu", before))
    local out = box()
    must(c.orrery_tensor("f32", 1, ffi.new("int64_t[1]", 2 ^ 20), nil, out))
    must(c.orrery_memory("cpu", now))
    assert.equal(2 ^ 22, tonumber(now[0].live - before[0].live))
    c.orrery_free(out[0])
    must(c.orrery_memory("cpu", now))
    assert.equal(tonumber(before[0].live), tonumber(now[0].live))
    must(c.orrery_set_memory_limit("cpu", 2 ^ 20))
    refused(c.orrery_tensor("f32", 1, ffi.new("int64_t[1]", 2 ^ 22), nil, out), "ORR_EMEM", "memory")
    must(c.orrery_set_memory_limit("cpu", 0))
    local x = matrix()
    c.orrery_interrupt()
    local _, status = call("exp", { x })
    refused(status, "ORR_EINTERRUPT", "interrupted")
    assert.is_truthy(call("exp", { x }))
  end)

  it("draws the same dropout again after the same seed", function()
    local x = tensor("f32", { 6 }, { 1, 1, 1, 1, 1, 1 })
    c.orrery_manual_seed(5)
    local first = values(call("dropout", { x }, { 0.5 }), 6)
    c.orrery_manual_seed(5)
    assert.same(first, values(call("dropout", { x }, { 0.5 }), 6))
  end)
end)
