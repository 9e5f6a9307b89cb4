-- Readers: values, every cut of a file, every wrong byte; and the files of the digits.
-- Invariant: the files read here are written here, byte by byte.
-- To add a reader: a good file with its values, its cuts through `assert_every_cut_raises`, and one
-- case for each thing that it refuses.
local orrery = require "orrery"
local data = orrery.data

local char = string.char
local unpack = table.unpack or unpack
local written = {}

local function write(bytes, suffix)
  local name = os.tmpname()
  local path = name .. (suffix or "")
  local file = assert(io.open(path, "wb"))
  file:write(bytes)
  file:close()
  written[#written + 1] = name
  if path ~= name then written[#written + 1] = path end
  return path
end

local function overwrite(path, bytes)
  local file = assert(io.open(path, "wb"))
  file:write(bytes)
  file:close()
end

after_each(function()
  for _, path in ipairs(written) do os.remove(path) end
  written = {}
end)

-- Calls f, which must raise at a line of this file with all of the words in the message.
local function assert_raises(f, ...)
  local ok, message = pcall(function() f() end)
  assert.is_false(ok)
  message = tostring(message)
  assert.truthy(message:find("data_spec.lua:", 1, true), "not at this file's line: " .. message)
  for _, word in ipairs { ... } do
    assert.truthy(message:find(word, 1, true), ("no '%s' in: %s"):format(word, message))
  end
end

-- Cuts the file after every byte: each cut raises and names a byte.
local function assert_every_cut_raises(bytes, reader)
  local path = write("")
  for length = 0, #bytes - 1 do
    overwrite(path, bytes:sub(1, length))
    assert_raises(function() reader(path) end, path, ("byte %d: "):format(length))
  end
end

-- Big-endian 4-byte integers.
local function be(...)
  local out = {}
  for i, n in ipairs { ... } do
    local function byte(power) return math.floor(n / power) % 256 end
    out[i] = char(byte(16777216), byte(65536), byte(256), byte(1))
  end
  return table.concat(out)
end

local function idx_bytes(code, sizes, values)
  return char(0, 0, code, #sizes) .. be(unpack(sizes)) .. values
end

describe("data.idx", function()
  it("reads bytes in the file's shape", function()
    local x = data.idx(write(idx_bytes(8, { 2, 3 }, char(0, 1, 2, 128, 254, 255))))
    assert.equal("u8", x:dtype())
    assert.same({ { 0, 1, 2 }, { 128, 254, 255 } }, x:totable())
    assert.equal("cpu", tostring(x:device()))
  end)

  it("reads every type, big-endian", function()
    local cases = {
      { 9, "i32", char(0, 127, 128, 255), { 0, 127, -128, -1 } },
      { 11, "i32", char(0, 1, 127, 255, 128, 0, 255, 254), { 1, 32767, -32768, -2 } },
      { 12, "i32", be(1, 65536) .. char(255, 255, 255, 255), { 1, 65536, -1 } },
      { 13, "f32", char(63, 128, 0, 0, 192, 32, 0, 0), { 1, -2.5 } },
      { 14, "f64", char(63, 240, 0, 0, 0, 0, 0, 0, 192, 4, 0, 0, 0, 0, 0, 0), { 1, -2.5 } },
    }
    for _, case in ipairs(cases) do
      local x = data.idx(write(idx_bytes(case[1], { #case[4] }, case[3])))
      assert.equal(case[2], x:dtype())
      assert.same(case[4], x:totable())
    end
  end)

  it("reads newlines and zeros as values", function()
    local x = data.idx(write(idx_bytes(8, { 6 }, "\n\r\0\0\26\n")))
    assert.same({ 10, 13, 0, 0, 26, 10 }, x:totable())
  end)

  it("raises at every cut, naming the byte", function()
    assert_every_cut_raises(idx_bytes(12, { 2, 2 }, be(1, 2, 3, 4)), data.idx)
  end)

  it("names the byte of a wrong magic number, type, rank and length", function()
    local good = idx_bytes(8, { 2, 2 }, "abcd")
    assert_raises(function() data.idx(write("\1" .. good:sub(2))) end, "byte 0: not an IDX file")
    assert_raises(function() data.idx(write("\31\139" .. good:sub(3))) end, "byte 0: this is a gzip file")
    assert_raises(function() data.idx(write("\0\0\7" .. good:sub(4))) end, "byte 2: unknown type code 0x07")
    assert_raises(function() data.idx(write("\0\0\8\0" .. good:sub(5))) end, "byte 3: 0 dimensions")
    assert_raises(function() data.idx(write("\0\0\8\200" .. good:sub(5))) end, "byte 3: 200 dimensions")
    assert_raises(function() data.idx(write(good .. "e")) end, "byte 16: 2 x 2 values of u8 end here",
      "1 bytes more")
    local huge = write(idx_bytes(8, { 4294967295, 4294967295 }, "abcd"))
    assert_raises(function() data.idx(huge) end, "byte 16: ", "4294967295 x 4294967295")
  end)

  it("never crashes on a wrong byte anywhere", function()
    local good = idx_bytes(11, { 2, 2 }, "\0\1\0\2\0\3\0\4")
    local path = write("")
    for at = 1, #good do
      for _, byte in ipairs { 0, 1, 8, 127, 255 } do
        overwrite(path, good:sub(1, at - 1) .. char(byte) .. good:sub(at + 1))
        local ok, message = pcall(data.idx, path)
        assert.is_true(ok or message:find("byte %d+: ") ~= nil, tostring(message))
      end
    end
  end)

  it("raises for a file that is not there, a folder, and no path", function()
    assert_raises(function() data.idx("/no/such/file.idx") end, "data.idx: cannot open /no/such/file.idx")
    assert_raises(function() data.idx("/tmp") end, "/tmp")
    assert_raises(function() data.idx(nil) end, "must be a string, got nil")
  end)
end)

local function npy_bytes(descr, fortran, shape, values, version)
  local order = fortran and "True" or "False"
  local header = ("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"):format(descr, order, shape)
  header = header .. (" "):rep(63 - (#header + 10) % 64) .. "\n"
  local length = char(#header % 256, math.floor(#header / 256))
  if (version or 1) > 1 then length = length .. "\0\0" end
  return "\147NUMPY" .. char(version or 1, 0) .. length .. header .. values
end

describe("data.npy", function()
  local six = char(1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0)

  it("reads every dtype of both byte orders", function()
    local cases = {
      { "|u1", "u8", "\0\255", { 0, 255 } }, { "|b1", "bool", "\0\1", { false, true } },
      { "|i1", "i32", "\1\255", { 1, -1 } }, { "<i2", "i32", "\1\0\254\255", { 1, -2 } },
      { ">i2", "i32", "\0\1\255\254", { 1, -2 } }, { "<u2", "i32", "\1\0\255\255", { 1, 65535 } },
      { "<u4", "i64", "\1\0\0\0\255\255\255\255", { 1, 4294967295 } },
      { "<i4", "i32", "\1\0\0\0\255\255\255\255", { 1, -1 } }, { ">i4", "i32", "\0\0\0\1", { 1 } },
      { "<i8", "i64", "\255\255\255\255\255\255\255\255", { -1 } },
      { ">i8", "i64", "\0\0\0\0\0\0\1\2", { 258 } },
      { "<f2", "f16", "\0\60\0\192", { 1, -2 } },
      { "<f4", "f32", "\0\0\128\63", { 1 } }, { ">f4", "f32", "\63\128\0\0", { 1 } },
      { "<f8", "f64", "\0\0\0\0\0\0\4\192", { -2.5 } }, { ">f8", "f64", "\192\4\0\0\0\0\0\0", { -2.5 } },
    }
    for _, case in ipairs(cases) do
      local x = data.npy(write(npy_bytes(case[1], false, ("(%d,)"):format(#case[4]), case[3])))
      assert.equal(case[2], x:dtype(), case[1])
      assert.same(case[4], x:totable(), case[1])
    end
  end)

  it("reads C and Fortran order, and every version", function()
    local c = data.npy(write(npy_bytes("<i2", false, "(2, 3)", six)))
    assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, c:totable())
    local fortran = data.npy(write(npy_bytes("<i2", true, "(2, 3)", six)))
    assert.same({ { 1, 3, 5 }, { 2, 4, 6 } }, fortran:totable())
    local deep = data.npy(write(npy_bytes("<i2", true, "(1, 2, 3)", six)))
    assert.same({ { { 1, 3, 5 }, { 2, 4, 6 } } }, deep:totable())
    assert.same({ 1, 2, 3, 4, 5, 6 }, data.npy(write(npy_bytes("<i2", true, "(6,)", six, 2))):totable())
    assert.same({ 1, 2, 3, 4, 5, 6 }, data.npy(write(npy_bytes("<i2", false, "(6,)", six, 3))):totable())
  end)

  it("reads a single number and no number", function()
    local one = data.npy(write(npy_bytes("<f4", false, "()", "\0\0\128\63")))
    assert.equal(0, one:dim())
    assert.equal(1, one:item())
    assert.same({ 0, 3 }, data.npy(write(npy_bytes("<f4", false, "(0, 3)", ""))):size())
  end)

  it("raises at every cut, naming the byte", function()
    assert_every_cut_raises(npy_bytes("<i2", false, "(2, 3)", six), data.npy)
    assert_every_cut_raises(npy_bytes(">f8", true, "(1, 1)", "\0\0\0\0\0\0\4\192", 2), data.npy)
  end)

  it("says what it cannot read", function()
    local good = npy_bytes("<i2", false, "(2, 3)", six)
    assert_raises(function() data.npy(write("x" .. good:sub(2))) end, "byte 0: not a NumPy file")
    assert_raises(function() data.npy(write(good:sub(1, 6) .. "\9" .. good:sub(8))) end, "byte 6: version 9")
    assert_raises(function() data.npy(write(good .. "xy")) end, "2 x 3 values of '<i2' end here")
    assert_raises(function() data.npy(write(npy_bytes("|O", false, "(1,)", "x"))) end, "byte 11: dtype '|O'")
    assert_raises(function() data.npy(write(npy_bytes("<u8", false, "(1,)", six))) end, "dtype '<u8'")
    local negative = npy_bytes("<i2", false, "(2, -3)", six)
    assert_raises(function() data.npy(write(negative)) end, "'-3' in the shape")
    local enormous = npy_bytes("<i2", false, "(4294967296, 4294967296, 2)", six)
    assert_raises(function() data.npy(write(enormous)) end, "4294967296 x 4294967296 x 2 values")
    assert_raises(function() data.npy(write((good:gsub("shape", "shade")))) end, "the header has no 'shape'")
    local brackets = good:gsub("%(2, 3%)", "[2, 3]")
    assert_raises(function() data.npy(write(brackets)) end, "'shape' cannot be understood")
    assert_raises(function() data.npy(write((good:gsub("}", " ")))) end, "the header is no dictionary")
  end)
end)

describe("data.csv", function()
  it("reads numbers, with and without a header", function()
    local x = data.csv(write("1,2.5\n-3,4e2\n"))
    assert.equal("f32", x:dtype())
    assert.same({ { 1, 2.5 }, { -3, 400 } }, x:totable())
    x = data.csv(write("a,b\r\n1,2\r\n\r\n3,4"), { dtype = "f64" })
    assert.equal("f64", x:dtype())
    assert.same({ { 1, 2 }, { 3, 4 } }, x:totable())
    local marked = write("\239\187\191width;height\n1;2\n")
    x = data.csv(marked, { separator = ";", columns = { "height", "width" } })
    assert.same({ { 2, 1 } }, x:totable())
    x = data.csv(write("junk\n7,8\n9,10\n"), { skip = 1, header = true })
    assert.same({ { 9, 10 } }, x:totable())
  end)

  it("gives a target, and ids for class names", function()
    local x, y = data.csv(write("1,2,3\n4,5,6\n"), { target = -1 })
    assert.same({ { 1, 2 }, { 4, 5 } }, x:totable())
    assert.same({ 3, 6 }, y:totable())
    assert.equal("f32", y:dtype())
    local names
    x, y, names = data.csv(write('size,kind\n1,"red, dark"\n2,blue\n3,"red, dark"\n4,"say ""hi"""\n'),
      { target = "kind", classes = true })
    assert.same({ { 1 }, { 2 }, { 3 }, { 4 } }, x:totable())
    assert.equal("i64", y:dtype())
    assert.same({ 2, 1, 2, 3 }, y:totable())
    assert.same({ "blue", "red, dark", 'say "hi"' }, names)
    local _, ids, values = data.csv(write("1,10\n2,9\n3,10\n"), { target = 2, classes = true })
    assert.same({ 2, 1, 2 }, ids:totable())
    assert.same({ "9", "10" }, values)
  end)

  it("fills what is missing only when told how", function()
    local path = write("1,,3\nNA,5,6\n")
    assert_raises(function() data.csv(path) end, "byte 2: line 1: field 2 is empty")
    assert.same({ { 1, 0, 3 }, { 0, 5, 6 } }, data.csv(path, { missing = 0, header = false }):totable())
  end)

  it("reads more than one piece", function()
    local lines = {}
    for k = 1, 30000 do lines[k] = ("%d,%d,%d"):format(k, k + 1, k + 2) end
    local x = data.csv(write(table.concat(lines, "\n")), { dtype = "i32" })
    assert.same({ 30000, 3 }, x:size())
    assert.same({ { 21846, 21847, 21848 }, { 21847, 21848, 21849 } }, x:narrow(1, 21846, 2):totable())
    assert.same({ { 30000, 30001, 30002 } }, x:narrow(1, 30000, 1):totable())
  end)

  it("names line and byte of what it cannot read", function()
    assert_raises(function() data.csv(write("1,2\n3,x4\n")) end, "byte 6: line 2: field 2: 'x4' is not")
    assert_raises(function() data.csv(write("1,2\n3,0x4\n")) end, "line 2: field 2: '0x4' is not a number")
    assert_raises(function() data.csv(write("1,2\n3\n")) end, "byte 4: line 2: 1 fields; the lines")
    assert_raises(function() data.csv(write("1,2\n3,4,5\n")) end, "line 2: 3 fields")
    assert_raises(function() data.csv(write('1,2\n"3,4\n')) end, "byte 4: line 2: the quotes of field 1")
    assert_raises(function() data.csv(write("")) end, "byte 0: the file ends here")
    assert_raises(function() data.csv(write("a,b\n")) end, "after its header")
    assert_raises(function() data.csv(write("a,b\n1,2\n"), { target = "c" }) end, "the target 'c' is not in")
    assert_raises(function() data.csv(write("1,2\n"), { target = "c" }) end, "the file has no header")
    assert_raises(function() data.csv(write("1,2\n"), { target = 3 }) end, "columns 1 to 2")
    assert_raises(function() data.csv(write("1,2\n"), { sep = ";" }) end, "unknown option 'sep'")
  end)

  it("raises or reads what is left at every cut", function()
    local path, text = write(""), 'a,"b"\n1,"2"\n-3,4e1\n'
    for length = 0, #text do
      overwrite(path, text:sub(1, length))
      local ok, message = pcall(data.csv, path)
      assert.is_true(ok or message:find("byte %d+: ") ~= nil, tostring(message))
    end
  end)
end)

describe("data.bytes", function()
  it("gives ids from 1 to 256", function()
    local all = {}
    for byte = 0, 255 do all[byte + 1] = char(byte) end
    local x = data.bytes(write(table.concat(all)))
    assert.equal("i32", x:dtype())
    local values = x:totable()
    assert.equal(256, #values)
    for id = 1, 256 do assert.equal(id, values[id]) end
    assert.same({ 0 }, data.bytes(write("")):size())
  end)

  it("reads a file of several pieces", function()
    local block = {}
    for k = 1, 1021 do block[k] = char(k % 251) end
    block = table.concat(block) -- 1021 bytes, so that pieces end within blocks
    local x = data.bytes(write(block:rep(9000)))
    assert.same({ 9000 * 1021 }, x:size())
    local expected = {}
    for k = 1, 1021 do expected[k] = k % 251 + 1 end
    -- The blocks that hold bytes 4 MiB and 8 MiB, and the last.
    for _, number in ipairs { 0, 4108, 8216, 8999 } do
      assert.same(expected, x:narrow(1, number * 1021 + 1, 1021):totable())
    end
  end)
end)

describe("data.cifar10", function()
  local folder

  -- Record k: class (k - 1) % 10, and the pixels k, k + 1, ... modulo 256.
  local function records(first, count)
    local out = {}
    for k = first, first + count - 1 do
      local pixels = {}
      for p = 0, 3071 do pixels[p + 1] = char((k + p) % 256) end
      out[#out + 1] = char((k - 1) % 10) .. table.concat(pixels)
    end
    return table.concat(out)
  end

  local function put(name, bytes)
    overwrite(folder .. "/" .. name, bytes)
    written[#written + 1] = folder .. "/" .. name
  end

  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir '" .. folder .. "'"))
  end)
  after_each(function() os.remove(folder) end)

  it("reads training and test images, classes from 1", function()
    put("data_batch_1.bin", records(1, 3))
    put("data_batch_2.bin", records(10, 1))
    local x, y, test_x = data.cifar10(folder)
    assert.same({ 4, 3, 32, 32 }, x:size())
    assert.equal("u8", x:dtype())
    assert.same({ 1, 2, 3, 10 }, y:totable())
    assert.equal("i64", y:dtype())
    assert.is_nil(test_x)
    local values = x:totable()
    assert.equal(2, values[2][1][1][1])
    assert.equal((10 + 1024 + 32 + 1) % 256, values[4][2][2][2])
    put("test_batch.bin", records(5, 2))
    local _, _, images, labels = data.cifar10(folder)
    assert.same({ 2, 3, 32, 32 }, images:size())
    assert.same({ 5, 6 }, labels:totable())
  end)

  it("refuses cut files, wrong classes and gaps", function()
    assert_raises(function() data.cifar10(folder) end, "there is no", "data_batch_1.bin")
    local two = records(1, 2)
    for _, cut in ipairs { 0, 1, 3072, 3074, 6145 } do
      put("data_batch_1.bin", two:sub(1, cut))
      assert_raises(function() data.cifar10(folder) end, ("data_batch_1.bin: byte %d: "):format(cut))
    end
    put("data_batch_1.bin", two:sub(1, 3073) .. "\10" .. two:sub(3075))
    assert_raises(function() data.cifar10(folder) end, "byte 3073: class 10")
    put("data_batch_1.bin", two)
    put("data_batch_3.bin", two)
    assert_raises(function() data.cifar10(folder) end, "data_batch_2.bin is missing")
  end)
end)

describe("the digits", function()
  local examples = (os.getenv "ORRERY_ROOT" or ".") .. "/examples/data/"

  it("are 1,437 and 360 images, stratified", function()
    for part, rows in pairs { train = 1437, test = 360 } do
      local images = data.idx(examples .. "digits-" .. part .. "-images.idx")
      local labels = data.idx(examples .. "digits-" .. part .. "-labels.idx")
      assert.same({ rows, 8, 8 }, images:size())
      assert.same({ rows }, labels:size())
      local count = {}
      for _, digit in ipairs(labels:totable()) do count[digit] = (count[digit] or 0) + 1 end
      for digit = 0, 9 do assert.near(rows / 10, count[digit], rows * 0.005) end
      for _, row in ipairs(images:reshape(rows * 8, 8):totable()) do
        for _, value in ipairs(row) do assert.is_true(value >= 0 and value <= 16) end
      end
    end
  end)

  it("have the checksums that stand beside them", function()
    local pipe = io.popen(("cd '%s' && sha256sum -c SHA256SUMS 2>&1"):format(examples))
    local text = pipe:read "*a"
    pipe:close()
    local _, good = text:gsub(": OK", "")
    assert.equal(4, good, text)
  end)
end)
