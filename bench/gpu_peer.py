"""The process that runs PyTorch's side of the GPU bench: the cases of gpu_cases.lua, by peer.py's commands.

usage: gpu_peer.py DEVICE, "cuda" (or "cpu", which checks that both sides do the same work).
Invariant: data, first weights and order of work are those of gpu_cases.lua; PyTorch is called as its users
call it: fused AdamW, its own attention, autocast. To add a case: a function here, named as there.
"""
import sys

DEVICE = sys.argv.pop(1)

import peer  # noqa: E402 (takes the arguments that are left)
import torch  # noqa: E402
from torch import nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

peer.LIMIT = 300  # torch.compile takes its time
DTYPES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


i = torch.arange(65536, dtype=torch.int64)
base = ((i * i % 65537 * 48271 % 65537).double() / 65537 - 0.5).float().to(DEVICE)


def tensor(dtype, *shape):
    n = torch.Size(shape).numel()
    return base.repeat(-(-n // 65536))[:n].to(DTYPES[dtype]).reshape(shape).clone()


def ids(n, limit):
    k = torch.arange(n, dtype=torch.int64)
    return (k * k % 1000003 * 7919 % limit).to(DEVICE)


def running(f):
    first = sum(y.detach().float().square().mean().item() for y in f())

    def run(n):
        for _ in range(n):
            f()
        wait()
    return run, first


def both_ways(f, g, *inputs):
    inputs = [x.requires_grad_() for x in inputs]

    def once():
        y = f(*inputs)
        return (y, *torch.autograd.grad(y, inputs, g))
    return running(once)


def clone(dtype, n):
    x = tensor(dtype, n)
    return running(lambda: (x.clone(),))


def add(dtype, n):
    x, y = tensor(dtype, n), tensor(dtype, n)
    return running(lambda: (x + y,))


def gelu(dtype, n):
    x = tensor(dtype, n)
    return running(lambda: (F.gelu(x),))


def muladd(dtype, rows, columns):
    x, w, b = tensor(dtype, rows, columns), tensor(dtype, columns), tensor(dtype, columns)
    return running(lambda: (x * w + b,))


def strided(dtype, rows, columns):
    x, y = tensor(dtype, columns, rows), tensor(dtype, rows, columns)
    return running(lambda: (x.t() + y,))


def sum_of(dtype, rows, columns, which):
    x = tensor(dtype, rows, columns)
    dim = {"rows": 1, "columns": 0}.get(which)
    return running(lambda: (x.sum() if dim is None else x.sum(dim),))


def by_rows(f):
    """A case of (rows, columns), with as many parameters of a row as f takes after x."""
    def case(dtype, rows, columns, how="forward"):
        x = tensor(dtype, rows, columns)
        rest = [tensor(dtype, columns) for _ in range(f.__code__.co_argcount - 1)]
        if how == "both":
            return both_ways(f, tensor(dtype, rows, columns), x, *rest)
        return running(lambda: (f(x, *rest),))
    return case


softmax = by_rows(lambda x: x.softmax(1))
layer_norm = by_rows(lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b, 1e-5))
rms_norm = by_rows(lambda x, w: F.rms_norm(x, x.shape[1:], w, 1e-6))


def cross_entropy(dtype, rows, columns):
    x, y = tensor(dtype, rows, columns), ids(rows, columns)
    return both_ways(lambda t: F.cross_entropy(t, y), None, x)


def embedding(dtype, vocabulary, width, n):
    w, at = tensor(dtype, vocabulary, width), ids(n, vocabulary)
    return both_ways(lambda t: F.embedding(at, t), tensor(dtype, n, width), w)


def adamw(dtype, n, each):
    params = []
    for _ in range(n // each):
        params.append(tensor(dtype, each).requires_grad_())
        params[-1].grad = tensor(dtype, each)
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)

    def once():
        optimizer.step()
        return (params[0],)
    return running(once)


def rounded(dtype, case):
    """The case with f32 products rounded where the dtype is tf32, and not rounded where it is f32."""
    run, first = case

    def run_so(n):
        set_rounding(dtype)
        return run(n)
    return run_so, first


def set_rounding(dtype):
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def matmul(dtype, n):
    x, y = tensor(dtype, n, n), tensor(dtype, n, n)
    set_rounding(dtype)
    return rounded(dtype, running(lambda: (x @ y,)))


def conv(dtype, n, channels, size, k):
    x, w = tensor(dtype, n, channels, size, size), tensor(dtype, channels, channels, k, k)
    set_rounding(dtype)
    return rounded(dtype, both_ways(lambda a, b: F.conv2d(a, b, None, 1, k // 2),
                                    tensor(dtype, n, channels, size, size), x, w))


def attention(dtype, batch, heads, positions, features, how="forward"):
    x = [tensor(dtype, batch, heads, positions, features) * k for k in (1, 2, 3)]

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if how == "both":
        return both_ways(f, tensor(dtype, batch, heads, positions, features), *x)
    return running(lambda: (f(*x),))


def fill(net):
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() > 1:  # q, k and v have the same weights, on both sides
                rows = p.size(1) if "qkv" in name else p.size(0)
                value = (tensor("f32", rows * p.size(1)) * (2 / p.size(1) ** 0.5)).reshape(rows, -1)
                p.copy_(value.repeat(p.size(0) // rows, 1))
            elif "bias" in name:
                p.zero_()


def training(step, how, *given):
    """Eager, or by torch.compile of what the step calls."""
    set_rounding("f32")
    first = step(*given).item()

    def run(n):
        for _ in range(n):
            step(*given)
        wait()
    return run, first


def mlp(how, _devices):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
    fill(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return training(step, how, tensor("f32", 32, 64), ids(32, 10))


class Block(nn.Module):
    """Queries, keys and values by one product, as PyTorch's users write it."""

    def __init__(self, width, heads):
        super().__init__()
        self.width, self.heads = width, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (part.reshape(n, t, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(self.width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, self.width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, context, layers, width, heads, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, text, at):
        x = self.norm(self.blocks(self.tokens(text) + self.positions(at)))
        return x.reshape(-1, x.size(2)) @ self.tokens.weight.t()


def gpt(how, batch, context, layers, width, heads, vocabulary):
    net = GPT(context, layers, width, heads, vocabulary).to(DEVICE)
    fill(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    text = ids(batch * (context + 1), vocabulary).reshape(batch, context + 1)
    model = torch.compile(net) if how == "compiled" else net

    def step(x, y, at):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x, at), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return training(step, how, text[:, :context].contiguous(), text[:, 1:].reshape(-1),
                    torch.arange(context, device=DEVICE))


def op(_devices):
    x = tensor("f32", 4)
    return running(lambda: (x + x,))


MADE = {f.__name__: f for f in (clone, add, gelu, muladd, strided, cross_entropy, embedding, adamw, matmul,
                                conv, attention, mlp, gpt, op)}
MADE.update(sum=sum_of, softmax=softmax, layer_norm=layer_norm, rms_norm=rms_norm)


class Cases(dict):
    """name:argument:... as the case that it names."""

    def __missing__(self, word):
        name, *parts = word.split(":")
        return lambda _: MADE[name](*(int(p) if p.isdigit() else p for p in parts))


def prepare(*words):
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return peer.prepare(*words)


def drop(key):
    answer = peer.drop(key)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return answer


def peak():
    return str(torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0)


peer.CASES = Cases()
peer.COMMANDS.update(prepare=prepare, drop=drop, peak=peak)
peer.main()
