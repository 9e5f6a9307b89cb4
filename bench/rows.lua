--- What the bench measures: a list of blocks, each with sides that run in turn and the lines they give.
-- A side: {who, case, threads, devices, size, n = runs a repetition where it is fixed}. who is "orrery",
-- "pytorch", "memcpy", "import", or one of two gloo processes of one thread each: "ddp",
-- "tensor_parallel", "pipelining".
-- A line: {name, a, b, ...}: side a beside side b, the ratio is b / a; b = 0 stands alone. `ratio` is
-- the least ratio asked for and `hope` the one wished for; `most` is the most seconds side a may take;
-- `tokens` of a run are shown as tokens a second.
-- Invariant: two sides of a block do the same work; the harness compares the losses of their first step.
-- To add a row: a block here, its case in cases.lua and peer.py.
local sides = require "sides"

local rows = {}

local function training(name, case, threads, goal, hope, tokens)
  rows[#rows + 1] = {
    sides = { { "orrery", case, threads, 0 }, { "pytorch", case, threads, 0 } },
    lines = { { name, 1, 2, ratio = goal, hope = hope, tokens = tokens } },
  }
end

-- Two devices over one, beside two processes of PyTorch, and those over one.
local function scaling(name, case, size, goal, who)
  local word = sides.gloo[who]
  rows[#rows + 1] = {
    sides = {
      { "orrery", case, 1, 1, size }, { "orrery", case, 1, 2, size },
      { "pytorch", case, 1, 0, size }, { who, case, 1, 0, size },
    },
    lines = {
      { name .. ", two devices over one", 2, 1, ratio = goal, beside = "one device" },
      { name .. ", two devices beside " .. word, 2, 4, beside = word },
      { name .. ", " .. word .. " over one process", 4, 3, own = word, beside = "one process" },
    },
  }
end

local function allreduce(name, size, n, goals)
  rows[#rows + 1] = {
    sides = {
      { "orrery", "allreduce", 1, 2, size, n = n }, { "ddp", "allreduce", 1, 0, size, n = n },
      { "memcpy", "memcpy", 1, 0, size, n = n },
    },
    lines = {
      { "all-reduce " .. name .. " beside gloo", 1, 2, most = goals.most, beside = "gloo" },
      { "all-reduce " .. name .. " beside memcpy", 1, 3, ratio = goals.ratio, beside = "memcpy" },
    },
  }
end

rows[1] = {
  sides = { { "import", "orrery", n = 1 }, { "import", "pytorch", n = 1 } },
  lines = { { "import, from the start of the process", 1, 2 } },
}
rows[2] = {
  sides = { { "import", "require", n = 1 } },
  lines = { { "require \"orrery\"", 1, 0, most = 0.020 } },
}
for _, row in ipairs { { "add", "add of 4 f32", 3 }, { "add_grad", "add of 4 f32 with grad", 4 } } do
  rows[#rows + 1] = {
    sides = { { "orrery", row[1], 1, 0, n = 1e5 }, { "pytorch", row[1], 1, 0, n = 1e5 } },
    lines = { { row[2], 1, 2, ratio = row[3], hope = 5 } },
  }
end
training("MLP 64-64-10, batch 32", "tiny", 1, 5)
rows[#rows + 1] = {
  sides = { { "orrery", "tiny_captured", 1, 0 }, { "pytorch", "tiny", 1, 0 }, { "orrery", "tiny", 1, 0 } },
  lines = {
    { "MLP 64-64-10, batch 32, captured", 1, 2, ratio = 5 },
    { "MLP 64-64-10, batch 32, captured beside not captured", 1, 3, beside = "not captured" },
  },
}
training("MLP 784-512-512-10, batch 128, 1 thread", "mlp", 1, 1.2, 1.5)
training("MLP 784-512-512-10, batch 128, 2 threads", "mlp", 2, 1.2, 1.5)
training("CNN, batch 64, 1 thread", "cnn", 1, 1.2, 1.5)
training("CNN, batch 64, 2 threads", "cnn", 2, 1.2, 1.5)
for threads = 1, 2 do
  local word = threads == 1 and "1 thread" or "2 threads"
  training("attention, (16, 8, 128, 32), causal, " .. word, "attention", threads, 1)
  training("GPT, 4 layers, width 256, " .. word, "gpt", threads, 1, nil, 16 * 128)
end
scaling("MLP, batch 512", "mlp", 512, 1.8, "ddp")
scaling("CNN, batch 64", "cnn", 64, 1.8, "ddp")
scaling("MLP of width 2048, tensor<0,1>", "wide", nil, 1.6, "tensor_parallel")
scaling("8 equal blocks, model<0,1>, 1f1b", "blocks", nil, 1.51, "pipelining")
allreduce("1 KiB", 1024, 1000, { most = 5e-6 })
allreduce("1 MiB", 2 ^ 20, 100, {})
allreduce("64 MiB", 2 ^ 26, 5, { ratio = 1 })

-- Cases whose peak of resident memory is taken, each in a new process.
rows.memory = { { "peak memory, MLP, batch 128", "mlp" }, { "peak memory, CNN, batch 64", "cnn" } }
rows.installed = 15e6 -- bytes, the most

return rows
