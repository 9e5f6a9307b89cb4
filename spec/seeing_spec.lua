-- What shows a plan at work: orrery.timeline and parallel.picture.
-- To add a view: a describe of its own, with what it must say and what it must leave alone.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

-- A strict reader of JSON: fails at the first byte that does not belong.
local function parse(text)
  local at = 1
  local value
  local function skip() at = text:find("[^ \n\t\r]", at) or #text + 1 end
  local function take(pattern)
    skip()
    local first, last, found = text:find("^(" .. pattern .. ")", at)
    assert(first, ("byte %d: no %s in %q"):format(at, pattern, text:sub(at, at + 20)))
    at = last + 1
    return found
  end
  local function is(c)
    skip()
    return text:sub(at, at) == c
  end
  local function string_value()
    local s = take '"[^"\\%c]*"' -- nothing here is escaped
    return s:sub(2, -2)
  end
  local function list(open, close, entry)
    take(open)
    if is(close:sub(-1)) then return take(close) end
    repeat entry() until not (is "," and take ",")
    take(close)
  end
  function value()
    local result = {}
    if is "{" then
      list("{", "}", function()
        local key = string_value()
        take ":"
        assert(result[key] == nil, "a key comes twice")
        result[key] = value()
      end)
    elseif is "[" then
      list("%[", "%]", function() result[#result + 1] = value() end)
    elseif is '"' then
      return string_value()
    else
      return assert(tonumber(take "%-?%d+%.?%d*"))
    end
    return result
  end
  local result = value()
  skip()
  assert(at == #text + 1, "more follows")
  return result
end

-- The trace of f: {events (ph X), names of rows by tid}.
local function timeline(f)
  local path = os.tmpname()
  local n = orrery.timeline(f, path)
  local file = assert(io.open(path))
  local trace = parse(file:read "*a")
  file:close()
  os.remove(path)
  local events, rows = {}, {}
  for _, e in ipairs(trace.traceEvents) do
    if e.ph == "X" then events[#events + 1] = e end
    if e.name == "thread_name" then rows[e.tid] = e.args.name end
  end
  assert.equal(n, #events)
  assert.equal(0, trace.otherData.lost)
  return events, rows
end

describe("orrery.timeline", function()
  it("says of one device what ran, when", function()
    local a = orrery.randn(50, 50)
    local events, rows = timeline(function() a:matmul(a):exp():sum():item() end)
    local names = {}
    for k, e in ipairs(events) do
      names[e.name] = (names[e.name] or 0) + 1
      assert.equal("cpu compute", rows[e.tid])
      assert.is_true(e.ts >= 0 and e.dur >= 0)
      if k > 1 then assert.is_true(e.ts + 1e-3 >= events[k - 1].ts + events[k - 1].dur) end
    end
    assert.equal(1, names.matmul)
    assert.equal(1, names.exp)
  end)

  it("has a row a device and queue, with stages, micro-batches and passes", function()
    local plan = parallel "model<data<0,1>, data<2,3>; micro=3, schedule=1f1b>"
    local net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())
    local x, y = orrery.randn(12, 8), orrery.randint(1, 4, 12)
    plan(net, x)
    local opt = optim.SGD(net, { lr = 0.1 })
    local function step()
      plan:step(net, nn.cross_entropy, x, y)
      opt:step()
    end
    step()
    local events, rows = timeline(step)
    local seen, micros, reduced = {}, {}, 0
    for _, e in ipairs(events) do
      local row, args = rows[e.tid], e.args
      seen[row] = true
      if e.name == "linear" then
        micros[("%s stage %d micro %d"):format(row, args.stage, args.micro)] = true
        assert.equal("forward", args.pass)
      elseif e.name == "relu" then
        assert.equal(tostring(net[2]._stage.index), tostring(args.stage))
      elseif e.name == "unary_grad" then
        assert.equal("backward", args.pass)
      elseif e.name == "sgd_step" then
        assert.is_nil(args.stage)
        assert.is_nil(args.pass)
      end
      if row:find "communication" then
        assert.is_true(e.name == "all_reduce" or e.name == "send_recv", e.name)
        assert.equal("communication", e.cat)
        if e.name == "all_reduce" then reduced = reduced + 1 end
      end
    end
    assert.is_true(reduced >= 4) -- the gradients of both stages, on both devices of each
    for k = 0, 3 do
      assert.is_true(seen[("cpu:%d compute"):format(k)] and seen[("cpu:%d communication"):format(k)])
      for m = 1, 3 do
        assert.is_true(micros[("cpu:%d compute stage %d micro %d"):format(k, k < 2 and 1 or 2, m)])
      end
    end
  end)

  it("shows stages working at the same time as one order of each device", function()
    local plan = parallel "model<0,1; micro=4, schedule=1f1b>"
    local net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    local x = orrery.randn(64, 64)
    plan(net, x)
    local events, rows = timeline(function() plan:step(net, nn.mse_loss, x, x) end)
    local last = {}
    for _, e in ipairs(events) do
      if e.name == "linear" then
        local row = rows[e.tid]
        assert.is_true(e.args.micro > (last[row] or 0), "micro-batches of one stage come in order")
        last[row] = e.args.micro
      end
    end
    assert.same({ ["cpu:0 compute"] = 4, ["cpu:1 compute"] = 4 }, last)
  end)

  it("writes nothing where the function fails or the file cannot be", function()
    local path = os.tmpname()
    os.remove(path)
    local ok, message = pcall(orrery.timeline, function() error "inside" end, path)
    assert.is_false(ok)
    assert.truthy(tostring(message):find "inside")
    assert.is_nil(io.open(path))
    behave.raises(function()
      local n = orrery.timeline(function() end, "no such folder/x.json")
      return n
    end, "timeline", "no such folder")
    behave.raises(function()
      local n = orrery.timeline("x.json")
      return n
    end, "timeline", "function")
    local events = timeline(function() local _ = orrery.ones(2) + 1 end)
    assert.is_true(#events >= 1)
  end)
end)

describe("parallel.picture", function()
  local function make()
    orrery.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
  end

  it("shows what each device holds, and what moves", function()
    local net, x = make(), orrery.randn(7, 6)
    parallel "model<data<0,1>: 3, data<2,3>: 2>" (net)
    local picture = parallel.picture(net, x)
    assert.same({ "cpu:0", "cpu:1", "cpu:2", "cpu:3" }, picture.devices)
    assert.equal(picture.text, tostring(picture))
    for _, line in ipairs { "1  1: Linear  %(stage 1%)", "weight %(8, 6%) +8 x 6 +8 x 6 +%. +%. +replicate",
      "output %(7, 8%) +4 x 8 +3 x 8 +%. +%. +shard%(1%)", "5  5: Linear  %(stage 2%)",
      "weight %(4, 8%) +%. +%. +4 x 8 +4 x 8", "output %(7, 4%) +%. +%. +4 x 4 +3 x 4",
      "moves +%d all_reduce over data", "moves +1 send_recv over device 224 B",
      "all_reduce over data .* in backward" } do
      assert.truthy(picture.text:find(line), line .. " in\n" .. picture.text)
    end
  end)

  it("shows the splits of tensor<>", function()
    local net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), orrery.randn(4, 6)
    net[1]:split "out"
    net[3]:split "in"
    parallel "tensor<0..2>" (net, x)
    local text = parallel.picture(net, x).text
    assert.truthy(text:find "weight %(8, 6%) +3 x 6 +3 x 6 +2 x 6 +shard%(1%)", text)
    assert.truthy(text:find "weight %(6, 8%) +6 x 3 +6 x 3 +6 x 2 +shard%(2%)", text)
    assert.truthy(text:find "output %(4, 8%) +4 x 3 +4 x 3 +4 x 2 +shard%(2%)", text)
    assert.truthy(text:find "1 all_reduce over tensor 96 B", text)
  end)

  it("writes an SVG whose marks are closed and whose words are escaped", function()
    local net, path = make(), os.tmpname()
    parallel "data<0,1>" (net)
    local picture = parallel.picture(net, orrery.randn(4, 6), { file = path })
    local file = assert(io.open(path))
    local svg = file:read "*a"
    file:close()
    os.remove(path)
    assert.equal(picture.svg, svg)
    assert.truthy(svg:find "^<svg xmlns=" and svg:find "</svg>\n$")
    assert.truthy(svg:find("data&lt;0,1&gt;", 1, true))
    local open = {}
    for slash, name, rest in svg:gmatch "<(/?)(%a+)([^<>]*)>" do
      if slash == "/" then assert.equal(table.remove(open), name)
      elseif rest:sub(-1) ~= "/" then open[#open + 1] = name end
    end
    assert.equal(0, #open)
    assert.equal(0, select(2, svg:gsub("<[^%a/]", "")))
  end)

  it("changes neither gradients nor statistics nor random numbers, and places what waits", function()
    local function losses(look)
      local net, x, y = make(), orrery.randn(8, 6), orrery.randint(1, 4, 8)
      local plan, list = parallel "model<0,1; micro=2>", {}
      plan(net)
      if look then parallel.picture(net, x) else net._pending(x) end
      for k = 1, 3 do
        list[k] = plan:step(net, nn.cross_entropy, x, y):item()
        if look then assert.truthy(parallel.picture(net, x).text:find "stage 2") end
      end
      return { losses = list, gradients = behave.gradients(net), mean = behave.list(net[2].running_mean) }
    end
    local want, got = losses(false), losses(true)
    assert.same(want.losses, got.losses)
    assert.same(want.mean, got.mean)
    behave.same_gradients(want.gradients, got.gradients, 0)
  end)

  it("says what is missing", function()
    behave.raises(function()
      local picture = parallel.picture(make())
      return picture
    end, "picture", "not placed")
    behave.raises(function()
      local net = make()
      parallel "model<0,1>" (net)
      local picture = parallel.picture(net)
      return picture
    end, "picture", "example batch")
  end)
end)
