"""From what a router wants to what the experts compute: capacity, dispatch, and the experts' arithmetic.

Cost follows the kept rows: they are gathered by expert, computed as ragged products, added back. Nothing is padded.
S tokens, D model width, E experts, F inner width of one expert, C expert capacity, N kept rows.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from routers import NOT_CHOSEN, Routing

MIN_CAPACITY = 4


def expert_capacity(tokens: int, num_experts: int, capacity_factor: float) -> int | None:
    """C, the rows that one expert may serve (XMoE eq. 3), of at least 4 and at most all; None is no limit.

    What is above a whole number by 1e-7 or less is rounding: gamma 1.1 of 100 tokens over 10 experts is 11, not 12.
    """
    if capacity_factor == math.inf:
        return None
    return min(tokens, max(MIN_CAPACITY, math.ceil(capacity_factor * tokens / num_experts - 1e-7)))


def within_capacity(priority: Tensor, capacity: int | None) -> Tensor:
    """(S, E) priorities -> (S, E) bool: of the tokens that chose it, each expert keeps the first C by priority.

    Among equal priorities the earlier token comes first. Nothing is sorted: the C-th highest is an expert's bar.
    """
    if capacity is None or capacity >= len(priority):
        return priority > NOT_CHOSEN
    priority = priority.t().contiguous()  # (E, S), so that the tokens of an expert lie together
    bar = priority.topk(capacity, dim=1, sorted=False).values.amin(dim=1, keepdim=True)  # (E, 1)
    above, tied = priority > bar, (priority == bar) & (bar > NOT_CHOSEN)
    room = capacity - above.sum(dim=1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=1, dtype=torch.int32) <= room))).t()


def dispatch(
    h: Tensor,
    routing: Routing,
    capacity: int | None,
    weights: tuple[Tensor, ...] | list[tuple[Tensor, ...]],
    most: int | None = None,
    observe=None,
    gelu: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """Sends each token to the experts that keep it and adds up their weighted outputs (XMoE eq. 2).

    h (S, D); weights: w_in (E, F, D), b_in (E, F), w_out (E, D, F), b_out (E, D). A list of such, each followed by
    ln_weight and ln_bias (E, D), makes every expert a residual stack: `residual_stacks`. gelu: "tanh" or "none" (erf).

    Returns (S, D) in the gates' type (fp32), zero for a token that no expert kept, and the kept counts (E,). `most` is
    how many experts one token may choose, None where that is not known. `observe(kept, hidden)` is called where it is
    given: (S, E) bool, and a list of tensors with F columns, the experts' pre-activations.
    """
    kept = within_capacity(routing.priority, capacity)
    counts, hidden, (S, E) = kept.sum(dim=0), [], kept.shape
    stacked = not isinstance(weights[0], Tensor)
    if has_grouped_mm(h, weights[0][0] if stacked else weights[0]):
        known, rows = counts, min(S * (most or E), E * (S if capacity is None else capacity))
        if capacity is None and rows == S * E:  # no bound at all: then the device is asked
            rows = int(counts.sum())
    else:
        known = counts.tolist()
        rows = sum(known)
    gate, places = routing.weight * kept, kept_places(kept, known, rows)  # (S, E)
    y = (residual_stacks if stacked else ffn_experts)(h, gate, places, known, weights, hidden, gelu)
    if observe:
        observe(kept, hidden)
    return y, counts


def ffn_experts(h, gate, places, counts: list[int] | Tensor, weights, hidden: list, gelu: str) -> Tensor:
    """(S, D) -> (S, D): the gated sum over FFN experts. `counts` (E,) are a list where the host knows them."""
    w_in, b_in, w_out, b_out = weights
    h, w_in, b_in, w_out = (x.to(compute_type(h)) for x in (h, w_in, b_in, w_out))
    with torch.autocast(h.device.type, enabled=False):
        run = StreamedExperts.apply if isinstance(counts, list) else grouped_experts
        return run(h, gate, *places, counts, w_in, b_in, w_out, b_out.to(gate.dtype), hidden, gelu)


def residual_stacks(h, gate, places, counts, stack: list, hidden: list, gelu: str) -> Tensor:
    """(S, D) -> (S, D): the gated sum over experts that are u <- u + FFN(LN(u)), layer by layer, from u = h.

    An expert's output is u - h, so that h + g f(h) is BASE layers' g u + (1 - g) h (X-MoE eq. 2, 4.1).
    """
    (S, E), (choice, real) = gate.shape, places
    token, expert = choice // E, choice % E
    start = u = h.to(gate.dtype).index_select(0, token)  # (N, D)
    # Each row is now a token of its own, which its expert alone keeps, with a gate of 1.
    own_gate = (real & F.one_hot(expert, E).bool()).to(gate.dtype)  # (N, E)
    own_places = torch.arange(len(choice), device=choice.device) * E + expert, real
    for *ffn, ln_weight, ln_bias in stack:
        x = F.layer_norm(u, u.shape[1:]) * ln_weight.index_select(0, expert) + ln_bias.index_select(0, expert)
        u = u + ffn_experts(x, own_gate, own_places, counts, ffn, hidden, gelu)
    g = gate.flatten().index_select(0, choice).unsqueeze(1)  # (N, 1)
    return gate.new_zeros(S, h.shape[1]).index_add(0, token, g * (u - start))


def kept_places(kept: Tensor, counts: list[int] | Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where in (S, E), flattened, the kept pairs are: (N,), by expert, then by token; and (N, 1) bool, which are real.

    Where the host does not know how many are kept, N is `rows`, the most there can be, and those beyond are not real.
    """
    S, E = kept.shape
    if isinstance(counts, list):
        place = kept.t().flatten().nonzero().squeeze(1)
        choice = place % S * E + place // S
        return choice, torch.ones_like(choice, dtype=torch.bool).unsqueeze(1)
    ends = counts.cumsum(0)
    slot = torch.where(kept, kept.cumsum(0) - 1 + ends - counts, rows)  # (S, E), `rows` where not kept
    choice = torch.full((rows + 1,), S * E, device=kept.device)
    choice = choice.scatter_(0, slot.flatten(), torch.arange(S * E, device=kept.device))[:rows]
    return choice.clamp(max=S * E - 1), (choice < S * E).unsqueeze(1)


def compute_type(h: Tensor) -> torch.dtype:
    """What products are done in: autocast's type where that is on, else the type of h."""
    device = h.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype


class StreamedExperts(torch.autograd.Function):
    """y_s = sum over the experts e that keep token s of g_se (W2_e gelu(W1_e h_s + b1_e) + b2_e), a few at a time.

    One node with its own backward: rows are gathered again instead of kept, the temporaries of a few experts are small
    enough to stay in the cache, and the stacked weights get their gradients slice by slice. For the rows of one expert,
    with a = h W1^T + b1 (the only thing saved), z = gelu(a), y = g z W2^T and dy the gradient that comes in,

        dz = dy W2        dg = rowsum(dz z)        dW2 = dy^T (g z)
        da = g dz gelu'(a)     db1 = colsum(da)    dW1 = da^T h      dh = da W1

    and for all experts at once y += g b2, dg += dy b2^T, db2 = g^T dy, with the (S, E) gates as a matrix.

    h (S, D); gate (S, E), 0 where not kept; choice, real: `kept_places`; counts: the kept rows of each expert, a list.
    `hidden` receives each a (n, F).
    """

    @staticmethod
    def forward(ctx, h, gate, choice, real, counts, w_in, b_in, w_out, b_out, hidden, gelu):
        token, expert = choice // len(counts), choice % len(counts)
        g = gate.flatten().index_select(0, choice).unsqueeze(1)  # (N, 1)
        out = torch.mm(gate, b_out)
        w1, w2, saved = w_in.transpose(1, 2).unbind(), w_out.transpose(1, 2).unbind(), []
        for some, rows in few_at_a_time(counts, max(w_in.shape[1:])):
            sizes, t = counts[some], token[rows]
            x = h.index_select(0, t)  # (n, D)
            a = b_in.index_select(0, expert[rows])  # (n, F)
            products(x.split(sizes), w1[some], a.split(sizes), add=True)
            z = GELU[gelu](a.to(g.dtype)).mul_(g[rows]).to(h.dtype)
            y = products(z.split(sizes), w2[some], x.split(sizes), x)  # over x, which has done its work
            out.index_add_(0, t, y.to(out.dtype))
            saved.append(a)
        hidden += saved
        ctx.counts, ctx.gelu = counts, gelu
        ctx.save_for_backward(h, gate, choice, token, g, w_in, w_out, b_out, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        h, gate, choice, token, g, w_in, w_out, b_out, *hidden = ctx.saved_tensors
        dg, dh = torch.empty_like(g), torch.zeros_like(h, dtype=g.dtype)
        dw_in, db_in, dw_out = torch.empty_like(w_in), w_in.new_empty(w_in.shape[:2]), torch.empty_like(w_out)
        dgate, db_out = torch.mm(dout, b_out.t()), torch.mm(gate.t(), dout)
        dout = dout.to(h.dtype)
        w1, w2, dw1, db1, dw2 = (w.unbind() for w in (w_in, w_out, dw_in, db_in, dw_out))
        for (some, rows), a in zip(few_at_a_time(ctx.counts, max(w_in.shape[1:])), hidden):
            sizes, t = ctx.counts[some], token[rows]
            z, slope = GELU_AND_SLOPE[ctx.gelu](a.to(g.dtype))
            dy, dz = dout.index_select(0, t), torch.empty_like(a)
            dz = products(dy.split(sizes), w2[some], dz.split(sizes), dz).to(g.dtype)
            torch.sum(dz * z, dim=1, keepdim=True, out=dg[rows])
            z, da = z.mul_(g[rows]).to(h.dtype), dz.mul_(slope).mul_(g[rows]).to(h.dtype)
            products(dy.t().split(sizes, dim=1), z.split(sizes), dw2[some])
            for da_e, db in zip(da.split(sizes), db1[some]):
                torch.sum(da_e, dim=0, out=db)
            x = torch.index_select(h, 0, t, out=dy)
            products(da.t().split(sizes, dim=1), x.split(sizes), dw1[some])
            dx = products(da.split(sizes), w1[some], x.split(sizes), x)
            dh.index_add_(0, t, dx.to(dh.dtype))
        dgate.view(-1).index_add_(0, choice, dg.squeeze(1))
        return dh.to(h.dtype), dgate, None, None, None, dw_in, db_in, dw_out, db_out, None, None


def few_at_a_time(counts: list[int], width: int, most: int = 1 << 18) -> list[tuple[slice, slice]]:
    """Neighbouring experts, taken together while rows x width are at most `most`: [(which experts, which rows)].

    Small enough for the cache, and yet few calls where experts have few rows each.
    """
    before, first, spans = list(itertools.accumulate(counts, initial=0)), 0, []
    for e in range(1, len(counts) + 1):
        if e == len(counts) or (before[e + 1] - before[first]) * width > most:
            spans.append((slice(first, e), slice(before[first], before[e])))
            first = e
    return spans


def products(xs, ys, outs, out=None, add: bool = False):
    """outs[i] = xs[i] @ ys[i], or += with `add`. Returns `out`, of which the outs are parts."""
    for x, y, part in zip(xs, ys, outs):
        part.addmm_(x, y, beta=int(add))
    return out


# The tanh form: gelu(a) = a sigmoid(v), v = k (a + 0.044715 a^3), since 1 + tanh(x) = 2 sigmoid(2 x). In place, and
# written so, it takes half of F.gelu's time on a CPU; F.gelu's erf form is as fast as can be.
GELU_K, GELU_C = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715


def gelu_curve(a: Tensor) -> Tensor:
    """sigmoid(v): gelu(a) / a"""
    return torch.addcmul(a.new_full((), GELU_K), a, a, value=GELU_C).mul_(a).sigmoid_()


def tanh_gelu_and_slope(a: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(a), and gelu'(a) = s + a s (1 - s) dv/da with s = sigmoid(v)"""
    s = gelu_curve(a)
    z = a * s
    slope = torch.addcmul(a.new_full((), GELU_K), a, a, value=3 * GELU_C)  # dv/da
    return z, s.addcmul_(slope, torch.addcmul(z, z, s, value=-1))


GELU = {"tanh": lambda a: gelu_curve(a).mul_(a), "none": F.gelu}
GELU_AND_SLOPE = {
    "tanh": tanh_gelu_and_slope,
    "none": lambda a: (F.gelu(a), torch.ops.aten.gelu_backward(torch.ones_like(a), a)),
}


def has_grouped_mm(h: Tensor, w_in: Tensor) -> bool:
    """Whether the products can be `grouped_mm`: on CUDA, in bf16, with rows of a multiple of 16 bytes."""
    return h.is_cuda and compute_type(h) == torch.bfloat16 and w_in.shape[1] % 8 == 0 and w_in.shape[2] % 8 == 0


def grouped_experts(h, gate, choice, real, counts, w_in, b_in, w_out, b_out, hidden: list, gelu: str) -> Tensor:
    """`StreamedExperts` where many small products must be one kernel, and asking the device would stall it.

    The host knows only N, the most that can be kept: the kept rows lie first, by expert, and offsets stay on the
    device. `grouped_mm` neither computes nor writes the rest, so whatever comes out of it is masked, which masks the
    gradients on their way back too.
    """
    (S, E), ends = gate.shape, counts.cumsum(0, dtype=torch.int32)
    token = choice // E
    # b_in is a column of w_in that meets a column of ones: its gradient is then a product too.
    h = torch.cat([h, h.new_ones(S, 1), h.new_zeros(S, 7)], dim=1)
    w_in = torch.cat([w_in, b_in.unsqueeze(2), w_in.new_zeros(*b_in.shape, 7)], dim=2)
    x = torch.where(real, h.index_select(0, token), 0)
    a = torch.where(real, F.grouped_mm(x, w_in.transpose(1, 2), offs=ends), 0)  # (N, F)
    g = torch.where(real, gate.flatten().index_select(0, choice).unsqueeze(1), 0)
    z = (F.gelu(a, approximate=gelu) * g).to(h.dtype)
    y = torch.where(real, F.grouped_mm(z, w_out.transpose(1, 2), offs=ends), 0)  # (N, D)
    hidden.append(a)
    return torch.mm(gate, b_out).index_add(0, token, y.to(gate.dtype))
