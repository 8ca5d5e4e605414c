"""The sparse layer, and Transformers that have it: a decoder (GPT-2's layout), an encoder (XLM-R's), and both together.

XMoE's experts stand in place of the FFN of every `moe_every`-th block; X-MoE's sparse layers stand between the layers
of an encoder, after those that `moe_after` names. Read `MoE` first: it is how tokens reach their experts. A model reads
the constants of a script's Config by name. Tensor letters: B batch, T sequence length, S tokens that are not padding, D
model width, H heads, E experts, F inner width of one expert, C expert capacity, K experts per token, N rows that
experts keep, V vocabulary, M masked tokens.
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

from routers import NOT_CHOSEN, ROUTERS, RouterError, check_priority

PAD = 1  # the encoder's `<pad>`, as in XLM-R, whose positions begin after it
MIN_CAPACITY = 4

# ---------------------------------------------------------------------------------------------------------------------
# The sparse layer: router (routers.py), capacity, rows, experts, sum


class MoE(nn.Module):
    """A sparse FFN: a router chooses experts for each token, and each expert serves as many as its capacity allows.

    capacity_factor, at_test: the papers' gamma, in training and at test; inf is no limit.
    """

    def __init__(self, router: nn.Module, experts: "Experts | Stacks", capacity_factor: float, at_test: float):
        super().__init__()
        self.router, self.experts = router, experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, at_test
        self.watchers = []  # called with (self, h, routing, kept), where routing is measured

    def forward(self, h, ids, real=None, first=0):
        """h (B, T, D), ids (B, T), at positions from `first` on -> (B, T, D), balance loss.

        real (S,): places in B * T of the tokens that are not padding, ascending; None if all are. No expert serves
        padding, and it fills no capacity. What stands there comes out as 0.
        """
        B, T, D = h.shape
        position = torch.arange(first, first + T, device=h.device).repeat(B)
        flat, ids = h.flatten(0, 1), ids.flatten()
        if real is not None:
            flat = flat.index_select(0, real)
            ids, position = ids[real], position[real]
        routing = self.router(flat, ids, position)
        if may_ask(h) and not torch.compiler.is_compiling():
            check_choices(self.router, routing)
        S, E = routing.weight.shape
        C = self.capacity(S)
        kept = within_capacity(routing.priority, C)  # (S, E)
        for watch in self.watchers:
            watch(self, flat, routing, kept)
        gates = routing.weight * kept
        most = min(S * self.router.max_choices, E * C)  # rows that can be kept; where all can, waiting costs a GPU less
        room = None if may_ask(h) or most == S * E else most
        rows = kept_rows(gates, kept, room)
        y = self.experts(flat.index_select(0, rows.token), rows)  # (N, D), weighed
        y = add_rows(self.experts.biases(gates), rows, y)  # (S, D) in the gates' type (fp32); XMoE eq. 2
        if real is not None:
            y = y.new_zeros(B * T, D).index_copy(0, real, y)
        return y.view_as(h), routing.balance_loss

    def capacity(self, S: int) -> int:
        """C, how many of S tokens one expert may serve (XMoE eq. 3): at most all, at least 4; gamma inf is no limit.

        What is above a whole number by 1e-7 or less is rounding: gamma 1.1 of 100 tokens over 10 experts is 11, not 12.
        """
        gamma = self.capacity_factor if self.training else self.eval_capacity_factor
        E = self.router.E
        if gamma >= E:
            return S
        rows = math.ceil(gamma * S / E - 1e-7)
        return min(S, max(MIN_CAPACITY, rows))


def may_ask(x) -> bool:
    """Whether the host may read a number off the device of x without stalling it."""
    return not x.is_cuda


def check_choices(router: nn.Module, routing):
    """Raises RouterError where a routing is not what its class says. A GPU makes room by that, and does not check."""
    check_priority(router, routing.priority, routing.probs)
    most = int(routing.wanted.sum(dim=1).max()) if len(routing.priority) else 0
    if most > router.max_choices:
        name = type(router).__name__
        raise RouterError(f"{name} chose {most} experts for a token, but its class says most = {router.most}")


def within_capacity(priority, capacity: int):
    """(S, E) priorities -> (S, E) bool: of the tokens that chose it, each expert keeps the first C by priority.

    Among equal priorities the earlier token comes first. Nothing is sorted: the C-th highest is an expert's bar, and
    of the tokens exactly at the bar the earliest take the places that are left.
    """
    if capacity >= len(priority):
        return priority > NOT_CHOSEN
    priority = priority.t().contiguous()  # (E, S), so that the tokens of an expert lie together
    highest = priority.topk(capacity, dim=1, sorted=False).values  # (E, C)
    bar = highest.amin(dim=1, keepdim=True)  # (E, 1)
    above = priority > bar
    tied = (priority == bar) & (bar > NOT_CHOSEN)
    places_left = capacity - above.sum(dim=1, keepdim=True)  # (E, 1)
    # Tied tokens are counted through all experts at once: row by row, torch 2.11 cannot compile that for a GPU.
    count = tied.flatten().cumsum(0, dtype=torch.int32).view_as(tied)
    number = count - count[:, :1] + tied[:, :1]  # of a token among the expert's tied ones, the earliest is 1
    return (above | tied & (number <= places_left)).t()


class Rows(NamedTuple):
    """The N (token, expert) pairs that are kept, sorted by expert.

    On a CPU, N is their number. On a GPU the host does not wait for it (unless every token might go to every expert),
    and N is the most that there can be: the rows after the last expert's are spare (any token and expert, gate 0).
    """

    token: Tensor  # (N,)
    expert: Tensor  # (N,)
    gate: Tensor  # (N, 1)
    counts: Tensor  # (E,) rows of each expert
    used: Tensor | None  # (N, 1) bool: False for spare rows, which lie at the end; None: there are none


def kept_rows(gates, kept, room: int | None = None) -> Rows:
    """gates (S, E), kept (S, E) bool -> Rows.

    room: how many rows to make, with spare ones after the kept ones; None: wait for the number of those that are kept.
    """
    S, E = kept.shape
    counts = kept.sum(dim=0)  # (E,)
    by_expert = kept.t().flatten()  # (E * S,)
    if room is None:
        place, used = by_expert.nonzero(), None
    else:
        row = torch.arange(room, device=kept.device).unsqueeze(1)
        used = row < counts.sum()
        place = torch.nonzero_static(by_expert, size=room)
        # Were spare rows all one token's or one expert's, adding up their zeros would take long.
        place = torch.where(used, place, row % E * S + row % S)
    place = place.squeeze(1)  # (N,)
    gate = gates.t().flatten()
    gate = gate.index_select(0, place).unsqueeze(1)  # (N, 1)
    if used is not None:
        gate = torch.where(used, gate, 0.0)
    return Rows(place % S, place // S, gate, counts, used)


class Experts(nn.Module):
    """E experts, each a bare FFN (XMoE). A row of w_in is what a unit reads, a row of w_out what it writes."""

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
        """(N, D) -> W_in x + b_in, (N, F), which XMoE's figure 6 looks at."""
        a = ragged_linear(x, self.w_in.mT, rows)
        if not x.is_cuda or a.dtype != torch.bfloat16:
            return a + self.b_in.index_select(0, rows.expert)
        # That gradient would be added up row by row, in a fifth of the layer's time: so this is a product with ones.
        b = F.pad(self.b_in.unsqueeze(1), (0, 0, 0, 7))  # (E, 8, F): a grouped product needs rows of 16 bytes
        return a + ragged_linear(x.new_ones(len(x), 8), b, rows)

    def biases(self, gates):
        """(S, E) -> the g b_out of all experts, (S, D), as one product: row by row it would take much memory."""
        return (gates @ self.b_out.to(gates.dtype)).to(gates.dtype)


class Stacks(nn.Module):
    """E experts, each a stack of FFNs with a norm before and a residual around it (X-MoE 4.1)."""

    def __init__(self, E: int, D: int, F_: int, gelu: str, layers: int):
        super().__init__()
        self.norms = nn.ModuleList(ExpertNorm(E, D) for _ in range(layers))
        self.ffns = nn.ModuleList(Experts(E, D, F_, gelu) for _ in range(layers))

    def forward(self, x, rows: Rows):
        """(N, D) -> g (u - x), (N, D), where u is what the stack makes of x.

        So h + g (u - x) is BASE layers' g u + (1 - g) h (X-MoE eq. 2).
        """
        u, inside = x, rows._replace(gate=torch.ones_like(rows.gate))
        for norm, ffn in zip(self.norms, self.ffns):
            u = u + ffn(norm(u, rows), inside) + ffn.b_out.index_select(0, rows.expert)
        return rows.gate * (u - x)

    def biases(self, gates):
        """None are left to add: a stack adds its own before the gate weighs it."""
        return gates.new_zeros(len(gates), self.ffns[0].b_out.shape[1])


class ExpertNorm(nn.Module):
    """A layer norm for each expert's rows: (N, D) -> (N, D)."""

    def __init__(self, E: int, D: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, D))
        self.bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, u, rows: Rows):
        scale = self.weight.index_select(0, rows.expert)
        shift = self.bias.index_select(0, rows.expert)
        return F.layer_norm(u, u.shape[1:]) * scale + shift


def ragged_linear(x, w, rows: Rows):
    """Each expert's rows times its own matrix: x (N, I), w (E, I, O) -> (N, O), in autocast's type where that is on.

    Spare rows are not multiplied: what comes out of them, forwards and backwards, is 0.
    """
    dtype = product_type(x)
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
    x = torch.where(rows.used, x, 0)  # the kernel leaves spare rows unwritten, also in the gradient that comes back
    return torch.where(rows.used, F.grouped_mm(x, w, offs=ends), 0)


def product_type(x) -> torch.dtype:
    """The type in which x is multiplied by a matrix: autocast's where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def has_grouped_mm(x, w) -> bool:
    """Whether `grouped_mm` takes these: bf16 with rows of a multiple of 16 bytes, on a CPU fp32 too if not compiled."""
    on_cpu, dtypes = x.device.type == "cpu", [torch.bfloat16]
    if on_cpu and not torch.compiler.is_compiling():
        dtypes.append(torch.float32)
    _, I, O = w.shape  # noqa: E741
    aligned = 16 // x.element_size()
    whole = I % aligned == 0 and O % aligned == 0
    few = on_cpu or len(w) < 1024  # CUDA's kernel takes no more groups
    return x.dtype in dtypes and whole and few and len(x) > 0


def add_rows(out, rows: Rows, y):
    """out (S, D) with each row of y (N, D) added to its token."""
    y = y.to(out.dtype)
    if y.is_cuda:  # compiled, it adds in place; on a CPU it is slower
        return out.index_add(0, rows.token, y)
    token = rows.token.unsqueeze(1).expand_as(y)
    return out.scatter_add(0, token, y)


# ---------------------------------------------------------------------------------------------------------------------
# The papers' layers, and what models that have them share


def in_place_of_ffn(config, V: int, gelu: str) -> MoE:
    """XMoE's layer. Every router's experts have the same parameters and FLOPs (eq. 6): cutting an FFN's width into
    `split` parts gives `split` times as many experts, choices (but for a `top_k` of its own) and places.

    Raises ValueError where the width cannot be cut so.
    """
    router = ROUTERS[config.router]
    split = config.split or router.split
    if config.ffn_size % split:
        raise ValueError(f"split = {split} does not divide ffn_size = {config.ffn_size}")
    at_test = config.capacity if config.eval_capacity is None else config.eval_capacity
    E = config.expert_ffns * split
    K = split if config.top_k is None else config.top_k
    return MoE(
        router(config, E, K, V),
        Experts(E, config.n_embd, config.ffn_size // split, gelu),
        capacity_factor=config.capacity * split,
        at_test=at_test * split,
    )


def between_layers(config, V: int, gelu: str) -> MoE:
    """X-MoE's layer (4.1), of `experts` stacks."""
    router = ROUTERS[config.router]
    if router.sees_later and math.isinf(config.capacity_factor):
        raise ValueError(f"router {config.router} chooses by the capacity: give --capacity_factor, such as 1")
    size, layers = (config.experts, config.n_embd, config.expert_size, gelu), config.expert_layers
    K = 1 if config.top_k is None else config.top_k
    return MoE(
        router(config, config.experts, K, V, x_moe=True),
        Stacks(*size, layers) if layers else Experts(*size),
        capacity_factor=config.capacity_factor,
        at_test=config.capacity_factor,
    )


def output_logits(h, w, bias=None):
    """h (..., D), w (V, D) -> (..., V). On CUDA V is filled up to 64s: 50,257 logits would not be aligned in memory."""
    if not h.is_cuda:
        return F.linear(h, w, bias)
    V, spare = len(w), -len(w) % 64
    w = F.pad(w.to(product_type(h)), (0, 0, 0, spare))
    if bias is not None:
        bias = F.pad(bias, (0, spare))
    return F.linear(h, w, bias)[..., :V]


class SparseModel(nn.Module):
    """What models with MoE layers have in common: their start, what routers keep fixed, and routing at test."""

    def init_weights(self, std: float, written_std: float):
        """Draws matrices from normals, and sets biases to 0; routers and norms keep their own start.

        written_std: of the matrices that write to the residual stream. Here `recompute` takes effect, too.
        """
        if getattr(self.config, "recompute", False):  # a model from elsewhere has no such constant
            lists = [part for part in self.children() if isinstance(part, nn.ModuleList)]
            for layer in chain(*lists):  # keeps only its input, and the backward pass computes it again
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        for name, p in self.named_parameters():
            if any(part in name for part in ("router", "ln_", "norms", "gate_w")):
                continue  # these know their own start
            if name.endswith(("bias", "b_in", "b_out")):
                nn.init.zeros_(p)
            else:
                writes = name.endswith(("proj.weight", "w_out"))
                nn.init.normal_(p, std=written_std if writes else std)
            if name.endswith("w_out") and ".ffns." in name:  # as in BASE layers: a stack changes nothing at first
                nn.init.zeros_(p)

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def sees_later(self) -> bool:
        """Whether experts choose among later tokens too: a decoder's perplexity is then no language model's."""
        return any(moe.router.sees_later for moe in self.moe_layers)

    @property
    def limited_at_test(self) -> bool:
        """Whether a choice can be cut at test. False where experts choose tokens: there the limit itself chooses."""
        limited = any(moe.eval_capacity_factor < moe.router.E for moe in self.moe_layers)
        return limited and not self.sees_later

    def after_step(self):
        """To be called after every optimizer step: restores what routers keep fixed."""
        for moe in self.moe_layers:
            moe.router.after_step()

    def add_sparse(self, depth: int, x, total, ids, real):
        """x + MoE(x) for the sparse layers after layer `depth` (X-MoE eq. 2), and total + their balance losses."""
        for moe, after in zip(self.moes, self.moe_after):
            if after == depth:
                y, balance = moe(x, ids, real)
                x, total = x + y, total + balance
        return x, total

    @contextmanager
    def no_limit(self):
        """Inside the `with`, experts have no capacity limit at test, but those that choose their tokens by it."""
        before = [moe.eval_capacity_factor for moe in self.moe_layers]
        for moe in self.moe_layers if not self.sees_later else ():
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
    """Each position of (B, T, D) looks at all others or, causal, at itself and those before it.

    biased: what is added to the scores of a head depends on the distance, gated by the query (XLM-E 3.3). dropout: of
    the attention's weights.
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

    def forward(self, h, mask=None, distance=None, past: KeysValues | None = None):
        """-> (B, T, D), and keys and values of all positions so far.

        mask (B, 1, 1, T) bool: which positions may be looked at, None: all; distance (H, T, T): d; past: keys and
        values of the positions before h, which is then one token of each row.
        """
        qkv = self.qkv(h).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv if distance is None else qkv.contiguous()  # (B, H, T, D / H) each; one copy is faster than three
        if past is not None:
            before_k, before_v = past
            k = torch.cat([before_k, k], dim=2)
            v = torch.cat([before_v, v], dim=2)
        dropout = self.dropout if self.training else 0.0
        if distance is not None:
            gates = (q @ self.gate.t()).sigmoid()  # (B, H, T, 2)
            update, reset = gates.unbind(3)
            # r = d + g_u d + (1 - g_u) w g_r d: the gates only scale the row of d that belongs to their query.
            scale = 1 + update + (1 - update) * self.gate_w[:, None] * reset
            y = biased_attention(q, k, v, scale, distance, mask, dropout)
        else:
            causal = self.causal and past is None
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).flatten(2)), (k, v)


class CrossAttention(nn.Module):
    """Each position of (B, T, D) looks at the keys and values of a source."""

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
        """(B, T, D) -> (B, T, D); mask (B, 1, 1, N) bool: which keys may be looked at; None: all."""
        q = self.q(h).unflatten(2, (self.n_head, -1))
        q = q.transpose(1, 2)  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, *source, mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class RelativePositionBias(nn.Module):
    """d_{i-j} of XLM-E 3.3: a learned number for each head and each bucket of distances, as in T5 (bidirectional)."""

    def __init__(self, n_head: int, buckets=32, longest=128):
        super().__init__()
        self.table, self.longest = nn.Embedding(buckets, n_head), longest

    def forward(self, T: int):
        """(H, T, T)"""
        place = torch.arange(T, device=self.table.weight.device)
        bucket = self.bucket(place[None, :] - place[:, None])  # (T, T)
        return self.table(bucket).permute(2, 0, 1)

    def bucket(self, ahead):
        """j - i -> its bucket: one half for each sign; of a half, one half is exact, the other logarithmic."""
        half = self.table.num_embeddings // 2
        exact, far = half // 2, ahead.abs()
        times = torch.log(far.clamp(min=1) / exact)
        ratio = times / math.log(self.longest / exact)
        coarse = exact + (ratio * (half - exact)).long()
        coarse = coarse.clamp(max=half - 1)
        return torch.where(far < exact, far, coarse) + half * (ahead > 0)


def biased_attention(q, k, v, scale, distance, mask, dropout: float):
    """softmax(q k / sqrt(d_k) + scale_i d_ij) v (XLM-E eqs. 7, 8). q, k, v (B, H, T, d_k); scale (B, H, T).

    distance (H, T, T); mask (B, 1, 1, T) bool.
    """
    bias = scale.unsqueeze(3) * distance
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf)
    bias = bias.to(q.dtype)
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout)
    # On a CPU torch takes its own function apart, into more operations than these.
    heads = q.shape[:2]
    q, k, v, bias = (x.flatten(0, 1) for x in (q, k, v, bias))  # (B * H, T, d_k), and (B * H, T, T)
    scores = torch.baddbmm(bias, q, k.mT, alpha=q.shape[2] ** -0.5)
    y = F.dropout(scores.softmax(dim=2), dropout) @ v
    return y.unflatten(0, heads)


# ---------------------------------------------------------------------------------------------------------------------
# The decoder language model


class Block(nn.Module):
    """GPT-2's: each part reads a norm of the residual stream and adds to it. cross: one part looks at a source.

    attention_dropout: whether the weights of the attention have dropout, too.
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
        self.ffn = in_place_of_ffn(config, V, "tanh") if sparse else FFN(config, "tanh")
        self.dropout, self.sparse = nn.Dropout(config.dropout), sparse

    def forward(self, x, ids, real=None, mask=None, past: KeysValues | None = None, source: KeysValues | None = None):
        """x (R, T, D), ids (R, T) -> x, the balance loss, and keys and values of all positions so far.

        real: see `MoE`; past: see `SelfAttention`. mask: which positions may be looked at, (R, 1, 1, T), or those of
        the source, (B, 1, 1, N). R is B, or B * K where K beams of a sentence lie side by side and share its source.
        """
        own_mask = None if self.cross else mask
        y, so_far = self.attn(self.ln_1(x), own_mask, past=past)
        x = x + self.dropout(y)
        if self.cross:
            B, D = len(source[0]), x.shape[2]
            h = self.ln_c(x).view(B, -1, D)  # (B, K * T, D): queries need no order here
            y = self.cross(h, source, mask)
            x = x + self.dropout(y.view_as(x))
        h, balance = self.ln_2(x), 0.0
        if self.sparse:
            keys, _ = so_far
            y, balance = self.ffn(h, ids, real, first=keys.shape[2] - x.shape[1])
        else:
            y = self.ffn(h)
        return x + self.dropout(y), balance, so_far  # a token that no expert kept passes by on the residual stream


def every_so_many(config, layers: int) -> list[bool]:
    """Which of so many blocks have experts in place of their FFN. Raises ValueError where not even the last has."""
    sparse = config.router != "dense"
    if sparse and config.moe_every > layers:
        raise ValueError(f"moe_every = {config.moe_every} leaves no block of {layers} with experts")
    return [sparse and depth % config.moe_every == 0 for depth in range(1, 1 + layers)]


class GPT(SparseModel):
    """Decoder-only language model. ids (B, T) -> logits (B, T, V), and the balance loss summed over layers (scalar)."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size = config, V
        self.wte = nn.Embedding(V, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        sparse = every_so_many(config, config.n_layer)
        self.blocks = nn.ModuleList(Block(config, V, has_experts) for has_experts in sparse)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.bias = nn.Parameter(torch.zeros(V)) if config.frequency_bias else None  # GPT-2 has none
        # GPT-2: what writes to the residual stream starts smaller, the deeper the model.
        deep = math.sqrt(2 * config.n_layer)
        self.init_weights(config.init_std, config.init_std / deep)

    def hidden(self, ids, real=None, states=None):
        """ids (B, T) -> final hidden states (B, T, D), balance loss.

        real: as in `MoE`; padding must stand at the ends of rows. `states` receives what each block reads, where given.
        Raises ValueError where T > block_size.
        """
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        x = self.dropout(self.wte(ids) + self.wpe.weight[:T])
        total = self.ln_f.weight.new_zeros(())
        for block in self.blocks:
            if states is not None:
                states.append(x)
            x, balance, _ = block(x, ids, real)
            total = total + balance
        return self.ln_f(x), total

    def forward(self, ids):
        h, balance = self.hidden(ids)
        return output_logits(h, self.wte.weight, self.bias), balance

    @torch.no_grad()
    def generate(self, ids, new_tokens: int, temperature=1.0, top_k=50, end=-1):
        """ids (B, T) -> (B, T + new_tokens), sampled from softmax(logits / temperature) over the top_k.

        It stops where every row has had the token `end` (-1: none). There is no capacity limit, so that a token's
        experts depend on its own past and not on what else is in the batch.
        Raises ValueError for a router that sees later tokens, as expert_choice does: they are not written yet.
        """
        if self.sees_later:
            raise ValueError(f"router {self.config.router} sees later tokens, so it cannot generate")
        was_training = self.training
        T, longest = ids.shape[1], self.config.block_size
        self.eval()
        with self.no_limit():
            for _ in range(new_tokens):
                h, _ = self.hidden(ids[:, -longest:])  # all anew: a sample is short
                logits = F.linear(h[:, -1], self.wte.weight, self.bias)  # (B, V)
                logits = logits.float() / temperature
                best = logits.topk(min(top_k, logits.shape[1])).values
                logits = logits.masked_fill(logits < best[:, -1:], -math.inf)
                drawn = logits.softmax(dim=1).multinomial(1)
                ids = torch.cat([ids, drawn], dim=1)
                if (ids[:, T:] == end).any(dim=1).all():
                    break
        self.train(was_training)
        return ids


# ---------------------------------------------------------------------------------------------------------------------
# The encoder


class EncoderLayer(nn.Module):
    """XLM-R's: each part adds to its input, and a norm follows."""

    def __init__(self, config):
        super().__init__()
        self.attn = SelfAttention(config, causal=False, dropout=config.dropout, biased=config.relative_bias)
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.ffn = FFN(config, "none")
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, distance):
        y, _ = self.attn(x, mask, distance)
        x = self.ln_1(x + self.dropout(y))
        y = self.ffn(x)
        return self.ln_2(x + self.dropout(y))


def layers_before_sparse(config) -> list[int]:
    """The layers, from 1, after which sparse ones stand. Raises ValueError where there are no such layers."""
    if config.router == "dense":
        return []
    if not config.moe_after or not all(1 <= depth <= config.n_layer for depth in config.moe_after):
        raise ValueError(f"moe_after must name layers from 1 to n_layer = {config.n_layer}, not {config.moe_after}")
    return sorted(config.moe_after)


class Encoder(SparseModel):
    """XLM-R's encoder with sparse layers between its own: x + MoE(x) after each layer of `moe_after` (X-MoE eq. 2)."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(PAD + 1 + config.block_size, D)  # XLM-R's: row 0 is unused, row 1 is padding's
        self.token_type = nn.Parameter(torch.empty(1, D))  # there is one type only
        self.ln_e = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.distance = RelativePositionBias(config.n_head) if config.relative_bias else None  # all layers share it
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layer))
        self.moe_after = layers_before_sparse(config)
        self.moes = nn.ModuleList(between_layers(config, V, "none") for _ in self.moe_after)
        self.init_weights(config.init_std, config.init_std)

    def forward(self, ids, real=None, states=None):
        """ids (B, T) -> hidden states (B, T, D), and the balance loss summed over sparse layers (scalar).

        real (S,): places in B * T of the tokens that are not padding; None if all are. No token looks at padding.
        `states` receives the output of the embeddings, and of each layer with the sparse ones after it, where given.
        Raises ValueError where T > block_size.
        """
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        mask = None
        positions = torch.arange(PAD + 1, PAD + 1 + T, device=ids.device)
        if real is not None:
            # ids != PAD will not do: XLM-E's generator may draw a PAD
            mask = real_mask(ids, real)  # (B, T)
            positions = PAD + mask.cumsum(dim=1) * mask
            mask = mask[:, None, None]
        x = self.wte(ids) + self.wpe(positions) + self.token_type
        x = self.dropout(self.ln_e(x))
        distance = self.distance(T) if self.distance else None
        total = self.ln_e.weight.new_zeros(())
        for depth, layer in enumerate(self.layers, 1):
            if states is not None:
                states.append(x)
            x = layer(x, mask, distance)
            x, total = self.add_sparse(depth, x, total, ids, real)
        if states is not None:
            states.append(x)
        return x, total


def real_mask(ids, real):
    """ids (B, T), real (S,) places in B * T -> (B, T) bool, True there."""
    mask = ids.new_zeros(ids.numel(), dtype=torch.bool)
    return mask.index_fill_(0, real, True).view(ids.shape)


class MaskedLM(SparseModel):
    """An encoder with XLM-R's head, which sees only the M masked tokens."""

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.encoder = Encoder(config, V)
        self.dense = nn.Linear(D, D)
        self.ln_h = nn.LayerNorm(D)
        self.bias = nn.Parameter(torch.zeros(V))  # the output matrix is the embeddings'
        nn.init.normal_(self.dense.weight, std=config.init_std)
        nn.init.zeros_(self.dense.bias)

    def forward(self, ids, masked, real=None):
        """ids (B, T), masked (M,) places in B * T, real as in `Encoder` -> logits (M, V), balance loss."""
        x, balance = self.encoder(ids, real)
        x = x.flatten(0, 1).index_select(0, masked)  # (M, D)
        x = self.ln_h(F.gelu(self.dense(x)))
        return output_logits(x, self.encoder.wte.weight, self.bias), balance


# ---------------------------------------------------------------------------------------------------------------------
# The encoder-decoder (XMoE 4.2). Where the papers say "Transformer" and no more: norms come first, positions are
# sinusoids, one matrix embeds sources and translations and makes the logits. B sentences, K beams of each, R rows of
# the decoder (B, or B * K), N tokens of a source, T of a translation, M of translations that are not padding.


class Source(NamedTuple):
    """What the decoder looks at."""

    keys_values: list[KeysValues]  # for each of its blocks
    mask: Tensor | None  # (B, 1, 1, N) bool, True where a token is not padding; None: everywhere

    def sentences(self, stay) -> "Source":
        """stay (B,) bool -> those sentences alone"""
        mask = None if self.mask is None else self.mask[stay]
        return Source(rows_of(self.keys_values, stay), mask)


def rows_of(keys_values: list[KeysValues], rows) -> list[KeysValues]:
    return [(k[rows], v[rows]) for k, v in keys_values]


class Translator(SparseModel):
    """Encoder-decoder: source and what is written so far -> logits of the next token, and the balance loss.

    Raises ValueError where the decoder's router sees later tokens, as expert_choice does: they are not written yet.
    """

    def __init__(self, config, V: int):
        super().__init__()
        self.config, self.vocab_size, D = config, V, config.n_embd
        self.moe_after = layers_before_sparse(config) if config.moe_after else []
        self.wte = nn.Embedding(V, D)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = self.blocks(config.n_layer, decoder=False)
        self.moes = nn.ModuleList(between_layers(config, V, "tanh") for _ in self.moe_after)
        self.decoder = self.blocks(config.decoder_layers, decoder=True)
        self.ln_e = nn.LayerNorm(D)
        self.ln_d = nn.LayerNorm(D)
        sparse = [block.ffn for block in self.decoder if block.sparse]
        if sparse and sparse[0].router.sees_later:
            why = f"router {config.router} sees later tokens, so it cannot translate"
            raise ValueError(f"{why}: add --decoder_moe false")
        # As in GPT-2, what writes to the residual stream starts smaller, the deeper the model.
        deep = math.sqrt(2 * max(config.n_layer, config.decoder_layers))
        self.init_weights(config.init_std, config.init_std / deep)

    def blocks(self, layers: int, decoder: bool) -> nn.ModuleList:
        config, sparse = self.config, [False] * layers
        if not config.moe_after and (config.decoder_moe or not decoder):
            sparse = every_so_many(config, layers)
        kind = dict(causal=decoder, cross=decoder, attention_dropout=False)
        return nn.ModuleList(Block(config, self.vocab_size, has_experts, **kind) for has_experts in sparse)

    @property
    def moe_names(self) -> list[str]:
        """Where the MoE layers stand, in the order of `moe_layers`."""
        names = [f"encoder block {i}" for i, block in enumerate(self.encoder, 1) if block.sparse]
        names += [f"after encoder block {depth}" for depth in self.moe_after]
        names += [f"decoder block {i}" for i, block in enumerate(self.decoder, 1) if block.sparse]
        return names

    def embed(self, ids, first: int = 0):
        """ids (B, T), whose first stands at position `first` -> (B, T, D)"""
        x = math.sqrt(self.config.n_embd) * self.wte(ids)
        position = torch.arange(first, first + ids.shape[1], device=ids.device)
        waves = sinusoids(position, self.config.n_embd)
        return self.dropout(x + waves.to(x.dtype))

    def encode(self, ids, real=None) -> tuple[Source, Tensor]:
        """ids (B, N), real (S,) places in B * N of what is not padding, None if all is -> source, balance loss."""
        mask = None
        if real is not None:
            mask = real_mask(ids, real)[:, None, None]
        x = self.embed(ids)
        total = self.ln_e.weight.new_zeros(())
        for depth, block in enumerate(self.encoder, 1):
            x, balance, _ = block(x, ids, real, mask)
            x, total = self.add_sparse(depth, x, total + balance, ids, real)
        h = self.ln_e(x)
        keys_values = [block.cross.keys_values(h) for block in self.decoder]
        return Source(keys_values, mask), total

    def decode(self, ids, source: Source, past: list[KeysValues] | None = None, real=None):
        """ids (R, T) -> hidden states (R, T, D), balance loss, what to pass as `past` with the next ids, (R, 1)."""
        x = self.embed(ids, first=past[0][0].shape[2] if past else 0)
        total = self.ln_d.weight.new_zeros(())
        present = []
        for i, block in enumerate(self.decoder):
            before = past[i] if past else None
            x, balance, so_far = block(x, ids, real, source.mask, before, source.keys_values[i])
            total = total + balance
            present.append(so_far)
        return self.ln_d(x), total, present

    def forward(self, source, target, source_real=None, target_real=None):
        """source (B, N), target (B, T) -> logits (M, V) at the tokens of the target that are real, balance loss.

        source_real, target_real: places in B * N and in B * T of what is not padding, ascending; None if all is.
        """
        encoded, balance = self.encode(source, source_real)
        h, more, _ = self.decode(target, encoded, real=target_real)
        h = h.flatten(0, 1)
        if target_real is not None:
            h = h.index_select(0, target_real)
        return output_logits(h, self.wte.weight), balance + more

    def log_probabilities(self, h):
        """(R, D) -> (R, V) fp32 of the next token, whatever the autocast type: small differences tell beams apart."""
        w = self.wte.weight
        with torch.autocast(h.device.type, enabled=False):
            logits = F.linear(h.to(w.dtype), w)
        return logits.float().log_softmax(dim=1)


def sinusoids(position, D: int):
    """(T,) -> (T, D): half of them sines, half cosines (Vaswani et al. 3.5)"""
    i = torch.arange(0, D, 2, device=position.device)
    turn = torch.exp(-math.log(10_000) / D * i)
    angle = position.unsqueeze(1) * turn  # (T, D / 2)
    waves = angle.sin(), angle.cos()
    both = torch.cat(waves, dim=1)
    return both[:, :D]  # one less where D is odd
