"""The encoder against Hugging Face's XLM-R, and X-MoE's sparse layer and measures against loops."""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dispatch as dispatching
import model
from common import adamw
from dispatch import dispatch, within_capacity
from flops import count_parameters, flops_per_token
from model import PAD, Distance, Encoder, EncoderConfig, MaskedLM, MoE, SelfAttention
from routers import NOT_CHOSEN, Routing, priority_key, representation_collapse
from train_mlm import PRESETS, Config

SMALL = dict(vocab_size=23, block_size=12, n_layer=3, n_head=2, n_embd=8, ffn_size=12, num_experts=4, expert_size=6)
X_MOE = {  # every row of X-MoE's tables 2, 3, 5 and 7
    "dense": {"router": "dense"},
    "SMoE": {"router": "switch"},
    "SMoE sigmoid": {"router": "switch", "gate": "sigmoid"},
    "X-MoE": {},
    "X-MoE sigmoid": {"gate": "sigmoid"},
    "X-MoE top-2": {"router": "topk", "score": "hypersphere"},
    "no reduction": {"routing_dim": 0},
    "no norm": {"score": "dot", "routing_dim": 2},
    "drops": {"capacity_factor": 0.5},
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
    return lively(kind(EncoderConfig(**(SMALL | X_MOE[row] | options)))).double().eval()


def make_batch(lengths, seed=0):
    """ids (B, T) padded to the longest, and the places of the real ones"""
    rng, T = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(4, SMALL["vocab_size"], (len(lengths), T), generator=rng)
    ids = ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], PAD)
    return ids, (ids != PAD).flatten().nonzero().squeeze(1)


# --- Parity with Hugging Face


def save_xlmr(folder, head=True, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=29, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=20, type_vocab_size=1, layer_norm_eps=1e-5, **options)  # fmt: skip
    kind = transformers.XLMRobertaForMaskedLM if head else transformers.XLMRobertaModel
    model = kind(config).eval()
    for name, p in model.named_parameters():
        p.data = 0.3 * torch.randn_like(p) + ("LayerNorm.weight" in name or "layer_norm.weight" in name)
    model.save_pretrained(folder)
    return model


def test_hidden_states_and_logits_are_those_of_xlmr(tmp_path):
    from pretrained import load_xlmr

    theirs = save_xlmr(tmp_path)
    arguments, weights = load_xlmr(tmp_path)
    ours = MaskedLM(EncoderConfig(router="dense", **arguments)).eval()
    ours.load_state_dict(weights)
    ids, real = make_batch([18, 5, 11])
    masked = real[::3]
    with torch.no_grad():
        states = []
        h, balance = ours.encoder(ids, real, states)
        logits, _ = ours(ids, masked, real)
        expected = theirs(ids, attention_mask=(ids != PAD).long(), output_hidden_states=True)
    assert balance == 0
    keep = ids != PAD
    torch.testing.assert_close(states[-1], h)
    for layer, (mine, other) in enumerate(zip(states, expected.hidden_states, strict=True)):
        torch.testing.assert_close(mine[keep], other[keep], rtol=1e-5, atol=1e-5, msg=f"layer {layer}")
    torch.testing.assert_close(logits, expected.logits.flatten(0, 1)[masked], rtol=1e-5, atol=1e-5)
    whole, _ = ours.encoder(ids[:1])  # no padding: no mask is needed
    torch.testing.assert_close(whole[0], h[0], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_a_head_loads_too(tmp_path):
    from pretrained import load_xlmr

    theirs = save_xlmr(tmp_path, head=False)
    arguments, weights = load_xlmr(tmp_path)
    assert not any(name.startswith(("dense", "ln_h", "bias")) for name in weights)
    ours = Encoder(EncoderConfig(router="dense", **arguments)).eval()
    ours.load_state_dict({name.removeprefix("encoder."): w for name, w in weights.items()})
    ids, real = make_batch([7, 7])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, message", [({"hidden_act": "relu"}, "relu"), ({"pad_token_id": 0}, "pad_token_id 0")]
)
def test_other_architectures_are_refused(tmp_path, options, message):
    from pretrained import load_xlmr

    save_xlmr(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        load_xlmr(tmp_path)


# --- The sparse layer


def literal_stack(h, routing, capacity, stack):
    """X-MoE eq. 2 with experts of several FFNs, token by token: the sum of g (u - h) over the experts that keep it"""
    kept, y = within_capacity(routing.priority, capacity), []
    for s in range(len(h)):
        total = torch.zeros_like(h[s])
        for e in range(kept.shape[1]):
            if not kept[s, e]:
                continue
            u = h[s]
            for w_in, b_in, w_out, b_out, gain, shift in stack:
                x = (u - u.mean()) / (u.var(unbiased=False) + 1e-5).sqrt() * gain[e] + shift[e]
                a = w_in[e] @ x + b_in[e]
                u = u + w_out[e] @ (a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))) + b_out[e]
            total = total + routing.weight[s, e] * (u - h[s])
        y.append(total)
    return torch.stack(y)


def make_case(S, E, chosen, layers=3, D=8, F_=8, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    wanted = torch.rand(S, E, generator=rng) < chosen
    p = torch.rand(S, E, generator=rng).to(dtype)
    wanted[-1, -1], p[-1, -1] = chosen > 0, 0.9  # rows that are not used point there: they must add nothing
    gate = (p * wanted).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    stack = [(draw(E, F_, D), draw(E, F_), draw(E, D, F_), draw(E, D), draw(E, D), draw(E, D)) for _ in range(layers)]
    return draw(S, D), Routing(gate, priority_key(p).masked_fill(~wanted, NOT_CHOSEN), gate.sum(), gate), stack


def gradients(y, h, routing, stack):
    arrow = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    parameters = (h, routing.weight, *(w for weights in stack for w in weights))
    return torch.autograd.grad((y * arrow).sum(), parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("S, E, chosen, capacity", [(9, 4, 0.5, None), (9, 4, 0.8, 3), (3, 7, 0.3, 2)])
@pytest.mark.parametrize("layers", [1, 3])
def test_stacked_experts_equal_their_formula(S, E, chosen, capacity, layers):
    h, routing, stack = make_case(S, E, chosen, layers)
    fast, slow = dispatch(h, routing, capacity, stack, gelu="none")[0], literal_stack(h, routing, capacity, stack)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    found, expected = (gradients(y, h, routing, stack) for y in (fast, slow))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_stacked_experts_that_nobody_chose():
    h, routing, stack = make_case(5, 3, 0.0)
    y, counts = dispatch(h, routing, 2, stack, gelu="none")
    assert (y == 0).all() and counts.tolist() == [0, 0, 0]
    assert all((g == 0).all() for g in gradients(y, h, routing, stack))


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("capacity", [None, 4, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_stacked_experts_as_grouped_products(monkeypatch, dtype, capacity, most):
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN
    h, routing, stack = make_case(12, 4, 0.5, dtype=dtype)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in, grouped=grouped: grouped)
        y = dispatch(h, routing, capacity, stack, most, gelu="none")[0]
        results.append((y, *gradients(y, h, routing, stack)))
    torch.use_deterministic_algorithms(False)
    for streamed, grouped in zip(*results):
        assert grouped.isfinite().all()
        difference = (grouped.double() - streamed.double()).norm()
        assert difference <= (1e-5 if dtype == torch.float32 else 0.05) * streamed.double().norm()


@pytest.mark.parametrize("exact", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_both_forms_of_gelu_and_their_slopes(monkeypatch, exact, dtype):
    a = torch.linspace(-6, 6, 201, dtype=dtype).view(67, 3).requires_grad_()
    g = torch.linspace(0.1, 2, 67, dtype=dtype).view(67, 1)
    expected = g * F.gelu(a, approximate=exact)
    (slope,) = torch.autograd.grad(expected.sum(), a)
    monkeypatch.setattr(dispatching.few_rows, "__kwdefaults__", {"most": 25})  # 8 rows, and 3 are left
    with torch.no_grad():
        alone, untouched = dispatching.activate(a.clone(), g, exact, slope=False)
        assert torch.equal(untouched, a)
        for x, y in zip((alone, *dispatching.activate(a.clone(), g, exact, slope=True)), (expected, expected, slope)):
            torch.testing.assert_close(x, y, **({} if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)))


@pytest.mark.parametrize("row", [row for row in X_MOE if row != "dense"])
def test_sparse_layer_follows_the_equations(row):
    moe = make(MoE, row).train()
    h = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11])  # with padding at 9, 10, 12 and 13
    y, balance = moe(h, torch.zeros(2, 7, dtype=torch.int64), real)
    flat = h.flatten(0, 1)[real]
    slow = reference.route(moe.router, flat)
    weight = torch.zeros(len(real), 4, dtype=torch.float64)
    for (s, e), g in slow.weight.items():
        weight = (
            weight + torch.zeros_like(weight).index_put((torch.tensor(s), torch.tensor(e)), torch.ones(()).double()) * g
        )
    capacity = reference.capacity(len(real), 4, 0.5) if row == "drops" else None
    routing = moe.router(flat)._replace(weight=weight)
    slow_y = literal_stack(flat, routing, capacity, [layer.weights() for layer in moe.layers])
    torch.testing.assert_close(y.flatten(0, 1)[real], slow_y, rtol=1e-9, atol=1e-9)
    assert (y.flatten(0, 1)[[9, 10, 12, 13]] == 0).all()
    torch.testing.assert_close(balance, torch.as_tensor(slow.balance_loss), rtol=1e-9, atol=1e-9)
    parameters, arrow = (h, *moe.parameters()), torch.randn_like(slow_y)
    found, expected = (
        torch.autograd.grad((out * arrow).sum() + loss, parameters, allow_unused=True, materialize_grads=True)
        for out, loss in ((y.flatten(0, 1)[real], balance), (slow_y, slow.balance_loss))
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    if "X-MoE" in row:
        for name in ("router.project.weight", "router.experts", "router.temperature"):
            assert found[1 + [n for n, _ in moe.named_parameters()].index(name)].abs().max() > 0


def test_two_experts_share_a_gate_of_1():  # X-MoE 2.2: softmax over the K chosen
    moe = make(MoE, "X-MoE top-2")
    routing = moe.router(torch.randn(20, 8, dtype=torch.float64))
    assert ((routing.weight > 0).sum(dim=1) == 2).all()
    torch.testing.assert_close(routing.weight.sum(dim=1), torch.ones(20, dtype=torch.float64))


def test_norms_are_exactly_what_they_were_after_100_steps_and_directions_moved():
    torch.manual_seed(0)
    model = MaskedLM(EncoderConfig(**SMALL)).train()
    experts = model.moe_layers[0].router.experts
    start, optimizer = experts.detach().clone(), adamw(model, 0.01, (0.9, 0.98), 0.01)
    for step in range(100):
        ids, real = make_batch([12, 12, 9], seed=step)
        masked = real[:: 1 + step % 3]
        logits, balance = model(ids, masked, real)
        (F.cross_entropy(logits, ids.flatten()[masked]) + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()
        torch.testing.assert_close(experts.norm(dim=1), torch.full((4,), 0.1), rtol=1e-6, atol=0)
    assert (F.cosine_similarity(experts, start, dim=1) < 0.999).all()


# --- The encoder


@every_row
def test_padding_and_its_content_change_nothing(row):
    encoder = make(Encoder, row, capacity_factor=math.inf)
    ids, real = make_batch([12, 5, 8])
    together, balance = encoder(ids, real)
    wider = torch.cat([ids[:, :8], torch.full((3, 4), PAD)], dim=1)[1:]
    alone, _ = encoder(wider, (wider != PAD).flatten().nonzero().squeeze(1))
    torch.testing.assert_close(alone[0, :5], together[1, :5])
    torch.testing.assert_close(alone[1, :8], together[2, :8])
    torch.testing.assert_close(encoder(ids[:1])[0][0], together[0])
    assert together.flatten(0, 1)[real].isfinite().all()


def test_an_inserted_stack_changes_nothing_at_first():
    torch.manual_seed(0)
    sparse = MaskedLM(EncoderConfig(**SMALL, moe_after="1,3,3")).double().eval()
    dense = MaskedLM(EncoderConfig(**(SMALL | {"router": "dense"}))).double().eval()
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if "moes" not in k})
    assert len(sparse.moe_layers) == 3
    ids, real = make_batch([12, 5])
    torch.testing.assert_close(sparse(ids, real, real)[0], dense(ids, real, real)[0], rtol=1e-12, atol=1e-12)
    assert (lively(sparse)(ids, real, real)[0] - lively(dense)(ids, real, real)[0]).abs().max() > 0.01


def test_sparse_layers_stand_where_they_are_told_to():
    encoder, ids = make(Encoder, moe_after="3,1,1"), make_batch([6])[0]
    seen = []
    for i, moe in enumerate(encoder.moes):
        moe.register_forward_hook(lambda _, inputs, output, i=i: seen.append((f"moe {i}", inputs[0], output[0])))
    for i, layer in enumerate(encoder.layers, 1):
        layer.register_forward_hook(lambda _, inputs, output, i=i: seen.append((f"layer {i}", inputs[0], output)))
    states = []
    h, _ = encoder(ids, None, states)
    assert [name for name, *_ in seen] == ["layer 1", "moe 0", "moe 1", "layer 2", "layer 3", "moe 2"]
    for (name, before, out), (_, after, _) in zip(seen, seen[1:]):
        assert torch.equal(after, before + out if "moe" in name else out)  # X-MoE eq. 2: h + g f(h)
    assert torch.equal(states[1], seen[3][1]) and torch.equal(states[3], h) and len(states) == 4


def train_step(model, ids, masked, real):
    with torch.autocast("cpu", torch.bfloat16):
        logits, balance = model(ids, masked, real)
        return F.cross_entropy(logits.float(), ids.flatten()[masked]) + 0.01 * balance


WIDE = dict(n_embd=16, ffn_size=32, expert_size=8)  # rows of 16 bytes, as grouped_mm wants them


@every_row
def test_a_step_asks_the_device_nothing(monkeypatch, row):
    """Tensors without values: a host read, such as int(x), tolist() or nonzero(), raises."""
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: True)
    ids, real = make_batch([12, 7])
    masked = real[::3].contiguous()
    with FakeTensorMode() as mode:
        model = MaskedLM(EncoderConfig(**(SMALL | X_MOE[row] | WIDE)))
        train_step(model, *(mode.from_tensor(x) for x in (ids, masked, real))).backward()


def test_steps_of_all_sizes_compile_in_one_graph(monkeypatch):
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: True)
    torch.compiler.reset()
    model = lively(MaskedLM(EncoderConfig(**(SMALL | X_MOE["X-MoE sigmoid"] | WIDE))))
    compiled, (ids, real) = torch.compile(model, backend="aot_eager", fullgraph=True), make_batch([12, 7])
    for batch in ((ids, real[::3], real), (ids, real[::2], real), (ids[:1], real[:4], None)):
        torch.testing.assert_close(train_step(compiled, *batch), train_step(model, *batch), rtol=0.02, atol=1e-3)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="13 tokens is longer than block_size = 12"):
        make(Encoder)(torch.full((1, 13), 5))


@pytest.mark.parametrize("depths", ["0", "4", "two", "1,,2", "1 2"])
def test_impossible_depths_are_refused(depths):
    with pytest.raises(ValueError, match="moe_after must name layers from 1 to n_layer = 3"):
        EncoderConfig(**SMALL, moe_after=depths)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 2}, "top_k = 2 is for --router topk"),
        ({"router": "switch", "init_temperature": 0.3}, "init_temperature is for --score hypersphere"),
    ],
)
def test_options_that_nothing_reads_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**(SMALL | options))


@pytest.mark.parametrize("router", ["threshold", "expert_choice"])
def test_routers_that_want_all_experts_get_one_a_token_unless_told_otherwise(router):
    encoder = make(Encoder, "X-MoE", router=router)
    encoder.start_stats()
    encoder(make_batch([12, 12, 12, 12])[0])
    served = encoder.stats()[0]["served"]
    assert 0 < served <= 1 if router == "threshold" else served == 1


def test_the_head_sees_only_masked_tokens_and_is_tied():
    model, (ids, real) = make(MaskedLM), make_batch([9, 4])
    masked = torch.tensor([2, 5, 9])
    h = model.encoder(ids, real)[0].flatten(0, 1)
    x = F.layer_norm(F.gelu(model.dense(h)), (8,), model.ln_h.weight, model.ln_h.bias)
    expected = x @ model.encoder.wte.weight.t() + model.bias
    torch.testing.assert_close(model(ids, masked, real)[0], expected[masked])


# --- Gated relative position bias (XLM-E 3.3)


def literal_attention(q, k, v, u, gate_v, w, table, buckets, keep):
    """Eqs. 6 to 8 element by element; q, k, v (B, H, T, d_k), table (32, H), buckets {j - i: bucket}, keep (B, T)"""
    B, H, T, d = q.shape
    out = []
    for b in range(B):
        for head in range(H):
            for i in range(T):
                scores = []
                update, reset = torch.sigmoid(q[b, head, i] @ u), torch.sigmoid(q[b, head, i] @ gate_v)
                for j in range(T):
                    if not keep[b, j]:
                        continue
                    d_ij = table[buckets[j - i], head]
                    r = d_ij + update * d_ij + (1 - update) * w[head] * reset * d_ij
                    scores.append((q[b, head, i] @ k[b, head, j] / math.sqrt(d) + r, v[b, head, j]))
                weights = torch.stack([s for s, _ in scores]).softmax(dim=0)
                out.append(sum(a * value for a, (_, value) in zip(weights, scores)))
    return torch.stack(out).view(B, H, T, d)


def gated_attention(seed=0):
    config = EncoderConfig(**(SMALL | {"relative_bias": True, "router": "dense"}))
    return lively(SelfAttention(config), seed).double().eval(), lively(Distance(2), seed).double()


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
    parameters, arrow = (h, *attention.parameters(), *distance.parameters()), torch.randn_like(y)
    found, slow = (torch.autograd.grad((x * arrow).sum(), parameters) for x in (y, expected))
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


def test_buckets_are_t5s():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(ahead, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(Distance(2).bucket(ahead), expected)


def test_gate_and_bias_add_2064_parameters_to_the_base_encoder():
    sizes = dict(n_layer=12, n_head=12, n_embd=768, ffn_size=3072, vocab_size=250_002, block_size=512, router="dense")
    with torch.device("meta"):
        plain, gated = (Encoder(EncoderConfig(**sizes, relative_bias=on)) for on in (False, True))
    assert count_parameters(plain)["total"] == 277_453_056
    assert count_parameters(gated)["total"] == 277_453_056 + 2_064


def test_an_encoder_with_gated_bias_ignores_padding_and_knows_order():
    encoder = make(Encoder, relative_bias=True)
    ids, real = make_batch([12, 5, 8])
    together, _ = encoder(ids, real)
    torch.testing.assert_close(encoder(ids[1:2, :5])[0][0], together[1, :5])
    with torch.no_grad():
        encoder.wpe.weight.zero_()  # the bias alone must tell the order
    assert (encoder(ids[:1])[0][0].flip(0) - encoder(ids[:1].flip(1))[0][0]).abs().max() > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_on_cuda_equals_the_plain_path():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", requires_grad=True) for _ in range(3))
    scale, distance = (1 + torch.rand(2, 4, 96, device="cuda")).requires_grad_(), Distance(4).cuda()
    mask = (torch.arange(96, device="cuda") < torch.tensor([[96], [70]], device="cuda"))[:, None, None]
    results = []
    for flex in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "has_flex_attention", lambda q, flex=flex: flex)
            y = model.biased_attention(q, k, v, scale, distance(96), mask)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v, scale, distance.table.weight))))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


# --- Parameters and FLOPs


@pytest.mark.parametrize(
    "row, total, active",
    [
        ({"router": "dense"}, 278_295_186, 278_295_186),
        ({}, 731_808_915, 292_479_891),  # active: 291,637,761 and the head's 842,130
        ({"router": "switch"}, 731_820_690, None),  # 730,978,560 and the head
    ],
)
def test_parameters_of_the_base_preset(row, total, active):
    config = Config(**(PRESETS["base"] | row), vocab_size=250_002)
    D, F_, E = 768, 3072, 32
    embeddings = (250_002 + 514 + 1) * D + 2 * D
    layer = 4 * (D * D + D) + (2 * D * F_ + F_ + D) + 4 * D
    head = D * D + D + 2 * D + 250_002
    by_hand = embeddings + 12 * layer + head
    if config.router != "dense":
        by_hand += E * 3 * (2 * D * F_ + F_ + D + 2 * D)
        by_hand += 16 * D + E * 16 + 1 if config.router == "hypersphere" else E * D
    with torch.device("meta"):
        counts = count_parameters(MaskedLM(config))
    assert counts["total"] == by_hand == total
    assert active in (None, counts["active"])


def test_flops_of_the_encoder():
    config = EncoderConfig(**SMALL, routing_dim=2)
    layers = 3 * (4 * 8 * 8 + 2 * 8 * 12)  # weights that a token meets
    sparse = 2 * 8 + 4 * 2 + 3 * 2 * 8 * 6
    head = 0.5 * (8 * 8 + 8 * 23)
    assert flops_per_token(config, 0.5) == {"total": 2 * (layers + sparse + head) + 4 * 3 * 12 * 8, "moe": 2 * sparse}


# --- Representation collapse (X-MoE eq. 11)


def literal_rc(h, chosen):
    classes = sorted(set(chosen.tolist()))
    mu, n, D = h.mean(dim=0), len(h), h.shape[1]
    within, between = torch.zeros(D, D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    for k in classes:
        mine = h[chosen == k]
        mu_k = mine.mean(dim=0)
        for x in mine:
            within += torch.outer(x - mu_k, x - mu_k) / n
        between += len(mine) / n * torch.outer(mu_k - mu, mu_k - mu)
    # rank at most K - 1: what is left of the others is rounding
    values, vectors = torch.linalg.eigh(between)
    inverse = torch.zeros(D, D, dtype=torch.float64)
    for i in values.argsort(descending=True)[: len(classes) - 1]:
        if values[i] > 1e-15 * values.max():
            inverse += torch.outer(vectors[:, i], vectors[:, i]) / values[i]
    return float(torch.trace(within @ inverse))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(5, 40), st.integers(2, 6), st.integers(2, 6))
def test_rc_is_its_formula(seed, n, D, E):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(n, D, generator=rng, dtype=torch.float64) + 5
    chosen = torch.randint(E, (n,), generator=rng)
    one_hot = F.one_hot(chosen, E).double()
    found = representation_collapse(one_hot.sum(dim=0), one_hot.t() @ h, h.t() @ h)
    assert found == pytest.approx(literal_rc(h, chosen), rel=1e-6, abs=1e-9)


def test_rc_stands_a_mean_far_from_0():
    """Sigma_B of K classes has rank K - 1; the rounding of large means must not count as one more direction."""
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(30, 6, generator=rng, dtype=torch.float64)
    chosen = torch.arange(30) % 3
    one_hot, far = F.one_hot(chosen, 3).double(), h + 1e5
    found = representation_collapse(one_hot.sum(dim=0), one_hot.t() @ far, far.t() @ far)
    assert found == pytest.approx(literal_rc(h, chosen), rel=1e-3)


def test_rc_is_0_where_tokens_of_an_expert_are_one_point():
    points = torch.randn(3, 5, dtype=torch.float64)
    chosen = torch.tensor([0, 0, 2, 2, 2, 3])
    h = torch.stack([points[0], points[0], points[1], points[1], points[1], points[2]])
    one_hot = F.one_hot(chosen, 4).double()
    assert representation_collapse(one_hot.sum(0), one_hot.t() @ h, h.t() @ h) == pytest.approx(0, abs=1e-9)
    assert math.isnan(representation_collapse(one_hot.sum(0), one_hot.t() @ h * math.nan, h.t() @ h))
    everyone = torch.tensor([6.0, 0, 0, 0]).double()
    assert representation_collapse(everyone, torch.stack([h.sum(0), *torch.zeros(3, 5).double()]), h.t() @ h) == 0
