--- Interleaved repetitions, and which of them count.
-- Invariant: in a repetition every side runs once, in turn, between controls of the machine; it counts
-- where every control in and around it scaled above `bar`. Where too few count by the time limit, the
-- result is marked noisy and holds repetitions that were not chosen.
-- To add a statistic: a function here.
local measure = {}

measure.bar = 1.9 -- what two threads of arithmetic must do, in units of one

---@param list number[]
---@return number
function measure.median(list)
  local sorted = {}
  for k, value in ipairs(list) do sorted[k] = value end
  table.sort(sorted)
  local middle = math.floor((#sorted + 1) / 2)
  if #sorted % 2 == 1 then return sorted[middle] end
  return (sorted[middle] + sorted[middle + 1]) / 2
end

-- How often a side runs in a repetition, so that it takes `least` seconds.
local function calibrate(side, least)
  if side.n then
    side.time(side.n)
    return side.n
  end
  local n = 1
  while true do
    local seconds = side.time(n)
    if seconds >= least then return n end
    local next_n = math.ceil(n * math.min(100, 1.1 * least / math.max(seconds, 1e-7)))
    n = math.max(next_n, n + 1)
  end
end

-- One repetition: seconds a run of each side, or nil where a control fell short.
local function repetition(sides, counts, control)
  if control and control() < measure.bar then return nil end
  local seconds = {}
  for k, side in ipairs(sides) do
    seconds[k] = side.time(counts[k]) / counts[k]
    if control and control() < measure.bar then return nil end
  end
  return seconds
end

--- Measures the sides in turn.
---@param sides {time: (fun(n: integer): number), n?: integer}[] time(n): seconds of n runs
---@param options {repetitions: integer, least: number, limit: number, clock: (fun(): number),
---  control?: fun(): number} least and limit in seconds: of a side's run, of the whole
---@return {seconds: number[][], used: integer, dropped: integer, noisy: boolean} seconds[side][k]
function measure.interleave(sides, options)
  local counts, result = {}, { seconds = {}, used = 0, dropped = 0, noisy = false }
  for k, side in ipairs(sides) do
    counts[k], result.seconds[k] = calibrate(side, options.least), {}
  end
  local function keep(seconds)
    result.used = result.used + 1
    for k, value in ipairs(seconds) do result.seconds[k][result.used] = value end
  end
  local least_used, stop = math.min(3, options.repetitions), options.clock() + options.limit
  while result.used < options.repetitions and options.clock() < stop do
    local seconds = repetition(sides, counts, options.control)
    if seconds then keep(seconds) else result.dropped = result.dropped + 1 end
  end
  if result.used < least_used then
    result.noisy, result.used = true, 0
    while result.used < least_used do keep(repetition(sides, counts)) end
  end
  return result
end

--- How many times faster side a was than side b: the median of the ratios of each repetition.
---@return number
function measure.ratio(result, a, b)
  local ratios = {}
  for k = 1, result.used do ratios[k] = result.seconds[b][k] / result.seconds[a][k] end
  return measure.median(ratios)
end

return measure
