--- What GPU this is and in which state: card, driver, libraries, clocks, date, for every record of a run.
-- Invariant: a field holds what nvidia-smi or the library said at this moment, or is not there; nothing is
-- opened on the GPU. To add a field: a row of `asked`, or of `libraries`.
local machine = {}

-- Our names, and nvidia-smi's.
local asked = {
  { "gpu", "name" }, { "driver", "driver_version" }, { "memory_mib", "memory.total", number = true },
  { "clock_sm_mhz", "clocks.sm", number = true }, { "clock_sm_most_mhz", "clocks.max.sm", number = true },
  { "clock_memory_mhz", "clocks.mem", number = true },
  { "clock_memory_most_mhz", "clocks.max.mem", number = true },
  { "power_state", "pstate" }, { "power_w", "power.draw", number = true },
  { "power_limit_w", "power.limit", number = true }, { "temperature_c", "temperature.gpu", number = true },
}

-- Our names, the library (none: what orrery/cuda.so links) and its function for a version. They are asked in
-- a process of their own, since a library that misses a part of itself ends the process that asks.
local libraries = {
  { "cuda_driver", "libcuda.so.1", "int cuDriverGetVersion(int *version)" },
  { "nccl", nil, "int ncclGetVersion(int *version)" },
  { "cublaslt", nil, "size_t cublasLtGetVersion(void)" },
  { "cuda_runtime", nil, "size_t cublasLtGetCudartVersion(void)" },
  { "cudnn", nil, "size_t cudnnGetVersion(void)" },
}

local ask = [[
local ffi, path, text = require "ffi", %q, %q
ffi.cdef(text .. ";")
local f = ffi.load(path)[text:match "([^ ]+)[(]"]
local version = ffi.new "int[1]"
local result = text:find("void", 1, true) and f() or f(version) == 0 and version[0]
if result then io.write(tostring(tonumber(result)), "\n") end
]]

local quote = require("child").quote

local function nvidia_smi()
  local names = {}
  for k, row in ipairs(asked) do names[k] = row[2] end
  local first = (os.getenv "CUDA_VISIBLE_DEVICES" or ""):match "^[%w%-]+"
  local pipe = io.popen(("nvidia-smi --query-gpu=%s --format=csv,noheader,nounits %s 2>/dev/null"):format(
    table.concat(names, ","), first and "-i " .. first or ""))
  local line = pipe and pipe:read "*l"
  if pipe then pipe:close() end
  return line and select(2, line:gsub(",", "")) == #asked - 1 and line or nil
end

local function library_versions(found)
  local lua = os.getenv "ORRERY_LUA" or "luajit"
  local linked = package.searchpath and package.searchpath("orrery.cuda", package.cpath)
  for _, row in ipairs(libraries) do
    local path = row[2] or linked
    if path then
      -- The braces keep the shell's word of a crash away.
      local code = quote(ask:format(path, row[3]))
      local pipe = assert(io.popen(("{ %s -e %s; } 2>/dev/null"):format(lua, code)))
      found[row[1]] = tonumber(pipe:read "*l")
      pipe:close()
    end
  end
end

--- What is known of the first visible GPU now.
---@return table<string, string|number>
function machine.now()
  local found = { date = os.date "!%Y-%m-%dT%H:%M:%SZ" }
  local line = nvidia_smi()
  local k = 0
  for value in ((line or "") .. ","):gmatch "%s*([^,]*)," do
    k = k + 1
    local row = line and asked[k]
    if row and value ~= "" and not value:find "N/A" then
      found[row[1]] = row.number and tonumber(value) or value
    end
  end
  if not line then found.nvidia_smi = "not found, or without an answer" end
  library_versions(found)
  return found
end

-- Dense products a second by vendor's data sheets: f32 outside tensor cores, sums of bf16 in f32.
local sheets = {
  { "H200", { bf16 = 989.4e12, tf32 = 494.7e12, f32 = 66.9e12 } },
  { "H100 PCIe", { bf16 = 756e12, tf32 = 378e12, f32 = 51.2e12 } },
  { "H100", { bf16 = 989.4e12, tf32 = 494.7e12, f32 = 66.9e12 } },
  { "A100", { bf16 = 312e12, tf32 = 156e12, f32 = 19.5e12 } },
}

--- The peak of a card's products in a dtype, by its data sheet; nil where the card is not in the table.
---@param model string
---@param dtype string
---@return number? operations a second
function machine.peak(model, dtype)
  for _, sheet in ipairs(sheets) do
    if model:find(sheet[1], 1, true) then return sheet[2][dtype] end
  end
end

return machine
