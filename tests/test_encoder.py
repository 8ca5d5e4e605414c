"""The encoder: where X-MoE's sparse layers stand, padding, and XLM-E's position bias."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import constants, lively

from model import PAD, Encoder, EncoderLayer, MaskedLM, RelativePositionBias, SelfAttention

V = 23
SMALL = dict(block_size=12, n_layer=3, init_std=0.02, moe_after=(2,), router="hypersphere", expert_layers=3)
ROWS = {  # XLM-E's encoder, and every row of X-MoE's tables 2, 3, 5 and 7
    "dense": {"router": "dense"},
    "gated bias": {"router": "dense", "relative_bias": True},
    "SMoE": {"router": "switch"},
    "SMoE sigmoid": {"router": "switch", "gate": "sigmoid"},
    "X-MoE": {},
    "X-MoE sigmoid": {"gate": "sigmoid"},
    "X-MoE top-2": {"top_k": 2},
    "no reduction": {"routing_dim": 0},
    "no norm": {"router": "switch", "routing_dim": 2},
}


def small(**changes) -> SimpleNamespace:
    return constants(**SMALL | changes)


def make(kind, row="X-MoE", **options):
    return lively(kind(small(**ROWS[row] | options), V)).eval()


def make_batch(lengths, seed=0):
    """ids (B, T) padded to the longest, and the places of the real ones"""
    rng, T = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(4, V, (len(lengths), T), generator=rng)
    ids = ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], PAD)
    return ids, (ids != PAD).flatten().nonzero().squeeze(1)


# --- The encoder


@pytest.mark.parametrize("row", ROWS)
def test_padding_and_its_content_change_nothing(row):
    """Neither states nor logits, gradients and balance; `nonpad` tells what is padding, not the id."""
    masked_lm = make(MaskedLM, row)
    ids, nonpad = make_batch([12, 5, 8])
    together, _ = masked_lm.encoder(ids, nonpad)
    torch.testing.assert_close(masked_lm.encoder(ids[:1])[0][0], together[0])
    results = []
    for width, padding in ((8, PAD), (12, 9)):
        own = ids[1:, :width]
        places = (own != PAD).flatten().nonzero().squeeze(1)
        own = own.masked_fill(own == PAD, padding)
        states, _ = masked_lm.encoder(own, places)
        torch.testing.assert_close(states.flatten(0, 1)[places], torch.cat([together[1, :5], together[2, :8]]))
        logits, balance = masked_lm(own, places[::2], nonpad=places)
        loss = logits.logsumexp(dim=1).sum() + balance
        gradients = torch.autograd.grad(loss, list(masked_lm.parameters()), allow_unused=True, materialize_grads=True)
        results.append((logits, balance, *gradients))
    torch.testing.assert_close(results[0], results[1])


def test_an_inserted_stack_changes_nothing_at_first():
    sparse, dense = (MaskedLM(small(moe_after=(1, 3, 3), router=router), V).eval() for router in ("switch", "dense"))
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "moes" not in k})
    assert len(sparse.moe_layers) == 3 and not dense.moe_layers
    ids, nonpad = make_batch([12, 5])
    assert torch.equal(sparse(ids, nonpad, nonpad=nonpad)[0], dense(ids, nonpad, nonpad=nonpad)[0])


def test_sparse_layers_stand_where_they_are_told_to():
    encoder, ids = make(Encoder, moe_after=(3, 1, 1)), make_batch([6])[0]
    seen, states = [], []
    for kind, modules in {"moe": encoder.moes, "layer": encoder.layers}.items():
        for module in modules:
            module.register_forward_hook(lambda _, inputs, out, kind=kind: seen.append((kind, inputs[0], out)))
    h, balance = encoder(ids, None, states)
    assert [kind for kind, *_ in seen] == ["layer", "moe", "moe", "layer", "layer", "moe"]
    losses = [out[1] for kind, _, out in seen if kind == "moe"]
    for (kind, before, out), (_, after, _) in zip(seen, seen[1:]):
        assert torch.equal(after, before + out[0] if kind == "moe" else out)  # X-MoE eq. 2: h + g f(h)
    assert torch.equal(states[1], seen[3][1]) and torch.equal(states[3], h) and len(states) == 4
    torch.testing.assert_close(balance, sum(losses))


def test_dropout_follows_embeddings_attention_and_ffn():
    """Where all is dropped, embeddings are 0 and of a layer only its norms are left."""
    config = small(dropout=1.0, moe_after=(3,))
    layer, x = lively(EncoderLayer(config)), torch.randn(2, 5, 8).double()
    assert layer.attn.dropout == 1.0
    layer.attn.dropout = 0.0  # that of attention weights
    assert torch.equal(layer.train()(x, None, None), layer.ln_2(layer.ln_1(x)))
    assert not torch.equal(layer.eval()(x, None, None), layer.ln_2(layer.ln_1(x)))
    states = []
    lively(Encoder(config, V)).train()(make_batch([6])[0], None, states)
    assert (states[0] == 0).all()
    assert lively(Encoder(config, V)).moe_layers[0].train()(x, torch.zeros(2, 5).long())[0].any()  # no dropout there


# --- Gated relative position bias (XLM-E 3.3)


def literal_attention(q, k, v, u, gate_v, w, table, buckets, keep):
    """Eqs. 6 to 8 element by element; q, k, v (B, H, T, d_k), table (32, H), buckets {j - i: bucket}, keep (B, T)"""
    B, H, T, d = q.shape
    out = torch.zeros(B, H, T, d, dtype=q.dtype)
    for b in range(B):
        for head in range(H):
            for i in range(T):
                update, reset = torch.sigmoid(q[b, head, i] @ u), torch.sigmoid(q[b, head, i] @ gate_v)
                scores = []
                for j in range(T):
                    d_ij = table[buckets[j - i], head]
                    r = d_ij + update * d_ij + (1 - update) * w[head] * reset * d_ij
                    scores.append(q[b, head, i] @ k[b, head, j] / math.sqrt(d) + r)
                weights = torch.stack(scores)[keep[b]].softmax(dim=0)
                out[b, head, i] = weights @ v[b, head][keep[b]]
    return out


@pytest.mark.parametrize("padding", [False, True])
def test_gated_bias_is_its_formula(padding):
    attention = lively(SelfAttention(small(), causal=False, dropout=0.0, biased=True)).eval()
    rel_bias, T = lively(RelativePositionBias(2)), 6
    h = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[1, 4:] = not padding
    y, _ = attention(h, keep[:, None, None] if padding else None, rel_bias(T))
    q, k, v = (x.view(2, T, 2, 4).transpose(1, 2) for x in attention.qkv(h).split(8, dim=2))
    buckets = {ahead: int(rel_bias.bucket(torch.tensor(ahead))) for ahead in range(-T, T + 1)}
    heads = literal_attention(q, k, v, *attention.gate, attention.gate_w, rel_bias.table.weight, buckets, keep)
    expected = attention.proj(heads.transpose(1, 2).reshape(2, T, 8))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    inputs, arrow = (h, *attention.parameters(), *rel_bias.parameters()), torch.randn_like(y)
    found, slow = (torch.autograd.grad((x * arrow).sum(), inputs) for x in (y, expected))
    torch.testing.assert_close(found, slow, rtol=1e-8, atol=1e-9)
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize("biased", [False, True])
def test_attention_weights_have_dropout_in_training_alone(biased):
    attention = lively(SelfAttention(small(), causal=False, dropout=0.5, biased=biased))
    h = torch.randn(1, 6, 8).double()
    bias = lively(RelativePositionBias(2))(6) if biased else None
    assert torch.equal(attention.eval()(h, None, bias)[0], attention(h, None, bias)[0])
    assert not torch.equal(attention.train()(h, None, bias)[0], attention(h, None, bias)[0])


def test_buckets_are_t5s():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(ahead, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(RelativePositionBias(2).bucket(ahead), expected)
