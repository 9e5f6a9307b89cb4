-- What tostring(net) says beside each layer of how it is split, and why.
-- Invariant: every number comes from the programme in split.lua.
-- To add a remark: a clause in `describe`.
local notes = {}

local function size_text(n)
  if n >= 2 ^ 20 then return ("%.2f MiB"):format(n / 2 ^ 20) end
  return ("%.1f KiB"):format(n / 2 ^ 10)
end

-- Whether a layer makes (N, T, C) of the weight.
local function has_sequence(record, weight)
  for _, call in ipairs(record.calls) do
    for _, id in ipairs(call.ins) do
      if id == weight and #(record.values[call.outs[1] or 0] or {}) == 3 then return true end
    end
  end
  return false
end

-- The word of Module:split for a weight that is split along `dim`.
local function word_of(dims, dim)
  for word, d in pairs(dims) do
    if d == dim then return word end
  end
  return "none"
end

local function describe(module, how, cost, part, of)
  local asked = rawget(module, "_split")
  local text = how == "none" and "left whole" or ("split %s over %d devices"):format(how, of.n)
  if asked then text = text .. " as asked" end
  if cost and not asked then
    text = ("%s: moves %s a step"):format(text, size_text(cost.cost * part))
    if cost.more < math.huge then
      text = ("%s, otherwise %s more"):format(text, size_text(cost.more * part))
    end
  end
  return text
end

--- Leaves a note in every layer whose weight was looked at.
---@param net orrery.Module
---@param record orrery.Record
---@param of {chosen: table, costs: table, dims_of: table, n: integer, sequence: boolean} what split.choose
---  gave, the dimensions that "out" and "in" mean by class, the devices of the axis, whether it splits the
---  sequence between layers
function notes.write(net, record, of)
  for _, module in ipairs(net:modules()) do
    local dims = of.dims_of[module._class]
    local weight = dims and module.weight and record.index[module.weight]
    local c = weight and of.chosen[weight]
    if c then
      local how = word_of(dims, c.dim)
      local text = describe(module, how, of.costs[weight], (of.n - 1) / of.n, of)
      if of.sequence and has_sequence(record, weight) then
        if how == "in" then text = text .. "; what it gives stays split along the sequence" end
        if how == "out" and module._class == "Linear" then text = text .. "; reads the whole sequence" end
      end
      rawset(module, "_note", text)
    end
  end
end

return notes
