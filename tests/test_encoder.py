"""The encoder: padding, the places of X-MoE's sparse layers, dropout, and XLM-E's relative position bias."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import constants, lively

from model import PAD, Encoder, EncoderLayer, MaskedLM, RelativePositionBias, SelfAttention

V = 23
SMALL = dict(block_size=12, n_layer=3, init_std=0.02, moe_after=(2,), router="hypersphere", expert_layers=3)
ROWS = {  # XLM-E's encoder and the rows of X-MoE's tables 2, 3, 5 and 7
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
    """ids (B, T) padded to the longest row, and the flat indices of non-padding tokens."""
    rng, T = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(4, V, (len(lengths), T), generator=rng)
    ids = ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], PAD)
    return ids, (ids != PAD).flatten().nonzero().squeeze(1)


# --- The encoder


@pytest.mark.parametrize("row", ROWS)
def test_padding_changes_no_state_logit_gradient_or_balance_loss(row):
    """However long it is and whatever its ids are: the flat indices define padding."""
    masked_lm = make(MaskedLM, row)
    ids, nonpad = make_batch([12, 5, 8])
    states_of_3, _ = masked_lm.encoder(ids, nonpad)
    torch.testing.assert_close(masked_lm.encoder(ids[:1])[0][0], states_of_3[0])
    expected = torch.cat([states_of_3[1, :5], states_of_3[2, :8]])
    results = []
    for width, padding_id in ((8, PAD), (12, 9)):
        rows = ids[1:, :width]
        nonpad = (rows != PAD).flatten().nonzero().squeeze(1)
        rows = rows.masked_fill(rows == PAD, padding_id)
        states, _ = masked_lm.encoder(rows, nonpad)
        torch.testing.assert_close(states.flatten(0, 1)[nonpad], expected)
        logits, balance = masked_lm(rows, nonpad[::2], nonpad=nonpad)
        loss = logits.logsumexp(dim=1).sum() + balance
        gradients = torch.autograd.grad(loss, list(masked_lm.parameters()), allow_unused=True, materialize_grads=True)
        results.append((logits, balance, *gradients))
    torch.testing.assert_close(results[0], results[1])


def test_inserted_stacks_start_as_the_identity():
    sparse, dense = (MaskedLM(small(moe_after=(1, 3, 3), router=router), V).eval() for router in ("switch", "dense"))
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "moes" not in k})
    assert len(sparse.moe_layers) == 3
    assert not dense.moe_layers
    ids, nonpad = make_batch([12, 5])
    assert torch.equal(sparse(ids, nonpad, nonpad=nonpad)[0], dense(ids, nonpad, nonpad=nonpad)[0])


def test_sparse_layers_follow_the_layers_in_moe_after():
    encoder, ids = make(Encoder, moe_after=(3, 1, 1)), make_batch([6])[0]
    calls, states = [], []
    for kind, modules in {"moe": encoder.moes, "layer": encoder.layers}.items():
        for module in modules:
            module.register_forward_hook(lambda _, inputs, out, kind=kind: calls.append((kind, inputs[0], out)))
    h, balance = encoder(ids, None, states)
    assert [kind for kind, *_ in calls] == ["layer", "moe", "moe", "layer", "layer", "moe"]
    for (kind, x, out), (_, next_x, _) in zip(calls, calls[1:]):
        assert torch.equal(next_x, x + out[0] if kind == "moe" else out)  # X-MoE eq. 2: h + g f(h)
    torch.testing.assert_close(balance, sum(out[1] for kind, _, out in calls if kind == "moe"))
    assert len(states) == 4
    assert torch.equal(states[1], calls[3][1])  # the state after layer 1 includes its sparse layers
    assert torch.equal(states[3], h)


def test_dropout_follows_embeddings_attention_and_ffn():
    """At a rate of 1, embeddings are 0 and a layer reduces to its norms."""
    config = small(dropout=1.0, moe_after=(3,))
    layer, x = lively(EncoderLayer(config)), torch.randn(2, 5, 8).double()
    assert layer.attn.dropout == 1.0
    layer.attn.dropout = 0.0  # keep the attention weights
    assert torch.equal(layer.train()(x, None, None), layer.ln_2(layer.ln_1(x)))
    assert not torch.equal(layer.eval()(x, None, None), layer.ln_2(layer.ln_1(x)))
    states = []
    lively(Encoder(config, V)).train()(make_batch([6])[0], None, states)
    assert (states[0] == 0).all()
    moe = lively(Encoder(config, V)).moe_layers[0].train()
    assert moe(x, torch.zeros(2, 5).long())[0].any()  # a sparse layer has no dropout


# --- Gated relative position bias (XLM-E 3.3)


def literal_attention(q, k, v, u, gate_v, w, table, buckets, keep):
    """Eqs. 6 to 8, element by element. q, k, v (B, H, T, d_k), table (32, H), buckets {j - i: bucket}, keep (B, T)"""
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
def test_gated_bias_follows_the_equations(padding):
    attention = lively(SelfAttention(small(), causal=False, dropout=0.0, biased=True)).eval()
    rel_bias, T = lively(RelativePositionBias(2)), 6
    h = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[1, 4:] = not padding
    y, _ = attention(h, keep[:, None, None] if padding else None, rel_bias(T))
    q, k, v = (x.view(2, T, 2, 4).transpose(1, 2) for x in attention.qkv(h).split(8, dim=2))
    buckets = {offset: int(rel_bias.bucket(torch.tensor(offset))) for offset in range(-T, T + 1)}
    heads = literal_attention(q, k, v, *attention.gate, attention.gate_w, rel_bias.table.weight, buckets, keep)
    expected = attention.proj(heads.transpose(1, 2).reshape(2, T, 8))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    inputs, weights = (h, *attention.parameters(), *rel_bias.parameters()), torch.randn_like(y)
    gradients, slow_gradients = (torch.autograd.grad((x * weights).sum(), inputs) for x in (y, expected))
    torch.testing.assert_close(gradients, slow_gradients, rtol=1e-8, atol=1e-9)
    assert all(g.abs().max() > 0 for g in gradients)


@pytest.mark.parametrize("biased", [False, True])
def test_attention_weights_have_dropout_in_training_only(biased):
    attention = lively(SelfAttention(small(), causal=False, dropout=0.5, biased=biased))
    h = torch.randn(1, 6, 8).double()
    bias = lively(RelativePositionBias(2))(6) if biased else None
    assert torch.equal(attention.eval()(h, None, bias)[0], attention(h, None, bias)[0])
    assert not torch.equal(attention.train()(h, None, bias)[0], attention(h, None, bias)[0])
    attention.qkv.weight.data[16:], attention.qkv.bias.data[16:], attention.proj = 0.0, 1.0, torch.nn.Identity()
    sums = attention(h, None, bias)[0].unflatten(2, (2, 4))  # all values are 1: each output is a sum of weights
    torch.testing.assert_close(sums, sums[..., :1].expand_as(sums))
    assert ((sums - 1).abs() > 0.01).any()


def test_buckets_equal_those_of_t5():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(offset, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(RelativePositionBias(2).bucket(offset), expected)
