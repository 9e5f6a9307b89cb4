-- data.csv: tables of numbers as text (RFC 4180, a record a line), with class names in one column.
-- Invariant: every field is a number, a stated missing value, or a class name; all else raises with
-- line, byte and column. Numbers go to tensors a piece at a time, so Lua holds no whole table.
-- To add an option: name it in `known` and say in the annotation what it does.
local core = require "orrery.core"
local check = require "orrery.check"
local source = require "orrery.data.source"

local known = {
  header = true, separator = true, columns = true, target = true, classes = true, missing = true,
  skip = true, dtype = true, target_dtype = true,
}
local values_a_piece = 65536
local special = { nan = 0 / 0, inf = math.huge, ["+inf"] = math.huge, ["-inf"] = -math.huge }

-- Fields -----------------------------------------------------------------------------------------

-- A field in quotes that begins at `first`; gives its text and where the next field begins.
local function quoted(line, first, separator)
  local parts, at = {}, first + 1
  while true do
    local quote = line:find('"', at, true)
    if not quote then return nil end
    parts[#parts + 1] = line:sub(at, quote - 1)
    if line:sub(quote + 1, quote + 1) ~= '"' then
      local after = line:sub(quote + 1, quote + #separator)
      if after ~= "" and after ~= separator then return nil end
      return table.concat(parts, '"'), quote + 1 + #separator
    end
    at = quote + 2
  end
end

-- Splits a line into fields and the columns (from 0) where they begin.
local function split(reader, line)
  local fields, starts, separator = {}, {}, reader.separator
  local at, n = 1, 0
  repeat
    local text, next_at
    if line:sub(at, at) == '"' then
      text, next_at = quoted(line, at, separator)
      if not text then reader:fail(at - 1, "the quotes of field %d are not closed on this line", n + 1) end
    else
      local cut = line:find(separator, at, true)
      text, next_at = line:sub(at, cut and cut - 1), cut and cut + #separator or #line + 1 + #separator
    end
    n = n + 1
    fields[n], starts[n] = text, at - 1
    at = next_at
  until at > #line + #separator
  return fields, starts
end

local function number_of(text)
  local value = tonumber(text)
  if value and not text:find "[a-df-zA-DF-Z]" then return value end
  return special[text:lower()]
end

local function trim(text) return text:match "^%s*(.-)%s*$" end

-- Reader: the file, the line in hand, and what becomes of its fields --------------------------------

local Reader = {}
Reader.__index = Reader

--- Raises with the line, and the byte of column `start`.
function Reader:fail(start, pattern, ...)
  self.file:fail(self.line_at + start, "line %d: %s", self.line, pattern:format(...))
end

-- The next line that is not blank, without its ending; nil at the end.
function Reader:next_line()
  while true do
    local text = self.file.handle:read "*l"
    if not text then return nil end
    self.line, self.line_at = self.line + 1, self.next_at
    self.next_at = self.next_at + #text + 1
    if self.line == 1 and text:sub(1, 3) == "\239\187\191" then
      text, self.line_at = text:sub(4), self.line_at + 3
    end
    if text:sub(-1) == "\r" then text = text:sub(1, -2) end
    if self.line > self.skip and text:find "%S" then return text end
  end
end

-- The position of a column given by number or by the header's name.
function Reader:column(what, value)
  if type(value) == "string" then
    local position = self.names and self.names[value]
    if not position then
      self:fail(0, self.names and "%s '%s' is not in the header" or "%s '%s': the file has no header",
        what, value)
    end
    return position
  end
  if type(value) == "number" and value < 0 then value = self.width + 1 + value end
  if type(value) ~= "number" or value < 1 or value > self.width or value ~= math.floor(value) then
    self:fail(0, "%s %s: the table has columns 1 to %d", what, tostring(value), self.width)
  end
  return value
end

-- Decides from the first line which columns become features and which the target.
function Reader:choose_columns(fields, options)
  self.width = #fields
  local header = options.header
  if header == nil then
    header = true
    for _, text in ipairs(fields) do header = header and not number_of(text) and trim(text) ~= "" end
  end
  if header then
    self.names = {}
    for k, text in ipairs(fields) do self.names[trim(text)] = k end
  end
  self.target = options.target and self:column("the target", options.target)
  self.columns = {}
  if options.columns then
    for k, name in ipairs(options.columns) do self.columns[k] = self:column("column", name) end
  else
    for k = 1, self.width do
      if k ~= self.target then self.columns[#self.columns + 1] = k end
    end
  end
  if #self.columns == 0 then self:fail(0, "no column is left for the features") end
  return header
end

function Reader:value(fields, starts, k)
  local value = number_of(fields[k])
  if value then return value end
  local text = trim(fields[k])
  if text == "" or text == "NA" then
    if self.missing then return self.missing end
    self:fail(starts[k], "field %d is empty; the option missing=NUMBER fills such fields", k)
  end
  return self:fail(starts[k], "field %d: '%s' is not a number", k, text)
end

-- Turns the numbers gathered so far into a tensor.
function Reader:flush()
  if #self.values == 0 then return end
  self.pieces[#self.pieces + 1] = core.tensor(self.values, { dtype = self.dtype })
  self.values = {}
end

function Reader:add_row(fields, starts)
  if #fields ~= self.width then
    self:fail(starts[#fields], "%d fields; the lines before have %d", #fields, self.width)
  end
  local values = self.values
  for _, k in ipairs(self.columns) do values[#values + 1] = self:value(fields, starts, k) end
  self.rows = self.rows + 1
  if self.target then
    local target = self.classes and trim(fields[self.target]) or self:value(fields, starts, self.target)
    if target == "" then self:fail(starts[self.target], "the target is empty") end
    self.targets[self.rows] = target
  end
  if #values >= values_a_piece then self:flush() end
end

-- Class names as ids from 1 in the order of their names (of their values, where all are numbers).
local function number_classes(targets)
  local ids, names = {}, {}
  for _, name in ipairs(targets) do
    if not ids[name] then ids[name], names[#names + 1] = true, name end
  end
  local numeric = true
  for _, name in ipairs(names) do numeric = numeric and number_of(name) end
  table.sort(names, function(a, b)
    local m, n = numeric and number_of(a), numeric and number_of(b)
    if m ~= n then return m < n end
    return a < b
  end)
  for id, name in ipairs(names) do ids[name] = id end
  for row, name in ipairs(targets) do targets[row] = ids[name] end
  return names
end

local function new_reader(path, options)
  local who = "data.csv"
  options = check.options(who, options, known)
  local separator = options.separator or ","
  if type(separator) ~= "string" or separator == "" or separator:find '["\r\n]' then
    check.raise("%s: the separator must be a string without quotes and line ends", who)
  end
  local missing, skip = options.missing, check.count(who, "skip", options.skip or 0, 0)
  if missing ~= nil and type(missing) ~= "number" then
    check.raise("%s: missing must be a number, got %s", who, type(missing))
  end
  return setmetatable({
    file = source.open(who, path), separator = separator, skip = skip, missing = missing,
    dtype = options.dtype or "f32", classes = options.classes,
    line = 0, line_at = 0, next_at = 0, rows = 0, values = {}, pieces = {}, targets = {},
  }, Reader), options
end

---@class orrery.data.csv.options
---@field header? boolean whether the first line names the columns; default: when none of it is a number
---@field separator? string default ","
---@field skip? integer lines left out at the beginning
---@field columns? (integer|string)[] the features, by number or name; default: all but the target
---@field target? integer|string the column that the second tensor holds (-1 is the last)
---@field classes? boolean the target names classes: it becomes i64 ids from 1
---@field missing? number stands for an empty field and for NA; without it they raise
---@field dtype? string of the features, default "f32"
---@field target_dtype? string default: that of the features

--- Reads a table of numbers.
---@param path string
---@param options? orrery.data.csv.options
---@return orrery.Tensor features (rows, columns) on the host
---@return orrery.Tensor|nil target (rows), where one is named
---@return string[]|nil classes the names, in the order of their ids. Raises, naming line and byte, on
---  a field that is no number, a line of another width, or open quotes.
return function(path, options)
  local reader
  reader, options = new_reader(path, options)
  local line = reader:next_line()
  if not line then reader.file:fail(reader.file.size, "the file ends here, before any data") end
  local fields, starts = split(reader, line)
  if not reader:choose_columns(fields, options) then reader:add_row(fields, starts) end
  for text in function() return reader:next_line() end do reader:add_row(split(reader, text)) end
  if reader.rows == 0 then reader.file:fail(reader.file.size, "the file ends here, after its header") end
  reader:flush()
  reader.file:close()
  local pieces = reader.pieces
  local features = #pieces == 1 and pieces[1] or core.cat(pieces, 1)
  features = features:reshape(reader.rows, #reader.columns)
  if not reader.target then return features end
  local names = reader.classes and number_classes(reader.targets) or nil
  local dtype = names and "i64" or options.target_dtype or reader.dtype
  return features, core.tensor(reader.targets, { dtype = dtype }), names
end
