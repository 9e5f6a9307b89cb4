-- Captured steps: a function of tensors that is recorded as the calls it makes, and then replayed
-- without running the function.
-- Invariant: what a captured step computes is what the function would compute: it is replayed only
-- after two runs in a row made the same calls on the same memory, for arguments of the same form and
-- under the same modes; in any other case the function runs, and `reason` says why.
-- To add something that must be the same for a replay: `modes_now`, or `hindrance` for what a form decides.
local core = require "orrery.core"
local check = require "orrery.check"
local host = require "orrery.host"
local moved = require "orrery.moved"

local is_tensor, same_form, fill = core.is_tensor, core.capture_same_form, core.capture_fill
local wrote, held = core.capture_wrote, core.capture_held
local unpack, select = table.unpack or unpack, select

local MOST_TRIES = 8 -- recordings of one form that differ before it is left alone
local MOST_FORMS = 8 -- forms of arguments: each has slots and a recording
local TOO_MANY = ("its arguments have had more than %d forms (shapes, layouts, values, modes)"):format(
  MOST_FORMS)

---@class orrery.Captured
---@field replays integer how many calls were replayed
---@field runs integer how many calls ran the function
---@operator call: any
local Captured = {}
Captured.__index = Captured

local function pack(...) return { n = select("#", ...), ... } end

local function is_plain(value) return type(value) == "table" and not getmetatable(value) end

-- What decides what a function does beside its arguments: modes of modules and ops.
local function modes_now()
  local modes, why = core.capture_modes()
  return modes and modes + 128 * moved.modes, why
end

-- Arguments ---------------------------------------------------------------------------------------

-- A copy of an argument in which every tensor stands in a slot of its own.
local function slots_of(value)
  if is_tensor(value) then return core.capture_slot(value) end
  if not is_plain(value) then return value end
  local copy = {}
  for key, inner in pairs(value) do copy[key] = slots_of(inner) end
  return copy
end

-- Whether an argument has the form of what is in the slots: tensors of one form, else the same value.
local function fits(slot, value)
  if is_tensor(slot) then return is_tensor(value) and not value.requires_grad and same_form(slot, value) end
  if not is_plain(slot) then return rawequal(slot, value) end
  if not is_plain(value) then return false end
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
  elseif is_plain(slot) then
    for key, inner in pairs(slot) do load(inner, value[key]) end
  end
end

-- Whether a tensor of an argument is such that is(tensor, record).
local function any(value, is, record)
  if is_tensor(value) then return is(value, record) end
  if not is_plain(value) then return false end
  for _, inner in pairs(value) do
    if any(inner, is, record) then return true end
  end
  return false
end

local function wants_grad(tensor) return tensor.requires_grad end

local function written(tensor, record) return wrote(record, tensor) end

-- The slots under other names and in other tables, so that it can be seen what is kept and changed;
-- slot_of[name] is the slot.
local function renamed(value, slot_of)
  if is_tensor(value) then
    local name = core.capture_alias(value)
    slot_of[name] = value
    return name
  end
  if not is_plain(value) then return value end
  local copy = {}
  for key, inner in pairs(value) do copy[key] = renamed(inner, slot_of) end
  return copy
end

-- Does to an argument what the step did to its slots, of which it got `copy`; whether that was anything.
local function put_back(record, value, slot, copy, slot_of)
  if is_tensor(slot) then
    local changed = wrote(record, slot)
    if changed then fill(value, slot) end
    return changed
  end
  if not is_plain(slot) then return false end
  local changed = false
  for key, inner in pairs(slot) do
    local now = copy[key]
    if rawequal(slot_of[now] or now, inner) or is_plain(inner) and is_plain(now) then
      changed = put_back(record, value[key], inner, now, slot_of) or changed
    else
      value[key], changed = now, true
    end
  end
  for key, now in pairs(copy) do
    if slot[key] == nil then value[key], changed = now, true end
  end
  return changed
end

-- Results -----------------------------------------------------------------------------------------

-- Why a result cannot be given by a replay; nil: it can.
local function bad_result(value)
  if value == nil then return nil end
  if is_tensor(value) then
    return core.capture_graph_waits(value)
      and "the step returns a tensor whose backward is still to come; call it within, or use no_grad"
      or nil
  elseif not is_plain(value) then
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

-- f(...) in protected mode. It runs in a coroutine of its own: what yields out of a recording would have
-- others recorded.
local function protected(f, ...)
  local thread = coroutine.create(f)
  local function finish(ok, ...)
    if coroutine.status(thread) ~= "suspended" then return ok, pack(...) end
    return false, { n = 1, "capture: the step yields; yield around it, not in it" }
  end
  return finish(coroutine.resume(thread, ...))
end

-- Runs f while its calls are recorded.
local function record_run(self, pools, args, n)
  local record, parts = core.capture_start(pools), {}
  host.recorder = recorder_of(record, parts)
  local ok, results = protected(self._f, unpack(args, 1, n))
  host.recorder = nil
  local why = core.capture_stop(record)
  for k = 1, ok and results.n or 0 do why = why or bad_result(results[k]) end
  return { record = record, parts = parts, ok = ok, results = results }, why
end

-- Collects what the step left, also what stands in places of the stack that are free again.
local function sweep()
  select("#", unpack({}, 1, 200))
  collectgarbage()
  collectgarbage()
end

local function same_argument(a, b)
  if not is_plain(a) or not is_plain(b) then return rawequal(a, b) end
  for key, value in pairs(a) do
    if not rawequal(value, b[key]) then return false end
  end
  for key in pairs(b) do
    if a[key] == nil then return false end
  end
  return true
end

-- What differs between the host parts of two recordings, or nil.
local function parts_differ(parts, before)
  for k, part in ipairs(parts) do
    local other = before[k]
    local same = part.f == other.f and part.n == other.n
    for i = 1, part.n do same = same and same_argument(part[i], other[i]) end
    if not same then
      return "clipping, an optimizer or a schedule gets other arguments than in the step before"
    end
  end
end

-- Replaces a recording's results by what is kept of them; gives the reason why nothing can be.
local function settle(form, made, why)
  local list, results = {}, made.results
  for k = 1, why and 0 or results.n do results[k] = keep(made.record, results[k], list) end
  sweep()
  core.capture_forget(made.record)
  for k = 1, form.n do
    if any(form.args[k], held) then form.left = why or "the step keeps or returns an argument" end
  end
  return form.left or why or core.capture_escaped(made.record, list)
end

-- The reason why a recording cannot be replayed yet.
local function judge(form, made, before)
  if not before then return "it was recorded, and has to be the same once more" end
  local why = core.capture_differs(made.record, before.record) or parts_differ(made.parts, before.parts)
  if not why then core.capture_prepare(made.record) end
  if not why then form.ready, form.first = true, true end
  return why
end

-- The first run, which makes what is made once (state of optimizers), with a look at what it writes.
local function first(self, form, ...)
  local made = record_run(self, nil, { ... }, form.n)
  form.first = made.record
  for k = 1, form.n do
    if any((select(k, ...)), written, made.record) then form.left = "the step writes into an argument" end
  end
  self._reason = form.left or "the first run of arguments of this form is not recorded"
  self._changes = moved.changes -- nothing is recorded yet that a change made in it could make wrong
  if not made.ok then check.again(made.results[1]) end
  return unpack(made.results, 1, made.results.n)
end

-- Records one run on the slots; what it did to them is done to the arguments.
local function record_slots(self, form, ...)
  local args, slot_of, changed = {}, {}, false
  form.pools = form.pools or core.capture_pools()
  for k = 1, form.n do
    load(form.args[k], (select(k, ...)))
    args[k] = renamed(form.args[k], slot_of)
  end
  local made, why = record_run(self, form.pools, args, form.n)
  for k = 1, form.n do
    changed = put_back(made.record, (select(k, ...)), form.args[k], args[k], slot_of) or changed
  end
  if changed then form.left = "the step writes into an argument" end
  return made, why
end

-- One run of the function that may become what is replayed.
local function try(self, form, ...)
  local before = form.made
  local made, why = record_slots(self, form, ...)
  why = settle(form, made, why or not made.ok and "it failed" or nil)
  if not why then why = judge(form, made, before) else made.refused = true end
  form.made, form.tries, form.why, self._reason = not made.refused and made or nil, form.tries + 1, why, why
  if before then core.capture_free(before.record) end
  if not made.refused then return give_all(made.record, made.results) end
  core.capture_free(made.record)
  if not made.ok then check.again(made.results[1]) end
  return unpack(made.results, 1, made.results.n)
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
  local form = { modes = modes, n = n, tries = 0, args = {} }
  for k = 1, n do form.args[k] = slots_of((select(k, ...))) end
  self._forms[#self._forms + 1] = form
  return form
end

-- Why these arguments cannot be replayed nor recorded; nil: they can.
local function hindrance(form, ...)
  if not form.left and not form.ready and form.tries == MOST_TRIES then form.left = form.why end
  if form.left then
    form.first, form.made, form.pools = true, nil, nil
    return form.left
  end
  local record = form.made and form.made.record or form.first
  for k = 1, form.n do
    if any((select(k, ...)), written, record) then return "the step writes into an argument" end
  end
  return form.ready and core.capture_fits(record) or nil
end

local function run(self, why, ...)
  self._reason = why
  return self._f(...)
end

local function call(self, ...)
  local modes, why = modes_now()
  for k = 1, modes and select("#", ...) or 0 do
    if any((select(k, ...)), wants_grad) then why = "an argument requires grad" end
  end
  if self._changes ~= moved.changes then self:reset() end
  local form = not why and form_of(self, modes, ...)
  if form and form.first then
    why = hindrance(form, ...)
    if form.ready and not why then return replay_form(self, form, ...) end
  end
  self.runs = self.runs + 1
  if form and not form.first then return first(self, form, ...) end
  if form and not why then return try(self, form, ...) end
  return run(self, why or TOO_MANY, ...)
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
--- `reason` says why: it reads values on the host, keeps tensors that it made, writes, keeps or returns
--- its arguments, returns a number.
--- Gradients of parameters are there afterwards as the function leaves them, in the same tensors each time.
---@param f fun(...): ... a training step, or any function of tensors
---@return orrery.Captured captured call it as f
local function capture(f)
  if type(f) ~= "function" then check.raise("capture: expected a function, got %s", type(f)) end
  return setmetatable({ _f = f, _forms = {}, _changes = moved.changes,
    replays = 0, runs = 0 }, Captured)
end

return capture
