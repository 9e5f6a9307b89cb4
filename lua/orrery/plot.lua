-- orrery.plot: curves as a picture, SVG written by hand or PNG by gnuplot where it is installed.
-- Invariant: plot.svg is a pure function of its argument; what is not finite leaves a gap; text is
-- escaped, so any name is safe.
-- To add an element: a function that appends to `out`, called from `panel_svg`.
local check = require "orrery.check"

local plot = {}

local unpack = table.unpack or unpack
local format, floor, huge = string.format, math.floor, math.huge

local panel_width, panel_height = 460, 320
local margin = { left = 64, right = 18, top = 40, bottom = 48 }
local title_height = 34
-- Colours that differ for the colour-blind (Okabe & Ito 2008).
local colours = { "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000" }

-- Points and axes -----------------------------------------------------------------------------------

local function colour_of(curve, k) return curve.colour or colours[(k - 1) % #colours + 1] end

local function finite(value) return type(value) == "number" and value > -huge and value < huge end

-- Smallest and largest of the finite values of all series; a flat range is widened.
local function range_of(series, key)
  local low, high = huge, -huge
  for _, curve in ipairs(series) do
    for i = 1, #curve.y do
      local x, y = curve.x and curve.x[i] or i, curve.y[i]
      local value = key == "x" and x or y
      if finite(x) and finite(y) then low, high = math.min(low, value), math.max(high, value) end
    end
  end
  if low > high then low, high = 0, 1 end
  if low == high then
    local room = low == 0 and 1 or math.abs(low) * 0.1
    low, high = low - room, high + room
  end
  return low, high
end

--- Round numbers that cover a range: steps of 1, 2 or 5 times a power of ten, about `count` of them.
---@param low number
---@param high number greater than low
---@param count integer
---@return number[] ticks within [low, high]
---@return integer decimals that tell them apart
function plot.ticks(low, high, count)
  local raw = (high - low) / count
  local power = 10 ^ floor(math.log(raw) / math.log(10))
  local factor = raw / power
  local step = (factor < 1.5 and 1 or factor < 3.5 and 2 or factor < 7.5 and 5 or 10) * power
  local ticks = {}
  local first, slack = math.ceil(low / step - 1e-9), step * 1e-9
  for k = first, first + 10 * count do
    if k * step > high + slack then break end
    ticks[#ticks + 1] = k == 0 and 0 or k * step
  end
  return ticks, math.max(0, math.ceil(-math.log(step) / math.log(10) - 1e-9))
end

local function tick_text(value, decimals)
  if math.abs(value) >= 1e6 or decimals > 6 then return format("%.3g", value) end
  return format(format("%%.%df", decimals), value)
end

local function escape(text)
  return (tostring(text):gsub('[&<>"]', { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" })
    :gsub("%c", " "))
end

-- SVG -----------------------------------------------------------------------------------------------

local function put(out, pattern, ...) out[#out + 1] = format(pattern, ...) end

local function text_svg(out, x, y, anchor, text, more)
  put(out, '<text x="%.1f" y="%.1f" text-anchor="%s"%s>%s</text>', x, y, anchor, more or "", escape(text))
end

-- Maps values to pixels: affine from [low, high] to [first, last].
local function scale(low, high, first, last)
  return function(value) return first + (value - low) / (high - low) * (last - first) end
end

local function axes_svg(out, panel, box, to_x, to_y)
  local ticks, decimals = plot.ticks(box.y_low, box.y_high, 5)
  for _, value in ipairs(ticks) do
    put(out, '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#dddddd"/>', box.left, to_y(value),
      box.right, to_y(value))
    text_svg(out, box.left - 6, to_y(value) + 4, "end", tick_text(value, decimals))
  end
  ticks, decimals = plot.ticks(box.x_low, box.x_high, 6)
  for _, value in ipairs(ticks) do
    put(out, '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#444444"/>', to_x(value), box.bottom,
      to_x(value), box.bottom + 4)
    text_svg(out, to_x(value), box.bottom + 17, "middle", tick_text(value, decimals))
  end
  put(out, '<path d="M%.1f %.1fV%.1fH%.1f" fill="none" stroke="#444444"/>', box.left, box.top, box.bottom,
    box.right)
  local middle = (box.left + box.right) / 2
  if panel.title then text_svg(out, middle, box.top - 14, "middle", panel.title, ' font-weight="bold"') end
  if panel.x_label then text_svg(out, middle, box.bottom + 36, "middle", panel.x_label) end
  if panel.y_label then
    local x, y = box.left - 48, (box.top + box.bottom) / 2
    text_svg(out, x, y, "middle", panel.y_label, format(' transform="rotate(-90 %.1f %.1f)"', x, y))
  end
end

-- A curve as paths of its finite stretches; a stretch of one point is a dot.
local function curve_svg(out, curve, colour, to_x, to_y)
  local run = {}
  local function finish()
    if #run == 1 then
      put(out, '<circle cx="%.2f" cy="%.2f" r="2.5" fill="%s"/>', run[1][1], run[1][2], colour)
    elseif #run > 1 then
      local points = {}
      for i, point in ipairs(run) do points[i] = format("%.2f,%.2f", unpack(point)) end
      put(out, '<polyline points="%s" fill="none" stroke="%s" stroke-width="%s"/>',
        table.concat(points, " "), colour, curve.thin and "0.8" or "1.8")
    end
    run = {}
  end
  for i = 1, #curve.y do
    local x, y = curve.x and curve.x[i] or i, curve.y[i]
    if finite(x) and finite(y) then run[#run + 1] = { to_x(x), to_y(y) } else finish() end
  end
  finish()
end

local function legend_svg(out, series, box)
  for k, curve in ipairs(series) do
    if curve.name then
      local y = box.top + 6 + 17 * (k - 1)
      put(out, '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="2.5"/>',
        box.right - 24, y, box.right - 4, y, colour_of(curve, k))
      text_svg(out, box.right - 30, y + 4, "end", curve.name)
    end
  end
end

local function panel_svg(out, panel, left, top)
  local box = {
    left = left + margin.left, right = left + panel_width - margin.right,
    top = top + margin.top, bottom = top + panel_height - margin.bottom,
  }
  box.x_low, box.x_high = range_of(panel.series, "x")
  box.y_low, box.y_high = range_of(panel.series, "y")
  if panel.y_low then box.y_low = math.min(panel.y_low, box.y_low) end
  local to_x = scale(box.x_low, box.x_high, box.left, box.right)
  local to_y = scale(box.y_low, box.y_high, box.bottom, box.top)
  axes_svg(out, panel, box, to_x, to_y)
  for k, curve in ipairs(panel.series) do
    curve_svg(out, curve, colour_of(curve, k), to_x, to_y)
  end
  legend_svg(out, panel.series, box)
end

local function check_picture(who, picture)
  if type(picture) ~= "table" or type(picture.panels) ~= "table" or #picture.panels == 0 then
    check.raise("%s: a picture {panels={{series={{y={...}}}}}} is needed", who)
  end
  for p, panel in ipairs(picture.panels) do
    if type(panel.series) ~= "table" then check.raise("%s: panel %d has no series", who, p) end
    for k, curve in ipairs(panel.series) do
      if type(curve.y) ~= "table" or (curve.x ~= nil and #curve.x ~= #curve.y) then
        check.raise("%s: series %d of panel %d needs a list y, and x of its length if any", who, k, p)
      end
    end
  end
end

---@class orrery.plot.series
---@field y number[]
---@field x? number[] default 1, 2, 3, ...
---@field name? string in the legend
---@field colour? string as SVG writes it
---@field thin? boolean

---@class orrery.plot.panel
---@field title? string
---@field x_label? string
---@field y_label? string
---@field y_low? number the y axis reaches down to this at least
---@field series orrery.plot.series[]

---@class orrery.plot.picture
---@field title? string
---@field panels orrery.plot.panel[] side by side

--- The picture as the text of an SVG file.
---@param picture orrery.plot.picture
---@return string
function plot.svg(picture)
  check_picture("plot.svg", picture)
  local top = picture.title and title_height or 0
  local width, height = panel_width * #picture.panels, panel_height + top
  local out = {}
  put(out, '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
    .. 'font-family="sans-serif" font-size="12">', width, height, width, height)
  put(out, '<rect width="%d" height="%d" fill="#ffffff"/>', width, height)
  if picture.title then text_svg(out, width / 2, 24, "middle", picture.title, ' font-size="16"') end
  for p, panel in ipairs(picture.panels) do panel_svg(out, panel, (p - 1) * panel_width, top) end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

-- PNG -----------------------------------------------------------------------------------------------

-- Text between gnuplot's single quotes, where only the quote is special.
local function quote(text) return "'" .. tostring(text):gsub("%c", " "):gsub("'", "''") .. "'" end

local function panel_gnuplot(out, panel)
  put(out, "set title %s\nset xlabel %s\nset ylabel %s", quote(panel.title or ""), quote(panel.x_label or ""),
    quote(panel.y_label or ""))
  put(out, panel.y_low and "set yrange [*<%.17g:*]" or "set yrange [*:*]", panel.y_low)
  local curves, rows = {}, {}
  for k, curve in ipairs(panel.series) do
    curves[k] = format("'-' with linespoints pointtype %d pointsize 0.6 linewidth %s linecolor rgb %s %s",
      #curve.y == 1 and 7 or 0, curve.thin and "1" or "2", quote(colour_of(curve, k)),
      curve.name and "title " .. quote(curve.name) or "notitle")
    for i = 1, #curve.y do
      local x, y = curve.x and curve.x[i] or i, curve.y[i]
      rows[#rows + 1] = finite(x) and finite(y) and format("%.17g %.17g", x, y) or ""
    end
    rows[#rows + 1] = "e"
  end
  if #curves > 0 then put(out, "plot %s\n%s", table.concat(curves, ", "), table.concat(rows, "\n")) end
end

--- The picture as a gnuplot script that writes `path`.
---@param picture orrery.plot.picture
---@param path string
---@return string
function plot.gnuplot(picture, path)
  check_picture("plot.gnuplot", picture)
  local out, top = {}, picture.title and title_height or 0
  put(out, "set terminal pngcairo noenhanced size %d,%d\nset output %s\nset grid ytics",
    panel_width * #picture.panels, panel_height + top, quote(path))
  local title = picture.title and " title " .. quote(picture.title) or ""
  put(out, "set multiplot layout 1,%d%s", #picture.panels, title)
  for _, panel in ipairs(picture.panels) do panel_gnuplot(out, panel) end
  out[#out + 1] = "unset multiplot\n"
  return table.concat(out, "\n")
end

--- Whether gnuplot is installed, so that PNG pictures can be written.
---@return boolean
function plot.has_gnuplot()
  local pipe = io.popen("command -v gnuplot 2>/dev/null")
  local found = pipe and pipe:read "*l"
  if pipe then pipe:close() end
  return found ~= nil and found ~= ""
end

local function write_file(path, text)
  local file, message = io.open(path, "wb")
  if not file then check.raise("plot.save: cannot write %s", message) end
  local ok, reason = file:write(text)
  local closed = file:close()
  if not ok or not closed then
    check.raise("plot.save: cannot write %s: %s", path, reason or "the disk may be full")
  end
end

--- Writes the picture to a file: SVG, or PNG where gnuplot is installed; the name's ending says which.
---@param picture orrery.plot.picture
---@param path string "curves.svg" or "curves.png"
---@return string path raises where the ending is another, gnuplot is missing, or the file cannot be
---  written
function plot.save(picture, path)
  check_picture("plot.save", picture)
  local kind = type(path) == "string" and path:lower():match "%.(%w+)$"
  if kind == "svg" then
    write_file(path, plot.svg(picture))
  elseif kind == "png" then
    if not plot.has_gnuplot() then
      check.raise("plot.save: a PNG needs gnuplot, which is not installed; name the file .svg")
    end
    write_file(path, "")
    local pipe = assert(io.popen("gnuplot 2>/dev/null", "w"))
    pipe:write(plot.gnuplot(picture, path))
    pipe:close()
    local file = io.open(path, "rb")
    local head = file and file:read(8)
    if file then file:close() end
    if head ~= "\137PNG\r\n\26\n" then check.raise("plot.save: gnuplot could not write %s", path) end
  else
    check.raise("plot.save: the file must end in .svg or .png, got %s", tostring(path))
  end
  return path
end

return plot
