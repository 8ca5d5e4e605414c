"""X-MoE's figures 2 and 3: what enters the routers, from runs of train_mlm.py and finetune_xtreme.py."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from analysis import measures
from analysis.shared import (
    FROM_ZERO,
    LOG,
    Drawn,
    Measured,
    Opened,
    Panel,
    Runs,
    all_but,
    canvas,
    choose,
    is_sparse,
    keep,
    look,
    named,
    open_runs,
    read_run,
    reads,
    show,
)
from engine.run import read_json

NEIGHBORS = 100  # that UMAP looks at (X-MoE 4.5)


@dataclass
class Umap(Measured):
    """X-MoE's figures 2a and 2b: tokens as a sparse layer's router sees them, laid out in the hyperbolic plane by UMAP.

    A panel is a run of train_mlm.py whose router scores; by default every one of the demo's with seed 0. A point is a
    token of the validation text as it enters the first sparse layer: its hidden state h, or W h where the router
    projects (X-MoE). Colour and form together are its expert. In the paper X-MoE's experts have clusters of their own,
    and SMoE's are mixed. 100 neighbours, min-dist 1; the disk is Poincare's and shows all of the hyperbolic plane.
    """

    max_tokens: int = 4096  # of the validation text, at most; the first of each language come first


def umap(options: Umap):
    try:
        from umap import UMAP
    except ImportError:
        raise ImportError("this figure needs one more library: pip install umap-learn") from None
    lacks = "has no router that compares tokens with experts"
    found = choose("train_mlm", options.folders, partial(reads, constant="score"), lacks)
    if not options.folders:
        others = [folder for folder in found if found[folder]["seed"]]
        found = all_but(found, *others)
    names, numbers = named(found), {}
    opened = open_runs(found, options)
    figure = canvas(columns=len(found), height=5.5)
    layout = UMAP(n_neighbors=NEIGHBORS, min_dist=1.0, output_metric="hyperboloid", random_state=0, n_jobs=1)
    for axes, folder in zip(figure.axes, opened):
        x, expert = routed(opened[folder], options.max_tokens)
        print(f"{folder}: UMAP of {len(x):,} tokens", flush=True)
        plane = layout.fit_transform(x.numpy())
        disk = poincare(torch.from_numpy(plane).double())
        draw_disk(axes, f"{names[folder]}, {len(x):,} tokens", disk, expert)
        numbers[folder] = {"points": disk.tolist(), "experts": expert.tolist()}
    keep("umap", options, figure, {"runs": numbers})


@torch.no_grad()
def routed(run: Opened, max_tokens: int) -> tuple[Tensor, Tensor]:
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

    The plane is moved to bring their centre there, which changes no hyperbolic distance.
    """
    z = (1 + x.square().sum(dim=1)).sqrt()
    disk = torch.complex(*x.t()) / (1 + z)
    mean = x.mean(dim=0)
    length = z.mean().square() - mean.square().sum()
    middle = mean / length.sqrt()  # on the hyperboloid again
    height = (1 + middle.square().sum()).sqrt()
    middle = torch.complex(*middle) / (1 + height)
    moved = (disk - middle) / (1 - middle.conj() * disk)
    return torch.view_as_real(moved)


def draw_disk(axes, title: str, disk: Tensor, expert: Tensor):
    for number in expert.unique().tolist():
        own = disk[expert == number]
        axes.plot(*own.t(), linestyle="", markersize=3, alpha=0.6, **look(number))
    turn = torch.linspace(0, 2 * math.pi, 361)
    axes.plot(turn.cos(), turn.sin(), color="0.6", linewidth=1)
    axes.set(title=title, aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.02))
    axes.axis("off")


@dataclass
class Collapse(Drawn):
    """X-MoE's figures 2c and 3a: RC and RF in the course of training, from the logs of runs of train_mlm.py.

    RC is the spread of hidden states within experts over that between them. It falls in a collapse: in the paper
    SMoE's falls, and X-MoE's is higher and rises. RF is the share of the validation tokens whose expert has changed
    since the evaluation before: in the paper X-MoE's is lower. The table has the last four evaluations.
    """


LAST = 4  # evaluations in the table


def collapse(options: Collapse):
    found = choose("train_mlm", options.folders, is_sparse, "has no experts: give runs with another router than dense")
    names, records, last = named(found), [], []
    for folder, config in found.items():
        _, evaluations = read_run(folder, "train_mlm")
        for i, depth in enumerate(sorted(config["moe_after"])):
            for evaluation in evaluations:
                layer = evaluation["layers"][i]
                record = {"run": folder, "experts": f"{names[folder]}, layer {depth}"}
                record |= {"step": evaluation["step"], "perplexity": evaluation["ppl"]}
                records.append(record | {"RC": layer["rc"], "RF": layer["rf"]})
            last += records[-min(LAST, len(evaluations)) :]
    panels = [
        Panel("Representation collapse (figure 2c)", records, "experts", "step", "RC", more=LOG),
        Panel("Routing fluctuation (figure 3a)", records, "experts", "step", "RF", more=FROM_ZERO),
    ]
    show("collapse", options, records, panels, ("experts", "step"), last)


@dataclass
class Consistency(Drawn):
    """X-MoE's figure 3b: how alike the loads of the experts are in fine-tuning runs that differ by seed alone.

    1: the same experts get the same share of the tokens in all runs. 1 over the number of runs: the loads have nothing
    to do with each other. It is the mean of the correlation matrix of the loads over 100 steps, with its diagonal, as
    in the paper, which has 12 runs on XNLI: X-MoE comes close to 1, and SMoE falls. Give runs of finetune_xtreme.py,
    two seeds or more of each kind.
    """


def consistency(options: Consistency):
    found = choose("finetune_xtreme", options.folders)
    kinds = loads_by_kind(found, strict=bool(options.folders))
    records, rows, levels = [], [], {}
    for name, own in kinds.items():
        loads = torch.tensor(own, dtype=torch.float64)  # (m, spans of 100 steps, layers, E)
        m, spans, layers, _ = loads.shape
        levels[f"{m} runs with unrelated loads"] = 1 / m
        for layer in range(layers):
            for span in range(spans):
                value = measures.inter_run_consistency(loads[:, span, layer])
                record = {"encoder": f"{name}, sparse layer {layer + 1}", "step": 100 * (span + 1)}
                records.append(record | {"consistency": value, "unrelated loads": 1 / m})
            rows += records[-spans :: max(1, spans - 1)]  # the first 100 steps, and the last
    panel = Panel("Inter-run consistency", records, "encoder", "step", "consistency", levels, more=FROM_ZERO)
    show("consistency", options, records, [panel], ("encoder", "step"), rows)


def loads_by_kind(found: Runs, strict: bool) -> dict[str, list]:
    """What the runs are -> the loads of each seed, of kinds of two runs or more.

    Raises ValueError where no kind is left; if strict, also where a run has no loads or is alone.
    """
    kinds = {}
    for folder, name in named(found, describe_tuning).items():
        loads = read_json(Path(folder, "result.json"))["loads"]
        if loads and loads[0]:
            kinds.setdefault(name, []).append(loads)
        elif strict:
            raise ValueError(f"{folder} {'has no experts' if loads else 'is shorter than 100 steps'}")
    alone = [name for name, own in kinds.items() if len(own) == 1]
    if alone and strict:
        raise ValueError(f"{alone[0]} is alone: give another run that differs by --seed and nothing else")
    if len(alone) == len(kinds):
        raise ValueError("no two finished runs with experts differ by --seed alone: finetune_xtreme.py --seeds 2")
    return all_but(kinds, *alone)


def describe_tuning(config: dict) -> str:
    name = Path(config["model"]).name
    return name if config["frozen"] else f"{name}, routers learn"
