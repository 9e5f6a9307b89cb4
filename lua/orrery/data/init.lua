-- orrery.data: readers of files, batches of tensors, augmentation.
-- Invariant: readers give host tensors and name the byte of what they cannot read; no reader keeps a
-- file open.
-- To add a reader: a file beside this one that returns a function, and a line here.
return {
  idx = require "orrery.data.idx",
  csv = require "orrery.data.csv",
  npy = require "orrery.data.npy",
  cifar10 = require "orrery.data.cifar10",
  bytes = require "orrery.data.bytes",
  batches = require "orrery.data.batches",
  augment = require "orrery.data.augment",
}
