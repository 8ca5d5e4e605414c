"""The encoder-decoder, compared with torch's Transformer, and its beam search, compared with a slow one."""

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
    "encoder only": dict(router="threshold", expert_ffns=2, split=2, decoder_moe=False),
    "X-MoE": dict(router="hypersphere", experts=4, expert_size=16, moe_after=(1, 2, 2)),
}
every_row = pytest.mark.parametrize("row", ROWS)


def make(row: str, dtype=torch.float64, **options) -> Translator:
    """A model with weights so large that every token affects the logits."""
    torch.manual_seed(0)
    model = Translator(Config(**SIZE | ROWS[row] | options), V).to(dtype).eval()
    for name, p in model.named_parameters():
        if name.endswith("w_out"):
            nn.init.normal_(p, std=0.3)
    return model


def prefer_eos(model: Translator, strength: float = 2.0) -> Translator:
    """Makes </s> likely, so that translations end before their length limit."""
    with torch.no_grad():
        model.ln_d.bias += strength * F.normalize(model.wte.weight[EOS], dim=0)
    return model


def sources(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, V - 1, (n,), generator=rng).tolist(), EOS] for n in lengths]


def padded(rows: list[list[int]]) -> tuple:
    """ids (B, T), and the flat indices of non-padding tokens or None."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    if min(map(len, rows)) == width:
        return ids, None
    return ids, (ids.flatten() != PAD).nonzero().squeeze(1)


# --- The model


def torchs_layer(kind, block, config) -> nn.Module:
    """torch's Transformer layer with the weights of a dense block."""
    options = dict(dropout=0.0, activation=partial(F.gelu, approximate="tanh"), batch_first=True, norm_first=True)
    layer = kind(config.n_embd, config.n_head, config.ffn_size, dtype=torch.float64, **options)
    attentions, norms = [(layer.self_attn, block.attn)], [block.ln_1, block.ln_2]
    if kind is nn.TransformerDecoderLayer:
        attentions.append((layer.multihead_attn, block.cross))
        norms.insert(1, block.ln_c)
    for torchs, attention in attentions:
        parts = [attention.qkv] if attention is block.attn else [attention.q, attention.kv]
        torchs.in_proj_weight.data = torch.cat([part.weight for part in parts])
        torchs.in_proj_bias.data = torch.cat([part.bias for part in parts])
        torchs.out_proj.load_state_dict(attention.proj.state_dict())
    for number, norm in enumerate(norms, 1):
        getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(block.ffn.fc.state_dict())
    layer.linear2.load_state_dict(block.ffn.proj.state_dict())
    return layer.eval()


def literal_embedding(model: Translator, ids):
    """Vaswani et al.'s sinusoids plus embeddings times sqrt(D)."""
    D = model.config.n_embd
    x = torch.zeros(*ids.shape, D, dtype=torch.float64)
    for position in range(ids.shape[1]):
        for i in range(D // 2):
            angle = position / 10_000 ** (2 * i / D)
            x[:, position, i] = math.sin(angle)
            x[:, position, D // 2 + i] = math.cos(angle)
    return x + math.sqrt(D) * model.wte.weight[ids]


def test_the_dense_model_equals_torchs_transformer():
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
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # angles of sinusoids are fp32
    assert balance == 0


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_smoothed_in_training_only(training):
    model, labels = make("switch", label_smoothing=0.1).train(training), torch.arange(17)
    batch = *padded(sources([5, 9, 2])), *padded(sources([7, 3, 4], 1))
    logits, balance = model(*batch)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1 if training else 0.0)
    torch.testing.assert_close(model(*batch, labels), (expected, balance))


def test_beam_scores_are_in_fp32_under_autocast():
    model, h = make("dense", torch.float32), torch.randn(3, 16)
    expected = model.log_probabilities(h)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.log_probabilities(h), expected)


@pytest.mark.parametrize("row", ["dense", "threshold"])
def test_dropout_follows_embeddings_attention_cross_attention_and_ffn(row):
    """At a rate of 1, embeddings are 0 and a block is the identity."""
    model, ids = make(row, dropout=1.0).train(), torch.tensor([[5, 6, 7]])
    assert (model.embed(ids) == 0).all()
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    for training in (True, False):
        for encoder_block, decoder_block in zip(model.train(training).encoder, model.decoder):
            source = decoder_block.cross.keys_values(x)
            assert torch.equal(encoder_block(x, ids)[0], x) == training
            assert torch.equal(decoder_block(x, ids, source=source)[0], x) == training


def test_attention_weights_have_no_dropout():
    model, x, ids = make("dense", dropout=0.5), torch.randn(1, 3, 16, dtype=torch.float64), torch.tensor([[5, 6, 7]])
    for block in (*model.encoder, *model.decoder):
        source = block.cross.keys_values(x) if block.cross else None
        block.dropout.p = 0.0
        trained, evaluated = (block.train(training)(x, ids, source=source)[0] for training in (True, False))
        assert torch.equal(trained, evaluated)


@every_row
@torch.no_grad()
def test_without_a_limit_neither_padding_nor_other_sentences_change_a_logit(row):
    model, all_sources, all_targets = make(row), sources([5, 9, 2]), sources([7, 3, 4], 1)
    (source, nonpad), (target, target_nonpad) = padded(all_sources), padded(all_targets)
    with model.no_limit():
        logits, _ = model(source, nonpad, target, target_nonpad)
        for i, batched in enumerate(logits.split([len(target) for target in all_targets])):
            single, _ = model(torch.tensor([all_sources[i]]), None, torch.tensor([all_targets[i]]), None)
            torch.testing.assert_close(batched, single)


@every_row
@torch.no_grad()
def test_without_a_limit_no_logit_depends_on_a_later_token(row):
    model, source, target = make(row), torch.tensor(sources([2])), torch.tensor(sources([4], 1))
    changed_target = target.clone()
    changed_target[:, 2:] = (target[:, 2:] + 5) % 30 + 4
    with model.no_limit():
        before, after = (model(source, None, ids, None)[0] for ids in (target, changed_target))
    torch.testing.assert_close(before[:2], after[:2])
    assert (before[2:] - after[2:]).abs().max() > 1e-3


@every_row
def test_every_weight_has_a_gradient_and_balance_losses_are_summed(row):
    model, losses = make(row).train(), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(float(out[1].detach())))
    (source, nonpad), (target, target_nonpad) = padded(sources([5, 9, 20])), padded(sources([7, 3, 20], 1))
    logits, balance = model(source, nonpad, target, target_nonpad)
    (logits.square().mean() + balance).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not without
    assert len(losses) == len(model.moe_layers)
    assert float(balance.detach()) == pytest.approx(sum(losses))


PLACES = [  # constants; sparse encoder blocks, sparse decoder blocks, encoder blocks that a sparse layer follows
    (dict(router="dense"), [], [], []),
    (dict(router="threshold"), [2, 4, 6, 8, 10, 12], [2, 4, 6], []),
    (dict(router="threshold", decoder_moe=False), [2, 4, 6, 8, 10, 12], [], []),
    (dict(router="topk", moe_every=6), [6, 12], [6], []),
    (dict(router="hypersphere", moe_after=(6, 2)), [], [], [2, 6]),
]


@pytest.mark.parametrize("options, encoder, decoder, after", PLACES)
def test_sparse_layers_are_where_the_papers_have_them(options, encoder, decoder, after):
    with torch.device("meta"):
        model = Translator(Config(**SIZE | dict(n_layer=12, decoder_layers=6, expert_size=16) | options), V)
    for blocks, expected in ((model.encoder, encoder), (model.decoder, decoder)):
        assert [i for i, block in enumerate(blocks, 1) if block.sparse] == expected
    names = [f"encoder block {i}" for i in encoder] + [f"after encoder block {i}" for i in after]
    assert model.moe_names == names + [f"decoder block {i}" for i in decoder]
    moes = [model.encoder[i - 1].ffn for i in encoder] + [*model.moes] + [model.decoder[i - 1].ffn for i in decoder]
    assert list(map(id, model.moe_layers)) == list(map(id, moes))


# --- Decoding


@every_row
def test_decoding_token_by_token_equals_decoding_all_at_once(row):
    model, (source, nonpad), target = make(row), padded(sources([5, 9, 2])), torch.tensor(sources([5, 5, 5], 1))
    with torch.no_grad(), model.no_limit():
        encoded, _ = model.encode(source, nonpad)
        expected, _, _ = model.decode(target, encoded)
        past = None
        for t in range(target.shape[1]):
            h, _, past = model.decode(target[:, t : t + 1], encoded, past)
            torch.testing.assert_close(h[:, 0], expected[:, t], atol=1e-5, rtol=1e-5)


def log_probs(model: Translator, source: list[int], prefix: list[int]):
    """Log probabilities of the next token, from a full forward pass."""
    with torch.no_grad(), model.no_limit():
        logits, _ = model(torch.tensor([source]), None, torch.tensor([[BOS, *prefix]]), None)
    scores = logits[-1].log_softmax(dim=0)
    scores[list(NEVER)] = -math.inf
    return scores


def slow_beam_search(model: Translator, source: list[int], K: int, penalty: float) -> list[int]:
    """Translates one sentence with lists of beams, computing every prefix from scratch."""
    limit, beams, ended = math.floor(1.2 * (len(source) - 1) + 1e-9) + 10, [(0.0, [])], []
    for t in range(limit + 1):
        candidates = []
        for score, prefix in beams:
            for token, value in enumerate(log_probs(model, source, prefix).tolist()):
                if value > -math.inf and (t < limit or token == EOS):
                    candidates.append((score + value, prefix, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        ended += [(s / (t + 1) ** penalty, prefix) for s, prefix, token in candidates[:K] if token == EOS]
        if len(ended) >= K or t == limit:
            break
        beams = [(s, [*prefix, token]) for s, prefix, token in candidates[: 2 * K] if token != EOS][:K]
    return max(ended)[1]


BEAMS = [("dense", 1, 1.0), ("dense", 2, 0.0), ("dense", 5, 0.6), ("threshold", 3, 1.0), ("X-MoE", 2, 0.0)]


@pytest.mark.parametrize("row, K, penalty", BEAMS)
def test_batched_beam_search_with_a_cache_equals_the_slow_one(row, K, penalty):
    model, rows = prefer_eos(make(row), 1.5 if row == "X-MoE" else 2.0), sources([3, 6, 1, 4, 0, 2, 5, 3, 6, 4, 7, 5])
    expected = [slow_beam_search(model, row, K, penalty) for row in rows]
    assert translate(model, *padded(rows), TOKENIZER, beam=K, length_penalty=penalty) == expected
    assert len({len(ids) for ids in expected}) > 1  # sentences finish at different steps


def test_a_translation_has_at_most_1_2_n_plus_10_tokens():
    model, rows = prefer_eos(make("dense"), -50.0), sources([0, 1, 5, 10, 23])
    translations = translate(model, *padded(rows), TOKENIZER, beam=2)
    assert [len(ids) for ids in translations] == [10, 11, 16, 22, 37]
    assert not set(sum(translations, [])) & {*NEVER, EOS}


@pytest.mark.parametrize("limit", [True, False])
def test_translating_applies_the_capacity_limit_on_request(limit):
    model, masks = make("threshold", eval_capacity=0.5, threshold=1.0), []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: masks.append(kept))
    translate(model, *padded(sources([9, 9, 8, 9])), TOKENIZER, limit=limit)
    assert len(masks) > 10
    for kept in masks:
        capacity = max(4, math.ceil(len(kept) / 4)) if limit else len(kept)
        assert (kept.sum(dim=0) == capacity).all()
    assert model.moe_layers[0].eval_capacity_factor == 1.0  # restored


@pytest.mark.parametrize("training", [True, False])
def test_translating_uses_no_dropout_and_restores_the_mode(training):
    model = prefer_eos(make("threshold", dropout=0.5)).train(training)
    first, second = (translate(model, *padded(sources([3, 4])), TOKENIZER, beam=2) for _ in range(2))
    assert first == second
    assert all(module.training == training for module in model.modules())
