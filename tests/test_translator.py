"""The encoder-decoder against torch's own layers, incremental decoding and beam search against plain ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import ModelConfig
from translator import Translator

V, BOS, PAD, EOS, NEVER = 40, 0, 1, 2, (0, 1, 3, 39)
OPTIONS = dict(bos=BOS, eos=EOS, never=NEVER)
SIZE = dict(vocab_size=V, block_size=32, n_layer=2, decoder_layers=2, n_head=2, n_embd=16, ffn_size=32, init_std=0.3)
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
    "X-MoE": dict(router="hypersphere", moe_after=(1, 2, 2), **SPARSE),
}
every_row = pytest.mark.parametrize("row", ROWS)


def make(row: str, dtype=torch.float64, seed: int = 0, **options) -> Translator:
    """Weights large enough for a token to make a difference."""
    torch.manual_seed(seed)
    model = Translator(ModelConfig(**SIZE | ROWS[row] | options)).to(dtype).eval()
    for moe in model.moe_layers:
        for layer in moe.layers:
            nn.init.normal_(layer.w_out, std=0.3)
    return model


def soon(model: Translator, eagerness: float = 2.0) -> Translator:
    """Makes </s> likely, so that translations end before the limit: the last norm points to it."""
    with torch.no_grad():
        model.ln_d.bias += eagerness * F.normalize(model.wte.weight[EOS], dim=0)
    return model


def sources(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, V - 1, (n,), generator=rng).tolist(), EOS] for n in lengths]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    if min(map(len, rows)) == width:
        return ids, None
    return ids, (ids.flatten() != PAD).nonzero().squeeze(1)


# --- The model


def torchs_layer(kind, block, config) -> nn.Module:
    """torch's own Transformer layer with the weights of a dense block."""
    layer = kind(
        config.n_embd,
        config.n_head,
        config.ffn_size,
        dropout=0.0,
        activation=lambda x: F.gelu(x, approximate="tanh"),
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    attentions, norms = [(layer.self_attn, block.attn)], [block.ln_1, block.ln_2]
    if kind is nn.TransformerDecoderLayer:
        attentions.append((layer.multihead_attn, block.cross))
        norms.insert(1, block.ln_c)
    for theirs, ours in attentions:
        theirs.in_proj_weight.data = torch.cat([ours.q.weight, ours.kv.weight])
        theirs.in_proj_bias.data = torch.cat([ours.q.bias, ours.kv.bias])
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
    for number, norm in enumerate(norms, 1):
        getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(block.ffn.fc.state_dict())
    layer.linear2.load_state_dict(block.ffn.proj.state_dict())
    return layer.eval()


def literal_embedding(model: Translator, ids: torch.Tensor) -> torch.Tensor:
    """Sinusoids as Vaswani et al. write them, and embeddings times sqrt(D)."""
    D = model.config.n_embd
    x = torch.zeros(*ids.shape, D, dtype=torch.float64)
    for place in range(ids.shape[1]):
        for i in range(D // 2):
            angle = place / 10_000 ** (2 * i / D)
            x[:, place, i], x[:, place, D // 2 + i] = math.sin(angle), math.cos(angle)
    return x + math.sqrt(D) * model.wte.weight[ids]


def test_the_dense_model_is_torchs_transformer():
    model = make("dense")
    (source, real), (target, target_real) = padded(sources([5, 9, 2])), padded(sources([7, 3, 4], 1))
    logits, balance = model(source, target, real, target_real)
    padding, x, y = source == PAD, literal_embedding(model, source), literal_embedding(model, target)
    for block in model.encoder:
        x = torchs_layer(nn.TransformerEncoderLayer, block, model.config)(x, src_key_padding_mask=padding)
    memory, causal = model.ln_e(x), torch.ones(8, 8, dtype=torch.bool).triu(1)
    for block in model.decoder:
        layer = torchs_layer(nn.TransformerDecoderLayer, block, model.config)
        y = layer(y, memory, tgt_mask=causal, memory_key_padding_mask=padding)
    expected = (model.ln_d(y) @ model.wte.weight.t()).flatten(0, 1)[target_real]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # the sinusoids' angles are in fp32
    assert balance == 0


@pytest.mark.parametrize("row", ["dense", "threshold"])
def test_dropout_follows_embeddings_attention_cross_attention_and_ffn(row):
    """Where all is dropped, embeddings are 0 and a block is the identity."""
    model, ids = make(row, dropout=1.0).train(), torch.tensor([[5, 6, 7]])
    assert (model.embed(ids) == 0).all()
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    for one, two in zip(model.encoder, model.decoder):
        source = two.cross.keys_values(x)
        for training in (True, False):
            for block in (one, two):
                block.train(training)
            assert torch.equal(one.encode(x, ids, None, None)[0], x) == training
            assert torch.equal(two.decode(x, ids, None, source, None, None)[0], x) == training


@every_row
def test_padding_and_the_batch_do_not_change_a_logit_without_a_limit(row):
    model, pairs = make(row), list(zip(sources([5, 9, 2, 9]), sources([7, 3, 4, 1], 1)))
    with model.no_limit():
        (source, real), (target, target_real) = (padded(list(side)) for side in zip(*pairs))
        together = model(source, target, real, target_real)[0].split([len(t) for _, t in pairs])
        for (one, two), ours in zip(pairs, together):
            alone, _ = model(torch.tensor([one]), torch.tensor([two]))
            torch.testing.assert_close(ours, alone)


@every_row
def test_no_logit_depends_on_a_later_token_without_a_limit(row):
    model, (source, target) = make(row), (torch.tensor(sources([6, 6], seed)) for seed in (0, 1))
    other = target.clone()
    other[:, 4:] = (other[:, 4:] + 5) % 30 + 4
    with model.no_limit():
        one, two = (model(source, ids)[0].view(2, 7, V) for ids in (target, other))
    torch.testing.assert_close(one[:, :4], two[:, :4])
    assert (one[:, 4:] - two[:, 4:]).abs().max() > 1e-3


@every_row
def test_every_weight_has_a_gradient(row):
    model = make(row).train()
    (source, real), (target, target_real) = padded(sources([5, 9, 20])), padded(sources([7, 3, 20], 1))
    logits, balance = model(source, target, real, target_real)
    (logits.square().mean() + balance).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0} == set()


@pytest.mark.parametrize("row", ["threshold", "X-MoE"])
def test_balance_losses_of_all_sparse_layers_are_added(row):
    model, (source, target) = make(row), (torch.tensor(sources([6, 6], seed)) for seed in (0, 1))
    losses = []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(out[1].item()))
    _, balance = model(source, target)
    assert len(losses) == len(model.moe_layers)
    assert balance.item() == pytest.approx(sum(losses)) and min(losses) > 0


PAPER = dict(vocab_size=32_002, n_layer=12, decoder_layers=6, n_embd=512, ffn_size=2048, n_head=8, expert_ffns=32)
FFN = 2 * 512 * 2048 + 2048 + 512
ATTENTION = 4 * (512**2 + 512)
BLOCKS = 12 * (ATTENTION + FFN + 4 * 512) + 6 * (2 * ATTENTION + FFN + 6 * 512)
DENSE = 32_002 * 512 + BLOCKS + 4 * 512


@pytest.mark.parametrize(
    "options, sparse, parameters",
    [
        (dict(router="dense"), ([], []), DENSE),
        (dict(router="threshold", expert_size=512), ([2, 4, 6, 8, 10, 12], [2, 4, 6]), None),
        (dict(router="threshold", expert_size=512, decoder_moe=False), ([2, 4, 6, 8, 10, 12], []), None),
        (dict(router="hypersphere", moe_after=(6,)), ([], []), DENSE + 32 * 3 * (FFN + 2 * 512) + 16 * (512 + 32) + 1),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_experts_stand_where_the_papers_have_them(options, sparse, parameters):
    with torch.device("meta"):
        model = Translator(ModelConfig(**PAPER, **options))
    found = [[i for i, block in enumerate(blocks, 1) if block.sparse] for blocks in (model.encoder, model.decoder)]
    assert found == list(sparse)
    experts = 128 * (2 * 512 * 512 + 512 + 512) + 128 * 512
    expected = parameters or DENSE + sum(map(len, sparse)) * (experts - FFN)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_the_inserted_layer_is_the_encoders():
    """Gate and balance loss over the K chosen, as X-MoE has it; in place of an FFN they are XMoE's."""
    inserted = make("X-MoE", router="topk", num_experts=None, expert_size=None, top_k=None).moe_layers[0]
    assert (inserted.router.renormalize, inserted.router.balance_choices) == (True, "all")
    assert (inserted.capacity_factor, len(inserted.ln_stack), inserted.router.num_experts) == (math.inf, 3, 32)
    replaced = make("top-2").moe_layers[0]
    assert (replaced.router.renormalize, replaced.router.balance_choices) == (False, "first")
    assert (replaced.capacity_factor, len(replaced.ln_stack)) == (2.0, 0)


def test_moe_layers_are_named_by_their_place():
    assert make("threshold").moe_names == ["encoder block 2", "decoder block 2"]
    assert make("encoder alone").moe_names == ["encoder block 2"]
    after = ["after encoder block 1", "after encoder block 2", "after encoder block 2"]
    assert make("X-MoE").moe_names == after
    for row in ROWS:
        model = make(row)
        places = {id(moe): name for moe, name in zip(model.moe_layers, model.moe_names, strict=True)}
        assert all(places[id(b.ffn)] == f"encoder block {i}" for i, b in enumerate(model.encoder, 1) if b.sparse)
        assert all(places[id(b.ffn)] == f"decoder block {i}" for i, b in enumerate(model.decoder, 1) if b.sparse)
        assert [places[id(moe)] for moe in model.moes] == (after if row == "X-MoE" else [])


def test_what_cannot_be_is_one_line():
    with pytest.raises(ValueError, match="expert_choice sees later tokens, so it cannot translate: add --decoder_moe"):
        Translator(ModelConfig(**SIZE, router="expert_choice"))
    Translator(ModelConfig(**SIZE, router="expert_choice", decoder_moe=False))
    Translator(ModelConfig(**SIZE, router="expert_choice", moe_after=(1,)))
    model = make("dense")
    encoded, _ = model.encode(torch.tensor([[4, EOS]]))
    _, _, past = model.decode(torch.tensor([[BOS]]), encoded)
    with pytest.raises(ValueError, match="one token at a time, not 2"):
        model.decode(torch.tensor([[5, 6]]), encoded, past)


# --- Decoding


@every_row
def test_cached_decoding_is_uncached_decoding(row):
    model = make(row, torch.float32)
    (source, real), target = padded(sources([5, 9, 2])), torch.tensor(sources([8, 8, 8], 1))
    with torch.no_grad(), model.no_limit():
        encoded, _ = model.encode(source, real)
        whole, _, _ = model.decode(target, encoded)
        past = None
        for t in range(target.shape[1]):
            h, _, past = model.decode(target[:, t : t + 1], encoded, past)
            torch.testing.assert_close(h[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)


def log_probs(model: Translator, source: list[int], written: list[int]) -> torch.Tensor:
    """Of the next token, from the whole model, nothing kept from before."""
    with torch.no_grad(), model.no_limit():
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


@pytest.mark.parametrize(
    "row, K, penalty",
    [
        ("dense", 1, 1.0),
        ("dense", 2, 0.0),
        ("dense", 5, 0.6),
        ("threshold", 3, 1.0),
        ("threshold", 5, 0.6),
        ("X-MoE", 2, 0.0),
    ],
)
def test_beam_search_is_the_plain_one(row, K, penalty):
    model, rows = soon(make(row), 1.5 if row == "X-MoE" else 2.0), sources([3, 6, 1, 4, 0])
    source, real = padded(rows)
    expected = [plain_beam_search(model, row, K, penalty) for row in rows]
    for cache in (True, False):
        found = model.translate(source, real, beam=K, length_penalty=penalty, cache=cache, **OPTIONS)
        assert found == expected
    assert len({len(ids) for ids in expected}) > 1  # they leave at different times


def test_a_translation_has_at_most_1_2_n_and_10_tokens():
    model = soon(make("dense"), -50.0)
    rows = sources([0, 1, 5, 10, 23])
    found = model.translate(*padded(rows), beam=2, **OPTIONS)
    assert [len(ids) for ids in found] == [10, 11, 16, 22, 37]
    assert not {token for ids in found for token in ids} & {*NEVER, EOS}


@every_row
def test_padding_and_the_batch_do_not_change_a_translation_without_a_limit(row):
    model, rows = soon(make(row)), sources([3, 11, 1, 4, 7, 7])
    alone = [model.translate(torch.tensor([row]), beam=3, **OPTIONS)[0] for row in rows]
    assert model.translate(*padded(rows), beam=3, **OPTIONS) == alone
    assert model.translate(*padded(rows[::-1]), beam=3, **OPTIONS) == alone[::-1]


@pytest.mark.parametrize("limit", [True, False])
def test_the_limit_is_obeyed_when_it_is_asked_for(limit):
    model = make("threshold", eval_capacity_factor=1.0, threshold=1.0)
    kept = []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept_here: kept.append(kept_here))
    model.translate(*padded(sources([9, 9, 8, 9])), beam=5, limit=limit, **OPTIONS)
    assert len(kept) > 10
    for here in kept:
        capacity = max(4, math.ceil(len(here) / 4)) if limit else len(here)
        assert (here.sum(dim=0) == capacity).all()
    assert model.moe_layers[0].eval_capacity_factor == 1.0  # as before


def test_expert_choice_in_the_encoder_keeps_its_limit():
    """There the limit is what chooses; without it every expert would serve every token."""
    model, served = make("encoder alone", router="expert_choice", capacity_factor=1.0), []
    model.moe_layers[0].watchers.append(lambda moe, h, routing, kept: served.append(int(kept.sum())))
    model.translate(torch.tensor(sources([15, 15])), beam=2, **OPTIONS)
    assert served == [32]


def test_half_precision_finds_what_it_finds_without_a_cache():
    """Up to rounding: logits and scores are in fp32."""
    model, (source, real) = soon(make("threshold", torch.float32)), padded(sources([3, 6, 1, 4, 9, 12]))
    with torch.autocast("cpu", torch.bfloat16):
        one, two = (model.translate(source, real, beam=3, cache=cache, **OPTIONS) for cache in (True, False))
    assert sum(a == b for a, b in zip(one, two)) >= 4


@pytest.mark.parametrize("training", [True, False])
def test_translating_leaves_the_mode_as_it_was_and_drops_nothing_out(training):
    model = soon(make("threshold", dropout=0.5)).train(training)
    one, two = (model.translate(*padded(sources([3, 4])), beam=2, **OPTIONS) for _ in range(2))
    assert one == two
    assert all(module.training == training for module in model.modules())
