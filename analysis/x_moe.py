"""X-MoE's figures 2 and 3: what enters the routers, from runs of train_mlm.py and finetune_xtreme.py."""

import math
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import torch
from torch import Tensor

from analysis import shared
from analysis.shared import Drawn, Measured, Panel, Trained
from engine.device import warn
from engine.files import read_json

NEIGHBORS = 100  # that UMAP looks at


@dataclass
class Umap(Measured):
    max_tokens: int = 4096  # of the validation text, at most; the first of each language come first


def umap(options: Umap):
    """X-MoE's figures 2a and 2b: tokens as a sparse layer's router sees them, in the hyperbolic plane.

    A panel is a run of train_mlm.py whose router scores; by default every one of the demo's with seed 0. A point is a
    token of the validation text as it enters the first sparse layer: its hidden state h, or W h where the router
    projects (X-MoE). Its colour is its expert. In the paper X-MoE's experts have clusters of their own, and SMoE's are
    mixed. UMAP with 100 neighbours and min-dist 1; the disk is Poincare's, all of the hyperbolic plane.
    """
    UMAP = shared.library("umap", "umap-learn").UMAP

    def fits(config: dict) -> bool:
        meant = options.folders or config["seed"] == 0
        return meant and shared.reads(config, "score")

    runs = shared.choose("train_mlm", options, fits, "has no router that compares tokens with experts")
    numbers = {}
    drawing = shared.canvas(len(runs), width=5.5, height=5.8)
    how = {"n_neighbors": NEIGHBORS, "min_dist": 1.0, "output_metric": "hyperboloid"}  # X-MoE 4.5
    layout = UMAP(**how, random_state=0, n_jobs=1, verbose=True)  # it takes minutes
    turn = torch.linspace(0, 2 * math.pi, 361)
    for axes, run in zip(drawing.axes, shared.opened(runs, options)):
        x, expert = routed(run, options.max_tokens)
        plane = layout.fit_transform(x.numpy())
        disk = poincare(torch.from_numpy(plane).double())
        points = axes.scatter(*disk.t(), c=expert, cmap="turbo", s=4)
        drawing.colorbar(points, ax=axes, label="expert", shrink=0.6)
        axes.plot(turn.cos(), turn.sin(), color="0.6", linewidth=1)
        axes.set(title=f"{fill(run.name, 40)}\n{len(x):,} tokens by their experts", aspect="equal")
        axes.axis("off")
        numbers[run.folder] = {"points": disk.tolist(), "experts": expert.tolist()}
    shared.keep(umap, options, drawing, {"runs": numbers})


@torch.no_grad()
def routed(run: Trained, max_tokens: int) -> tuple[Tensor, Tensor]:
    """(S, D) or (S, d_e) what the first sparse layer's router compares with its experts, h or W h; (S,) first choices.

    The tokens are of the validation text, masked as in the evaluations of training.
    """
    states, experts = [], []

    def watch(moe, h, routing, kept):
        h = h.to(moe.router.experts.dtype)
        with torch.autocast(h.device.type, enabled=False):  # as in the router itself
            states.append(moe.router.project(h).cpu())
        experts.append(routing.priority.argmax(dim=1).cpu())

    run.model.moe_layers[0].watchers.append(watch)
    for _, _, batch in run.data.eval_batches("valid", 1, max_tokens):
        ids, real = run.context.send_all(batch.ids, batch.real)
        with run.context.autocast():
            run.model(ids, real)
    states = torch.cat(states)
    if len(states) <= NEIGHBORS:
        raise ValueError(f"--max_tokens {max_tokens} is too few for UMAP with {NEIGHBORS} neighbours")
    return states, torch.cat(experts)


def poincare(x: Tensor) -> Tensor:
    """Points of the hyperboloid z^2 = 1 + |x|^2, by their x (n, 2), in the unit disk (n, 2), around its middle.

    The mean of the disk's points is moved to its middle, which changes no hyperbolic distance.
    """
    z = (1 + x.square().sum(dim=1)).sqrt()
    disk = torch.complex(*x.t()) / (1 + z)
    mean = disk.mean()
    moved = (disk - mean) / (1 - mean.conj() * disk)
    return torch.view_as_real(moved)


def collapse(options: Drawn):
    """X-MoE's figures 2c and 3a: collapse (RC) and fluctuation (RF) in the course of training.

    RC is the spread of hidden states within experts over that between them. It falls in a collapse: in the paper
    SMoE's falls, and X-MoE's is higher and rises. RF is the share of the validation tokens whose expert has changed
    since the evaluation before: in the paper X-MoE's is lower. Both are from the logs of runs of train_mlm.py.
    """
    records = []
    for run in shared.choose("train_mlm", options, shared.router_of, "has no experts"):
        for i, depth in enumerate(sorted(run.config["moe_after"])):
            for evaluation in run.log:
                layer = evaluation["layers"][i]
                record = {"run": run.folder, "experts": f"{run.name}, layer {depth}"}
                record |= {"step": evaluation["step"], "perplexity": evaluation["ppl"]}
                records.append(record | {"RC": layer["rc"], "RF": layer["rf"]})
    panels = [
        Panel("RC: spread within experts over that between (2c)", records, "experts", "step", "RC", from_zero=True),
        Panel("RF: share of tokens whose expert changed (3a)", records, "experts", "step", "RF", from_zero=True),
    ]
    shared.show(collapse, options, records, ("experts", "step"), panels)


def consistency(options: Drawn):
    """X-MoE's figure 3b: how alike the loads of the experts are in fine-tuning runs that differ by seed alone.

    1: the same experts get the same share of the tokens in all runs. 1 over the number of runs: the loads have nothing
    to do with each other. It is the mean of the correlation matrix of the loads over 100 steps, with its diagonal, as
    in the paper, which has 12 runs on XNLI: X-MoE comes close to 1, and SMoE falls. Give runs of finetune_xtreme.py,
    two seeds or more of each kind.
    """
    kinds, records, rows, levels = {}, [], [], {}
    for run in shared.choose("finetune_xtreme", options):
        loads = read_json(Path(run.folder, "result.json"))["loads"]
        if loads and loads[0]:
            kinds.setdefault(run.name, []).append(loads)
        else:
            warn(f"{run.folder} is left out: it {'has no experts' if loads else 'is shorter than 100 steps'}")
    for name, own in kinds.items():
        loads = torch.tensor(own, dtype=torch.float64)  # (m, spans of 100 steps, layers, E)
        m, spans, layers, _ = loads.shape
        if m == 1:
            warn(f"{name} is left out: give another run that differs by --seed and nothing else")
            continue
        levels[f"{m} runs with unrelated loads"] = 1 / m
        for layer in range(layers):
            for span in range(spans):
                correlation = loads[:, span, layer].corrcoef()  # (m, m); nan where all loads of a run are equal
                record = {"encoder": f"{name}, sparse layer {layer + 1}", "step": 100 * (span + 1)}
                records.append(record | {"consistency": float(correlation.mean()), "unrelated loads": 1 / m})
            rows += [records[-spans], records[-1]][:spans]  # the first 100 steps, and the last
    if not records:
        raise ValueError("no two finished runs with experts differ by --seed alone: finetune_xtreme.py --seeds 2")
    title = "1: all runs load their experts alike"
    panel = Panel(title, records, "encoder", "step", "consistency", levels, from_zero=True)
    shared.show(consistency, options, records, ("encoder", "step"), [panel], rows)
