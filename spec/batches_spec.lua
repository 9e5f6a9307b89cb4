-- Batches (order, epochs, read-ahead, plans, what is refused) and augmentation.
-- To add an option: an `it` that checks the samples that come, not only their number.
local orrery = require "orrery"
local data = orrery.data

local unpack = table.unpack or unpack

-- Calls f, which must raise at a line of this file with all of the words in the message.
local function assert_raises(f, ...)
  local ok, message = pcall(function() f() end)
  assert.is_false(ok)
  message = tostring(message)
  assert.truthy(message:find("batches_spec.lua:", 1, true), "not at this file's line: " .. message)
  for _, word in ipairs { ... } do
    assert.truthy(message:find(word, 1, true), ("no '%s' in: %s"):format(word, message))
  end
end

-- Samples 1 to n as (n), and their squares as (n, 1).
local function samples(n)
  local x, y = {}, {}
  for k = 1, n do x[k], y[k] = k, { k * k } end
  return orrery.tensor(x, { dtype = "i64" }), orrery.tensor(y)
end

-- The samples of one epoch in order, and the sizes of the batches.
local function one_epoch(batches)
  local seen, sizes = {}, {}
  for x, y in batches do
    sizes[#sizes + 1] = x:size(1)
    local values, squares = x:totable(), y:totable()
    for k, value in ipairs(values) do
      seen[#seen + 1] = value
      assert.equal(value * value, squares[k][1])
    end
  end
  return seen, sizes
end

local function sorted(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end

local function upto(n)
  local list = {}
  for k = 1, n do list[k] = k end
  return list
end

describe("data.batches", function()
  before_each(function() orrery.manual_seed(7) end)

  it("gives every sample once, in order, the last batch smaller (behaviour 12)", function()
    local batches = data.batches({ samples(13) }, { batch = 5 })
    local seen, sizes = one_epoch(batches)
    assert.same(upto(13), seen)
    assert.same({ 5, 5, 3 }, sizes)
    assert.equal(3, batches:len())
    assert.equal(13, batches.samples)
    local _, dropped = one_epoch(data.batches({ samples(13) }, { batch = 5, drop_last = true }))
    assert.same({ 5, 5 }, dropped)
    assert.equal(2, data.batches({ samples(13) }, { batch = 5, drop_last = true }):len())
    assert.equal(0, data.batches({ samples(3) }, { batch = 5, drop_last = true }):len())
    assert.same({}, (one_epoch(data.batches({ samples(3) }, { batch = 5, drop_last = true }))))
    assert.same({ 3 }, select(2, one_epoch(data.batches({ samples(3) }))))
  end)

  it("reshuffles each epoch by (seed, epoch) alone (behaviour 13)", function()
    local function make(epoch)
      return data.batches({ samples(50) }, { batch = 8, shuffle = true, epoch = epoch })
    end
    local batches = make()
    local first, second = one_epoch(batches), one_epoch(batches)
    assert.equal(2, batches.epoch)
    assert.same(upto(50), sorted(first))
    assert.same(upto(50), sorted(second))
    assert.not_same(upto(50), first)
    assert.not_same(first, second)
    -- Other draws, another object, and a start at epoch 2 change nothing; another seed does.
    orrery.rand(3)
    assert.same(first, (one_epoch(make())))
    assert.same(second, (one_epoch(make(2))))
    local other_size = data.batches({ samples(50) }, { batch = 3, shuffle = true })
    assert.same(first, (one_epoch(other_size)))
    orrery.manual_seed(8)
    assert.not_same(first, (one_epoch(make())))
    orrery.manual_seed(7)
    assert.same(first, (one_epoch(make())))
    local own = data.batches({ samples(50) }, { shuffle = true, seed = 8 })
    orrery.manual_seed(8)
    assert.same(one_epoch(own), (one_epoch(make())))
  end)

  it("begins a new epoch after a loop that was left early", function()
    local batches = data.batches({ samples(20) }, { batch = 4, shuffle = true })
    local taken = 0
    for x in batches do
      taken = taken + x:size(1)
      if taken == 8 then break end
    end
    assert.equal(8, taken)
    local after = one_epoch(batches)
    assert.equal(2, batches.epoch)
    assert.same(upto(20), sorted(after))
    assert.same(after, (one_epoch(data.batches({ samples(20) }, { shuffle = true, epoch = 2 }))))
  end)

  it("serves calls by hand and wrappers such as progress", function()
    local batches = data.batches({ samples(5) }, { batch = 3 })
    assert.same({ 1, 2, 3 }, (batches()):totable())
    assert.same({ 4, 5 }, (batches()):totable())
    assert.is_nil(batches())
    assert.same({ 1, 2, 3 }, (batches()):totable())
    local seen = {}
    for x in orrery.progress(batches, { write = function() end }) do seen[#seen + 1] = x:size(1) end
    assert.same({ 3, 2 }, seen)
  end)

  it("raises when two loops share one object", function()
    local batches = data.batches({ samples(20) }, { batch = 4 })
    assert_raises(function()
      for _ in batches do batches(nil, nil) end
    end, "two loops over one object")
  end)

  it("takes a tensor, nested tables and tables with names", function()
    local x, y = samples(4)
    for a, b in data.batches(x, { batch = 4 }) do
      assert.same({ 1, 2, 3, 4 }, a:totable())
      assert.is_nil(b)
    end
    for a, b in data.batches({ { x, deep = { y } }, y }, { batch = 3 }) do
      assert.same(a[1]:size(1), b:size(1))
      assert.same(a.deep[1]:totable(), b:totable())
    end
    local count = 0
    for both in data.batches({ image = x, label = y }, { batch = 2, shuffle = true }) do
      assert.equal(both.image:totable()[2] ^ 2, both.label:totable()[2][1])
      count = count + 1
    end
    assert.equal(2, count)
  end)

  it("applies a transform to each batch, and a plan after it", function()
    local calls = {}
    local plan = { place = function(_, value)
      calls[#calls + 1] = "place"
      return value
    end }
    local x, y = samples(4)
    local function transform(a, b)
      calls[#calls + 1] = "transform"
      return a + 100, b, a
    end
    for a, b, c in data.batches({ x, y }, { batch = 4, plan = plan, transform = transform }) do
      assert.same({ 101, 102, 103, 104 }, a:totable())
      assert.same({ { 1 }, { 4 }, { 9 }, { 16 } }, b:totable())
      assert.same({ 1, 2, 3, 4 }, c:totable())
    end
    assert.same({ "transform", "place", "place", "place" }, calls)
  end)

  it("refuses other values and lengths, at the caller's line (behaviour 10)", function()
    local x = samples(4)
    local y = samples(5)
    assert_raises(function() data.batches({ x, y }) end, "data[2] has 5 samples, the tensors before it 4")
    assert_raises(function() data.batches({ x, { "a", "b", "c", "d" } }) end, "data[2][1] must be a tensor",
      "got string")
    assert_raises(function() data.batches({ x, { 1, 2, 3, 4 } }) end, "got number")
    assert_raises(function() data.batches({}) end, "no tensor")
    assert_raises(function() data.batches(5) end, "got number")
    assert_raises(function() data.batches({ x }, { batch = 0 }) end, "batch must be a whole number")
    assert_raises(function() data.batches({ x }, { size = 3 }) end, "unknown option 'size'")
  end)

  it("places batches by a plan, the same samples on any number of devices (behaviours 12, 13)", function()
    local x, y = samples(13)
    local reference = one_epoch(data.batches({ x, y }, { batch = 5, shuffle = true }))
    for _, text in ipairs { "data<0>", "data<0,1>", "data<0..2>", "data<0..4>" } do
      local plan = orrery.parallel(text)
      local seen = {}
      for bx, by in data.batches({ x, y }, { batch = 5, shuffle = true, plan = plan }) do
        local values, squares = bx:full():totable(), by:full():totable()
        local held = 0
        for _, shard in ipairs(bx:shards()) do held = held + shard.tensor:size(1) end
        assert.equal(#values, held)
        for k, value in ipairs(values) do
          seen[#seen + 1] = value
          assert.equal(value * value, squares[k][1])
        end
      end
      assert.same(reference, seen, text)
    end
  end)
end)

-- A batch of n images whose pixels all differ: (n, c, h, w), values from 1.
local function pictures(n, c, h, w)
  return orrery.arange(1, n * c * h * w):view(n, c, h, w):to "f32"
end

describe("data.augment", function()
  before_each(function() orrery.manual_seed(3) end)

  it("crops every sample to a window of its padded self", function()
    local n, h, w, pad = 24, 4, 5, 2
    local x = pictures(n, 2, h, w)
    local y = data.augment.random_crop(x, pad)
    assert.same(x:size(), y:size())
    local before, after, places = x:totable(), y:totable(), {}
    local function pixel(k, c, i, j)
      local row = before[k][c][i]
      return row and row[j] or 0
    end
    for k = 1, n do
      local found
      for di = -pad, pad do
        for dj = -pad, pad do
          local same = true
          for c = 1, 2 do
            for i = 1, h do
              for j = 1, w do same = same and after[k][c][i][j] == pixel(k, c, i + di, j + dj) end
            end
          end
          if same then found = di .. "," .. dj end
        end
      end
      assert.truthy(found, "sample " .. k .. " is no window of its image")
      places[found] = true
    end
    local different = 0
    for _ in pairs(places) do different = different + 1 end
    assert.is_true(different > 5)
    assert.equal(x, data.augment.random_crop(x, 0))
  end)

  it("mirrors about half of the samples, each as a whole", function()
    local n = 64
    local x = pictures(n, 1, 2, 3)
    local before, after, mirrored = x:totable(), data.augment.flip(x):totable(), 0
    for k = 1, n do
      local flipped = after[k][1][1][1] ~= before[k][1][1][1]
      if flipped then mirrored = mirrored + 1 end
      for i = 1, 2 do
        for j = 1, 3 do assert.equal(before[k][1][i][flipped and 4 - j or j], after[k][1][i][j]) end
      end
    end
    assert.is_true(mirrored > 15 and mirrored < 49, mirrored .. " of 64")
    assert.same(before, data.augment.flip(x, 0):totable())
    assert.equal(before[1][1][1][3], data.augment.flip(x, 1):totable()[1][1][1][1])
  end)

  it("draws from the loader's stream, by the seed", function()
    local x = pictures(16, 1, 4, 4)
    local function both() return data.augment.flip(data.augment.random_crop(x, 1)):totable() end
    orrery.manual_seed(5)
    local first = both()
    orrery.manual_seed(5)
    orrery.rand(100)
    assert.same(first, both())
    orrery.manual_seed(6)
    assert.not_same(first, both())
  end)

  it("normalizes by one number or one a channel", function()
    local x = pictures(2, 2, 1, 1) -- 1 2 / 3 4
    local shifted = data.augment.normalize(x, 2, 1)
    assert.same({ { { { -1 } }, { { 0 } } }, { { { 1 } }, { { 2 } } } }, shifted:totable())
    local y = data.augment.normalize(x:to "u8", { 1, 0 }, { 2, 4 })
    assert.equal("f32", y:dtype())
    assert.same({ { { { 0 } }, { { 0.5 } } }, { { { 1 } }, { { 1 } } } }, y:totable())
  end)

  it("refuses what is no batch of images", function()
    local flat = orrery.zeros(3, 4)
    assert_raises(function() data.augment.flip(flat) end, "expected a batch (N, C, H, W)", "(3, 4)")
    assert_raises(function() data.augment.random_crop(5, 1) end, "x must be a tensor")
    assert_raises(function() data.augment.random_crop(pictures(1, 1, 2, 2), -1) end, "pad must be")
    assert_raises(function() data.augment.normalize(pictures(1, 2, 2, 2), { 1 }, 1) end, "a list of 2")
  end)
end)
