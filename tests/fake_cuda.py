"""Training steps on a simulated GPU, in a separate process: python fake_cuda.py FOLDER.

Runs forward and backward passes of every script's model, and writes {case: error, or ""} to FOLDER/steps.json. Tensors
have shapes but no values (FakeTensorMode), so reading a value on the host raises. Autograd asks which GPU is current:
a few lines of C++ answer, and are loaded before torch looks for a real GPU.
"""
# ruff: noqa: E402, since the simulated GPU is loaded before torch

import contextlib
import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

GPU_HOOKS = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch looks it up by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)
"""


def load_gpu_hooks(folder: Path):
    torch = Path(importlib.util.find_spec("torch").origin).parent
    library, lib = folder / "gpu.so", torch / "lib"
    if not library.exists():
        (folder / "gpu.cpp").write_text(GPU_HOOKS)
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", f"-L{lib}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", str(folder / "gpu.cpp"), "-o", str(library), *options], check=True)
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        if (lib / name).exists():
            ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


if __name__ == "__main__":
    load_gpu_hooks(Path(sys.argv[1]))

import torch
from helpers import constants
from torch._subclasses.fake_tensor import FakeTensorMode

import model
import train_electra
from routers import ROUTERS


@contextlib.contextmanager
def simulated_gpu():
    """Inside the `with`, torch finds a GPU, on which nothing can run."""
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0), _lazy_init=None)
    answers |= dict(get_device_properties=SimpleNamespace(major=9, minor=0, multi_processor_count=132))
    answers |= dict(_exchange_device=0, _maybe_exchange_device=0)
    answers |= dict(get_rng_state=torch.ByteTensor(16), set_rng_state=None)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        yield


def to_gpu(net: torch.nn.Module) -> torch.nn.Module:
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device="cuda"))
        for name, x in module._buffers.items():
            module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    return net.train()


def step(net, read: bool = False):
    """The loss of one micro-batch, with padding for all but GPT. read: the host reads the loss."""
    ids, nonpad = torch.randint(V, (2, 16), device="cuda"), torch.arange(29, device="cuda")
    if isinstance(net, model.GPT):
        inputs = ids, ids
    elif isinstance(net, model.Translator):
        inputs = ids, nonpad, ids, nonpad, ids.flatten()[nonpad]
    else:
        masked = nonpad[::3]
        inputs = ids, masked, ids.flatten()[masked], nonpad
    with torch.autocast("cuda", torch.bfloat16):
        loss, balance, *disc_loss = net(*inputs)
        loss = loss + 0.01 * balance + sum(disc_loss)
    return loss * float(loss) if read else loss


# Every script's model -> its class, its constants, and what removes the capacity limit.
MODELS = {
    "GPT": (model.GPT, {}, dict(capacity=float("inf"))),
    "MaskedLM": (model.MaskedLM, dict(top_k=2, capacity_factor=0.5), dict(capacity_factor=float("inf"))),
    "Electra": (train_electra.Electra, dict(top_k=2, capacity_factor=0.5), dict(capacity_factor=float("inf"))),
    "Translator": (model.Translator, dict(moe_after=()), dict(capacity=float("inf"))),
}
V = 99
SMALL = dict(n_embd=32, ffn_size=64, experts=8, decoder_layers=2, decoder_moe=True, generator_layers=1)
SMALL |= dict(label_smoothing=0.1)


def build(name: str, router: str, limit: bool = True):
    kind, options, no_limit = MODELS[name]
    options = SMALL | options | ({} if limit else no_limit)
    return kind(constants(router=router, relative_bias=name == "Electra", **options), V)


def steps() -> dict[str, str]:
    errors = {}

    def attempt(case: str, loss):
        try:
            with FakeTensorMode():
                loss().backward()
            errors[case] = ""
        except Exception as error:
            errors[case] = f"{type(error).__name__}: {error!s:.200}"

    for name in MODELS:
        attempt(f"{name}, dense", lambda name=name: step(to_gpu(build(name, "dense"))))
        for router in ROUTERS:
            for limit in (True, False):
                case = f"{name}, {router}{'' if limit else ', no limit'}"
                attempt(case, lambda args=(name, router, limit): step(to_gpu(build(*args))))
    recomputed = build("GPT", "threshold")
    recomputed.recompute_layers()
    attempt("recompute", lambda: step(to_gpu(recomputed)))
    attempt("a number is read", lambda: step(to_gpu(build("GPT", "switch")), read=True))
    return errors


if __name__ == "__main__":
    with simulated_gpu():
        errors = steps()
    Path(sys.argv[1], "steps.json").write_text(json.dumps(errors))
