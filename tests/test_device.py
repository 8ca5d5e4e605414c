"""Learning rates, the optimizer and the loss; precision, random seeds and error messages."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import constants

from engine import device, optim
from model import GPT, Encoder, MaskedLM, cross_entropy

ADAM = dict(learning_rate=1e-3, weight_decay=0.1, beta2=0.98, eps=1e-9)


def test_learning_rate_schedules():
    cosine = [optim.cosine(step, 100, 0.1, 1.0, 0.01) for step in range(100)]
    assert cosine[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert cosine[10] == 1.0
    assert cosine[55] == pytest.approx((1 + 0.01) / 2)
    assert 0.01 < cosine[99] < 0.0115
    linear = [optim.linear(step, 100, 0.1, 2.0) for step in range(100)]
    assert linear[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert linear[10:] == pytest.approx([2.0 * (100 - i) / 90 for i in range(10, 100)])
    root = [optim.inverse_sqrt(step, 16, 3.0) for step in range(100)]
    assert root[:16] == pytest.approx([3.0 * (i + 1) / 16 for i in range(16)])
    assert root[63] == pytest.approx(3.0 * 4 / 8)
    assert root[15] == 3.0


def test_a_single_step_has_the_peak_learning_rate():
    assert optim.cosine(0, 1, 0.1, 1.0, 0.0) == 1.0
    assert optim.linear(0, 1, 0.0, 1.0) == 1.0


@pytest.mark.parametrize("limit, norm", {0.0: 5.0, 2.0: 2.0, 7.0: 5.0}.items())
def test_gradients_are_clipped_to_a_norm_unless_it_is_0(limit, norm):
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    optim.clip_gradients(model, limit)
    gradient = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    torch.testing.assert_close(gradient, torch.tensor([3.0, 0.0, 4.0]) * norm / 5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stacks", [0, 2], ids=["bare", "stacks"])
def test_norms_biases_and_the_temperature_have_no_weight_decay(stacks):
    config = constants(router="hypersphere", expert_layers=stacks, **ADAM)
    model = (Encoder if stacks else GPT)(config, 10)
    optimizer = optim.adamw(model, config)
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert set(groups) == {0.1, 0.0}
    assert len(optimizer.param_groups) == 2
    names = {p: name for name, p in model.named_parameters()}
    decayed = "token_type wte.weight wpe.weight qkv.weight proj.weight fc.weight w_in w_out experts project.weight"
    not_decayed = re.compile(r"ln_|norms\.|(bias|b_in|b_out|temperature)$")
    assert all(names[p].endswith(tuple(decayed.split())) for p in groups[0.1])
    assert all(not_decayed.search(names[p]) for p in groups[0.0])
    assert len(groups[0.1]) + len(groups[0.0]) == len(names)
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    assert optimizer.defaults["eps"] == 1e-9


def first_step(model, config) -> dict[str, torch.Tensor]:
    """How far Adam's first step moves each parameter: the learning rate, for any gradient."""
    optimizer = optim.adamw(model, config)
    optim.set_learning_rate(optimizer, 0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p).sign()
    optimizer.step()
    return {name: (p.detach() - before[name]).abs() for name, p in model.named_parameters()}


@pytest.mark.parametrize("router, routers", [("threshold", 1), ("hypersphere", 3)])  # embeddings; and W, tau
def test_routers_and_the_relative_position_bias_have_their_own_learning_rates(router, routers):
    config = constants(router=router, router_lr=0.25, **ADAM | {"weight_decay": 0.0})
    moved = first_step(GPT(config, 10).double(), config)
    assert sum(".router." in name for name in moved) == routers
    for name, change in moved.items():
        rate = 0.0025 if ".router." in name else 0.01
        torch.testing.assert_close(change, torch.full_like(change, rate), rtol=1e-3, atol=1e-9)
    config = constants(router="dense", relative_bias=True, rel_bias_lr=4.0, **ADAM | {"weight_decay": 0.0})
    moved = first_step(MaskedLM(config, 10).double(), config)
    for name, rate in {"encoder.rel_bias.table.weight": 0.04, "encoder.layers.0.attn.gate": 0.01, "bias": 0.01}.items():
        torch.testing.assert_close(moved[name], torch.full_like(moved[name], rate), rtol=1e-3, atol=1e-9)


def test_random_numbers_depend_on_every_part_of_the_key():
    numbers = []
    for key in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 1, 3), (0, 1, 2)]:
        device.seed_all(*key)
        numbers.append(float(torch.rand(())))
    assert numbers[0] == numbers[4]
    assert len(set(numbers)) == 4


@pytest.mark.parametrize(
    "dtype, weights, products", [("bfloat16", "float32", "bfloat16"), ("float64",) * 3, ("float32",) * 3]
)
def test_each_dtype_sets_the_precision_of_weights_and_products(dtype, weights, products):
    context = device.setup("cpu", dtype)
    layer = context.place(torch.nn.Linear(4, 4))
    with context.autocast():
        y = layer(torch.randn(2, 4, dtype=layer.weight.dtype))
    assert (layer.weight.dtype, y.dtype) == (getattr(torch, weights), getattr(torch, products))


def test_cudnns_attention_is_off_on_a_gpu(monkeypatch):
    monkeypatch.setattr(device.torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        context = device.setup("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert (context.device, context.dtype) == (torch.device("cuda:0"), torch.bfloat16)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("kind, backend", [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_processes_wait_for_hours_and_meet_in_a_gloo_group(kind, backend, monkeypatch):
    """Their barrier is gloo's on a GPU too."""
    groups, met = [], []
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: groups.append((*args, options)))
    monkeypatch.setattr(dist, "new_group", lambda **options: groups.append((options["backend"], options)) or "host")
    monkeypatch.setattr(dist, "barrier", met.append)
    monkeypatch.setattr(device.atexit, "register", lambda _: None)
    context = device.Context(0, 2, torch.device(kind), torch.float32)
    device.join(context)
    assert [name for name, _ in groups] == [backend, "gloo"]
    assert all(options["timeout"] >= timedelta(hours=12) for _, options in groups)
    context.barrier()
    assert met == ["host"]


def test_errors_that_a_user_can_cause_are_one_line(capsys):
    for error in (ValueError("two\n lines"), OSError(2, "gone"), ImportError("no such library")):
        with pytest.raises(SystemExit) as stop, device.clear_errors():
            raise error
        assert stop.value.code == 1
        assert capsys.readouterr().err.count("\n") == 1
    for bug, kinds in ((ZeroDivisionError, ()), (ValueError, ()), (RuntimeError, (ValueError,))):
        with pytest.raises(bug), device.clear_errors(kinds):
            raise bug
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")):
        with pytest.raises(SystemExit), device.clear_errors(()):
            raise error
        assert "error: out of memory: make" in capsys.readouterr().err
    with pytest.raises(ValueError, match="^device nonsense: "):
        device.setup("nonsense")


def test_cross_entropy_equals_its_formula_in_fp32():
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 6, 2, 3])
    for s in (0.0, 0.1, 0.5):
        by_hand = []
        for row, label in zip(logits, labels):
            p = row.exp() / row.exp().sum()
            by_hand.append(float(-(1 - s) * p[label].log() - s * p.log().mean()))
        mean = cross_entropy(logits, labels, label_smoothing=s)
        assert float(mean) == pytest.approx(sum(by_hand) / 5)
        assert mean.dtype == torch.float64
        each = cross_entropy(logits, labels, label_smoothing=s, per_token=True)
        assert each.tolist() == pytest.approx(by_hand)
    assert cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
