-- The digits example on CUDA devices learns what it learns on the CPU: test accuracies of both, each in a
-- process of its own. Needs ORRERY_SPEC_DEVICES=cuda; on fake GPUs, whose lanes are slow, a few steps.
-- To add a run: a row of `runs`.
local orrery = require "orrery"
local device = require "spec.support.device"

local root = os.getenv "ORRERY_ROOT" or "."
local interpreter = os.getenv "ORRERY_LUA" or "luajit"

-- Percent that accuracies may differ by: other roundings, other last steps, a test set of 360 digits.
local APART = 1.5

local function output(command)
  local pipe = assert(io.popen(command .. " 2>&1"))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

local function accuracy(environment, arguments)
  local text = output(("cd '%s' && env %s %s -e 'require \"orrery.syntax\"' examples/digits.lua %s")
    :format(root, environment, interpreter, arguments))
  return tonumber(text:match "\ntest accuracy ([%d.]+) %%"), text
end

describe("the digits example", function()
  if device.kind ~= "cuda" then return pending "needs ORRERY_SPEC_DEVICES=cuda" end
  local fake = orrery.devices()[1].model:find "Fake"
  local small = fake and "--net mlp --epochs 1 --steps 6" or "--net cnn"
  local runs = { "data<0>", "data<0,1>" }
  local want, text

  setup(function() want, text = accuracy("CUDA_VISIBLE_DEVICES= ", small) end)

  for _, plan in ipairs(runs) do
    it(("is as accurate under %s as on the CPU"):format(plan), function()
      assert.is_truthy(want, text)
      assert.is_true(fake ~= nil or want > 95, "the CPU alone: " .. want)
      local got, said = accuracy("ORRERY_CUDA_DEVICES=0,0", ('%s --plan "%s"'):format(small, plan))
      assert.is_truthy(got, said)
      io.write(("digits: %.1f %% on the CPU, %.1f %% under %s on CUDA devices\n"):format(want, got, plan))
      assert.is_true(math.abs(got - want) <= APART, ("%.1f %%, the CPU %.1f %%"):format(got, want))
    end)
  end
end)
