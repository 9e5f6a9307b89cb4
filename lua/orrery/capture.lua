-- Captured steps: a function of tensors that is recorded as the calls it makes, and then replayed
-- without running the function.
-- Invariant: what a captured step computes is what the function would compute: it is replayed only
-- after two runs in a row made the same calls on the same memory, for arguments of the same form and
-- under the same modes; in any other case the function runs, and `reason` says why.
-- To add something that must be the same for a replay: `modes_now`.
local core = require "orrery.core"
local check = require "orrery.check"
local host = require "orrery.host"
local moved = require "orrery.moved"

local is_tensor, same_form, fill = core.is_tensor, core.capture_same_form, core.capture_fill
local unpack, select = table.unpack or unpack, select

local MOST_TRIES = 8 -- recordings of one form that differ before it is left alone
local MOST_FORMS = 8 -- forms of arguments: each has slots and a recording

---@class orrery.Captured
---@field replays integer how many calls were replayed
---@field runs integer how many calls ran the function
---@operator call: any
local Captured = {}
Captured.__index = Captured

-- What decides what a function does beside its arguments: modes of modules and ops.
local function modes_now()
  local modes, why = core.capture_modes()
  return modes and modes + 128 * moved.modes, why
end

-- Arguments ---------------------------------------------------------------------------------------

-- A copy of an argument in which every tensor stands in a slot of its own.
local function slots_of(value)
  if is_tensor(value) then return core.capture_slot(value) end
  if type(value) ~= "table" or getmetatable(value) then return value end
  local copy = {}
  for key, inner in pairs(value) do copy[key] = slots_of(inner) end
  return copy
end

-- Whether an argument has the form of what is in the slots: tensors of one form, else the same value.
local function fits(slot, value)
  if is_tensor(slot) then return is_tensor(value) and not value.requires_grad and same_form(slot, value) end
  if type(slot) ~= "table" or getmetatable(slot) then return rawequal(slot, value) end
  if type(value) ~= "table" or getmetatable(value) then return false end
  for key in pairs(value) do
    if slot[key] == nil then return false end
  end
  for key, inner in pairs(slot) do
    if not fits(inner, value[key]) then return false end
  end
  return true
end

local function load(slot, value)
  if is_tensor(slot) then
    fill(slot, value)
  elseif type(slot) == "table" and not getmetatable(slot) then
    for key, inner in pairs(slot) do load(inner, value[key]) end
  end
end

local function wants_grad(value)
  if is_tensor(value) then return value.requires_grad end
  if type(value) ~= "table" or getmetatable(value) then return false end
  for _, inner in pairs(value) do
    if wants_grad(inner) then return true end
  end
  return false
end

-- Results -----------------------------------------------------------------------------------------

-- Why a result cannot be given by a replay; nil: it can.
local function bad_result(value)
  if value == nil then return nil end
  if is_tensor(value) then
    return core.capture_graph_waits(value)
      and "the step returns a tensor whose backward is still to come; call it within, or use no_grad"
      or nil
  elseif type(value) ~= "table" or getmetatable(value) then
    return ("the step returns a %s; return tensors, whose values a replay renews"):format(type(value))
  end
  for _, inner in pairs(value) do
    local why = bad_result(inner)
    if why then return why end
  end
end

-- The result with every tensor that the step made detached; those stand in list.
local function keep(record, value, list)
  if is_tensor(value) then
    if not core.capture_made(record, value) then return value end
    local kept = value:detach()
    list[#list + 1] = kept
    return kept
  elseif type(value) ~= "table" then
    return value
  end
  local copy = {}
  for key, inner in pairs(value) do copy[key] = keep(record, inner, list) end
  return copy
end

-- What a caller gets: copies, which the next replay does not overwrite.
local function give(record, value)
  if is_tensor(value) then return core.capture_made(record, value) and core.capture_slot(value) or value end
  if type(value) ~= "table" then return value end
  local copy = {}
  for key, inner in pairs(value) do copy[key] = give(record, inner) end
  return copy
end

local function give_all(record, results)
  local out = {}
  for k = 1, results.n do out[k] = give(record, results[k]) end
  return unpack(out, 1, results.n)
end

-- Recording ---------------------------------------------------------------------------------------

local function pack(...) return { n = select("#", ...), ... } end

-- The step's own host parts: {function, arguments} in order.
local function recorder_of(record, parts)
  local function recorder(kind, f, ...)
    parts[#parts + 1] = { f = f, n = select("#", ...), ... }
    host.recorder = nil
    core.capture_host(record, kind)
    local results = pack(pcall(f, ...))
    core.capture_host_end(record)
    host.recorder = recorder
    if not results[1] then check.again(results[2]) end
    return unpack(results, 2, results.n)
  end
  return recorder
end

-- Runs f on the slots while its calls are recorded; an error ends the recording and is raised.
local function record_run(self, form)
  local record, parts = core.capture_start(self._pools), {}
  host.recorder = recorder_of(record, parts)
  local results = pack(pcall(self._f, unpack(form.args, 1, form.n)))
  host.recorder = nil
  local why, count = core.capture_stop(record)
  if not results[1] then
    core.capture_free(record)
    form.record = nil
    check.again(results[2])
  end
  results = pack(unpack(results, 2, results.n))
  for k = 1, results.n do why = why or bad_result(results[k]) end
  return { record = record, parts = parts, results = results, count = count }, why
end

-- Replaces a recording's results by what is kept of them; gives the reason why nothing can be.
local function settle(made)
  local list, results = {}, made.results
  for k = 1, results.n do results[k] = keep(made.record, results[k], list) end
  collectgarbage()
  collectgarbage()
  return core.capture_escaped(made.record, list)
end

-- One run of the function that may become what is replayed.
local function try(self, form)
  local made, why = record_run(self, form)
  local before = form.made
  form.made, form.tries = made, form.tries + 1
  if why then
    form.made = nil
    core.capture_free(made.record)
    if before then core.capture_free(before.record) end
    self._reason = why
    return unpack(made.results, 1, made.results.n)
  end
  why = settle(made)
  if not why and before then
    why = core.capture_differs(made.record, before.record)
    form.ready = not why
    if not why then core.capture_prepare(made.record) end
  elseif not why then
    why = "it was recorded, and has to be the same once more"
  end
  if before then core.capture_free(before.record) end
  self._reason = why
  return give_all(made.record, made.results)
end

-- Replaying ---------------------------------------------------------------------------------------

local function replay(made)
  local record, parts = made.record, made.parts
  for k = 1, #parts do
    local part = parts[k]
    core.capture_replay(record, k)
    core.capture_enter(record, k)
    part.f(unpack(part, 1, part.n))
    core.capture_leave()
  end
  core.capture_replay(record)
end

local function replay_form(self, form, ...)
  local made = form.made
  for k = 1, form.n do load(form.args[k], (select(k, ...))) end
  core.capture_begin(made.record)
  local ok, message = pcall(replay, made)
  core.capture_end(made.record)
  if not ok then check.again(message) end
  self.replays, self._reason = self.replays + 1, nil
  return give_all(made.record, made.results)
end

-- Calls -------------------------------------------------------------------------------------------

-- The form of the arguments; a new one where they have none, nil where there are too many.
local function form_of(self, modes, ...)
  local n = select("#", ...)
  for _, form in ipairs(self._forms) do
    local same = form.modes == modes and form.n == n
    for k = 1, same and n or 0 do same = same and fits(form.args[k], (select(k, ...))) end
    if same then return form end
  end
  if #self._forms == MOST_FORMS then return nil end
  local form = { modes = modes, n = n, tries = 0, fresh = true, args = {} }
  for k = 1, n do form.args[k] = slots_of((select(k, ...))) end
  self._forms[#self._forms + 1] = form
  return form
end

local function run(self, why, ...)
  self._reason = why
  self.runs = self.runs + 1
  return self._f(...)
end

local function call(self, ...)
  local modes, why = modes_now()
  if not modes then return run(self, why, ...) end
  for k = 1, select("#", ...) do
    if wants_grad((select(k, ...))) then return run(self, "an argument requires grad", ...) end
  end
  if self._changes ~= moved.changes then self:reset() end
  local form = form_of(self, modes, ...)
  if not form then
    return run(self, ("its arguments have had more than %d forms (shapes, layouts, values, modes)"):format(
      MOST_FORMS), ...)
  end
  if form.ready then
    why = core.capture_fits(form.made.record)
    if not why then return replay_form(self, form, ...) end
    return run(self, why, ...)
  end
  if form.tries == MOST_TRIES then return run(self, form.why, ...) end
  if form.fresh then
    form.fresh = false
    local results = pack(run(self, "the first run of arguments of this form is not recorded", ...))
    self._changes = moved.changes -- nothing is recorded yet that a change made in it could make wrong
    return unpack(results, 1, results.n)
  end
  for k = 1, form.n do load(form.args[k], (select(k, ...))) end
  self.runs = self.runs + 1
  local results = pack(try(self, form))
  form.why = self._reason
  return unpack(results, 1, results.n)
end

Captured.__call = call

--- Why the last call ran the function; nil: it was replayed.
---@return string?
function Captured:reason() return self._reason end

--- Forgets all recordings: after a change that Orrery cannot see, such as another layer in the net.
function Captured:reset() self._forms, self._changes = {}, moved.changes end

function Captured:__tostring()
  return ("captured step: %d replayed, %d run%s"):format(self.replays, self.runs,
    self._reason and ("; the last because " .. self._reason) or "")
end

--- A step that is recorded and then replayed without Lua: the same tensors, devices and numbers, and
--- none of the time of making and placing each call.
---
--- f gets tensors (and plain values, and tables of both) and returns tensors. The first call runs f;
--- the next ones run and record it, until two recordings in a row are the same; from then on a call
--- copies the arguments into fixed slots and replays. Each form of the arguments (shapes, dtypes,
--- layouts) has its own recording. What changes from step to step is renewed: random numbers, the
--- rate and step count of optimizers, schedules, clipping. What else the function does is not done
--- again: printing, counting, choosing by a Lua variable. Where a replay could be wrong, f runs, and
--- `reason` says why: it reads values on the host, keeps tensors that it made, returns a number.
--- Gradients of parameters are there afterwards as the function leaves them, in the same tensors each time.
---@param f fun(...): ... a training step, or any function of tensors
---@return orrery.Captured captured call it as f
local function capture(f)
  if type(f) ~= "function" then check.raise("capture: expected a function, got %s", type(f)) end
  return setmetatable({ _f = f, _forms = {}, _pools = core.capture_pools(), _changes = moved.changes,
    replays = 0, runs = 0 }, Captured)
end

return capture
