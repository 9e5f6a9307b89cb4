-- Attention of the halves on fake GPUs: by cuDNN's graph, interpreted by the fake from its descriptors, where
-- cuDNN takes it and has proved right; else by our own kernel.
-- To add a shape: a row of `taken` or of `refused`: dtype, queries, keys, width of a head.
local behave = require "spec.support.behave"
local fakes = require "spec.fake.prelude"

-- `near(...)` compares with the CPU; `called(name, f)` says whether f called it, by making that call fail.
local prelude = fakes.text .. [[
  local orrery = require "orrery"
  orrery.devices()
  local function run(device, dtype, causal, t, s, d)
    orrery.manual_seed(2)
    -- q, k, v as a layer makes them: views of one buffer where they are as long
    local x, qkv = {}, orrery.randn(2, t, 3, 2, d):to(dtype):to(device)
    for i = 1, 3 do
      local of = (i == 1 or s == t) and qkv:select(3, i) or orrery.randn(2, s, 2, d):to(dtype):to(device)
      x[i] = of:transpose(2, 3):detach()
      x[i].requires_grad = true
    end
    local y = orrery.nn.scaled_dot_product_attention(x[1], x[2], x[3], { causal = causal })
    y:backward(orrery.randn(2, t, 2, d):to(dtype):to(device):transpose(2, 3))
    local all = { y:detach(), x[1].grad, x[2].grad, x[3].grad }
    for i = 1, 4 do all[i] = all[i]:to("cpu"):to("f64") end
    return all
  end
  local function near(dtype, causal, t, s, d, device)
    local a, b = run(device or "cuda:0", dtype, causal, t, s, d), run("cpu", dtype, causal, t, s, d)
    local tolerance = dtype == "bf16" and 0.05 or 0.005
    for i = 1, 4 do
      local off = (a[i] - b[i]):abs():max():item()
      assert(off < tolerance, ("%s %s %d,%d,%d: result %d is off by %g"):format(dtype,
        tostring(causal), t, s, d, i, off))
    end
  end
  local function called(name, f, ...)
    fake.orr_fake_fail_at(name, 1, 0)
    pcall(f, ...)
    local failed = ffi.string(fake.orr_fake_failed_call())
    fake.orr_fake_fail_after(0, 0)
    pcall(orrery.synchronize)
    return failed == name
  end
]]

local function script(code, environment)
  environment = environment or {}
  environment.ORRERY_FAKE_GPUS = environment.ORRERY_FAKE_GPUS or "1"
  return behave.run(prelude .. code, environment)
end

local taken = [[
  local taken = { { "bf16", 33, 33, 16 }, { "bf16", 20, 40, 8 }, { "f16", 40, 24, 64 }, { "f16", 1, 9, 64 },
    { "bf16", 130, 130, 128 } }
]]
local refused = [[
  local refused = { { "bf16", 9, 9, 136 }, { "f16", 9, 9, 12 }, { "f32", 9, 9, 16 }, { "bf16", 1, 1, 8 } }
]]

describe("attention by cuDNN on fake GPUs", function()
  for _, exact in ipairs { true, false } do
    it("gives the CPU's values, deterministic=" .. tostring(exact), function()
      script(taken .. ("orrery.deterministic(%s)"):format(tostring(exact)) .. [[
        for _, s in ipairs(taken) do
          for _, causal in ipairs { false, true } do
            near(s[1], causal, s[2], s[3], s[4])
            assert(called("cudnnBackendExecute", run, "cuda:0", s[1], causal, s[2], s[3], s[4]))
          end
        end
      ]])
    end)
  end

  it("leaves to our kernel what it does not take", function()
    script(refused .. [[
      for _, s in ipairs(refused) do
        for _, causal in ipairs { false, true } do
          near(s[1], causal, s[2], s[3], s[4])
          assert(not called("cudnnBackendExecute", run, "cuda:0", s[1], causal, s[2], s[3], s[4]))
        end
      end
    ]])
  end)

  it("plans a shape once, and remembers a refusal", function()
    script [[
      near("bf16", true, 9, 9, 8) -- the proof
      for _, d in ipairs { 16, 136 } do
        near("bf16", true, 9, 9, d)
        assert(not called("cudnnBackendGetAttribute", run, "cuda:0", "bf16", true, 9, 9, d))
        assert(called("cudnnBackendGetAttribute", run, "cuda:0", "bf16", true, 10, 10, d))
        near("bf16", true, 10, 10, d)
      end
    ]]
  end)

  it("is not used where it proves wrong, and the reason is told", function()
    local text = script([[
      near("bf16", true, 33, 33, 16)
      near("f16", false, 33, 33, 16)
      assert(not called("cudnnBackendExecute", run, "cuda:0", "bf16", true, 33, 33, 16))
      print(orrery.topology(true))
    ]], { ORRERY_FAKE_SPOIL = "1" })
    assert.matches("cuda:0 attention: bf16 by our kernel: cuDNN's differs from ours by ", text, 1, true)
    assert.matches("f16 causal by our kernel: cuDNN's differs", text, 1, true)
  end)

  it("is not used where it fails at its proof, for that kind alone", function()
    local text = script [[
      assert(called("cudnnBackendExecute", near, "bf16", false, 33, 33, 16))
      near("bf16", false, 33, 33, 16)
      assert(not called("cudnnBackendExecute", run, "cuda:0", "bf16", false, 33, 33, 16))
      near("bf16", true, 33, 33, 16)
      assert(called("cudnnBackendExecute", run, "cuda:0", "bf16", true, 33, 33, 16))
      orrery.deterministic(false) -- another graph, with a proof of its own
      near("bf16", false, 33, 33, 16)
      assert(called("cudnnBackendExecute", run, "cuda:0", "bf16", false, 33, 33, 16))
      orrery.deterministic(true)
      print(orrery.topology(true).attention[1])
    ]]
    assert.matches("bf16 in any order by cuDNN", text, 1, true)
    assert.matches("bf16 by our kernel: .*cuDNN", text)
    assert.matches("f16 causal by cuDNN", text, 1, true)
  end)

  it("works on after any one call that failed, in the proof and behind it", function()
    script([[
      for k = 0, 7 do
        local device = "cuda:" .. k
        for _, n in ipairs { 10 + 137 * k, 3 + 9 * k } do -- the second is behind the proof
          fake.orr_fake_fail_after(n, 0)
          local ok, message = pcall(run, device, "bf16", true, 12, 12, 8)
          assert(ffi.string(fake.orr_fake_failed_call()) ~= "", "call " .. n .. " is not there")
          fake.orr_fake_fail_after(0, 0)
          pcall(orrery.synchronize)
          assert(ok or type(message) == "string" and #message > 10, tostring(message))
          near("bf16", true, 12, 12, 8, device)
        end
      end
    ]], { ORRERY_FAKE_GPUS = "8" })
  end)

  it("is the same in a captured step", function()
    script [[
      local nn, optim = orrery.nn, orrery.optim
      local function losses(captured)
        orrery.manual_seed(7)
        local net = nn.MultiheadAttention(16, 2):to("bf16"):to("cuda:0")
        local opt = optim.SGD(net:parameters(), { lr = 0.1 })
        local function step(x)
          opt:zero_grad()
          local loss = net(x):pow(2):mean()
          loss:backward()
          opt:step()
          return loss
        end
        local f, all = captured and orrery.capture(step) or step, {}
        for k = 1, 8 do all[k] = f(orrery.randn(2, 9, 16):to("bf16"):to("cuda:0")):item() end
        if captured then assert(f.replays > 2, f.replays) end
        return table.concat(all, " ")
      end
      local plain, captured = losses(false), losses(true)
      assert(plain == captured, plain .. "\n" .. captured)
    ]]
  end)
end)
