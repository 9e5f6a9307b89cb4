-- Which devices the specs run on: ORRERY_SPEC_DEVICES=cuda for CUDA devices (real or fake ones), else
-- CPU devices. Bare numbers in plans follow by themselves: they name CUDA devices where there are any.
-- Invariant: the same rows and plans run on every kind.
local kind = os.getenv "ORRERY_SPEC_DEVICES" or "cpu"
local device = { kind = kind }

-- The one device of what is compared with many: the host, or the first CUDA device.
device.single = kind == "cuda" and "cuda:0" or nil

--- The name of device k.
function device.name(k) return ("%s:%d"):format(kind, k) end

return device
