--- A progress bar around an iterator: a redrawn line on a terminal, a line every few seconds elsewhere.
-- Invariant: the iterator's values pass through untouched, `show` (which may wait for a device) is
-- called only when something is drawn, and the last line is complete and ends with a newline.
-- To show another figure: a part in `Bar:text`.
local terminal = require "orrery.terminal"

local Bar = {}
Bar.__index = Bar

local redraw_seconds = 0.1
local line_seconds = 5
local bar_width = 24

local function duration(seconds)
  seconds = math.floor(seconds + 0.5)
  local minutes = math.floor(seconds / 60)
  local hours = math.floor(minutes / 60)
  if hours > 0 then return ("%d:%02d:%02d"):format(hours, minutes % 60, seconds % 60) end
  return ("%d:%02d"):format(minutes, seconds % 60)
end

local function figure(value)
  local kind = type(value)
  if kind == "userdata" or kind == "table" then value = value:item() end
  if type(value) == "number" then return ("%.4g"):format(value) end
  return tostring(value)
end

--- The values of `show`, "acc 0.9  loss 0.31", in order of their names.
local function figures(show)
  local values, names = show and show() or {}, {}
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do names[i] = name .. " " .. figure(values[name]) end
  return table.concat(names, "  ")
end

--- What a line says: label, share, bar (on a terminal), count, rate, time, values.
function Bar:text(elapsed, finished)
  local parts = {}
  local function put(format, ...) parts[#parts + 1] = format:format(...) end
  local rate = elapsed > 0 and self.done / elapsed or 0
  if self.label then put("%s", self.label) end
  if self.total and self.total > 0 then
    local share = math.min(1, self.done / self.total)
    put("%3d%%", math.floor(share * 100))
    if self.tty then
      local full = math.floor(share * bar_width)
      put("[%s%s]", ("="):rep(full), ("."):rep(bar_width - full))
    end
    put("%d/%d", self.done, self.total)
  else
    put("%d", self.done)
  end
  if rate > 0 then put(rate < 10 and "%.2f/s" or "%.0f/s", rate) end
  if finished then
    put("in %s", duration(elapsed))
  elseif self.total and rate > 0 and self.total >= self.done then
    put("ETA %s", duration((self.total - self.done) / rate))
  end
  parts[#parts + 1] = figures(self.show)
  return (table.concat(parts, "  "):gsub("%s+$", ""))
end

function Bar:draw(now, finished)
  local text = self:text(now - self.start, finished)
  self.drawn = now
  if not self.tty then return self.write(text .. "\n") end
  self.write("\r" .. text:sub(1, self.width - 1) .. "\27[K" .. (finished and "\n" or ""))
end

function Bar:before_next()
  local now = self.clock()
  if not self.start then
    self.start, self.drawn = now, self.tty and -math.huge or now
    return
  end
  self.done = self.done + 1
  if now - self.drawn >= self.every then self:draw(now, false) end
end

function Bar:finish()
  if self.finished then return end
  self.finished = true
  self:draw(self.clock(), true)
end

local function after_next(bar, ...)
  if ... == nil then bar:finish() end
  return ...
end

--- How many items `iter` will give, where it can tell.
local function length_of(iter)
  if type(iter) == "function" then return nil end
  local mt = debug.getmetatable(iter)
  if mt and rawget(mt, "__len") then return rawget(mt, "__len")(iter) end
  local ok, len = pcall(function() return iter.len end)
  if ok and type(len) == "function" then return iter:len() end
  return type(iter) == "table" and #iter > 0 and #iter or nil
end

local function over_list(list)
  local i = 0
  return function()
    i = i + 1
    return list[i]
  end
end

---@class orrery.progress.options
---@field label? string
---@field total? integer how many items there will be; default: what the iterator tells
---@field show? fun(): table<string, any> values to show: numbers, strings, tensors of one element
---@field every? number seconds between lines (default 5) or redraws (default 0.1)
---@field write? fun(text: string) default: standard error
---@field tty? boolean whether to redraw one line; default: whether standard error is a terminal
---@field width? integer columns of the terminal
---@field clock? fun(): number seconds

--- Wraps an iterator for the generic `for`.
---@param iter function|table an iterator, an object called as one (`data.batches`), or a list
---@param options? orrery.progress.options
---@return function iterator gives what `iter` gives
---@return nil
---@return nil
---@return any closer on Lua 5.4: completes the line when the loop is left early
local function progress(iter, options)
  options = options or {}
  local mt = debug.getmetatable(iter)
  local callable = type(iter) == "function" or mt and rawget(mt, "__call")
  if not callable and type(iter) ~= "table" then
    error(("progress: an iterator is needed, not a %s"):format(type(iter)), 2)
  end
  local bar = setmetatable({ done = 0 }, Bar)
  bar.label, bar.show = options.label, options.show
  bar.total = options.total or length_of(iter)
  bar.write = options.write or function(text) io.stderr:write(text) end
  bar.tty = options.tty
  if bar.tty == nil then bar.tty = terminal.isatty(2) end
  bar.every = options.every or (bar.tty and redraw_seconds or line_seconds)
  bar.width = options.width or terminal.width()
  bar.clock = options.clock or terminal.clock()
  local source = callable and iter or over_list(iter)
  local function next_item(_, control)
    bar:before_next()
    return after_next(bar, source(nil, control))
  end
  local closer = setmetatable({}, { __close = function() bar:finish() end })
  return next_item, nil, nil, closer
end

return progress
