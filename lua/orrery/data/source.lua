-- A file that a reader takes bytes from: named errors, and tensors read in pieces.
-- Invariant: every failure names the file and the byte where it stopped making sense (bytes count
-- from 0), closes the file, and raises at the user's line; no more than `piece_bytes` of a file
-- stand in Lua's memory while a tensor is filled.
-- To add a number format: a row in `items`.
local core = require "orrery.core"
local check = require "orrery.check"

local unpack = table.unpack or unpack

---@class orrery.data.Source
---@field path string
---@field size integer bytes of the file
---@field at integer the byte that is read next, from 0
local Source = {}
Source.__index = Source

local piece_bytes = 4 * 1024 * 1024

-- Number formats --------------------------------------------------------------------------------

-- What gsub puts in the place of each small integer, found once for each value.
local function widened(find)
  return setmetatable({}, {
    __index = function(cache, bytes)
      local wide = find(bytes)
      cache[bytes] = wide
      return wide
    end,
  })
end

local sign_extend_8 = widened(function(byte)
  return byte .. (byte:byte() >= 128 and "\255\255\255" or "\0\0\0")
end)
local sign_extend_16 = widened(function(pair)
  return pair .. (pair:byte(2) >= 128 and "\255\255" or "\0\0")
end)
local zero_extend_16 = widened(function(pair) return pair .. "\0\0" end)
local zero_extend_32 = { __index = function(_, four) return four .. "\0\0\0\0" end }
setmetatable(zero_extend_32, zero_extend_32)

---@class orrery.data.Item how a file stores one number
---@field size integer bytes in the file
---@field dtype string of the tensor
---@field pattern? string one number, where it must be widened
---@field wide? table<string, string> little-endian bytes to those of the dtype

-- Integers that no dtype holds become the next wider one; values are kept.
---@type table<string, orrery.data.Item>
local items = {
  u8 = { size = 1, dtype = "u8" },
  bool = { size = 1, dtype = "bool" },
  i8 = { size = 1, dtype = "i32", pattern = ".", wide = sign_extend_8 },
  i16 = { size = 2, dtype = "i32", pattern = "..", wide = sign_extend_16 },
  u16 = { size = 2, dtype = "i32", pattern = "..", wide = zero_extend_16 },
  i32 = { size = 4, dtype = "i32" },
  u32 = { size = 4, dtype = "i64", pattern = "....", wide = zero_extend_32 },
  i64 = { size = 8, dtype = "i64" },
  f16 = { size = 2, dtype = "f16" },
  f32 = { size = 4, dtype = "f32" },
  f64 = { size = 8, dtype = "f64" },
}
Source.items = items

local reversal = {
  [2] = { "(.)(.)", "%2%1" },
  [4] = { "(.)(.)(.)(.)", "%4%3%2%1" },
  [8] = { "(.)(.)(.)(.)(.)(.)(.)(.)", "%8%7%6%5%4%3%2%1" },
}

local function to_little_endian(bytes, size)
  local how = reversal[size]
  if not how then return bytes end
  return (bytes:gsub(how[1], how[2]))
end

-- The file --------------------------------------------------------------------------------------

--- Opens a file.
---@param who string the caller's name, as messages show it
---@param path string
---@return orrery.data.Source
local function open(who, path)
  if type(path) ~= "string" then check.raise("%s: the path must be a string, got %s", who, type(path)) end
  local handle, message = io.open(path, "rb")
  if not handle then check.raise("%s: cannot open %s", who, message) end
  local size, reason = handle:seek("end")
  -- A folder opens on some systems, and then has no end.
  if not size or size > 2 ^ 53 or not handle:seek("set", 0) or (size > 0 and not handle:read(0)) then
    handle:close()
    check.raise("%s: cannot read %s%s", who, path, reason and ": " .. reason or "")
  end
  return setmetatable({ who = who, path = path, size = size, at = 0, handle = handle }, Source)
end

function Source:close()
  if self.handle then self.handle:close() end
  self.handle = nil
end

--- Raises at the user's line: "data.idx: digits.idx: byte 8: ...".
---@param at integer the byte
---@param pattern string as for string.format
function Source:fail(at, pattern, ...)
  self:close()
  check.raise("%s: %s: byte %.0f: %s", self.who, self.path, at, pattern:format(...))
end

--- The next `count` bytes; `what` names them in the error of a file that ends before.
---@param count integer
---@param what string "the magic number"
---@return string
function Source:read(count, what)
  if self.at + count > self.size then
    self:fail(self.size, "the file ends here; %s needs bytes %.0f to %.0f", what, self.at,
      self.at + count - 1)
  end
  local bytes = count > 0 and self.handle:read(count) or ""
  if not bytes or #bytes ~= count then
    self:fail(self.at + #(bytes or ""), "the file cannot be read further, %s is cut short", what)
  end
  self.at = self.at + count
  return bytes
end

--- The next big-endian unsigned integer of 4 bytes.
---@param what string
---@return integer
function Source:read_u32_be(what)
  local a, b, c, d = self:read(4, what):byte(1, 4)
  return ((a * 256 + b) * 256 + c) * 256 + d
end

--- Raises when the file does not hold exactly `count` more bytes.
---@param count integer
---@param what string what the bytes are, "28 x 28 x 60000 values of u8"
function Source:expect_rest(count, what)
  local rest = self.size - self.at
  if rest < count then
    self:fail(self.size, "the file ends here; %s need %.0f bytes from byte %.0f on and it has %.0f", what,
      count, self.at, rest)
  elseif rest > count then
    self:fail(self.at + count, "%s end here, but the file has %.0f bytes more", what, rest - count)
  end
end

--- Fills a tensor with the next numbers, a piece at a time.
---@param item orrery.data.Item
---@param shape integer[]
---@param big_endian boolean
---@return orrery.Tensor contiguous, on the host, of the shape
function Source:tensor(item, shape, big_endian)
  local count = 1
  for _, n in ipairs(shape) do count = count * n end
  local function piece(numbers, dims)
    local bytes = self:read(numbers * item.size, "the values")
    if big_endian then bytes = to_little_endian(bytes, item.size) end
    if item.wide then bytes = bytes:gsub(item.pattern, item.wide) end
    return core.from_bytes(bytes, item.dtype, dims)
  end
  local step = math.floor(piece_bytes / item.size)
  if count <= step then return piece(count, shape) end
  local all = core.zeros(count, { dtype = item.dtype })
  for first = 1, count, step do
    local numbers = math.min(step, count - first + 1)
    all:narrow(1, first, numbers):copy_(piece(numbers, { numbers }))
  end
  return all:reshape(unpack(shape))
end

return { open = open, items = items }
