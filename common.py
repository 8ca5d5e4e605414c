"""Processes, devices, precision, seeds, optimizer and schedules: what every script needs, and no paper is about."""

import atexit
import ctypes
import dataclasses
import math
import os
import platform
import re
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm


def warn(message: str, kind: str = "warning"):
    """One line on stderr, from one process a node."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        tqdm.write(f"{kind}: {message}", file=sys.stderr)  # above a bar


def fail(message: str):
    """One line on stderr, and a non-zero exit."""
    warn(message, "error")
    leave(1)


SIGNALS = signal.SIGTERM, signal.SIGINT  # the second is Ctrl-C


def stop(number: int, where: str = ""):
    """Ends the process with the exit code of this signal, 143 or 130, and one line."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        tqdm.write(f"stopped{where}; the same command goes on", file=sys.stderr)
    leave(128 + number)


def leave(code: int):
    """Ends the process; a signal meanwhile ends it without words."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)


@contextmanager
def clear_errors():
    """Turns what a user can cause (ValueError, OSError, ImportError) into one line. For set-up, not for the loop."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))


# ---------------------------------------------------------------------------------------------------------------------
# Processes, devices, precision


@dataclasses.dataclass
class Context:
    """Where this process stands: its rank among `world`, its device, its precision."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    allocator: str = "default"

    def autocast(self):
        half = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, self.dtype) if half else nullcontext()

    def send(self, x: Tensor) -> Tensor:
        """x on the device; the host does not wait for the copy."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    def send_all(self, *xs: Tensor | None) -> list[Tensor | None]:
        return [x if x is None else self.send(x) for x in xs]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, on every one of them, where x was."""
        if self.world == 1:
            return x
        y = x.to(self.device, copy=True)
        dist.all_reduce(y)
        return y.to(x.device)

    def most(self, number: int) -> int:
        """The largest of the processes' numbers, on every one of them; no device is waited for."""
        if self.world == 1:
            return number
        x = torch.tensor(number)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def gather(self, x) -> list:
        """What every process has, by rank, on every one of them; anything that can be pickled."""
        if self.world == 1:
            return [x]
        everyone = [None] * self.world
        dist.all_gather_object(everyone, x)
        return everyone

    def barrier(self):
        if self.world > 1:
            dist.barrier()


def setup(device: str = "auto", dtype: str = "auto") -> Context:
    """Joins the processes that torchrun started, and picks device and precision.

    Tensors on CUDA are exchanged by NCCL, those on the host by gloo. On a CPU with glibc, freed memory stays with the
    process. Raises ValueError for a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    cuda = device.startswith("cuda")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from None
    if cuda:
        torch.cuda.set_device(device)
    if dtype == "auto":
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else device == "cpu" and cpu_has_amx()
        dtype = "bfloat16" if fast else "float32"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        # On one node torchrun keeps one store through all its restarts: without a name of its own, each would find
        # the addresses of processes that are dead (pytorch issue 135712).
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
        store, *_ = next(dist.rendezvous("env://"))
        options = {"store": dist.PrefixStore(restart if one_node else "0", store), "rank": rank, "world_size": world}
        if cuda:
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device(device), **options)
        else:
            dist.init_process_group("gloo", **options)
        atexit.register(dist.destroy_process_group)
    allocator = "default"
    if device == "cpu" and platform.libc_ver()[0] == "glibc":
        # Mapping and faulting in the memory of large temporaries anew at every call takes a third of a step.
        libc = ctypes.CDLL("libc.so.6")
        if libc.mallopt(-3, 1 << 30):  # M_MMAP_THRESHOLD; an older glibc refuses so much, and the next alone does harm
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
            allocator = "glibc, mallopt"
    return Context(rank, world, torch.device(device), getattr(torch, dtype), allocator)


def place(model: torch.nn.Module, context: Context) -> torch.nn.Module:
    """The model on its device, in fp32 (autocast does the rest) or float64."""
    return model.to(context.device, torch.float64 if context.dtype == torch.float64 else torch.float32)


def cpu_has_amx() -> bool:
    """Whether bf16 products pay on this CPU. With AVX512-BF16 alone they are native, and slower than fp32 (0.6 x)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def seed_all(*key: int):
    """Seeds torch from any number of integers, such as (seed, step, micro-batch).

    Missing ones count as 0: (seed,) of the weights is (seed, 0, 0), so steps are counted from 1 here.
    """
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


# Dense bf16 / fp16 peak of a card, FLOP/s, by a part of its name; the first match counts.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
PEAK_FLOPS |= {"L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12, "3090": 71e12}


def peak_flops(context: Context) -> float | None:
    """Of all processes together; None where it is not known."""
    if context.device.type != "cuda" or context.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(context.device)
    for part, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{part}\b", name):
            return peak * context.world
    return None


def machine(context: Context) -> dict:
    """What a result was measured on."""
    name = platform.processor() or platform.machine()
    if context.device.type == "cuda":
        name = torch.cuda.get_device_name(context.device)
    elif Path("/proc/cpuinfo").exists():
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text() + "model name : unknown")[1]
    return {
        "device": name,
        "processes": context.world,
        "threads": torch.get_num_threads(),
        "allocator": context.allocator,
        "dtype": str(context.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Optimisation


def cross_entropy(logits: Tensor, targets: Tensor, **options) -> Tensor:
    """That of torch.nn.functional, of logits (M, V) and targets (M,), in fp32 at least."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, **options)


def adamw(model: torch.nn.Module, config) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings, not norms, biases or scalars (the experts' biases are told by name).

    Routers learn at `router_lr` times the rate of the rest, and what distances add to attention at `distance_lr` times.
    """
    groups = {}  # (decay, times the learning rate, class: FSDP's are not stepped with others) -> parameters
    for name, p in model.named_parameters():
        if p.requires_grad:
            small = p.dim() < 2 or "ln_" in name or name.endswith(("bias", "b_in", "b_out"))
            times = config.router_lr if "router." in name else config.distance_lr if "distance." in name else 1.0
            groups.setdefault((0.0 if small else config.weight_decay, times, type(p)), []).append(p)
    options = []
    for (decay, times, _), parameters in groups.items():
        options.append({"params": parameters, "weight_decay": decay, "times": times})
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(options, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float):
    for group in optimizer.param_groups:
        group["lr"] = value * group["times"]


def cosine(step: int, steps: int, warmup: float, peak: float, floor: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a cosine down to `floor`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def linear(step: int, steps: int, warmup: float, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a line down to 0 at `steps`."""
    rising = max(1, round(warmup * steps))
    return peak * min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def inverse_sqrt(step: int, warmup: int, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up to `peak` in `warmup` steps, then falling as 1 / sqrt(step)."""
    return peak * min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
