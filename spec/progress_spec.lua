-- The progress bar: values pass through, what is drawn, and when.
local progress = require "orrery.progress"

-- A bar that writes into a list, under a clock that the loop moves.
local function recorder(options)
  local written, time = {}, { now = 100 }
  options.write = function(text) written[#written + 1] = text end
  options.clock = function() return time.now end
  if options.tty == nil then options.tty = false end
  return options, written, time
end

local function count_to(n)
  local i = 0
  return function()
    i = i + 1
    if i <= n then return i, i * 10 end
  end
end

describe("orrery.progress", function()
  it("passes every value through and ends with one full line", function()
    local options, written = recorder { label = "epoch 1", total = 3 }
    local seen = {}
    for x, y in progress(count_to(3), options) do seen[#seen + 1] = x + y end
    assert.same({ 11, 22, 33 }, seen)
    assert.equal(1, #written)
    assert.equal("epoch 1  100%  3/3  in 0:00\n", written[1])
  end)

  it("writes a line every few seconds away from a terminal", function()
    local options, written, time = recorder { total = 20 }
    for _ in progress(count_to(20), options) do time.now = time.now + 1 end
    assert.same({
      "25%  5/20  1.00/s  ETA 0:15", "50%  10/20  1.00/s  ETA 0:10", "75%  15/20  1.00/s  ETA 0:05",
      "100%  20/20  1.00/s  ETA 0:00", "100%  20/20  1.00/s  in 0:20",
    }, (function()
      local lines = {}
      for i, text in ipairs(written) do lines[i] = text:gsub("^ +", ""):gsub("\n$", "") end
      return lines
    end)())
  end)

  it("redraws one line at most ten times a second on a terminal", function()
    local options, written, time = recorder { tty = true, total = 100, label = "e" }
    for _ in progress(count_to(100), options) do time.now = time.now + 0.01 end
    assert.is_true(#written >= 9 and #written <= 12, #written .. " redraws in a second")
    for i, text in ipairs(written) do
      assert.equal("\re", text:sub(1, 2))
      assert.equal(i == #written, text:find("\n") ~= nil)
    end
    assert.truthy(written[#written]:find("[========================]  100/100", 1, true))
  end)

  it("stays within the terminal's width", function()
    local options, written = recorder { tty = true, width = 20, total = 1 }
    for _ in progress(count_to(1), options) do end
    for _, text in ipairs(written) do
      assert.is_true(#text:gsub("\27%[K", ""):gsub("[\r\n]", "") <= 19)
    end
  end)

  it("shows numbers and one-element tensors, read only when drawn", function()
    local items = 0
    local tensor = setmetatable({}, { __index = {
      item = function()
        items = items + 1
        return 0.123456
      end } })
    local options, written, time = recorder {
      show = function() return { loss = tensor, acc = 0.5, note = "x" } end }
    for _ in progress(count_to(50), options) do time.now = time.now + 0.2 end
    assert.truthy(written[1]:find("acc 0.5  loss 0.1235  note x\n$"))
    assert.equal(#written, items)
    assert.is_true(items <= 4)
  end)

  it("knows the length of objects and takes lists", function()
    local batches = setmetatable({ left = 2 }, {
      __index = { len = function() return 2 end },
      __call = function(self)
        self.left = self.left - 1
        if self.left >= 0 then return self.left end
      end })
    local options, written = recorder {}
    for _ in progress(batches, options) do end
    assert.truthy(written[1]:find("2/2", 1, true))
    options, written = recorder {}
    local seen = {}
    for item in progress({ "a", "b", "c" }, options) do seen[#seen + 1] = item end
    assert.same({ "a", "b", "c" }, seen)
    assert.truthy(written[1]:find("3/3", 1, true))
  end)

  it("hands the control value to a stateless iterator", function()
    local options = recorder {}
    local seen = {}
    local function upto3(_, last)
      last = last and last + 1 or 1
      if last <= 3 then return last end
    end
    for i in progress(upto3, options) do seen[#seen + 1] = i end
    assert.same({ 1, 2, 3 }, seen)
  end)

  it("writes a last line for an empty source, and raises for none at all", function()
    local options, written = recorder { label = "none" }
    for _ in progress(function() end, options) do end
    assert.same({ "none  0  in 0:00\n" }, written)
    local ok, message = pcall(progress, 5)
    assert.is_false(ok)
    assert.truthy(message:find("an iterator is needed, not a number", 1, true))
  end)

  it("lets the error of show reach the loop", function()
    local options = recorder { show = function() error("no loss yet", 0) end }
    local ok, message = pcall(function() for _ in progress(count_to(1), options) do end end)
    assert.is_false(ok)
    assert.equal("no loss yet", message)
  end)
end)
