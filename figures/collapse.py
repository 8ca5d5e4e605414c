"""X-MoE's figures 2 and 3: what enters the routers, from runs of train_mlm.py and finetune_xtreme.py."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

import measures
import runs
from data.batches import MaskedData
from figures.shared import (
    COLORS,
    LACKS,
    MARKERS,
    Drawn,
    Measured,
    canvas,
    choose,
    from_zero,
    has_scores,
    is_sparse,
    legend,
    listed,
    named,
    open_runs,
    read_run,
    save,
    styles,
)
from model import Encoder, MoE


@torch.no_grad()
def read_valid(model: Encoder, data: MaskedData, context, max_tokens: int, watches: Iterable[measures.Collapse] = ()):
    """An encoder reads its validation text, masked as in the evaluations of its training."""
    for _, first, batch in data.eval_batches("valid", 1, max_tokens):
        for watch in watches:
            watch.place = first
        ids, real = context.send_all(batch.ids, batch.real)
        with context.autocast():
            model(ids, real)


def watch_added(moe: MoE) -> list[torch.Tensor]:
    """Of each batch to come (S,): the length of what the layer adds to a token, over that of the token's own vector."""
    added = []

    def look(_, given, answer):
        (x, _, real), (y, _) = given, answer
        share = (y.norm(dim=2) / x.norm(dim=2)).flatten()
        added.append(share if real is None else share[real])

    moe.register_forward_hook(look)
    return added


@dataclass
class Umap(Measured):
    """X-MoE's figures 2a and 2b: tokens as a sparse layer's router sees them, laid out in the hyperbolic plane by UMAP.

    A point is a token of the validation text: its hidden state h, or W h where the router projects (X-MoE). Colour and
    form together are its expert. In the paper X-MoE's experts have clusters of their own, and SMoE's are mixed. 100
    neighbours, min-dist 1; the disk is Poincare's, all of the hyperbolic plane. The table says how many of a token's 10
    nearest have its expert, where the router sees them and in the plane, and how many would by chance.
    """

    # folders of runs of train_mlm.py, a panel each; none: all finished ones of the demo whose routers learn and seed 0
    folders: tyro.conf.Positional[tuple[str, ...]] = ()
    max_tokens: int = 4096  # of the validation text, at most; the first of each language come first
    layer: int = 1  # which of the sparse layers


NEIGHBORS = 100  # that UMAP looks at (X-MoE 4.5)


def routed(folder: str, opened: tuple, options: Umap) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, D) or (S, d_e): what a router compares with its experts, h or W h; (S,) the experts chosen."""
    model, data, context = opened
    if not 1 <= options.layer <= len(model.moe_layers):
        raise ValueError(f"--layer {options.layer}: {folder} has {len(model.moe_layers)} sparse layers")
    states, experts = [], []

    def watch(moe, h, routing, kept):
        with torch.autocast(h.device.type, enabled=False):  # as in the router itself
            states.append(moe.router.project(h.to(moe.router.experts.dtype)).cpu())
        experts.append(routing.priority.argmax(dim=1).cpu())

    model.moe_layers[options.layer - 1].watchers.append(watch)
    read_valid(model, data, context, options.max_tokens)
    states = torch.cat(states)
    if len(states) <= NEIGHBORS:
        raise ValueError(f"--max_tokens {options.max_tokens} is too few for UMAP with {NEIGHBORS} neighbours")
    return states, torch.cat(experts)


def poincare(x: torch.Tensor) -> torch.Tensor:
    """Points of the hyperboloid z^2 = 1 + |x|^2, by their x (n, 2), in the unit disk (n, 2), around its middle.

    The plane is moved to bring their centre there, which changes no hyperbolic distance.
    """
    z = (1 + x.square().sum(dim=1)).sqrt()
    disk = torch.complex(x[:, 0], x[:, 1]) / (1 + z)
    middle = x.mean(dim=0) / (z.mean().square() - x.mean(dim=0).square().sum()).sqrt()  # on the hyperboloid again
    middle = torch.complex(*middle) / (1 + (1 + middle.square().sum()).sqrt())
    return torch.view_as_real((disk - middle) / (1 - middle.conj() * disk))


def umap(options: Umap):
    try:
        from umap import UMAP
    except ImportError:
        raise ImportError("this figure needs one more library: pip install umap-learn") from None
    found = choose("train_mlm", options.folders, has_scores)
    found = {folder: config for folder, config in found.items() if options.folders or not config["seed"]}
    names, numbers, rows = named(found), {}, []
    figure = canvas(columns=len(found), height=5.5)
    seen = {folder: routed(folder, opened, options) for folder, opened in open_runs(found, options).items()}
    for axes, (folder, (x, expert)) in zip(figure.axes, seen.items()):
        print(f"{folder}: UMAP of {len(x):,} tokens", flush=True)
        layout = UMAP(n_neighbors=NEIGHBORS, min_dist=1.0, output_metric="hyperboloid", random_state=0, n_jobs=1)
        plane = torch.from_numpy(layout.fit_transform(x.numpy())).double()
        disk = poincare(plane)
        for number in expert.unique().tolist():
            own = disk[expert == number]
            look = dict(color=COLORS[number % len(COLORS)], marker=MARKERS[number // len(COLORS) % len(MARKERS)])
            axes.plot(own[:, 0], own[:, 1], linestyle="", markersize=3, alpha=0.6, **look)
        turn = torch.linspace(0, 2 * math.pi, 361)
        axes.plot(turn.cos(), turn.sin(), color="0.6", linewidth=1)
        axes.text(0, 1.05, f"{names[folder]}, {len(x):,} tokens", ha="center", fontsize=12)
        axes.set(aspect="equal", xlim=(-1.02, 1.02), ylim=(-1.02, 1.15))
        axes.axis("off")
        share = expert.bincount() / len(expert)
        z = (1 + plane.square().sum(dim=1)).sqrt()
        apart = z.outer(z) - plane @ plane.t()  # cosh of the hyperbolic distance
        alike = [measures.agreement(torch.cdist(x, x), expert), measures.agreement(apart, expert)]
        alike.append(float(share.square().sum()))
        numbers[folder] = dict(zip(("routed", "plane", "chance"), alike))
        numbers[folder] |= {"points": disk.tolist(), "experts": expert.tolist()}
        rows.append([folder, names[folder], *(f"{one:.1%}" for one in alike)])
    headers = ["run", "experts", "nearest of the same expert", "in the plane", "by chance"]
    save(figure, "umap", f"X-MoE figures 2a and 2b at our scale: {listed(found)}", numbers, options, [headers, *rows])


@dataclass
class Collapse(Measured):
    """X-MoE's figures 2c and 3a: RC and RF in the course of training, and the spectrum of what enters the router.

    RC: spread of hidden states within experts over that between them; falling means collapse (in the paper SMoE's
    falls, X-MoE's is higher and rises). RF: share of the validation tokens whose expert changed since the checkpoint
    before (in the paper X-MoE's is lower). Both are from the logs. Spectrum: singular values of the hidden states of
    the newest checkpoint around their mean, over the largest; the faster they fall, the fewer dimensions are used. The
    table has the last evaluations of the logs, then RC again, of these hidden states, the dimensions that are used
    (e to the entropy of the variances), and "adds": the length of what the layer adds to a token, over the token's own.
    """

    # folders of runs of train_mlm.py; none: all finished ones of the demo in out/train_mlm that have experts
    folders: tyro.conf.Positional[tuple[str, ...]] = ()


LAST = 4  # evaluations in the table


def collapse(options: Collapse):
    found = choose("train_mlm", options.folders, is_sparse)
    names, numbers, rows = named(found), {}, []
    figure = canvas(columns=3)
    rc, rf, spectrum = figure.axes
    style = styles(f"{names[folder]}, layer {depth}" for folder in found for depth in found[folder]["moe_after"])
    for folder, (model, data, context) in tqdm(open_runs(found, options).items(), desc="reading", unit="run"):
        config, records = read_run(folder, "train_mlm")
        max_tokens = min(options.max_tokens, config["eval_tokens"])
        watches = [measures.Collapse(moe, data.eval_tokens("valid", max_tokens)) for moe in model.moe_layers]
        added = [watch_added(moe) for moe in model.moe_layers]
        read_valid(model, data, context, max_tokens, watches)
        numbers[folder] = {}
        for i, (depth, watch) in enumerate(zip(sorted(config["moe_after"]), watches)):
            name = f"{names[folder]}, layer {depth}"
            now = watch.finish(None)["rc"]
            values = measures.spectrum(watch.count, watch.total, watch.outer)
            variance = values.square() / values.square().sum()
            drawn = numbers[folder][f"layer {depth}"] = {
                "step": [record["step"] for record in records],
                "ppl": [record["ppl"] for record in records],
                "rc": [record["layers"][i]["rc"] for record in records],
                "rf": [record["layers"][i]["rf"] for record in records],
                "spectrum": (values / values[0]).tolist(),
            }
            rc.plot(drawn["step"], drawn["rc"], **style[name])
            rf.plot(drawn["step"][1:], [100 * share for share in drawn["rf"][1:]], **style[name])
            spectrum.plot(range(1, 1 + len(values)), drawn["spectrum"], **style[name] | {"marker": ""})
            used = float(torch.special.entr(variance).sum().exp())
            course = [
                ", ".join(f"{number:{form}}" for number in drawn[what][-LAST:] if number is not None)
                for what, form in {"step": ",", "ppl": ".1f", "rc": ",.0f", "rf": ".1%"}.items()
            ]
            share = float(torch.cat(added[i]).mean())
            rows.append([folder, name, *course, f"{now:.1f}", f"{used:.1f}", f"{share:.1%}"])
    rc.set(xlabel="training step", ylabel="RC", yscale="log", title="Representation collapse (figure 2c)")
    rc.yaxis.set_major_formatter("{x:g}")
    rc.yaxis.set_minor_formatter("{x:g}")
    rf.set(xlabel="training step", ylabel="RF (% of tokens)", title="Routing fluctuation (figure 3a)")
    from_zero(rf)
    spectrum.set(xlabel="dimension", ylabel="singular value / the largest", title="Spectrum of hidden states")
    spectrum.set(yscale="log", ylim=(1e-3, 1.3))  # a norm leaves one direction empty
    for axes in figure.axes:
        legend(axes, fontsize=8)
    headers = ["run", "experts", "steps", "perplexity", "RC", "RF", "RC, read again", "dimensions used", "adds"]
    caption = f"X-MoE figures 2c and 3a at our scale: {listed(found)}"
    save(figure, "collapse", caption, numbers, options, [headers, *rows])


@dataclass
class Consistency(Drawn):
    """X-MoE's figure 3b: how alike the loads of the experts are in fine-tuning runs that differ by seed alone.

    1: the same experts get the same share of the tokens in all runs; 1 over the number of runs: the loads have nothing
    to do with each other. The mean of the correlation matrix of loads over 100 steps each, with its diagonal, as in
    the paper (12 runs on XNLI, where X-MoE comes close to 1 and SMoE falls).
    """

    # folders of runs of finetune_xtreme.py, two seeds or more of each kind; none: all finished ones of the demo that
    # have experts and are two or more of a kind
    folders: tyro.conf.Positional[tuple[str, ...]] = ()


def consistency(options: Consistency):
    found = choose("finetune_xtreme", options.folders)
    names = named(found, lambda config: f"{Path(config['model']).name}{'' if config['frozen'] else ', routers learn'}")
    kinds = {}
    for folder, name in names.items():
        loads = runs.read_json(Path(folder, "result.json"))["loads"]  # of 100 steps, layer, expert
        if loads and loads[0]:
            kinds.setdefault(name, {})[folder] = torch.tensor(loads, dtype=torch.float64)
        elif options.folders:
            raise ValueError(f"{folder} {LACKS[is_sparse] if loads else 'is shorter than 100 steps'}")
    alone = [name for name, own in kinds.items() if len(own) < 2]
    if alone and options.folders:
        (folder,) = kinds[alone[0]]
        raise ValueError(f"{folder} is alone: give another run that differs by --seed and nothing else")
    kinds = {name: own for name, own in kinds.items() if name not in alone}
    if not kinds:
        raise ValueError("no two finished runs with experts differ by --seed alone: finetune_xtreme.py --seeds 2")
    numbers, rows = {}, []
    figure = canvas(height=5)
    axes = figure.axes[0]
    style = styles(kinds)
    for name, own in kinds.items():
        loads = torch.stack([*own.values()])  # (m, 100 steps, layers, E)
        m, spans, layers, _ = loads.shape
        steps = [100 * (span + 1) for span in range(spans)]
        drawn = numbers[name] = {"runs": [*own], "step": steps, "layers": []}
        for layer in range(layers):
            values = [measures.inter_run_consistency(loads[:, span, layer]) for span in range(spans)]
            axes.plot(steps, values, **style[name])
            drawn["layers"].append(values)
            rows.append([name, m, layer + 1, f"{values[0]:.3f}", f"{values[-1]:.3f}", f"{1 / m:.3f}"])
    for m in sorted({len(own) for own in kinds.values()}):
        axes.axhline(1 / m, color="0.6", linestyle="--", label=f"{m} runs with unrelated loads")
    axes.set(xlabel="fine-tuning step", ylabel="inter-run consistency", ylim=(0, 1.05))
    legend(axes, title="encoder", loc="lower left", bbox_to_anchor=(0, 1.01))
    headers = ["encoder", "runs", "sparse layer", "first 100 steps", "last 100 steps", "unrelated loads"]
    drawn = {folder: found[folder] for own in kinds.values() for folder in own}
    save(figure, "consistency", f"X-MoE figure 3b at our scale: {listed(drawn)}", numbers, options, [headers, *rows])
