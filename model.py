"""The Transformer with sparse experts: attention, FFN, experts, capacity dispatch, and the decoder language model.

GPT-2's layout (pre-LN, tanh-GELU, learned positions, biases, tied embeddings); every `moe_every`-th block has experts
in place of its FFN (XMoE 4.2). Tensor letters: B batch, T sequence length, S = B*T tokens, D model width, H heads,
E experts, F inner width of one expert, C expert capacity, K experts per token, V vocabulary, N kept rows.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch import dispatch, expert_capacity, within_capacity  # noqa: F401 (within_capacity: for those who look)
from routers import ROUTERS, Router, Routing

TALLY = ("tokens", "wanted", "served", "unserved", "entropy", "positive", "hidden", "load")


@dataclass
class ModelConfig:
    """The constants that define a model. A None is filled in from the others when the object is made.

    Left to themselves, all routers get the same parameters and the same FLOPs (XMoE eq. 6): dividing `expert_size`
    by k multiplies the experts, the choices and the capacity by k.
    """

    vocab_size: int | None = None  # V; default: that of the data
    block_size: int = 256  # T, the longest sequence
    n_layer: int = 4  # blocks
    n_head: int = 4  # H
    n_embd: int = 256  # D
    ffn_size: int = 1024  # inner width of a dense FFN
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN
    init_std: float = 0.03  # of the normal that weights start from; XMoE's wider models: 0.014
    router: str = "threshold"  # dense, switch, topk, threshold, hash, base or expert_choice
    score: str | None = None  # dot or hypersphere; default: the router's
    gate: str | None = None  # softmax or sigmoid; default: the router's
    select: str | None = None  # top1, topk, threshold, hash, base or expert_choice; default: the router's
    moe_every: int = 2  # every so many blocks the FFN is sparse
    expert_size: int | None = None  # F; default: ffn_size / 4 for topk and threshold, ffn_size for the others
    num_experts: int | None = None  # E; default: as many parameters as 8 FFNs
    top_k: int | None = None  # K of topk; default: ffn_size / expert_size
    threshold: float = 0.9  # t, the probability that the chosen experts must reach together
    capacity_factor: float | None = None  # gamma, inf for no limit; default: ffn_size / expert_size (equal FLOPs)
    eval_threshold: float | None = None  # t at test; default: threshold
    eval_capacity_factor: float | None = None  # gamma at test, inf for no limit; default: capacity_factor
    routing_dim: int | None = None  # d_e, what the router projects to, 0: nothing; default: E / 2 on the hypersphere
    init_temperature: float | None = None  # tau_0; default: 0.3 (softmax), 0.07 (sigmoid)
    renormalize: bool = False  # softmax gate over the K chosen experts only (X-MoE, K > 1)
    balance_choices: str = "first"  # choices that the balance loss counts: first (XMoE) or all (X-MoE, K > 1)

    def __post_init__(self):
        if self.router not in ("dense", *ROUTERS):
            raise ValueError(f"router must be one of {', '.join(('dense', *ROUTERS))}, not {self.router!r}")
        for name in ("block_size", "n_layer", "n_head", "n_embd", "ffn_size", "moe_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.router == "dense":
            if self.score or self.gate or self.select:
                raise ValueError("router dense has no score, gate or select")
            self.num_experts = self.top_k = 1
            self.expert_size, self.capacity_factor, self.eval_capacity_factor = self.ffn_size, math.inf, math.inf
            return
        for name, default in zip(("score", "gate", "select"), ROUTERS[self.router]):
            setattr(self, name, getattr(self, name) or default)
        if self.expert_size is None:
            self.expert_size = self.ffn_size // (4 if self.select in ("topk", "threshold") else 1)
        derived = None in (self.num_experts, self.capacity_factor) or (self.top_k is None and self.select == "topk")
        if derived and (self.expert_size < 1 or self.ffn_size % self.expert_size):
            raise ValueError(
                f"expert_size = {self.expert_size} does not divide ffn_size = {self.ffn_size}: "
                "give num_experts, top_k and capacity_factor, or another expert_size"
            )
        ratio = self.ffn_size // self.expert_size
        self.num_experts = 8 * ratio if self.num_experts is None else self.num_experts
        self.top_k = (ratio if self.select == "topk" else 1) if self.top_k is None else self.top_k
        self.capacity_factor = float(ratio) if self.capacity_factor is None else self.capacity_factor
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
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must lie in [1, num_experts = {self.num_experts}], not {self.top_k}")

    def sparse(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts."""
        return self.router != "dense" and (layer + 1) % self.moe_every == 0


# ---------------------------------------------------------------------------------------------------------------------
# Experts in place of an FFN


class MoE(nn.Module):
    """A sparse FFN: E experts of inner width F, a router, and a capacity. h (B, T, D) -> (B, T, D), balance loss."""

    def __init__(self, config: ModelConfig):
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
            renormalize=config.renormalize,
            balance_choices=config.balance_choices,
            vocab_size=config.vocab_size,
            init_std=config.init_std,
        )
        self.w_in, self.b_in = nn.Parameter(torch.empty(E, F_, D)), nn.Parameter(torch.zeros(E, F_))
        self.w_out, self.b_out = nn.Parameter(torch.empty(E, D, F_)), nn.Parameter(torch.zeros(E, D))
        self.capacity_factor, self.eval_capacity_factor = config.capacity_factor, config.eval_capacity_factor
        self.tally = None  # sums for `GPT.stats`, while they are wanted

    def forward(self, h: Tensor, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """mask (B, T) bool: True for a real token, None if all are. Nobody serves padding, and it fills no capacity."""
        flat, mask = h.flatten(0, 1), None if mask is None else mask.flatten()  # (S, D), (S,)
        routing = self.router(flat, ids.flatten(), mask)
        tokens = len(flat) if mask is None else int(mask.sum())
        gamma = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = expert_capacity(tokens, self.router.num_experts, gamma)
        weights = (self.w_in, self.b_in, self.w_out, self.b_out)
        observe = self.observe(tokens, routing) if self.tally else None
        y, _ = dispatch(flat, routing, capacity, weights, self.router.most, observe)
        return y.view_as(h), routing.balance_loss

    def observe(self, tokens: int, routing: Routing):
        """Adds one forward pass to the tally. Each entry is a sum over tokens; `load` has one an expert."""

        def add(kept: Tensor, hidden: list[Tensor]):
            real = routing.wanted.any(dim=1)  # padding wants nothing
            self.tally["tokens"] += tokens
            self.tally["wanted"] += int(routing.wanted.sum())
            self.tally["served"] += int(kept.sum())
            self.tally["unserved"] += int((real & ~kept.any(dim=1)).sum())
            self.tally["entropy"] += float(torch.special.entr(routing.probs[real].detach()).sum())
            self.tally["positive"] += sum(int((a > 0).sum()) for a in hidden)  # gelu(a) has the sign of a
            self.tally["hidden"] += int(kept.sum()) * self.w_in.shape[1]
            self.tally["load"] = self.tally["load"] + routing.wanted.sum(dim=0).cpu().double()

        return add


# ---------------------------------------------------------------------------------------------------------------------
# The decoder language model


class FFN(nn.Module):
    """(B, T, D) -> (B, T, D) through `ffn_size` tanh-GELU units."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.fc, self.proj = nn.Linear(config.n_embd, config.ffn_size), nn.Linear(config.ffn_size, config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(h), approximate="tanh"))


class CausalSelfAttention(nn.Module):
    """(B, T, D) -> (B, T, D), each position looking at itself and those before it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv, self.proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, sparse: bool):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.dropout, self.sparse = CausalSelfAttention(config), nn.Dropout(config.dropout), sparse
        self.ffn = MoE(config) if sparse else FFN(config)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | float]:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        h = self.ln_2(x)
        y, balance = self.ffn(h, ids) if self.sparse else (self.ffn(h), 0.0)
        return x + self.dropout(y), balance  # a token that no expert kept passes by on the residual stream


class GPT(nn.Module):
    """Decoder-only language model. ids (B, T) -> logits (B, T, V), and the balance loss summed over layers (scalar)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.sparse(i)) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        for name, p in self.named_parameters():
            if "router" in name or "ln_" in name:
                continue  # these know their own start
            if name.endswith(("bias", "b_in", "b_out")):
                nn.init.zeros_(p)
            else:  # GPT-2: what writes to the residual stream starts smaller, the deeper the model
                writes = name.endswith(("proj.weight", "w_out"))
                nn.init.normal_(p, std=config.init_std / math.sqrt(2 * config.n_layer) if writes else config.init_std)

    @property
    def moe_layers(self) -> list[MoE]:
        return [block.ffn for block in self.blocks if block.sparse]

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
# Parameters and FLOPs, from the constants alone


def served_rows(config: ModelConfig) -> float:
    """Rows per token and MoE layer that the capacity leaves room for: at most K, gamma and E."""
    wants = {"topk": config.top_k, "threshold": config.num_experts, "expert_choice": config.num_experts}
    return min(wants.get(config.select, 1), config.capacity_factor, config.num_experts)


def router_weights(config: ModelConfig) -> int:
    D, E, dim = config.n_embd, config.num_experts, config.routing_dim
    return 0 if config.select == "hash" else dim * D + E * dim if dim else E * D


def count_parameters(config: ModelConfig) -> dict[str, float]:
    """`total`, `active` (what one token passes through at full capacity) and `moe` (experts and routers)."""
    D, E, F_ = config.n_embd, config.num_experts, config.expert_size
    expert = 2 * D * F_ + F_ + D
    router = router_weights(config) + (config.score == "hypersphere")  # its temperature
    layers = sum(config.sparse(i) for i in range(config.n_layer))
    ffn = 2 * D * config.ffn_size + config.ffn_size + D
    shared = (config.vocab_size + config.block_size) * D + 2 * D  # embeddings (the head is tied to them), last norm
    shared += config.n_layer * (4 * (D * D + D) + 4 * D) + (config.n_layer - layers) * ffn
    moe = layers * (router + E * expert)
    return {"total": shared + moe, "active": shared + layers * (router + served_rows(config) * expert), "moe": moe}


def flops_per_token(config: ModelConfig) -> dict[str, float]:
    """Forward FLOPs of one token: `total` and `moe` (experts and routers). A training step costs three times as much.

    Products only, two FLOPs a multiply-add; attention counts the full T x T, as MFU figures do; MoE layers are taken at
    full capacity, so what is really spent is `served` of `GPT.stats` over `served_rows` of it.
    """
    D, L = config.n_embd, config.n_layer
    layers = sum(config.sparse(i) for i in range(L))
    router = router_weights(config)
    moe = 2 * layers * (router + served_rows(config) * 2 * D * config.expert_size)
    dense = 2 * (L * 4 * D * D + (L - layers) * 2 * D * config.ffn_size + D * config.vocab_size)
    return {"total": moe + dense + 4 * L * config.block_size * D, "moe": moe}
