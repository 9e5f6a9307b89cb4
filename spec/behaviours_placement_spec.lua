-- Behaviours 14 to 20: what ops do with hand-placed tensors: partial sums, sharded dimensions under
-- views, joins, indices and convolution, and gradients that are reduced before anyone reads them.
-- (Plans that place parameters so, tensor<> and zero=3, are built on these.)
-- To add a case: compare with the same op on the host, forward and backward.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nn = orrery.nn

local unpack = behave.unpack
local f64 = { dtype = "f64" }
local words = { "replicate", "shard(1)", "shard(2)", "shard(3)", "shard(4)" }

-- Multiples of 1/8, so that sums over devices are exact.
local function grid(...) return (orrery.randn(...):to("f64") * 8):round() / 8 end

-- f over host tensors and over the same placed by `how` (a word each); values and gradients agree.
local function same(n, how, inputs, f, what)
  local host, placed = {}, {}
  for k, x in ipairs(inputs) do
    host[k] = x:clone()
    placed[k] = how[k] == "partial" and behave.partial(x, n) or behave.place(x, n, how[k]):clone()
    if x:dtype() == "f64" then host[k].requires_grad, placed[k].requires_grad = true, true end
  end
  what = ("%s, %d devices, %s"):format(what or "", n, table.concat(how, " "))
  local want, got = f(unpack(host)), f(unpack(placed))
  behave.near(want, got, 1e-12, what)
  local weight = (orrery.arange(1, want:numel(), f64) * 0.37):sin():view(want:size())
  if want:dim() == 0 then weight = orrery.tensor(1, f64) end
  if not want.requires_grad then return end
  local gh, gp = {}, {}
  for k = 1, #inputs do
    if host[k].requires_grad then gh[#gh + 1], gp[#gp + 1] = host[k], placed[k] end
  end
  local a, b = orrery.grad((want * weight):sum(), gh), orrery.grad((got * weight):sum(), gp)
  for k = 1, #gh do behave.near(a[k], b[k], 1e-12, what .. ", gradient " .. k) end
  return got
end

describe("behaviour 14", function()
  it("a bias after a row-split matmul is added once, forward and backward", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      local x, w, b = grid(3, 10), grid(10, 4), grid(4)
      local px, pw = behave.place(x, n, "shard(2)"), behave.place(w, n, "shard(1)")
      local pb = behave.place(b, n, "replicate"):clone()
      pb.requires_grad = true
      local product = px:matmul(pw)
      assert.truthy(n == 1 or product:layout():find("partial(sum)", 1, true), product:layout())
      local y = product + pb
      behave.near(x:matmul(w) + b, y, 0, n .. " devices")
      y:sum():backward()
      behave.near({ 3, 3, 3, 3 }, pb.grad, 0, n .. " devices") -- one a row of x, not one a device
      assert.truthy(pb.grad:layout():find("replicate", 1, true), pb.grad:layout())
    end
  end)

  it("scalars: 2 * partial keeps it partial, partial + 1 adds 1 once", function()
    for _, n in ipairs(behave.counts) do
      local x = orrery.arange(1, 6, f64):view(2, 3)
      behave.near(x * 2 + 1, behave.partial(x, n) * 2 + 1, 1e-12)
      behave.near(x - 3, behave.partial(x, n) - 3, 1e-12)
      behave.near(3 - x, 3 - behave.partial(x, n), 1e-12)
      behave.near(x / 4, behave.partial(x, n) / 4, 1e-12)
      behave.near(-x, -behave.partial(x, n), 1e-12)
    end
  end)

  it("partial + partial, + sharded, + replicate, and a bias that needs broadcasting", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      for _, other in ipairs { "partial", "replicate", "shard(1)", "shard(2)" } do
        same(n, { "partial", other }, { grid(4, 3), grid(4, 3) }, function(a, b) return a + b end, "add")
        same(n, { other, "partial" }, { grid(4, 3), grid(4, 3) }, function(a, b) return a - b end, "sub")
      end
      for _, other in ipairs { "partial", "replicate", "shard(1)" } do
        same(n, { "partial", other }, { grid(4, 3), grid(3) }, function(a, b) return a + b end, "bias")
      end
    end
  end)
end)

describe("behaviour 15", function()
  it("a non-linear op on a partial value reduces first", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      local x = grid(5, 4)
      for _, name in ipairs { "relu", "tanh", "exp", "abs", "gelu", "sigmoid", "sin" } do
        same(n, { "partial" }, { x }, function(a) return a[name](a) end, name)
      end
      same(n, { "partial" }, { x }, function(a) return a:softmax(2) end, "softmax")
      same(n, { "partial" }, { x }, function(a) return a * a end, "square")
      same(n, { "partial" }, { x:abs() + 1 }, function(a) return a ^ 2 end, "power")
      same(n, { "partial", "partial" }, { x, grid(5, 4) }, function(a, b) return a * b end, "product")
      same(n, { "partial" }, { x }, function(a) return orrery.where(a:gt(0), a, a * 0.5) end, "where")
      same(n, { "partial" }, { x }, function(a) return (a:max(2)) end, "max")
      same(n, { "partial" }, { x }, function(a) return a:sum() end, "sum, which is linear")
    end
  end)

  it("an in-place op on a partial value reduces it first, gradients and all", function()
    for _, n in ipairs(behave.counts) do
      local x = orrery.arange(1, 6, f64):view(3, 2)
      same(n, { "shard(1)" }, { x }, function(a)
        local y = a:sum(1)
        y:add_(1)
        y:mul_(2)
        y:add_(orrery.tensor({ 1, 2 }, f64))
        return y
      end, "sum, then add_, mul_, add_")
      local total = behave.place(x, n, "shard(1)"):sum()
      total:relu_()
      total:sub_(20)
      assert.equal(1, total:item())
      for _, shard in ipairs(total:shards()) do assert.equal(1, shard.tensor:item()) end
    end
  end)

  it("a value that was saved before its in-place write is still told apart", function()
    for _, n in ipairs(behave.counts) do
      local x = behave.place(orrery.arange(1, 6, f64):view(3, 2), n, "shard(1)"):clone()
      x.requires_grad = true
      local y = x:sum(1)
      local z = (y * y):sum()
      y:add_(1)
      behave.raises(function() z:backward() end, "in-place", "mul")
    end
  end)

  it("-1 and 2 on two devices: the relu of their sum is 1, not 2", function()
    local a, b = orrery.tensor({ -1 }, f64), orrery.tensor({ 2 }, f64)
    local core = require "orrery.core"
    local x = core.from_shards(behave.mesh(2), { 1 }, { a:to(device.name(0)), b:to(device.name(1)) },
      "partial(sum)")
    assert.equal(1, x:relu():item())
    assert.equal(1, x:item())
    assert.equal("0.5", tostring(x:mul(0.5):item()))
  end)
end)

describe("behaviour 16", function()
  it("view and reshape of a sharded dimension keep the values or raise, never wrong data", function()
    orrery.manual_seed(2)
    local shapes = { { 24 }, { 2, 12 }, { 12, 2 }, { 3, 8 }, { 8, 3 }, { 4, 6 }, { 2, 3, 4 }, { 4, 3, 2 },
      { 1, 24 }, { 24, 1 }, { 2, 2, 6 }, { 6, 1, 4 } }
    for _, n in ipairs(behave.counts) do
      for _, from in ipairs(shapes) do
        for d = 0, #from do
          local word = d == 0 and "replicate" or "shard(" .. d .. ")"
          for _, to in ipairs(shapes) do
            local x = orrery.arange(1, 24, f64):view(unpack(from))
            local what = ("%d devices, (%s) %s to (%s)"):format(n, table.concat(from, ","), word,
              table.concat(to, ","))
            behave.near(x:view(unpack(to)), behave.place(x, n, word):reshape(unpack(to)), 0, what)
            local ok, y = pcall(function() return (behave.place(x, n, word):view(unpack(to))) end)
            if ok then
              behave.near(x:view(unpack(to)), y, 0, "view, " .. what)
            else
              assert.truthy(tostring(y):find("reshape", 1, true), tostring(y))
            end
          end
        end
      end
    end
  end)

  it("gradients pass through reshapes of sharded and empty shards", function()
    orrery.manual_seed(2)
    for _, n in ipairs(behave.counts) do
      for _, word in ipairs { "replicate", "shard(1)", "shard(2)", "shard(3)", "partial" } do
        local x = grid(2, 3, 4)
        same(n, { word }, { x }, function(a) return a:reshape(6, 4) end, "reshape")
        same(n, { word }, { x }, function(a) return a:reshape(2, 12):reshape(4, 6) end, "reshape twice")
        same(n, { word }, { x }, function(a) return a:flatten() end, "flatten")
        same(n, { word }, { x }, function(a) return a:permute(3, 1, 2):reshape(8, 3) end, "permute, reshape")
      end
    end
  end)
end)

describe("behaviour 17", function()
  local function every(rank, f)
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      for k = 1, rank + 1 do f(n, words[k]) end
      f(n, "partial")
    end
  end

  it("stack and cat of every pair of placements", function()
    every(2, function(n, a)
      for _, b in ipairs { "replicate", "shard(1)", "shard(2)", "partial" } do
        for d = 1, 2 do
          same(n, { a, b }, { grid(4, 3), grid(4, 3) }, function(x, y) return orrery.cat({ x, y }, d) end,
            "cat " .. d)
        end
        for d = 1, 3 do
          same(n, { a, b }, { grid(4, 3), grid(4, 3) }, function(x, y) return orrery.stack({ x, y }, d) end,
            "stack " .. d)
        end
      end
    end)
  end)

  it("cat of parts that differ in size, empty ones included", function()
    every(2, function(n, a)
      for d, shapes in ipairs { { { 7, 3 }, { 2, 3 } }, { { 3, 1 }, { 3, 6 } } } do
        same(n, { a, "shard(" .. d .. ")" }, { grid(shapes[1]), grid(shapes[2]) },
          function(x, y) return orrery.cat({ x, y }, d) end, "cat " .. d)
      end
    end)
  end)

  it("slices, single rows, strides of ranges, narrow, select, chunk", function()
    every(3, function(n, word)
      local x = grid(7, 4, 3)
      same(n, { word }, { x }, function(a) return a[{ { 2, 5 } }] end, "rows 2 to 5")
      same(n, { word }, { x }, function(a) return a[7] end, "the last row")
      same(n, { word }, { x }, function(a) return a[{ {}, 2, { 2, 3 } }] end, "a column of rows")
      same(n, { word }, { x }, function(a) return a:narrow(2, 2, 3) end, "narrow")
      same(n, { word }, { x }, function(a) return a:select(3, -1) end, "select")
      same(n, { word }, { x }, function(a)
        local parts = a:chunk(3)
        return parts[3] * 2 + parts[2]
      end, "chunk")
    end)
  end)

  it("index_select, gather, permute, expand, transpose", function()
    every(3, function(n, word)
      local x = grid(5, 4, 3)
      local rows = orrery.tensor({ 5, 1, 1, 4, 2, 5 }, { dtype = "i64" })
      same(n, { word }, { x }, function(a) return a:index_select(1, rows) end, "index_select 1")
      same(n, { word }, { x }, function(a) return a[rows] end, "index by a tensor")
      same(n, { word }, { x }, function(a) return a:index_select(3, rows:clamp(1, 3)) end, "index_select 3")
      same(n, { word }, { x }, function(a) return a:permute(2, 3, 1) end, "permute")
      same(n, { word }, { x }, function(a) return a:transpose(1, 3) end, "transpose")
      same(n, { word }, { x }, function(a) return a:unsqueeze(2):expand(5, 6, 4, 3) end, "expand")
      local index = orrery.randint(1, 5, 2, 4, 3)
      same(n, { word }, { x }, function(a) return a:gather(1, index) end, "gather")
    end)
  end)

  local geometries = { -- stride, padding, dilation, groups; channels in and out
    { 1, 0, 1, 1, 4, 5 }, { 2, 1, 1, 1, 3, 4 }, { 1, 2, 2, 1, 2, 3 }, { 1, 1, 1, 2, 4, 6 },
    { 2, 1, 1, 3, 6, 3 },
    { 1, 0, 1, 4, 4, 8 },
  }
  for _, g in ipairs(geometries) do
    local stride, padding, dilation, groups, cin, cout = unpack(g)
    it(("conv stride %d padding %d dilation %d groups %d under every placement"):format(stride, padding,
      dilation,
      groups), function()
      local function conv(x, w, b)
        return x:conv2d(w, b, stride, stride, padding, padding, dilation, dilation, groups)
      end
      every(4, function(n, word)
        local x, w, b = grid(3, cin, 5, 5), grid(cout, cin / groups, 3, 3), grid(cout)
        for _, of_w in ipairs { "replicate", "shard(1)", "shard(2)" } do
          local of_b = of_w == "shard(1)" and "shard(1)" or "replicate"
          same(n, { word, of_w, of_b }, { x, w, b }, conv, "conv")
        end
        same(n, { word, "partial", "partial" }, { x, w, b }, conv, "conv")
      end)
    end)
  end
end)

describe("behaviour 18", function()
  local function conv(groups)
    return function(x, w, b) return x:conv2d(w, b, 1, 1, 1, 1, 1, 1, groups) end
  end

  it("a channel split on group boundaries divides the groups: nothing moves", function()
    for _, n in ipairs { 1, 2, 3, 5 } do
      orrery.manual_seed(2)
      for _, groups in ipairs { n, 2 * n } do
        local x, w, b = grid(2, 2 * groups, 4, 4), grid(groups, 2, 3, 3), grid(groups)
        local want = conv(groups)(x, w, b)
        local px, pw = behave.place(x, n, "shard(2)"), behave.place(w, n, "shard(1)")
        local pb = behave.place(b, n, "shard(1)")
        local y
        local counts = behave.collectives(function() y = conv(groups)(px, pw, pb) end)
        assert.is_nil(next(counts), "something moved: " .. tostring(next(counts)))
        assert.truthy(n == 1 or y:layout():find("shard(2)", 1, true), y:layout())
        behave.near(want, y, 1e-12, n .. " devices")
        same(n, { "shard(2)", "shard(1)", "shard(1)" }, { x, w, b }, conv(groups), "conv")
      end
    end
  end)

  it("a split off a group boundary redistributes, with the right values", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      for _, groups in ipairs { 1, 2, 3, 4 } do
        local x, w, b = grid(2, 3 * groups, 4, 4), grid(2 * groups, 3, 3, 3), grid(2 * groups)
        for _, of_x in ipairs { "shard(1)", "shard(2)", "replicate" } do
          for _, of_w in ipairs { "shard(1)", "shard(2)" } do
            same(n, { of_x, of_w, "replicate" }, { x, w, b }, conv(groups), groups .. " groups")
          end
        end
      end
    end
  end)
end)

describe("behaviour 19", function()
  it("a gradient of sharded data is partial until it is reduced, and reduced before it is read", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      local x, w = grid(7, 3), grid(3, 2)
      local px = behave.place(x, n, "shard(1)")
      local pw = behave.place(w, n, "replicate"):clone()
      pw.requires_grad = true
      local g = orrery.grad((px:matmul(pw)):sum(), { pw })[1]
      assert.truthy(n == 1 or g:layout():find("partial(sum)", 1, true), g:layout())
      local want = x:sum(1):unsqueeze(2):expand(3, 2)
      behave.near(want, g, 0, n .. " devices")
      local seen
      pw:register_hook(function(h) seen = behave.list(h) end)
      px:matmul(pw):sum():backward()
      behave.near(want, seen, 0, "in a hook") -- reading is what reduces
      assert.truthy(pw.grad:layout():find("replicate", 1, true), pw.grad:layout())
      for _, shard in ipairs(pw.grad:shards()) do behave.near(want, shard.tensor, 0, shard.device) end
    end
  end)

  it("under a plan: one all-reduce for all parameters, every replica holds the sum", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(2)
      local net = nn.Sequential(nn.Linear(6, 8, f64), nn.Tanh(), nn.Linear(8, 3, f64))
      local x, t = orrery.randn(7, 6, f64), orrery.randint(1, 3, 7)
      nn.cross_entropy(net(x), t):backward()
      local want = behave.gradients(net)
      net:zero_grad()
      behave.plan(n)(net)
      local loss = nn.cross_entropy(net(x), t)
      local counts = behave.collectives(function() loss:backward() end)
      assert.equal(n > 1 and 1 or nil, counts["all_reduce data"])
      for name, p in net:named_parameters() do
        for _, shard in ipairs(p.grad:shards()) do
          behave.near(want[name], shard.tensor, 1e-12, name .. " on " .. shard.device)
        end
      end
    end
  end)
end)

describe("behaviour 20", function()
  it("gathering shard(1) of 5 rows on 4 devices gives 5 rows", function()
    local x = orrery.arange(1, 10, f64):view(5, 2)
    local p = behave.place(x, 4, "shard(1)")
    local sizes = {}
    for k, shard in ipairs(p:shards()) do sizes[k] = shard.tensor:size(1) end
    assert.same({ 2, 1, 1, 1 }, sizes)
    for _, y in ipairs { p:full(), p:redistribute("replicate"), p:to(device.name(5)),
      p:redistribute("shard(2)") } do
      assert.same({ 5, 2 }, y:size())
      behave.near(x, y, 0)
    end
    for _, shard in ipairs(p:redistribute("replicate"):shards()) do
      behave.near(x, shard.tensor, 0, shard.device)
    end
  end)

  it("every redistribution of 1 to 6 rows on every count keeps rows and values", function()
    for _, n in ipairs { 1, 2, 3, 4, 5 } do
      for rows = 0, 6 do
        local x = rows == 0 and orrery.zeros(0, 3, f64) or orrery.arange(1, rows * 3, f64):view(rows, 3)
        for _, from in ipairs { "replicate", "shard(1)", "shard(2)" } do
          for _, to in ipairs { "replicate", "shard(1)", "shard(2)", "partial(sum)" } do
            local y = behave.place(x, n, from):redistribute(to)
            behave.near(x, y, 0, ("%d rows on %d, %s to %s"):format(rows, n, from, to))
          end
        end
      end
    end
  end)
end)
