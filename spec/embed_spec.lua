-- C hosts: both C programs of examples/ train, the plan changes nothing, and errors are words.
-- Invariant: each program runs in a process of its own, as a host would.
-- To add a host: its source under examples/, a `describe` here.
local root = os.getenv "ORRERY_ROOT" or "."
local build = os.getenv "ORRERY_BUILD" or root .. "/build"
local interpreter = (os.getenv "ORRERY_LUA" or "luajit"):match "[^/]*$"
local folder = build .. "/" .. interpreter .. "/examples/"

-- Runs a program; gives what it printed (errors included) and its exit status.
local function run(name, arguments, environment)
  local pipe = assert(io.popen(("env OMP_WAIT_POLICY=passive %s '%s%s' %s 2>&1; echo status $?"):format(
    environment or "", folder, name, arguments or "")))
  local text = pipe:read "*a"
  pipe:close()
  local output, status = text:match "^(.*)status (%d+)\n$"
  return output, tonumber(status)
end

local function assert_runs(...)
  local output, status = run(...)
  assert.equal(0, status, output)
  return output
end

describe("train.c", function()
  it("trains from C alone, on two devices as on one", function()
    local output = assert_runs "train"
    local loss, accuracy = {}, {}
    for plan, step, value in output:gmatch "(%S+): step (%d+)  loss (%d+%.%d+)" do
      loss[plan] = loss[plan] or {}
      loss[plan][tonumber(step)] = tonumber(value)
    end
    for plan, value in output:gmatch "(%S+): accuracy (%d+%.%d) %%" do accuracy[plan] = tonumber(value) end
    local one, two = loss.cpu, loss["data<0,1>"]
    assert.is_true(one[400] < one[1] / 5, output)
    assert.is_true(accuracy.cpu > 97, output)
    for _, step in ipairs { 1, 400 } do
      assert.near(one[step], two[step], 1e-4 * (one[step] + 0.01) + 1e-6)
    end
    assert.near(accuracy.cpu, accuracy["data<0,1>"], 0.7) -- 2 of 301 points
  end)

  it("is told in words that a device is missing", function()
    local output, status = run("train", "1", "ORRERY_CPU_DEVICES=1")
    assert.equal(1, status)
    assert.truthy(output:find("train: plan: there is no device 1", 1, true), output)
  end)
end)

describe("embed.c", function()
  local function train(plan)
    local output = assert_runs("embed", plan and "'" .. plan .. "'" or "")
    local name, loss, right = output:match "^trained under (%S+): loss (%d+%.%d+), (%d+) of 201 right in C\n$"
    assert.truthy(name, output)
    return tonumber(loss), tonumber(right), name
  end

  it("trains in Lua on the host's arrays and gives the weights back", function()
    local loss, right, name = train()
    assert.equal("data<0,1>", name)
    assert.is_true(loss < 0.5)
    assert.is_true(right > 190)
    local same = train "data<0>"
    assert.near(same, loss, 1e-4 * (same + 0.01) + 1e-6)
  end)

  it("passes the message of a Lua error on", function()
    local output, status = run("embed", "'data<0'")
    assert.equal(1, status)
    assert.truthy(output:find("embed: .*data<0"), output)
  end)
end)
