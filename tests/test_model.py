"""The constants of models, and the decoder language model around its sparse layers."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from count_functions import functions_of_a_step
from torch import nn

from model import GPT, MaskedLM, ModelConfig, MoE, sizes
from routers import ROUTERS

SMALL = dict(
    vocab_size=13, block_size=8, n_layer=2, n_head=2, n_embd=8, ffn_size=16, num_experts=3, capacity_factor=1.0
)
VARIANTS = {name: {"router": name} for name in ROUTERS} | {
    "topk": {"router": "topk", "top_k": 2},
    "x-moe": {"router": "switch", "score": "hypersphere"},
    "x-moe-sigmoid": {"router": "switch", "score": "hypersphere", "gate": "sigmoid", "routing_dim": 0},
}
every_causal_variant = pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "expert_choice"])
train_and_test = pytest.mark.parametrize("training", [True, False], ids=["training", "test"])


def make_gpt(variant="switch", training=False, **options) -> GPT:
    """A decoder with parameters large enough for every choice to matter."""
    model = GPT(ModelConfig(**(SMALL | VARIANTS[variant] | options)))
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("temperature"):
            nn.init.constant_(p, 0.4)
        elif name == "wte.weight":  # of equal length: no token is everyone's guess
            p.data = 3 * F.normalize(torch.randn_like(p), dim=1)
        elif p.dim() > 1:
            nn.init.normal_(p, std=0.2 if name == "wpe.weight" else 0.7)
        else:
            p.data += 0.2 * torch.randn_like(p)
    return model.double().train(training)


def make_ids(B, T, seed=0):
    return torch.randint(SMALL["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


# --- Where weights start, and the output's bias


@pytest.mark.parametrize("router, name", [("threshold", "experts"), ("hypersphere", "project.weight")])
@pytest.mark.parametrize("std", [None, 0.5])
def test_routers_start_as_wide_as_they_are_told(router, name, std):
    """The dot product's expert embeddings, the hypersphere's W; those of the sphere have their norm."""
    shape = dict(vocab_size=9, n_layer=2, n_embd=256, n_head=2, init_std=0.02, num_experts=64)
    model = GPT(ModelConfig(router=router, router_init_std=std, **shape))
    found = dict(model.moe_layers[0].router.named_parameters())
    assert float(found[name].std()) == pytest.approx(std or 0.02, rel=0.05)
    if router == "hypersphere":
        torch.testing.assert_close(found["experts"].norm(dim=1), torch.full((64,), 0.1))
    assert float(model.moe_layers[0].layers[0].w_in.std()) == pytest.approx(0.02, rel=0.05)  # and nothing else


def test_the_outputs_bias_is_added_to_all_logits():
    model, plain = make_gpt("threshold", frequency_bias=True), make_gpt("threshold")
    assert model.state_dict().keys() - plain.state_dict().keys() == {"bias"} and plain.bias is None
    assert not GPT(ModelConfig(**SMALL, frequency_bias=True)).bias.any()  # until a script fills it in
    model.bias.data = 3 * torch.randn(13, dtype=torch.float64)
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if name != "bias"})
    ids = make_ids(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], plain(ids)[0] + model.bias)


def test_what_is_written_is_by_the_logits_of_a_forward_pass():
    """With a bias that decides much of it."""
    model = make_gpt("threshold", frequency_bias=True)
    model.bias.data = 10 * torch.randn(13, dtype=torch.float64)
    ids = make_ids(20, 3)
    out = model.generate(ids, 4, top_k=1)
    with model.no_limit(), torch.no_grad():
        logits = model(out[:, :-1])[0][:, 2:]
    assert torch.equal(out[:, 3:], logits.argmax(dim=2))
    assert not torch.equal(out[:, 3:], (logits - model.bias).argmax(dim=2))


# --- Parameters, and where the experts stand

GPT2 = dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, ffn_size=3072)
LARGE = GPT2 | dict(n_head=16, n_embd=1024, ffn_size=4096)


@pytest.mark.parametrize(
    "shape, router, expert_size, total",
    [
        (GPT2, "dense", None, 124_439_808),
        (GPT2, "switch", None, 322_818_816),
        (GPT2, "hash", None, 322_818_816 - 6 * 8 * 768),
        (GPT2, "base", None, 322_818_816),
        (GPT2, "topk", 1536, 322_892_544),
        (GPT2, "threshold", 1536, 322_892_544),
        (GPT2, "threshold", 768, 323_040_000),
        (GPT2, "threshold", 384, 323_334_912),
        (LARGE, "switch", None, 556_254_208),
        (LARGE, "threshold", 2048, 556_352_512),
        (LARGE, "threshold", 1024, 556_549_120),
        (LARGE, "topk", 512, 556_942_336),
    ],
)
def test_parameter_counts_of_table_1(shape, router, expert_size, total):
    with torch.device("meta"):
        model = GPT(ModelConfig(**shape, router=router, expert_size=expert_size))
    assert sum(p.numel() for p in model.parameters()) == total


def test_every_second_block_is_sparse():
    model = make_gpt(n_layer=5)
    assert [isinstance(block.ffn, MoE) for block in model.blocks] == [False, True, False, True, False]
    assert [moe is model.blocks[i].ffn for i, moe in zip((1, 3), model.moe_layers)] == [True, True]
    every = make_gpt(n_layer=3, moe_every=1)
    assert len(every.moe_layers) == 3
    assert not GPT(ModelConfig(**(SMALL | {"router": "dense"}))).moe_layers


# --- The language model


def test_balance_loss_is_summed_over_layers_and_steps_reach_every_router():
    model, losses = make_gpt("x-moe", n_layer=4), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(out[1]))
    _, total = model(make_ids(2, 8))
    assert len(losses) == 2 and min(losses) > 0
    torch.testing.assert_close(total, sum(losses))
    model.after_step()
    for moe in model.moe_layers:
        torch.testing.assert_close(moe.router.experts.norm(dim=1), torch.full((3,), 0.1).double())


def test_what_writes_to_the_residual_stream_starts_smaller_with_depth():  # GPT-2
    model = GPT(ModelConfig(vocab_size=50, n_layer=8, n_embd=64, ffn_size=256, init_std=0.02))
    for name, p in model.named_parameters():
        last = name.rpartition(".")[2]
        if last.startswith("b"):
            assert (p == 0).all(), name
        elif "ln" not in name:
            expected = 0.02 / 4 if name.endswith(("proj.weight", "w_out")) else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.1), name


@pytest.mark.parametrize("router", ["dense", "threshold"])
def test_dropout_follows_embeddings_attention_and_ffn(router):
    """Where all is dropped, embeddings are 0 and a block is the identity."""
    model = GPT(ModelConfig(**(SMALL | dict(router=router, dropout=1.0, moe_every=1)))).double()
    ids, x = make_ids(2, 8), torch.randn(2, 8, 8, dtype=torch.float64)
    for block in model.blocks:
        assert block.attn.dropout == 1.0
        block.attn.dropout = 0.0  # that of attention weights, which would leave nothing to drop
        assert torch.equal(block.train()(x, ids)[0], x)
        assert not torch.equal(block.eval()(x, ids)[0], x)
    reached = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0]))
    model.train()(ids)
    assert (reached[0] == 0).all()


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than block_size = 8"):
        make_gpt()(torch.zeros(1, 9, dtype=torch.int64))


def logits_before_and_after_a_change(model, at):
    ids = make_ids(3, 8)
    changed = ids.clone()
    changed[:, at:] = (changed[:, at:] + 5) % SMALL["vocab_size"]
    with torch.no_grad():
        return model(ids)[0], model(changed)[0]


@pytest.mark.parametrize("gamma", [None, 3.0], ids=["no limit", "gamma E"])
@every_causal_variant
def test_without_drops_no_logit_depends_on_a_later_token(variant, gamma):
    model = make_gpt(variant, n_layer=4, capacity_factor=0.5, eval_capacity_factor=gamma)
    for at in (1, 4, 7):
        if gamma:
            before, after = logits_before_and_after_a_change(model, at)
        else:
            with model.no_limit():
                before, after = logits_before_and_after_a_change(model, at)
        torch.testing.assert_close(before[:, :at], after[:, :at])
        assert (before[:, at:] - after[:, at:]).abs().max() > 1e-3


@pytest.mark.parametrize("variant, gamma", [("switch", 0.5), ("expert_choice", 1.0)])
def test_with_drops_and_in_expert_choice_logits_do_depend_on_later_tokens(variant, gamma):
    before, after = logits_before_and_after_a_change(make_gpt(variant, n_layer=4, capacity_factor=gamma), 4)
    assert (before[:, :4] - after[:, :4]).abs().max() > 1e-3


def test_watchers_see_what_every_layer_routes():
    model, seen = make_gpt("topk", n_layer=4, capacity_factor=0.5), []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: seen.append((moe, h, routing, kept)))
    model(make_ids(3, 8))
    assert [moe for moe, *_ in seen] == model.moe_layers
    for moe, h, routing, kept in seen:
        assert h.shape == (24, 8) and kept.shape == (24, 3)
        assert torch.equal(moe.router(h).priority, routing.priority)
        assert kept.sum() <= 3 * 4 < routing.wanted.sum() and not (kept & ~routing.wanted).any()


def test_no_limit_holds_inside_and_is_undone_after():
    model = make_gpt(n_layer=4, capacity_factor=2.0, eval_capacity_factor=1.5)
    limits = lambda: [(moe.capacity_factor, moe.eval_capacity_factor) for moe in model.moe_layers]  # noqa: E731
    with model.no_limit() as same:
        assert same is model and limits() == [(2.0, math.inf)] * 2
    assert limits() == [(2.0, 1.5)] * 2
    with pytest.raises(KeyError), model.no_limit():
        raise KeyError
    assert limits() == [(2.0, 1.5)] * 2


# --- Generation


def greedy(model, ids, new_tokens):
    with torch.no_grad():
        for _ in range(new_tokens):
            best = model(ids[:, -model.config.block_size :])[0][:, -1].argmax(dim=1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids


@every_causal_variant
def test_top_k_1_is_the_greedy_loop_also_beyond_block_size(variant):
    model, ids = make_gpt(variant, n_layer=4, capacity_factor=0.25), make_ids(8, 3)
    out = model.generate(ids, 12, top_k=1)
    assert out.shape == (8, 15) and torch.equal(out[:, :3], ids)
    assert not torch.equal(out, greedy(model, ids, 12))  # drops would have shown
    assert torch.equal(out, model.generate(ids, 12, temperature=1e-6))
    with model.no_limit():
        assert torch.equal(out, greedy(model, ids, 12))


@every_causal_variant
def test_batch_mates_do_not_change_a_greedy_continuation(variant):
    model, ids = make_gpt(variant, n_layer=4, capacity_factor=0.25), make_ids(12, 4)
    together = model.generate(ids, 6, top_k=1)
    assert torch.equal(together, torch.cat([model.generate(row[None], 6, top_k=1) for row in ids]))


def test_samples_come_from_the_top_k_and_follow_the_temperature():
    model, ids = make_gpt(), make_ids(1, 4)
    with torch.no_grad(), model.no_limit():
        logits = model(ids)[0][0, -1]
    torch.manual_seed(0)
    drawn = model.generate(ids.expand(4000, -1), 1, temperature=3.0, top_k=3)[:, -1]
    share = torch.bincount(drawn, minlength=13) / 4000
    expected = torch.zeros(13).double()
    best = logits.topk(3).indices
    expected[best] = (logits[best] / 3.0).softmax(dim=0)
    assert ((share > 0) == (expected > 0)).all()
    assert (share - expected).abs().max() < 0.04
    assert model.generate(ids, 1, top_k=100).shape == (1, 5)  # more than there are is all


def test_expert_choice_refuses_to_generate():
    with pytest.raises(ValueError, match="expert_choice sees later tokens, so it cannot generate"):
        make_gpt("expert_choice").generate(make_ids(1, 2), 1)


@train_and_test
def test_generation_leaves_the_model_as_it_was(training):
    model, ids = make_gpt(training=training, dropout=0.5), make_ids(1, 2)
    assert torch.equal(model.generate(ids, 4, top_k=1), model.generate(ids, 4, top_k=1))  # no dropout
    assert all(m.training == training for m in model.modules())
    assert [moe.eval_capacity_factor for moe in model.moe_layers] == [1.0]


# --- Configuration


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_head=3), "n_head = 3 does not divide n_embd = 128"),
        (dict(moe_after=(0,)), r"moe_after must name layers from 1 to n_layer = 4, not \(0,\)"),
        (dict(moe_after=(2, 5)), r"moe_after must name layers from 1 to n_layer = 4, not \(2, 5\)"),
        (dict(moe_every=5), "moe_every = 5 leaves no block of n_layer = 4 with experts"),
        (dict(top_k=2), "top_k = 2 is for --router topk"),
        (dict(router="topk", num_experts=8, top_k=9), r"top_k must lie in \[1, num_experts = 8\], not 9"),
        (dict(expert_size=1000), "expert_size = 1000 does not divide ffn_size = 512"),
        (dict(expert_size=2048), "expert_size = 2048 does not divide ffn_size = 512"),
        (dict(router="topk", expert_size=1000, num_experts=5, capacity_factor=1.5), "expert_size = 1000 does not div"),
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_an_odd_expert_size_is_fine_where_nothing_has_to_be_derived():
    size = sizes(ModelConfig(router="topk", expert_size=1000, num_experts=5, top_k=2, capacity_factor=1.5))
    assert (size.expert_size, size.num_experts, size.top_k, size.capacity_factor) == (1000, 5, 2, 1.5)


@pytest.mark.parametrize("router", ROUTERS)
def test_in_place_of_ffns_defaults_keep_parameters_and_flops(router):  # XMoE eq. 6
    size = sizes(ModelConfig(router=router, ffn_size=3072))
    k = 4 if router in ("topk", "threshold") else 1
    assert (size.score, size.gate, size.select) == ROUTERS[router]
    assert (size.expert_size, size.num_experts, size.capacity_factor, size.expert_layers) == (3072 // k, 8 * k, k, 0)
    assert size.top_k == (4 if router == "topk" else 1)
    assert (size.eval_capacity_factor, size.eval_threshold) == (k, 0.9)
    assert size.routing_dim == (4 if router == "hypersphere" else 0)
    assert (size.orthogonal, size.renormalize, size.balance_choices) == (False, False, "first")


@pytest.mark.parametrize("router", ROUTERS)
def test_between_layers_defaults_are_x_moes(router):  # X-MoE 4.1
    size = sizes(ModelConfig(router=router, ffn_size=3072, moe_after=(2,)))
    assert (size.expert_size, size.num_experts, size.expert_layers) == (3072, 32, 3)
    assert size.capacity_factor == size.eval_capacity_factor
    assert size.capacity_factor == (1.0 if router in ("threshold", "expert_choice") else math.inf)
    assert size.routing_dim == (16 if router == "hypersphere" else 0)
    assert size.orthogonal
    several = router == "topk"
    assert (size.top_k, size.renormalize, size.balance_choices) == (
        (2, True, "all") if several else (1, False, "first")
    )


@pytest.mark.parametrize("k, ffns", [(1, 8), (2, 8), (8, 32)])
def test_dividing_the_expert_size_multiplies_experts_choices_and_capacity(k, ffns):
    size = sizes(ModelConfig(router="topk", ffn_size=1024, expert_size=1024 // k, expert_ffns=ffns))
    assert (size.num_experts, size.top_k, size.capacity_factor) == (ffns * k, k, k)


@pytest.mark.parametrize("gate, tau0", [("softmax", 0.3), ("sigmoid", 0.07)])
def test_the_first_temperature_follows_the_gate(gate, tau0):
    assert sizes(ModelConfig(router="hypersphere", gate=gate)).init_temperature == tau0
    assert sizes(ModelConfig(router="switch", gate=gate)).init_temperature is None


def test_what_was_said_wins_and_nothing_is_written_back():
    said = dict(score="hypersphere", gate="sigmoid", num_experts=6, capacity_factor=1.25, threshold=0.7)
    config = ModelConfig(router="threshold", **said)
    size = sizes(config)._asdict()
    assert {name: size[name] for name in said} == said
    assert (size["routing_dim"], size["eval_capacity_factor"], size["eval_threshold"]) == (3, 1.25, 0.7)
    assert config == dataclasses.replace(config) and config.routing_dim is None and config.eval_threshold is None
    size = sizes(ModelConfig(**said, routing_dim=4, eval_capacity_factor=math.inf, eval_threshold=0.0))
    assert (size.routing_dim, size.eval_capacity_factor, size.eval_threshold) == (4, math.inf, 0.0)
    size = sizes(ModelConfig(router="topk", top_k=1, moe_after=(1,), routing_dim=0, orthogonal=False))
    assert (size.renormalize, size.balance_choices, size.routing_dim, size.orthogonal) == (False, "first", 0, False)
    assert sizes(ModelConfig(router="topk", select="threshold")).select == "threshold"


@pytest.mark.parametrize("router", [*ROUTERS])
@pytest.mark.parametrize("kind, where", [(GPT, {}), (MaskedLM, {"moe_after": (1,)})])
def test_a_router_told_to_select_by_hash_is_the_hash_router(router, kind, where):
    base = SMALL | where | dict(num_experts=4, capacity_factor=None, score="hypersphere")
    assert sizes(ModelConfig(**base | {"router": router, "select": "hash"}))[:3] == (None, None, "hash")
    outputs = []
    for names in ({"router": router, "select": "hash"}, {"router": "hash"}):
        torch.manual_seed(0)
        model = kind(ModelConfig(**base | names))
        model.after_step()
        inputs = [make_ids(2, 8), torch.arange(3)] if where else [make_ids(2, 8)]
        outputs.append(model(*inputs)[0])
    assert torch.equal(*outputs)


UNREAD = {  # by models with these options, of the constants of a sparse layer
    "dense": (dict(router="dense"), {"score", "num_experts", "threshold", "moe_every", "expert_ffns", "decoder_moe"}),
    "switch": (dict(router="switch"), {"threshold", "eval_threshold", "top_k", "init_temperature", "balance_choices"}),
    "E is said": (dict(num_experts=4), {"expert_ffns"}),
    "one of K": (dict(router="topk", top_k=1), {"renormalize"}),
    "topk": (dict(router="topk"), {"threshold", "eval_threshold", "init_temperature"}),
    "threshold": (dict(router="threshold"), {"top_k", "init_temperature"}),
    "hash": (dict(router="hash"), {"score", "gate", "routing_dim", "orthogonal", "threshold", "init_temperature"}),
    "base": (dict(router="base"), {"orthogonal", "top_k", "balance_choices", "renormalize"}),
    "hypersphere": (dict(router="hypersphere"), {"orthogonal", "threshold", "top_k"}),
    "inserted": (dict(router="hypersphere", moe_after=(1,)), {"moe_every", "expert_ffns", "decoder_moe"}),
}
OTHER = dict(threshold=0.3, top_k=1, init_temperature=0.9, renormalize=True, orthogonal=True, balance_choices="all")
OTHER |= dict(routing_dim=2, eval_threshold=0.2, num_experts=5, expert_size=4, capacity_factor=0.7, gate="sigmoid")


@pytest.mark.parametrize("options, some", UNREAD.values(), ids=UNREAD)
def test_constants_that_a_model_does_not_read_change_nothing(options, some):
    base = SMALL | dict(num_experts=4, capacity_factor=None) | options
    unread = ModelConfig(**base).unread()
    assert some <= unread
    for name, value in OTHER.items():
        outputs = []
        for given in ({}, {name: value}):
            torch.manual_seed(0)
            config = ModelConfig(**(base | given))
            inputs = [make_ids(2, 8)]
            if config.moe_after:
                inputs.append(torch.arange(3))  # the masked tokens
            outputs.append((MaskedLM if config.moe_after else GPT)(config)(*inputs))
        if name in unread:
            assert torch.equal(outputs[0][0], outputs[1][0]), name
            assert torch.equal(outputs[0][1], outputs[1][1]), name


@pytest.mark.parametrize(
    "router, read",
    [
        ("switch", {"score", "gate", "routing_dim", "orthogonal"}),
        ("topk", {"top_k", "renormalize", "balance_choices"}),
        ("threshold", {"threshold", "eval_threshold", "renormalize", "balance_choices"}),
        ("hypersphere", {"init_temperature", "routing_dim"}),
        ("hash", {"num_experts", "expert_size", "capacity_factor", "eval_capacity_factor"}),
    ],
)
def test_constants_that_a_model_reads_may_be_said(router, read):
    assert not read & ModelConfig(router=router).unread()


def test_a_step_of_a_sparse_decoder_enters_few_functions():
    assert len(functions_of_a_step()) <= 22


# --- Parity with another implementation


def test_logits_equal_those_of_hugging_face_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    from pretrained import fill, load_gpt2

    torch.manual_seed(0)
    shape = dict(vocab_size=29, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)  # biases and norms too
    theirs.save_pretrained(tmp_path)
    arguments, weights = load_gpt2(tmp_path)
    ours = fill(GPT(ModelConfig(**arguments)).eval(), arguments, weights, tmp_path)
    ids = torch.randint(29, (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, rtol=1e-5, atol=1e-5)
