-- data.bytes: any file as a row of token ids, for models that read bytes.
-- Invariant: id = byte + 1, so ids run from 1 to 256 and `string.char(id - 1)` gives the byte back.
local source = require "orrery.data.source"

--- Reads a file's bytes as token ids.
---@param path string
---@return orrery.Tensor i32 (N), 1 to 256, on the host
return function(path)
  local file = source.open("data.bytes", path)
  local bytes = file:tensor(source.items.u8, { file.size })
  file:close()
  return bytes:to("i32"):add_(1)
end
