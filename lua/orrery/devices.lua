-- The table of devices, waiting, the per-op profile, and accumulation of gradients.
-- Invariant: what is reported comes from the core when it is asked.
-- To add a column to the table of devices: `columns`.
local core = require "orrery.core"
local check = require "orrery.check"

local functions = {}

local function gigabytes(n) return string.format("%.1f GiB", n / 2 ^ 30) end

local columns = {
  cpu = {
    { "id", function(d) return tostring(d.id) end },
    { "name", function(d) return d.name end },
    { "threads", function(d) return tostring(d.threads) end },
    { "total", function(d) return gigabytes(d.total) end },
    { "free", function(d) return gigabytes(d.free) end },
    { "model", function(d) return d.model end },
  },
  cuda = {
    { "id", function(d) return tostring(d.id) end },
    { "name", function(d) return d.name end },
    { "PCI bus id", function(d) return d.bus_id end },
    { "nvidia-smi", function(d) return d.smi_index and tostring(d.smi_index) or "?" end },
    { "UUID", function(d) return d.uuid end },
    { "total", function(d) return gigabytes(d.total) end },
    { "free", function(d) return gigabytes(d.free) end },
    { "model", function(d) return d.model end },
  },
}

-- Rows of texts as aligned columns.
local function align(rows)
  local width, lines = {}, {}
  for _, row in ipairs(rows) do
    for k, cell in ipairs(row) do width[k] = math.max(width[k] or 0, #cell) end
  end
  for i, row in ipairs(rows) do
    local cells = {}
    for k, cell in ipairs(row) do
      cells[k] = k == #row and cell or cell .. (" "):rep(width[k] - #cell)
    end
    lines[i] = table.concat(cells, "  ")
  end
  return table.concat(lines, "\n")
end

-- The devices of one kind under their columns; nil where there is none.
local function section(list, kind)
  local rows = { {} }
  for k, column in ipairs(columns[kind]) do rows[1][k] = column[1] end
  for _, d in ipairs(list) do
    if d.kind == kind then
      local row = {}
      for k, column in ipairs(columns[kind]) do row[k] = column[2](d) end
      rows[#rows + 1] = row
    end
  end
  return rows[2] and align(rows)
end

local function setting(name, otherwise)
  local value = os.getenv(name)
  return value and name .. "=" .. value or name .. " is not set" .. otherwise
end

local list_meta = {
  __tostring = function(list)
    local env, parts = core.visible(), {}
    parts[#parts + 1] = section(list, "cuda")
    parts[#parts + 1] = section(list, "cpu")
    parts[#parts + 1] = env.cuda > 0
      and setting("CUDA_VISIBLE_DEVICES", ": all GPUs are visible") .. "; "
        .. setting("ORRERY_CUDA_DEVICES", "")
      or "no CUDA device: " .. env.cuda_why
    if env.cuda > 0 and env.cuda_why then parts[#parts + 1] = "no other CUDA device: " .. env.cuda_why end
    parts[#parts + 1] = setting("ORRERY_CPU_DEVICES", ": a CPU device a core, at least 2")
      .. "; a bare number k in a plan is " .. (env.cuda > 0 and "cuda:k" or "cpu:k")
    return table.concat(parts, "\n")
  end,
}

--- The visible devices, CUDA's first: row k + 1 is what the bare number k names. Prints as a table.
--- total and free in bytes; a CUDA device has bus_id, uuid, capability and, where known, smi_index.
---@return {id: integer, name: string, kind: string, model: string, total: integer, free: integer}[]
function functions.devices() return setmetatable(core.devices(), list_meta) end

local function choice(name, on)
  if on ~= nil and type(on) ~= "boolean" then
    check.raise("%s: expected true, false or nothing, got %s", name, type(on))
  end
  return core[name](on)
end

--- Whether GPU kernels must give the same bits in every run of the same work (the default). With false,
--- libraries may choose faster ones that do not. The CPU's always do.
---@param on? boolean absent: only asks
---@return boolean was
function functions.deterministic(on) return choice("deterministic", on) end

--- Whether f32 products and convolutions on GPUs may round their inputs to TF32 (10 bits of mantissa);
--- not by default.
---@param on? boolean absent: only asks
---@return boolean was
function functions.allow_tf32(on) return choice("allow_tf32", on) end

local link_words = { same = "same GPU", nvlink = "NVLink", pcie = "PCIe", host = "through the host" }

-- Makes each device choose a way for attention in both halves, and says which.
local function attention_ways(n)
  local ways = {}
  for k = 0, n - 1 do
    local device = "cuda:" .. k
    for _, dtype in ipairs { "bf16", "f16" } do
      local x = core.zeros({ 1, 1, 8, 8 }, { dtype = dtype, device = device })
      for _, causal in ipairs { false, true } do x:scaled_dot_product_attention(x, x, causal) end
    end
    core.synchronize(device)
    ways[k + 1] = core.attention_way(k)
  end
  return ways
end

--- How each CUDA device reaches each other's memory: a row a device, a column a peer. `measure`: also the
--- bandwidth, by copying, and (`attention`, a text a device) whether cuDNN's attention has proved right
--- there. Prints as a table.
---@param measure? boolean
---@return {kind: string, links: integer, bytes_a_second: number?}[][]
function functions.topology(measure)
  local n, rows = core.visible().cuda, {}
  local ways = measure and attention_ways(n) or {}
  for a = 1, n do
    rows[a] = {}
    for b = 1, n do rows[a][b] = core.link(a - 1, b - 1, measure or false) end
  end
  return setmetatable(rows, { __tostring = function()
    if n == 0 then return "no CUDA device: " .. core.visible().cuda_why end
    local lines = { { "" } }
    for a = 1, n do
      lines[1][a + 1] = "cuda:" .. (a - 1)
      lines[a + 1] = { "cuda:" .. (a - 1) }
      for b = 1, n do
        local link = rows[a][b]
        local rate = link.bytes_a_second and (" %.0f GB/s"):format(link.bytes_a_second / 1e9) or ""
        lines[a + 1][b + 1] = (link.links > 0 and link.links .. " x " or "") .. link_words[link.kind] .. rate
      end
    end
    local text = { align(lines) }
    for k, way in ipairs(ways) do text[#text + 1] = ("cuda:%d attention: %s"):format(k - 1, way) end
    return table.concat(text, "\n")
  end, __index = { attention = ways } })
end

local profile_meta = {
  __tostring = function(rows)
    local lines = { { "op", "calls", "ms", "us/call", "MiB" } }
    for _, r in ipairs(rows) do
      lines[#lines + 1] = { r.op, string.format("%d", r.calls), string.format("%.3f", r.time * 1e3),
        string.format("%.2f", r.time / math.max(r.calls, 1) * 1e6),
        string.format("%.2f", r.bytes / 2 ^ 20) }
    end
    return align(lines)
  end,
}

--- Runs f and gives a table of the ops that ran, the longest first: op, calls, time in seconds summed
--- over devices, bytes read and written. Prints as a table.
---@param f fun()
---@return {op: string, calls: integer, time: number, bytes: integer}[]
function functions.profile(f)
  core.profile_start()
  local ok, message = pcall(f)
  local rows = core.profile_stop()
  if not ok then error(message, 0) end
  table.sort(rows, function(a, b)
    if a.time ~= b.time then return a.time > b.time end
    return a.op < b.op
  end)
  return setmetatable(rows, profile_meta)
end

--- Gradients of several batches as if they were one: f(batch) gives the sum of a batch's losses and
--- how many elements it sums. Gradients are divided once by the count over all batches and devices,
--- and reduced once (DESIGN, Semantics 3). Each batch's loss is differentiated here; do not call
--- backward yourself.
---@param batches any[]
---@param f fun(batch: any): orrery.Tensor, number|orrery.Tensor
---@return number loss the mean
function functions.accumulate(batches, f)
  local total, count = 0, 0
  local losses = {}
  core.hold_gradients(true)
  local ok, message = pcall(function()
    for k, batch in ipairs(batches) do
      local loss, n = f(batch)
      if not core.is_tensor(loss) or n == nil then
        check.raise("accumulate: the function must return the sum of the losses and their count")
      end
      losses[k] = loss:detach()
      loss:backward()
      count = count + (core.is_tensor(n) and n:item() or n)
    end
    for _, loss in ipairs(losses) do total = total + loss:item() end
  end)
  local held, reason = pcall(core.hold_gradients, false, ok and count > 0 and 1 / count or 0)
  if not ok then error(message, 0) end
  if not held then error(reason, 0) end
  return count > 0 and total / count or 0
end

--- Raises at the first op that gives a NaN, naming the op, the layer and the line; waits after every
--- op, so it is slow.
---@param on boolean
function functions.anomaly(on) core.anomaly(on and true or false) end

--- Adds all of this to `module`.
local function install(module)
  for name, f in pairs(functions) do module[name] = f end
end

return { install = install }
