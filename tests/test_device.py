"""Learning rates, the optimizer and the loss; devices, chance and what is the sum over processes."""

import re

import pytest
import torch
from helpers import constants

from engine import device, optim
from model import GPT, Encoder, MaskedLM

ADAM = dict(learning_rate=1e-3, weight_decay=0.1, beta2=0.98, eps=1e-9)


def test_learning_rates_are_their_formulas():
    cosine = [optim.cosine(step, 100, 0.1, 1.0, 0.01) for step in range(100)]
    assert cosine[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and cosine[10] == 1.0
    assert cosine[55] == pytest.approx((1 + 0.01) / 2) and 0.01 < cosine[99] < 0.0115
    linear = [optim.linear(step, 100, 0.1, 2.0) for step in range(100)]
    assert linear[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert linear[10:] == pytest.approx([2.0 * (100 - i) / 90 for i in range(10, 100)])
    root = [optim.inverse_sqrt(step, 16, 3.0) for step in range(100)]
    assert root[:16] == pytest.approx([3.0 * (i + 1) / 16 for i in range(16)])
    assert root[63] == pytest.approx(3.0 * 4 / 8) and root[15] == 3.0
    assert optim.cosine(0, 1, 0.1, 1.0, 0.0) == optim.linear(0, 1, 0.0, 1.0) == 1.0  # a single step is a step


@pytest.mark.parametrize("limit, left", {0.0: 5.0, 2.0: 2.0, 7.0: 5.0}.items())
def test_gradients_are_clipped_to_a_norm_and_0_leaves_them(limit, left):
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    optim.clip_gradients(model, limit)
    found = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    torch.testing.assert_close(found, torch.tensor([3.0, 0.0, 4.0]) * left / 5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stacks", [0, 2], ids=["bare", "stacks"])
def test_weight_decay_spares_norms_biases_and_the_temperature(stacks):
    config = constants(router="hypersphere", expert_layers=stacks, **ADAM)
    model = (Encoder if stacks else GPT)(config, 10)
    optimizer = optim.adamw(model, config)
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert set(groups) == {0.1, 0.0} and len(optimizer.param_groups) == 2
    names = {p: name for name, p in model.named_parameters()}
    matrices = (
        "token_type wte.weight wpe.weight qkv.weight proj.weight fc.weight w_in w_out router.experts project.weight"
    )
    spared = re.compile(r"ln_|norms\.|(bias|b_in|b_out|temperature)$")
    assert all(names[p].endswith(tuple(matrices.split())) for p in groups[0.1])
    assert all(spared.search(names[p]) for p in groups[0.0])
    assert len(groups[0.1]) + len(groups[0.0]) == len(names)
    assert optimizer.defaults["betas"] == (0.9, 0.98) and optimizer.defaults["eps"] == 1e-9


def first_step(model, config) -> dict[str, torch.Tensor]:
    """How far Adam's first step takes each parameter: the learning rate, whatever the gradient."""
    optimizer = optim.adamw(model, config)
    optim.set_learning_rate(optimizer, 0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p).sign()
    optimizer.step()
    return {name: (p.detach() - before[name]).abs() for name, p in model.named_parameters()}


@pytest.mark.parametrize("router, routers", [("threshold", 1), ("hypersphere", 3)])  # embeddings; and W, tau
def test_routers_and_distances_learn_at_their_own_rates(router, routers):
    config = constants(router=router, router_lr=0.25, **ADAM | {"weight_decay": 0.0})
    moved = first_step(GPT(config, 10).double(), config)
    assert sum(".router." in name for name in moved) == routers
    for name, far in moved.items():
        rate = 0.0025 if ".router." in name else 0.01
        torch.testing.assert_close(far, torch.full_like(far, rate), rtol=1e-3, atol=1e-9)
    config = constants(router="dense", relative_bias=True, distance_lr=4.0, **ADAM | {"weight_decay": 0.0})
    moved = first_step(MaskedLM(config, 10).double(), config)
    for name, rate in {"encoder.distance.table.weight": 0.04, "encoder.layers.0.attn.gate": 0.01, "bias": 0.01}.items():
        torch.testing.assert_close(moved[name], torch.full_like(moved[name], rate), rtol=1e-3, atol=1e-9)


def test_chance_depends_on_every_part_of_the_key():
    drawn = []
    for key in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 1, 3), (0, 1, 2)]:
        device.seed_all(*key)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[4] and len(set(drawn)) == 4


@pytest.mark.parametrize(
    "dtype, weights, products", [("bfloat16", "float32", "bfloat16"), ("float64",) * 3, ("float32",) * 3]
)
def test_weights_and_products_have_their_precision(dtype, weights, products):
    context = device.setup("cpu", dtype)
    layer = context.place(torch.nn.Linear(4, 4))
    with context.autocast():
        y = layer(torch.randn(2, 4, dtype=layer.weight.dtype))
    assert (layer.weight.dtype, y.dtype) == (getattr(torch, weights), getattr(torch, products))


def test_what_a_user_can_cause_is_one_line(capsys):
    for error in (ValueError("two\n lines"), OSError(2, "gone"), ImportError("no such library")):
        with pytest.raises(SystemExit) as stop, device.clear_errors():
            raise error
        assert stop.value.code == 1 and capsys.readouterr().err.count("\n") == 1
    for fault, kinds in ((ZeroDivisionError, ()), (ValueError, ()), (RuntimeError, (ValueError,))):  # of ours
        with pytest.raises(fault), device.clear_errors(kinds):
            raise fault
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")):
        with pytest.raises(SystemExit), device.clear_errors(()):
            raise error
        assert "error: out of memory: make" in capsys.readouterr().err
    with pytest.raises(ValueError, match="^device nonsense: "):
        device.setup("nonsense")


def test_the_loss_is_its_formula_in_fp32():
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 6, 2, 3])
    for s in (0.0, 0.1, 0.5):
        by_hand = []
        for row, label in zip(logits, labels):
            p = row.exp() / row.exp().sum()
            by_hand.append(float(-(1 - s) * p[label].log() - s * p.log().mean()))
        found = optim.cross_entropy(logits, labels, label_smoothing=s)
        assert float(found) == pytest.approx(sum(by_hand) / 5) and found.dtype == torch.float64
        each = optim.cross_entropy(logits, labels, label_smoothing=s, reduction="none")
        assert each.tolist() == pytest.approx(by_hand)
    assert optim.cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
