-- data.idx: the format of the MNIST files.
-- A file is two zero bytes, a type code, the rank, the sizes (4 bytes each) and the values, all
-- big-endian (LeCun, Cortes & Burges, "The MNIST database", file formats).
-- Invariant: the sizes and the length of the file agree before a value is read.
-- To add a type code: a row in `codes`.
local source = require "orrery.data.source"

local codes = {
  [0x08] = "u8", [0x09] = "i8", [0x0B] = "i16", [0x0C] = "i32", [0x0D] = "f32", [0x0E] = "f64",
}

-- Product of sizes, as a float: the integers of Lua 5.3 and later would wrap around.
local function product(sizes)
  local count = 1.0
  for _, n in ipairs(sizes) do count = count * n end
  return count
end

--- Reads an IDX file, raw: values and labels as they stand in the file (a label 0 stays 0; classes
--- count from 1, so write `data.idx(path):to("i64") + 1`).
---@param path string an unpacked file
---@return orrery.Tensor u8, i32, f32 or f64 on the host, of the file's shape; signed bytes and
---  16-bit integers become i32. Raises, naming the byte, on a wrong magic number, an unknown type
---  code, or sizes that do not fit the length of the file.
return function(path)
  local file = source.open("data.idx", path)
  local a, b, code, rank = file:read(4, "the magic number"):byte(1, 4)
  if a == 31 and b == 139 then
    file:fail(0, "this is a gzip file; unpack it first: gunzip %s", path)
  elseif a ~= 0 or b ~= 0 then
    file:fail(0, "not an IDX file: it must begin with two zero bytes, not %d %d", a, b)
  end
  local name = codes[code]
  if not name then file:fail(2, "unknown type code 0x%02X", code) end
  if rank < 1 or rank > 8 then file:fail(3, "%d dimensions; 1 to 8 can be read", rank) end
  local sizes = {}
  for d = 1, rank do sizes[d] = file:read_u32_be("the size of dimension " .. d) end
  local item = source.items[name]
  file:expect_rest(product(sizes) * item.size, table.concat(sizes, " x ") .. " values of " .. name)
  local values = file:tensor(item, sizes, true)
  file:close()
  return values
end
