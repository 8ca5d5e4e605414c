"""Where a process stands: its device, its precision, its rank among others, its random numbers."""

import atexit
import ctypes
import dataclasses
import os
import platform
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm


def show(text: str, stream=None):
    """A line above a bar. What cannot be shown is replaced, and a stream that nobody reads any more is closed."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        tqdm.write(text.encode(encoding, "replace").decode(encoding), file=stream)
        stream.flush()
    except OSError:  # the rest goes nowhere, and at its end Python has nothing to complain of
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(message: str, kind: str = "warning"):
    """One line on stderr, from one process a node."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        show(f"{kind}: {message}", sys.stderr)


def fail(message: str):
    """One line on stderr, and a non-zero exit."""
    warn(message, "error")
    sys.exit(1)


@contextmanager
def clear_errors(kinds=(ValueError, OSError, ImportError)):
    """Turns into one line what a user can cause: these kinds in set-up, in the loop only what the machine lacks."""
    try:
        yield
    except kinds as error:
        fail(" ".join(str(error).split()))
    except (RuntimeError, MemoryError) as error:
        text = " ".join(f"{type(error).__name__} {error}".split())[:300]
        told = re.search("(not enough|out of|allocate) memory|overflow", text, re.I)
        if told or isinstance(error, MemoryError):
            fail(f"the memory does not suffice: make the model or its batches smaller ({text})")
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            fail(f"torch.compile fails: install the compiler that it asks for, or give --compile false ({text})")
        raise


@dataclasses.dataclass
class Context:
    """Where this process stands: its rank among `world` processes, its device, its precision."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    allocator: str = "default"

    def autocast(self):
        """Inside the `with`, matrix products are in bfloat16 where that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def send_all(self, *xs: Tensor | None) -> list:
        return [x if x is None else self.send(x) for x in xs]

    def send(self, x: Tensor) -> Tensor:
        """The tensor on the device; the host does not wait for the copy."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, in fp32 (autocast does the rest) or float64."""
        return model.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def say(self, text: str):
        """Prints from one process alone, above a bar."""
        if self.rank == 0:
            show(text)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, on every one of them; where x is on the host, no device is waited for."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def mean(self, number: float) -> float:
        """The mean of a number over all processes."""
        return float(self.sum(torch.tensor(float(number), dtype=torch.float64))) / self.world

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

    @property
    def machine(self) -> dict:
        """What a result is measured on."""
        name = platform.processor() or platform.machine()
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        elif Path("/proc/cpuinfo").exists():
            name = (re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [name])[0]
        return {
            "device": name,
            "processes": self.world,
            "threads": torch.get_num_threads(),
            "allocator": self.allocator,
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }


def setup(device: str = "auto", dtype: str = "auto") -> Context:
    """Joins the processes that torchrun started, and picks device and precision.

    Raises ValueError for a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from None
    cuda, fast, allocator = device.startswith("cuda"), False, "default"
    if cuda:
        torch.cuda.set_device(device)
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        allocator = keep_memory()
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if dtype == "auto":
        dtype = "bfloat16" if fast else "float32"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    context = Context(rank, world, torch.device(device), getattr(torch, dtype), allocator)
    if world > 1 and not dist.is_initialized():
        join(context)
    return context


def join(context: Context):
    """Makes one group of the processes: tensors on CUDA are exchanged by NCCL, those on the host by gloo."""
    world = context.world
    store, *_ = next(dist.rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # torchrun keeps one store through all its restarts: without a name of its own, each would find the addresses
        # of processes that are dead (pytorch issue 135712). On several nodes the counts of restarts may differ.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend, card = "gloo", None
    if context.device.type == "cuda":
        backend, card = "cpu:gloo,cuda:nccl", context.device
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=world, device_id=card)
    atexit.register(dist.destroy_process_group)


def keep_memory() -> str:
    """Lets glibc keep freed memory: mapping and faulting in large temporaries anew takes a third of a CPU's step."""
    if platform.libc_ver()[0] != "glibc":
        return "default"
    libc = ctypes.CDLL("libc.so.6")
    # M_MMAP_THRESHOLD; an older glibc refuses so much, and M_TRIM_THRESHOLD, the next, alone does harm.
    if not libc.mallopt(-3, 1 << 30):
        return "default"
    libc.mallopt(-1, (1 << 31) - 1)
    return "glibc, mallopt"


def seed_all(*key: int):
    """Seeds torch from integers. Missing ones are as good as 0, and (seed,) is of the weights: steps count from 1."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
