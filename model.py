"""The sparse layer and the Transformers that use it: a decoder (GPT-2), an encoder (XLM-R) and an encoder-decoder.

XMoE's experts replace the FFN of every `moe_every`-th block; X-MoE inserts sparse layers between encoder layers, after
those in `moe_after`. Read `MoE` first: it shows how tokens reach their experts. A model reads the constants of a
script's Config by name. Tensor letters: B batch, T sequence length, S non-padding tokens, D model width, H heads,
E experts, F inner width of one expert, C expert capacity, K experts per token, N rows that experts keep, V vocabulary,
M predicted tokens.
"""

import functools
import math
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routers import NOT_CHOSEN, RouterError, check_priority, find_router

PAD = 1  # the encoder's `<pad>`, as in XLM-R, positions start after it
MIN_CAPACITY = 4

# ---------------------------------------------------------------------------------------------------------------------
# The sparse layer: route (routers.py), apply the capacity limit, gather rows, run experts, sum


class MoE(nn.Module):
    """A sparse FFN: a router chooses experts for each token, and each expert serves as many as its capacity allows.

    capacity_factor, at_test: the papers' gamma, in training and at test; inf: no limit.
    """

    def __init__(self, router: nn.Module, experts: "Experts | Stacks", capacity_factor: float, at_test: float):
        super().__init__()
        self.router, self.experts = router, experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, at_test
        self.watchers = []  # hooks that measure routing, called with (self, h, routing, kept)

    def forward(self, h, ids, nonpad=None):
        """h (B, T, D), ids (B, T) -> (B, T, D), the router's losses, weighted and summed.

        nonpad (S,): flat indices of non-padding tokens, ascending; None if there is no padding. Padding is not served,
        fills no capacity, and gets 0.
        """
        B, T, D = h.shape
        flat, ids = h.flatten(0, 1), ids.flatten()
        if nonpad is not None:
            flat, ids = flat.index_select(0, nonpad), ids[nonpad]
        routing = self.router(flat, ids)
        if may_sync(h) and not torch.compiler.is_compiling():
            check_choices(self.router, routing)
        S, E = routing.weight.shape
        C = self.capacity(S)
        kept = within_capacity(routing.priority, C)  # (S, E)
        for watch in self.watchers:
            watch(self, flat, routing, kept)
        gates = routing.weight * kept
        most = min(S * self.router.K, E * C)  # rows that can be kept; if that is all pairs, a sync costs a GPU less
        size = None if may_sync(h) or most == S * E else most
        rows = kept_rows(gates, kept, size)
        y = self.experts(flat.index_select(0, rows.token), rows)  # (N, D), weighted
        y = add_rows(self.experts.biases(gates), rows, y)  # (S, D) in the gates' dtype (fp32); XMoE eq. 2
        if self.router.beside is not None:
            y = y + self.router.beside(flat, routing)
        if nonpad is not None:
            y = y.new_zeros(B * T, D).index_copy(0, nonpad, y)
        losses = [weight * loss for weight, loss in routing.losses.values()]
        return y.view_as(h), sum(losses, gates.new_zeros(()))

    def capacity(self, S: int) -> int:
        """C, how many of S tokens one expert may serve (XMoE eq. 3): at least 4, at most S; gamma inf: no limit.

        Subtracting 1e-7 absorbs rounding: with gamma 1.1, 100 tokens and 10 experts, C is 11, not 12.
        """
        gamma = self.capacity_factor if self.training else self.eval_capacity_factor
        E = self.router.E
        if gamma >= E:
            return S
        rows = math.ceil(gamma * S / E - 1e-7)
        return min(S, max(MIN_CAPACITY, rows))


def may_sync(x) -> bool:
    """Whether reading a number from the device of x is free; on a GPU the host would wait."""
    return not x.is_cuda


def check_choices(router: nn.Module, routing):
    """Raises RouterError if a routing breaks its class's promise. A GPU allocates rows by it, and does not check."""
    check_priority(router, routing.priority, routing.probs)
    most = int(routing.wanted.sum(dim=1).max()) if len(routing.priority) else 0
    if most > router.K:
        raise RouterError(f"{type(router).__name__} chose {most} experts for a token, but its class has K = {router.K}")


def within_capacity(priority, capacity: int):
    """(S, E) priorities -> (S, E) bool: each expert keeps the C highest-priority tokens that chose it.

    Ties go to the earlier token. This needs no sort: an expert keeps all tokens above its C-th highest priority, the
    bar, and fills the remaining places with the earliest tokens exactly at the bar.
    """
    if capacity >= len(priority):
        return priority > NOT_CHOSEN
    priority = priority.t().contiguous()  # (E, S), so that each expert's tokens are contiguous
    highest = priority.topk(capacity, dim=1, sorted=False).values  # (E, C)
    bar = highest.amin(dim=1, keepdim=True)  # (E, 1)
    above = priority > bar
    tied = (priority == bar) & (bar > NOT_CHOSEN)
    places_left = capacity - above.sum(dim=1, keepdim=True)  # (E, 1)
    # One flat cumsum over all experts: torch 2.11 cannot compile a row-wise one for a GPU.
    count = tied.flatten().cumsum(0, dtype=torch.int32).view_as(tied)
    number = count - count[:, :1] + tied[:, :1]  # position among the expert's tied tokens, from 1
    return (above | tied & (number <= places_left)).t()


class Rows(NamedTuple):
    """The N (token, expert) pairs that are kept, sorted by expert.

    On a CPU, N is their number. On a GPU that would be a sync, so N is an upper bound (unless every token may go to
    every expert), and the rows after the last expert's are spare (arbitrary token and expert, gate 0).
    """

    token: Tensor  # (N,)
    expert: Tensor  # (N,)
    gate: Tensor  # (N, 1)
    counts: Tensor  # (E,) rows of each expert
    used: Tensor | None  # (N, 1) bool: False for spare rows, at the end; None: no spare rows


def kept_rows(gates, kept, size: int | None = None) -> Rows:
    """gates (S, E), kept (S, E) bool -> Rows.

    size: N, with spare rows after the kept ones; None: exactly the kept rows, whose number takes a sync.
    """
    S, E = kept.shape
    counts = kept.sum(dim=0)  # (E,)
    by_expert = kept.t().flatten()  # (E * S,)
    if size is None:
        place, used = by_expert.nonzero(), None
    else:
        row = torch.arange(size, device=kept.device).unsqueeze(1)
        used = row < counts.sum()
        place = torch.nonzero_static(by_expert, size=size)
        # Spread spare rows over tokens and experts: adding all their zeros to one place would be slow.
        place = torch.where(used, place, row % E * S + row % S)
    place = place.squeeze(1)  # (N,)
    gate = gates.t().flatten()
    gate = gate.index_select(0, place).unsqueeze(1)  # (N, 1)
    if used is not None:
        gate = torch.where(used, gate, 0.0)
    return Rows(place % S, place // S, gate, counts, used)


class Experts(nn.Module):
    """E experts, each a plain FFN (XMoE). A unit reads a row of w_in and writes a row of w_out."""

    def __init__(self, E: int, D: int, F_: int, gelu: str):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(E, F_, D))
        self.b_in = nn.Parameter(torch.zeros(E, F_))
        self.w_out = nn.Parameter(torch.empty(E, F_, D))
        self.b_out = nn.Parameter(torch.zeros(E, D))
        self.gelu = gelu

    def forward(self, x, rows: Rows):
        """(N, D) -> g W_out^T gelu(W_in x + b_in), (N, D)"""
        z = rows.gate * F.gelu(self.activations(x, rows), approximate=self.gelu)  # (N, F)
        return ragged_linear(z, self.w_out, rows)

    def activations(self, x, rows: Rows):
        """(N, D) -> W_in x + b_in, (N, F); XMoE figure 6 measures these."""
        a = ragged_linear(x, self.w_in.mT, rows)
        if not x.is_cuda or a.dtype != torch.bfloat16:
            return a + self.b_in.index_select(0, rows.expert)
        # The gradient of index_select adds row by row, a fifth of the layer's time; a product with ones is faster.
        b = F.pad(self.b_in.unsqueeze(1), (0, 0, 0, 7))  # (E, 8, F): a grouped product needs rows of 16 bytes
        return a + ragged_linear(x.new_ones(len(x), 8), b, rows)

    def biases(self, gates):
        """(S, E) -> the sum of g b_out over experts, (S, D), as one product: row by row would need more memory."""
        return (gates @ self.b_out.to(gates.dtype)).to(gates.dtype)


class Stacks(nn.Module):
    """E experts, each a stack of pre-norm residual FFNs (X-MoE 4.1)."""

    def __init__(self, E: int, D: int, F_: int, gelu: str, layers: int):
        super().__init__()
        self.norms = nn.ModuleList(ExpertNorm(E, D) for _ in range(layers))
        self.ffns = nn.ModuleList(Experts(E, D, F_, gelu) for _ in range(layers))

    def forward(self, x, rows: Rows):
        """(N, D) -> g (u - x), (N, D), where u is the stack's output.

        So h + g (u - x) equals BASE Layers' g u + (1 - g) h (X-MoE eq. 2).
        """
        u, inside = x, rows._replace(gate=torch.ones_like(rows.gate))
        for norm, ffn in zip(self.norms, self.ffns):
            u = u + ffn(norm(u, rows), inside) + ffn.b_out.index_select(0, rows.expert)
        return rows.gate * (u - x)

    def biases(self, gates):
        """Zeros: a stack adds its biases before the gate."""
        return gates.new_zeros(len(gates), self.ffns[0].b_out.shape[1])


class ExpertNorm(nn.Module):
    """Layer norm with weights per expert: (N, D) -> (N, D)."""

    def __init__(self, E: int, D: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, D))
        self.bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, u, rows: Rows):
        scale = self.weight.index_select(0, rows.expert)
        shift = self.bias.index_select(0, rows.expert)
        return F.layer_norm(u, u.shape[1:]) * scale + shift


def ragged_linear(x, w, rows: Rows):
    """Multiplies each expert's rows by its matrix: x (N, I), w (E, I, O) -> (N, O), in autocast's dtype if enabled.

    Spare rows are not multiplied; their outputs and gradients are 0.
    """
    dtype = matmul_dtype(x)
    x, w = x.to(dtype), w.to(dtype)
    if not has_grouped_mm(x, w):
        counts = rows.counts.tolist()
        spare = len(x) - sum(counts)
        parts = x.split([*counts, spare])
        products = [*map(torch.matmul, parts, w)]
        products.append(x.new_zeros(spare, w.shape[2]))
        return torch.cat(products)
    ends = rows.counts.cumsum(0, dtype=torch.int32)
    if rows.used is None:
        return F.grouped_mm(x, w, offs=ends)
    x = torch.where(rows.used, x, 0)  # the kernel leaves spare rows unwritten, in the gradient too
    return torch.where(rows.used, F.grouped_mm(x, w, offs=ends), 0)


def matmul_dtype(x) -> torch.dtype:
    """The dtype of matrix products of x: autocast's if enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def has_grouped_mm(x, w) -> bool:
    """Whether `grouped_mm` supports these: bf16, rows a multiple of 16 bytes; on a CPU fp32 too, if not compiled."""
    on_cpu, dtypes = x.device.type == "cpu", [torch.bfloat16]
    if on_cpu:  # compiled, torch 2.13's gradients of stacks in bf16 were NaN
        dtypes = [] if torch.compiler.is_compiling() else [torch.bfloat16, torch.float32]
    _, I, O = w.shape  # noqa: E741
    aligned = 16 // x.element_size()
    whole = I % aligned == 0 and O % aligned == 0
    few = on_cpu or len(w) < 1024  # the limit of CUDA's kernel
    return x.dtype in dtypes and whole and few and len(x) > 0


def add_rows(out, rows: Rows, y):
    """Adds each row of y (N, D) to its token in out (S, D)."""
    y = y.to(out.dtype)
    if y.is_cuda:  # compiled, it adds in place; scatter_add is faster on a CPU
        return out.index_add(0, rows.token, y)
    token = rows.token.unsqueeze(1).expand_as(y)
    return out.scatter_add(0, token, y)


# ---------------------------------------------------------------------------------------------------------------------
# The papers' layers, and what all models share


def xmoe_layer(config, V: int, gelu: str) -> MoE:
    """XMoE's layer, which replaces an FFN. All routers get the same parameters and FLOPs (eq. 6): cutting the FFN width
    into `split` parts gives `split` times as many experts, choices (unless `top_k` is set) and capacity.

    Raises ValueError if split does not divide the width.
    """
    router = find_router(config.router)
    split = config.split or router.split
    if config.ffn_size % split:
        raise ValueError(f"split = {split} does not divide ffn_size = {config.ffn_size}")
    at_test = config.capacity if config.eval_capacity is None else config.eval_capacity
    E = config.expert_ffns * split
    top_k = split if config.top_k is None else config.top_k
    return MoE(
        router(config, E, top_k, V),
        Experts(E, config.n_embd, config.ffn_size // split, gelu),
        capacity_factor=config.capacity * split,
        at_test=at_test * split,
    )


def x_moe_layer(config, V: int, gelu: str) -> MoE:
    """X-MoE's layer (4.1), which stands between two encoder layers: `experts` stacks."""
    size, layers = (config.experts, config.n_embd, config.expert_size, gelu), config.expert_layers
    top_k = 1 if config.top_k is None else config.top_k
    return MoE(
        find_router(config.router)(config, config.experts, top_k, V, x_moe=True),
        Stacks(*size, layers) if layers else Experts(*size),
        capacity_factor=config.capacity_factor,
        at_test=config.capacity_factor,
    )


def output_logits(h, w, bias=None):
    """h (..., D), w (V, D) -> (..., V). CUDA pads V to a multiple of 64: rows of 50,257 logits would be unaligned."""
    if not h.is_cuda:
        return F.linear(h, w, bias)
    V, spare = len(w), -len(w) % 64
    w = F.pad(w.to(matmul_dtype(h)), (0, 0, 0, spare))
    if bias is not None:
        bias = F.pad(bias, (0, spare))
    return F.linear(h, w, bias)[..., :V]


def cross_entropy(logits, targets, label_smoothing=0.0, per_token=False):
    """logits (M, V), targets (M,) -> mean cross entropy in nats, or (M,) per token; in fp32 even under autocast.

    Targets of -100 do not count. The mean over no targets is 0.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    reduction = "none" if per_token else "sum"
    loss = F.cross_entropy(logits.to(dtype), targets, label_smoothing=label_smoothing, reduction=reduction)
    return loss if per_token else loss / (targets != -100).sum().clamp(min=1)


class SparseModel(nn.Module):
    """What models with MoE layers share: initialization, activation checkpointing, and routing at test."""

    def recompute_layers(self):
        """Activation checkpointing: each layer keeps only its input, and the backward pass computes it again."""
        for model in self.modules():
            lists = [part for part in model.children() if isinstance(part, nn.ModuleList)]
            for layer in chain(*lists) if isinstance(model, SparseModel) else ():
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def init_weights(self, smaller: float = 1.0):
        """Draws matrices from normal distributions and zeroes biases; routers and norms have their own initialization.

        smaller: a divisor for matrices that write to the residual stream; as in GPT-2, larger in deeper models.
        """
        for name, p in self.named_parameters():
            if any(part in name for part in ("router", "ln_", "norms", "gate_w")):
                continue
            if name.endswith(("bias", "b_in", "b_out")):
                nn.init.zeros_(p)
            else:
                writes = name.endswith(("proj.weight", "w_out"))
                nn.init.normal_(p, std=self.config.init_std / (smaller if writes else 1))
            if name.endswith("w_out") and ".ffns." in name:  # as in BASE Layers: a stack starts as the identity
                nn.init.zeros_(p)

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def limited_at_test(self) -> bool:
        """Whether a full expert can drop tokens at test."""
        return any(moe.eval_capacity_factor < moe.router.E for moe in self.moe_layers)

    def after_step(self, sum_over_processes):
        """Call after every optimizer step: routers use and clear their tallies, and restore what they keep fixed."""
        for router in (moe.router for moe in self.moe_layers):
            tallies = [getattr(router, name) for name in router.tallies]
            for tally in tallies:
                tally.copy_(sum_over_processes(tally))
            router.after_step()
            for tally in tallies:
                tally.zero_()

    def add_sparse(self, depth: int, x, total, ids, nonpad):
        """Adds the sparse layers after layer `depth` to x (X-MoE eq. 2), and their routers' losses to total."""
        for moe, after in zip(self.moes, self.moe_after):
            if after == depth:
                y, router_loss = moe(x, ids, nonpad)
                x, total = x + y.to(x.dtype), total + router_loss
        return x, total

    @contextmanager
    def no_limit(self):
        """Context manager: experts have no capacity limit at test."""
        before = [moe.eval_capacity_factor for moe in self.moe_layers]
        for moe in self.moe_layers:
            moe.eval_capacity_factor = math.inf
        try:
            yield
        finally:
            for moe, factor in zip(self.moe_layers, before):
                moe.eval_capacity_factor = factor


# ---------------------------------------------------------------------------------------------------------------------
# Dense layers


class FFN(nn.Module):
    """(B, T, D) -> (B, T, D) through `ffn_size` GELU units. gelu: "tanh" (GPT-2) or "none", the erf form (XLM-R)."""

    def __init__(self, config, gelu: str):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.ffn_size)
        self.proj = nn.Linear(config.ffn_size, config.n_embd)
        self.gelu = gelu

    def forward(self, h):
        return self.proj(F.gelu(self.fc(h), approximate=self.gelu))


KeysValues = tuple[Tensor, Tensor]  # of an attention: (B, H, T, D / H) each


class SelfAttention(nn.Module):
    """Multi-head self-attention over (B, T, D), bidirectional or causal.

    biased: adds the gated relative position bias to the scores (XLM-E 3.3). dropout: of the attention weights.
    """

    def __init__(self, config, causal: bool, dropout: float, biased=False):
        super().__init__()
        D, self.n_head = config.n_embd, config.n_head
        if D % self.n_head:
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {D}")
        self.dropout, self.causal = dropout, causal
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        if biased:
            self.gate = nn.Parameter(torch.empty(2, D // self.n_head))  # u and v, shared by the heads
            self.gate_w = nn.Parameter(torch.ones(self.n_head))  # w

    def forward(self, h, mask=None, rel_bias=None, past: KeysValues | None = None):
        """-> (B, T, D), and the keys and values of all positions so far.

        mask (B, 1, 1, T) bool: True where a position may be attended to, None: everywhere; rel_bias (H, T, T): d;
        past: keys and values of the positions before h, which then has T = 1.
        """
        qkv = self.qkv(h).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv if rel_bias is None else qkv.contiguous()  # (B, H, T, D / H) each; one copy beats three
        if past is not None:
            before_k, before_v = past
            k = torch.cat([before_k, k], dim=2)
            v = torch.cat([before_v, v], dim=2)
        dropout = self.dropout if self.training else 0.0
        if rel_bias is not None:
            gates = (q @ self.gate.t()).sigmoid()  # (B, H, T, 2)
            update, reset = gates.unbind(3)
            # r = d + g_u d + (1 - g_u) w g_r d: the gates of a query scale its row of d.
            scale = 1 + update + (1 - update) * self.gate_w[:, None] * reset
            y = biased_attention(q, k, v, scale, rel_bias, mask, dropout)
        else:
            causal = self.causal and past is None
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).flatten(2)), (k, v)


class CrossAttention(nn.Module):
    """Multi-head attention from (B, T, D) to the keys and values of a source."""

    def __init__(self, config):
        super().__init__()
        D, self.n_head = config.n_embd, config.n_head
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)

    def keys_values(self, h) -> KeysValues:
        """(B, N, D) -> (B, H, N, D / H) each"""
        kv = self.kv(h).unflatten(2, (2, self.n_head, -1))
        return tuple(kv.permute(2, 0, 3, 1, 4))

    def forward(self, h, source: KeysValues, mask):
        """(B, T, D) -> (B, T, D); mask (B, 1, 1, N) bool: True where a key may be attended to; None: everywhere."""
        q = self.q(h).unflatten(2, (self.n_head, -1))
        q = q.transpose(1, 2)  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, *source, mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class RelativePositionBias(nn.Module):
    """d_{i-j} of XLM-E 3.3: a learned bias per head and distance bucket, as in T5 (bidirectional)."""

    def __init__(self, n_head: int, buckets=32, longest=128):
        super().__init__()
        self.table, self.longest = nn.Embedding(buckets, n_head), longest

    def forward(self, T: int):
        """(H, T, T)"""
        position = torch.arange(T, device=self.table.weight.device)
        bucket = self.bucket(position[None, :] - position[:, None])  # (T, T)
        return self.table(bucket).permute(2, 0, 1)

    def bucket(self, offset):
        """j - i -> bucket: half of the buckets per sign; the first half of those exact, the others logarithmic."""
        half = self.table.num_embeddings // 2
        exact, far = half // 2, offset.abs()
        times = torch.log(far.clamp(min=1) / exact)
        ratio = times / math.log(self.longest / exact)
        coarse = exact + (ratio * (half - exact)).long()
        coarse = coarse.clamp(max=half - 1)
        return torch.where(far < exact, far, coarse) + half * (offset > 0)


def biased_attention(q, k, v, scale, rel_bias, mask, dropout: float):
    """softmax(q k / sqrt(d_k) + scale_i d_ij) v (XLM-E eqs. 7, 8). q, k, v (B, H, T, d_k); scale (B, H, T).

    rel_bias (H, T, T); mask (B, 1, 1, T) bool.
    """
    bias = scale.unsqueeze(3) * rel_bias
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf)
    bias = bias.to(q.dtype)
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout)
    # On a CPU, torch decomposes its function into more operations than these.
    heads = q.shape[:2]
    q, k, v, bias = (x.flatten(0, 1) for x in (q, k, v, bias))  # (B * H, T, d_k), and (B * H, T, T)
    scores = torch.baddbmm(bias, q, k.mT, alpha=q.shape[2] ** -0.5)
    y = F.dropout(scores.softmax(dim=2), dropout) @ v
    return y.unflatten(0, heads)


# ---------------------------------------------------------------------------------------------------------------------
# The decoder language model


class Block(nn.Module):
    """GPT-2's pre-norm block. cross: with cross-attention to a source.

    attention_dropout: whether the attention weights have dropout too.
    """

    def __init__(self, config, V: int, sparse: bool, causal=True, cross=False, attention_dropout=True):
        super().__init__()
        D = config.n_embd
        self.ln_1 = nn.LayerNorm(D)
        self.attn = SelfAttention(config, causal, config.dropout * attention_dropout)
        self.cross = None
        if cross:
            self.ln_c, self.cross = nn.LayerNorm(D), CrossAttention(config)
        self.ln_2 = nn.LayerNorm(D)
        self.ffn = xmoe_layer(config, V, "tanh") if sparse else FFN(config, "tanh")
        self.dropout, self.sparse = nn.Dropout(config.dropout), sparse

    def forward(self, x, ids, nonpad=None, mask=None, past: KeysValues | None = None, source: KeysValues | None = None):
        """x (R, T, D), ids (R, T) -> x, the router's loss, and the keys and values of all positions so far.

        nonpad: see `MoE`; past: see `SelfAttention`. mask: True where positions (R, 1, 1, T), or with cross-attention
        those of the source (B, 1, 1, N), may be attended to. R is B, or B * K where the K beams of a sentence are
        adjacent rows that share its source.
        """
        self_mask = None if self.cross else mask
        y, keys_values = self.attn(self.ln_1(x), self_mask, past=past)
        x = x + self.dropout(y)
        if self.cross:
            B, D = len(source[0]), x.shape[2]
            h = self.ln_c(x).view(B, -1, D)  # (B, K * T, D): the order of queries does not matter
            y = self.cross(h, source, mask)
            x = x + self.dropout(y.view_as(x))
        h, router_loss = self.ln_2(x), 0.0
        if self.sparse:
            y, router_loss = self.ffn(h, ids, nonpad)
        else:
            y = self.ffn(h)
        x = x + self.dropout(y).to(x.dtype)  # a token that no expert kept passes on the residual stream
        return x, router_loss, keys_values


def sparse_blocks(config, layers: int) -> list[bool]:
    """Which blocks have experts: every `moe_every`-th, up to the last. Raises ValueError if none has."""
    sparse = config.router != "dense"
    if sparse and config.moe_every > layers:
        raise ValueError(f"moe_every = {config.moe_every} leaves no block of {layers} with experts")
    return [sparse and depth % config.moe_every == 0 for depth in range(1, 1 + layers)]


class GPT(SparseModel):
    """Decoder-only language model."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size = config, V
        self.wte = nn.Embedding(V, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        sparse = sparse_blocks(config, config.n_layer)
        self.blocks = nn.ModuleList(Block(config, V, has_experts) for has_experts in sparse)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.bias = nn.Parameter(torch.zeros(V)) if config.frequency_bias else None  # GPT-2 has none
        self.init_weights(math.sqrt(2 * config.n_layer))

    def hidden(self, ids, nonpad=None, states=None):
        """ids (B, T) -> final hidden states (B, T, D), the routers' losses summed over layers (scalar).

        nonpad: see `MoE`; padding must be at the end of rows. states: a list that receives each block's input.
        Raises ValueError if T > block_size.
        """
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        x = self.dropout(self.wte(ids) + self.wpe.weight[:T])
        total = self.ln_f.weight.new_zeros(())
        for block in self.blocks:
            if states is not None:
                states.append(x)
            x, router_loss, _ = block(x, ids, nonpad)
            total = total + router_loss
        return self.ln_f(x), total

    def forward(self, ids, targets=None):
        """ids (B, T), targets (B, T) -> mean cross entropy, or logits (B, T, V) without targets; routers' losses."""
        h, router_loss = self.hidden(ids)
        logits = output_logits(h, self.wte.weight, self.bias)
        if targets is None:
            return logits, router_loss
        return cross_entropy(logits.flatten(0, 1), targets.flatten()), router_loss

    @torch.no_grad()
    def generate(self, ids, new_tokens: int, temperature=1.0, top_k=50, end=-1):
        """ids (B, T) -> (B, T + new_tokens), sampled from the top_k of softmax(logits / temperature).

        Call eval() first. Stops once every row has the token `end` (-1: never). Experts have no capacity limit, so a
        token's experts depend on its own past alone, not on the rest of the batch.
        """
        T, longest = ids.shape[1], self.config.block_size
        with self.no_limit():
            for _ in range(new_tokens):
                h, _ = self.hidden(ids[:, -longest:])  # no cache: a sample is short
                logits = F.linear(h[:, -1], self.wte.weight, self.bias)  # (B, V)
                logits = logits.float() / temperature
                best = logits.topk(min(top_k, logits.shape[1])).values
                logits = logits.masked_fill(logits < best[:, -1:], -math.inf)
                drawn = logits.softmax(dim=1).multinomial(1)
                ids = torch.cat([ids, drawn], dim=1)
                if (ids[:, T:] == end).any(dim=1).all():
                    break
        return ids


# ---------------------------------------------------------------------------------------------------------------------
# The encoder


class EncoderLayer(nn.Module):
    """XLM-R's post-norm layer."""

    def __init__(self, config):
        super().__init__()
        self.attn = SelfAttention(config, causal=False, dropout=config.dropout, biased=config.relative_bias)
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.ffn = FFN(config, "none")
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, rel_bias):
        y, _ = self.attn(x, mask, rel_bias)
        x = self.ln_1(x + self.dropout(y))
        y = self.ffn(x)
        return self.ln_2(x + self.dropout(y))


def layers_before_sparse(config) -> list[int]:
    """The layers, counted from 1, that a sparse layer follows. Raises ValueError if `moe_after` is invalid."""
    if config.router == "dense":
        return []
    if not config.moe_after or not all(1 <= depth <= config.n_layer for depth in config.moe_after):
        raise ValueError(f"moe_after must name layers from 1 to n_layer = {config.n_layer}, not {config.moe_after}")
    return sorted(config.moe_after)


class Encoder(SparseModel):
    """XLM-R's encoder, with a sparse layer x + MoE(x) after each layer in `moe_after` (X-MoE eq. 2)."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(PAD + 1 + config.block_size, D)  # as in XLM-R, row 0 is unused and row 1 is for padding
        self.token_type = nn.Parameter(torch.empty(1, D))  # there is only one type
        self.ln_e = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.rel_bias = RelativePositionBias(config.n_head) if config.relative_bias else None  # shared by all layers
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layer))
        self.moe_after = layers_before_sparse(config)
        self.moes = nn.ModuleList(x_moe_layer(config, V, "none") for _ in self.moe_after)
        self.init_weights()

    def forward(self, ids, nonpad=None, states=None):
        """ids (B, T) -> hidden states (B, T, D), the routers' losses summed over sparse layers (scalar).

        nonpad (S,): flat indices of non-padding tokens; None if there is no padding. No token attends to padding.
        states: a list that receives the embeddings and the output of each layer, including the sparse one after it.
        Raises ValueError if T > block_size.
        """
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        mask = None
        positions = torch.arange(PAD + 1, PAD + 1 + T, device=ids.device)
        if nonpad is not None:
            # not ids != PAD: XLM-E's generator may sample a PAD
            mask = nonpad_mask(ids, nonpad)  # (B, T)
            positions = PAD + mask.cumsum(dim=1) * mask
            mask = mask[:, None, None]
        x = self.wte(ids) + self.wpe(positions) + self.token_type
        x = self.dropout(self.ln_e(x))
        rel_bias = self.rel_bias(T) if self.rel_bias else None
        total = self.ln_e.weight.new_zeros(())
        for depth, layer in enumerate(self.layers, 1):
            if states is not None:
                states.append(x)
            x = layer(x, mask, rel_bias)
            x, total = self.add_sparse(depth, x, total, ids, nonpad)
        if states is not None:
            states.append(x)
        return x, total


def nonpad_mask(ids, nonpad):
    """ids (B, T), nonpad (S,) flat indices -> (B, T) bool, True there."""
    mask = ids.new_zeros(ids.numel(), dtype=torch.bool)
    return mask.index_fill_(0, nonpad, True).view(ids.shape)


class MaskedLM(SparseModel):
    """An encoder with XLM-R's head, applied to the M masked tokens only."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.encoder = Encoder(config, V)
        self.dense = nn.Linear(D, D)
        self.ln_h = nn.LayerNorm(D)
        self.bias = nn.Parameter(torch.zeros(V))  # the output matrix is tied to the embeddings
        nn.init.normal_(self.dense.weight, std=config.init_std)
        nn.init.zeros_(self.dense.bias)

    def forward(self, ids, masked, targets=None, nonpad=None):
        """-> mean cross entropy, or logits (M, V) without targets; routers' losses.

        ids (B, T), masked (M,) flat indices, targets (M,) the tokens there, nonpad: see `Encoder`.
        """
        x, router_loss = self.encoder(ids, nonpad)
        x = x.flatten(0, 1).index_select(0, masked)  # (M, D)
        x = self.ln_h(F.gelu(self.dense(x)))
        logits = output_logits(x, self.encoder.wte.weight, self.bias)
        return logits if targets is None else cross_entropy(logits, targets), router_loss


# ---------------------------------------------------------------------------------------------------------------------
# The encoder-decoder (XMoE 4.2). The papers just say "Transformer"; ours is pre-norm with sinusoidal positions, and one
# matrix embeds sources and translations and produces the logits. B sentences, K beams of each, R rows of the decoder
# (B, or B * K), N tokens of a source, T of a translation, M non-padding tokens of all translations.


class Source(NamedTuple):
    """An encoded source, as the decoder attends to it."""

    keys_values: list[KeysValues]  # for each decoder block
    mask: Tensor | None  # (B, 1, 1, N) bool, False at padding; None: no padding

    def sentences(self, rows) -> "Source":
        """Keeps only these sentences."""
        mask = None if self.mask is None else self.mask[rows]
        return Source(rows_of(self.keys_values, rows), mask)


def rows_of(keys_values: list[KeysValues], rows) -> list[KeysValues]:
    return [(k[rows], v[rows]) for k, v in keys_values]


class Translator(SparseModel):
    """Encoder-decoder for translation."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.moe_after = layers_before_sparse(config) if config.moe_after else []
        self.wte = nn.Embedding(V, D)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = self.blocks(config.n_layer, decoder=False)
        self.moes = nn.ModuleList(x_moe_layer(config, V, "tanh") for _ in self.moe_after)
        self.decoder = self.blocks(config.decoder_layers, decoder=True)
        self.ln_e = nn.LayerNorm(D)
        self.ln_d = nn.LayerNorm(D)
        self.init_weights(math.sqrt(2 * max(config.n_layer, config.decoder_layers)))

    def blocks(self, layers: int, decoder: bool) -> nn.ModuleList:
        config, sparse = self.config, [False] * layers
        if not config.moe_after and (config.decoder_moe or not decoder):
            sparse = sparse_blocks(config, layers)
        kind = dict(causal=decoder, cross=decoder, attention_dropout=False)
        return nn.ModuleList(Block(config, self.vocab_size, has_experts, **kind) for has_experts in sparse)

    @property
    def moe_names(self) -> list[str]:
        """The places of the MoE layers, in the order of `moe_layers`."""
        names = [f"encoder block {i}" for i, block in enumerate(self.encoder, 1) if block.sparse]
        names += [f"after encoder block {depth}" for depth in self.moe_after]
        names += [f"decoder block {i}" for i, block in enumerate(self.decoder, 1) if block.sparse]
        return names

    def embed(self, ids, first: int = 0):
        """ids (B, T), starting at position `first` -> (B, T, D)"""
        x = math.sqrt(self.config.n_embd) * self.wte(ids)
        position = torch.arange(first, first + ids.shape[1], device=ids.device)
        waves = sinusoids(position, self.config.n_embd)
        return self.dropout(x + waves.to(x.dtype))

    def encode(self, ids, nonpad=None) -> tuple[Source, Tensor]:
        """ids (B, N), nonpad (S,) flat indices of non-padding tokens or None -> source, routers' losses."""
        mask = None
        if nonpad is not None:
            mask = nonpad_mask(ids, nonpad)[:, None, None]
        x = self.embed(ids)
        total = self.ln_e.weight.new_zeros(())
        for depth, block in enumerate(self.encoder, 1):
            x, router_loss, _ = block(x, ids, nonpad, mask)
            x, total = self.add_sparse(depth, x, total + router_loss, ids, nonpad)
        h = self.ln_e(x)
        keys_values = [block.cross.keys_values(h) for block in self.decoder]
        return Source(keys_values, mask), total

    def decode(self, ids, source: Source, past: list[KeysValues] | None = None, nonpad=None):
        """ids (R, T) -> hidden states (R, T, D), routers' losses, the `past` to pass with the next ids (R, 1)."""
        x = self.embed(ids, first=past[0][0].shape[2] if past else 0)
        total = self.ln_d.weight.new_zeros(())
        present = []
        for i, block in enumerate(self.decoder):
            block_past = past[i] if past else None
            x, router_loss, keys_values = block(x, ids, nonpad, source.mask, block_past, source.keys_values[i])
            total = total + router_loss
            present.append(keys_values)
        return self.ln_d(x), total, present

    def forward(self, source, source_nonpad, target, target_nonpad, labels=None):
        """-> mean cross entropy, smoothed in training, or logits (M, V) without labels; routers' losses.

        source (B, N), target (B, T), labels (M,): the token that follows each non-padding token of target.
        source_nonpad, target_nonpad: flat indices of non-padding tokens, ascending; None if there is no padding.
        """
        encoded, router_loss = self.encode(source, source_nonpad)
        h, more, _ = self.decode(target, encoded, nonpad=target_nonpad)
        h = h.flatten(0, 1)
        if target_nonpad is not None:
            h = h.index_select(0, target_nonpad)
        logits = output_logits(h, self.wte.weight)
        if labels is None:
            return logits, router_loss + more
        smoothing = self.config.label_smoothing if self.training else 0.0
        return cross_entropy(logits, labels, smoothing), router_loss + more

    def log_probabilities(self, h):
        """(R, D) -> (R, V) of the next token, in fp32 even under autocast: beams differ by little."""
        w = self.wte.weight
        with torch.autocast(h.device.type, enabled=False):
            logits = F.linear(h.to(w.dtype), w)
        return logits.float().log_softmax(dim=1)


def sinusoids(position, D: int):
    """(T,) -> (T, D): half sines, half cosines (Vaswani et al. 3.5)"""
    i = torch.arange(0, D, 2, device=position.device)
    turn = torch.exp(-math.log(10_000) / D * i)
    angle = position.unsqueeze(1) * turn  # (T, D / 2)
    waves = angle.sin(), angle.cos()
    both = torch.cat(waves, dim=1)
    return both[:, :D]  # D may be odd
