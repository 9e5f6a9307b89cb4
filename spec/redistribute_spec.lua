-- Redistribution: every placement into every other on meshes of one and two axes, between meshes,
-- devices and the host: the same values, the placement asked for, and gradients that come back.
-- To add a placement: its word in `words_of`, and how parts make it up in spec/support/placed.lua.
local orrery = require "orrery"
local core = require "orrery.core"
local array = require "spec.support.array"
local placed = require "spec.support.placed"
local matrix = require "spec.support.matrix"

local unpack = table.unpack or unpack
local rand = array.random(7)
local arrays = { rand.grid { 7, 3 }, rand.grid { 2, 1, 4 }, rand.grid { 0, 3 }, rand.grid {}, rand.grid { 5 },
  rand.ints({ 5, 2 }, -9, 9, "i64"), rand.ints({ 3, 3 }, 0, 200, "u8"), rand.bools { 4, 3 } }

-- What may be asked for; cut(d) cannot: its bounds come from narrow.
local function words_of(a)
  local words = {}
  for _, word in ipairs(placed.words(a, a.dtype == "f64")) do
    if not word:find "cut" then words[#words + 1] = word end
  end
  return words
end

local function same(where, a, tensor)
  local difference = matrix.difference(placed.array(tensor), a, 0)
  if difference then error(where .. ": " .. difference, 0) end
end

local function text(a, m, from, to)
  return ("(%s) %s on %s: %s to %s"):format(table.concat(a.shape, ", "), a.dtype, m.name,
    table.concat(from, " "), to and table.concat(to, " ") or "the host")
end

-- Every pair on one mesh, through f(array, mesh, from, to).
local function every_pair(f)
  for _, m in ipairs(placed.meshes) do
    for _, a in ipairs(arrays) do
      for _, from in ipairs(placed.choices(placed.words(a, a.dtype == "f64"), m)) do
        for _, to in ipairs(placed.choices(words_of(a), m)) do f(a, m, from, to) end
      end
    end
  end
end

describe("redistribute", function()
  it("gives the value under every other placement, and leaves its source", function()
    every_pair(function(a, m, from, to)
      local x = placed.place(a, m, from)
      local y = x:redistribute(unpack(to))
      same(text(a, m, from, to), a, y)
      same(text(a, m, from, to) .. ", the source", a, x)
      assert.same(to, core.placements(y))
    end)
  end)

  it("puts on each device what the layout says", function()
    every_pair(function(a, m, from, to)
      if table.concat(to):find "partial" then return end
      local y = placed.place(a, m, from):redistribute(unpack(to))
      local host = placed.place(a, m, to):shards()
      for k, shard in ipairs(y:shards()) do
        assert.equal(m.devices[k], shard.device)
        same(text(a, m, from, to) .. ", shard " .. k, placed.array(host[k].tensor), shard.tensor)
      end
    end)
  end)

  it("gives its gradient back", function()
    for _, m in ipairs(placed.meshes) do
      local a, w = rand.grid { 5, 3 }, rand.grid { 5, 3 }
      for _, from in ipairs(placed.choices(placed.words(a, true), m)) do
        for _, to in ipairs(placed.choices(words_of(a), m)) do
          local x = placed.place(a, m, from):requires_grad_()
          core.mul(x:redistribute(unpack(to)), placed.host(w)):sum():backward()
          same(text(a, m, from, to) .. ", gradient", w, x.grad)
        end
      end
    end
  end)

  it("goes between meshes, devices and the host", function()
    for _, a in ipairs(arrays) do
      for i, m in ipairs(placed.meshes) do
        for j, other in ipairs(placed.meshes) do
          if i ~= j then
            for _, from in ipairs(placed.choices(placed.words(a, a.dtype == "f64"), m)) do
              local to = rand.pick(placed.choices(words_of(a), other))
              local x = placed.place(a, m, from)
              local back = core.distribute(x, other.handle, unpack(to))
              same(text(a, m, from, to) .. " of " .. other.name, a, back)
              same(text(a, m, from), a, x:to "cpu")
              local one = x:to "cpu:6"
              assert.equal("cpu:6", one:device())
              same(text(a, m, from) .. " by cpu:6", a, one)
              same(text(a, other, { "cpu:6" }, to), a, core.distribute(one, other.handle, unpack(to)))
            end
          end
        end
      end
    end
  end)

  it("keeps the largest of partial(max) and the smallest of partial(min)", function()
    for _, m in ipairs(placed.meshes) do
      local a = rand.grid { 5, 3 }
      for kind, step in pairs { max = -1, min = 1 } do
        local word = ("partial(%s)"):format(kind)
        local words = #m.sizes == 1 and { word } or { word, word }
        for _, to in ipairs(placed.choices(words_of(a), m)) do
          local parts = {}
          for k, device in ipairs(m.devices) do
            -- Element e is whole on one device; the others hold what loses against it.
            local part = array.copy(a)
            for e = 1, #part.data do
              if e % #m.devices + 1 ~= k then part.data[e] = part.data[e] + step * k end
            end
            parts[k] = placed.host(part, "f64", device):clone()
          end
          local x = core.from_shards(m.handle, a.shape, parts, unpack(words))
          same(text(a, m, words, to), a, x:redistribute(unpack(to)))
          same(text(a, m, words), a, x)
        end
      end
    end
  end)

  it("says what is wrong with a placement", function()
    local x = placed.place(rand.grid { 4, 2 }, placed.meshes[2], { "replicate" })
    local function raises(pattern, f, ...)
      local ok, message = pcall(f, ...)
      assert.is_false(ok)
      assert.is_truthy(tostring(message):find(pattern), message)
      assert.is_truthy(tostring(message):find "redistribute_spec", message)
    end
    raises("shard%(3%)", function() return x:redistribute "shard(3)" end)
    raises("placement", function() return x:redistribute "sharded" end)
    raises("axes", function() return x:redistribute("replicate", "shard(1)", "replicate") end)
    raises("one device", function() return orrery.ones(2):redistribute "replicate" end)
  end)
end)
