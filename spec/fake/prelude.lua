-- What a script that runs on the fakes begins with to count their calls and have them fail: `text`, which
-- makes a local `fake` of the loaded fakes; and `declared`, what it declares.
-- Invariant: the plug-in is that of the build under test.
-- To add a function of the fakes: a line of `declared`.
local plugin = os.getenv "ORRERY_BUILD" .. "/luajit/orrery/cuda.so"

local prelude = {
  declared = [[
    long orr_fake_calls(void);
    long orr_fake_called(const char *name);
    void orr_fake_fail_after(long n, int kind);
    void orr_fake_fail_at(const char *name, long n, int kind);
    const char *orr_fake_failed_call(void);
    const char *orr_fake_report(void);
  ]],
}

prelude.text = ([[
  local ffi = require "ffi"
  ffi.cdef [=[%s]=]
  local fake = ffi.load "%s"
]]):format(prelude.declared, plugin)

return prelude
