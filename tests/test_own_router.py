"""A user's own router: its layer, FLOPs and training, and the errors of a wrong one.

python -m pytest -q tests/test_own_router.py --router mine.py:NAME
"""

import re
import signal
import sys
from types import ModuleType

import pytest
import torch
from helpers import (
    ROOT,
    TINY_LM,
    TORCHRUN,
    Script,
    constants,
    finish,
    lively,
    losses,
    saved,
    stopped,
    values_and_gradients,
)

import model
import train_lm
import train_mlm
from engine.config import command_line
from metrics.flops import moe_flops, served_rows
from model import xmoe_layer
from routers import (
    NOT_CHOSEN,
    ROUTERS,
    Router,
    RouterError,
    Routing,
    TopK,
    balance_loss,
    by_rank,
    find_router,
    one_hot,
    router,
)

MY_ROUTERS = ("my_random", "my_soft", "my_id")


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        passed = metafunc.config.getoption("--router")
        metafunc.parametrize("name", [passed] if passed else MY_ROUTERS)


@pytest.fixture(autouse=True)
def my_routers():
    """Registers README's router and the ones below for this file only."""
    [block] = re.findall(r'^(@router\("top1_random"\)\n.*?)^```', (ROOT / "README.md").read_text(), re.S | re.M)
    exec(block, globals() | {"router": lambda name: router("my_random")})

    @router("my_soft")
    class SoftThreshold(Router):
        """The experts at least half as probable as the best one, with weights that sum to 1."""

        split, K = 4, None

        def choose(self, score, probs):
            bar = probs.max(dim=1, keepdim=True).values / 2
            return torch.where(probs >= bar, probs, NOT_CHOSEN)

        def forward(self, h, ids=None):
            routing = super().forward(h, ids)
            return routing._replace(weight=routing.weight / routing.weight.sum(dim=1, keepdim=True))

    @router("my_id")
    class ById(Router):
        """The expert of the token id modulo E, weighted by its probability."""

        reads = {"router_std"}

        def forward(self, h, ids=None):
            probs = self.scores(h.to(self.experts.dtype)).softmax(dim=1)
            chosen = one_hot(ids % self.E, self.E)
            priority = torch.where(chosen, probs.detach(), NOT_CHOSEN)
            return Routing(
                torch.where(chosen, probs, 0.0), priority, {"balance": (1.0, balance_loss(chosen, probs))}, probs
            )


def layer(name: str, **changes):
    """XMoE's layer with this router; a dense FFN would have 32 units."""
    return lively(xmoe_layer(constants(**{"router": name, "ffn_size": 32} | own_constants(name) | changes), 13, "tanh"))


def own_constants(name: str) -> dict:
    return find_router(name).constants


def tokens(B: int, T: int):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(B, T, 8, generator=rng, dtype=torch.float64), torch.randint(2, (B, T), generator=rng)


SIZES = {  # by hand: experts, units per expert, most choices per token, rows per token at full capacity
    "my_random": (8, 16, 2, 2),
    "my_soft": (16, 8, 16, 4),
    "my_id": (4, 32, 1, 1),
}


def test_split_sets_experts_capacity_and_flops(name):
    if name not in SIZES:
        pytest.skip("sizes are counted by hand")
    moe, (E, F, K, served) = layer(name), SIZES[name]
    assert (moe.router.E, moe.router.K) == (E, K)
    assert moe.experts.w_in.shape == (E, F, 8)
    assert (moe.capacity_factor, moe.eval_capacity_factor) == (E / 4, E / 4)
    assert moe.capacity(48) == 48 // 4  # gamma S / E
    assert served_rows(moe) == served
    assert moe_flops(moe) == 2 * (8 * E + 32 * 8 * 2)  # the router and as much as a dense FFN


def test_the_config_overrides_the_split_of_the_class(name):
    moe = layer(name, capacity=2.0, split=1)
    assert (moe.router.E, moe.capacity_factor) == (4, 2.0)
    assert moe.experts.w_in.shape == (4, 32, 8)


def test_each_expert_keeps_the_tokens_of_highest_priority(name, monkeypatch):
    """With exactly the kept rows, as on a CPU, and with spare rows, as on a GPU."""
    moe, (h, ids), routings, results = layer(name, capacity=0.5), tokens(2, 24), [], []
    moe.watchers.append(lambda moe, h, routing, kept: routings.append((routing, kept)))
    for may_sync in (True, False):
        monkeypatch.setattr(model, "may_sync", lambda x, may_sync=may_sync: may_sync)
        torch.manual_seed(5)  # my_random draws random numbers
        results.append(values_and_gradients(moe(h, ids), list(moe.parameters())))
    torch.testing.assert_close(results[0], results[1])
    routing, kept = routings[0]
    for wanted, priority, served in zip(routing.wanted.t(), routing.priority.t(), kept.t()):
        queue = sorted((-float(priority[s]), s) for s in wanted.nonzero().flatten().tolist())
        first = sorted(s for _, s in queue[: 48 // 8])  # C is half of S / 4
        assert served.nonzero().flatten().tolist() == first
    assert kept.sum() < routing.wanted.sum()
    assert "balance" not in routing.losses or routing.losses["balance"][1] > 0


def test_a_later_token_changes_nothing_before_it(name):
    """At test and without a capacity limit."""
    net = lively(model.GPT(constants(**{"router": name, "ffn_size": 32} | own_constants(name)), 13)).eval()
    ids = torch.randint(13, (2, 12))
    changed = torch.cat([ids[:, :8], 12 - ids[:, 8:]], dim=1)
    outputs = []
    with torch.no_grad(), net.no_limit():
        for x in (ids, changed):
            torch.manual_seed(5)
            outputs.append(net(x)[0][:, :8])
    torch.testing.assert_close(*outputs)


def test_two_processes_train_as_one(name, corpora, tmp_path, monkeypatch):
    if ":" not in name:
        pytest.skip("needs a router in a file: pass --router FILE.py:NAME")
    script, options = Script(train_lm), TINY_LM | {"router": name, "data": corpora["a"], "dtype": "float64"}
    one, two = (options | {"out_dir": tmp_path / folder} for folder in ("one", "two"))
    script.run(one, monkeypatch)
    finish(script.start(two, *TORCHRUN), two)
    states = [saved(run)["model"] for run in (one, two)]
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-8)


def test_a_resumed_run_equals_an_uninterrupted_one(name, corpora, tmp_path, monkeypatch, capsys):
    script, options = Script(train_lm), TINY_LM | {"router": name, "data": corpora["a"], "eval_every": 2}
    uninterrupted, resumed = (options | {"out_dir": tmp_path / folder} for folder in ("uninterrupted", "resumed"))
    script.run(uninterrupted, monkeypatch)
    stopped(script, 1, signal.SIGTERM, resumed, capsys)
    script.run(resumed, monkeypatch)
    assert "goes on from step 2" in capsys.readouterr().out
    assert losses(uninterrupted["out_dir"]) == losses(resumed["out_dir"])
    weights = saved(resumed)["model"]
    for key, weight in saved(uninterrupted)["model"].items():
        assert torch.equal(weight, weights[key]), key


WRONG = {
    "indices": (lambda self, score, probs: probs.topk(2).indices, r"MyRouter.choose returned \(64, 2\) torch.int64"),
    "a mask": (lambda self, score, probs: probs > 0.2, r"MyRouter.choose returned \(64, 8\) torch.bool"),
    "nothing": (lambda self, score, probs: None, "MyRouter.choose returned a .*NoneType.*; it should return float"),
    "no choose": (Router.choose, r"MyRouter needs `choose\(self, score, probs\)`, which returns priorities \(S, E\)"),
    "too many": (lambda self, score, probs: by_rank(probs.argsort(), probs, 3), "MyRouter chose 3 experts .* K = 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_is_refused_in_one_line_that_names_it(wrong, corpora, tmp_path, monkeypatch, capsys):
    choose, message = WRONG[wrong]
    monkeypatch.setitem(ROUTERS, "mine", type("MyRouter", (Router,), {"choose": choose, "__module__": __name__}))
    options = TINY_LM | {"router": "mine", "data": corpora["a"], "out_dir": tmp_path}
    assert re.search(message, Script(train_lm).refused(options, monkeypatch, capsys))


def defined(base: type, **names) -> type:
    """A subclass as a class statement makes it."""
    return type("Mine", (base,), {"__module__": __name__} | names)


IGNORED = {  # what a class defines that would have no effect, and the error
    "loss": (defined(Router, loss=lambda self: {}), "Mine.loss overrides nothing: did you mean `losses`? If not"),
    "chose": (defined(TopK, chose=by_rank), "Mine.chose overrides nothing: did you mean `choose`? If not"),
    "after_steps": (
        defined(TopK, after_steps=print),
        "Mine.after_steps overrides nothing: did you mean `after_step`? If not",
    ),
    "besides": (defined(TopK, besides=print), "Mine.besides overrides nothing: did you mean `beside`? If not"),
    "score as a method": (defined(TopK, score=print), "Mine.score overrides nothing: did you mean `scores`? If not"),
    "balance": (defined(TopK, balance=False), "Mine.balance overrides nothing: did you mean `balanced`? If not"),
    "reads": (defined(TopK, reads={"tresholt"}), "Mine.reads has 'tresholt': correct it, or add a line tresholt to"),
    "default": (defined(TopK, constants={"top_k": 3}), "Mine.constants has 'top_k', whose default is in Config: move"),
    "constant": (defined(TopK, constants={"forgotten": 3}), "Mine never reads its constant 'f"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_a_name_that_would_be_ignored_is_refused_in_one_line(case, options, monkeypatch, capsys):
    cls, message = IGNORED[case]
    monkeypatch.setitem(ROUTERS, "mine", cls)
    assert message in Script(train_lm).refused(options | {"router": "mine"}, monkeypatch, capsys)


def test_helpers_of_a_router_may_have_any_name(monkeypatch):
    """Even one like a method of Router, if the class defines that as well."""
    helpers = dict.fromkeys(("choose", "choose_k", "losses", "loss", "balance", "_scores", "reset_parameters"), print)
    monkeypatch.setitem(ROUTERS, "mine", defined(TopK, scale=3.0, width=2, noise=print, **helpers))
    for script in (train_lm, train_mlm):
        assert command_line(script.Config, script.PRESETS, ["--router", "mine"]).router == "mine"


@pytest.mark.parametrize("kind", [*ROUTERS, "bias", "shared", "relu", "null", "noisy"])
def test_sound_routers_are_not_refused(kind):
    name = kind if kind in ROUTERS else f"{ROOT / 'examples/routers_of_today.py'}:{kind}"
    assert command_line(train_lm.Config, train_lm.PRESETS, ["--router", name]).router == name


def test_a_router_of_a_notebook_may_have_constants(monkeypatch):
    """Its source is unknown."""
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    monkeypatch.setitem(ROUTERS, "mine", defined(TopK, constants={"rate": 0.5}, __module__="notebook"))
    assert command_line(train_lm.Config, train_lm.PRESETS, ["--router", "mine", "--rate", "2"]).rate == 2.0


def test_a_router_of_a_file_may_have_the_name_of_another(tmp_path):
    """Both are kept."""
    (tmp_path / "mine.py").write_text("from routers import Router, router\n@router('topk')\nclass Mine(Router): pass\n")
    assert find_router(f"{tmp_path}/mine.py:topk").__name__ == "Mine"
    assert find_router("topk") is TopK


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "mine.py cannot be imported: .*No such file"),
        ("import nothere", "mine.py cannot be imported: No module named 'nothere'"),
        ("class Mine(Router) pass", r"mine.py cannot be imported: .*\(mine.py, line 1\)"),
        ("class Mine: pass", r"mine.py registers no router: add @router\(NAME\) above its class"),
        (
            "from routers import TopK, router\nrouter('yours')(TopK)",
            "router must be .*mine.py:yours, not .*mine.py:mine'",
        ),
    ],
    ids=["missing", "a package", "syntax", "no router", "another name"],
)
def test_a_file_without_the_router_is_one_clear_line(tmp_path, text, message):
    if text:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_router(f"{tmp_path}/mine.py:mine")


def test_counts_need_a_tally_of_their_shape():
    mine = TopK(constants(), 4)
    mine.tally("load", 4)
    mine.tally("tokens")
    mine.count("load", torch.ones(4))
    mine.count("tokens", 7)
    mine.count("tokens", torch.tensor(2))
    assert (mine.load.tolist(), mine.tokens.item()) == ([1, 1, 1, 1], 9)
    mine.eval().count("tokens", 5)  # an evaluation counts nothing
    assert mine.train().tokens.item() == 9
    for name, number, message in (
        ("lod", torch.ones(4), "TopK has no tally 'lod': add self.tally('lod', E) to __init__"),
        ("load", torch.ones(2, 3), "TopK counts shape (2, 3) in 'load', which has (4,)"),
        ("load", 1, "TopK counts shape () in 'load', which has (4,)"),
        ("experts", torch.ones(4, 8), "TopK has no tally 'experts': add self.tally('experts', E) to __init__"),
    ):
        with pytest.raises(RouterError, match=f"^{re.escape(message)}"):
            mine.count(name, number)
    assert mine.load.tolist() == [1, 1, 1, 1]


def test_losses_need_a_weight():
    mine = TopK(constants(), 4)
    mine.losses = lambda score, probs, priority: {"entropy": probs.sum()}
    with pytest.raises(RouterError, match=r"^TopK.losses must return {name: \(weight, value\)}"):
        mine(torch.randn(3, 8))


@pytest.mark.parametrize("short", ["bias", "relu"])
def test_a_router_that_counts_compiles_into_one_graph(short):
    """For any number of tokens."""
    torch.compiler.reset()
    kind = find_router(f"{ROOT / 'examples/routers_of_today.py'}:{short}")
    eager, compiled = (kind(constants(), 4, 2) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    forward = torch.compile(compiled, backend="eager", fullgraph=True)
    for S in (20, 17, 33):
        h = torch.randn(S, 8)
        torch.testing.assert_close(forward(h).weight, eager(h).weight)
    for tally in kind(constants(), 4, 2).tallies:
        assert torch.equal(getattr(compiled, tally), getattr(eager, tally))
        assert getattr(eager, tally).sum() > 0


ROUTER_WITH_CONSTANTS = """
from routers import TopK, router

class Base(TopK):
    constants = {"inherited": 2}

@router("mine")
class Mine(Base):
    constants = Base.constants | {
        "rate": 0.25,  # how fast "it" goes: 5% # a step
        "kind": "none",
    }

    def choose(self, score, probs):
        return self.config.rate * self.config.inherited + len(self.config.kind)
"""


def test_help_shows_the_constants_of_a_router_with_their_comments(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(ROUTER_WITH_CONSTANTS)
    name = f"{tmp_path}/mine.py:mine"
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop:
        Script(train_lm).run({"router": name, "help": ""}, monkeypatch)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stop.value.code == 0
    assert '--rate FLOAT how fast "it" goes: 5% # a step (default: 0.25)' in out
    assert f"--kind STR constant of router {name} (default: none)" in out
    assert "--threshold FLOAT the chosen experts' probabilities must sum to" in out
    config = command_line(train_lm.Config, train_lm.PRESETS, ["--router", name, "--kind", "false", "--rate", "1"])
    assert (config.kind, config.rate, config.inherited) == ("false", 1.0, 2)
