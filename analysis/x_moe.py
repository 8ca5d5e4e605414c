"""X-MoE's figures 2 and 3: router inputs and expert loads in runs of train_mlm.py and finetune_xtreme.py."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill

import torch
from torch import Tensor

from analysis import shared
from analysis.shared import EvalOptions, FigureOptions, Panel, TrainedRun
from engine import pretrained
from engine.device import warn
from model import MaskedLM

NEIGHBORS = 100  # UMAP's n_neighbors


@dataclass
class Umap(EvalOptions):
    max_tokens: int = 4096  # validation tokens, at most; the first of each language come first


def umap(options: Umap):
    """X-MoE's figures 2a and 2b: tokens as a router sees them, embedded in the hyperbolic plane.

    A panel is a run of train_mlm.py whose router compares tokens with experts; default: the demo's with seed 0. A point
    is a validation token as it enters the first sparse layer: its hidden state h, or W h if the router projects it
    (X-MoE). Its colour is its expert. In the paper, each of X-MoE's experts has a cluster, while SMoE's overlap. UMAP
    with 100 neighbours and min-dist 1, drawn in the Poincare disk.
    """
    from umap import UMAP

    def fits(config: dict) -> bool:
        return (options.folders or config["seed"] == 0) and shared.reads(config, "score")

    runs = shared.select_runs("train_mlm", options, fits, "has no router that compares tokens with experts")
    numbers = {}
    drawing = shared.canvas(len(runs), width=5.5, height=5.8)
    paper = {"n_neighbors": NEIGHBORS, "min_dist": 1.0, "output_metric": "hyperboloid"}  # X-MoE 4.5
    layout = UMAP(**paper, random_state=0, n_jobs=1, verbose=True)  # takes minutes
    angle = torch.linspace(0, 2 * math.pi, 361)
    for axes, run in zip(drawing.axes, shared.loaded(runs, options)):
        x, expert = router_inputs(run, options.max_tokens)
        disk = poincare(torch.from_numpy(layout.fit_transform(x.numpy())).double())
        points = axes.scatter(*disk.t(), c=expert, cmap="turbo", s=4)
        drawing.colorbar(points, ax=axes, label="expert", shrink=0.6)
        axes.plot(angle.cos(), angle.sin(), color="0.6", linewidth=1)
        axes.set(title=f"{fill(run.name, 40)}\n{len(x):,} tokens coloured by expert", aspect="equal")
        axes.axis("off")
        numbers[run.folder] = {"points": disk.tolist(), "experts": expert.tolist()}
    shared.save(umap, options, drawing, {"runs": numbers})


@torch.no_grad()
def router_inputs(run: TrainedRun, max_tokens: int) -> tuple[Tensor, Tensor]:
    """-> h (S, D) or W h (S, d_e), which the first sparse layer's router compares with its experts; first choices (S,).

    The validation tokens are masked as in the evaluations during training.
    """
    states, experts = [], []

    def watch(moe, h, routing, kept):
        h = h.to(moe.router.experts.dtype)
        with torch.autocast(h.device.type, enabled=False):  # as in the router itself
            states.append(moe.router.project(h).cpu())
        experts.append(routing.priority.argmax(dim=1).cpu())

    run.model.moe_layers[0].watchers.append(watch)
    for _, _, batch in run.data.eval_batches("valid", 1, max_tokens):
        with run.context.autocast():
            run.model(*run.context.send_all(batch.ids, batch.nonpad))
    states = torch.cat(states)
    if len(states) <= NEIGHBORS:
        raise ValueError(f"--max_tokens {max_tokens} is too small for UMAP with {NEIGHBORS} neighbours")
    return states, torch.cat(experts)


def poincare(x: Tensor) -> Tensor:
    """Maps points x (n, 2) of the hyperboloid z^2 = 1 + |x|^2 to the unit disk, (n, 2).

    An isometry moves the mean of the disk's points to its centre.
    """
    z = (1 + x.square().sum(dim=1)).sqrt()
    disk = torch.complex(*x.t()) / (1 + z)
    mean = disk.mean()
    centred = (disk - mean) / (1 - mean.conj() * disk)
    return torch.view_as_real(centred)


def gradient(options: EvalOptions):
    """X-MoE's equations 4 to 6: the part of the hidden states' gradient that comes through the gate.

    The loss reaches a token's hidden state h, the input of a sparse layer, through its experts and through the gate. In
    the paper the gate's part makes representations collapse: in SMoE it is a sum of the E experts' embeddings, so it
    moves all tokens within E dimensions. In X-MoE it lies in the d_e dimensions of the projection. A line is the first
    sparse layer of a run of train_mlm.py on validation tokens: the singular values of the tokens' gradients. The table
    has the number of dimensions of the gate's part, and its norm over that of the whole gradient.
    """
    records, rows, size = [], [], "log10 of its size, relative to the largest"
    fits = partial(shared.reads, constant="score")
    runs = shared.select_runs("train_mlm", options, fits, "has no router that compares tokens with experts")
    for run in shared.loaded(runs, options):
        through_gate, rest = gradients(run, options.max_tokens)
        for way, part in {"Through the gate": through_gate, "The rest": rest}.items():
            sizes = torch.linalg.svdvals(part)
            for number, x in enumerate((sizes / sizes[0]).clamp(min=1e-8).log10().tolist(), 1):
                records.append(run.record | {"way": way, "dimension": number, size: x})
        norm = through_gate.norm() / (through_gate + rest).norm()
        rank = int(torch.linalg.matrix_rank(through_gate, rtol=1e-4))
        rows.append(run.record | {"dimensions": rank, "norm, of the whole": float(norm)})
    ways = shared.grouped(records, "way").items()
    panels = [Panel(way, group, "experts", "dimension", size) for (way,), group in ways]
    shared.show(gradient, options, records, ("experts",), panels, rows)


def gradients(run: TrainedRun, max_tokens: int) -> tuple[Tensor, Tensor]:
    """-> the loss's gradient with respect to h, through the first sparse layer's gate and on all other ways, (S, D)."""
    saved = pretrained.read(Path(run.folder))  # `run.model` is its encoder, without the head that predicts tokens
    model = MaskedLM(run.model.config, run.model.vocab_size).eval()
    run.context.place(pretrained.fill(model, {}, saved.weights, run.folder))
    moe, hidden = model.moe_layers[0], []

    def separate(router, inputs):
        h, *others = inputs
        hidden.append(h.detach().requires_grad_())
        return hidden[-1], *others

    moe.register_forward_pre_hook(lambda moe, inputs: hidden.append(inputs[0]))
    moe.router.register_forward_pre_hook(separate)
    through_gate, rest = [], []
    for _, _, batch in run.data.eval_batches("valid", 1, max_tokens):
        ids, masked, targets, nonpad = run.context.send_all(*batch[:4])
        hidden.clear()
        loss, _ = model(ids, masked, targets, nonpad)
        whole, gate = (gradient.flatten(0, -2).cpu() for gradient in torch.autograd.grad(loss, hidden))
        rest.append(whole if nonpad is None else whole[nonpad.cpu()])
        through_gate.append(gate)
    return torch.cat(through_gate), torch.cat(rest)


def collapse(options: FigureOptions):
    """X-MoE's figures 2c and 3a: representation collapse (RC) and routing fluctuation (RF) during training.

    RC is the spread of hidden states within experts over that between experts; it falls as representations collapse. In
    the paper SMoE's falls, while X-MoE's is higher and rises. RF is the share of validation tokens whose expert changed
    since the previous evaluation; in the paper X-MoE's is lower. Both come from the logs of runs of train_mlm.py.
    """
    records = []
    for run in shared.select_runs("train_mlm", options, shared.router_of, "has no experts"):
        for i, depth in enumerate(sorted(run.config["moe_after"])):
            for evaluation in run.log:
                layer = evaluation["layers"][i]
                record = {"run": run.folder, "experts": f"{run.name}, layer {depth}", "step": evaluation["step"]}
                records.append(record | {"perplexity": evaluation["ppl"], "RC": layer["rc"], "RF": layer["rf"]})
    panels = [
        Panel("RC: spread within over spread between experts (2c)", records, "experts", "step", "RC", from_zero=True),
        Panel("RF: share of tokens whose expert changed (3a)", records, "experts", "step", "RF", from_zero=True),
    ]
    shared.show(collapse, options, records, ("experts", "step"), panels)


def consistency(options: FigureOptions):
    """X-MoE's figure 3b: consistency of expert loads across fine-tuning runs that differ only in their seed.

    1: the experts get the same shares of the tokens in all runs. 1 over the number of runs: the loads are unrelated.
    It is the mean of the correlation matrix of the loads over 100 steps, diagonal included. In the paper, with 12 runs
    on XNLI, X-MoE's comes close to 1, and SMoE's falls. Pass runs of finetune_xtreme.py, at least two seeds of each.
    """
    groups, records, rows, levels = {}, [], [], {}
    for run in shared.select_runs("finetune_xtreme", options):
        loads = run.result["loads"]
        if loads and loads[0]:
            groups.setdefault(run.name, []).append(loads)
        else:
            warn(f"{run.folder} is left out: it {'has no experts' if loads else 'is shorter than 100 steps'}")
    for name, group in groups.items():
        loads = torch.tensor(group, dtype=torch.float64)  # (m, spans of 100 steps, layers, E)
        m, spans, layers, _ = loads.shape
        if m == 1:
            warn(f"{name} is left out: it has one run; pass another that differs only in --seed")
            continue
        levels[f"{m} runs with unrelated loads"] = 1 / m
        for layer in range(layers):
            for span in range(spans):
                correlation = loads[:, span, layer].corrcoef()  # (m, m); nan if a run's loads are all equal
                record = {"encoder": f"{name}, sparse layer {layer + 1}", "step": 100 * (span + 1)}
                records.append(record | {"consistency": float(correlation.mean()), "unrelated loads": 1 / m})
            rows += [records[-spans], records[-1]][:spans]  # the first and the last 100 steps
    if not records:
        raise ValueError("no two finished runs with experts differ only in --seed: run finetune_xtreme.py --seeds 2")
    panel = Panel("1: all runs have the same loads", records, "encoder", "step", "consistency", levels, from_zero=True)
    shared.show(consistency, options, records, ("encoder", "step"), [panel], rows)
