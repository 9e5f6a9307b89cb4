"""The process that runs PyTorch's side of the bench: the commands of worker.lua, the cases of cases.lua.

usage: peer.py [RANK WORLD STORE_FILE]; with a rank, the processes of one gloo group are sent the same
commands, training runs under DistributedDataParallel and each holds its part of the batch; `wide` runs
under tensor parallel, `blocks` under pipelining.
Invariant: one line is written for each command, and nothing else; a command that takes LIMIT seconds
ends the process. To add a case: a function in CASES that gives run(n) and the loss of the first step
(or None), beside its twin in cases.lua.
"""
import gc
import signal
import sys
import time

LIMIT = 60  # seconds of loading, of a command, of the end
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(LIMIT)

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


def trained(step, first):
    """run(n), and the loss of the first step."""
    def run(n):
        for _ in range(n):
            step()
        if WORLD > 1:
            dist.barrier()
    return run, first


def stepping(net, x, y, optimizer):
    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss
    return step


def training(net, x, y, **options):
    fill(net)
    if WORLD > 1:
        net = nn.parallel.DistributedDataParallel(net)
        x, y = x.chunk(WORLD)[RANK].contiguous(), y.chunk(WORLD)[RANK].contiguous()
    step = stepping(net, x, y, torch.optim.SGD(net.parameters(), **options))
    first = step().detach()
    if WORLD > 1:
        dist.all_reduce(first)
        first /= WORLD
    return trained(step, first.item())


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


def wide(size):
    batch = size or 256
    net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
                        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    x, y, options = tensor(batch, 784), labels(batch), {"lr": 0.01, "momentum": 0.9}
    if WORLD == 1:
        return training(net, x, y, **options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)
    fill(net)
    net = parallelize_module(net, init_device_mesh("cpu", (WORLD,)), {
        "0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()})
    step = stepping(net, x, y, torch.optim.SGD(net.parameters(), **options))
    return trained(step, step().item())


def blocks(size):
    batch = size or 1024
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    net = nn.Sequential(*layers)
    x, y, options = tensor(batch, 512), labels(batch), {"lr": 0.01, "momentum": 0.9}
    if WORLD == 1:
        return training(net, x, y, **options)
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    fill(net)
    half = net[:8] if RANK == 0 else net[8:]
    stage = PipelineStage(half, RANK, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(half.parameters(), **options)

    def step():
        optimizer.zero_grad()
        losses = []
        if RANK == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    first = step()
    dist.broadcast(first, src=WORLD - 1)
    return trained(step, first.item())


def attention(size):
    batch = size or 16
    x = [(tensor(batch, 8, 128, 32) * k).requires_grad_() for k in (1, 2, 3)]
    g = tensor(batch, 8, 128, 32)

    def once():
        y = F.scaled_dot_product_attention(*x, is_causal=True)
        return y, torch.autograd.grad(y, x, g)

    y, grads = once()
    first = y.square().sum() + sum(t.square().sum() for t in grads)

    def run(n):
        for _ in range(n):
            once()
    return run, first.item()


class Block(nn.Module):
    """Queries, keys and values by one product, as PyTorch's users write it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.qkv, self.o = nn.Linear(256, 768), nn.Linear(256, 256)
        self.fc1, self.fc2 = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (part.reshape(n, t, 8, 32).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(256, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, 256))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, 256), nn.Embedding(128, 256)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(4))), nn.LayerNorm(256)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() > 1:  # q, k and v have the same weights, on both sides
                    rows = 256 if "qkv" in name else p.size(0)
                    p.copy_((tensor(rows, p.size(1)) * (2 / p.size(1) ** 0.5)).repeat(p.size(0) // rows, 1))
                elif "bias" in name:
                    p.zero_()

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        return self.norm(self.blocks(x)).reshape(-1, 256) @ self.tokens.weight.t()


def gpt(size):
    batch, net = size or 16, GPT()
    k = torch.arange(batch * 129, dtype=torch.int64)
    text = (k * k % 251).reshape(batch, 129)
    x, y = text[:, :128].contiguous(), text[:, 1:].reshape(-1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    step = stepping(net, x, y, optimizer)
    return trained(step, step().item())


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
         "cnn": cnn, "wide": wide, "blocks": blocks, "attention": attention, "gpt": gpt,
         "allreduce": allreduce}
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
    counted = run(int(n))
    return f"{counted if isinstance(counted, float) else time.perf_counter() - start:.9f}"


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


def main():
    signal.alarm(0)
    for line in sys.stdin:
        words = line.split()
        signal.alarm(LIMIT)
        try:
            answer = COMMANDS[words[0]](*words[1:])
        except Exception as problem:  # answered, so that the bench names it
            answer = "error " + repr(problem).replace("\n", " ")
        signal.alarm(0)
        print(answer, flush=True)
    signal.alarm(LIMIT)  # a group whose other process is gone may not end by itself


if __name__ == "__main__":
    main()
