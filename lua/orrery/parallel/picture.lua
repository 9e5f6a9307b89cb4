-- parallel.picture: where a placed net stands: layers down, devices across, what of each parameter
-- and output a device holds, and what moves between devices.
-- Invariant: looking changes nothing: gradients, random numbers and running statistics are as before.
-- To add a row of a layer: `rows_of`; both drawings show every row.
local core = require "orrery.core"
local check = require "orrery.check"
local stages = require "orrery.parallel.stages"

local unpack = table.unpack or unpack

-- What moves ----------------------------------------------------------------------------------

-- Keeps the trace of the owner in hand: every collective belongs to one owner.
local Meter = {}
Meter.__index = Meter

function Meter:switch(owner)
  local list = self.rows[self.owner] or {}
  for _, row in ipairs(core.trace_stop()) do list[#list + 1] = row end
  self.rows[self.owner] = list
  local before = self.owner
  self.owner = owner
  core.trace_start()
  return before
end

-- While f runs, layers are measured: their forward is one that switches the meter.
local function measured(layers, meter, f)
  local kept = {}
  for k, layer in ipairs(layers) do
    local module, forward = layer.module, layer.module.forward
    if kept[module] == nil then
      kept[module] = rawget(module, "forward") or false
      rawset(module, "forward", function(...)
        local before = meter:switch(k)
        local y = { forward(...) }
        layer.output = core.is_tensor(y[1]) and y[1]:detach() or nil
        meter:switch(before)
        return unpack(y)
      end)
    end
  end
  core.trace_start()
  local ok, message = pcall(f)
  meter:switch "end"
  core.trace_stop()
  for module, forward in pairs(kept) do rawset(module, "forward", forward or nil) end
  if not ok then error(message, 0) end
end

local function first_tensor(y)
  if core.is_tensor(y) then return y end
  for _, inner in pairs(type(y) == "table" and y or {}) do
    local found = first_tensor(inner)
    if found then return found end
  end
  return nil
end

-- One forward and backward; gives rows of collectives by layer, "net" and "backward".
local function traffic(net, layers, x)
  local meter = setmetatable({ rows = {}, owner = "net" }, Meter)
  local params, grads = net:parameters(), {}
  local dropout, user = core.random_position()
  for k, p in ipairs(params) do grads[k], p.grad = p.grad or false, nil end
  core.hold_statistics(true)
  local ok, message = pcall(measured, layers, meter, function()
    local y = first_tensor(net(x))
    meter:switch "backward"
    if y and y.requires_grad then y:sum():backward() end
  end)
  core.hold_statistics(false)
  core.random_position(dropout, user)
  for k, p in ipairs(params) do p.grad = grads[k] or nil end
  if not ok then error(message, 0) end
  return meter.rows
end

local function bytes_text(n)
  if n < 1024 then return ("%d B"):format(n) end
  if n < 2 ^ 20 then return ("%.1f KiB"):format(n / 2 ^ 10) end
  return ("%.1f MiB"):format(n / 2 ^ 20)
end

-- "2 all_reduce over data 8.0 KiB, ..." of the rows of one owner, nil where nothing moves.
local function moves_text(rows)
  local sums, order = {}, {}
  for _, row in ipairs(rows or {}) do
    local key = row.op .. " over " .. row.axis
    if not sums[key] then
      sums[key] = { count = 0, bytes = 0 }
      order[#order + 1] = key
    end
    sums[key].count, sums[key].bytes = sums[key].count + row.count, sums[key].bytes + row.bytes
  end
  if #order == 0 then return nil end
  for k, key in ipairs(order) do
    order[k] = ("%d %s %s"):format(sums[key].count, key, bytes_text(sums[key].bytes))
  end
  return table.concat(order, ", ")
end

-- Rows ----------------------------------------------------------------------------------------

local function size_text(t)
  local sizes = t:size()
  return #sizes == 0 and "1" or table.concat(sizes, " x ")
end

-- A tensor's row: a cell a device, {text=, part=} where part is the share of its elements.
local function tensor_row(name, t, devices)
  local cells, held = {}, {}
  local all = math.max(1, t:numel())
  for _, shard in ipairs(t:shards()) do
    held[shard.device] = { text = size_text(shard.tensor), part = shard.tensor:numel() / all }
  end
  for k, device in ipairs(devices) do cells[k] = held[device] or false end
  return { name = ("%s (%s)"):format(name, table.concat(t:size(), ", ")), cells = cells,
    note = tostring(t:layout()):gsub("^[^:]*: ", "") }
end

local function rows_of(layer, devices, moves)
  local rows = {}
  for name, p in layer.module:named_parameters() do rows[#rows + 1] = tensor_row(name, p, devices) end
  for name, b in layer.module:named_buffers() do rows[#rows + 1] = tensor_row(name, b, devices) end
  if layer.output then rows[#rows + 1] = tensor_row("output", layer.output, devices) end
  local text = moves_text(moves)
  if text then rows[#rows + 1] = { name = "moves", text = text } end
  return rows
end

-- Blocks of rows: one a layer, then what belongs to the net as a whole.
local function blocks_of(net, layers, rows, devices)
  local blocks, own = {}, {}
  for k, layer in ipairs(layers) do
    local stage = layer.module._stage
    local title = ("%d  %s: %s"):format(k, layer.name, layer.module._class)
    if stage then title = ("%s  (stage %d)"):format(title, stage.index) end
    blocks[k] = { title = title, rows = rows_of(layer, devices, rows[k]) }
  end
  for name, p in net:named_parameters() do
    if not name:find(".", 1, true) then own[#own + 1] = tensor_row(name, p, devices) end
  end
  local outside, backward = moves_text(rows.net), moves_text(rows.backward)
  if outside then own[#own + 1] = { name = "moves", text = outside .. " outside of the layers" } end
  if backward then own[#own + 1] = { name = "moves", text = backward .. " in backward" } end
  if #own > 0 then blocks[#blocks + 1] = { title = "the net", rows = own } end
  return blocks
end

-- Text ----------------------------------------------------------------------------------------

local function pad(text, width) return text .. (" "):rep(width - #text) end

local function as_text(picture)
  local first, widths, lines = 4, {}, { picture.plan }
  for k, device in ipairs(picture.devices) do widths[k] = #device end
  for _, block in ipairs(picture.blocks) do
    for _, row in ipairs(block.rows) do
      first = math.max(first, #row.name)
      for k, cell in ipairs(row.cells or {}) do widths[k] = math.max(widths[k], cell and #cell.text or 1) end
    end
  end
  local function line(name, cells, note)
    local parts = { "    " .. pad(name, first) }
    for k, cell in ipairs(cells) do parts[#parts + 1] = pad(cell, widths[k]) end
    lines[#lines + 1] = (table.concat(parts, "  ") .. "  " .. note):gsub("%s+$", "")
  end
  line("", picture.devices, "")
  for _, block in ipairs(picture.blocks) do
    lines[#lines + 1] = block.title
    for _, row in ipairs(block.rows) do
      local cells = {}
      for k, cell in ipairs(row.cells or {}) do cells[k] = cell and cell.text or "." end
      if row.text then lines[#lines + 1] = "    " .. pad(row.name, first) .. "  " .. row.text
      else line(row.name, cells, row.note) end
    end
  end
  return table.concat(lines, "\n")
end

-- SVG -----------------------------------------------------------------------------------------

local row_height, name_width, cell_width, note_width, margin = 20, 210, 120, 260, 12
local entity = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

local function escape(s) return (s:gsub('[&<>"]', entity)) end

local function label(x, y, text, style)
  return ('<text x="%g" y="%g"%s>%s</text>'):format(x, y, style or "", escape(text))
end

-- A cell: its frame is the whole tensor, the filled part the device's share.
local function cell_shape(x, y, cell)
  local width, height = cell_width - 8, row_height - 4
  local shape = '<rect x="%g" y="%g" width="%g" height="%g" fill="%s" stroke="%s"/>'
  return shape:format(x, y, width, height, "none", "#9aa7b5")
    .. shape:format(x, y, math.max(1, width * cell.part), height, "#b9d4f0", "none")
    .. label(x + 4, y + 12, cell.text)
end

local rule = '<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="#d5dbe1"/>'

local function as_svg(picture)
  local y, parts = margin + row_height, {}
  local left = margin + name_width
  local width = left + #picture.devices * cell_width + note_width + margin
  local function add(text) parts[#parts + 1] = text end
  add(label(margin, y, picture.plan, ' font-weight="bold"'))
  y = y + row_height
  for k, device in ipairs(picture.devices) do
    add(label(left + (k - 1) * cell_width, y, device, ' font-weight="bold"'))
  end
  for _, block in ipairs(picture.blocks) do
    y = y + row_height
    add(rule:format(margin, y - 14, width - margin, y - 14))
    add(label(margin, y, block.title, ' font-weight="bold"'))
    for _, row in ipairs(block.rows) do
      y = y + row_height
      add(label(margin + 12, y, row.name))
      for k, cell in ipairs(row.cells or {}) do
        if cell then add(cell_shape(left + (k - 1) * cell_width, y - 14, cell)) end
      end
      if row.text then add(label(left, y, row.text, ' fill="#a04000"'))
      else add(label(left + #picture.devices * cell_width, y, row.note, ' fill="#55606b"')) end
    end
  end
  local head = '<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" font-family="sans-serif" '
    .. 'font-size="12">\n<rect width="100%%" height="100%%" fill="white"/>\n'
  return head:format(width, y + margin + 8) .. table.concat(parts, "\n") .. "\n</svg>\n"
end

local function save(path, text)
  local file, reason = io.open(path, "w")
  if not file then check.raise("picture: %s", reason) end
  file:write(text)
  file:close()
end

local picture_meta = { __tostring = function(picture) return picture.text end }

--- Draws the placement of a net: layers down, devices across; of each parameter, buffer and output
--- what a device holds, and its layout; below, the collectives that the layer makes in forward (bytes
--- of the whole value), and those of backward. Runs forward and backward once on x, in the mode of the
--- net; without x only parameters are shown. Prints as text.
---@param net orrery.Module placed by a plan
---@param x? orrery.Tensor a batch
---@param options? {file?: string} file: where to write the drawing as SVG
---@return {text: string, svg: string, devices: string[], blocks: table[]}
return function(net, x, options)
  local plan = type(net) == "table" and type(net.plan) == "function" and net:plan()
  if not plan then check.raise("picture: the net is not placed by a plan") end
  options = check.options("picture", options, { file = true })
  if net._pending then
    if not x then check.raise("picture: the plan needs an example batch x to place the net") end
    net._pending(x)
  end
  local layers = stages.layers(net)
  local picture = setmetatable({ plan = tostring(plan), devices = plan:devices() }, picture_meta)
  local rows = x and traffic(net, layers, x) or {}
  picture.blocks = blocks_of(net, layers, rows, picture.devices)
  picture.text, picture.svg = as_text(picture), as_svg(picture)
  if options.file then save(options.file, picture.svg) end
  return picture
end
