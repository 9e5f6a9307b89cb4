-- Every behaviour, 1 to 45, is named by a spec or stands here with the reason why none asserts it (all
-- of it) yet.
-- Invariant: a number is named where a describe or an it begins with "behaviour N" or with "behaviours
-- N to M"; a reason that a spec has made void fails.
-- To add a spec of a behaviour: name it so, and take its reason out.
local root = os.getenv "ORRERY_ROOT" or "."

-- What no spec asserts at all.
local missing = {
  [40] = "checkpoint files: saving is atomic",
  [42] = "several processes that disagree on a collective",
  [43] = "the advisor: predicted against measured bytes",
  [44] = "the advisor: recommendations",
}

-- What a spec asserts in part, and what is left.
local partly = {
  [39] = "checkpoint files: states held in memory are asserted",
  [41] = "several processes: one process, its devices and the REPL are asserted",
}

local function named()
  local numbers = {}
  local command = "cd '%s' && grep -hE '^ *(describe|it)\\(' spec/*_spec.lua spec/fake/*_spec.lua"
  local pipe = assert(io.popen(command:format(root)))
  for line in pipe:lines() do
    local first = line:match '^ *[a-z]+%(+"behaviour (%d+)%f[%D]'
    if first then numbers[tonumber(first)] = true end
    local from, to = line:match '^ *[a-z]+%(+"behaviours (%d+) to (%d+)%f[%D]'
    if from then
      for k = tonumber(from), tonumber(to) do numbers[k] = true end
    end
  end
  pipe:close()
  return numbers
end

describe("the list of behaviours", function()
  it("has each of the 45 in a spec or with a reason", function()
    local numbers, problems = named(), {}
    for k = 1, 45 do
      if not numbers[k] and not missing[k] then problems[#problems + 1] = k .. ": no spec and no reason" end
      if numbers[k] and missing[k] then problems[#problems + 1] = k .. ": a spec and a reason" end
      if partly[k] and not numbers[k] then problems[#problems + 1] = k .. ": no spec of a part" end
    end
    for k in pairs(numbers) do
      if k < 1 or k > 45 then problems[#problems + 1] = k .. ": no such behaviour" end
    end
    assert.same({}, problems)
  end)
end)
