-- What every row of spec/ops.lua is put through: values, gradients, dtypes, placements, in place.
-- Invariant: a check gives a list of what is wrong, each naming op, sample, mesh and placements; the
-- choice of combinations is the same in every run.
-- To add a check for all ops: a function here and its line in spec/op_matrix_spec.lua.
local core = require "orrery.core"
local array = require "spec.support.array"
local placed = require "spec.support.placed"
local device = require "spec.support.device"

local unpack = table.unpack or unpack
local matrix = {}

local tolerances = { f64 = 1e-9, f32 = 1e-5, f16 = 5e-3, bf16 = 4e-2 }
local in_place_error = "in%-place write would land on a redistributed copy"

-- ---- comparing ----

--- nil, or how array a differs from b by more than tolerance relative to the larger of 1 and |b|.
function matrix.difference(a, b, tolerance)
  local shape_a, shape_b = table.concat(a.shape, ","), table.concat(b.shape, ",")
  if shape_a ~= shape_b then return ("shape (%s), expected (%s)"):format(shape_a, shape_b) end
  for k = 1, #b.data do
    local got, want = a.data[k], b.data[k]
    local same = got == want or (got ~= got and want ~= want)
      or math.abs(got - want) <= tolerance * math.max(1, math.abs(want))
    if not same then return ("element %d is %.12g, expected %.12g"):format(k, got, want) end
  end
end

local function copy_list(list)
  local copy = {}
  for k = 1, #list do copy[k] = list[k] end
  return copy
end

-- ---- running one sample ----

local function is_float(dtype) return dtype:find("f", 1, true) ~= nil end

--- Whether the gradient of input a is wanted.
local function wants_grad(row, a) return row.grad ~= false and is_float(a.dtype) and not a.nograd end

local function call(row, sample, tensors, f)
  if row.before then row.before(core) end
  f = f or core[row.name]
  local how = sample.call or row.call
  if how then return { how(f, unpack(tensors)) } end
  local args = copy_list(tensors)
  for _, v in ipairs(sample.args or {}) do args[#args + 1] = v end
  return { f(unpack(args)) }
end

-- Outputs, and after them the states that the op has written.
local function outputs_of(row, sample, tensors)
  local y = call(row, sample, tensors)
  local results = copy_list(y)
  for k, a in ipairs(sample.inputs) do
    if a.state then results[#results + 1] = tensors[k] end
  end
  return y, results
end

local function weights_of(sample, k, y)
  sample.weights = sample.weights or {}
  if not sample.weights[k] then
    sample.weights[k] = array.random(1000 + k).grid(y:size(), -2, 2)
  end
  return sample.weights[k]
end

-- sum(y * w) over the floating outputs; place(w) says where a weight stands.
local function loss_of(sample, y, place)
  local loss
  for k, t in ipairs(y) do
    if t.requires_grad then
      local w = place(weights_of(sample, k, t))
      if t:dtype() ~= "f64" then w = w:to(t:dtype()) end
      local part = core.mul(t, w):sum()
      loss = loss and core.add(loss, part) or part
    end
  end
  return loss
end

--- Values and gradients as arrays; grads[k] is false where input k has none.
function matrix.evaluate(row, sample, tensors, place)
  for k, a in ipairs(sample.inputs) do
    if wants_grad(row, a) then tensors[k]:requires_grad_() end
  end
  local y, results = outputs_of(row, sample, tensors)
  local values, grads = {}, {}
  for k, t in ipairs(results) do values[k] = placed.array(t) end
  local loss = loss_of(sample, y, place or placed.host)
  if loss then loss:backward() end
  for k, a in ipairs(sample.inputs) do
    grads[k] = wants_grad(row, a) and tensors[k].grad and placed.array(tensors[k].grad) or false
  end
  return values, grads
end

local evaluate = matrix.evaluate

--- The inputs on the one device that is compared with many, floats in `dtype` where one is given.
function matrix.host_tensors(sample, dtype)
  local list = {}
  for k, a in ipairs(sample.inputs) do
    list[k] = placed.host(a, dtype and is_float(a.dtype) and dtype or nil, device.single)
  end
  return list
end

local host_tensors = matrix.host_tensors

--- Values and gradients on the host, in f64, kept with the sample.
local function expected(row, sample)
  if not sample.values then
    sample.values, sample.grads = evaluate(row, sample, host_tensors(sample))
  end
  return sample.values, sample.grads
end

-- ---- the list of problems ----

local function new_problems(row)
  local problems = { row = row }
  function problems.add(where, text) problems[#problems + 1] = where .. ": " .. tostring(text) end
  --- Runs f; an error becomes a problem.
  function problems.try(where, f, ...)
    local results = { pcall(f, ...) }
    if not results[1] then problems.add(where, results[2]) end
    return unpack(results)
  end
  function problems.compare(where, got, want, tolerance)
    if #got < #want then return problems.add(where, ("%d results, expected %d"):format(#got, #want)) end
    for k, w in ipairs(want) do
      local text = w and (got[k] and matrix.difference(got[k], w, tolerance) or not got[k] and "missing")
      if text then problems.add(where .. " " .. k, text) end
    end
  end
  return problems
end

--- Fails with at most ten of the problems.
function matrix.report(problems)
  if #problems == 0 then return end
  local lines = {}
  for k = 1, math.min(#problems, 10) do lines[k] = problems[k] end
  if #problems > 10 then lines[#lines + 1] = ("... and %d more"):format(#problems - 10) end
  error(problems.row.name .. ":\n" .. table.concat(lines, "\n"), 0)
end

--- The samples of a row, made once.
function matrix.samples(row)
  if not row.made then
    row.made = row.samples(array.random(#row.name + row.name:byte(1) + row.name:byte(-1)))
    for k, sample in ipairs(row.made) do sample.name = sample.name or ("sample %d"):format(k) end
  end
  return row.made
end

-- ---- values ----

local function reference_of(row, sample)
  local ref = sample.ref or row.ref
  if not ref then return nil end
  local args = copy_list(sample.inputs)
  for _, v in ipairs(sample.args or {}) do args[#args + 1] = v end
  return { ref(unpack(args)) }
end

--- On the host: values against the reference, dtype of the first result.
function matrix.check_values(row)
  local problems = new_problems(row)
  for _, sample in ipairs(matrix.samples(row)) do
    problems.try(sample.name, function()
      local y, results = outputs_of(row, sample, host_tensors(sample))
      local values = {}
      for k, t in ipairs(results) do values[k] = placed.array(t) end
      local property = sample.property or row.property
      if property then property(values, sample) end
      local want = reference_of(row, sample)
      if want then problems.compare(sample.name .. ", result", values, want, row.exact or 1e-9) end
      local dtype = row.out or sample.inputs[1].dtype
      if y[1]:dtype() ~= dtype then
        problems.add(sample.name, ("dtype %s, expected %s"):format(y[1]:dtype(), dtype))
      end
      if row.grad == false and y[1].requires_grad then problems.add(sample.name, "requires grad") end
    end)
  end
  return problems
end

-- ---- numeric gradients ----

local eps = 2 ^ -20

-- Central differences of f (arrays -> number) with respect to input k.
local function numeric(inputs, k, f)
  local changed, data = copy_list(inputs), {}
  for i, v in ipairs(inputs[k].data) do
    local both = {}
    for j, step in ipairs { eps, -eps } do
      local a = array.copy(inputs[k])
      a.data[i] = v + step
      changed[k] = a
      both[j] = f(changed)
    end
    data[i] = (both[1] - both[2]) / (2 * eps)
  end
  return array.new(inputs[k].shape, data)
end

local function with_inputs(sample, inputs)
  return { inputs = inputs, args = sample.args, call = sample.call, weights = sample.weights }
end

--- On the host, in f64: gradients against central differences.
function matrix.check_gradients(row)
  local problems = new_problems(row)
  if row.grad == false then return problems end
  for _, sample in ipairs(matrix.samples(row)) do
    problems.try(sample.name, function()
      local _, grads = expected(row, sample)
      for k, a in ipairs(sample.inputs) do
        if wants_grad(row, a) and not (sample.rough or row.rough) then
          local want = numeric(sample.inputs, k, function(inputs)
            local y = call(row, sample, host_tensors(with_inputs(sample, inputs)))
            local total = 0
            for j, t in ipairs(y) do
              if is_float(t:dtype()) then
                local values, w = placed.array(t).data, weights_of(sample, j, t).data
                for i = 1, #values do total = total + values[i] * w[i] end
              end
            end
            return total
          end)
          local got = grads[k] or array.full(a.shape, 0)
          problems.compare(sample.name .. ", gradient of input " .. k, { got }, { want }, row.numeric or 1e-6)
        end
      end
    end)
  end
  return problems
end

-- ---- strides ----

--- On the host, inputs whose dims run backwards in memory: the same values and gradients.
function matrix.check_strides(row)
  local problems = new_problems(row)
  if row.dense then return problems end
  for _, sample in ipairs(matrix.samples(row)) do
    problems.try(sample.name .. ", strided", function()
      local values, grads = expected(row, sample)
      local tensors = {}
      for k, a in ipairs(sample.inputs) do
        tensors[k] = a.state and placed.host(a) or placed.backward_strides(a)
      end
      local got, got_grads = evaluate(row, sample, tensors)
      problems.compare(sample.name .. ", strided, result", got, values, 1e-9)
      for k, g in ipairs(grads) do
        if g then problems.compare(sample.name .. ", strided, gradient of input " .. k,
          { got_grads[k] }, { g }, 1e-9) end
      end
    end)
  end
  return problems
end

-- ---- second derivatives ----

-- Gradients of the loss, with a graph where `create` says so; zeros' places are false.
local function first_grads(row, sample, tensors, create)
  local wanted, at = {}, {}
  for k, a in ipairs(sample.inputs) do
    if wants_grad(row, a) then
      tensors[k]:requires_grad_()
      wanted[#wanted + 1], at[#at + 1] = tensors[k], k
    end
  end
  local loss = loss_of(sample, call(row, sample, tensors), placed.host)
  if not loss then return {}, wanted, at end
  return core.grad(loss, wanted, { create_graph = create }), wanted, at
end

local function direction(j, shape) return array.random(77 + j).grid(shape) end

--- On the host, in f64: derivatives of sum(gradient * v) against central differences of it. A row
--- with second = false must raise instead, with a word of create_graph.
function matrix.check_second(row)
  local problems = new_problems(row)
  if row.grad == false or row.second == "none" then return problems end
  for _, sample in ipairs(matrix.samples(row)) do
    local where = sample.name .. ", second derivative"
    local ok, message = pcall(function()
      local grads, wanted, at = first_grads(row, sample, host_tensors(sample), true)
      local total
      for j, g in ipairs(grads) do
        if g and g.requires_grad then
          local part = core.mul(g, placed.host(direction(j, wanted[j]:size()))):sum()
          total = total and core.add(total, part) or part
        end
      end
      local second = total and core.grad(total, wanted) or {}
      if sample.rough or row.rough then return end
      for j, k in ipairs(at) do
        local want = numeric(sample.inputs, k, function(inputs)
          local shifted = with_inputs(sample, inputs)
          local sum = 0
          for i, g in ipairs((first_grads(row, shifted, host_tensors(shifted)))) do
            local v = direction(i, wanted[i]:size()).data
            if g then
              for e, value in ipairs(placed.array(g).data) do sum = sum + value * v[e] end
            end
          end
          return sum
        end)
        local got = second[j] and placed.array(second[j]) or array.full(want.shape, 0)
        problems.compare(where .. " of input " .. k, { got }, { want }, row.numeric or 2e-6)
      end
    end)
    if row.second == false then
      if ok then problems.add(where, "was expected to raise")
      elseif not tostring(message):find "create_graph" and not tostring(message):find "second" then
        problems.add(where, message)
      end
    elseif not ok then
      problems.add(where, message)
    end
  end
  return problems
end

-- ---- dtypes ----

local function tolerance_of(row, dtype) return row.tolerance and row.tolerance[dtype] or tolerances[dtype] end

--- On the host: f32, f16 and bf16 against f64, values and gradients; whole numbers where row.int.
function matrix.check_dtypes(row)
  local problems = new_problems(row)
  for _, sample in ipairs(matrix.samples(row)) do
    local inputs_float = false
    for _, a in ipairs(sample.inputs) do inputs_float = inputs_float or is_float(a.dtype) end
    for _, dtype in ipairs(row.dtypes or { "f32", "f16", "bf16" }) do
      local where = sample.name .. " in " .. dtype
      if inputs_float then
        problems.try(where, function()
          local values, grads = expected(row, sample)
          local tolerance = tolerance_of(row, dtype)
          local got, got_grads = evaluate(row, sample, host_tensors(sample, dtype))
          problems.compare(where .. ", result", got, values, tolerance)
          for k in ipairs(sample.inputs) do
            if grads[k] then
              problems.compare(where .. ", gradient of input " .. k,
                { got_grads[k] }, { grads[k] }, 4 * tolerance)
            end
          end
          local out = got[1].dtype
          if not row.out and not row.wide and out ~= dtype then problems.add(where, "result is " .. out) end
        end)
      end
    end
  end
  if row.int then
    for _, dtype in ipairs { "i64", "i32", "u8" } do
      local rand = array.random(5)
      local low = dtype == "u8" and 0 or row.int_low or -4
      for _, sample in ipairs(matrix.samples(row)) do
        local where = sample.name .. " in " .. dtype
        problems.try(where, function()
          local whole = { name = sample.name, args = sample.args, call = sample.call, inputs = {} }
          for k, a in ipairs(sample.inputs) do
            whole.inputs[k] = is_float(a.dtype) and rand.ints(a.shape, low, 5, dtype) or a
          end
          local ref = sample.ref or row.ref
          local args = copy_list(whole.inputs)
          for _, v in ipairs(sample.args or {}) do args[#args + 1] = v end
          local y = call(row, whole, host_tensors(whole))
          local values = {}
          for k, t in ipairs(y) do values[k] = placed.array(t) end
          local want = { ref(unpack(args)) }
          if dtype == "u8" then
            for _, w in ipairs(want) do
              for k, v in ipairs(w.data) do
                if not row.out and values[1].dtype == "u8" then w.data[k] = v % 256 end
              end
            end
          end
          problems.compare(where, values, want, 1e-6)
        end)
      end
    end
  end
  return problems
end

-- ---- placements ----

local function words_for(row, a)
  if a.state then return { "replicate" } end
  local words = placed.words(a, is_float(a.dtype) and not a.whole)
  if not wants_grad(row, a) then words[#words + 1] = "host" end
  return words
end

local function all_host(combination)
  for _, words in ipairs(combination) do
    if words[1] ~= "host" then return false end
  end
  return true
end

-- Up to `limit` ways to place all inputs on mesh m; all of them where they are as few.
local function combinations(row, sample, m, limit)
  local choices, total = {}, 1
  for k, a in ipairs(sample.inputs) do
    choices[k] = placed.choices(words_for(row, a), m)
    -- A host tensor has no axes: "host" stands alone.
    for j = #choices[k], 1, -1 do
      local words = choices[k][j]
      if #words == 2 and (words[1] == "host") ~= (words[2] == "host") then table.remove(choices[k], j) end
    end
    total = total * #choices[k]
  end
  local list = {}
  local rand = array.random(total + #m.devices)
  for n = 0, math.min(total, limit) - 1 do
    local combination, rest = {}, n
    for k, c in ipairs(choices) do
      if total <= limit then
        combination[k] = c[rest % #c + 1]
        rest = math.floor(rest / #c)
      else
        combination[k] = rand.pick(c)
      end
    end
    if not all_host(combination) then list[#list + 1] = combination end
  end
  return list
end

local function text_of(combination)
  local words = {}
  for k, w in ipairs(combination) do words[k] = "[" .. table.concat(w, " ") .. "]" end
  return table.concat(words, " ")
end

local function place_all(sample, m, combination, strided)
  local tensors = {}
  for k, a in ipairs(sample.inputs) do tensors[k] = placed.place(a, m, combination[k], strided) end
  return tensors
end

-- Where the loss's weight stands: the host, or anywhere on the mesh.
local function weight_placer(m, rand)
  return function(w)
    if rand.int(1, 3) == 1 then return placed.host(w) end
    return placed.place(w, m, rand.pick(placed.choices(placed.words(w), m)))
  end
end

--- Every placement of the inputs on every mesh, forward and backward, against one device in f64.
---@param limits table<string, integer> how many combinations a sample has on each mesh
function matrix.check_placements(row, limits)
  local problems = new_problems(row)
  for _, sample in ipairs(matrix.samples(row)) do
    local ok = problems.try(sample.name .. " on one device", expected, row, sample)
    for _, m in ipairs(ok and placed.meshes or {}) do
      local rand = array.random(31 + #m.devices)
      for _, combination in ipairs(combinations(row, sample, m, limits[m.name] or limits.rest)) do
        local strided = not row.dense and rand.int(1, 3) == 1
        local where = ("%s on %s %s%s"):format(sample.name, m.name,
          text_of(combination), strided and " strided" or "")
        local fine, message = pcall(function()
          local values, grads = expected(row, sample)
          local tensors = place_all(sample, m, combination, strided)
          local got, got_grads = evaluate(row, sample, tensors, weight_placer(m, rand))
          problems.compare(where .. ", result", got, values, row.exact or 1e-9)
          for k in ipairs(sample.inputs) do
            if grads[k] then
              problems.compare(where .. ", gradient of input " .. k,
                { got_grads[k] }, { grads[k] }, row.exact or 1e-9)
            end
          end
        end)
        if not fine and not (row.refuses and tostring(message):find(row.refuses)) then
          problems.add(where, message)
        end
      end
    end
  end
  return problems
end

-- ---- in place ----

-- A target that is not placed as the result will be may be refused, one that is may not.
local function must_accept(combination)
  for _, words in ipairs(combination) do
    for _, word in ipairs(words) do
      if word ~= "replicate" and word ~= "host" then return false end
    end
  end
  return true
end

local function same_form(sample, values)
  local a, b = sample.inputs[1], values[1]
  return a.dtype == b.dtype and table.concat(a.shape, ",") == table.concat(b.shape, ",")
end

local function check_target(row, sample, where, tensors, strict, problems)
  local values = sample.values
  local before = core.placements(tensors[1])
  local ok, result = pcall(call, row, sample, tensors, core[row.name .. "_"])
  if not ok then
    local refused = tostring(result):find(in_place_error)
    if strict or not refused then problems.add(where, result) end
    return
  end
  if not rawequal(result[1], tensors[1]) then problems.add(where, "the result is not the target") end
  for axis, word in ipairs(core.placements(tensors[1])) do
    local reduced = before[axis]:find "partial" and word == "replicate"
    if word ~= before[axis] and not reduced then
      problems.add(where, ("axis %d changed from %s to %s"):format(axis, before[axis], word))
    end
  end
  problems.compare(where, { placed.array(tensors[1]) }, { values[1] }, 1e-9)
end

-- The gradient through x * 1 overwritten: as out of place, or refused because a saved value is gone.
local function check_recorded(row, sample, problems)
  local where = sample.name .. ", in place, recorded"
  local tensors = host_tensors(sample)
  local leaves = copy_list(tensors)
  for k, a in ipairs(sample.inputs) do
    if wants_grad(row, a) then tensors[k]:requires_grad_() end
  end
  if not tensors[1].requires_grad then return end
  local target = core.mul(tensors[1], 1)
  tensors[1] = target
  local y = call(row, sample, tensors, core[row.name .. "_"])
  local ok, message = pcall(function() loss_of(sample, y, placed.host):backward() end)
  if not ok then
    if not tostring(message):find "overwritten" then problems.add(where, message) end
    return
  end
  for k, g in ipairs(sample.grads) do
    if g then
      local got = leaves[k].grad
      problems.compare(where .. ", gradient of input " .. k,
        { got and placed.array(got) or false }, { g }, 1e-9)
    end
  end
end

--- The form with a trailing _: the same values in the target, whose layout stays (a partial one may
--- be reduced).
function matrix.check_in_place(row, limits)
  local problems = new_problems(row)
  if not core[row.name .. "_"] then return problems end
  for _, sample in ipairs(matrix.samples(row)) do
    problems.try(sample.name .. ", in place", function()
      if sample.functional then return end
      local values = expected(row, sample)
      if not same_form(sample, values) then
        local ok, message = pcall(call, row, sample, host_tensors(sample), core[row.name .. "_"])
        if ok or not tostring(message):find "cannot change the shape or dtype" then
          problems.add(sample.name .. ", in place", ok and "was expected to raise" or message)
        end
        return
      end
      check_target(row, sample, sample.name .. ", in place on the host", host_tensors(sample), true, problems)
      if row.grad ~= false then check_recorded(row, sample, problems) end
      for _, m in ipairs(placed.meshes) do
        for _, combination in ipairs(combinations(row, sample, m, limits[m.name] or limits.rest)) do
          if combination[1][1] ~= "host" then
            local where = ("%s, in place on %s %s"):format(sample.name, m.name, text_of(combination))
            problems.try(where, function()
              local tensors = place_all(sample, m, combination)
              check_target(row, sample, where, tensors, must_accept(combination), problems)
            end)
          end
        end
      end
    end)
  end
  return problems
end

return matrix
