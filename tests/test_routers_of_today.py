"""examples/routers_of_today.py: each router against a literal loop from its paper, and the state of routers."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, TINY_LM, Script, constants, lively, only_run, result_of

import model
import train_lm
from engine import pretrained
from engine.config import command_line, identity, run_name
from engine.run import Run
from metrics.flops import moe_flops
from routers import ROUTERS, Router, RouterError, find_router

FILE = str(ROOT / "examples/routers_of_today.py")
E, K, D = 6, 2, 8


def made(name: str) -> Router:
    kind = find_router(f"{FILE}:{name}")
    return lively(kind(constants(n_embd=D, ffn_size=16, **kind.constants), E, K))


def best(numbers, count: int) -> list[int]:
    return sorted(range(len(numbers)), key=lambda e: (-numbers[e].item(), e))[:count]


def bias(router, scores):
    """Deciding by affinity plus bias, weighted by affinity over the sum of the chosen ones."""
    for score in scores:
        affinity = [torch.sigmoid(x) for x in score]
        chosen = best([a + b for a, b in zip(affinity, router.bias)], K)
        yield {e: affinity[e] / sum(affinity[i] for i in chosen) for e in chosen}


def shared(router, scores):
    for score in scores:
        p = score.softmax(dim=0)
        yield {e: p[e] for e in best(p, K - 1)}


def relu(router, scores):
    for score in scores:
        yield {e: x for e, x in enumerate(score) if x > 0}


def null(router, scores):
    """2 K of 2 E experts, of which the second half is null."""
    for score in scores:
        p = score.softmax(dim=0)
        yield {e: p[e] for e in best(p, 2 * K) if e < E}


def noisy(router, scores):
    for score in scores:
        p = score.softmax(dim=0)
        yield {e: p[e] for e in best(p, K)}


@pytest.mark.parametrize("literal", [bias, shared, relu, null, noisy], ids=lambda literal: literal.__name__)
def test_each_router_chooses_and_weighs_as_its_paper(literal):
    router, h = made(literal.__name__), torch.randn(40, D, dtype=torch.float64)
    if literal is bias:
        router.bias.copy_(torch.tensor([0.5, 0, 0, -0.5, 0, 0.2]))
    torch.manual_seed(3)
    routing = router(h)
    scores = h @ router.experts.t()
    if literal is noisy:
        torch.manual_seed(3)
        scores = scores + torch.randn_like(scores) * F.softplus(h @ router.noise.weight.t())
    expected = torch.zeros(40, E, dtype=torch.float64)
    for s, weights in enumerate(literal(router, scores)):
        assert set(weights) == set(routing.wanted[s].nonzero().flatten().tolist())
        for e, weight in weights.items():
            expected[s, e] = weight
    torch.testing.assert_close(routing.weight, expected)
    given = torch.randn(40, E, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * given).sum(), router.experts) for y in (routing.weight, expected)]
    torch.testing.assert_close(*gradients)


def test_losses_have_the_values_and_weights_of_their_papers():
    h = torch.randn(40, D, dtype=torch.float64)
    router = made("noisy").eval()
    losses = router(h).losses
    z = [math.log(sum(math.exp(x) for x in row)) ** 2 for row in (h @ router.experts.t()).tolist()]
    assert losses.keys() == {"balance", "z"}
    assert losses["z"][0] == 0.001
    assert losses["z"][1].item() == pytest.approx(sum(z) / 40)
    router = made("relu")
    [(name, (weight, l1))] = router(h).losses.items()
    assert (name, float(weight)) == ("l1", pytest.approx(1e-8))
    assert l1.item() == pytest.approx(float((h @ router.experts.t()).clamp(min=0).sum()) / 40)
    assert made("bias")(h).losses == {}


def test_the_layer_adds_the_weighted_losses_and_what_a_router_adds_beside():
    names = constants(router=f"{FILE}:shared", ffn_size=16, balance_coef=0.25, split=2, top_k=2)
    moe = lively(model.xmoe_layer(names, 13, "tanh"))
    h, ids = torch.randn(2, 6, 8, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.int64)
    y, loss = moe(h, ids)
    assert float(loss) == pytest.approx(0.25 * float(moe.router(h.flatten(0, 1)).losses["balance"][1]))
    up, _, down = moe.router.shared
    by_hand = F.gelu(h @ up.weight.t() + up.bias, approximate="tanh") @ down.weight.t() + down.bias
    moe.router.beside = None
    torch.testing.assert_close(y, moe(h, ids)[0] + by_hand)
    assert moe_flops(moe) == 2 * (8 * 8 + 2 * 8 * 8 + 1 * 2 * 8 * 8)  # embeddings, the shared expert, one chosen


class Counting(Router):
    def __init__(self, *given):
        super().__init__(*given)
        self.tally("load", self.E)
        self.seen = []

    def choose(self, score, probs):
        self.count("load", torch.ones(self.E))
        return probs.double()

    def after_step(self):
        self.seen.append(self.load.clone())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_tally_counts_each_micro_batch_once_and_is_summed_over_processes(recompute, monkeypatch):
    monkeypatch.setitem(ROUTERS, "counting", Counting)
    monkeypatch.setattr(Counting, "K", None)
    net = model.GPT(constants(router="counting"), 40)
    if recompute:
        net.recompute_layers()
    [moe], ids = net.moe_layers, torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(2):  # steps
        for _ in range(3):  # micro-batches
            sum(net(ids, ids)).backward()
        net.eval()(ids)  # evaluations do not count
        net.train().after_step(lambda x: 2 * x)  # two processes that count the same
    assert all((load == 6).all() for load in moe.router.seen)
    assert len(moe.router.seen) == 2
    assert not any("load" in name for name in net.state_dict())


def test_a_buffer_that_differs_between_processes_ends_the_run_in_one_line():
    config = SimpleNamespace(router="mine.py:bias")
    run = object.__new__(Run)
    run.model = SimpleNamespace(config=config, named_buffers=lambda: [("blocks.1.ffn.router.bias", torch.zeros(3))])
    run.context = SimpleNamespace(gather=lambda x: [x, x])
    run.check_buffers()
    run.context = SimpleNamespace(gather=lambda x: [x, {name: 1 for name in x}])
    with pytest.raises(RouterError, match="^blocks.1.ffn.router.bias of router mine.py:bias differs between processes"):
        run.check_buffers()


def test_buffers_are_checked_at_every_checkpoint(options, monkeypatch, capsys):
    def differ(run):
        raise RouterError("bias differs")

    monkeypatch.setattr(Run, "check_buffers", differ)
    assert "bias differs" in Script(train_lm).refused(options, monkeypatch, capsys)


def options_of(*line):
    return command_line(train_lm.Config, train_lm.PRESETS, [*line])


def test_constants_of_a_router_are_options_that_count():
    before = {*ROUTERS}
    plain, changed = (options_of("--router", f"{FILE}:bias", *more) for more in ([], ["--bias_rate", "0"]))
    assert (plain.bias_rate, changed.bias_rate) == (0.001, 0.0)
    assert all(":" in name for name in ROUTERS.keys() - before)  # the file's names stay its own
    assert identity(changed)["bias_rate"] == 0.0
    assert "bias_rate=0.0" in run_name(changed, train_lm.PRESETS)
    assert "bias_rate" not in run_name(plain, train_lm.PRESETS)
    assert options_of("--router", "topk", "--balance_coef", "0.02").balance_coef == 0.02
    for line, message in {
        ("--router", "topk", "--bias_rate", "0.1"): "there is no option --bias_rate",
        ("--router", f"{FILE}:bias", "--balance_coef", "0.1"): "--balance_coef is not read with",
        ("--router", f"{FILE}:typo"): "router must be dense, FILE.py:NAME, or one of topk",
        ("--router", "missing.py:bias"): "No such file or directory: .*missing.py",
    }.items():
        with pytest.raises((ValueError, OSError), match=message):
            options_of(*line)


def test_a_name_in_reads_must_be_a_constant(monkeypatch):
    monkeypatch.setitem(ROUTERS, "typo", type("Typo", (Router,), {"reads": Router.reads | {"tresholt"}}))
    with pytest.raises(ValueError, match="^Typo.reads has 'tresholt': correct it, or add a line tresholt to Config$"):
        options_of("--router", "typo")


@pytest.mark.parametrize("name", ["bias", "shared", "relu", "null", "noisy"])
def test_each_router_trains_and_reports_its_losses(name, corpora, tmp_path, monkeypatch, capsys):
    options = TINY_LM | {"router": f"{FILE}:{name}", "data": corpora["a"], "out_dir": tmp_path}
    Script(train_lm).run(options, monkeypatch)
    losses = result_of(tmp_path)["test"]["layers"][0]["losses"]
    assert losses.keys() == {"bias": set(), "relu": {"l1"}, "noisy": {"balance", "z"}}.get(name, {"balance"})
    out = capsys.readouterr().out
    assert all(f"{loss} {value:.3f}" in out for loss, value in losses.items())
    assert "routers_of_today.py (Python 3" in str(result_of(tmp_path)["code"])
    with pytest.raises(ValueError, match="has a router from a file: append its class to routers.py, train again"):
        pretrained.export(only_run(tmp_path), tmp_path / "exported")
