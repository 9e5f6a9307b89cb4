-- The rows of spec/ops.lua for products, convolution, pooling, norms and dropout.
-- Invariant and how to add a row: as spec/ops.lua says.
local array = require "spec.support.array"
local ref = require "spec.support.reference"

return function(row, inputs, with)
  -- ---- products ----

  row("matmul", { samples = function(rand)
    local function pair(s, t) return inputs(rand.grid(s), rand.grid(t)) end
    return { pair({ 7, 3 }, { 3, 5 }), pair({ 2, 4 }, { 4, 1 }), pair({ 2, 5, 3 }, { 2, 3, 2 }),
      pair({ 3, 4 }, { 2, 4, 2 }),
      pair({ 2, 1, 3, 2 }, { 3, 2, 2 }), pair({ 5 }, { 5 }), pair({ 5, 3 }, { 3 }),
      pair({ 3 }, { 2, 3, 4 }),
      pair({ 0, 3 }, { 3, 2 }), pair({ 2, 0 }, { 0, 3 }) }
  end, ref = ref.matmul, tolerance = { f16 = 2e-2, bf16 = 0.15 } })
  row("linear", { samples = function(rand)
    return { inputs(rand.grid { 7, 3 }, rand.grid { 5, 3 }, rand.grid { 5 }),
      inputs(rand.grid { 5, 3 }, rand.grid { 2, 3 }),
      inputs(rand.grid { 2, 3, 4 }, rand.grid { 3, 4 }, rand.grid { 3 }),
      inputs(rand.grid { 4 }, rand.grid { 3, 4 }, rand.grid { 3 }),
      inputs(rand.grid { 0, 3 }, rand.grid { 2, 3 }, rand.grid { 2 }) }
  end, ref = ref.linear, tolerance = { f16 = 2e-2, bf16 = 0.15 } })

  -- ---- convolution: sizes, o of the reference ----

  local function convolution(name, order, list)
    row(name, { samples = function(rand)
      local samples = {}
      for k, s in ipairs(list) do
        local o = { sh = 1, sw = 1, ph = 0, pw = 0, oph = 0, opw = 0, dh = 1, dw = 1, groups = 1 }
        for key, value in pairs(s.o or {}) do o[key] = value end
        local numbers = {}
        for i, key in ipairs(order) do numbers[i] = o[key] end
        local sample = inputs(rand.grid(s.x), rand.grid(s.w, -1, 1))
        if s.b then sample.inputs[3] = rand.grid(s.b) end
        samples[k] = with(sample, {
          call = function(f, x, w, b) return f(x, w, b, (table.unpack or unpack)(numbers)) end,
          ref = function(x, w, b) return ref[name](x, w, b, o) end,
        })
      end
      return samples
    end, tolerance = { f32 = 1e-4, f16 = 4e-2, bf16 = 0.3 } })
  end
  convolution("conv2d", { "sh", "sw", "ph", "pw", "dh", "dw", "groups" }, {
    { x = { 3, 2, 4, 5 }, w = { 3, 2, 3, 2 }, b = { 3 }, o = { ph = 1 } },
    { x = { 2, 4, 5, 4 }, w = { 4, 2, 2, 2 }, o = { sh = 2, dw = 2, groups = 2 } },
    { x = { 1, 3, 4, 4 }, w = { 3, 1, 3, 3 }, b = { 3 }, o = { ph = 1, pw = 2, sw = 2, groups = 3 } },
    { x = { 5, 1, 3, 3 }, w = { 2, 1, 1, 1 }, b = { 2 } },
    { x = { 0, 2, 3, 3 }, w = { 2, 2, 2, 2 } },
  })
  convolution("conv_transpose2d", { "sh", "sw", "ph", "pw", "oph", "opw", "dh", "dw", "groups" }, {
    { x = { 3, 2, 2, 3 }, w = { 2, 3, 3, 2 }, b = { 3 } },
    { x = { 2, 4, 2, 2 }, w = { 4, 1, 3, 2 }, b = { 2 },
      o = { sh = 2, sw = 3, ph = 1, oph = 1, opw = 2, groups = 2 } },
    { x = { 1, 2, 3, 2 }, w = { 2, 2, 2, 2 }, o = { dh = 2, pw = 1 } },
  })

  -- ---- pooling ----

  local function pooling(name, order, list)
    row(name, { samples = function(rand)
      local samples = {}
      for k, s in ipairs(list) do
        local o = s[2]
        local args = {}
        for i, key in ipairs(order) do args[i] = o[key] end
        samples[k] = with(inputs(rand.distinct(s[1])),
          { args = args, ref = function(x) return ref[name](x, o) end })
      end
      return samples
    end, second = name == "avg_pool2d" or false })
  end
  pooling("max_pool2d", { "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw" }, {
    { { 3, 2, 4, 5 }, { kh = 2, kw = 2, sh = 2, sw = 2, ph = 0, pw = 0, dh = 1, dw = 1 } },
    { { 2, 3, 5, 4 }, { kh = 3, kw = 2, sh = 1, sw = 2, ph = 1, pw = 1, dh = 1, dw = 2 } },
    { { 1, 2, 6, 6 }, { kh = 3, kw = 2, sh = 2, sw = 1, ph = 1, pw = 0, dh = 2, dw = 1 } },
  })
  pooling("avg_pool2d", { "kh", "kw", "sh", "sw", "ph", "pw", "include_pad" }, {
    { { 3, 2, 4, 5 }, { kh = 2, kw = 2, sh = 2, sw = 2, ph = 0, pw = 0, include_pad = true } },
    { { 2, 3, 5, 4 }, { kh = 3, kw = 2, sh = 1, sw = 2, ph = 1, pw = 1, include_pad = true } },
    { { 1, 2, 5, 5 }, { kh = 3, kw = 3, sh = 2, sw = 2, ph = 1, pw = 1, include_pad = false } },
  })

  -- ---- norms ----

  local norm_tolerance = { f32 = 1e-4, f16 = 2e-2, bf16 = 0.2 }
  row("layer_norm", { samples = function(rand)
    return { inputs(rand.grid { 7, 4 }, rand.grid { 4 }, rand.grid { 4 }), inputs(rand.grid { 2, 3, 5 }),
      inputs(rand.grid { 5, 3 }, rand.grid { 3 }),
      with(inputs(rand.grid { 1, 4 }, rand.grid { 4 }, rand.grid { 4 }), {
        call = function(f, x, w, b) return f(x, w, b, 0.01) end,
        ref = function(x, w, b) return ref.layer_norm(x, w, b, 0.01) end,
      }) }
  end, ref = ref.layer_norm, second = false, tolerance = norm_tolerance })
  row("rms_norm", { samples = function(rand)
    return { inputs(rand.grid { 7, 4 }, rand.grid { 4 }), inputs(rand.grid { 2, 3, 5 }),
      with(inputs(rand.grid { 1, 4 }, rand.grid { 4 }), { args = { 0.01 } }) }
  end, ref = ref.rms_norm, second = false, tolerance = norm_tolerance })
  row("group_norm", { samples = function(rand)
    local function sample(shape, groups, w, b)
      local p_shape = { shape[2] }
      return with(inputs(rand.grid(shape), w and rand.grid(p_shape), b and rand.grid(p_shape)), {
        call = function(f, x, p, q) return f(x, groups, p, q) end,
        ref = function(x, p, q) return ref.group_norm(x, groups, p, q) end,
      })
    end
    return { sample({ 3, 4, 2, 3 }, 2, true, true), sample({ 5, 3, 2 }, 1), sample({ 2, 4, 3 }, 4, true) }
  end, second = false, tolerance = norm_tolerance })
  row("batch_norm", { samples = function(rand)
    local function state(values) return with(array.new({ #values }, values),
      { state = true, nograd = true }) end
    local function sample(shape, affine, running, training)
      local c = shape[2]
      local list = { rand.grid(shape) }
      if affine then list[2], list[3] = rand.grid { c }, rand.grid { c } end
      if running then
        list[#list + 1], list[#list + 2] = state(rand.grid({ c }).data), state(rand.grid({ c }, 0, 2).data)
      end
      local function arrange(f, x, ...)
        local w, b, rm, rv
        if affine and running then w, b, rm, rv = ... elseif affine then w, b = ... else rm, rv = ... end
        return f(x, w, b, rm, rv, training, 0.1, 1e-5, true)
      end
      return { inputs = list, call = arrange, ref = function(...) return arrange(ref.batch_norm, ...) end }
    end
    return { sample({ 7, 3 }, true, true, true), sample({ 3, 2, 2, 3 }, true, true, true),
      sample({ 5, 2, 3 }, false, false, true),
      sample({ 4, 3, 2, 1 }, true, true, false), sample({ 2, 2, 2, 2 }, true, false, true),
      sample({ 3, 2 }, false, true, false) }
  end, second = false, tolerance = norm_tolerance, dtypes = { "f32" } })

  -- ---- attention: q (N, H, T, D), k and v (N, H, S, D) ----

  row("scaled_dot_product_attention", { samples = function(rand)
    local function sample(n, h, t, s, d, e, ...)
      local q, k, v = rand.grid { n, h, t, d }, rand.grid { n, h, s, d }, rand.grid { n, h, s, e }
      return with(inputs(q, k, v), { args = { ... } })
    end
    return { sample(3, 2, 4, 4, 3, 3), sample(2, 3, 4, 4, 2, 2, true), sample(5, 1, 2, 6, 3, 2),
      sample(1, 2, 3, 3, 4, 4, true, 0.3), sample(2, 1, 1, 1, 2, 1), sample(0, 2, 3, 3, 2, 2) }
  end, ref = ref.attention, second = false, tolerance = { f32 = 1e-4, f16 = 2e-2, bf16 = 0.15 } })

  -- ---- dropout: the mask depends on the global index alone ----

  row("dropout", { samples = function(rand)
    return { with(inputs(rand.grid { 7, 5 }), { args = { 0.4 } }),
      with(inputs(rand.grid { 2, 3, 4 }), { args = { 0.5, true } }),
      with(inputs(rand.grid { 5, 3 }), { args = { 0.5, false }, ref = function(x) return x end }) }
  end, before = function(core) core.manual_seed(11) end, property = function(values, sample)
    local p = sample.args[1]
    if sample.args[2] == false then return end
    local kept = 0
    for k, v in ipairs(values[1].data) do
      local x = sample.inputs[1].data[k]
      assert(v == 0 or math.abs(v - x / (1 - p)) < 1e-12, "neither dropped nor scaled by 1 / (1 - p)")
      kept = kept + (v ~= 0 and 1 or 0)
    end
    assert(kept > 0 and kept < #values[1].data, "all or nothing was kept")
  end, dtypes = { "f32" } })
end
