"""What a layer, a model, the FLOPs and train_lm.py know of a router of one's own."""

import re
import signal

import pytest
import torch
from helpers import ROOT, TINY_LM, Script, constants, lively, losses, saved, stopped, values_and_gradients

import model
import train_lm
from analysis.flops import moe_flops, served_rows
from model import GPT, Encoder, Translator, in_place_of_ffn
from routers import NOT_CHOSEN, ROUTERS, Router, Routing, balance_loss, by_rank, one_hot, priority_key, router

OWN = ("own_random", "own_soft", "own_position", "own_later")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """README's first one and the routers below, for this file alone."""
    before = dict(ROUTERS)
    [block] = re.findall(r'^(@router\("top1_random"\)\n.*?)^```', (ROOT / "README.md").read_text(), re.S | re.M)
    exec(block, globals() | {"router": lambda name: router("own_random")})

    @router("own_soft")
    class SoftThreshold(Router):
        """Every expert at least half as probable as the best one; the weights of the chosen sum to 1."""

        split, most = 4, None

        def choose(self, score, probs):
            enough = probs >= probs.max(dim=1, keepdim=True).values / 2
            return torch.where(enough, priority_key(probs, 0), NOT_CHOSEN)

        def forward(self, h, ids=None, position=None):
            routing = super().forward(h, ids, position)
            return routing._replace(weight=routing.weight / routing.weight.sum(dim=1, keepdim=True))

    @router("own_position")
    class ByPosition(Router):
        """As many experts take turns as there are, position by position; each weighs by its probability."""

        reads = {"router_std"}

        def forward(self, h, ids=None, position=None):
            probs = self.scores(h.to(self.experts.dtype)).softmax(dim=1)
            chosen = one_hot(position % self.E, self.E)
            priority = torch.where(chosen, priority_key(probs.detach(), 0), NOT_CHOSEN)
            return Routing(torch.where(chosen, probs, 0.0), priority, balance_loss(chosen, probs), probs)

    @router("own_later")
    class Mean(Router):
        """Every token goes where the mean of all of them goes."""

        sees_later, balanced = True, False

        def choose(self, score, probs):
            return by_rank(probs.mean(dim=0, keepdim=True).expand_as(probs).argsort(dim=1, descending=True), probs, 1)

    yield
    ROUTERS.clear()
    ROUTERS.update(before)


def layer(name: str, **changes):
    """XMoE's layer with this router: dense FFNs would have 32 units."""
    return lively(in_place_of_ffn(constants(router=name, ffn_size=32, **changes), 13, "tanh"))


def tokens(B: int, T: int):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(B, T, 8, generator=rng, dtype=torch.float64), torch.zeros(B, T, dtype=torch.int64)


SIZES = {  # by hand: experts, units of an expert, experts that a token may choose, rows per token at full capacity
    "own_random": (8, 16, 2, 2),
    "own_soft": (16, 8, 16, 4),
    "own_position": (4, 32, 1, 1),
    "own_later": (4, 32, 1, 1),
}


@pytest.mark.parametrize("name", OWN)
def test_its_split_says_experts_capacity_and_flops(name):
    moe, (E, F, most, served) = layer(name), SIZES[name]
    assert (moe.router.E, moe.experts.w_in.shape, moe.router.max_choices) == (E, (E, F, 8), most)
    assert moe.capacity_factor == moe.eval_capacity_factor == E / 4 and moe.capacity(48) == 48 // 4  # gamma S / E
    assert served_rows(moe) == served
    assert moe_flops(moe) == 2 * (8 * E + 32 * 8 * 2)  # the router, and one dense FFN's work
    doubled = layer(name, capacity=2.0, split=1)
    assert (doubled.router.E, doubled.capacity_factor, doubled.experts.w_in.shape[1]) == (4, 2.0, 32)


@pytest.mark.parametrize("name", OWN)
def test_each_expert_keeps_the_first_of_those_that_choose_it(name, monkeypatch):
    """And a GPU makes room for what is chosen."""
    moe, (h, ids), seen, results = layer(name, capacity=0.5), tokens(2, 24), [], []
    moe.watchers.append(lambda moe, h, routing, kept: seen.append((routing, kept)))
    for may_ask in (True, False):
        monkeypatch.setattr(model, "may_ask", lambda x, may_ask=may_ask: may_ask)
        torch.manual_seed(5)  # own_random draws
        results.append(values_and_gradients(moe(h, ids), list(moe.parameters())))
    torch.testing.assert_close(results[0], results[1])
    routing, kept = seen[0]
    for wanted, priority, served in zip(routing.wanted.t(), routing.priority.t(), kept.t()):
        queue = sorted((-int(priority[s]), s) for s in wanted.nonzero().flatten().tolist())
        assert served.nonzero().flatten().tolist() == sorted(s for _, s in queue[: 48 // 8])  # half of S / 4
    assert kept.sum() < routing.wanted.sum() and (routing.balance_loss == 0) == (name == "own_later")


@pytest.mark.parametrize("name", OWN)
def test_it_trains_and_goes_on_bit_for_bit(name, corpora, tmp_path, monkeypatch, capsys):
    script, options = Script(train_lm), TINY_LM | {"router": name, "data": corpora["a"], "eval_every": 2}
    whole, parts = options | {"out_dir": tmp_path / "whole"}, options | {"out_dir": tmp_path / "parts"}
    script.run(whole, monkeypatch)
    stopped(script, 1, signal.SIGTERM, parts, capsys)
    script.run(parts, monkeypatch)
    assert "goes on from step 2" in capsys.readouterr().out
    assert losses(whole["out_dir"]) == losses(parts["out_dir"])
    ours, theirs = saved(whole)["model"], saved(parts)["model"]
    assert all(torch.equal(w, theirs[key]) for key, w in ours.items())


def test_positions_are_those_in_a_tokens_own_sequence():
    """Whatever else is in the batch, whatever is padding, and from the first one of a piece that goes on."""
    moe, (h, ids) = layer("own_position"), tokens(2, 6)
    seen = []
    moe.watchers.append(lambda moe, h, routing, kept: seen.append(routing.wanted.int().argmax(dim=1).tolist()))
    moe(h, ids)
    moe(h, ids, torch.tensor([0, 1, 2, 6, 7, 10]))
    moe(h, ids, first=3)
    assert seen == [[0, 1, 2, 3, 0, 1] * 2, [0, 1, 2, 0, 1, 0], [3, 0, 1, 2, 3, 0] * 2]


def test_a_decoder_that_remembers_gives_positions_that_go_on():
    torch.manual_seed(0)
    config = constants(router="own_position", moe_after=(), decoder_layers=2, decoder_moe=True)
    net = lively(Translator(config, 13)).eval()
    source, ids = torch.tensor([[3, 4, 5]]), torch.tensor([[2, 7, 1, 9]])
    with torch.no_grad(), net.no_limit():
        encoded, _ = net.encode(source)
        whole, _, _ = net.decode(ids, encoded)
        past, pieces = None, []
        for id in ids[0]:
            h, _, past = net.decode(id[None, None], encoded, past)
            pieces.append(h)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


def test_one_that_sees_later_tokens_writes_and_translates_nothing():
    gpt = GPT(constants(router="own_later"), 13)
    assert gpt.sees_later and not gpt.limited_at_test
    with pytest.raises(ValueError, match="own_later sees later tokens, so it cannot generate"):
        gpt.generate(torch.zeros(1, 2, dtype=torch.int64), 1)
    config = constants(router="own_later", moe_after=(), decoder_layers=2, decoder_moe=True)
    with pytest.raises(ValueError, match="sees later tokens, so it cannot translate"):
        Translator(config, 13)
    with pytest.raises(ValueError, match="router own_later chooses by the capacity: give --capacity_factor"):
        Encoder(constants(router="own_later"), 13)


WRONG = {
    "indices": (lambda self, score, probs: probs.topk(2).indices, r"Own chooses by \(64, 2\) of torch.int64: `choose`"),
    "floats": (lambda self, score, probs: probs, r"Own chooses by \(64, 8\) of torch.float32: `choose` should return"),
    "nothing": (lambda self, score, probs: None, "Own chooses by a .*NoneType.*should return priorities .* by_rank"),
    "no choose": (Router.choose, r"Own has no `choose\(self, score, probs\)`, which returns priorities \(S, E\)"),
    "too many": (lambda self, score, probs: by_rank(probs.argsort(), probs, 3), "Own chose 3 experts .* most = 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_is_one_line_that_names_it(wrong, corpora, tmp_path, monkeypatch, capsys):
    choose, message = WRONG[wrong]
    monkeypatch.setitem(ROUTERS, "own", type("Own", (Router,), {"choose": choose, "__module__": __name__}))
    options = TINY_LM | {"router": "own", "data": corpora["a"], "out_dir": tmp_path}
    assert re.search(message, Script(train_lm).refused(options, monkeypatch, capsys))
