"""The encoder-decoder against torch's own layers, incremental decoding and beam search against plain ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flops import count_parameters, translation_flops
from model import EncoderConfig
from translator import Translator, TranslatorConfig

V, BOS, PAD, EOS, NEVER = 40, 0, 1, 2, (0, 1, 3, 39)
SIZE = dict(vocab_size=V, block_size=32, n_layer=2, decoder_layers=2, n_head=2, n_embd=16, ffn_size=32, dropout=0.0)
SPARSE = dict(num_experts=4, expert_size=16)
ROWS = {
    "dense": dict(router="dense"),
    "switch": dict(router="switch", **SPARSE),
    "top-2": dict(router="topk", top_k=2, **SPARSE),
    "threshold": dict(router="threshold", **SPARSE),
    "hash": dict(router="hash", **SPARSE),
    "base": dict(router="base", **SPARSE),
    "hypersphere": dict(router="hypersphere", **SPARSE),
    "encoder alone": dict(router="threshold", decoder_moe=False, **SPARSE),
    "X-MoE": dict(router="hypersphere", moe_after="1,2,2", orthogonal=True, **SPARSE),
}


def make(row: str, dtype=torch.float64, seed: int = 0, **options) -> Translator:
    """Weights large enough for a token to make a difference."""
    torch.manual_seed(seed)
    model = Translator(TranslatorConfig(**SIZE | ROWS[row] | {"init_std": 0.3} | options)).to(dtype).eval()
    for moe in model.moe_layers:
        for layer in moe.layers:
            nn.init.normal_(layer.w_out, std=0.3)
    return model


def sources(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, V - 1, (n,), generator=rng).tolist(), EOS] for n in lengths]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, None if min(map(len, rows)) == width else (ids.flatten() != PAD).nonzero().squeeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# the model


def literal(model: Translator, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The dense model's logits through torch's Transformer layers and sinusoids written as in Vaswani et al."""
    config, D = model.config, model.config.n_embd
    options = dict(d_model=D, nhead=config.n_head, dim_feedforward=config.ffn_size, dropout=0.0, batch_first=True)
    options |= dict(norm_first=True, activation=lambda x: F.gelu(x, approximate="tanh"), dtype=torch.float64)

    def fill(theirs: nn.MultiheadAttention, ours):
        theirs.in_proj_weight.data = torch.cat([ours.q.weight, ours.kv.weight])
        theirs.in_proj_bias.data = torch.cat([ours.q.bias, ours.kv.bias])
        theirs.out_proj.load_state_dict(ours.proj.state_dict())

    def copied(kind, block):
        layer = kind(**options)
        fill(layer.self_attn, block.attn)
        norms = [block.ln_1, block.ln_2]
        if kind is nn.TransformerDecoderLayer:
            fill(layer.multihead_attn, block.cross)
            norms.insert(1, block.ln_c)
        for number, norm in enumerate(norms, 1):
            getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
        layer.linear1.load_state_dict(block.ffn.fc.state_dict())
        layer.linear2.load_state_dict(block.ffn.proj.state_dict())
        return layer.eval()

    def embed(ids):
        x = torch.zeros(*ids.shape, D, dtype=torch.float64)
        for place in range(ids.shape[1]):
            for i in range(D // 2):
                angle = place / 10_000 ** (2 * i / D)
                x[:, place, i], x[:, place, D // 2 + i] = math.sin(angle), math.cos(angle)
        return x + math.sqrt(D) * model.wte.weight[ids]

    padding, x = source == PAD, embed(source)
    for block in model.encoder:
        x = copied(nn.TransformerEncoderLayer, block)(x, src_key_padding_mask=padding)
    memory, y = model.ln_e(x), embed(target)
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    for block in model.decoder:
        y = copied(nn.TransformerDecoderLayer, block)(y, memory, tgt_mask=causal, memory_key_padding_mask=padding)
    return model.ln_d(y) @ model.wte.weight.t()


def test_the_dense_model_is_torchs_transformer():
    model = make("dense")
    (source, real), (target, target_real) = padded(sources([5, 9, 2])), padded(sources([7, 3, 4], 1))
    logits, balance = model(source, target, real, target_real)
    expected = literal(model, source, target).flatten(0, 1)[target_real]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # the sinusoids' angles are in fp32
    assert balance == 0


@pytest.mark.parametrize("row", ROWS)
def test_padding_and_the_batch_do_not_change_a_logit_without_a_limit(row):
    model, pairs = make(row), list(zip(sources([5, 9, 2, 9]), sources([7, 3, 4, 1], 1)))
    with model.test_routing(capacity_factor=math.inf):
        (source, real), (target, target_real) = (padded(list(side)) for side in zip(*pairs))
        together = model(source, target, real, target_real)[0].split([len(t) for _, t in pairs])
        for (one, two), ours in zip(pairs, together):
            alone, _ = model(torch.tensor([one]), torch.tensor([two]))
            torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("row", ROWS)
def test_no_logit_depends_on_a_later_token_without_a_limit(row):
    model, (source, target) = make(row), (torch.tensor(sources([6, 6], seed)) for seed in (0, 1))
    other = target.clone()
    other[:, 4:] = (other[:, 4:] + 5) % 30 + 4
    with model.test_routing(capacity_factor=math.inf):
        one, two = (model(source, ids)[0].view(2, 7, V) for ids in (target, other))
    torch.testing.assert_close(one[:, :4], two[:, :4])
    assert (one[:, 4:] - two[:, 4:]).abs().max() > 1e-3


@pytest.mark.parametrize("row", ROWS)
def test_every_weight_has_a_gradient(row):
    model = make(row).train()
    (source, real), (target, target_real) = padded(sources([5, 9, 20])), padded(sources([7, 3, 20], 1))
    logits, balance = model(source, target, real, target_real)
    (logits.square().mean() + balance).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0} == set()


def test_experts_stand_where_the_papers_have_them():
    paper = TranslatorConfig(n_layer=12, decoder_layers=6, n_embd=512, ffn_size=2048, n_head=8, expert_ffns=32)
    sparse = [[i + 1 for i in range(n) if paper.sparse(i, n == 6)] for n in (12, 6)]
    assert sparse == [[2, 4, 6, 8, 10, 12], [2, 4, 6]]
    for router, size, expected in (
        ("switch", 2048, (32, 1, 1)),
        ("topk", 1024, (64, 2, 2)),
        ("topk", 512, (128, 4, 4)),
        ("threshold", 512, (128, 1, 4)),
    ):
        config = TranslatorConfig(ffn_size=2048, expert_ffns=32, router=router, expert_size=size)
        assert (config.num_experts, config.top_k, config.capacity_factor) == expected
    with torch.device("meta"):
        D, F_, dense = 512, 2048, 4 * (512**2 + 512)
        ffn = 2 * D * F_ + F_ + D
        blocks = 12 * (dense + ffn + 4 * D) + 6 * (2 * dense + ffn + 6 * D)
        total = 32_002 * D + blocks + 4 * D
        sizes = dict(vocab_size=32_002, n_layer=12, decoder_layers=6, n_embd=D, ffn_size=F_, n_head=8, expert_ffns=32)
        assert count_parameters(Translator(TranslatorConfig(**sizes, router="dense")))["total"] == total
        model = Translator(TranslatorConfig(**sizes, router="threshold", expert_size=512))
        experts = 128 * (2 * D * 512 + 512 + D) + 128 * D
        assert count_parameters(model)["total"] == total + 9 * (experts - ffn)
        model = Translator(TranslatorConfig(**sizes, router="hypersphere", moe_after="6", orthogonal=True))
        config = model.config
        assert (config.expert_layers, config.num_experts, config.expert_size) == (3, 32, F_)
        assert config.capacity_factor == math.inf and len(model.moe_layers) == 1
        stack = 32 * 3 * (ffn + 2 * D)
        assert count_parameters(model)["total"] == total + stack + 16 * D + 32 * 16 + 1


@pytest.mark.parametrize("row", ROWS)
def test_flops_are_what_a_counter_counts(row):
    """The counter sees the rows that are kept, and the experts' products with b_out, which are left out of FLOPs."""
    model = make(row, torch.float32, **({} if row in ("dense", "X-MoE") else {"capacity_factor": 1.0})).train()
    source, target = torch.randint(4, 30, (2, 12)), torch.randint(4, 30, (2, 8))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.start_stats()
        model(source, target)
    config, flops = model.config, translation_flops(model.config, 12, 8)
    tokens = {"dense": 0, "encoder alone": 24, "X-MoE": 3 * 24}.get(row, 24 + 16)  # that pass sparse layers
    stack, dim = 3 if row == "X-MoE" else 1, 2 if config.score == "hypersphere" else 0
    router = {"hash": 0}.get(row, 2 * (16 * dim + 4 * dim if dim else 4 * 16))
    assert 2 * flops["moe"] == tokens * (router + stack * 4 * 16 * 16)
    bias, kept = stack * 2 * 4 * 16, sum(moe.tally["served"] for moe in model.moe_layers)
    experts = kept * stack * 4 * 16 * config.expert_size
    assert counter.get_total_flops() == 2 * (flops["total"] - flops["moe"]) + tokens * (router + bias) + experts


def test_bad_shapes_are_one_line():
    for options, message in (
        (dict(decoder_layers=0), "decoder_layers, expert_ffns = 0, 8: not positive"),
        (dict(expert_ffns=0), "decoder_layers, expert_ffns = 2, 0: not positive"),
        (dict(moe_after="3"), "moe_after must name layers from 1 to n_layer = 2, not '3'"),
        (dict(moe_after="x"), "moe_after must name layers from 1 to n_layer = 2, not 'x'"),
        (dict(router="expert_choice"), "expert_choice sees later tokens, so it cannot translate"),
        (dict(expert_layers=-1), "expert_layers must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            TranslatorConfig(**SIZE | options)
    TranslatorConfig(**SIZE | dict(router="expert_choice", decoder_moe=False))
    TranslatorConfig(**SIZE | dict(router="expert_choice", moe_after="1"))
    model = make("dense")
    encoded, _ = model.encode(torch.tensor([[4, EOS]]))
    _, _, past = model.decode(torch.tensor([[BOS]]), encoded)
    with pytest.raises(ValueError, match="one token at a time, not 2"):
        model.decode(torch.tensor([[5, 6]]), encoded, past)


def test_what_means_nothing_makes_no_other_model():
    plain = TranslatorConfig(**SIZE, router="dense")
    assert plain == TranslatorConfig(**SIZE, router="dense", moe_after="1", expert_ffns=32, decoder_moe=False)
    inserted = dict(router="hypersphere", moe_after="1")
    assert TranslatorConfig(**SIZE, **inserted) == TranslatorConfig(**SIZE, **inserted, expert_ffns=32)


def test_the_inserted_layer_is_the_encoders():
    """Gate and balance loss over the K chosen, as X-MoE has it; in place of an FFN they are XMoE's."""
    inserted = TranslatorConfig(**SIZE, router="topk", moe_after="2")
    for name in ("num_experts", "top_k", "capacity_factor", "renormalize", "balance_choices", "expert_layers"):
        theirs = EncoderConfig(vocab_size=V, n_layer=2, n_head=2, n_embd=16, ffn_size=32, router="topk")
        assert getattr(inserted, name) == getattr(theirs, name)
    replaced = TranslatorConfig(**SIZE, router="topk")
    assert (replaced.renormalize, replaced.balance_choices) == (False, "first")


def test_moe_layers_are_named_by_their_place():
    assert make("threshold").moe_names == ["encoder block 2", "decoder block 2"]
    assert make("X-MoE").moe_names == ["after encoder block 1", "after encoder block 2", "after encoder block 2"]
    for row in ROWS:
        model = make(row)
        assert model.config.num_sparse == len(model.moe_layers) == len(model.moe_names)


# ---------------------------------------------------------------------------------------------------------------------
# decoding


@pytest.mark.parametrize("row", ROWS)
def test_cached_decoding_is_uncached_decoding(row):
    model = make(row, torch.float32)
    (source, real), target = padded(sources([5, 9, 2])), torch.tensor(sources([8, 8, 8], 1))
    with torch.no_grad(), model.test_routing(capacity_factor=math.inf):
        encoded, _ = model.encode(source, real)
        whole, _, _ = model.decode(target, encoded)
        past = None
        for t in range(target.shape[1]):
            h, _, past = model.decode(target[:, t : t + 1], encoded, past)
            torch.testing.assert_close(h[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)


def log_probs(model: Translator, source: list[int], written: list[int]) -> torch.Tensor:
    """Of the next token, from the whole model, nothing kept from before."""
    with torch.no_grad(), model.test_routing(capacity_factor=math.inf):
        logits, _ = model(torch.tensor([source]), torch.tensor([[BOS, *written]]))
    scores = logits[-1].log_softmax(dim=0)
    scores[list(NEVER)] = -math.inf
    return scores


def plain_beam_search(model: Translator, source: list[int], K: int, penalty: float) -> list[int]:
    """One sentence, lists, every prefix computed anew."""
    most, beams, ended = math.floor(1.2 * (len(source) - 1) + 1e-9) + 10, [(0.0, [])], []
    for t in range(most + 1):
        candidates = []
        for score, written in beams:
            for token, value in enumerate(log_probs(model, source, written).tolist()):
                if value > -math.inf and (t < most or token == EOS):
                    candidates.append((score + value, written, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        ended += [(s / (t + 1) ** penalty, written) for s, written, token in candidates[:K] if token == EOS]
        if len(ended) >= K or t == most:
            break
        beams = [(s, [*written, token]) for s, written, token in candidates[: 2 * K] if token != EOS][:K]
    return max(ended)[1]


OPTIONS = dict(bos=BOS, eos=EOS, never=NEVER)


def soon(model: Translator, eagerness: float = 2.0) -> Translator:
    """Makes </s> likely, so that translations end before the limit: the last norm points to it."""
    with torch.no_grad():
        model.ln_d.bias += eagerness * F.normalize(model.wte.weight[EOS], dim=0)
    return model


@pytest.mark.parametrize("row", ["dense", "threshold", "top-2", "X-MoE"])
@pytest.mark.parametrize("K, penalty", [(1, 1.0), (2, 0.0), (3, 1.0), (5, 0.6)])
def test_beam_search_is_the_plain_one(row, K, penalty):
    model, rows = soon(make(row), 1.5 if row == "X-MoE" else 2.0), sources([3, 6, 1, 4, 0])
    source, real = padded(rows)
    expected = [plain_beam_search(model, row, K, penalty) for row in rows]
    for cache in (True, False):
        found = model.translate(source, real, beam=K, length_penalty=penalty, cache=cache, **OPTIONS)
        assert found == expected
    assert len({len(ids) for ids in expected}) > 1  # they leave at different times


@pytest.mark.parametrize("row", ["dense", "threshold"])
def test_one_beam_is_greedy(row):
    model, rows = soon(make(row, seed=1)), sources([3, 6, 1, 4])
    found = model.translate(*padded(rows), beam=1, **OPTIONS)
    for source, ours in zip(rows, found):
        written = []
        for _ in range(6 * (len(source) - 1) // 5 + 10):
            token = int(log_probs(model, source, written).argmax())
            if token == EOS:
                break
            written.append(token)
        assert ours == written


def test_a_translation_has_at_most_1_2_n_and_10_tokens():
    model = soon(make("dense"), -50.0)
    rows = sources([0, 1, 5, 10, 23])
    found = model.translate(*padded(rows), beam=2, **OPTIONS)
    assert [len(ids) for ids in found] == [10, 11, 16, 22, 37]
    assert not {token for ids in found for token in ids} & {*NEVER, EOS}


@pytest.mark.parametrize("row", ROWS)
def test_padding_and_the_batch_do_not_change_a_translation_without_a_limit(row):
    model, rows = soon(make(row)), sources([3, 11, 1, 4, 7, 7])
    alone = [model.translate(torch.tensor([row]), beam=3, **OPTIONS)[0] for row in rows]
    assert model.translate(*padded(rows), beam=3, **OPTIONS) == alone
    assert model.translate(*padded(rows[::-1]), beam=3, **OPTIONS) == alone[::-1]
    assert not model.training


def test_the_limit_is_obeyed_when_it_is_asked_for():
    model, (source, real) = make("threshold", eval_capacity_factor=1.0, threshold=1.0), padded(sources([9, 9, 8, 9]))
    for limit, least, most in ((True, 0.5, 1.3), (False, 4, 4)):
        model.start_stats()
        model.translate(source, real, beam=5, limit=limit, **OPTIONS)
        assert all(least <= layer["served"] <= most for layer in model.stats())
    assert model.moe_layers[0].eval_capacity_factor == 1.0  # as before


def test_half_precision_finds_what_it_finds_without_a_cache():
    """Up to rounding: logits and scores are in fp32."""
    model, (source, real) = soon(make("threshold", torch.float32)), padded(sources([3, 6, 1, 4, 9, 12]))
    with torch.autocast("cpu", torch.bfloat16):
        one, two = (model.translate(source, real, beam=3, cache=cache, **OPTIONS) for cache in (True, False))
    assert sum(a == b for a, b in zip(one, two)) >= 4


def test_translating_leaves_the_mode_as_it_was():
    model = make("threshold").train()
    model.translate(*padded(sources([3, 4])), beam=2, **OPTIONS)
    assert model.training
