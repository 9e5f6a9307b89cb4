-- The examples run as their first lines say, are short enough to copy, and fail in plain words.
-- Invariant: each example runs in a process of its own, by the command that a user types.
-- To add an example: a line in `short`, and an `it` that asserts what it prints.
local root = os.getenv "ORRERY_ROOT" or "."
local command = os.getenv "ORRERY_COMMAND" or root .. "/bin/orrery"

-- Runs an example; gives what it printed (errors included) and its exit status.
local function run(name, arguments)
  local pipe = assert(io.popen(("'%s' '%s/examples/%s' %s 2>&1; echo status $?"):format(command, root, name,
    arguments or "")))
  local text = pipe:read "*a"
  pipe:close()
  local output, status = text:match "^(.*)status (%d+)\n$"
  return output, tonumber(status)
end

local function assert_runs(name, arguments)
  local output, status = run(name, arguments)
  assert.equal(0, status, output)
  return output
end

local short = { "digits.lua", "gpt.lua", "resnet.lua", "too_big.lua", "regression.lua", "custom_op.lua" }

describe("every example", function()
  it("is under 150 lines and begins with how to run it", function()
    for _, name in ipairs(short) do
      local count, text = 0, {}
      for line in io.lines(root .. "/examples/" .. name) do
        count = count + 1
        text[count] = line
      end
      assert.is_true(count < 150, name .. ": " .. count .. " lines")
      local head = table.concat(text, "\n", 1, 8)
      assert.truthy(head:find("orrery examples/" .. name, 1, true), name)
    end
  end)
end)

describe("digits.lua", function()
  -- The loss after a few steps, as printed.
  local function loss_of(arguments)
    local output = assert_runs("digits.lua", arguments)
    assert.truthy(output:find "\ntest accuracy %d+%.%d %%\n$", output)
    return tonumber(output:match "epoch  1  loss (%d+%.%d+)  test accuracy"), output
  end

  for _, net in ipairs { "mlp", "cnn" } do
    it("trains the " .. net .. " to the same loss on one device and on two", function()
      local options = ("--net %s --steps 6 --batch 61"):format(net)
      local one, plain = loss_of(options)
      local two, planned = loss_of(options .. ' --plan "data<0,1>"')
      assert.near(one, two, 1e-4 * (one + 0.01) + 5e-5 + 5e-5) -- and the rounding of both
      assert.is_nil(plain:find("of the work", 1, true))
      local shares, samples = {}, 0
      for count, share in planned:gmatch "trained on (%d+) samples, (%d+%.%d) %% of the work" do
        shares[#shares + 1] = tonumber(share)
        samples = samples + tonumber(count)
      end
      assert.equal(2, #shares)
      assert.equal(6 * 61, samples)
      assert.near(50, shares[1], 1)
      assert.near(100, shares[1] + shares[2], 0.11)
    end)
  end

  it("draws the curves", function()
    local name = os.tmpname()
    local path = name .. ".svg"
    finally(function()
      os.remove(name)
      os.remove(path)
    end)
    local output = assert_runs("digits.lua", "--net mlp --steps 3 --plot " .. path)
    assert.truthy(output:find("curves in " .. path, 1, true))
    local file = assert(io.open(path))
    local svg = file:read "*a"
    file:close()
    assert.truthy(svg:find("^<svg.*digits, mlp, cpu.*<polyline.*</svg>\n$"))
  end)

  it("learns", function()
    local output = assert_runs("digits.lua", '--net mlp --epochs 3 --plan "data<0,1>"')
    assert.is_true(tonumber(output:match "test accuracy (%d+%.%d) %%\n$") > 85, output)
  end)

  it("says what is wrong with its arguments", function()
    local output, status = run("digits.lua", "--colour blue")
    assert.equal(2, status)
    assert.truthy(output:find("usage: digits.lua", 1, true))
    for arguments, words in pairs {
      ["--epochs many"] = "--epochs needs a number", ["--net rnn"] = "--net is cnn or mlp",
      ['--plan "data<0,0>"'] = "data<0,0>", ['--plan "data<0"'] = "data<0",
      ["--steps 1 --plot x.pdf"] = ".svg or .png",
    } do
      output, status = run("digits.lua", arguments)
      assert.equal(1, status, arguments)
      assert.truthy(output:find(words, 1, true), arguments .. ": " .. output)
      assert.truthy(output:find("digits.lua:%d+:"), arguments .. ": " .. output)
    end
  end)
end)

describe("gpt.lua", function()
  local small = "--layers 1 --width 24 --heads 3 --context 16 --batch 5 --steps 6 --show 3 --sample 12"

  it("trains to the same losses on one device and on two, captured, and in bf16, and writes", function()
    local losses = {}
    for _, more in ipairs { "", '--plan "data<0,1>"', '--plan "data<0,1>" --capture yes', "--dtype bf16" } do
      local output = assert_runs("gpt.lua", small .. " " .. more)
      local a, b = output:match "step    3  loss (%d+%.%d+) .*step    6  loss (%d+%.%d+) +%d+ tokens/s\n"
      local tested, written = output:match "\ntest loss (%d+%.%d+), %d+%.%d+ bits a byte\n(.*)\n$"
      assert.truthy(a and written, output)
      assert.equal("The ", written:sub(1, 4))
      assert.equal(16, #written)
      losses[#losses + 1] = { tonumber(a), tonumber(b), tonumber(tested) }
    end
    for k = 1, 3 do
      assert.near(losses[1][k], losses[2][k], 5e-4)
      assert.near(losses[1][k], losses[3][k], 5e-4)
      assert.near(losses[1][k], losses[4][k], 0.05)
    end
  end)

  it("says what it cannot read", function()
    local output, status = run("gpt.lua", "--text nowhere.txt")
    assert.truthy(output:find("nowhere.txt", 1, true), output)
    assert.not_equal(0, status)
    output, status = run("gpt.lua", "--text LICENSE --context 300")
    assert.truthy(output:find("a context of 300 needs", 1, true), output)
    assert.equal(1, status)
  end)
end)

describe("regression.lua", function()
  it("comes close to the curve", function()
    local output = assert_runs("regression.lua")
    local distance = tonumber(output:match "largest distance from sin%(3 x%): (%d+%.%d+)\n$")
    assert.is_true(distance < 0.15, output)
    assert.truthy(assert_runs("regression.lua", "--steps 3"):find("step    3  loss %d+%.%d+\n"))
  end)
end)

describe("custom_op.lua", function()
  it("checks its gradients and learns through them", function()
    local output = assert_runs("custom_op.lua")
    assert.truthy(output:find("swish: the gradients of x and beta are right", 1, true))
    local right = tonumber(output:match "step  300  loss %d+%.%d+  right (%d+%.%d) %%")
    assert.is_true(right > 85, output)
    assert.truthy(assert_runs("custom_op.lua", "--steps 2"):find("step    2  loss", 1, true))
  end)
end)

describe("resnet.lua", function()
  -- A folder with CIFAR-10's file names and a few images of noise.
  local function write_images(folder, name, count)
    local file = assert(io.open(folder .. "/" .. name, "wb"))
    local state = 1
    for image = 1, count do
      local bytes = { string.char(image % 10) }
      for k = 1, 3072 do
        state = state * 16807 % 2147483647
        bytes[k + 1] = string.char(state % 256)
      end
      file:write(table.concat(bytes))
    end
    file:close()
  end

  it("trains to the same loss under every plan", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir '" .. folder .. "'"))
    write_images(folder, "data_batch_1.bin", 24)
    write_images(folder, "test_batch.bin", 8)
    local first
    for _, plan in ipairs { "data<0>", "data<0,1>", "model<0,1>", "tensor<0,1>", "data<0,1; zero=3>" } do
      local output = assert_runs("resnet.lua",
        ('--data "%s" --plan "%s" --steps 3 --depth 8 --batch 8'):format(folder, plan))
      local loss = tonumber(output:match "epoch 1  loss (%d+%.%d+)  test accuracy %d+%.%d+ %%")
      assert.is_number(loss, output)
      first = first or loss
      assert.near(first, loss, 1e-4 * (first + 0.01) + 1e-4)
    end
    os.execute("rm -r '" .. folder .. "'")
  end)
end)

describe("too_big.lua", function()
  it("fails on one device with the remedy, and trains under three plans", function()
    local output = assert_runs("too_big.lua", "--steps 3 --width 256 --limit 5.5")
    assert.truthy(output:find("data<0>\n  [^\n]*cpu:0 is out of memory: asked for", 1, false), output)
    local losses, count = {}, 0
    for first, last in output:gmatch "trained: loss (%d+%.%d+), then (%d+%.%d+) after 3 steps" do
      count = count + 1
      losses[first .. " " .. last] = true
    end
    assert.equal(3, count, output)
    assert.is_nil(next(losses, (next(losses))), output)
  end)
end)
