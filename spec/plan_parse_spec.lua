-- plan_parse_spec.lua: the plan language: text to tree to stages and back, and every refusal.
-- Invariant: a refusal is checked with its column, so that the caret stays under what is wrong.
-- To add a case: a row in the table it belongs to.
local core = require "orrery.core"
local plan = core.plan

local CPU8 = { cpu = 8, cuda = 0, cpu_why = "ORRERY_CPU_DEVICES=8" }

--- A plan's stages in one line: "data 2 x tensor 2: 0 1 2 3 | ...", with counts and patterns.
---@param stages table[]
---@return string
local function shape(stages)
  local list = {}
  for i, stage in ipairs(stages) do
    local axes = {}
    for j, axis in ipairs(stage.axes) do axes[j] = axis.name .. " " .. axis.size end
    local share = stage.count or stage.pattern
    list[i] = table.concat(axes, " x ") .. ": " .. table.concat(stage.devices, " ")
      .. (share and (" (" .. share .. ")") or "")
  end
  return table.concat(list, " | ")
end

--- The error of a call that must fail.
local function failure(f, ...)
  local ok, message = pcall(f, ...)
  assert.is_false(ok)
  return message
end

describe("the plan language", function()
  local canonical = {
    { "data<0,1>", "data<0,1>" },
    { " data < 0 ,\t1 > ", "data<0,1>" },
    { "data<0..3>", "data<0..3>" },
    { "data<0,1,2>", "data<0..2>" },
    { "data<0..1>", "data<0,1>" },
    { "data<3,2,1,0>", "data<3,2,1,0>" },
    { "data<cpu:0..2,cuda:0,7>", "data<cpu:0..2,cuda:0,7>" },
    { "data<'cpu:1',\"0000:3b:00.0\", 'GPU-5a2c'>", 'data<cpu:1,"0000:3b:00.0","GPU-5a2c">' },
    { "model<0: 3, 1: 5>", "model<0: 3, 1: 5>" },
    { "model<cpu:0: 3, cpu:1:  5>", "model<cpu:0: 3, cpu:1: 5>" },
    { "model<0: conv*, 1: fc*>", "model<0: conv*, 1: fc*>" },
    { 'model<0: "3", 1: "a b">', 'model<0: "3", 1: "a b">' },
    { "model<0,1,2: 4>", "model<0,1, 2: 4>" },
    { "data<tensor<0,1>,tensor<2,3>>", "data<tensor<0,1>, tensor<2,3>>" },
    { "data<0..7;zero=3>", "data<0..7; zero=3>" },
    { "data<0,1; sync_bn=false, bucket=25MiB>", "data<0,1; bucket=25MiB, sync_bn=false>" },
    { "data<0,1; bucket=26214400>", "data<0,1; bucket=25MiB>" },
    { "data<0,1; bucket=1000>", "data<0,1; bucket=1000>" },
    { "data<0; micro=4>", "data<0; micro=4>" },
    { 'model<0,1; micro=8, schedule=1f1b, chunks=2, recompute="stage", balance=time>',
      "model<0,1; micro=8, schedule=1f1b, chunks=2, recompute=stage, balance=time>" },
    { "tensor<0,1; sequence=true>", "tensor<0,1; sequence=true>" },
  }
  for _, case in ipairs(canonical) do
    it("writes " .. case[1] .. " canonically", function()
      local p = plan.parse(case[1])
      assert.equal(case[2], p:text())
      assert.equal(case[2], tostring(p))
      assert.equal(case[2], plan.parse(case[2]):text())
      assert.is_true(p == plan.parse(case[2]))
    end)
  end

  local stages = {
    { "data<0,1>", "data 2: 0 1" },
    { "data<data<0,1>, data<2,3>>", "data 4: 0 1 2 3" },
    { "data<tensor<0,1>, tensor<2,3>>", "data 2 x tensor 2: 0 1 2 3" },
    { "tensor<data<0,1,2>, data<3,4,5>>", "tensor 2 x data 3: 0 1 2 3 4 5" },
    { "model<tensor<0,1>: 3, tensor<2,3,4>>", "tensor 2: 0 1 (3) | tensor 3: 2 3 4" },
    { "data<model<0,1>, model<2,3>>", "data 2: 0 2 | data 2: 1 3" },
    { "data<model<0: 2, 1: 3>, model<2,3>>", "data 2: 0 2 (2) | data 2: 1 3 (3)" },
    { "model<model<0,1>, 2>", ": 0 | : 1 | : 2" },
    { "model<0: a*, 1: b*>", ": 0 (a*) | : 1 (b*)" },
    { "data<model<data<0,1>, data<2,3>>, model<data<4,5>, data<6,7>>>",
      "data 4: 0 1 4 5 | data 4: 2 3 6 7" },
    { "data<data<tensor<0,1>, tensor<2,3>>, data<tensor<4,5>, tensor<6,7>>>",
      "data 4 x tensor 2: 0 1 2 3 4 5 6 7" },
  }
  for _, case in ipairs(stages) do
    it("pulls " .. case[1] .. " into stages", function()
      assert.equal(case[2], shape(plan.parse(case[1]):stages()))
    end)
  end

  local refusals = {
    { "data<0,0>", 8, "device 0 stands twice" },
    { "data<0..3,cpu:1,2>", 17, "device 2 stands twice" },
    { "data<tensor<0,1>, tensor<1,2>>", 26, "device 1 stands twice" },
    { "data<>", 6, "names no device" },
    { "data<;zero=1>", 6, "names no device" },
    { "data<0", 7, "expected '>' or ','" },
    { "data<0,1", 9, "expected '>' or ','" },
    { "data<0,", 8, "expected a device" },
    { "data<0,1>>", 10, "ended before" },
    { "data<0,1> net", 11, "ended before" },
    { "data", 1, "begins with" },
    { "", 1, "begins with" },
    { "0", 1, "data<0>" },
    { "pipeline<0,1>", 1, "begins with" },
    { "data<n>", 6, "parallel.data(n)" },
    { "data<0,-1>", 8, "expected a device" },
    { "data<0.5>", 7, "expected '>' or ','" },
    { "data<3..0>", 6, "runs down" },
    { "data<70000>", 6, "at most 65535" },
    { "data<0..2000>", 6, "at most 1024 devices" },
    { "data<cpu: 0>", 10, "a device number" },
    { 'data<"nonsense">', 6, "PCI bus id" },
    { 'data<"0000:3b', 6, "not closed" },
    { "data<0: 3, 1: 4>", 7, "belongs to model" },
    { "model<0:3>", 9, "a blank stands" },
    { "model<0: >", 10, "expected a count" },
    { "model<0: 0>", 10, "at least one layer" },
    { "model<0..3: 2>", 11, "not a range" },
    { "model<model<0,1>: 4, 2>", 17, "stages inside" },
    { "data<0,1; foo=1>", 11, "it has: zero, bucket, sync_bn, micro" },
    { "tensor<0,1; zero=3>", 13, "it has: sequence" },
    { "model<0,1; zero=3>", 12, "micro, schedule, chunks, recompute, balance" },
    { "data<0,1; zero=4>", 16, "1, 2 or 3" },
    { "data<0,1; zero=1, zero=1>", 19, "given twice" },
    { "data<0,1; zero>", 15, "expected '='" },
    { "data<0,1; bucket=25MB>", 18, "25MiB" },
    { "data<0,1; sync_bn=maybe>", 19, "true or false" },
    { "data<0,1; micro=0>", 17, "micro%-batches" },
    { "model<0,1; schedule=fast>", 21, "gpipe, 1f1b or interleaved" },
    { "data<data<0,1>, 2>", 17, "data<0,1> is data 2 and 2 is one device" },
    { "data<tensor<0,1>, tensor<2,3,4>>", 19, "is tensor 2 and tensor<2..4> is tensor 3" },
    { "data<model<0,1>, 2>", 18, "is 2 stages and 2 is 1 stage" },
    { "tensor<data<tensor<0>>>", 1, "three axes" },
    { "data<model<0: 2, 1: 3>, model<2: 3, 3: 2>>", 25, "different layers" },
    { "data<model<0,1; micro=2>, model<2,3; micro=4>>", 38, "another value" },
    { "data<0,1>\0", 10, "zero byte" },
    { string.rep("data<", 33) .. "0" .. string.rep(">", 33), 161, "deeper than 32" },
  }
  for _, case in ipairs(refusals) do
    it("refuses " .. case[1]:gsub("%z", "\\0"):sub(1, 60), function()
      local message = failure(plan.parse, case[1])
      local words, shown, caret = message:match("^plan: (.-)\n  (.-)\n  ( *)%^$")
      assert.is_string(words, message)
      assert.matches("at column " .. case[2] .. "$", words)
      assert.matches((case[3]:gsub("[%(%)%*%.]", "%%%0")), words)
      if case[2] <= 60 then
        assert.equal(case[2], #caret + 1)
        assert.equal(case[1]:gsub("%z.*", ""):sub(1, 60), shown:sub(1, #case[1]):sub(1, 60))
      end
    end)
  end

  it("puts the line before the column when the text has lines", function()
    local message = failure(plan.parse, "data<\n  0,\n  0>")
    assert.matches("line 3, column 3\n    0>\n    ^", message, 1, true)
  end)

  it("counts columns in characters", function()
    local message = failure(plan.parse, 'model<0: "ä"; x=1>')
    assert.matches("at column 15\n", message)
  end)

  it("takes the text behind a kind", function()
    assert.equal("data<0,1>", plan.parse("<0,1>", "data"):text())
    assert.matches("column 9", failure(plan.parse, "<0,1", "data"))
  end)

  it("names its kind, devices and options", function()
    local p = plan.parse "data<model<0,cpu:1; micro=4>, model<2,3>; zero=2, bucket=1MiB, sync_bn=false>"
    assert.equal("data", p:kind())
    assert.same({ "0", "cpu:1", "2", "3" }, p:devices())
    assert.same({ data = { zero = 2, bucket = 1048576, sync_bn = false }, model = { micro = 4 },
      micro = 4 }, p:options())
    assert.same({ model = { recompute = true } }, plan.parse("model<0; recompute=true>"):options())
  end)

  it("makes plans from children", function()
    local t = plan.make("tensor", { 0, 1 })
    assert.equal("data<0,1>", plan.make("data", { 0, 1 }):text())
    assert.equal("data<tensor<0,1>, tensor<2,3>; zero=3>",
      plan.make("data", { t, "tensor<2,3>" }, { zero = 3 }):text())
    assert.equal('data<cpu:1,"0000:3b:00.0">', plan.make("data", { "cpu:1", "0000:3b:00.0" }):text())
    assert.equal("model<0: 3, 1: conv*; micro=8, recompute=true>",
      plan.make("model", { 0, 1 }, { layers = { 3, "conv*" }, micro = 8, recompute = true }):text())
    assert.equal("data<0,1; bucket=25MiB>", plan.make("data", { 0, 1 }, { bucket = "25MiB" }):text())
    assert.matches("names no device", failure(plan.make, "data", {}))
    assert.matches("stands twice", failure(plan.make, "data", { 0, 0 }))
    assert.matches("no option 'foo'", failure(plan.make, "data", { 0 }, { foo = 1, zoo = 2 }))
    assert.matches("integers from 0", failure(plan.make, "data", { 0.5 }))
    assert.matches("integers from 0", failure(plan.make, "data", { -1 }))
    assert.matches("child 1 of data is a table", failure(plan.make, "data", { {} }))
    assert.matches("layers has 1 entries", failure(plan.make, "model", { 0, 1 }, { layers = { 1 } }))
  end)

  it("resolves bare numbers to the kind that is visible", function()
    local p = plan.parse "data<0,1>"
    assert.equal("data 2: cpu:0 cpu:1", shape(p:resolve(CPU8)))
    assert.equal("data 2: cuda:0 cuda:1", shape(p:resolve { cpu = 8, cuda = 2 }))
    assert.equal("data 2: 0 1", shape(p:stages()))
    local pipe = plan.parse "data<model<0,1>, model<2,3>>"
    assert.equal("data 2: cpu:0 cpu:2 | data 2: cpu:1 cpu:3", shape(pipe:resolve(CPU8)))
  end)

  it("says how many devices are visible, and why", function()
    local p = plan.parse "data<0,9>"
    local message = failure(p.resolve, p, CPU8)
    assert.matches("no device 9; 8 cpu devices are visible: cpu:0 to cpu:7 (ORRERY_CPU_DEVICES=8)",
      message, 1, true)
    assert.matches("column 8\n", message)
    p = plan.parse "data<cuda:0>"
    assert.matches("0 cuda devices are visible", failure(p.resolve, p, CPU8))
    p = plan.parse "data<0,cpu:0>"
    assert.matches("cpu:0 stands twice", failure(p.resolve, p, CPU8))
    p = plan.parse "data<cpu:0,cuda:0>"
    assert.matches("one kind", failure(p.resolve, p, { cpu = 1, cuda = 1 }))
    p = plan.parse 'data<"0000:3b:00.0">'
    assert.matches("no device answers", failure(p.resolve, p, { cpu = 1, cuda = 1 }))
  end)

  it("keeps its footing under random damage", function()
    local seed, alphabet = 7, "data<>model tensor0123..,:;=\"'*\0cpu:\255"
    local function random(n) seed = (seed * 16807) % 2147483647 return seed % n + 1 end
    for _ = 1, 3000 do
      local text = canonical[random(#canonical)][1]
      for _ = 1, random(4) do
        local at, c = random(#text + 1), random(#alphabet)
        text = text:sub(1, at - 1) .. alphabet:sub(c, c) .. text:sub(at + random(3) - 1)
      end
      local ok, p = pcall(plan.parse, text)
      if ok then assert.equal(p:text(), plan.parse(p:text()):text())
      else assert.matches("^plan: .+ column %d+\n.*%^$", p) end
    end
  end)
end)
