"""What a GPU would do, on a machine without one; where it compiles, and what may not change when it does."""

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
from helpers import ROOT, constants, values_and_gradients
from test_dispatch import assert_close, make_batch, make_moe
from torch._dynamo.testing import CompileCounter

import model
from engine import parallel
from engine.device import Context
from routers import ROUTERS

HERE = Path(__file__).parent
CPU = Context(0, 1, torch.device("cpu"), torch.float32)


@pytest.mark.skipif(torch.version.cuda is not None or not shutil.which("g++"), reason="needs g++, and torch for CPUs")
def test_a_step_of_every_model_reads_nothing_off_the_card(tmp_path):
    """But for BASE's auction, and for routers whose tokens may choose all experts where there is no limit.

    See fake_cuda.py, a process that believes in a card.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    ran = subprocess.run([sys.executable, HERE / "fake_cuda.py", tmp_path], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((tmp_path / "steps.json").read_text())
    assert len(found) == 4 * (1 + 2 * len(ROUTERS)) + 2
    read = {case for case, error in found.items() if error}
    expected = {case for case in found if "base" in case or "threshold, no limit" in case}
    assert read == expected | {"a number is read"}
    assert all("DataDependent" in found[case] or "nonzero" in found[case] for case in read)


def test_a_compiled_router_has_the_gradient_of_an_uncompiled_one():
    """In fp32: in autocast's type it would be 0.1% and more away."""
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


def test_as_many_models_are_compiled_as_a_table_has(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for count in range(1, 11):
        net = torch.nn.Linear(2, 2)
        parallel.wrap(net, constants(compile=True), CPU)(torch.randn(3, 2))
        assert counter.frame_count == count


def test_a_model_is_compiled_where_that_is_asked_for_or_pays(monkeypatch):
    """By default in bf16 on a GPU alone."""
    monkeypatch.setattr(torch, "compile", lambda net: "compiled")
    net, found = torch.nn.Linear(2, 2), set()
    for compile, kind, dtype in itertools.product((None, True, False), ("cpu", "cuda"), ("float32", "bfloat16")):
        context = Context(0, 1, torch.device(kind), getattr(torch, dtype))
        forward = parallel.wrap(net, constants(compile=compile), context)
        assert forward == "compiled" or forward is net
        if forward == "compiled":
            found.add((compile, kind, dtype))
    always = {(True, kind, dtype) for kind in ("cpu", "cuda") for dtype in ("float32", "bfloat16")}
    assert found == always | {(None, "cuda", "bfloat16")}


@pytest.mark.parametrize("name", ["GPT", "MaskedLM", "Translator"])
def test_recompute_changes_no_number(name):
    """With dropout, whose chance is the same again; and what is kept for the backward pass is less."""
    more = dict(dropout=0.2, router="threshold", decoder_layers=2, decoder_moe=True, n_layer=3)
    more |= dict(moe_after=()) if name == "Translator" else dict(capacity_factor=1.0)
    results, kept, ids = [], [], torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    real = torch.arange(29)

    def keep(x):
        kept.append(x.numel())
        return x

    masked = real[::3]
    given = {
        "GPT": (ids, ids),
        "MaskedLM": (ids, masked, ids.flatten()[masked], real),
        "Translator": (ids, real, ids, real, ids.flatten()[real]),
    }[name]
    for recompute in (False, True):
        torch.manual_seed(0)
        net = getattr(model, name)(constants(label_smoothing=0.1, **more), 40).train()
        if recompute:
            net.recompute_layers()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = net(*given)
        held = sum(kept)
        kept.clear()
        results.append((values_and_gradients(outputs, list(net.parameters())), held))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[1][1] < results[0][1] / 2


class OnCuda(torch.Tensor):
    """Says so, and is not."""

    is_cuda = True


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("gamma", [0.5, 2.0, math.inf])
def test_a_layer_has_the_same_values_and_gradients_there(layers, gamma):
    """With spare rows, with biases that are products, and with rows that are added up in another way."""
    moe, (h, ids) = make_moe("topk", torch.float32, gamma=gamma, layers=layers), make_batch(2, 9, torch.float32)
    leaves = h.requires_grad_(), *moe.parameters()
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            expected = values_and_gradients(moe(h, ids), leaves)
            found = [x.as_subclass(torch.Tensor) for x in moe(h.as_subclass(OnCuda), ids)]
        assert_close(values_and_gradients(found, leaves), expected, limit)


def test_logits_of_an_odd_vocabulary_are_the_same_in_whole_blocks():
    h, w, bias = torch.randn(2, 3, 8), torch.randn(70, 8), torch.randn(70)
    expected = F.linear(h, w, bias)
    torch.testing.assert_close(model.output_logits(h.as_subclass(OnCuda), w, bias).as_subclass(torch.Tensor), expected)
