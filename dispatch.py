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
    given: (S, E) bool, and a list of tensors with F columns, positive where the experts' units are (gates never are
    negative).
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
    train = torch.is_grad_enabled() and any(x.requires_grad for x in (h, gate, w_in, b_in, w_out, b_out))
    with torch.autocast(h.device.type, enabled=False):
        arguments = h, gate, *places, counts, w_in, b_in, w_out, b_out.to(gate.dtype), hidden, gelu
        return StreamedExperts.apply(*arguments, train) if isinstance(counts, list) else grouped_experts(*arguments)


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
    enough to stay near the processor, and the stacked weights get their gradients slice by slice. For the rows of one
    expert, with a = h W1^T + b1, z = g gelu(a) and z' = g gelu'(a) (both saved), y = z W2^T and dy the gradient that
    comes in,

        dz = dy W2     dg = rowsum(dz z) / g     dW2 = dy^T z
        da = dz z'     db1 = colsum(da)          dW1 = da^T h     dh = da W1

    and for all experts at once y += g b2, dg += dy b2^T, db2 = g^T dy, with the (S, E) gates as a matrix. The gate lies
    in what is saved so that it costs no pass of its own over the rows; in fp16, z is coarse where g is below 1e-4.

    h (S, D); gate (S, E) fp32, 0 where not kept; choice, real: `kept_places`; counts: each expert's kept rows, a list.
    `hidden` receives each z (n, F). train: whether there will be a backward pass.
    """

    @staticmethod
    def forward(ctx, h, gate, choice, real, counts, w_in, b_in, w_out, b_out, hidden, gelu, train):
        token, expert = choice // len(counts), choice % len(counts)
        g = gate.flatten().index_select(0, choice).unsqueeze(1)  # (N, 1)
        g = torch.where(g.abs() < 1e-18, 1e-18, g)  # a gate of 0 would leave nothing of z to find dg from
        out, saved = torch.mm(gate, b_out), []
        ctx.spans = few_at_a_time(counts, max(w_in.shape[1:]), torch.get_num_threads() if h.device.type == "cpu" else 1)
        xs = shared_rows(ctx.spans, h)
        for some, rows, runs in ctx.spans:
            t = token[rows]
            x = torch.index_select(h, 0, t, out=xs[: len(t)])  # (n, D)
            a = b_in.index_select(0, expert[rows])  # (n, F)
            products(runs, x, w_in[some].mT, a, add=True)
            z, slope = activate(a, g[rows], gelu, slope=train)
            products(runs, z, w_out[some].mT, x)  # over x, which has done its work
            out.index_add_(0, t, x.to(out.dtype))
            hidden.append(z)
            saved += [z, slope] if train else []
        ctx.save_for_backward(h, gate, choice, token, g, w_in, w_out, b_out, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        h, gate, choice, token, g, w_in, w_out, b_out, *saved = ctx.saved_tensors
        dg, dh = torch.empty_like(g), torch.zeros_like(h, dtype=g.dtype)
        dw_in, db_in, dw_out = torch.empty_like(w_in), w_in.new_empty(w_in.shape[:2]), torch.empty_like(w_out)
        dgate, db_out = torch.mm(dout, b_out.t()), torch.mm(gate.t(), dout)
        dout = dout.to(h.dtype)
        dys, dzs = shared_rows(ctx.spans, h), shared_rows(ctx.spans, saved[0])
        for (some, rows, runs), z, slope in zip(ctx.spans, saved[::2], saved[1::2]):
            t = token[rows]
            dy, dz = torch.index_select(dout, 0, t, out=dys[: len(t)]), dzs[: len(t)]
            products(runs, dy, w_out[some], dz)
            for dz_rows, z_rows, slope_rows, dg_rows in few_rows(dz, z, slope, dg[rows]):
                torch.sum(dz_rows.to(dg.dtype) * z_rows, dim=1, keepdim=True, out=dg_rows)
                dz_rows.mul_(slope_rows)
            weight_gradients(runs, dy, z, dw_out[some])
            x, da = torch.index_select(h, 0, t, out=dy), dz
            weight_gradients(runs, da, x, dw_in[some])
            for da_run, db in zip(rows_by_run(da, runs), experts_by_run(db_in[some], runs)):
                torch.sum(da_run, dim=-2, out=db)
            products(runs, da, w_in[some], x)  # over x
            dh.index_add_(0, t, x.to(dh.dtype))
        dgate.view(-1).index_add_(0, choice, dg.div_(g).squeeze(1))
        return dh.to(h.dtype), dgate, None, None, None, dw_in, db_in, dw_out, db_out, None, None, None


def few_at_a_time(counts: list[int], width: int, threads: int, most: int = 1 << 20) -> list[tuple[slice, slice, list]]:
    """Neighbouring experts, taken together while rows x width are at most `most`: [(experts, rows, `equal_runs`)].

    Few calls where experts have few rows each, and yet small temporaries.
    """
    before, first, spans = list(itertools.accumulate(counts, initial=0)), 0, []
    for e in range(1, len(counts) + 1):
        if e == len(counts) or (before[e + 1] - before[first]) * width > most:
            some, rows = slice(first, e), slice(before[first], before[e])
            spans.append((some, rows, equal_runs(counts[some], threads)))
            first = e
    return spans


def equal_runs(counts: list[int], threads: int) -> list[tuple[int, int]]:
    """Neighbouring experts with equally many rows, as full ones have: [(how many experts, rows of each)].

    Such a run is one batched product, which gives each thread of a CPU whole experts. A last one that would keep all
    other threads waiting is a run of its own: they share it.
    """
    runs = []
    for rows, same in itertools.groupby(counts):
        experts = len(list(same))
        last = int(experts % threads == 1)
        runs += [(experts - last, rows)] * (experts > last) + [(1, rows)] * last
    return runs


def shared_rows(spans: list[tuple[slice, slice, list]], like: Tensor) -> Tensor:
    """(n, K) for the most rows of any span: memory that all spans share stays in a CPU's cache."""
    return like.new_empty(max(rows.stop - rows.start for _, rows, _ in spans), like.shape[1])


def rows_by_run(x: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    """All experts' rows (n, K) -> each run's: (experts, rows, K), or (rows, K) of one expert."""
    parts = x.split([experts * rows for experts, rows in runs])
    return [part if run[0] == 1 else part.view(*run, x.shape[1]) for part, run in zip(parts, runs)]


def experts_by_run(w: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    """(E, ...) -> each run's: (experts, ...), or (...) of one expert."""
    return [part.squeeze(0) for part in w.split([experts for experts, _ in runs])]


def products(runs, xs: Tensor, ws: Tensor, outs: Tensor, add: bool = False):
    """outs = xs ws for each expert's rows, or += with `add`. xs (n, K), ws (E, K, L), outs (n, L)."""
    for x, w, out in zip(rows_by_run(xs, runs), experts_by_run(ws, runs), rows_by_run(outs, runs)):
        (torch.addmm if x.dim() == 2 else torch.baddbmm)(out, x, w, beta=int(add), out=out)


def weight_gradients(runs, dys: Tensor, xs: Tensor, outs: Tensor):
    """outs = dys^T xs over each expert's rows. dys (n, L), xs (n, K), outs (E, L, K)."""
    for dy, x, out in zip(rows_by_run(dys, runs), rows_by_run(xs, runs), experts_by_run(outs, runs)):
        torch.matmul(dy.mT, x, out=out)


def few_rows(*tensors: Tensor, most: int = 1 << 17):
    """Some rows of each at a time: pass after pass over all of the first, (n, F), would leave a CPU's cache."""
    n, width = tensors[0].shape
    rows = n if tensors[0].is_cuda else most // width
    return zip(*(x.split(max(1, rows)) for x in tensors))


def activate(a: Tensor, g: Tensor, gelu: str, slope: bool) -> tuple[Tensor, Tensor]:
    """a (n, F), g (n, 1) -> g gelu(a) and, where `slope` is asked for, g gelu'(a), which may lie over a.

    Computed in the type of g.
    """
    kind, a = a.dtype, a.to(g.dtype)
    z, scratch = torch.empty_like(a), None
    for a_rows, z_rows, g_rows in few_rows(a, z, g):
        scratch = z.new_empty(2, *z_rows.shape) if scratch is None else scratch[:, : len(z_rows)]
        GELU[gelu](a_rows, g_rows, z_rows, scratch, slope)
    return z.to(kind), a.to(kind)


def tanh_gelu(a: Tensor, g: Tensor, z: Tensor, scratch: Tensor, slope: bool):
    """z = g gelu(a) = g a s and, over a, g gelu'(a) = g s + g a s (1 - s) dv/da.

    s = sigmoid(v), v = k (a + 0.044715 a^3), since 1 + tanh(x) = 2 sigmoid(2 x). In few passes, it takes half of
    F.gelu's time on a CPU.
    """
    (s, gs), k = scratch, 2 * math.sqrt(2 / math.pi)
    torch.addcmul(a.new_full((), k), a, a, value=0.044715 * k, out=s).mul_(a).sigmoid_()
    torch.mul(s, g, out=gs)
    torch.mul(a, gs, out=z)
    if slope:
        dv = torch.addcmul(a.new_full((), k), a, a, value=3 * 0.044715 * k, out=a)
        torch.addcmul(gs, dv, torch.addcmul(z, z, s, value=-1, out=s), out=a)


def erf_gelu(a: Tensor, g: Tensor, z: Tensor, scratch: Tensor, slope: bool):
    """z = g gelu(a) and, over a, g gelu'(a). F.gelu's erf form is as fast as can be."""
    torch.ops.aten.gelu.out(a, out=z)
    z.mul_(g)
    if slope:
        a.copy_(torch.ops.aten.gelu_backward(scratch[0].copy_(g), a))


GELU = {"tanh": tanh_gelu, "none": erf_gelu}


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
