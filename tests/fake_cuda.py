"""Steps on a card that is not there, in a process of its own: python fake_cuda.py FOLDER.

Forward and backward passes of every script's model -> FOLDER/steps.json: case -> the error, "" if none. Tensors have
shapes and no values (FakeTensorMode), so that whatever the host would read of them raises. Autograd needs something
that says which card is current: a few lines of C++, which are loaded before torch looks for a real one.
"""
# ruff: noqa: E402, since the card must be there before torch is

import contextlib
import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

CARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the name by which torch looks for it
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


def load_card(folder: Path):
    torch = Path(importlib.util.find_spec("torch").origin).parent
    built, lib = folder / "card.so", torch / "lib"
    if not built.exists():
        (folder / "card.cpp").write_text(CARD)
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", f"-L{lib}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", str(folder / "card.cpp"), "-o", str(built), *options], check=True)
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        if (lib / name).exists():
            ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


if __name__ == "__main__":
    load_card(Path(sys.argv[1]))

import torch
from helpers import constants
from torch._subclasses.fake_tensor import FakeTensorMode

import model
import train_electra
from routers import ROUTERS


@contextlib.contextmanager
def with_a_card():
    """Inside the `with`, torch finds a card, on which nothing can run."""
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0), _lazy_init=None)
    answers |= dict(get_device_properties=SimpleNamespace(major=9, minor=0, multi_processor_count=132))
    answers |= dict(_exchange_device=0, _maybe_exchange_device=0)
    answers |= dict(get_rng_state=torch.ByteTensor(16), set_rng_state=None)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        yield


def on_card(net: torch.nn.Module) -> torch.nn.Module:
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device="cuda"))
        for name, x in module._buffers.items():
            module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    return net.train()


def step(net, read: bool = False):
    """-> the loss of one micro-batch of a script: with padding, but for GPT."""
    ids, real = torch.randint(V, (2, 16), device="cuda"), torch.arange(29, device="cuda")
    if isinstance(net, model.GPT):
        given = ids, ids
    elif isinstance(net, model.Translator):
        given = ids, real, ids, real, ids.flatten()[real]
    else:
        masked = real[::3]
        given = ids, masked, ids.flatten()[masked], real
    with torch.autocast("cuda", torch.bfloat16):
        loss, balance, *rtd = net(*given)
        loss = loss + 0.01 * balance + sum(rtd)
    if read:
        loss = loss * float(loss)
    return loss


# Every model of a script -> its class and constants, without a capacity limit and with one.
MODELS = {
    "GPT": (model.GPT, {}, dict(capacity=float("inf"))),
    "MaskedLM": (model.MaskedLM, dict(top_k=2, capacity_factor=0.5), dict(capacity_factor=float("inf"))),
    "Electra": (train_electra.Electra, dict(capacity_factor=0.5), dict(capacity_factor=float("inf"))),
    "Translator": (model.Translator, dict(moe_after=()), dict(capacity=float("inf"))),
}
V, MORE = 99, dict(n_embd=32, ffn_size=64, decoder_layers=2, decoder_moe=True, generator_layers=1, label_smoothing=0.1)


def build(name: str, router: str, limit: bool = True, **changes):
    kind, own, no_limit = MODELS[name]
    own = MORE | own | ({} if limit else no_limit) | changes
    return kind(constants(router=router, relative_bias=name == "Electra", **own), V)


def steps() -> dict[str, str]:
    found = {}

    def attempt(case: str, take):
        try:
            with FakeTensorMode():
                take().backward()
            found[case] = ""
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error!s:.200}"

    for name in MODELS:
        attempt(f"{name}, dense", lambda name=name: step(on_card(build(name, "dense"))))
        for router in ROUTERS:
            for limit in (True, False):
                case = f"{name}, {router}{'' if limit else ', no limit'}"
                attempt(case, lambda given=(name, router, limit): step(on_card(build(*given))))
    recomputed = build("GPT", "threshold")
    recomputed.recompute_layers()
    attempt("recompute", lambda: step(on_card(recomputed)))
    attempt("a number is read", lambda: step(on_card(build("GPT", "switch")), read=True))
    return found


if __name__ == "__main__":
    with with_a_card():
        found = steps()
    Path(sys.argv[1], "steps.json").write_text(json.dumps(found))
