"""Behaviour on a GPU, tested without one; and that torch.compile and checkpointing change no result."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fake_cuda import MODELS
from helpers import ROOT, constants, values_and_gradients
from test_dispatch import assert_close, make_batch, make_moe
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch_config

import model
import train_electra
import train_lm
import train_mlm
import train_mt
from engine import parallel
from engine.device import Context
from routers import ROUTERS

HERE = Path(__file__).parent
CPU = Context(0, 1, torch.device("cpu"), torch.float32)


@pytest.mark.skipif(torch.version.cuda is not None or not shutil.which("g++"), reason="needs g++, and torch for CPUs")
def test_a_training_step_of_every_model_needs_no_gpu_sync(tmp_path):
    """Except for BASE's auction, and the threshold router without a capacity limit. See fake_cuda.py."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    ran = subprocess.run([sys.executable, HERE / "fake_cuda.py", tmp_path], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    errors = json.loads((tmp_path / "steps.json").read_text())
    assert len(errors) == len(MODELS) * (1 + 2 * len(ROUTERS)) + 2
    syncs = {case for case, error in errors.items() if error}
    expected = {case for case in errors if "base" in case}
    expected |= {f"{kind}, {name}, no limit" for kind in MODELS for name in ROUTERS if ROUTERS[name].K is None}
    assert syncs == expected | {"a number is read"}
    assert all("DataDependent" in errors[case] or "nonzero" in errors[case] for case in syncs)


def test_a_compiled_router_has_the_gradient_of_an_uncompiled_one():
    """In fp32; in bfloat16, it would be off by at least 0.1%."""
    torch.compiler.reset()
    config = constants(router="threshold", n_embd=16, ffn_size=32, compile=True)
    torch.manual_seed(0)
    net, ids = model.GPT(config, 40), torch.randint(40, (4, 16))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        compile = torch.compile
        patch.setattr(torch, "compile", lambda net: compile(net, backend="aot_eager"))
        for forward in (net, parallel.wrap(net, config, Context(0, 1, torch.device("cpu"), torch.bfloat16))):
            with torch.autocast("cpu", torch.bfloat16):
                loss, balance = forward(ids, ids)
            results.append(torch.autograd.grad(loss + balance, [moe.router.experts for moe in net.moe_layers]))
    for compiled, eager in zip(*results):
        assert (compiled - eager).norm() <= 1e-5 * eager.norm()


def test_torch_compiles_all_models_of_a_table(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for count in range(1, 11):
        net = torch.nn.Linear(2, 2)
        parallel.wrap(net, constants(compile=True), CPU)(torch.randn(3, 2))
        assert counter.frame_count == count


def test_lengths_that_vary_need_no_second_compilation(monkeypatch):
    """Of sentences, whose rows keep a static length, and of pairs, after batches of either."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    config = constants(compile=True, router="dense")
    forward = parallel.wrap(model.MaskedLM(config, 40), config, CPU)
    for length in (5, 6, 9, 7):
        masked, targets = torch.arange(length), torch.randint(40, (length,))
        forward(torch.randint(40, (4, 8)), masked, targets)
        forward(torch.randint(40, (length, 9)), masked, targets, torch.arange(8 * length))
    assert counter.frame_count == 2


def test_dropout_under_recompute_and_compile_is_the_same_in_a_resumed_run():
    """On a GPU it is so only without graph-safe generators, which are seeded once for each compiled graph."""
    config = constants(dropout=0.4, compile=True, recompute=True, router="hypersphere")
    ids, gradients = torch.randint(40, (4, 16)), []
    for begin in (0, 2):  # the second run begins with step 2
        torch.manual_seed(0)
        net = model.GPT(config, 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            forward = parallel.wrap(net, config, CPU)
        for step in range(begin, 3):
            torch.manual_seed(step)
            loss, balance = forward(ids, ids)
            gradient = torch.autograd.grad(loss + balance, [*net.parameters()])
        gradients.append(gradient)
    assert all(map(torch.equal, *gradients))
    assert not functorch_config.graphsafe_rng_functionalization


def test_only_the_largest_presets_recompute():
    """The others fit into 80 GB, and recomputing takes a third of a step."""
    scripts = train_lm, train_mlm, train_electra, train_mt
    recomputing = {name for script in scripts for name, preset in script.PRESETS.items() if preset.get("recompute")}
    assert recomputing == {"large", "xl"}


def test_by_default_a_model_is_compiled_only_in_bfloat16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda net: net)
    net, compiled = torch.nn.Linear(2, 2), set()
    for compile, kind, dtype in itertools.product((None, True, False), ("cpu", "cuda"), ("float32", "bfloat16")):
        context = Context(0, 1, torch.device(kind), getattr(torch, dtype))
        forward = parallel.wrap(net, constants(compile=compile), context)
        if forward is not net:
            compiled.add((compile, kind, dtype))
    always = {(True, kind, dtype) for kind in ("cpu", "cuda") for dtype in ("float32", "bfloat16")}
    assert compiled == always | {(None, "cuda", "bfloat16")}


@pytest.mark.parametrize("name", ["GPT", "MaskedLM", "Translator"])
def test_recompute_saves_memory_and_changes_no_number(name):
    """With dropout, whose random numbers are the same again."""
    options = dict(dropout=0.2, router="threshold", decoder_layers=2, decoder_moe=True, n_layer=3)
    options |= dict(moe_after=()) if name == "Translator" else dict(capacity_factor=1.0)
    results, saved, ids = [], [], torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    nonpad = torch.arange(29)

    def count(x):
        saved.append(x.numel())
        return x

    masked = nonpad[::3]
    inputs = {
        "GPT": (ids, ids),
        "MaskedLM": (ids, masked, ids.flatten()[masked], nonpad),
        "Translator": (ids, nonpad, ids, nonpad, ids.flatten()[nonpad]),
    }[name]
    for recompute in (False, True):
        torch.manual_seed(0)
        net = getattr(model, name)(constants(label_smoothing=0.1, **options), 40).train()
        if recompute:
            net.recompute_layers()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            outputs = net(*inputs)
        numbers = sum(saved)
        saved.clear()
        results.append((values_and_gradients(outputs, list(net.parameters())), numbers))
    (expected, stored), (actual, stored_by_recompute) = results
    assert all(map(torch.equal, actual, expected))
    assert stored_by_recompute < stored / 2


class OnCuda(torch.Tensor):
    """A CPU tensor that claims to be on CUDA."""

    is_cuda = True


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("gamma", [0.5, 2.0, math.inf])
def test_the_gpu_code_of_a_layer_has_the_same_values_and_gradients(layers, gamma):
    """It has spare rows, biases as matrix products, and another way to add up rows."""
    moe, (h, ids) = make_moe("topk", torch.float32, gamma=gamma, layers=layers), make_batch(2, 9, torch.float32)
    leaves = h.requires_grad_(), *moe.parameters()
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            expected = values_and_gradients(moe(h, ids), leaves)
            outputs = [x.as_subclass(torch.Tensor) for x in moe(h.as_subclass(OnCuda), ids)]
        assert_close(values_and_gradients(outputs, leaves), expected, limit)


def test_cudas_grouped_product_needs_bfloat16_aligned_rows_and_fewer_than_1024_experts():
    """On meta tensors, which take the GPU's branch."""
    good = dict(dtype=torch.bfloat16, rows=5, experts=1023, width=8, out=16)
    assert supported(**good)
    for change in (dict(dtype=torch.float32), dict(rows=0), dict(experts=1024), dict(width=12), dict(out=12)):
        assert not supported(**good | change), change


def supported(dtype, rows: int, experts: int, width: int, out: int) -> bool:
    make = partial(torch.empty, dtype=dtype, device="meta")
    return model.has_grouped_mm(make(rows, width), make(experts, width, out))


def test_padding_an_odd_vocabulary_does_not_change_logits():
    h, w, bias = torch.randn(2, 3, 8), torch.randn(70, 8), torch.randn(70)
    expected = F.linear(h, w, bias)
    logits = model.output_logits(h.as_subclass(OnCuda), w, bias)
    torch.testing.assert_close(logits.as_subclass(torch.Tensor), expected)
