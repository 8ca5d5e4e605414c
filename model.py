"""The Transformers with sparse experts: a decoder language model (GPT-2's layout) and an encoder (XLM-R's).

In the decoder every `moe_every`-th block has experts in place of its FFN (XMoE 4.2); in the encoder, sparse layers
stand between the others, after those named by `moe_after` (X-MoE 4.1). Tensor letters: B batch, T sequence length, S
tokens that are not padding, D model width, H heads, E experts, F inner width of one expert, K experts per token, V
vocabulary, M masked tokens.
"""

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch import dispatch, expert_capacity
from routers import ROUTERS, Router, Routing

TALLY = ("tokens", "wanted", "served", "unserved", "entropy", "positive", "hidden", "load")
PAD = 1  # the encoder's `<pad>`, as in XLM-R, whose positions begin behind it


@dataclass
class TransformerConfig:
    """The constants that all models have. A None is filled in from the others when the object is made.

    Each model adds where its sparse layers stand and their sizes: expert_size F, num_experts E, top_k K and
    capacity_factor gamma, whose defaults `sparse_defaults` fills in.
    """

    causal: ClassVar[bool]  # whether a position sees only those before it
    gelu: ClassVar[str]  # tanh (GPT-2) or none, the erf form (XLM-R)
    relative_bias: ClassVar[bool] = False  # the encoder may have it

    vocab_size: int | None = None  # V; default: that of the data
    block_size: int = 256  # T, the longest sequence
    n_layer: int = 4  # blocks
    n_head: int = 4  # H
    n_embd: int = 256  # D
    ffn_size: int = 1024  # inner width of a dense FFN
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN
    init_std: float = 0.03  # of the normal that weights start from; XMoE's wider models: 0.014
    router: str = "threshold"  # dense, switch, topk, threshold, hypersphere, hash, base or expert_choice
    score: str | None = None  # dot or hypersphere; default: the router's
    gate: str | None = None  # softmax or sigmoid; default: the router's
    select: str | None = None  # top1, topk, threshold, hash, base or expert_choice; default: the router's
    expert_layers: int = 0  # FFNs of an expert, each with a norm and a residual around it (X-MoE: 3); 0: one bare FFN
    threshold: float = 0.9  # t, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # t at test; default: threshold
    eval_capacity_factor: float | None = None  # gamma at test, inf for no limit; default: capacity_factor
    routing_dim: int | None = None  # d_e, what the router projects to, 0: nothing; default: E / 2 on the hypersphere
    init_temperature: float | None = None  # tau_0; default: 0.3 (softmax), 0.07 (sigmoid)
    orthogonal: bool = False  # expert embeddings start orthogonal, of norm 0.1 (base and hypersphere: always)
    renormalize: bool | None = False  # softmax gate over the K chosen experts only (X-MoE, K > 1)
    balance_choices: str | None = "first"  # choices that the balance loss counts: first (XMoE) or all (X-MoE, K > 1)

    def __post_init__(self):
        if self.router not in ("dense", *ROUTERS):
            raise ValueError(f"router must be one of {', '.join(('dense', *ROUTERS))}, not {self.router!r}")
        for name in ("block_size", "n_layer", "n_head", "n_embd", "ffn_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.expert_layers < 0:
            raise ValueError(f"expert_layers must not be negative: {self.expert_layers}")
        if self.router == "dense":
            if self.score or self.gate or self.select:
                raise ValueError("router dense has no score, gate or select")
            self.num_experts = self.top_k = 1
            self.expert_size, self.capacity_factor, self.eval_capacity_factor = self.ffn_size, math.inf, math.inf
            return
        for name, default in zip(("score", "gate", "select"), ROUTERS[self.router]):
            setattr(self, name, getattr(self, name) or default)
        self.sparse_defaults()
        if self.eval_capacity_factor is None:
            self.eval_capacity_factor = self.capacity_factor
        self.eval_threshold = self.threshold if self.eval_threshold is None else self.eval_threshold
        if self.routing_dim is None:
            self.routing_dim = self.num_experts // 2 if self.score == "hypersphere" else 0
        if self.routing_dim < 0:
            raise ValueError(f"routing_dim must not be negative: {self.routing_dim}")
        for name in ("capacity_factor", "eval_capacity_factor", "init_temperature"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("threshold", "eval_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        if self.top_k > 1 and self.select != "topk":
            raise ValueError(f"top_k = {self.top_k} is for --router topk, or --select topk")
        if self.init_temperature and self.score != "hypersphere":
            raise ValueError("init_temperature is for --score hypersphere")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must lie in [1, num_experts = {self.num_experts}], not {self.top_k}")


@dataclass
class ModelConfig(TransformerConfig):
    """The decoder's.

    Left to themselves, all routers get the same parameters and the same FLOPs (XMoE eq. 6): dividing `expert_size`
    by k multiplies the experts, the choices and the capacity by k.
    """

    causal, gelu = True, "tanh"
    expert_ffns: ClassVar[int] = 8  # a sparse layer has as many parameters as so many FFNs

    moe_every: int = 2  # every so many blocks the FFN is sparse
    expert_size: int | None = None  # F; default: ffn_size / 4 for topk and threshold, ffn_size for the others
    num_experts: int | None = None  # E; default: as many parameters as 8 FFNs
    top_k: int | None = None  # K of topk; default: ffn_size / expert_size
    capacity_factor: float | None = None  # gamma, inf for no limit; default: ffn_size / expert_size (equal FLOPs)

    def __post_init__(self):
        if self.moe_every < 1:
            raise ValueError(f"moe_every must be positive, not {self.moe_every}")
        super().__post_init__()

    def sparse_defaults(self):
        if self.expert_size is None:
            self.expert_size = self.ffn_size // (4 if self.select in ("topk", "threshold") else 1)
        derived = None in (self.num_experts, self.capacity_factor) or (self.top_k is None and self.select == "topk")
        if derived and (self.expert_size < 1 or self.ffn_size % self.expert_size):
            raise ValueError(
                f"expert_size = {self.expert_size} does not divide ffn_size = {self.ffn_size}: "
                "give num_experts, top_k and capacity_factor, or another expert_size"
            )
        ratio = self.ffn_size // self.expert_size
        self.num_experts = self.expert_ffns * ratio if self.num_experts is None else self.num_experts
        self.top_k = (ratio if self.select == "topk" else 1) if self.top_k is None else self.top_k
        self.capacity_factor = float(ratio) if self.capacity_factor is None else self.capacity_factor

    def sparse(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts."""
        return self.router != "dense" and (layer + 1) % self.moe_every == 0

    @property
    def num_sparse(self) -> int:
        """Sparse layers; `num_ffns`: dense FFNs."""
        return sum(self.sparse(i) for i in range(self.n_layer))

    @property
    def num_ffns(self) -> int:
        return self.n_layer - self.num_sparse


@dataclass
class EncoderConfig(TransformerConfig):
    """The encoder's. X-MoE's sparse layer: 32 experts, each a stack of 3 FFNs, top-1, no capacity limit."""

    causal, gelu = False, "none"

    block_size: int = 128  # T, the longest sequence
    init_std: float = 0.02  # of the normal that weights start from
    router: str = "hypersphere"  # hypersphere (X-MoE), switch (SMoE), dense, topk, threshold, hash, base, expert_choice
    relative_bias: bool = False  # gated relative position bias in attention (XLM-E 3.3)
    moe_after: str | None = None  # sparse layers stand after these layers, such as 3,6 (from 1); default: half-way
    expert_size: int | None = None  # F; default: ffn_size
    expert_layers: int = 3  # FFNs of an expert, each with a norm and a residual around it; 0: one bare FFN
    num_experts: int | None = None  # E; default: 32
    top_k: int | None = None  # K of topk; default: 2
    capacity_factor: float | None = None  # gamma, inf for no limit; default: inf, threshold and expert_choice: 1
    orthogonal: bool = True  # expert embeddings start orthogonal, of norm 0.1
    renormalize: bool | None = None  # softmax gate over the K chosen experts only; default: with topk
    balance_choices: str | None = None  # choices that the balance loss counts: first or all; default: all with topk

    def __post_init__(self):
        super().__post_init__()
        self.moe_after = self.moe_after or str(max(1, self.n_layer // 2))
        check_depths(self)

    def sparse_defaults(self):
        inserted_defaults(self)

    @property
    def sparse_after(self) -> list[int]:
        """The layers, from 1, behind which a sparse layer stands."""
        return [] if self.router == "dense" else sorted(int(depth) for depth in self.moe_after.split(","))

    @property
    def num_sparse(self) -> int:
        return len(self.sparse_after)

    @property
    def num_ffns(self) -> int:
        return self.n_layer


def inserted_defaults(config: TransformerConfig):
    """Sizes of sparse layers that stand between the others (X-MoE 4.1)."""
    config.expert_size = config.ffn_size if config.expert_size is None else config.expert_size
    config.num_experts = 32 if config.num_experts is None else config.num_experts
    config.top_k = (2 if config.select == "topk" else 1) if config.top_k is None else config.top_k
    if config.capacity_factor is None:  # these two want, or are offered, all experts
        config.capacity_factor = 1.0 if config.select in ("threshold", "expert_choice") else math.inf
    several = config.select == "topk" and config.top_k > 1
    config.renormalize = several if config.renormalize is None else config.renormalize
    config.balance_choices = config.balance_choices or ("all" if several else "first")


def check_depths(config: TransformerConfig):
    """ValueError where `moe_after` does not name layers."""
    try:
        depths = config.sparse_after
    except ValueError:
        depths = [0]
    if not all(1 <= depth <= config.n_layer for depth in depths):
        raise ValueError(f"moe_after must name layers from 1 to n_layer = {config.n_layer}, not {config.moe_after!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Experts in place of an FFN


class Experts(nn.Module):
    """One FFN of each of E experts: w_in (E, F, D), b_in (E, F), w_out (E, D, F), b_out (E, D); perhaps a norm."""

    def __init__(self, E: int, D: int, F_: int, norm: bool):
        super().__init__()
        self.w_in, self.b_in = nn.Parameter(torch.empty(E, F_, D)), nn.Parameter(torch.zeros(E, F_))
        self.w_out, self.b_out = nn.Parameter(torch.empty(E, D, F_)), nn.Parameter(torch.zeros(E, D))
        if norm:
            self.ln_weight, self.ln_bias = nn.Parameter(torch.ones(E, D)), nn.Parameter(torch.zeros(E, D))

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.parameters())


class MoE(nn.Module):
    """A sparse FFN: E experts of inner width F, a router, and a capacity. h (B, T, D) -> (B, T, D), balance loss.

    An expert is one FFN, or with `expert_layers` a stack of them (`dispatch.residual_stacks`).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        E, D, F_ = config.num_experts, config.n_embd, config.expert_size
        self.router = Router(
            D,
            E,
            config.score,
            config.gate,
            config.select,
            top_k=config.top_k,
            threshold=config.threshold,
            eval_threshold=config.eval_threshold,
            routing_dim=config.routing_dim,
            init_temperature=config.init_temperature,
            orthogonal=config.orthogonal,
            renormalize=config.renormalize,
            balance_choices=config.balance_choices,
            vocab_size=config.vocab_size,
            init_std=config.init_std,
        )
        self.stacked = config.expert_layers > 0
        self.layers = nn.ModuleList(Experts(E, D, F_, self.stacked) for _ in range(config.expert_layers or 1))
        self.capacity_factor, self.eval_capacity_factor = config.capacity_factor, config.eval_capacity_factor
        self.gelu = config.gelu
        self.tally = None  # sums for `stats`, while they are wanted

    def forward(self, h: Tensor, ids: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """real (S,): places in B * T of the tokens that are not padding, ascending; None if all are.

        Nobody serves padding, and it fills no capacity. What stands there comes out as 0.
        """
        flat, ids = h.flatten(0, 1), ids.flatten()
        if real is not None:
            flat, ids = flat.index_select(0, real), ids[real]  # (S, D), (S,)
        routing = self.router(flat, ids)
        gamma = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = expert_capacity(len(flat), self.router.num_experts, gamma)
        weights = [layer.weights() for layer in self.layers]
        observe = self.observe(routing) if self.tally else None
        weights = weights if self.stacked else weights[0]
        y, _ = dispatch(flat, routing, capacity, weights, self.router.most, observe, self.gelu)
        if real is not None:
            y = y.new_zeros(h.shape[0] * h.shape[1], h.shape[2]).index_copy(0, real, y)
        return y.view_as(h), routing.balance_loss

    def observe(self, routing: Routing):
        """Adds one forward pass to the tally. Each entry is a sum over tokens; `load` has one an expert."""

        def add(kept: Tensor, hidden: list[Tensor]):
            self.tally["tokens"] += len(kept)
            self.tally["wanted"] += int(routing.wanted.sum())
            self.tally["served"] += int(kept.sum())
            self.tally["unserved"] += int((~kept.any(dim=1)).sum())
            self.tally["entropy"] += float(torch.special.entr(routing.probs.detach()).sum())
            self.tally["positive"] += sum(int((a > 0).sum()) for a in hidden)  # g gelu(a): the sign of a
            self.tally["hidden"] += int(kept.sum()) * sum(layer.w_in.shape[1] for layer in self.layers)
            self.tally["load"] = self.tally["load"] + routing.wanted.sum(dim=0).cpu().double()

        return add


class SparseModel(nn.Module):
    """What models with MoE layers have in common: their start, routing at test, and statistics of it."""

    def draw(self, std: float, written_std: float):
        """Draws all weights from normals; `written_std` is for those that write to the residual stream."""
        for name, p in self.named_parameters():
            if any(part in name for part in ("router", "ln_", "gate_w")):
                continue  # these know their own start
            if name.endswith(("bias", "b_in", "b_out")):
                nn.init.zeros_(p)
            else:
                nn.init.normal_(p, std=written_std if name.endswith(("proj.weight", "w_out")) else std)
        for layer in (layer for moe in self.moe_layers if moe.stacked for layer in moe.layers):
            nn.init.zeros_(layer.w_out)  # as in BASE layers: an inserted stack changes nothing at first

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    def after_step(self):
        """To be called after every optimizer step: restores what routers keep fixed."""
        for moe in self.moe_layers:
            moe.router.after_step()

    @contextmanager
    def test_routing(self, threshold: float | None = None, capacity_factor: float | None = None):
        """Inside the `with`, evaluation uses this t and gamma (None: unchanged; gamma inf: no limit)."""
        before = [(moe.router.eval_threshold, moe.eval_capacity_factor) for moe in self.moe_layers]
        for moe, (t, gamma) in zip(self.moe_layers, before):
            moe.router.eval_threshold = t if threshold is None else threshold
            moe.eval_capacity_factor = gamma if capacity_factor is None else capacity_factor
        try:
            yield self
        finally:
            for moe, (t, gamma) in zip(self.moe_layers, before):
                moe.router.eval_threshold, moe.eval_capacity_factor = t, gamma

    def start_stats(self):
        """From now on the MoE layers tally what they do, until `stats` is called."""
        for moe in self.moe_layers:
            moe.tally = dict.fromkeys(TALLY, 0)

    def stats(self, reduce=lambda sums: sums) -> list[dict[str, float]]:
        """One dict a MoE layer, about the forward passes since `start_stats`.

        `reduce` sums a tensor (7 + E,) over processes.
        wanted, served: experts per token, before and after the capacity. cut: share of the choices that were over
        capacity. unserved: share of the tokens that no expert kept. imbalance: choices of the busiest expert over the
        mean. entropy: of the router's probabilities, in nats. positive: share of the experts' activations above 0.
        """
        rows = []
        for moe in self.moe_layers:
            load = torch.as_tensor(moe.tally.pop("load"), dtype=torch.float64).expand(moe.router.num_experts)
            sums = reduce(torch.cat([torch.tensor(list(moe.tally.values()), dtype=torch.float64), load])).tolist()
            tokens, wanted, served, unserved, entropy, positive, hidden = sums[:7]
            tokens, wanted, hidden = max(tokens, 1), max(wanted, 1), max(hidden, 1)
            rows.append(
                {
                    "wanted": wanted / tokens,
                    "served": served / tokens,
                    "cut": 1 - served / wanted,
                    "unserved": unserved / tokens,
                    "imbalance": max(sums[7:]) * moe.router.num_experts / wanted,
                    "entropy": entropy / tokens,
                    "positive": positive / hidden,
                }
            )
            moe.tally = None
        return rows


def describe_routing(layer: dict[str, float]) -> str:
    """One of `stats`' dicts in words."""
    return (
        f"experts wanted {layer['wanted']:.2f}, served {layer['served']:.2f} per token; "
        f"choices cut {layer['cut']:.1%}, tokens unserved {layer['unserved']:.2%}; "
        f"load imbalance {layer['imbalance']:.2f}, entropy {layer['entropy']:.2f}, positive {layer['positive']:.1%}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Dense layers


class FFN(nn.Module):
    """(B, T, D) -> (B, T, D) through `ffn_size` GELU units."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.fc, self.proj = nn.Linear(config.n_embd, config.ffn_size), nn.Linear(config.ffn_size, config.n_embd)
        self.gelu = config.gelu

    def forward(self, h: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(h), approximate=self.gelu))


class SelfAttention(nn.Module):
    """(B, T, D) -> (B, T, D), each position looking at all others, or at itself and those before it.

    With `relative_bias` what is added to the scores of a head depends on the distance, gated by the query (XLM-E 3.3).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.n_head, self.dropout, self.causal = config.n_head, config.dropout, config.causal
        self.qkv, self.proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        if config.relative_bias:
            self.gate = nn.Parameter(torch.empty(2, config.n_embd // config.n_head))  # u and v, shared by the heads
            self.gate_w = nn.Parameter(torch.ones(config.n_head))  # w

    def forward(self, h: Tensor, mask: Tensor | None = None, distance: Tensor | None = None) -> Tensor:
        """mask (B, 1, 1, T) bool: which positions may be looked at, None: all; distance (H, T, T): d."""
        q, k, v = self.qkv(h).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        dropout = self.dropout if self.training else 0.0
        if distance is not None:
            update, reset = (q @ self.gate.t()).sigmoid().unbind(3)  # (B, H, T) each
            # r = d + g_u d + (1 - g_u) w g_r d: the gates only scale the row of d that belongs to their query.
            scale = 1 + update + (1 - update) * self.gate_w[:, None] * reset
            y = biased_attention(q, k, v, scale, distance, mask, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).flatten(2))


class Distance(nn.Module):
    """d_{i-j} of XLM-E 3.3: a learned number for each head and each bucket of distances, as in T5 (bidirectional)."""

    def __init__(self, n_head: int, buckets: int = 32, longest: int = 128):
        super().__init__()
        self.table, self.longest = nn.Embedding(buckets, n_head), longest

    def forward(self, T: int) -> Tensor:
        """(H, T, T)"""
        place = torch.arange(T, device=self.table.weight.device)
        return self.table(self.bucket(place[None, :] - place[:, None])).permute(2, 0, 1)

    def bucket(self, ahead: Tensor) -> Tensor:
        """j - i -> its bucket: one half for each sign; of a half, one half is exact, the other logarithmic."""
        half = self.table.num_embeddings // 2
        exact, far = half // 2, ahead.abs()
        ratio = torch.log(far.clamp(min=1) / exact) / math.log(self.longest / exact)
        coarse = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(far < exact, far, coarse) + half * (ahead > 0)


def biased_attention(q, k, v, scale, distance, mask=None, dropout: float = 0.0) -> Tensor:
    """softmax(q k / sqrt(d_k) + scale_i d_ij) v (XLM-E eqs. 7, 8). q, k, v (B, H, T, d_k); scale (B, H, T).

    distance (H, T, T); mask (B, 1, 1, T) bool. On CUDA nothing of the size (B, H, T, T) is made, and attention weights
    have no dropout, which FlexAttention does not offer.
    """
    if not has_flex_attention(q):
        bias = scale.unsqueeze(3) * distance
        bias = bias if mask is None else bias.masked_fill(~mask, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), dropout_p=dropout)

    def score(value, b, h, i, j):
        value = value + scale[b, h, i] * distance[h, i, j]
        return value if mask is None else torch.where(mask[b, 0, 0, j], value, -math.inf)

    return flex_attention()(q, k, v, score_mod=score)


def has_flex_attention(q: Tensor) -> bool:
    return q.is_cuda


@functools.cache
def flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # as it comes, it makes all scores


# ---------------------------------------------------------------------------------------------------------------------
# The decoder language model


class Block(nn.Module):
    """GPT-2's: each part reads a norm of the residual stream and adds to it."""

    def __init__(self, config: ModelConfig, sparse: bool):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.dropout, self.sparse = SelfAttention(config), nn.Dropout(config.dropout), sparse
        self.ffn = MoE(config) if sparse else FFN(config)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        h = self.ln_2(x)
        y, balance = self.ffn(h, ids) if self.sparse else (self.ffn(h), 0.0)
        return x + self.dropout(y), balance  # a token that no expert kept passes by on the residual stream


class GPT(SparseModel):
    """Decoder-only language model. ids (B, T) -> logits (B, T, V), and the balance loss summed over layers (scalar)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.sparse(i)) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        # GPT-2: what writes to the residual stream starts smaller, the deeper the model.
        self.draw(config.init_std, config.init_std / math.sqrt(2 * config.n_layer))

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T) -> final hidden states (B, T, D), balance loss. Raises ValueError where T > block_size."""
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        x = self.dropout(self.wte(ids) + self.wpe.weight[:T])
        total = torch.zeros((), dtype=self.ln_f.weight.dtype, device=ids.device)
        for block in self.blocks:
            x, balance = block(x, ids)
            total = total + balance
        return self.ln_f(x), total

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h, balance = self.hidden(ids)
        return F.linear(h, self.wte.weight), balance

    @torch.no_grad()
    def generate(self, ids: Tensor, new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """ids (B, T) -> (B, T + new_tokens), sampled from softmax(logits / temperature) over the top_k (None: all).

        There is no capacity limit, so that a token depends only on its own past and not on what else is in the batch.
        Raises ValueError for expert_choice, whose experts choose among tokens that are not written yet.
        """
        if self.config.select == "expert_choice":
            raise ValueError("expert_choice sees later tokens, so it cannot generate")
        was_training = self.training
        self.eval()
        with self.test_routing(capacity_factor=math.inf):
            for _ in range(new_tokens):
                h, _ = self.hidden(ids[:, -self.config.block_size :])
                logits = F.linear(h[:, -1], self.wte.weight).float() / temperature  # (B, V)
                if top_k is not None:
                    floor = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                    logits = logits.masked_fill(logits < floor, -math.inf)
                ids = torch.cat([ids, logits.softmax(dim=1).multinomial(1)], dim=1)
        self.train(was_training)
        return ids


# ---------------------------------------------------------------------------------------------------------------------
# The encoder


class EncoderLayer(nn.Module):
    """XLM-R's: each part adds to its input, and a norm follows."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attn, self.ffn, self.dropout = SelfAttention(config), FFN(config), nn.Dropout(config.dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, mask: Tensor | None, distance: Tensor | None) -> Tensor:
        x = self.ln_1(x + self.dropout(self.attn(x, mask, distance)))
        return self.ln_2(x + self.dropout(self.ffn(x)))


class Encoder(SparseModel):
    """XLM-R's encoder with sparse layers between its own: x + MoE(x) after each layer of `moe_after` (X-MoE eq. 2)."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config, self.sparse_after = config, config.sparse_after
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(PAD + 1 + config.block_size, config.n_embd)  # the first two stay unused, as in XLM-R
        self.token_type = nn.Parameter(torch.empty(1, config.n_embd))  # there is one type only
        self.ln_e, self.dropout = nn.LayerNorm(config.n_embd), nn.Dropout(config.dropout)
        self.distance = Distance(config.n_head) if config.relative_bias else None  # all layers share it
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layer))
        self.moes = nn.ModuleList(MoE(config) for _ in range(config.num_sparse))
        self.draw(config.init_std, config.init_std)

    def forward(self, ids: Tensor, real: Tensor | None = None, states: list | None = None) -> tuple[Tensor, Tensor]:
        """ids (B, T) -> hidden states (B, T, D), and the balance loss summed over sparse layers (scalar).

        real (S,): places in B * T of the tokens that are not padding; None if all are. No token looks at padding.
        `states` receives the output of the embeddings, and of each layer with the sparse ones behind it, where given.
        Raises ValueError where T > block_size.
        """
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        mask, positions = None, torch.arange(PAD + 1, PAD + 1 + T, device=ids.device)
        if real is not None:
            # ids != PAD will not do: XLM-E's generator may draw a PAD
            mask = ids.new_zeros(ids.numel(), dtype=torch.bool).index_fill_(0, real, True).view(ids.shape)  # (B, T)
            positions = PAD + mask.cumsum(dim=1) * mask
            mask = mask[:, None, None]
        x = self.dropout(self.ln_e(self.wte(ids) + self.wpe(positions) + self.token_type))
        distance = self.distance(T) if self.distance else None
        total = torch.zeros((), dtype=self.ln_e.weight.dtype, device=ids.device)
        for depth, layer in enumerate(self.layers, 1):
            if states is not None:
                states.append(x)
            x = layer(x, mask, distance)
            for moe, after in zip(self.moes, self.sparse_after):
                if after == depth:
                    y, balance = moe(x, ids, real)
                    x, total = x + y, total + balance
        if states is not None:
            states.append(x)
        return x, total


class MaskedLM(SparseModel):
    """An encoder with XLM-R's head, which sees only the M masked tokens."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config, self.encoder = config, Encoder(config)
        self.dense, self.ln_h = nn.Linear(config.n_embd, config.n_embd), nn.LayerNorm(config.n_embd)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the output matrix is the embeddings'
        nn.init.normal_(self.dense.weight, std=config.init_std)
        nn.init.zeros_(self.dense.bias)

    def forward(self, ids: Tensor, masked: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids (B, T), masked (M,) places in B * T, real as in `Encoder` -> logits (M, V), balance loss."""
        x, balance = self.encoder(ids, real)
        x = self.ln_h(F.gelu(self.dense(x.flatten(0, 1).index_select(0, masked))))
        return F.linear(x, self.encoder.wte.weight, self.bias), balance
