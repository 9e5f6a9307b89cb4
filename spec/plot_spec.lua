-- Pictures: valid SVG with every point where it belongs, gaps, escaping, ticks, PNG by gnuplot.
-- To add a case: draw a small picture whose points can be worked out by hand.
local plot = require "orrery.plot"

local function picture(series)
  return { panels = { { title = "loss", x_label = "step", series = series } } }
end

-- How often a plain text stands in another.
local function count(text, what)
  local n, at = 0, 1
  while true do
    local first, last = text:find(what, at, true)
    if not first then return n end
    n, at = n + 1, last + 1
  end
end

-- Every tag is closed, in order.
local function assert_well_formed(svg)
  local open = {}
  for slash, name, rest in svg:gmatch "<(/?)(%a+)([^>]*)>" do
    if slash == "/" then
      assert.equal(table.remove(open), name)
    elseif rest:sub(-1) ~= "/" then
      open[#open + 1] = name
    end
  end
  assert.equal(0, #open)
  assert.is_nil(svg:gsub("&%a+;", ""):find("&", 1, true))
end

local function remove(path) os.remove(path) end

describe("plot.svg", function()
  it("puts points where the axes say", function()
    local svg = plot.svg(picture { { y = { 0, 10, 5 }, name = "training" } })
    assert_well_formed(svg)
    -- One panel is 460 x 320; the axes leave 64, 18, 40 and 48 at left, right, top and bottom.
    assert.truthy(svg:find('points="64.00,272.00 253.00,40.00 442.00,156.00"', 1, true))
    assert.truthy(svg:find(">training</text>", 1, true))
    assert.truthy(svg:find(">step</text>", 1, true))
    assert.equal(svg, plot.svg(picture { { y = { 0, 10, 5 }, name = "training" } }))
  end)

  it("leaves a gap at what is not finite", function()
    local svg = plot.svg(picture { { y = { 1, 2, 0 / 0, 3, 4, math.huge, 5 } } })
    assert_well_formed(svg)
    assert.equal(2, count(svg, "<polyline"))
    assert.equal(1, count(svg, "<circle"))
    assert.is_nil(svg:find("nan", 1, true))
    assert.is_nil(svg:find("inf", 1, true))
  end)

  it("draws flat, single and empty series", function()
    for _, y in ipairs { { 3, 3, 3 }, { 0 }, {}, { 0 / 0 } } do
      local svg = plot.svg(picture { { y = y } })
      assert_well_formed(svg)
      assert.is_nil(svg:find("nan", 1, true))
    end
  end)

  it("escapes names", function()
    local panel = { title = '"x"\n>', series = { { y = { 1 } } } }
    local svg = plot.svg { title = "a < b & c", panels = { panel } }
    assert_well_formed(svg)
    assert.truthy(svg:find("a &lt; b &amp; c", 1, true))
    assert.truthy(svg:find("&quot;x&quot; &gt;", 1, true))
  end)

  it("reaches down to y_low", function()
    local svg = plot.svg { panels = { { y_low = 0, series = { { y = { 5, 10 } } } } } }
    assert.truthy(svg:find('points="64.00,156.00 442.00,40.00"', 1, true))
  end)

  it("refuses what is no picture, at the caller's line", function()
    for _, bad in ipairs { 5, {}, { panels = {} }, { panels = { {} } }, picture { { y = 3 } },
      picture { { y = { 1, 2 }, x = { 1 } } } } do
      local ok, message = pcall(function() plot.svg(bad) end)
      assert.is_false(ok)
      assert.truthy(message:find("plot_spec.lua:", 1, true))
      assert.truthy(message:find("plot.svg: ", 1, true))
    end
  end)
end)

describe("plot.ticks", function()
  it("gives round numbers within the range", function()
    assert.same({ 0, 20, 40, 60, 80, 100 }, (plot.ticks(0, 100, 5)))
    assert.same({ 2, 4, 6, 8 }, (plot.ticks(1.5, 9.5, 4)))
    local ticks, decimals = plot.ticks(0.11, 0.39, 3)
    assert.equal(1, decimals)
    assert.equal(2, #ticks)
    assert.near(0.2, ticks[1], 1e-12)
    assert.near(0.3, ticks[2], 1e-12)
  end)

  it("covers small, large and negative ranges", function()
    for _, range in ipairs { { 1e-9, 3e-9 }, { -5, 5 }, { 1e7, 9e7 }, { -0.002, -0.001 } } do
      local ticks = plot.ticks(range[1], range[2], 5)
      assert.is_true(#ticks >= 3 and #ticks <= 11, #ticks .. " ticks")
      for _, value in ipairs(ticks) do
        assert.is_true(value >= range[1] - 1e-12 and value <= range[2] * (1 + 1e-9) + 1e-12)
      end
    end
  end)
end)

describe("plot.save", function()
  it("writes SVG", function()
    local name = os.tmpname()
    local path = name .. ".svg"
    finally(function()
      remove(name)
      remove(path)
    end)
    assert.equal(path, plot.save(picture { { y = { 1, 2 } } }, path))
    local file = assert(io.open(path, "rb"))
    assert.equal(plot.svg(picture { { y = { 1, 2 } } }), file:read "*a")
    file:close()
  end)

  it("writes PNG where gnuplot is installed, and says so where it is not", function()
    local name = os.tmpname()
    local path = name .. "'s.png"
    finally(function()
      remove(name)
      remove(path)
    end)
    local function save() return plot.save(picture { { y = { 1, 0 / 0, 2 }, name = "it's" } }, path) end
    if plot.has_gnuplot() then
      assert.equal(path, save())
      local file = assert(io.open(path, "rb"))
      assert.equal("\137PNG", file:read(4))
      file:close()
    else
      local ok, message = pcall(save)
      assert.is_false(ok)
      assert.truthy(message:find("gnuplot", 1, true))
    end
  end)

  it("raises for another ending and a folder that is not there", function()
    for path, word in pairs { ["curves.pdf"] = ".svg or .png", ["/no/such/folder/c.svg"] = "cannot write" } do
      local ok, message = pcall(function() plot.save(picture { { y = { 1 } } }, path) end)
      assert.is_false(ok)
      assert.truthy(message:find(word, 1, true))
      assert.truthy(message:find("plot_spec.lua:", 1, true))
    end
  end)
end)
