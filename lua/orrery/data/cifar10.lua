-- data.cifar10: the binary version of CIFAR-10.
-- A file is records of 3,073 bytes: the class (0 to 9), then 32 x 32 red, green and blue values, row
-- by row (Krizhevsky 2009, "Learning multiple layers of features from tiny images", and the data
-- set's page). Class ids count from 1 here.
-- Invariant: the whole of each file is checked (length, every class) before its images are used.
local core = require "orrery.core"
local check = require "orrery.check"
local source = require "orrery.data.source"

local side, channels = 32, 3
local pixels = channels * side * side
local record = 1 + pixels
local records_a_piece = 1000

-- The next `count` records: images (count, 3, 32, 32) and classes appended to `labels`.
local function read_records(file, count, labels)
  local start = file.at
  local bytes = file:read(count * record, "the images")
  for k = 0, count - 1 do
    local class = bytes:byte(k * record + 1)
    if class > 9 then file:fail(start + k * record, "class %d; 0 to 9 were expected", class) end
    labels[#labels + 1] = class + 1
  end
  local rows = core.from_bytes(bytes, "u8", { count, record })
  return rows:narrow(2, 2, pixels):reshape(count, channels, side, side)
end

-- Appends a file's images (a list of tensors) and classes.
local function read_file(path, images, labels)
  local file = source.open("data.cifar10", path)
  if file.size == 0 or file.size % record ~= 0 then
    file:fail(file.size, "the file ends here, %d bytes into a record of %d", file.size % record, record)
  end
  while file.at < file.size do
    local count = math.min(records_a_piece, math.floor((file.size - file.at) / record))
    images[#images + 1] = read_records(file, count, labels)
  end
  file:close()
end

local function exists(path)
  local handle = io.open(path, "rb")
  if handle then handle:close() end
  return handle ~= nil
end

local function part(paths)
  local images, labels = {}, {}
  for _, path in ipairs(paths) do read_file(path, images, labels) end
  return #images == 1 and images[1] or core.cat(images, 1), core.tensor(labels, { dtype = "i64" })
end

--- Reads CIFAR-10 (binary version): data_batch_1.bin, the further ones that are there up to 5, and
--- test_batch.bin where it is there.
---@param folder string the folder of the files, or the one that holds cifar-10-batches-bin
---@return orrery.Tensor images u8 (N, 3, 32, 32), 0 to 255
---@return orrery.Tensor labels i64 (N), 1 to 10
---@return orrery.Tensor|nil test_images
---@return orrery.Tensor|nil test_labels Raises, naming the byte, on a cut file or a class above 9.
return function(folder)
  if type(folder) ~= "string" then
    check.raise("data.cifar10: the folder must be a string, got %s", type(folder))
  end
  if exists(folder .. "/cifar-10-batches-bin/data_batch_1.bin") then
    folder = folder .. "/cifar-10-batches-bin"
  end
  local paths = {}
  for k = 1, 5 do
    local path = ("%s/data_batch_%d.bin"):format(folder, k)
    if exists(path) then
      if #paths < k - 1 then
        check.raise("data.cifar10: %s/data_batch_%d.bin is missing, data_batch_%d.bin is there", folder,
          #paths + 1, k)
      end
      paths[k] = path
    end
  end
  if #paths == 0 then check.raise("data.cifar10: there is no %s/data_batch_1.bin", folder) end
  local images, labels = part(paths)
  if not exists(folder .. "/test_batch.bin") then return images, labels end
  return images, labels, part { folder .. "/test_batch.bin" }
end
