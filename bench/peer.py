"""The process that runs PyTorch's side of the bench: the commands of worker.lua, the cases of cases.lua.

usage: peer.py [RANK WORLD STORE_FILE]; with a rank, the processes of one gloo group are sent the same
commands, training runs under DistributedDataParallel and each holds its part of the batch.
Invariant: one line is written for each command, and nothing else. To add a case: a function in CASES
that gives run(n) and the loss of the first step (or None), beside its twin in cases.lua.
"""
import gc
import sys
import time

import torch
from torch import nn
import torch.nn.functional as F

RANK = int(sys.argv[1]) if len(sys.argv) > 1 else 0
WORLD = int(sys.argv[2]) if len(sys.argv) > 1 else 1
if WORLD > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=RANK, world_size=WORLD)


def tensor(*shape):
    """f32 numbers in [-0.5, 0.5): quadratic residues, scattered."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    value = (i * i % 65537) * 48271 % 65537
    return (value.double() / 65537 - 0.5).float().reshape(shape)


def labels(n):
    return torch.arange(n, dtype=torch.int64) * 7 % 10


def fill(net):
    bound = 1
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                bound = 2 / (p.numel() / p.size(0)) ** 0.5
            p.copy_((tensor(p.numel()) * bound).reshape(p.shape))


def training(net, x, y, **options):
    fill(net)
    if WORLD > 1:
        net = nn.parallel.DistributedDataParallel(net)
        x, y = x.chunk(WORLD)[RANK].contiguous(), y.chunk(WORLD)[RANK].contiguous()
    optimizer = torch.optim.SGD(net.parameters(), **options)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    first = step().detach()
    if WORLD > 1:
        dist.all_reduce(first)
        first /= WORLD

    def run(n):
        for _ in range(n):
            step()
        if WORLD > 1:
            dist.barrier()
    return run, first.item()


def add(requires_grad):
    x = torch.tensor([1.0, 2, 3, 4], requires_grad=requires_grad)
    y = torch.tensor([5.0, 6, 7, 8], requires_grad=requires_grad)

    def run(n):
        for _ in range(n):
            z = x + y
        gc.collect()
        return z
    return run, None


def tiny(_):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return training(net, tensor(32, 64), labels(32), lr=0.01)


def mlp(size):
    batch = size or 128
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                        nn.Linear(512, 10))
    return training(net, tensor(batch, 784), labels(batch), lr=0.01, momentum=0.9)


def cnn(size):
    batch = size or 64
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
                        nn.Linear(128, 10))
    return training(net, tensor(batch, 1, 28, 28), labels(batch), lr=0.01, momentum=0.9)


def allreduce(size):
    x = torch.ones(size // 4)
    dist.all_reduce(x)
    first = x[0].item()
    x.zero_()

    def run(n):
        waiting = [dist.all_reduce(x, async_op=True) for _ in range(n)]
        for work in waiting:
            work.wait()
    return run, first


CASES = {"add": lambda _: add(False), "add_grad": lambda _: add(True), "tiny": tiny, "mlp": mlp,
         "cnn": cnn, "allreduce": allreduce}
ready = {}


def prepare(key, case, threads, _devices, size):
    torch.set_num_threads(int(threads))
    run, loss = CASES[case](int(size))
    ready[key] = run, int(threads)
    return "ok -" if loss is None else f"ok {loss:.7g}"


def time_runs(key, n):
    run, threads = ready[key]
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    gc.collect()
    if WORLD > 1:
        dist.barrier()
    start = time.perf_counter()
    run(int(n))
    return f"{time.perf_counter() - start:.9f}"


def drop(key):
    del ready[key]
    gc.collect()
    return "ok"


def memory():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return str(int(line.split()[1]) * 1024)
    return "0"


def version():
    return f"{torch.__version__}, Python {sys.version.split()[0]}"


COMMANDS = {"prepare": prepare, "time": time_runs, "drop": drop, "memory": memory, "version": version}

for line in sys.stdin:
    words = line.split()
    try:
        answer = COMMANDS[words[0]](*words[1:])
    except Exception as problem:  # answered, so that the bench names it
        answer = "error " + repr(problem).replace("\n", " ")
    print(answer, flush=True)
