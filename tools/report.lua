-- report.lua: busted's output for one spec file: details of what failed, and the counts for test.lua.
--
-- Invariant: the counts are written only at the suite's end, so a crash leaves none, which test.lua
-- counts as a failure. To show more of a failure: `show`.
local busted = require "busted"

---Prints one failed, errored or pending element.
---@param word string "FAIL", "ERROR" or "pending"
---@param item table as busted's base handler keeps them
local function show(word, item)
  local trace = item.element and item.element.trace or item.trace or {}
  local where = trace.short_src and (trace.short_src .. ":" .. tostring(trace.currentline)) or "?"
  local message = item.message
  if type(message) ~= "string" and message ~= nil then message = require("pl.pretty").write(message) end
  io.write(("  %s %s (%s)\n"):format(word, item.name or "?", where))
  if word == "pending" and message == nil then return end
  io.write("    ", (tostring(message):gsub("\n", "\n    ")), "\n")
  local stack = word == "ERROR" and item.trace and item.trace.traceback
  if stack then io.write("    ", (stack:gsub("^\n", ""):gsub("\n", "\n    ")), "\n") end
end

return function()
  local handler = require "busted.outputHandlers.base"()

  handler.suiteEnd = function()
    for _, item in ipairs(handler.pendings) do show("pending", item) end
    for _, item in ipairs(handler.failures) do show("FAIL", item) end
    for _, item in ipairs(handler.errors) do show("ERROR", item) end
    io.stdout:flush()
    local file = assert(io.open(assert(os.getenv "ORRERY_SPEC_COUNTS"), "w"))
    file:write(("%d %d %d\n"):format(handler.successesCount,
      handler.failuresCount + handler.errorsCount, handler.pendingsCount))
    file:close()
    return nil, true
  end

  busted.subscribe({ "suite", "end" }, handler.suiteEnd)
  return handler
end
