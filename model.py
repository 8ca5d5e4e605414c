"""The Transformers with sparse experts: a decoder language model (GPT-2's layout) and an encoder (XLM-R's).

In the decoder every `moe_every`-th block has experts in place of its FFN (XMoE 4.2); in the encoder, sparse layers
stand between the others, after those named by `moe_after` (X-MoE 4.1). Read `dispatch` first: it is how tokens reach
their experts. Tensor letters: B batch, T sequence length, S tokens that are not padding, D model width, H heads,
E experts, F inner width of one expert, C expert capacity, K experts per token, N rows that experts keep, V vocabulary,
M masked tokens.
"""

import functools
import math
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routers import NOT_CHOSEN, ROUTERS, TEMPERATURES, Router

PAD = 1  # the encoder's `<pad>`, as in XLM-R, whose positions begin behind it
MIN_CAPACITY = 4
WORTH_COMPILING = 1 << 21  # activations (N x F), from which compiling the function between two products pays


@dataclass
class ModelConfig:
    """The constants of all models, as they were said: a None is filled in by `sizes`."""

    vocab_size: int | None = None  # V; None: that of the data
    block_size: int = 256  # T, the longest sequence
    n_layer: int = 4  # blocks
    n_head: int = 4  # H
    n_embd: int = 128  # D
    ffn_size: int = 512  # inner width of a dense FFN
    dropout: float = 0.0  # after embeddings, attention weights, attention and FFN
    init_std: float = 0.03  # of the normal that weights start from; XMoE's wider models: 0.014
    frequency_bias: bool = False  # the output has a bias, which starts at the log frequencies of the training tokens
    relative_bias: bool = False  # gated relative position bias in the encoder's attention (XLM-E 3.3)
    decoder_layers: int = 2  # blocks of a translator's decoder
    decoder_moe: bool = True  # experts in a translator's decoder too (XMoE's text; its authors' runs: encoder alone)

    # how tokens choose their experts, see routers.py; dense: no experts
    router: Literal["dense", "switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice"] = (
        "threshold"
    )
    score: Literal["dot", "hypersphere"] | None = None  # how well a token fits an expert; None: the router's
    gate: Literal["softmax", "sigmoid"] | None = None  # the weight of a chosen expert; None: the router's
    select: Literal["top1", "topk", "threshold", "hash", "base", "expert_choice"] | None = None  # None: the router's
    moe_every: int = 2  # every so many blocks have experts in place of their FFN (XMoE)
    moe_after: tuple[int, ...] = ()  # or: sparse layers stand behind these layers, from 1 (X-MoE)
    expert_ffns: int = 8  # XMoE: a sparse layer has as many parameters as so many FFNs
    num_experts: int | None = None  # E; None: expert_ffns * ffn_size / expert_size, of X-MoE 32
    expert_size: int | None = None  # F; None: ffn_size, or for topk and threshold in place of FFNs a quarter of it
    expert_layers: int | None = None  # FFNs of an expert, each with a norm and a residual around it; 0: one bare FFN
    top_k: int | None = None  # K of topk
    capacity_factor: float | None = None  # gamma, inf for no limit
    eval_capacity_factor: float | None = None  # gamma at test
    threshold: float = 0.9  # t, the probability that the chosen experts must reach together
    eval_threshold: float | None = None  # t at test
    router_init_std: float | None = None  # of the normal that a router's weights start from; None: init_std
    routing_dim: int | None = None  # d_e, what the router projects to; 0: nothing
    init_temperature: float | None = None  # tau_0
    orthogonal: bool | None = None  # expert embeddings start as orthogonal as fits, of norm 0.1
    renormalize: bool | None = None  # softmax gate over the K chosen experts only
    balance_choices: Literal["first", "all"] | None = None  # what the balance loss counts: a token's best, all

    def __post_init__(self):
        if self.n_head < 1 or self.n_embd % self.n_head:
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}")
        if self.router == "dense":
            return
        if self.moe_after and not all(1 <= depth <= self.n_layer for depth in self.moe_after):
            raise ValueError(f"moe_after must name layers from 1 to n_layer = {self.n_layer}, not {self.moe_after}")
        if not self.moe_after and self.moe_every > self.n_layer:
            raise ValueError(f"moe_every = {self.moe_every} leaves no block of n_layer = {self.n_layer} with experts")
        size = sizes(self)
        if size.top_k > 1 and size.select != "topk":
            raise ValueError(f"top_k = {size.top_k} is for --router topk, or --select topk")
        if not 1 <= size.top_k <= size.num_experts:
            raise ValueError(f"top_k must lie in [1, num_experts = {size.num_experts}], not {size.top_k}")

    def unread(self) -> set[str]:
        """The constants, these and some of the scripts', that a model of this kind does not read: the command line
        refuses them, and they name no run."""
        names = set() if self.relative_bias else {"distance_lr"}
        if self.router == "dense":
            more = "moe_every moe_after expert_ffns decoder_moe balance_coef router_init_std router_lr expert_parallel"
            return {*names, *Sizes._fields, *more.split()}
        size = sizes(self)
        orthogonal = size.orthogonal or size.score == "hypersphere" or size.select == "base"
        is_read = {
            "moe_every decoder_moe": not self.moe_after,
            "expert_ffns": not self.moe_after and self.num_experts is None,
            "score gate routing_dim router_lr": size.select != "hash",
            "router_init_std": size.select != "hash" and (size.routing_dim > 0 or not orthogonal),
            "init_temperature": size.score == "hypersphere",
            "orthogonal": size.score != "hypersphere" and size.select not in ("base", "hash"),
            "renormalize": size.gate == "softmax" and (size.select == "threshold" or size.top_k > 1),
            "threshold eval_threshold": size.select == "threshold",
            "top_k": size.select == "topk",
            "balance_choices": size.select in ("topk", "threshold"),
            "balance_coef": size.select not in ("base", "hash", "expert_choice"),
        }
        unread = [words for words, yes in is_read.items() if not yes]
        return names | set(" ".join(unread).split())


class Sizes(NamedTuple):
    """A sparse layer, with nothing left open."""

    score: str | None
    gate: str | None
    select: str
    num_experts: int
    expert_size: int
    expert_layers: int
    top_k: int
    capacity_factor: float
    eval_capacity_factor: float
    threshold: float
    eval_threshold: float
    routing_dim: int
    init_temperature: float | None
    orthogonal: bool
    renormalize: bool
    balance_choices: str


def sizes(config: ModelConfig) -> Sizes:
    """What a config says of its sparse layers, and what follows where it says nothing (None).

    ValueError where an expert_size does not divide the FFN.
    """
    said = {name: getattr(config, name) for name in Sizes._fields if getattr(config, name) is not None}
    # What is said wins over what the router's name says, and that over what follows from the rest.
    size = dict(zip(("score", "gate", "select"), ROUTERS[config.router])) | said
    if size["select"] == "hash":  # has no score and no gate, where another router's name says them
        size = size | {"score": None, "gate": None}
    else:  # and a hash that is told to select otherwise needs both
        size = size | {"score": size["score"] or "dot", "gate": size["gate"] or "softmax"}
    follows = between_layers if config.moe_after else in_place_of_ffns
    size = follows(config, size["select"]) | size
    hypersphere = size["score"] == "hypersphere"
    size.setdefault("eval_capacity_factor", size["capacity_factor"])
    size.setdefault("eval_threshold", size["threshold"])
    size.setdefault("routing_dim", size["num_experts"] // 2 if hypersphere else 0)
    size.setdefault("init_temperature", TEMPERATURES[size["gate"]] if hypersphere else None)
    return Sizes(**size)


def in_place_of_ffns(config: ModelConfig, select: str) -> dict:
    """XMoE: all routers get the same parameters and the same FLOPs (eq. 6): dividing `expert_size` by k multiplies
    experts, choices and capacity by k."""
    topk = select == "topk"
    parts = 4 if select in ("topk", "threshold") else 1
    if config.expert_size:
        parts = config.ffn_size / config.expert_size
    open_sizes = [config.num_experts, config.capacity_factor]
    if topk:
        open_sizes.append(config.top_k)
    if parts % 1 and None in open_sizes:
        raise ValueError(
            f"expert_size = {config.expert_size} does not divide ffn_size = {config.ffn_size}: "
            "give num_experts, top_k and capacity_factor, or another expert_size"
        )
    parts = max(1, int(parts))
    return {
        "num_experts": config.expert_ffns * parts,
        "expert_size": config.ffn_size // parts,
        "expert_layers": 0,
        "top_k": parts if topk else 1,
        "capacity_factor": float(parts),
        "orthogonal": False,
        "renormalize": False,
        "balance_choices": "first",
    }


def between_layers(config: ModelConfig, select: str) -> dict:
    """X-MoE 4.1: 32 experts, each a stack of three FFNs as wide as the dense ones; capacity is never stated."""
    K = (config.top_k or 2) if select == "topk" else 1
    wants_all = select in ("threshold", "expert_choice")  # a token may choose, or offers itself to, every expert
    return {
        "num_experts": 32,
        "expert_size": config.ffn_size,
        "expert_layers": 3,
        "top_k": K,
        "capacity_factor": 1.0 if wants_all else math.inf,
        "orthogonal": True,
        "renormalize": K > 1,
        "balance_choices": "all" if K > 1 else "first",
    }


# ---------------------------------------------------------------------------------------------------------------------
# From what a router wants to what the experts compute


def expert_capacity(tokens: int, num_experts: int, capacity_factor: float) -> int:
    """C, the rows that one expert may serve (XMoE eq. 3), at most all, at least 4; gamma inf is no limit.

    What is above a whole number by 1e-7 or less is rounding: gamma 1.1 of 100 tokens over 10 experts is 11, not 12.
    """
    if capacity_factor >= num_experts:
        return tokens
    rows = math.ceil(capacity_factor * tokens / num_experts - 1e-7)
    return min(tokens, max(MIN_CAPACITY, rows))


def within_capacity(priority: Tensor, capacity: int) -> Tensor:
    """(S, E) priorities -> (S, E) bool: of the tokens that chose it, each expert keeps the first C by priority.

    Among equal priorities the earlier token comes first. Nothing is sorted: the C-th highest is an expert's bar.
    """
    if capacity >= len(priority):
        return priority > NOT_CHOSEN
    priority = priority.t().contiguous()  # (E, S), so that the tokens of an expert lie together
    bar = priority.topk(capacity, dim=1, sorted=False).values.amin(dim=1, keepdim=True)  # (E, 1)
    above, tied = priority > bar, (priority == bar) & (bar > NOT_CHOSEN)
    room = capacity - above.sum(dim=1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=1, dtype=torch.int32) <= room))).t()


class Rows(NamedTuple):
    """The N (token, expert) pairs that are kept, expert by expert, in rows that experts work on side by side.

    On a CPU, N is their number. On a GPU the host does not wait for it (but where all tokens might go to all experts),
    and N is the most that there can be: the rows behind the last expert's are spare (token 0, gate 0).
    """

    token: Tensor  # (N,)
    expert: Tensor  # (N,)
    gate: Tensor  # (N, 1)
    counts: Tensor  # (E,) rows of each expert
    used: Tensor | None  # (N, 1) bool: False for spare rows, which lie at the end; None: there are none


def kept_rows(gates: Tensor, kept: Tensor, room: int | None = None) -> Rows:
    """gates (S, E), kept (S, E) bool -> Rows.

    room: make so many, the last ones spare, so that no GPU is asked how many are kept. None: ask, and make just those.
    """
    S, counts = len(kept), kept.sum(dim=0)
    by_expert = kept.t().flatten()  # (E * S,)
    if room is None:
        place, used = by_expert.nonzero(), None
    else:
        place = torch.nonzero_static(by_expert, size=room, fill_value=0)
        used = (torch.arange(room, device=kept.device) < counts.sum()).unsqueeze(1)
    place = place.squeeze(1)  # (N,)
    gate = gates.t().flatten().index_select(0, place).unsqueeze(1)
    if used is not None:
        gate = torch.where(used, gate, 0.0)
    return Rows(place % S, place // S, gate, counts, used)


def may_ask(x: Tensor) -> bool:
    """Whether the host may read a number off the device of x without stalling it."""
    return not x.is_cuda


def ragged_linear(x: Tensor, w: Tensor, rows: Rows) -> Tensor:
    """Each expert's rows times its own matrix: x (N, I), w (E, I, O) -> (N, O), in autocast's type where that is on.

    Spare rows are neither read nor multiplied, and come out as 0.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    x, w = x.to(dtype), w.to(dtype)
    if not has_grouped_mm(x, w):
        counts = rows.counts.tolist()
        *parts, spare = x.split([*counts, len(x) - sum(counts)])
        products = [part @ matrix for part, matrix in zip(parts, w.unbind(0))]
        return torch.cat([*products, spare.new_zeros(len(spare), w.shape[2])])
    ends = rows.counts.cumsum(0, dtype=torch.int32)
    if rows.used is None:
        return F.grouped_mm(x, w, offs=ends)
    x = torch.where(rows.used, x, 0)  # on the way back this zeroes the gradient of spare rows, which nobody writes
    return torch.where(rows.used, F.grouped_mm(x, w, offs=ends), 0)


def has_grouped_mm(x: Tensor, w: Tensor) -> bool:
    """Whether `grouped_mm` takes these: bf16 with rows of a multiple of 16 bytes, on a CPU fp32 too if not compiled."""
    dtypes = [torch.bfloat16]
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        dtypes.append(torch.float32)
    _, I, O = w.shape  # noqa: E741
    whole = I * x.element_size() % 16 == 0 and O * x.element_size() % 16 == 0
    return x.dtype in dtypes and whole and len(x) > 0


def activation(a: Tensor, b: Tensor, gate: Tensor, gelu: str) -> Tensor:
    """gate * gelu(a + b), a and b (N, F), gate (N, 1), in the type of a."""
    return (gate * F.gelu(a + b, approximate=gelu)).to(a.dtype)


@functools.cache
def compiled_activation(device: str):
    """`activation` in one pass over memory, and one backward; as it stands where that device cannot compile it."""
    compiled = torch.compile(activation, dynamic=True)
    a, b, gate = (torch.ones(5, width, device=device, requires_grad=True) for width in (3, 3, 1))
    try:
        compiled(a, b, gate, "tanh")  # what is compiled for one size serves all
    except Exception:  # no compiler, or another of many reasons: slower, but right
        return activation
    return compiled


class Experts(nn.Module):
    """One FFN of each of E experts. A row of w_in is what a unit reads, a row of w_out what it writes."""

    def __init__(self, E: int, D: int, F_: int, gelu: str):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(E, F_, D))
        self.b_in = nn.Parameter(torch.zeros(E, F_))
        self.w_out = nn.Parameter(torch.empty(E, F_, D))
        self.b_out = nn.Parameter(torch.zeros(E, D))
        self.gelu = gelu

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> gate * W_out^T gelu(W_in x + b_in), (N, D): all of an FFN but b_out."""
        activate = activation
        if len(x) * self.b_in.shape[1] >= WORTH_COMPILING and not torch.compiler.is_compiling():
            activate = compiled_activation(x.device.type)
        b = self.b_in.index_select(0, rows.expert)  # (N, F)
        z = activate(ragged_linear(x, self.w_in.mT, rows), b, rows.gate, self.gelu)  # (N, F)
        del b  # with nothing of its size left but what the backward pass needs
        return ragged_linear(z, self.w_out, rows)  # (N, D)


def dispatch(h: Tensor, gates: Tensor, rows: Rows, ffn: Experts) -> Tensor:
    """Sends each token to the experts that keep it and adds up their weighted outputs (XMoE eq. 2).

    h (S, D); gates (S, E), 0 where not kept -> (S, D) in the gates' type (fp32), 0 for a token that no expert kept.
    g (W z + b) = W (g z) + g b: the gate costs nothing inside the activation, and all biases are one product.
    """
    x = h.index_select(0, rows.token)  # (N, D)
    y = ffn(x, rows)  # (N, D)
    with torch.autocast(h.device.type, enabled=False):
        biases = gates @ ffn.b_out.to(gates.dtype)  # (S, D)
    return add_rows(biases, rows, y)


def dispatch_stacks(h: Tensor, gates: Tensor, rows: Rows, stack: Iterable) -> Tensor:
    """The same for experts that are stacks, so that h + g f(h) is BASE layers' g u + (1 - g) h (X-MoE eq. 2, 4.1)."""
    x = h.to(gates.dtype).index_select(0, rows.token)  # (N, D)
    return add_rows(gates.new_zeros(h.shape), rows, rows.gate * run_stack(x, rows, stack))


def run_stack(x: Tensor, rows: Rows, stack: Iterable) -> Tensor:
    """What an expert that is u <- u + FFN(LN(u)), layer by layer, from u = x, makes of its rows: u - x, (N, D)."""
    u, ungated = x, rows._replace(gate=torch.ones_like(rows.gate))  # the gate weighs the whole stack
    for norm, ffn in stack:
        y = ffn(norm(u, rows), ungated)
        u = u + y + ffn.b_out.index_select(0, rows.expert)
    return u - x


def add_rows(out: Tensor, rows: Rows, y: Tensor) -> Tensor:
    """out (S, D) with each row of y (N, D) added to its token."""
    return out.scatter_add(0, rows.token.unsqueeze(1).expand_as(y), y.to(out.dtype))


class ExpertNorm(nn.Module):
    """A layer norm for each expert's rows: (N, D) -> (N, D)."""

    def __init__(self, E: int, D: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, D))
        self.bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, u: Tensor, rows: Rows) -> Tensor:
        scale = self.weight.index_select(0, rows.expert)
        shift = self.bias.index_select(0, rows.expert)
        return F.layer_norm(u, u.shape[1:]) * scale + shift


class MoE(nn.Module):
    """A sparse FFN: a router, a capacity, and E experts, each one FFN or, with `expert_layers`, a stack of them."""

    def __init__(self, config: ModelConfig, gelu: str):
        super().__init__()
        size, D = sizes(config), config.n_embd
        E, F_ = size.num_experts, size.expert_size
        self.router = Router(
            D,
            E,
            size.score,
            size.gate,
            size.select,
            top_k=size.top_k,
            threshold=size.threshold,
            eval_threshold=size.eval_threshold,
            routing_dim=size.routing_dim,
            init_temperature=size.init_temperature,
            orthogonal=size.orthogonal,
            renormalize=size.renormalize,
            balance_choices=size.balance_choices,
            vocab_size=config.vocab_size,
            init_std=config.router_init_std or config.init_std,
        )
        self.layers = nn.ModuleList(Experts(E, D, F_, gelu) for _ in range(max(1, size.expert_layers)))
        self.ln_stack = nn.ModuleList(ExpertNorm(E, D) for _ in range(size.expert_layers))  # none: bare FFNs
        self.capacity_factor, self.eval_capacity_factor = size.capacity_factor, size.eval_capacity_factor
        self.exchange = None  # what takes rows to experts that are on other processes
        self.watchers = []  # called with (self, h, routing, kept); see measures.py; empty but where routing is measured

    def forward(self, h: Tensor, ids: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h (B, T, D), ids (B, T) -> (B, T, D), balance loss.

        real (S,): places in B * T of the tokens that are not padding, ascending; None if all are. Nobody serves
        padding, and it fills no capacity. What stands there comes out as 0.
        """
        flat, ids = h.flatten(0, 1), ids.flatten()
        if real is not None:
            flat, ids = flat.index_select(0, real), ids[real]  # (S, D), (S,)
        routing = self.router(flat, ids)
        S, E = routing.weight.shape
        gamma = self.capacity_factor if self.training else self.eval_capacity_factor
        C = expert_capacity(S, E, gamma)
        kept = within_capacity(routing.priority, C)  # (S, E)
        for watch in self.watchers:
            watch(self, flat, routing, kept)
        gates = routing.weight * kept
        room = min(S * self.router.max_choices, E * C)  # more cannot be kept
        if may_ask(h) or room == S * E:  # waiting for a GPU's count is cheaper than computing S * E rows
            room = None
        rows = kept_rows(gates, kept, room)
        if self.exchange:  # the experts are on several processes: see parallel.py
            y = self.exchange(self, flat, rows)
        elif self.ln_stack:
            y = dispatch_stacks(flat, gates, rows, zip(self.ln_stack, self.layers))
        else:
            y = dispatch(flat, gates, rows, self.layers[0])
        if real is not None:
            y = y.new_zeros(h.shape[0] * h.shape[1], h.shape[2]).index_copy(0, real, y)
        return y.view_as(h), routing.balance_loss

    def activations(self, h: Tensor, kept: Tensor) -> Tensor:
        """What the units of all kept rows compute before GELU, (N, F), of bare FFNs (XMoE figure 6)."""
        rows = kept_rows(kept.to(h.dtype), kept)
        ffn = self.layers[0]
        return ragged_linear(h.index_select(0, rows.token), ffn.w_in.mT, rows) + ffn.b_in.index_select(0, rows.expert)


class SparseModel(nn.Module):
    """What models with MoE layers have in common: their start, what routers keep fixed, and routing at test."""

    def draw(self, std: float, written_std: float):
        """Draws all weights from normals; `written_std` is for those that write to the residual stream."""
        for name, p in self.named_parameters():
            if any(part in name for part in ("router", "ln_", "gate_w")):
                continue  # these know their own start
            if name.endswith(("bias", "b_in", "b_out")):
                nn.init.zeros_(p)
            else:
                nn.init.normal_(p, std=written_std if name.endswith(("proj.weight", "w_out")) else std)
        for moe in self.moe_layers:
            for ffn in moe.layers if moe.ln_stack else ():
                nn.init.zeros_(ffn.w_out)  # as in BASE layers: an inserted stack changes nothing at first

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def sees_later(self) -> bool:
        """Whether experts choose among later tokens too, so that what a decoder reaches is no language model's."""
        return any(moe.router.select == "expert_choice" for moe in self.moe_layers)

    @property
    def limited_at_test(self) -> bool:
        """Whether choices may be cut at test. To expert_choice the limit is what chooses."""
        limited = any(moe.eval_capacity_factor < moe.router.num_experts for moe in self.moe_layers)
        return limited and not self.sees_later

    def after_step(self):
        """To be called after every optimizer step: restores what routers keep fixed."""
        for moe in self.moe_layers:
            moe.router.after_step()

    @contextmanager
    def no_limit(self):
        """Inside the `with`, experts have no capacity limit at test."""
        before = [moe.eval_capacity_factor for moe in self.moe_layers]
        for moe in self.moe_layers:
            moe.eval_capacity_factor = math.inf
        try:
            yield self
        finally:
            for moe, gamma in zip(self.moe_layers, before):
                moe.eval_capacity_factor = gamma


# ---------------------------------------------------------------------------------------------------------------------
# Dense layers


class FFN(nn.Module):
    """(B, T, D) -> (B, T, D) through `ffn_size` GELU units. gelu: "tanh" (GPT-2) or "none", the erf form (XLM-R)."""

    def __init__(self, config: ModelConfig, gelu: str):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.ffn_size)
        self.proj = nn.Linear(config.ffn_size, config.n_embd)
        self.gelu = gelu

    def forward(self, h: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(h), approximate=self.gelu))


class SelfAttention(nn.Module):
    """(B, T, D) -> (B, T, D), each position looking at all others, or at itself and those before it.

    With `relative_bias` what is added to the scores of a head depends on the distance, gated by the query (XLM-E 3.3).
    """

    def __init__(self, config: ModelConfig, causal: bool):
        super().__init__()
        D, self.n_head = config.n_embd, config.n_head
        self.dropout, self.causal = config.dropout, causal
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        if config.relative_bias:
            self.gate = nn.Parameter(torch.empty(2, D // self.n_head))  # u and v, shared by the heads
            self.gate_w = nn.Parameter(torch.ones(self.n_head))  # w

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
        bucket = self.bucket(place[None, :] - place[:, None])  # (T, T)
        return self.table(bucket).permute(2, 0, 1)

    def bucket(self, ahead: Tensor) -> Tensor:
        """j - i -> its bucket: one half for each sign; of a half, one half is exact, the other logarithmic."""
        half = self.table.num_embeddings // 2
        exact, far = half // 2, ahead.abs()
        ratio = torch.log(far.clamp(min=1) / exact) / math.log(self.longest / exact)
        coarse = exact + (ratio * (half - exact)).long()
        coarse = coarse.clamp(max=half - 1)
        return torch.where(far < exact, far, coarse) + half * (ahead > 0)


def biased_attention(q, k, v, scale, distance, mask=None, dropout: float = 0.0) -> Tensor:
    """softmax(q k / sqrt(d_k) + scale_i d_ij) v (XLM-E eqs. 7, 8). q, k, v (B, H, T, d_k); scale (B, H, T).

    distance (H, T, T); mask (B, 1, 1, T) bool. On CUDA nothing of the size (B, H, T, T) is made, and attention weights
    have no dropout, which FlexAttention does not offer.
    """
    if not has_flex_attention(q):
        bias = scale.unsqueeze(3) * distance
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), dropout_p=dropout)

    if mask is None:  # one graph for both: of more than a few, torch gives up compiling
        mask = torch.ones(len(q), 1, 1, q.shape[2], dtype=torch.bool, device=q.device)

    def score(value, b, h, i, j):
        return torch.where(mask[b, 0, 0, j], value + scale[b, h, i] * distance[h, i, j], -math.inf)

    return flex_attention()(q, k, v, score_mod=score)


def has_flex_attention(q: Tensor) -> bool:
    return q.is_cuda and q.shape[-1] >= 16  # the narrowest heads that it takes


@functools.cache
def flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # uncompiled, it would make all (B, H, T, T) scores


# ---------------------------------------------------------------------------------------------------------------------
# The decoder language model


class Block(nn.Module):
    """GPT-2's: each part reads a norm of the residual stream and adds to it."""

    def __init__(self, config: ModelConfig, sparse: bool):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = SelfAttention(config, causal=True)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.ffn = MoE(config, "tanh") if sparse else FFN(config, "tanh")
        self.dropout, self.sparse = nn.Dropout(config.dropout), sparse

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | float]:
        y = self.attn(self.ln_1(x))
        x = x + self.dropout(y)
        h, balance = self.ln_2(x), 0.0
        if self.sparse:
            y, balance = self.ffn(h, ids)
        else:
            y = self.ffn(h)
        return x + self.dropout(y), balance  # a token that no expert kept passes by on the residual stream


class GPT(SparseModel):
    """Decoder-only language model. ids (B, T) -> logits (B, T, V), and the balance loss summed over layers (scalar)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.moe_after:
            raise ValueError("a decoder has experts in place of FFNs: moe_after is for encoders")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        depths = range(1, 1 + config.n_layer)
        sparse = [config.router != "dense" and depth % config.moe_every == 0 for depth in depths]
        self.blocks = nn.ModuleList(Block(config, has_experts) for has_experts in sparse)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.frequency_bias else None  # GPT-2 has none
        # GPT-2: what writes to the residual stream starts smaller, the deeper the model.
        self.draw(config.init_std, config.init_std / math.sqrt(2 * config.n_layer))

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T) -> final hidden states (B, T, D), balance loss. Raises ValueError where T > block_size."""
        T, longest = ids.shape[1], self.config.block_size
        if T > longest:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = {longest}")
        x = self.dropout(self.wte(ids) + self.wpe.weight[:T])
        total = self.ln_f.weight.new_zeros(())
        for block in self.blocks:
            x, balance = block(x, ids)
            total = total + balance
        return self.ln_f(x), total

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h, balance = self.hidden(ids)
        return F.linear(h, self.wte.weight, self.bias), balance

    @torch.no_grad()
    def generate(self, ids: Tensor, new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """ids (B, T) -> (B, T + new_tokens), sampled from softmax(logits / temperature) over the top_k (None: all).

        There is no capacity limit, so that a token depends only on its own past and not on what else is in the batch.
        Raises ValueError for expert_choice, whose experts choose among tokens that are not written yet.
        """
        if self.sees_later:
            raise ValueError("expert_choice sees later tokens, so it cannot generate")
        was_training = self.training
        self.eval()
        with self.no_limit():
            for _ in range(new_tokens):
                h, _ = self.hidden(ids[:, -self.config.block_size :])
                logits = F.linear(h[:, -1], self.wte.weight, self.bias)  # (B, V)
                logits = logits.float() / temperature
                if top_k is not None:
                    best = logits.topk(min(top_k, logits.shape[1])).values
                    floor = best[:, -1:]
                    logits = logits.masked_fill(logits < floor, -math.inf)
                drawn = logits.softmax(dim=1).multinomial(1)
                ids = torch.cat([ids, drawn], dim=1)
        self.train(was_training)
        return ids


# ---------------------------------------------------------------------------------------------------------------------
# The encoder


class EncoderLayer(nn.Module):
    """XLM-R's: each part adds to its input, and a norm follows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attn = SelfAttention(config, causal=False)
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.ffn = FFN(config, "none")
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, distance: Tensor | None) -> Tensor:
        y = self.attn(x, mask, distance)
        x = self.ln_1(x + self.dropout(y))
        y = self.ffn(x)
        return self.ln_2(x + self.dropout(y))


class Encoder(SparseModel):
    """XLM-R's encoder with sparse layers between its own: x + MoE(x) after each layer of `moe_after` (X-MoE eq. 2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.router != "dense" and not config.moe_after:
            raise ValueError("an encoder's sparse layers stand behind those of moe_after: name one, or router dense")
        self.config, D = config, config.n_embd
        self.wte = nn.Embedding(config.vocab_size, D)
        self.wpe = nn.Embedding(PAD + 1 + config.block_size, D)  # the first two stay unused, as in XLM-R
        self.token_type = nn.Parameter(torch.empty(1, D))  # there is one type only
        self.ln_e = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.distance = Distance(config.n_head) if config.relative_bias else None  # all layers share it
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layer))
        self.moe_after = [] if config.router == "dense" else sorted(config.moe_after)
        self.moes = nn.ModuleList(MoE(config, "none") for _ in self.moe_after)
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
            for moe, after in zip(self.moes, self.moe_after):
                if after == depth:
                    y, balance = moe(x, ids, real)
                    x, total = x + y, total + balance
        if states is not None:
            states.append(x)
        return x, total


def real_mask(ids: Tensor, real: Tensor) -> Tensor:
    """ids (B, T), real (S,) places in B * T -> (B, T) bool, True there."""
    return ids.new_zeros(ids.numel(), dtype=torch.bool).index_fill_(0, real, True).view(ids.shape)


class MaskedLM(SparseModel):
    """An encoder with XLM-R's head, which sees only the M masked tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, D = config, config.n_embd
        self.encoder = Encoder(config)
        self.dense, self.ln_h = nn.Linear(D, D), nn.LayerNorm(D)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the output matrix is the embeddings'
        nn.init.normal_(self.dense.weight, std=config.init_std)
        nn.init.zeros_(self.dense.bias)

    def forward(self, ids: Tensor, masked: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids (B, T), masked (M,) places in B * T, real as in `Encoder` -> logits (M, V), balance loss."""
        x, balance = self.encoder(ids, real)
        x = x.flatten(0, 1).index_select(0, masked)  # (M, D)
        x = self.ln_h(F.gelu(self.dense(x)))
        return F.linear(x, self.encoder.wte.weight, self.bias), balance
