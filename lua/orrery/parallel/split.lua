-- Splits inside layers: which dimension of each weight the devices of a tensor axis share.
--
-- The net is seen as its ops (shapes.lua). Labels say which dimensions of an op's tensors go together;
-- a value is replicated or split along one of them. An exact dynamic programme over the ops in order,
-- whose state is the placement of the values still needed, picks for every weight the dimension to
-- split, so that the fewest bytes move in a training step (Narayanan et al. 2021, section 2.3, gives
-- the pairs columns, rows that it finds for linear layers; Shoeybi et al. 2019 those of attention).
--
-- Costs, in bytes of the tensor on one device, times (n - 1) / n: all-reduce 2, gather 1; and what
-- every device repeats counts too, ten operations as a moved byte and a weight four times (itself, its
-- gradient, two states of an optimizer), or leaving all layers whole would be cheapest.
--
-- With sequence=true the end of a split layer leaves (N, T, C) split along T (csrc/op_sequence.c): scattered
-- forward and gathered backward, an all-reduce's bytes; the entry of one the same, once for all readers.
-- Between them nothing is repeated, and every parameter that is read whole has its gradient summed.
-- Invariant: the choice depends on the net's ops, shapes and overrides alone.
-- To add an op with a weight: a row in `weights`; labels that it hides for a bias: `complete_labels`.
local core = require "orrery.core"
local check = require "orrery.check"
local layer_notes = require "orrery.parallel.notes"
local shapes = require "orrery.parallel.shapes"

local split = {}
local numel = shapes.numel
local huge = math.huge

local operations_a_byte, copies_of_a_weight = 10, 4
local sequence_dim = 2

-- The operand that is the weight.
local weights = { linear = 2, conv2d = 2, conv2d_grad_x = 2, matmul = 2, embedding = 1 }

-- Overrides -----------------------------------------------------------------------------------

-- The dimension of a module's weight that "out" and "in" mean.
local dims_of = {
  Linear = { out = 1, ["in"] = 2 }, Conv1d = { out = 1, ["in"] = 2 }, Conv2d = { out = 1, ["in"] = 2 },
  ConvTranspose2d = { out = 2, ["in"] = 1 }, Embedding = { out = 2, ["in"] = 1 },
}

--- Module:split.
function split.set(module, how)
  local who = module._class .. ":split"
  local dims = dims_of[module._class]
  if not dims then
    check.raise("%s: only layers with a weight are split: Linear, convolutions, Embedding", who)
  end
  check.word(who, "how", how, { "out", "in", "none" })
  if how == "in" and (module.groups or 1) > 1 then
    check.raise("%s: a convolution of several groups is split between groups: \"out\" or \"none\"", who)
  end
  if core.mesh_of(module.weight) then
    check.raise("%s: the layer is placed already; call it before the plan", who)
  end
  rawset(module, "_split", how)
  return module
end

-- Ops -----------------------------------------------------------------------------------------

-- Labels of dims that a rule of the op's own splits: inner dims beside a bias, groups, vocabularies.
local function complete_labels(call, values)
  local x, w = call.in_labels[1], call.in_labels[2]
  if call.op == "linear" then
    x[#x], w[2] = 9, 9
  elseif call.op == "embedding" then
    x[1] = 11
  elseif call.op == "conv2d" then
    local groups = values[call.ins[1]][2] / values[call.ins[2]][2]
    if groups == 1 then
      x[2], w[2] = 3, 3
    else
      call.groups = groups
      x[2], w[1], call.out_labels[1][2] = 10, 10, 10
      if call.ins[3] then call.in_labels[3][1] = 10 end
    end
  end
end

local function dim_of(labels, label)
  for d = 1, #labels do
    if labels[d] == label then return d end
  end
end

local function product(v, from, to)
  local n = 1
  for d = from, to do n = n * v[d] end
  return n
end

-- Where dimension d of x, cut in multiples of `unit`, lies in y with the same elements in order:
-- dimension, unit. `needs` instead of a unit: the multiple that would do.
local function through_reshape(x, y, d, unit)
  local i, j = 1, 1
  while i <= #x and j <= #y do
    local i1, j1, a, b = i, j, x[i], y[j]
    while a ~= b do
      if a < b then
        i1 = i1 + 1
        if not x[i1] then return end
        a = a * x[i1]
      else
        j1 = j1 + 1
        if not y[j1] then return end
        b = b * y[j1]
      end
    end
    if d >= i and d <= i1 then
      while i < i1 and x[i] == 1 do i = i + 1 end
      while j < j1 and y[j] == 1 do j = j + 1 end
      if i ~= d then return end
      local inner, outer = product(x, d + 1, i1), product(y, j + 1, j1)
      if (unit * inner) % outer == 0 then return j, unit * inner / outer end
      return j, nil, outer / inner
    end
    i, j = i1 + 1, j1 + 1
  end
end

local function is_reshape(call) return call.op == "view" or call.op == "reshape" end

-- Views of parameters: number -> {param, dims}, dims[d] being the parameter's dimension.
local function derived_weights(record, n_params)
  local derived = {}
  for k = 1, n_params do
    local dims = {}
    for d = 1, #record.values[k] do dims[d] = d end
    derived[k] = { param = k, dims = dims }
  end
  for _, call in ipairs(record.calls) do
    local from, out = derived[call.ins[1] or 0], call.outs[1]
    if from and #call.ins == 1 and out and numel(record.values[out]) == numel(record.values[from.param])
      and (call.op == "permute" or call.op == "unsqueeze" or call.op == "squeeze_dim") then
      local dims = {}
      for d, label in ipairs(call.out_labels[1]) do
        local at = label > 0 and dim_of(call.in_labels[1], label)
        dims[d] = at and from.dims[at] or nil
      end
      derived[out] = { param = from.param, dims = dims }
    end
  end
  return derived
end

-- The multiples in which a weight's outputs are cut best, because a reshape or a grouped convolution
-- that follows asks for them: units[param][dim] = {1, ...}.
local function units_wanted(record, derived)
  local units, track = {}, {}
  local function want(from, unit)
    if unit and unit > 1 and unit % 1 == 0 then
      units[from.param] = units[from.param] or {}
      local list = units[from.param][from.dim] or { 1 }
      units[from.param][from.dim] = list
      for _, u in ipairs(list) do
        if u == unit then return end
      end
      list[#list + 1] = unit
    end
  end
  local function follow(call, from, labels)
    for o, out in ipairs(call.outs) do
      local at = dim_of(call.out_labels[o], labels)
      if at then track[out] = { param = from.param, dim = from.dim, at = at } end
    end
  end
  for _, call in ipairs(record.calls) do
    local operand = weights[call.op]
    local w = operand and derived[call.ins[operand] or 0]
    if w then
      for d, label in ipairs(call.in_labels[operand]) do
        if w.dims[d] and label > 0 then follow(call, { param = w.param, dim = w.dims[d] }, label) end
      end
    end
    for k, id in ipairs(call.ins) do
      local from = id and track[id]
      if from and is_reshape(call) then
        local at, _, needs = through_reshape(record.values[id], record.values[call.outs[1]], from.at, 1)
        want(from, needs)
        if at then track[call.outs[1]] = { param = from.param, dim = from.dim, at = at } end
      elseif from then
        if call.groups and k == 1 then want(from, record.values[id][2] / call.groups) end
        local label = call.in_labels[k][from.at]
        if label > 0 and not w then follow(call, from, label) end
      end
    end
  end
  return units
end

-- The programme -------------------------------------------------------------------------------

local function copy(t)
  local new = {}
  for k, v in pairs(t) do new[k] = v end
  return new
end

-- States that differ in nothing that matters later have one key.
local function key_of(state)
  local parts = {}
  for id, p in pairs(state.at) do
    parts[#parts + 1] = ("%d:%s/%s%s"):format(id, p.dim or "p", p.unit or 0, p.paid and "p" or "")
  end
  for id, p in pairs(state.held) do parts[#parts + 1] = ("w%d:%s/%s"):format(id, p.dim, p.unit) end
  table.sort(parts)
  return table.concat(parts, " ")
end

local function bytes(pass, id)
  return pass.values[id].bytes * pass.scale
end

-- Whether value id, split along dimension d, stands along the sequence.
local function is_along(pass, id, d)
  return pass.sequence and d == sequence_dim and #pass.values[id] == 3
end

-- One way to run a call from `state`: everything that carries `label` is split (nil: nothing). Adds
-- up what moves; gives the placement of the outputs.
local function run_row(pass, call, state, label, choice)
  local cost, at, unit, seen = 0, {}, choice and choice.operand_unit, {}
  local paid, forward, along = {}, 0, false
  for k, id in ipairs(call.ins) do
    local now = id and state.at[id]
    if now and now.dim and label and call.in_labels[k][now.dim] == label then
      local size = pass.values[id][now.dim]
      unit, along = unit or now.unit, along or is_along(pass, id, now.dim)
      if choice and unit * size ~= now.unit * choice.size then forward = forward + bytes(pass, id) end
    elseif choice and now and now.dim and is_along(pass, id, now.dim) then
      if not now.paid then cost = cost + (pass.values[id].grad and 2 or 1) * bytes(pass, id) end
      at[id] = { dim = now.dim, unit = now.unit, paid = true }
    elseif now and now.dim then
      forward = forward + bytes(pass, id) -- gathered
    end
  end
  for k, id in ipairs(call.ins) do
    local value = id and pass.values[id]
    local now = id and state.at[id]
    local is_weight = choice and k == choice.operand
    local carries = now and now.dim and call.in_labels[k][now.dim] == label
    if label and value and not is_weight and not carries and not at[id] then
      local d = dim_of(call.in_labels[k], label)
      if id <= pass.n_state then
        seen[id] = d and { dim = d, unit = unit, label = label } or { dim = 0 }
        if along and not d and value.grad then cost = cost + 2 * value.bytes end
      elseif value.grad and d then
        cost = cost + bytes(pass, id) -- its gradient comes out split
      elseif value.grad and not (now and now.paid) then
        cost = cost + 2 * bytes(pass, id) -- its gradient comes out partial, once for all who read it
        paid[id] = true
      end
    elseif value and not is_weight and id <= pass.n_state then
      seen[id] = { dim = 0 }
    end
  end
  for o, out in ipairs(call.outs) do
    local d = label and dim_of(call.out_labels[o], label)
    if d then
      local size = choice and choice.size or pass.values[out][d]
      at[out] = { dim = d, unit = unit * pass.values[out][d] / size }
    elseif label and (o == 1 or not pass.first_only[call.op]) then
      cost = cost + 2 * bytes(pass, out)
      if choice and is_along(pass, out, sequence_dim) then at[out] = { dim = sequence_dim, unit = 1 } end
    end
  end
  if not label then cost = cost + pass.flops[call] * pass.scale * 3 / operations_a_byte end
  return { cost = cost + forward, forward = forward, at = at, paid = paid, seen = seen, choice = choice }
end

-- A reshape keeps a split that falls on its bounds.
local function run_reshape(pass, call, state)
  local id, out = call.ins[1], call.outs[1]
  local now = state.at[id]
  if not (now and now.dim) then return { { cost = 0, at = {}, paid = {}, seen = {} } } end
  local d, unit = through_reshape(pass.values[id], pass.values[out], now.dim, now.unit)
  if d and unit then
    return { { cost = 0, at = { [out] = { dim = d, unit = unit } }, paid = {}, seen = {} } }
  end
  return { { cost = bytes(pass, id), at = {}, paid = {}, seen = {} } }
end

-- What a call without a weight does is dispatch's choice: the row that moves the fewest bytes now, the
-- first of equals.
local function run_plain(pass, call, state)
  if is_reshape(call) then return run_reshape(pass, call, state) end
  local best = run_row(pass, call, state, nil)
  local tried = {}
  for k, id in ipairs(call.ins) do
    local now = id and state.at[id]
    local label = now and now.dim and call.in_labels[k][now.dim] or 0
    if label > 0 and not tried[label] then
      tried[label] = true
      local row = run_row(pass, call, state, label)
      if row.forward < best.forward then best = row end
    end
  end
  return { best }
end

-- What may be done with the weight of a call.
local function choices_of(pass, call, state, operand, w)
  local param, list = w.param, {}
  local held, forced = state.held[param], pass.forced[param]
  local function add(d, unit)
    local dim = d and w.dims[d] or 0
    if held and (held.dim ~= dim or (dim > 0 and held.unit ~= unit)) then return end
    if forced and forced ~= dim and not held then return end
    local size = d and pass.values[call.ins[operand]][d]
    list[#list + 1] = { param = param, dim = dim, unit = unit, operand = operand, operand_unit = unit,
      size = size, label = d and call.in_labels[operand][d] }
  end
  add(nil, 1)
  for d, label in ipairs(call.in_labels[operand]) do
    local dim = label > 0 and w.dims[d]
    if dim then
      local size, units = pass.values[call.ins[operand]][d], {}
      for _, unit in ipairs(pass.units[param] and pass.units[param][dim] or { 1 }) do units[unit] = true end
      if call.groups then units = { [size / call.groups] = true } end
      if held and held.dim == dim then units = { [held.unit] = true } end
      for k, id in ipairs(call.ins) do -- a split that is there already
        local now = id and state.at[id]
        if now and now.dim and call.in_labels[k][now.dim] == label and not held then
          local unit = now.unit * size / pass.values[id][now.dim]
          if unit % 1 == 0 and not call.groups then units = { [unit] = true } end
        end
      end
      local sorted = {}
      for unit in pairs(units) do sorted[#sorted + 1] = unit end
      table.sort(sorted)
      for _, unit in ipairs(sorted) do
        if size % unit == 0 then add(d, unit) end
      end
    end
  end
  if #list == 0 then -- what is asked for cannot be split
    forced = nil
    add(nil, 1)
  end
  return list
end

local function run_layer(pass, call, state, operand, w)
  local rows = {}
  for _, choice in ipairs(choices_of(pass, call, state, operand, w)) do
    local row
    if choice.dim > 0 then
      row = run_row(pass, call, state, choice.label, choice)
    else
      row = run_plain(pass, call, state)[1]
      row.cost = row.cost + (state.held[choice.param] and 0
        or pass.values[choice.param].bytes * copies_of_a_weight)
    end
    row.choice = choice
    rows[#rows + 1] = row
  end
  return rows
end

local function step(pass, k, state, rows, next_states)
  for _, row in ipairs(rows) do
    local new = { cost = state.cost + row.cost, at = copy(state.at), held = state.held, before = state,
      row = row, step = k }
    for id, p in pairs(row.at) do new.at[id] = p end
    for id in pairs(row.paid) do new.at[id] = { paid = true } end
    for _, id in ipairs(pass.ends_at[k] or {}) do new.at[id] = nil end
    local choice = row.choice
    if choice and not state.held[choice.param] then
      new.held = copy(state.held)
      new.held[choice.param] = { dim = choice.dim, unit = choice.unit }
    end
    for _, id in ipairs(pass.held_until[k] or {}) do
      if new.held[id] then
        if new.held == state.held then new.held = copy(state.held) end
        new.held[id] = nil
      end
    end
    local key = key_of(new)
    next_states.ways[#next_states.ways + 1] = { from = state, to = key, cost = row.cost,
      dim = row.choice and row.choice.dim }
    local rival = next_states.by_key[key]
    if not rival then
      next_states[#next_states + 1] = new
      next_states.by_key[key] = new
      new.place = #next_states
    elseif new.cost < rival.cost then
      next_states[rival.place], next_states.by_key[key] = new, new
      new.place = rival.place
    end
  end
end

local function last_uses(pass, record, derived)
  local last, held = {}, {}
  for k, call in ipairs(record.calls) do
    for _, id in ipairs(call.ins) do
      if id then last[id] = k end
    end
    for _, id in ipairs(call.outs) do last[id] = last[id] or k end
    local operand = weights[call.op]
    local w = operand and derived[call.ins[operand] or 0]
    if w then held[w.param] = k end
  end
  for _, id in ipairs(record.outputs) do last[id] = nil end
  pass.ends_at, pass.held_until = {}, {}
  local function note(lists, at, id)
    lists[at] = lists[at] or {}
    lists[at][#lists[at] + 1] = id
  end
  for id, k in pairs(last) do note(pass.ends_at, k, id) end
  for id, k in pairs(held) do note(pass.held_until, k, id) end
end

-- Running statistics follow those of the batch.
local function run_statistics(call, state)
  local mean = call.ins[3] and state.at[call.ins[3]]
  local d = mean and mean.dim == 2 and 1 or 0
  local seen = {}
  for k = 1, 2 do seen[call.ins[k]] = { dim = d, unit = mean and mean.unit } end
  return { { cost = 0, at = {}, paid = {}, seen = seen } }
end

local function best_end(pass, states, outputs)
  local best
  for _, state in ipairs(states) do
    local cost = state.cost
    for _, id in ipairs(outputs) do
      local d = state.at[id] and state.at[id].dim
      if d and not is_along(pass, id, d) then cost = cost + bytes(pass, id) end
    end
    if not best or cost < best.total then
      state.total = cost
      best = state
    end
  end
  return best
end

-- Bytes of the best net in which the call of step k splits its weight along another dimension.
local function without(steps, k, dim)
  local best = huge
  for _, way in ipairs(steps[k].ways) do
    if way.dim ~= dim then
      best = math.min(best, way.from.cost + way.cost + steps[k].by_key[way.to].to_go)
    end
  end
  return best
end

-- Bytes from every state to the end of the net.
local function find_to_go(steps)
  for k = #steps, 1, -1 do
    for _, state in ipairs(steps[k]) do
      state.to_go = state.total and state.total - state.cost or huge
    end
    for _, way in ipairs(steps[k + 1] and steps[k + 1].ways or {}) do
      local to_go = way.cost + steps[k + 1].by_key[way.to].to_go
      if to_go < way.from.to_go then way.from.to_go = to_go end
    end
  end
end

-- What the best path chose: the dimension and unit of every tensor, 0 where it stays whole; and of
-- every weight what its calls move, and what the net moves more if it is split otherwise.
local function read_path(best, steps)
  local chosen, notes, state = {}, {}, best
  find_to_go(steps)
  while state.before do
    local choice = state.row.choice
    if choice then
      chosen[choice.param] = { dim = choice.dim, unit = choice.unit }
      local note = notes[choice.param] or { cost = 0, more = huge }
      note.cost = note.cost + state.row.cost
      note.more = math.min(note.more, without(steps, state.step, choice.dim) - best.total)
      notes[choice.param] = note
    end
    for id, use in pairs(state.row.seen) do
      local known = chosen[id]
      if not known then chosen[id] = { dim = use.dim, unit = use.unit or 1 }
      elseif known.dim ~= use.dim or (use.dim > 0 and known.unit ~= use.unit) then known.dim = 0 end
    end
    state = state.before
  end
  return chosen, notes
end

--- Chooses the splits of a recorded net.
---@param record orrery.Record
---@param forced table<integer, integer> by number of a parameter: its dimension, 0 for none
---@param scale? number the part of the batch that one device sees, default 1
---@param sequence? boolean the plan's sequence=true
---@return table<integer, {dim: integer, unit: integer}> chosen by number of the tensor
---@return table<integer, {cost: number, more: number}> notes bytes a step, and how many more the net
---  moves with another choice
---@return number cost of the whole net
function split.choose(record, forced, scale, sequence)
  local pass = { values = record.values, forced = forced, scale = scale or 1, flops = {} }
  pass.sequence = sequence
  pass.n_state = 0
  for _ in pairs(record.index) do pass.n_state = pass.n_state + 1 end
  pass.first_only = { layer_norm_stats = true, rms_norm_stats = true }
  for _, call in ipairs(record.calls) do
    complete_labels(call, record.values)
    local heavy = weights[call.op] or call.op:find "attention"
    pass.flops[call] = heavy and call.op ~= "embedding" and shapes.flops(record, call) or 0
  end
  local derived = derived_weights(record, pass.n_state)
  pass.units = units_wanted(record, derived)
  last_uses(pass, record, derived)
  local states, steps = { { cost = 0, at = {}, held = {} } }, {}
  for k, call in ipairs(record.calls) do
    local operand, next_states = weights[call.op], { by_key = {}, ways = {} }
    local w = operand and derived[call.ins[operand] or 0]
    for _, state in ipairs(states) do
      local rows
      if w then rows = run_layer(pass, call, state, operand, w)
      elseif call.op == "bn_running_" then rows = run_statistics(call, state)
      elseif derived[call.outs[1] or 0] then rows = { { cost = 0, at = {}, paid = {}, seen = {} } }
      else rows = run_plain(pass, call, state) end
      step(pass, k, state, rows, next_states)
    end
    states, steps[k] = next_states, next_states
  end
  local best = best_end(pass, states, record.outputs)
  local chosen, notes = read_path(best, steps)
  return chosen, notes, best.total
end

-- A net -----------------------------------------------------------------------------------------

--- Whether the plan has a tensor axis.
function split.wanted(plan)
  for _, stage in ipairs(plan:stages()) do
    for _, axis in ipairs(stage.axes) do
      if axis.name == "tensor" and axis.size > 1 then return true end
    end
  end
  return false
end

local function overrides(net, record)
  local forced = {}
  for _, module in ipairs(net:modules()) do
    local how = rawget(module, "_split")
    if how and module.weight then
      forced[record.index[module.weight]] = how == "none" and 0 or dims_of[module._class][how]
    end
  end
  return forced
end

local function axis_size(plan, name)
  local size = 1
  for _, axis in ipairs(plan:stages()[1].axes) do
    if axis.name == name then size = axis.size end
  end
  return size
end

-- Whether every stage of the plan splits the sequence between split layers.
local function splits_sequence(plan)
  for _, stage in ipairs(plan:stages()) do
    local along = false
    for _, axis in ipairs(stage.axes) do
      along = along or axis.name == "tensor" and axis.options.sequence or false
    end
    if not along then return false end
  end
  return true
end

--- The words of every split tensor of the net on a tensor axis: "shard(1)", "shard(1/16)"; those that
--- stay whole have none. Leaves a note in each layer for tostring.
---@param plan orrery.Plan
---@param net orrery.Module
---@param args table the arguments of a call
---@return table<orrery.Tensor, string>
function split.words(plan, net, args)
  local words = {}
  if not split.wanted(plan) then return words end
  local record = shapes.record(net, args)
  local sequence = splits_sequence(plan)
  local chosen, costs = split.choose(record, overrides(net, record), 1 / axis_size(plan, "data"), sequence)
  for t, id in pairs(record.index) do
    local c = chosen[id]
    if c and c.dim > 0 then
      words[t] = (c.unit or 1) > 1 and ("shard(%d/%d)"):format(c.dim, c.unit) or ("shard(%d)"):format(c.dim)
    end
  end
  layer_notes.write(net, record, {
    chosen = chosen, costs = costs, dims_of = dims_of, n = axis_size(plan, "tensor"), sequence = sequence,
  })
  return words
end

return split
