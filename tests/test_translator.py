"""The encoder-decoder against torch's own layers, its step-by-step decoding and its beam search against plain ones."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import Translator
from train_mt import Config, translate

V, BOS, PAD, EOS, NEVER = 40, 0, 1, 2, (0, 1, 3, 39)
TOKENIZER = SimpleNamespace(bos=BOS, eos=EOS, unwritten=NEVER)
SIZE = dict(block_size=32, n_layer=2, decoder_layers=2, n_head=2, n_embd=16, ffn_size=32, init_std=0.3, dropout=0.0)
ROWS = {
    "dense": dict(router="dense"),
    "switch": dict(router="switch", expert_ffns=4),
    "top-2": dict(router="topk", expert_ffns=2, split=2),
    "threshold": dict(router="threshold", expert_ffns=2, split=2),
    "hash": dict(router="hash", expert_ffns=4),
    "base": dict(router="base", expert_ffns=4),
    "encoder alone": dict(router="threshold", expert_ffns=2, split=2, decoder_moe=False),
    "X-MoE": dict(router="hypersphere", experts=4, expert_size=16, moe_after=(1, 2, 2)),
}
every_row = pytest.mark.parametrize("row", ROWS)


def make(row: str, dtype=torch.float64, **options) -> Translator:
    """Weights so large that a token makes a difference."""
    torch.manual_seed(0)
    model = Translator(Config(**SIZE | ROWS[row] | options), V).to(dtype).eval()
    for name, p in model.named_parameters():
        if name.endswith("w_out"):
            nn.init.normal_(p, std=0.3)
    return model


def soon(model: Translator, eagerness: float = 2.0) -> Translator:
    """Makes </s> likely, so that translations end before the limit: the last norm points to it."""
    with torch.no_grad():
        model.ln_d.bias += eagerness * F.normalize(model.wte.weight[EOS], dim=0)
    return model


def sources(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, V - 1, (n,), generator=rng).tolist(), EOS] for n in lengths]


def padded(rows: list[list[int]]) -> tuple:
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    if min(map(len, rows)) == width:
        return ids, None
    return ids, (ids.flatten() != PAD).nonzero().squeeze(1)


# --- The model


def torchs_layer(kind, block, config) -> nn.Module:
    """torch's own Transformer layer with the weights of a dense block."""
    own = dict(dropout=0.0, activation=partial(F.gelu, approximate="tanh"), batch_first=True, norm_first=True)
    layer = kind(config.n_embd, config.n_head, config.ffn_size, dtype=torch.float64, **own)
    attentions, norms = [(layer.self_attn, block.attn)], [block.ln_1, block.ln_2]
    if kind is nn.TransformerDecoderLayer:
        attentions.append((layer.multihead_attn, block.cross))
        norms.insert(1, block.ln_c)
    for theirs, ours in attentions:
        parts = [ours.qkv] if ours is block.attn else [ours.q, ours.kv]
        theirs.in_proj_weight.data = torch.cat([part.weight for part in parts])
        theirs.in_proj_bias.data = torch.cat([part.bias for part in parts])
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
    for number, norm in enumerate(norms, 1):
        getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(block.ffn.fc.state_dict())
    layer.linear2.load_state_dict(block.ffn.proj.state_dict())
    return layer.eval()


def literal_embedding(model: Translator, ids):
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
    (source, nonpad), (target, target_nonpad) = padded(sources([5, 9, 2])), padded(sources([7, 3, 4], 1))
    logits, balance = model(source, nonpad, target, target_nonpad)
    padding, x, y = source == PAD, literal_embedding(model, source), literal_embedding(model, target)
    for block in model.encoder:
        x = torchs_layer(nn.TransformerEncoderLayer, block, model.config)(x, src_key_padding_mask=padding)
    memory, causal = model.ln_e(x), torch.ones(8, 8, dtype=torch.bool).triu(1)
    for block in model.decoder:
        layer = torchs_layer(nn.TransformerDecoderLayer, block, model.config)
        y = layer(y, memory, tgt_mask=causal, memory_key_padding_mask=padding)
    expected = (model.ln_d(y) @ model.wte.weight.t()).flatten(0, 1)[target_nonpad]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # the sinusoids' angles are in fp32
    assert balance == 0


def test_scores_of_the_next_token_are_in_fp32_under_autocast():
    model, h = make("dense", torch.float32), torch.randn(3, 16)
    expected = model.log_probabilities(h)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.log_probabilities(h), expected)


@pytest.mark.parametrize("row", ["dense", "threshold"])
def test_dropout_follows_embeddings_attention_cross_attention_and_ffn(row):
    """Where all is dropped, embeddings are 0 and a block is the identity."""
    model, ids = make(row, dropout=1.0).train(), torch.tensor([[5, 6, 7]])
    assert (model.embed(ids) == 0).all()
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    for training in (True, False):
        for one, two in zip(model.train(training).encoder, model.decoder):
            source = two.cross.keys_values(x)
            assert torch.equal(one(x, ids)[0], x) == training
            assert torch.equal(two(x, ids, source=source)[0], x) == training


@every_row
def test_neither_padding_nor_the_batch_nor_later_tokens_change_a_logit_without_a_limit(row):
    model, pairs = make(row), list(zip(sources([5, 9, 2]), sources([7, 3, 4], 1)))
    with model.no_limit(), torch.no_grad():
        (source, nonpad), (target, target_nonpad) = (padded(list(side)) for side in zip(*pairs))
        together = model(source, nonpad, target, target_nonpad)[0].split([len(t) for _, t in pairs])
        for (one, two), ours in zip(pairs, together):
            alone, _ = model(torch.tensor([one]), None, torch.tensor([two]), None)
            torch.testing.assert_close(ours, alone)
        other = [(id + 5) % 30 + 4 for id in two[2:]]
        changed, _ = model(torch.tensor([one]), None, torch.tensor([[*two[:2], *other]]), None)
    torch.testing.assert_close(changed[:2], alone[:2])
    assert (changed[2:] - alone[2:]).abs().max() > 1e-3


@every_row
def test_every_weight_has_a_gradient_and_balance_losses_are_added(row):
    model, losses = make(row).train(), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(float(out[1].detach())))
    (source, nonpad), (target, target_nonpad) = padded(sources([5, 9, 20])), padded(sources([7, 3, 20], 1))
    logits, balance = model(source, nonpad, target, target_nonpad)
    (logits.square().mean() + balance).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0} == set()
    assert len(losses) == len(model.moe_layers) and float(balance.detach()) == pytest.approx(sum(losses))


PLACES = [  # what is said; where experts stand in the encoder, in the decoder, and behind blocks of the encoder
    (dict(router="dense"), [], [], []),
    (dict(router="threshold"), [2, 4, 6, 8, 10, 12], [2, 4, 6], []),
    (dict(router="threshold", decoder_moe=False), [2, 4, 6, 8, 10, 12], [], []),
    (dict(router="topk", moe_every=6), [6, 12], [6], []),
    (dict(router="hypersphere", moe_after=(6, 2)), [], [], [2, 6]),
]


@pytest.mark.parametrize("options, encoder, decoder, after", PLACES)
def test_experts_stand_where_the_papers_have_them(options, encoder, decoder, after):
    with torch.device("meta"):
        model = Translator(Config(**SIZE | dict(n_layer=12, decoder_layers=6, expert_size=16) | options), V)
    for blocks, expected in ((model.encoder, encoder), (model.decoder, decoder)):
        assert [i for i, block in enumerate(blocks, 1) if block.sparse] == expected
    names = [f"encoder block {i}" for i in encoder] + [f"after encoder block {i}" for i in after]
    assert model.moe_names == names + [f"decoder block {i}" for i in decoder]
    expected = [model.encoder[i - 1].ffn for i in encoder] + [*model.moes]
    expected += [model.decoder[i - 1].ffn for i in decoder]
    assert all(ours is theirs for ours, theirs in zip(model.moe_layers, expected, strict=True))


# --- Decoding


@every_row
def test_decoding_token_by_token_is_decoding_at_once(row):
    model, (source, nonpad), target = make(row), padded(sources([5, 9, 2])), torch.tensor(sources([5, 5, 5], 1))
    with torch.no_grad(), model.no_limit():
        encoded, _ = model.encode(source, nonpad)
        whole, _, _ = model.decode(target, encoded)
        past = None
        for t in range(target.shape[1]):
            h, _, past = model.decode(target[:, t : t + 1], encoded, past)
            torch.testing.assert_close(h[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)


def log_probs(model: Translator, source: list[int], written: list[int]):
    """Of the next token, from the whole model, nothing kept from before."""
    with torch.no_grad(), model.no_limit():
        logits, _ = model(torch.tensor([source]), None, torch.tensor([[BOS, *written]]), None)
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


BEAMS = [("dense", 1, 1.0), ("dense", 2, 0.0), ("dense", 5, 0.6), ("threshold", 3, 1.0), ("X-MoE", 2, 0.0)]


@pytest.mark.parametrize("row, K, penalty", BEAMS)
def test_beam_search_is_the_plain_one(row, K, penalty):
    """Of sentences together, with keys and values kept."""
    model, rows = soon(make(row), 1.5 if row == "X-MoE" else 2.0), sources([3, 6, 1, 4, 0, 2, 5, 3, 6, 4, 7, 5])
    expected = [plain_beam_search(model, row, K, penalty) for row in rows]
    assert translate(model, *padded(rows), TOKENIZER, beam=K, length_penalty=penalty) == expected
    assert len({len(ids) for ids in expected}) > 1  # they leave at different times


def test_a_translation_has_at_most_1_2_n_and_10_tokens():
    model, rows = soon(make("dense"), -50.0), sources([0, 1, 5, 10, 23])
    found = translate(model, *padded(rows), TOKENIZER, beam=2)
    assert [len(ids) for ids in found] == [10, 11, 16, 22, 37]
    assert not set(sum(found, [])) & {*NEVER, EOS}


@pytest.mark.parametrize("limit", [True, False])
def test_the_limit_is_obeyed_when_it_is_asked_for(limit):
    model, kept = make("threshold", eval_capacity=0.5, threshold=1.0), []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept_here: kept.append(kept_here))
    translate(model, *padded(sources([9, 9, 8, 9])), TOKENIZER, limit=limit)
    assert len(kept) > 10
    for here in kept:
        capacity = max(4, math.ceil(len(here) / 4)) if limit else len(here)
        assert (here.sum(dim=0) == capacity).all()
    assert model.moe_layers[0].eval_capacity_factor == 1.0  # as before


@pytest.mark.parametrize("training", [True, False])
def test_translating_leaves_the_mode_as_it_was_and_drops_nothing_out(training):
    model = soon(make("threshold", dropout=0.5)).train(training)
    one, two = (translate(model, *padded(sources([3, 4])), TOKENIZER, beam=2) for _ in range(2))
    assert one == two
    assert all(module.training == training for module in model.modules())
