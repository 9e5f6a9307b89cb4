--- What the GPU bench measures: a row a case of gpu_cases.lua, with what it is held against.
-- A row: group, name, case (a word), and of these what fits:
--   bytes   that must move at least: the rate beside a copy's of the same run; `copy` is the least share
--   flops   and dtype: the share of the card's peak
--   tokens  of a run: shown as tokens a second
--   peers   {{word, label, goal, wish}}: PyTorch's cases; the ratio is its time over Orrery's
--   others  {{side, label, most}}: other sides of this run; the ratio is Orrery's time over theirs
--   most    seconds that a run may take; who: the process, where it is not "orrery"
--   memory  the peak of device memory of both sides, each alone
--   needs   the field of orrery without which the row cannot run; close: how near first losses must be
-- Invariant: sizes are far above a GPU's caches; with small they are for fake GPUs, and say nothing of speed.
-- To add a row: here, its case in gpu_cases.lua and gpu_peer.py.
local widths = { f32 = 4, bf16 = 2 }

---@param small boolean
---@return table[] rows, table sizes
return function(small)
  local rows = {}
  local function size(full, tiny) return small and tiny or full end
  local function add(group, name, case, fields)
    fields.group, fields.name, fields.case = group, name, case
    rows[#rows + 1] = fields
  end

  -- ---- bytes ----
  local n, r, c = size(2 ^ 26, 4096), size(8192, 16), size(8192, 64)

  -- `passes`: how many times the (r, c) or n numbers are read or written at least.
  local function moving(name, word, dtype, passes, count)
    local goal = { copy = 0.85, peers = { { word, "PyTorch", 1 } }, close = dtype == "bf16" and 1e-2 or 1e-4 }
    goal.bytes = passes * count * widths[dtype]
    add("bytes", name .. ", " .. dtype, word, goal)
  end
  moving("clone", "clone:f32:" .. n, "f32", 2, n)
  for _, dtype in ipairs { "f32", "bf16" } do
    local flat, plane = (":%s:%d"):format(dtype, n), (":%s:%d:%d"):format(dtype, r, c)
    moving("add", "add" .. flat, dtype, 3, n)
    moving("gelu", "gelu" .. flat, dtype, 2, n)
    moving("x * w + b by rows, two kernels", "muladd" .. plane, dtype, 4, r * c)
    moving("x transposed + y", "strided" .. plane, dtype, 3, r * c)
    for _, which in ipairs { "rows", "columns", "all" } do
      moving("sum, " .. which, "sum" .. plane .. ":" .. which, dtype, 1, r * c)
    end
    for _, op in ipairs { "softmax", "layer_norm", "rms_norm" } do
      moving(op, op .. plane .. ":forward", dtype, 2, r * c)
      -- y and its gradient: x in, y out; then two of x, y and g in, and the gradient of x out.
      moving(op .. ", forward and backward", op .. plane .. ":both", dtype, 5, r * c)
    end
  end
  local vocabulary, rows_of = size(50304, 96), size(4096, 8)
  moving("cross entropy, forward and backward", ("cross_entropy:f32:%d:%d"):format(rows_of, vocabulary),
    "f32", 3, rows_of * vocabulary)
  local width, ids = size(768, 16), size(65536, 64)
  add("bytes", "embedding, forward and backward, f32", ("embedding:f32:%d:%d:%d"):format(vocabulary, width,
    ids), { bytes = (3 * ids + vocabulary) * width * 4, peers = { { nil, "PyTorch", 1 } }, close = 1e-4 })
  local params, each = size(100 * 2 ^ 20, 4096), size(2 ^ 20, 1024)
  moving("AdamW, " .. params .. " parameters", ("adamw:f32:%d:%d"):format(params, each), "f32", 7, params)

  -- ---- arithmetic ----
  local function counting(name, word, dtype, flops)
    add("arithmetic", name .. ", " .. dtype, word, { flops = flops, dtype = dtype,
      peers = { { word, "PyTorch", 1 } }, close = dtype == "f32" and 1e-4 or 1e-2 })
  end
  for _, dtype in ipairs { "f32", "tf32", "bf16" } do
    local m = size(dtype == "f32" and 4096 or 8192, 32)
    counting(("product of %d"):format(m), ("matmul:%s:%d"):format(dtype, m), dtype, 2 * m ^ 3)
    local b, ch, s = size(64, 2), size(128, 4), size(56, 8)
    counting("convolution 3 x 3, forward and backward", ("conv:%s:%d:%d:%d:3"):format(dtype, b, ch, s), dtype,
      3 * 2 * b * ch * ch * 9 * s * s)
  end
  local b, h, t, d = size(16, 1), size(12, 2), size(1024, 16), size(64, 16)
  local half = 2 * b * h * t * t * d -- two products of (t, t, d), of which a causal mask needs half
  local shape = (":bf16:%d:%d:%d:%d"):format(b, h, t, d)
  counting("causal attention", "attention" .. shape .. ":forward", "bf16", half)
  counting("causal attention, forward and backward", "attention" .. shape .. ":both", "bf16", 3.5 * half)

  -- ---- training ----
  local batch, context = size(8, 1), size(1024, 16)
  local gpt = (":%d:%d:%d:%d:%d:%d"):format(batch, context, size(12, 1), size(768, 32), size(12, 2),
    size(50304, 64))
  local tokens = batch * context
  local gpt_name = size("GPT-2 124M", "tiny GPT") .. " step, bf16, context " .. context
  add("training", gpt_name, "gpt:eager" .. gpt, { tokens = tokens,
    memory = true, close = 1e-2, peers = { { nil, "PyTorch eager", 1.2 },
      { "gpt:compiled" .. gpt, "torch.compile", false, 1, slow = true } } })
  add("training", gpt_name .. ", captured", "gpt:captured" .. gpt, { tokens = tokens,
    needs = "capture", close = 1e-2, peers = { { "gpt:eager" .. gpt, "PyTorch eager", 1.2 } } })
  add("training", gpt_name .. ", bf16 parameters, f32 masters", "gpt:masters" .. gpt, { tokens = tokens,
    memory = true, close = 2e-2, peers = { { "gpt:eager" .. gpt, "PyTorch eager", 1.2 } } })
  add("training", "small MLP step", "mlp:eager:1", { close = 1e-4, peers = { { nil, "PyTorch eager", 1 } } })
  add("training", "small MLP step, captured", "mlp:captured:1", { needs = "capture", close = 1e-4,
    peers = { { "mlp:eager:1", "PyTorch eager", 5 } } })
  add("training", "small MLP step, two logical devices of one GPU", "mlp:eager:2", { who = "logical",
    close = 1e-4, others = { { { "orrery", "mlp:eager:1" }, "one device" } } })

  -- ---- the host ----
  add("host", "an op, back to back, beside a bare launch", "op:1", {
    peers = { { nil, "PyTorch", 1 } }, close = 1e-4,
    others = { { { "control", "launch" }, "a launch", 1.2 } } })
  for _, devices in ipairs { 1, 2, 4, 8 } do
    add("host", ("controller's time an op, %d device%s"):format(devices, devices > 1 and "s" or ""),
      "issue:" .. devices, { who = devices > 1 and "logical" or nil,
        most = 1e-6 + 0.3e-6 * devices })
  end
  return rows, { copy = size(2 ^ 28, 65536) }
end
