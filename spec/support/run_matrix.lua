-- Placements and in-place forms of a third of the rows, for a process of its own (another engine).
-- Invariant: ends with status 0 only if every check passed. Its argument says which third.
local orrery = require "orrery"
local rows = require "spec.ops"
local matrix = require "spec.support.matrix"

local third = tonumber(arg[1]) or 0
local problems = 0
for k, row in ipairs(rows) do
  if k % 3 == third % 3 then
    for _, check in ipairs { matrix.check_placements, matrix.check_in_place } do
      local ok, message = pcall(matrix.report, check(row, { rest = os.getenv "ORRERY_SANITIZER" and 2 or 8 }))
      if not ok then
        problems = problems + 1
        io.write(message, "\n")
      end
    end
  end
end
orrery.synchronize()
os.exit(problems == 0 and 0 or 1)
