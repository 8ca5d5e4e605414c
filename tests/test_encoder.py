"""The encoder: parity with XLM-R, where X-MoE's sparse layers stand, padding, and XLM-E's position bias."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model
from model import GPT, PAD, Distance, Encoder, EncoderLayer, MaskedLM, ModelConfig, SelfAttention

SMALL = dict(vocab_size=23, block_size=12, n_layer=3, n_head=2, n_embd=8, ffn_size=12, num_experts=4, expert_size=6)
SMALL |= dict(router="hypersphere", moe_after=(2,), init_std=0.02)
X_MOE = {  # every row of X-MoE's tables 2, 3, 5 and 7
    "dense": {"router": "dense"},
    "SMoE": {"router": "switch"},
    "SMoE sigmoid": {"router": "switch", "gate": "sigmoid"},
    "X-MoE": {},
    "X-MoE sigmoid": {"gate": "sigmoid"},
    "X-MoE top-2": {"router": "topk", "score": "hypersphere"},
    "no reduction": {"routing_dim": 0},
    "no norm": {"score": "dot", "routing_dim": 2},
}
every_row = pytest.mark.parametrize("row", X_MOE)


def lively(module, seed=0):
    """Parameters large enough for every choice to matter."""
    torch.manual_seed(seed)
    for name, p in module.named_parameters():
        if not name.endswith("temperature"):
            p.data = 0.5 * torch.randn_like(p) + ("ln_" in name and name.endswith("weight"))
    return module


def make(kind, row="X-MoE", **options):
    return lively(kind(ModelConfig(**(SMALL | X_MOE[row] | options)))).double().eval()


def make_batch(lengths, seed=0):
    """ids (B, T) padded to the longest, and the places of the real ones"""
    rng, T = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(4, SMALL["vocab_size"], (len(lengths), T), generator=rng)
    ids = ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], PAD)
    return ids, (ids != PAD).flatten().nonzero().squeeze(1)


def parameters(module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- Parity with Hugging Face


def save_xlmr(folder, head=True, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=29, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=20, type_vocab_size=1, layer_norm_eps=1e-5, **options)  # fmt: skip
    kind = transformers.XLMRobertaForMaskedLM if head else transformers.XLMRobertaModel
    theirs = kind(config).eval()
    for name, p in theirs.named_parameters():
        p.data = 0.3 * torch.randn_like(p) + ("LayerNorm.weight" in name or "layer_norm.weight" in name)
    theirs.save_pretrained(folder)
    return theirs


def test_hidden_states_and_logits_are_those_of_xlmr(tmp_path):
    theirs = save_xlmr(tmp_path)
    from pretrained import fill, load_xlmr

    arguments, weights = load_xlmr(tmp_path)
    ours = MaskedLM(ModelConfig(router="dense", **arguments)).eval()
    fill(ours, arguments, weights, tmp_path)
    ids, real = make_batch([18, 5, 11])
    masked, states, keep = real[::3], [], ids != PAD
    with torch.no_grad():
        h, balance = ours.encoder(ids, real, states)
        logits, _ = ours(ids, masked, real)
        expected = theirs(ids, attention_mask=keep.long(), output_hidden_states=True)
    assert balance == 0 and torch.equal(states[-1], h)
    for layer, (mine, other) in enumerate(zip(states, expected.hidden_states, strict=True)):
        torch.testing.assert_close(mine[keep], other[keep], rtol=1e-5, atol=1e-5, msg=f"layer {layer}")
    torch.testing.assert_close(logits, expected.logits.flatten(0, 1)[masked], rtol=1e-5, atol=1e-5)
    whole, _ = ours.encoder(ids[:1])  # no padding: no mask is needed
    torch.testing.assert_close(whole[0], h[0], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_a_head_loads_too(tmp_path):
    theirs = save_xlmr(tmp_path, head=False)
    from pretrained import load

    ours, _ = load(tmp_path)
    ids, _ = make_batch([7, 7])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options, message", [({"hidden_act": "relu"}, "relu"), ({"pad_token_id": 0}, "pad_token_id")])
def test_other_architectures_are_refused(tmp_path, options, message):
    save_xlmr(tmp_path, **options)
    from pretrained import load_xlmr

    with pytest.raises(ValueError, match=message):
        load_xlmr(tmp_path)


# --- The encoder


@pytest.mark.parametrize(
    "row, total, with_head",
    [
        ({"router": "dense"}, 277_453_056, 278_295_186),
        ({"router": "hypersphere"}, 730_966_785, 731_808_915),
        ({"router": "switch"}, 730_978_560, 731_820_690),
        ({"router": "dense", "relative_bias": True}, 277_453_056 + 2_064, None),
    ],
)
def test_parameters_of_the_base_encoder(row, total, with_head):
    base = dict(vocab_size=250_002, block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, moe_after=(6,))
    with torch.device("meta"):
        masked_lm = MaskedLM(ModelConfig(**(base | row)))
    assert parameters(masked_lm.encoder) == total
    assert with_head in (None, parameters(masked_lm))


@every_row
def test_padding_and_its_content_change_nothing(row):
    encoder = make(Encoder, row)
    ids, real = make_batch([12, 5, 8])
    together, _ = encoder(ids, real)
    wider = torch.cat([ids[:, :8], torch.full((3, 4), PAD)], dim=1)[1:]
    places = (wider != PAD).flatten().nonzero().squeeze(1)
    alone, balance = encoder(wider, places)
    torch.testing.assert_close(alone[0, :5], together[1, :5])
    torch.testing.assert_close(alone[1, :8], together[2, :8])
    torch.testing.assert_close(encoder(ids[:1])[0][0], together[0])
    other, other_balance = encoder(wider.masked_fill(wider == PAD, 9), places)  # `real` tells, not the id
    torch.testing.assert_close(other.flatten(0, 1)[places], alone.flatten(0, 1)[places])
    torch.testing.assert_close(other_balance, balance)


@every_row
def test_padding_has_no_share_in_gradients_and_balance(row):
    masked_lm = make(MaskedLM, row)
    results = []
    for ids, real in (make_batch([6, 6]), (torch.cat([make_batch([6, 6])[0], torch.full((2, 5), PAD)], dim=1), None)):
        real = (ids != PAD).flatten().nonzero().squeeze(1) if real is None else real
        logits, balance = masked_lm(ids, real[::2], real)
        loss = logits.logsumexp(dim=1).sum() + balance
        gradients = torch.autograd.grad(loss, list(masked_lm.parameters()), allow_unused=True, materialize_grads=True)
        results.append((logits, balance, *gradients))
    torch.testing.assert_close(results[0], results[1])


def test_an_inserted_stack_changes_nothing_at_first():
    torch.manual_seed(0)
    sparse = MaskedLM(ModelConfig(**(SMALL | {"moe_after": (1, 3, 3)}))).double().eval()
    dense = MaskedLM(ModelConfig(**(SMALL | {"router": "dense"}))).double().eval()
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "moes" not in k})
    assert len(sparse.moe_layers) == 3 and not dense.moe_layers
    ids, real = make_batch([12, 5])
    torch.testing.assert_close(sparse(ids, real, real)[0], dense(ids, real, real)[0], rtol=1e-12, atol=1e-12)
    assert (lively(sparse)(ids, real, real)[0] - lively(dense)(ids, real, real)[0]).abs().max() > 0.01


def test_sparse_layers_stand_where_they_are_told_to():
    encoder, ids = make(Encoder, moe_after=(3, 1, 1)), make_batch([6])[0]
    seen = []
    for i, moe in enumerate(encoder.moes):
        moe.register_forward_hook(lambda _, inputs, output, i=i: seen.append((f"moe {i}", inputs[0], output[0])))
    for i, layer in enumerate(encoder.layers, 1):
        layer.register_forward_hook(lambda _, inputs, output, i=i: seen.append((f"layer {i}", inputs[0], output)))
    losses = []
    for moe in encoder.moes:
        moe.register_forward_hook(lambda _, __, output: losses.append(output[1]))
    states = []
    h, balance = encoder(ids, None, states)
    assert [name for name, *_ in seen] == ["layer 1", "moe 0", "moe 1", "layer 2", "layer 3", "moe 2"]
    for (name, before, out), (_, after, _) in zip(seen, seen[1:]):
        assert torch.equal(after, before + out if "moe" in name else out)  # X-MoE eq. 2: h + g f(h)
    assert torch.equal(states[1], seen[3][1]) and torch.equal(states[3], h) and len(states) == 4
    torch.testing.assert_close(balance, sum(losses))


@pytest.mark.parametrize("router, per_token", [("threshold", 1.0), ("expert_choice", 1.0), ("topk", 2.0)])
def test_what_a_router_is_offered_between_layers(router, per_token):
    """Routers that want all experts get one a token unless told otherwise; top-2 has no limit."""
    encoder, kept = make(Encoder, router=router, threshold=1.0), []
    encoder.moe_layers[0].watchers.append(lambda moe, h, routing, kept_here: kept.append(kept_here))
    encoder(make_batch([12, 12, 12, 12])[0])
    assert kept[0].sum().item() == 48 * per_token


def test_norms_are_exactly_what_they_were_after_100_steps_and_directions_moved():
    torch.manual_seed(0)
    masked_lm = MaskedLM(ModelConfig(**SMALL)).train()
    experts = masked_lm.moe_layers[0].router.experts
    start, optimizer = experts.detach().clone(), torch.optim.AdamW(masked_lm.parameters(), lr=0.01)
    for step in range(100):
        ids, real = make_batch([12, 12, 9], seed=step)
        masked = real[:: 1 + step % 3]
        logits, balance = masked_lm(ids, masked, real)
        (F.cross_entropy(logits, ids.flatten()[masked]) + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        masked_lm.after_step()
        torch.testing.assert_close(experts.norm(dim=1), torch.full((4,), 0.1), rtol=1e-6, atol=0)
    assert (F.cosine_similarity(experts, start, dim=1) < 0.999).all()


def test_dropout_follows_embeddings_attention_and_ffn():
    """Where all is dropped, embeddings are 0 and of a layer only its norms are left."""
    config = ModelConfig(**(SMALL | dict(dropout=1.0, moe_after=(3,))))
    layer, x = lively(EncoderLayer(config)), torch.randn(2, 5, 8)
    assert layer.attn.dropout == 1.0
    layer.attn.dropout = 0.0  # that of attention weights
    assert torch.equal(layer.train()(x, None, None), layer.ln_2(layer.ln_1(x)))
    assert not torch.equal(layer.eval()(x, None, None), layer.ln_2(layer.ln_1(x)))
    states = []
    lively(Encoder(config)).train()(make_batch([6])[0], None, states)
    assert (states[0] == 0).all()
    assert lively(Encoder(config)).moe_layers[0].train()(x, torch.zeros(2, 5).long())[0].any()  # no dropout there


def test_attention_weights_have_dropout_in_training_alone():
    config = ModelConfig(**(SMALL | dict(dropout=0.5)))
    attention, h = lively(SelfAttention(config, causal=False)), torch.randn(1, 6, 8)
    assert torch.equal(attention.eval()(h), attention(h))
    assert not torch.equal(attention.train()(h), attention(h))


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="13 tokens is longer than block_size = 12"):
        make(Encoder)(torch.full((1, 13), 5))


def test_the_head_sees_only_masked_tokens_and_is_tied():
    masked_lm, (ids, real) = make(MaskedLM), make_batch([9, 4])
    masked = torch.tensor([2, 5, 9])
    h = masked_lm.encoder(ids, real)[0].flatten(0, 1)
    x = F.layer_norm(F.gelu(masked_lm.dense(h)), (8,), masked_lm.ln_h.weight, masked_lm.ln_h.bias)
    expected = x @ masked_lm.encoder.wte.weight.t() + masked_lm.bias
    torch.testing.assert_close(masked_lm(ids, masked, real)[0], expected[masked])


def test_weights_start_from_the_normal_that_was_asked_for():
    config = ModelConfig(vocab_size=60, n_embd=64, ffn_size=256, init_std=0.05, relative_bias=True, router="dense")
    masked_lm = MaskedLM(config)
    for name, p in masked_lm.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "ln_" in name or "gate_w" in name:
            assert (p == 1).all(), name
        else:
            assert p.std().item() == pytest.approx(0.05, rel=0.25), name


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


def gated_attention():
    config = ModelConfig(**(SMALL | {"relative_bias": True, "router": "dense"}))
    return lively(SelfAttention(config, causal=False)).double().eval(), lively(Distance(2)).double()


@pytest.mark.parametrize("width, is_cuda, takes", [(16, True, True), (8, True, False), (64, False, False)])
def test_flex_attention_is_for_cuda_and_heads_of_16_or_more(width, is_cuda, takes):
    q = torch.ones(1, 2, 3, width)
    assert model.has_flex_attention(SimpleNamespace(is_cuda=is_cuda, shape=q.shape)) == takes


@pytest.mark.parametrize("flex", [False, True], ids=["plain", "flex"])
@pytest.mark.parametrize("padding", [False, True])
def test_gated_bias_is_its_formula(monkeypatch, padding, flex):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(model, "has_flex_attention", lambda q: flex)
    monkeypatch.setattr(model, "flex_attention", lambda: flex_attention.flex_attention)  # not compiled: slow, and exact
    attention, distance = gated_attention()
    T = 6
    h = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[1, 4:] = not padding
    with torch.set_grad_enabled(not flex):  # on a CPU, FlexAttention has no backward
        y = attention(h, keep[:, None, None] if padding else None, distance(T))
    q, k, v = (x.view(2, T, 2, 4).transpose(1, 2) for x in attention.qkv(h).split(8, dim=2))
    buckets = {ahead: int(distance.bucket(torch.tensor(ahead))) for ahead in range(-T, T + 1)}
    heads = literal_attention(q, k, v, *attention.gate, attention.gate_w, distance.table.weight, buckets, keep)
    expected = attention.proj(heads.transpose(1, 2).reshape(2, T, 8))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    if flex:
        return
    inputs, arrow = (h, *attention.parameters(), *distance.parameters()), torch.randn_like(y)
    found, slow = (torch.autograd.grad((x * arrow).sum(), inputs) for x in (y, expected))
    torch.testing.assert_close(found, slow, rtol=1e-8, atol=1e-9)
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize("update, factor", [(1e3, 2.0), (-1e3, None)])
def test_gate_limits(monkeypatch, update, factor):
    """Update gate 1: r = 2 d. Update gate 0: r = d + w g d."""
    seen = []
    monkeypatch.setattr(model, "biased_attention", lambda q, k, v, scale, *rest: seen.append((q, scale)) or v)
    attention, distance = gated_attention()
    with torch.no_grad():
        attention.qkv.weight.abs_()
        attention.qkv.bias.fill_(1.0)
        attention.gate[0] = update
        attention(torch.rand(2, 5, 8, dtype=torch.float64), None, distance(5))
    ((q, scale),) = seen
    reset = (q @ attention.gate[1]).sigmoid()
    expected = 1 + attention.gate_w[:, None] * reset if factor is None else torch.full_like(scale, factor)
    torch.testing.assert_close(scale, expected)


def test_the_biased_path_drops_attention_weights_too():
    config = ModelConfig(**(SMALL | {"relative_bias": True, "router": "dense", "dropout": 0.5}))
    attention, h = lively(SelfAttention(config, causal=False)).train(), torch.randn(1, 6, 8)
    bias = lively(Distance(2))(6)
    assert not torch.equal(attention(h, None, bias), attention(h, None, bias))


def test_buckets_are_t5s():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(ahead, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(Distance(2).bucket(ahead), expected)


def test_an_encoder_with_gated_bias_ignores_padding_and_knows_order():
    encoder = make(Encoder, relative_bias=True)
    ids, real = make_batch([12, 5, 8])
    together, _ = encoder(ids, real)
    torch.testing.assert_close(encoder(ids[1:2, :5])[0][0], together[1, :5])
    with torch.no_grad():
        encoder.wpe.weight.zero_()  # the bias alone must tell the order
    assert (encoder(ids[:1])[0][0].flip(0) - encoder(ids[:1].flip(1))[0][0]).abs().max() > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_on_cuda_equals_the_plain_path(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", requires_grad=True) for _ in range(3))
    scale, distance = (1 + torch.rand(2, 4, 96, device="cuda")).requires_grad_(), Distance(4).cuda()
    nn.init.normal_(distance.table.weight)
    mask = (torch.arange(96, device="cuda") < torch.tensor([[96], [70]], device="cuda"))[:, None, None]
    results = []
    for flex in (True, False):
        monkeypatch.setattr(model, "has_flex_attention", lambda q, flex=flex: flex)
        y = model.biased_attention(q, k, v, scale, distance(96), mask)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v, scale, distance.table.weight))))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_experts_stand_where_a_model_can_have_them():
    small = dict(vocab_size=9, n_layer=2, n_head=2, n_embd=8, ffn_size=8)
    with pytest.raises(ValueError, match="behind those of moe_after"):
        Encoder(ModelConfig(router="switch", **small))
    with pytest.raises(ValueError, match="moe_after is for encoders"):
        GPT(ModelConfig(router="switch", moe_after=(1,), **small))
    Encoder(ModelConfig(router="dense", **small))
