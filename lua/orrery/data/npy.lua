-- data.npy: NumPy's array files.
-- A file is "\147NUMPY", a version, the length of the header, the header (a Python dictionary with
-- descr, fortran_order and shape) and the values (NumPy Enhancement Proposal 1, "Format
-- Specification: Version 1.0"; 2.0 and 3.0 only widen the length and the header's encoding).
-- Invariant: the shape and the length of the file agree before a value is read.
-- To add a dtype: a row in `kinds`.
local source = require "orrery.data.source"

local unpack = table.unpack or unpack

local kinds = {
  b1 = "bool", u1 = "u8", u2 = "u16", u4 = "u32", i1 = "i8", i2 = "i16", i4 = "i32", i8 = "i64",
  f2 = "f16", f4 = "f32", f8 = "f64",
}

-- The header's text after `'key':`, and the byte of the file where it begins.
local function entry(file, header, key, pattern)
  local first, last, value = header:find("['\"]" .. key .. "['\"]%s*:%s*" .. pattern)
  if first then return value, file.at - #header + first - 1, last end
  local at = header:find("['\"]" .. key .. "['\"]")
  file:fail(file.at - #header + (at or 1) - 1, at and "the header's '%s' cannot be understood"
    or "the header has no '%s'", key)
end

-- The shape, as {sizes}, from the text between its brackets.
local function sizes_of(file, text, at)
  local sizes = {}
  for word in text:gmatch "[^,]+" do
    word = word:match "^%s*(.-)%s*$"
    if word ~= "" then
      if not word:match "^%d+L?$" then file:fail(at, "'%s' in the shape is no size", word) end
      sizes[#sizes + 1] = tonumber((word:gsub("L$", "")))
    end
  end
  if #sizes > 8 then file:fail(at, "%d dimensions; up to 8 can be read", #sizes) end
  return sizes
end

local function read_header(file)
  local magic = file:read(6, "the magic string")
  if magic ~= "\147NUMPY" then file:fail(0, "not a NumPy file: it must begin with \\x93NUMPY") end
  local major = file:read(2, "the version"):byte()
  if major < 1 or major > 3 then file:fail(6, "version %d; 1 to 3 can be read", major) end
  local a, b, c, d = file:read(major == 1 and 2 or 4, "the header's length"):byte(1, 4)
  local length = a + b * 256 + (c or 0) * 65536 + (d or 0) * 16777216
  local header = file:read(length, "the header")
  if not header:match "^%s*{.*}%s*$" then file:fail(file.at - length, "the header is no dictionary") end
  return header
end

-- The item and byte order that a descr such as "<f4" names.
local function item_of(file, descr, at)
  local order, kind = descr:match "^([<>|=]?)(%a%d+)$"
  local name = kind and kinds[kind]
  if not name then
    file:fail(at, "dtype '%s' cannot be read; these can: bool, u1 u2 u4, i1 i2 i4 i8, f2 f4 f8", descr)
  end
  return source.items[name], order == ">"
end

--- Reads a NumPy array file (.npy) of either byte order, in C or Fortran order.
---@param path string
---@return orrery.Tensor on the host, of the file's shape; bool, u8, i32, i64, f16, f32 or f64 as in
---  the file; i1, i2 and u2 become i32, u4 becomes i64. Raises, naming the byte, on what is no NumPy
---  file, on a dtype that no tensor has, and on a length that does not fit the shape.
return function(path)
  local file = source.open("data.npy", path)
  local header = read_header(file)
  local descr, descr_at = entry(file, header, "descr", "['\"]([^'\"]*)['\"]")
  local fortran = entry(file, header, "fortran_order", "(%a+)") == "True"
  local shape, shape_at = entry(file, header, "shape", "%(([^()]*)%)")
  local sizes = sizes_of(file, shape, shape_at)
  local item, big_endian = item_of(file, descr, descr_at)
  local bytes = item.size * 1.0 -- a float does not wrap around
  for _, n in ipairs(sizes) do bytes = bytes * n end
  local counts = #sizes > 0 and table.concat(sizes, " x ") or "1"
  file:expect_rest(bytes, ("%s values of '%s'"):format(counts, descr))
  local reversed, order = {}, {}
  for d = 1, #sizes do reversed[d], order[d] = sizes[#sizes + 1 - d], #sizes + 1 - d end
  fortran = fortran and #sizes > 1
  local values = file:tensor(item, fortran and reversed or sizes, big_endian)
  file:close()
  return fortran and values:permute(unpack(order)):contiguous() or values
end
