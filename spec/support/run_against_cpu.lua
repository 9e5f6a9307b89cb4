-- Rows of spec/ops.lua on a CUDA device against the CPU, in f32 and bf16, in a process of its own (under
-- compute-sanitizer): the arguments name them. Prints the worst of each.
-- Invariant: ends with status 0 only if every row was there and within its tolerance.
local orrery = require "orrery"
local rows = require "spec.ops"
local against = require "spec.support.against_cpu"

local by_name, failed = {}, #arg == 0
for _, row in ipairs(rows) do by_name[row.name] = row end
for _, name in ipairs(arg) do
  local row = by_name[name]
  if not row then io.write("no op ", name, "\n") end
  failed = failed or not row
  for _, dtype in ipairs { "f32", "bf16" } do
    if row and against.takes(row, dtype) then
      local problems, worst = against.check(row, dtype)
      io.write(("%-28s %-4s %.2e\n"):format(name, dtype, worst.error))
      for _, text in ipairs(problems) do io.write("  ", text, "\n") end
      failed = failed or #problems > 0
    end
  end
end
orrery.synchronize()
if not failed then io.write "every row is within its tolerance\n" end
os.exit(failed and 1 or 0)
