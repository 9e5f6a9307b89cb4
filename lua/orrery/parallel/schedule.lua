-- Pipeline schedules as pure tables: the order in which forwards and backwards of micro-batches are
-- issued.
-- Invariant: an order holds every (stage, micro-batch) once forward and once backward, after what it
-- needs; under 1f1b and interleaved, stage s of n (from 1) never holds more than n - s + 1 forwards
-- whose backward has not come (Narayanan et al. 2021, sections 2.2.1 and 2.2.2).
-- To add a schedule: a rule in `rules` that says which ready task a device takes.
local schedule = {}

local never = math.huge -- the time of a task that has not run

-- Whether stage s may take another forward, by schedule.
local limits = {
  gpipe = function() return math.huge end,
  ["1f1b"] = function(s, stages) return stages - s + 1 end,
  interleaved = function(s, stages) return stages - s + 1 end,
}

-- What a device takes first among its ready tasks: the smallest key.
local function forward_key(task, devices)
  -- Micro-batches go through all chunks of a device in groups of as many as there are devices.
  return math.floor((task.micro - 1) / devices) * 1e6 + task.stage * 1e3 + task.micro
end

local rules = {
  gpipe = function(forward, backward, forwards_left)
    if forwards_left then return forward end
    return backward
  end,
  ["1f1b"] = function(forward, backward) return backward or forward end,
}
rules.interleaved = rules["1f1b"]

local function new_state(stages, micro)
  local state = { next_forward = {}, next_backward = {}, done_at = {}, backward_at = {} }
  for s = 1, stages do
    state.next_forward[s], state.next_backward[s] = 1, 1
    state.done_at[s], state.backward_at[s] = {}, {}
    for m = 1, micro do state.done_at[s][m], state.backward_at[s][m] = never, never end
  end
  state.left = 2 * stages * micro
  return state
end

-- The forward and the backward that this device could start at `now`.
local function ready(state, device, now, n)
  local forward, backward, forwards_left
  for s = device, n.stages, n.devices do
    local f, b = state.next_forward[s], state.next_backward[s]
    if f <= n.micro then
      forwards_left = true
      local before = s == 1 or state.done_at[s - 1][f] <= now
      if before and f - b < n.limit(s, n.stages) then
        local task = { stage = s, micro = f, kind = "forward" }
        if not forward or forward_key(task, n.devices) < forward_key(forward, n.devices) then
          forward = task
        end
      end
    end
    if b <= n.micro and state.done_at[s][b] <= now
      and (s == n.stages or state.backward_at[s + 1][b] <= now)
      and (not backward or b < backward.micro or (b == backward.micro and s > backward.stage)) then
      backward = { stage = s, micro = b, kind = "backward" }
    end
  end
  return forward, backward, forwards_left
end

local function finish(state, task, now)
  if task.kind == "forward" then
    state.next_forward[task.stage] = task.micro + 1
    state.done_at[task.stage][task.micro] = now + 1
  else
    state.next_backward[task.stage] = task.micro + 1
    state.backward_at[task.stage][task.micro] = now + 1
  end
  state.left = state.left - 1
end

--- The order of a step's tasks: {stage=, micro=, kind="forward"|"backward"}, all from 1. Stage s runs
--- on device (s - 1) % devices + 1.
---@param kind string "gpipe", "1f1b" or "interleaved"
---@param stages integer
---@param micro integer
---@param devices? integer groups of devices; fewer than stages where they are interleaved
---@return {stage: integer, micro: integer, kind: string}[]
function schedule.order(kind, stages, micro, devices)
  local n = { stages = stages, micro = micro, devices = devices or stages, limit = limits[kind] }
  local state, rule, order = new_state(stages, micro), rules[kind], {}
  local now = 0
  while state.left > 0 do
    local taken = {}
    for device = 1, n.devices do
      local task = rule(ready(state, device, now, n))
      if task then taken[#taken + 1] = task end
    end
    for _, task in ipairs(taken) do
      finish(state, task, now)
      order[#order + 1] = task
    end
    now = now + 1
    assert(now <= 4 * stages * micro + 4, "schedule makes no progress")
  end
  return order
end

return schedule
