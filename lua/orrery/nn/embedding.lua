-- nn.Embedding: a table of vectors looked up by id.
-- Invariant: ids count from 1, so row i of the weight is the vector of id i.
-- To add an option: name it in the options check, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class
local init = require "orrery.nn.initialize"

--- y (..., dim) from ids (...) in 1..n (i64 or i32). The weight (n, dim) starts from N(0, 1),
--- as in PyTorch.
---@param n integer the number of ids
---@param dim integer
---@param options? {dtype?: string, device?: string}
local Embedding = class("Embedding", function(self, n, dim, options)
  options = check.options("Embedding", options, { dtype = true, device = true })
  self.count = check.count("Embedding", "the number of ids", n)
  self.width = check.count("Embedding", "the dimension", dim)
  self.weight = init.new_normal(options, n, dim)
end)

---@param ids orrery.Tensor (...) of i64 or i32
---@return orrery.Tensor (..., dim)
function Embedding:forward(ids) return core.embedding(self.weight, ids) end

function Embedding:describe() return ("%d, %d"):format(self.count, self.width) end

return { Embedding = Embedding }
