"""Steps on a card that is not there, in a process of its own: python fake_cuda.py FOLDER steps, or code.

Tensors have shapes and no values (FakeTensorMode), so that whatever the host would read of them raises. Autograd needs
something that says which card is current: a few lines of C++, which are loaded before torch looks for a real one.

    steps   forward and backward passes of every script's model -> FOLDER/steps.json: case -> the error, "" if none
    code    what Inductor writes for an H100, and does not run -> FOLDER/code.json: case -> GB that a step moves
"""
# ruff: noqa: E402, since the card must be there before torch is

import contextlib
import ctypes
import importlib.util
import json
import subprocess
import sys
from functools import partial
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
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.fx_passes import fuse_attention, pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

import model
import train_electra
from engine import optim, parallel
from routers import ROUTERS

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    warp_size=32,
    multi_processor_count=132,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
)


@contextlib.contextmanager
def with_a_card():
    """Inside the `with`, torch finds one H100, on which nothing can run."""
    properties = lambda device=None: H100  # noqa: E731
    answers = {
        torch.cuda: dict(is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0))
        | dict(get_device_properties=H100, get_device_name=H100.name, _lazy_init=None, _exchange_device=0)
        | dict(_maybe_exchange_device=0, get_rng_state=torch.ByteTensor(16), set_rng_state=None),
        CudaInterface: dict(device_count=1, current_device=0, get_device_properties=H100, synchronize=None),
        torch.accelerator: dict(is_available=False),
        fuse_attention: dict(_sfdp_init=None),  # these two try patterns on a real card
        pad_mm: dict(_pad_mm_init=None),
    }
    with contextlib.ExitStack() as stack:
        for owner, names in answers.items():
            for name, answer in names.items():
                stack.enter_context(mock.patch.object(owner, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", properties))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        yield


def on_card(net: torch.nn.Module) -> torch.nn.Module:
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device="cuda"))
        for name, x in module._buffers.items():
            module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    return net.train()


def step(net, V: int, B: int = 2, T: int = 16, read: bool = False):
    """-> the loss of one micro-batch of a script: with padding, but for GPT."""
    ids, real = torch.randint(V, (B, T), device="cuda"), torch.arange(B * T - 3, device="cuda")
    if isinstance(net, model.GPT):
        given, targets = (ids,), ids.flatten()
    elif isinstance(net, model.MaskedLM):
        given, targets = (ids, real[::3], real), ids.flatten()[real[::3]]
    elif isinstance(net, model.Translator):
        given, targets = (ids, ids, real, real), ids.flatten()[real]
    else:
        targets = ids.flatten()[real[::3]]
        given = ids, real[::3], real, targets
    with torch.autocast("cuda", torch.bfloat16):
        logits, balance, *judged = net(*given)
        loss = optim.cross_entropy(logits.flatten(0, -2), targets) + 0.01 * balance
        if judged:
            loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(judged[0].float(), judged[1].float())
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
MORE = dict(n_embd=32, ffn_size=64, decoder_layers=2, decoder_moe=True, generator_layers=1)


def build(name: str, router: str, limit: bool = True, V: int = 99, **changes):
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
        attempt(f"{name}, dense", lambda name=name: step(on_card(build(name, "dense")), 99))
        for router in ROUTERS:
            for limit in (True, False):
                if router == "expert_choice" and (name == "Translator" or not limit):
                    continue  # refused
                case = f"{name}, {router}{'' if limit else ', no limit'}"
                attempt(case, lambda given=(name, router, limit): step(on_card(build(*given)), 99))
    attempt("recompute", lambda: step(on_card(build("GPT", "threshold", recompute=True)), 99))
    attempt("a number is read", lambda: step(on_card(build("GPT", "switch")), 99, read=True))
    return found


def code() -> dict[str, float]:
    """The papers' sizes: D 768, 16,384 tokens."""
    import triton
    from triton.backends.compiler import GPUTarget

    here = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(here)
    torch.utils._triton.has_triton.cache_clear()
    S, D, V, found = 16384, 768, 50257, {}

    def generate(case: str, f, *given):
        graphs = []

        def written(graph):  # in place of compiling and loading it
            code, _ = graph.codegen()
            assert "async_compile.triton" in code.value
            graphs.append(graph.count_bytes()[0])
            return SimpleNamespace(call=None, __file__="", runner=None)

        def backend(module, inputs):
            with mock.patch.object(GraphLowering, "compile_to_module", written):
                compile_fx.compile_fx(module, inputs)
            raise RuntimeError("all is written")

        torch._dynamo.reset()
        try:
            with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True)):
                f = parallel.compiled(f)
            f(*given)
        except Exception as error:
            if len(graphs) < 2:  # forward and backward
                raise
            assert "written" in str(error), error
        found[case] = sum(graphs) / 1e9

    def in_bf16(f):
        def run(*given):
            with torch.autocast("cuda", torch.bfloat16):
                return f(*given)

        return run

    quiet = dict(force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False)
    now = torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
    with FakeTensorMode(), torch._inductor.config.patch(**quiet), now:
        h = torch.randn(16, 1024, D, device="cuda", requires_grad=True)
        ids = torch.zeros(16, 1024, dtype=torch.int64, device="cuda")
        for router, K in (("threshold", 4), ("topk", 4)):
            chooser = ROUTERS[router](constants(n_embd=D), 32, K, V)
            moe = on_card(model.MoE(chooser, model.Experts(32, D, D, "tanh"), 4.0, 4.0))
            generate(router, in_bf16(moe), h, ids)
        ffn = on_card(model.FFN(constants(n_embd=D, ffn_size=4 * D), "tanh"))
        generate("dense", in_bf16(ffn), h)
        logits = torch.randn(S, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        generate("loss", in_bf16(optim.in_fp32), logits, ids.flatten())
        size = dict(n_layer=2, n_head=12, n_embd=D, ffn_size=4 * D, block_size=1024)
        for name, router in (("GPT", "threshold"), ("MaskedLM", "hypersphere")):
            net = on_card(build(name, router, V=V, expert_size=D, **size))
            generate(name, partial(step, net, V, 16, 1024))
    return found


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    if task == "steps":  # uncompiled
        model.compiled_activation, optim.has_triton = lambda device: model.activation, lambda: False
    with with_a_card():
        found = {"steps": steps, "code": code}[task]()
    (folder / f"{task}.json").write_text(json.dumps(found))
