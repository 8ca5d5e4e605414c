"""The environment of a process: device, precision, rank and random seed."""

import atexit
import ctypes
import dataclasses
import os
import platform
import re
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from engine import one_line


def show(text: str, stream=None):
    """Prints a line above the progress bar. A closed pipe is ignored."""
    stream = stream or sys.stdout
    try:
        tqdm.write(text, file=stream)
        stream.flush()
    except OSError:  # discard all further output, so that Python does not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(message: str, kind: str = "warning"):
    """Prints one line to stderr, on one process per node."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        show(f"{kind}: {message}", sys.stderr)


def fail(message: str):
    """Prints one line to stderr and exits with status 1."""
    warn(message, "error")
    sys.exit(1)


@contextmanager
def clear_errors(kinds=(ValueError, OSError, ImportError)):
    """Exits with one line on errors of these kinds, or if memory or a compiler is missing. Other errors are bugs."""
    try:
        yield
    except kinds as error:
        fail(one_line(error))
    except (RuntimeError, MemoryError) as error:
        text = " ".join(f"{type(error).__name__} {error}".split())[:300]
        if re.search("(not enough|out of|allocate) memory|overflow", text, re.I) or isinstance(error, MemoryError):
            fail(f"out of memory: make the model or its batches smaller ({text})")
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            fail(f"torch.compile failed: install the compiler it needs, or pass --compile false ({text})")
        raise


@dataclasses.dataclass
class Context:
    """The rank of this process among `world` processes, its device and its precision."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    host_group: dist.ProcessGroup | None = None  # gloo, on a GPU as well

    def autocast(self):
        """Context manager that runs matrix products in bfloat16, if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def send_all(self, *xs: Tensor | None) -> list:
        return [x if x is None else self.send(x) for x in xs]

    def send(self, x: Tensor) -> Tensor:
        """Copies the tensor to the device; asynchronous on CUDA."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device, in float64 if that is the precision, else in fp32 (for autocast)."""
        return model.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def say(self, text: str):
        """Prints a line above the progress bar, on rank 0 alone."""
        if self.rank == 0:
            show(text)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduces x to its sum over all processes. A tensor on the host needs no device sync."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def mean(self, number: float) -> float:
        """The mean of a number over all processes."""
        return float(self.sum(torch.tensor(float(number), dtype=torch.float64))) / self.world

    def gather(self, x) -> list:
        """Returns the objects of all processes, by rank, on every process. x must be picklable."""
        if self.world == 1:
            return [x]
        objects = [None] * self.world
        dist.all_gather_object(objects, x)
        return objects

    def barrier(self):
        """Waits for all processes, for up to a day while rank 0 prepares a corpus. NCCL's barrier would busy-wait."""
        if self.world > 1:
            dist.barrier(self.host_group)

    @property
    def machine(self) -> dict:
        """The hardware and the library versions that produce a result."""
        name = platform.processor() or platform.machine()
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        elif Path("/proc/cpuinfo").exists():
            name = (re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [name])[0]
        return {
            "device": name,
            "processes": self.world,
            "threads": torch.get_num_threads(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }


def setup(device: str = "auto", dtype: str = "auto") -> Context:
    """Picks device and precision, and joins torchrun's process group. Raises ValueError if there is no such device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from None
    fast_bf16 = False
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        # torch prefers cuDNN's attention on an H100. Some of its kernels round the dropout rate to sixteenths (pytorch
        # issue 174245), some return NaN gradients with a mask if T % 128 is 64 (196678), and it plans each new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        fast_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        keep_memory()
        fast_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if dtype == "auto":
        dtype = "bfloat16" if fast_bf16 else "float32"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    context = Context(rank, world, torch.device(device), getattr(torch, dtype))
    if world > 1 and not dist.is_initialized():
        join(context)
    return context


def join(context: Context):
    """Initializes the process group: NCCL for CUDA tensors, gloo for host tensors."""
    world = context.world
    store, *_ = next(dist.rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # torchrun keeps one store across restarts: without a prefix, a restart would find the addresses of dead
        # processes (pytorch issue 135712). Several nodes get no prefix, since their restart counts may differ.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend, gpu = "gloo", None
    if context.device.type == "cuda":
        backend, gpu = "cpu:gloo,cuda:nccl", context.device
    # The default of ten minutes is too short while rank 0 prepares a corpus, or one process compiles a new graph.
    patience = timedelta(days=1)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=world, device_id=gpu, timeout=patience)
    context.host_group = dist.new_group(backend="gloo", timeout=patience)
    atexit.register(dist.destroy_process_group)


def keep_memory():
    """Makes glibc keep freed memory: otherwise, page faults of large temporaries take a third of a step on a CPU."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        if libc.mallopt(-3, 1 << 30):  # M_MMAP_THRESHOLD; an older glibc refuses such a large value
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD, slower if set without the former


def seed_all(*key: int):
    """Seeds torch from integers. Missing keys count as 0; (seed,) seeds the weights, since steps count from 1."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
