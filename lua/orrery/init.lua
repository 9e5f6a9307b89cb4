-- The module: require "orrery" gives the tensors' functions and the parts nn, optim, parallel, data.
-- Invariant: no globals; a part is loaded when it is first used, so that requiring costs little.
-- Dimensions, indices, class labels and token ids count from 1, as Lua does; device ids from 0, as
-- CUDA does.
-- To add a part: its module name in `parts`.
local core = require "orrery.core"

core.set_library((debug.getinfo(1, "S").source:match("^(.*)init%.lua$")) or "@orrery/")

local orrery = { _VERSION = "0.1.0" }

local parts = {
  nn = "orrery.nn",
  optim = "orrery.optim",
  parallel = "orrery.parallel",
  data = "orrery.data",
  amp = "orrery.amp",
  capture = "orrery.capture",
  progress = "orrery.progress",
  timeline = "orrery.timeline",
  plot = "orrery.plot",
}

-- Everything of the core that users call; what else the core holds belongs to the library.
local hidden = {
  set_library = true, replace_ = true, push_scope = true, pop_scope = true, reset_scope = true,
  scopes_on = true, set_grad_mode = true, set_hook = true, get_hook = true, record = true,
  hold_gradients = true, profile_start = true, profile_stop = true, mesh = true, mesh_of = true,
  distribute = true, placements = true, from_shards = true, set_batch = true, trace_start = true,
  trace_stop = true, reducer = true, set_reducer = true, plan = true, line = true,
  set_sharding = true, state_like = true,
  tensor_metatable = true, watch_layer = true, op_table = true, snapshot = true, mark = true,
  timeline_start = true, timeline_stop = true, timeline_event = true, record_ops = true,
  record_stop = true, record_count = true,
}

local function is_hidden(name) return hidden[name] or name:find "^capture_" end

require("orrery.tensor").install(orrery)
require("orrery.devices").install(orrery)
require("orrery.check_grad").install(orrery)
for name, value in pairs(core) do
  if not is_hidden(name) and orrery[name] == nil then orrery[name] = value end
end

return setmetatable(orrery, {
  __index = function(self, name)
    if not parts[name] then return nil end
    local part = require(parts[name])
    self[name] = part
    return part
  end,
})
