"""XMoE's figures 1, 4, 5, 6, 7 and 8, and table 1 with intervals, from runs of train_lm.py."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from tqdm import tqdm

import common
import measures
import runs
from data.batches import TokenData
from figures.shared import (
    COLORS,
    Drawn,
    Measured,
    all_but_seed,
    canvas,
    choose,
    from_zero,
    has_bare_ffns,
    has_threshold,
    is_causal,
    is_sparse,
    legend,
    listed,
    named,
    open_runs,
    read_run,
    save,
    size_of,
    styles,
)
from model import GPT, MoE, sizes


@dataclass
class Tested(Measured):
    """Options of figures for which language models are tested again."""

    # folders of runs of train_lm.py; none: all finished ones of the demo in out/train_lm that fit
    folders: tyro.conf.Positional[tuple[str, ...]] = ()


@torch.no_grad()
def predictions(model: GPT, data: TokenData, context, max_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the test text, in order: logits (n, V) as the model is routed now, and the tokens that come (n,)."""
    for x, y in data.eval_batches("test", max_tokens):
        x, y = context.send_all(x, y)
        with context.autocast():
            logits, _ = model(x)
        yield logits.flatten(0, 1), y.flatten()


def test(model: GPT, data: TokenData, context, max_tokens: int) -> dict:
    """Perplexity of the test text as the model is routed now, and what its MoE layers do."""
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    total, tokens = 0.0, 0
    for logits, y in predictions(model, data, context, max_tokens):
        total += float(common.cross_entropy(logits, y)) * y.numel()
        tokens += y.numel()
    layers = [watch.finish() for watch in watches]
    return {"ppl": measures.perplexity(total / tokens), "layers": layers}


@dataclass
class Activations(Tested):
    """XMoE's figures 1 and 6: the share of positive activations in FFNs, by the number of experts and by their size.

    What is not positive, GELU makes almost 0: work for nothing. In the paper the share falls with the number of
    full-sized experts (figure 1) and rises as experts get smaller (figure 6). A dense FFN is one expert, looked at in
    those blocks where the sparse models have experts. A point is a run, the mean of its layers.
    """


def dense_positive(model: GPT, data: TokenData, context, max_tokens: int) -> list[float]:
    """Shares of positive activations in FFNs of a dense model, of the blocks where sparse ones have experts."""
    counts = {}

    def count(fc, inputs, a):
        counts[fc] = counts.get(fc, 0) + torch.tensor([int((a > 0).sum()), a.numel()])

    every = min(model.config.moe_every, len(model.blocks))
    for block in model.blocks[every - 1 :: every]:
        block.ffn.fc.register_forward_hook(count)
    test(model, data, context, max_tokens)
    return [positive / units for positive, units in torch.stack([*counts.values()]).tolist()]


def activations(options: Activations):
    found = choose("train_lm", options.folders, has_bare_ffns)
    names, numbers = named(found), {}
    for folder, (model, data, context) in tqdm(open_runs(found, options).items(), desc="testing", unit="run"):
        config = found[folder]
        if is_sparse(config):
            E, width = size_of(config).num_experts, size_of(config).expert_size
            layers = [layer["positive"] for layer in test(model, data, context, options.max_tokens)["layers"]]
        else:
            E, width, layers = 1, config["ffn_size"], dense_positive(model, data, context, options.max_tokens)
        numbers[folder] = {"experts": E, "size": width, "positive": statistics.fmean(layers), "layers": layers}
    figure = canvas(columns=2)
    by_number, by_size = figure.axes
    style = styles(config["router"] for config in found.values())
    for folder, config in found.items():
        drawn, look = numbers[folder], style[config["router"]] | {"linestyle": "", "alpha": 0.7}
        by_size.plot([drawn["size"]], [100 * drawn["positive"]], **look)
        if drawn["size"] == config["ffn_size"]:
            by_number.plot([drawn["experts"]], [100 * drawn["positive"]], **look)
    by_number.set(xlabel="experts as large as the FFN (1: dense)", title="By the number of experts (figure 1)")
    by_size.set(xlabel="units of an expert", title="By the size of experts (figure 6)")
    for axes in figure.axes:
        ticks = sorted({int(line.get_xdata()[0]) for line in axes.lines})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set_ylabel("positive activations (%)")
        legend(axes)
    rows = []
    for folder, drawn in numbers.items():
        shares = [f"{share:.1%}" for share in (drawn["positive"], *drawn["layers"])]
        rows.append([folder, names[folder], shares[0], ", ".join(shares[1:])])
    headers = ["run", "experts", "positive", "of each layer"]
    caption = f"XMoE figures 1 and 6 at our scale: {listed(found)}"
    save(figure, "activations", caption, numbers, options, [headers, *rows])


@dataclass
class Gamma(Tested):
    """XMoE's figure 4 and table 2: test perplexity of trained models whose experts may do less work.

    1 is the work of a dense FFN, to which gamma = share x FFN size / expert size limits a layer (left, as in the
    paper); where tokens want fewer experts than that, less is spent (right). The flatter, the more can be saved. A
    dense model that was split into experts (table 2, trained with t = 1) gets t = 0.9 below 1, as in the paper.
    """

    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)  # of a dense FFN's FLOPs


def check_shares(shares: tuple[float, ...]):
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"--shares must be numbers over 0, not {shares}")


def width_of(moe: MoE) -> int:
    """Units that a row meets in an expert, in all of its layers."""
    return sum(ffn.b_in.shape[1] for ffn in moe.layers)


def limit(model: GPT, share: float):
    """Limits all MoE layers at test to a share of a dense FFN's FLOPs."""
    for moe in model.moe_layers:
        E, width = moe.router.num_experts, width_of(moe)
        moe.eval_capacity_factor = share * model.config.ffn_size / width
        split = E * width == model.config.ffn_size and moe.router.threshold >= 1  # as in table 2
        moe.router.eval_threshold = 0.9 if split and share < 1 else sizes(model.config).eval_threshold


def spent(model: GPT, layers: list[dict]) -> float:
    """FLOPs of the experts that served a token, the mean of all layers, as a share of a dense FFN's."""
    if not layers:
        return 1.0
    return measures.mean_over_layers("served", layers) * width_of(model.moe_layers[0]) / model.config.ffn_size


def gamma(options: Gamma):
    found = choose("train_lm", options.folders, is_causal)
    check_shares(options.shares)
    names, numbers = named(found), {}
    for folder, (model, data, context) in tqdm(open_runs(found, options).items(), desc="testing", unit="run"):
        points = numbers[folder] = []
        for share in sorted(options.shares) if model.moe_layers else [1.0]:
            limit(model, share)
            scores = test(model, data, context, options.max_tokens)
            points.append({"limit": share, "spent": spent(model, scores["layers"]), "ppl": scores["ppl"]})
    figure = canvas(columns=2)
    style = styles(names.values())
    for axes, x in zip(figure.axes, ("limit", "spent")):
        for folder, points in numbers.items():
            axes.plot([point[x] for point in points], [point["ppl"] for point in points], **style[names[folder]])
        axes.set(ylabel="test perplexity", title={"limit": "Under a limit (figure 4)", "spent": "What was spent"}[x])
        axes.set_xlabel(f"FLOPs of experts a token, {x} (1: a dense FFN's)")
        legend(axes)
    caption = f"XMoE figure 4 at our scale: {listed(found)}"
    save(figure, "gamma", caption, numbers, options, gamma_table(names, numbers))


def gamma_table(names: dict[str, str], numbers: dict[str, list[dict]]) -> list[list]:
    """A row for each kind of run and limit: what was spent, and the perplexity, means over seeds."""
    kinds = {}
    for folder, points in numbers.items():
        for point in points:
            kinds.setdefault((names[folder], point["limit"]), []).append(point)
    rows = [["experts", "FLOPs, limit", "FLOPs, spent", "perplexity"]]
    for kind, points in kinds.items():
        rows.append([*kind, *(runs.mean_cell([(point[x], ".3f") for point in points]) for x in ("spent", "ppl"))])
    return rows


@dataclass
class Required(Drawn):
    """XMoE's figure 5: how many experts a token needs to reach the threshold, in the course of training.

    The probabilities of the chosen experts must sum to t. In the paper many are needed at first, and fewer and fewer
    as training goes on. A line is an MoE layer of a run; runs that differ by seed alone share a panel.
    """

    # folders of runs of train_lm.py with a threshold router; none: all finished ones of the demo in out/train_lm
    folders: tyro.conf.Positional[tuple[str, ...]] = ()


def experts(options: Required):
    found = choose("train_lm", options.folders, has_threshold)
    names, numbers, rows = named(found), {}, []
    panels = list(dict.fromkeys(names.values()))
    figure = canvas(columns=len(panels))
    for folder, config in found.items():
        _, records = read_run(folder, "train_lm")
        steps = [record["step"] for record in records]
        axes = figure.axes[panels.index(names[folder])]
        depths = range(config["moe_every"], config["n_layer"] + 1, config["moe_every"])
        style = styles(f"block {depth}" for depth in depths)
        numbers[folder] = {"step": steps}
        for i, name in enumerate(style):
            wanted = numbers[folder][name] = [record["layers"][i]["wanted"] for record in records]
            axes.plot(steps, wanted, **style[name])
            rows.append([folder, name, steps[0], f"{wanted[0]:.2f}", steps[-1], f"{wanted[-1]:.2f}"])
        title = f"{names[folder]}, t = {config['threshold']:g}"
        axes.set(xlabel="training step", ylabel="experts wanted per token", title=title)
    for axes in figure.axes:
        from_zero(axes)
        legend(axes)
    headers = ["run", "layer", "first step", "wanted", "last step", "wanted"]
    save(figure, "experts", f"XMoE figure 5 at our scale: {listed(found)}", numbers, options, [headers, *rows])


@dataclass
class Threshold(Tested):
    """XMoE's figure 7: perplexity against the threshold t, in training and at test.

    Left, runs that were trained with different t (`python train_lm.py --threshold 0.5` and so on), each tested with
    its own. Middle, the first of them tested with others, under its capacity limit and without one. With t = 0 a token
    takes one expert, with t = 1 it wants all. In the paper perplexity falls as t rises, both ways, and 0.9 is a little
    better than 1.
    """

    # folders of runs of train_lm.py; none: all finished ones of the demo that differ from the first by --threshold and
    # --seed alone
    folders: tyro.conf.Positional[tuple[str, ...]] = ()
    thresholds: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)  # at test


def threshold(options: Threshold):
    found = choose("train_lm", options.folders, has_threshold)
    if not options.thresholds or not all(0 <= t <= 1 for t in options.thresholds):
        raise ValueError(f"--thresholds must lie from 0 to 1, not {options.thresholds}")
    first, *others = found
    but_for_threshold = {folder: all_but_seed(config) | {"threshold": 0} for folder, config in found.items()}
    for folder in others:
        if but_for_threshold[folder] != but_for_threshold[first]:
            if options.folders:
                raise ValueError(f"{folder} and {first} differ by more than --threshold and --seed")
            del found[folder]
    opened, thresholds = open_runs(found, options), sorted(options.thresholds)
    bar = tqdm(total=len(found) + 2 * len(thresholds), desc="testing", unit="setting")

    def point(t: float, folder: str) -> dict:
        scores = test(*opened[folder], options.max_tokens)
        bar.update()
        return {"threshold": t, "ppl": scores["ppl"], "served": measures.mean_over_layers("served", scores["layers"])}

    numbers = {"in training": {}, "at test": [], "at test, no limit": []}
    for folder, config in sorted(found.items(), key=lambda item: item[1]["threshold"]):
        numbers["in training"][folder] = point(config["threshold"], folder)
    model, _, _ = opened[first]
    for t in thresholds:
        for moe in model.moe_layers:
            moe.router.eval_threshold = t
        numbers["at test"].append(point(t, first))
        with model.no_limit():
            numbers["at test, no limit"].append(point(t, first))
    bar.close()
    figure = canvas(columns=3)
    in_training, at_test, served = figure.axes
    lines = numbers | {"in training": list(numbers["in training"].values())}
    rows = []
    for (name, points), look in zip(lines.items(), styles(lines).values()):
        if name == "in training":
            look |= {"linestyle": "", "markersize": 11, "markerfacecolor": "none"}
        t = [one["threshold"] for one in points]
        perplexities = in_training if name == "in training" else at_test
        perplexities.plot(t, [one["ppl"] for one in points], **look)
        served.plot(t, [one["served"] for one in points], **look)
        rows += [[name, *(f"{number:.2f}" for number in one.values())] for one in points]
    in_training.set(ylabel="test perplexity", title="Another threshold in training")
    at_test.set(ylabel="test perplexity", title="Another threshold at test")
    served.set(ylabel="experts served per token", title="What it costs")
    served.set_yscale("log", base=2)
    served.yaxis.set_major_formatter("{x:g}")
    for axes in figure.axes:
        axes.set(xlabel="threshold t", xlim=(-0.05, 1.05))
        legend(axes)
    headers = ["t is changed", "t", "perplexity", "served"]
    caption = f"XMoE figure 7 at our scale: t changed in training ({listed(found)}), and at test ({first})"
    save(figure, "threshold", caption, numbers, options, [headers, *rows])


@dataclass
class Speed(Tested):
    """XMoE's figure 8: wall time of one batch in inference (forward pass of the whole model) by the experts' FLOPs.

    Each model is timed under several limits of its experts' FLOPs, and a dense model beside them at 1. In the paper
    time falls with FLOPs, and smaller experts take longer for the same FLOPs. All take turns, round by round, on the
    first batch of their test text; times are medians. Of runs that differ by seed alone the first is timed.
    """

    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)  # limits, of a dense FFN's FLOPs
    rounds: int = 10  # how often each is timed, after a first time for warming up


@torch.no_grad()
def speed(options: Speed):
    check_shares(options.shares)
    found = choose("train_lm", options.folders)
    names, first = named(found), {}
    for folder, name in names.items():
        first.setdefault(name, folder)
    timed = {folder: found[folder] for folder in first.values()}
    opened, settings = open_runs(timed, options), []
    for folder, config in timed.items():
        shares = sorted(options.shares) if is_sparse(config) else [1.0]
        settings += [{"run": folder, "limit": share, "ms": []} for share in shares]
    for turn in tqdm(range(1 + options.rounds), desc="timing", unit="round"):
        for setting in settings[:: (-1) ** turn]:  # nobody always follows the same neighbour
            folder = setting["run"]
            model, data, context = opened[folder]
            limit(model, setting["limit"])
            if turn == 0:
                scores = test(model, data, context, data.micro_tokens)
                setting["spent"] = spent(model, scores["layers"])
                continue
            x, _ = next(data.eval_batches("test", data.micro_tokens))
            x = context.send(x)
            start = time.perf_counter()
            with context.autocast():
                logits, _ = model(x)
            float(logits[0, 0, 0])  # waits for the device
            setting["ms"].append(1e3 * (time.perf_counter() - start))
    figure = canvas()
    axes = figure.axes[0]
    style = styles(names[folder] for folder in timed)
    rows = []
    for folder in timed:
        own = [setting for setting in settings if setting["run"] == folder]
        times = [statistics.median(setting["ms"]) for setting in own]
        axes.plot([setting["spent"] for setting in own], times, **style[names[folder]])
        for setting, ms in zip(own, times):
            rows.append([folder, names[folder], setting["limit"], f"{setting['spent']:.3f}", f"{ms:.1f}"])
    axes.set(xlabel="FLOPs of experts a token, spent (1: a dense FFN's)", ylabel="ms a batch, forward")
    from_zero(axes)
    legend(axes)
    headers = ["run", "experts", "FLOPs, limit", "FLOPs, spent", "ms"]
    machine = common.machine(context)
    where = f"{machine['device']}, threads {machine['threads']}"
    caption = f"XMoE figure 8 at our scale, on {where}: {listed(timed)}"
    save(figure, "speed", caption, {"settings": settings, "machine": machine}, options, [headers, *rows])


@dataclass
class Compare(Tested):
    """XMoE's table 1 with intervals: whether a router is better than others, and whether that may be chance.

    The first run named (of the demo's: the demo itself) is compared with every other, all on the same text. Runs that
    differ by seed alone are one: what counts is the mean difference over the seeds that both have. Left of 0 is better
    than the first. The interval (95%) is over documents, drawn again a thousand times; it knows nothing of seeds, so
    the table has the deviation of their differences, and in how many of them the first is better.
    """


def compare(options: Compare):
    found = choose("train_lm", options.folders, is_causal)
    names, opened, losses = named(found), open_runs(found, options), {}
    seeds = Counter((names[folder], config["seed"]) for folder, config in found.items())
    for (name, seed), times in seeds.items():
        if times > 1:
            raise ValueError(f"{times} of the runs are {name} with seed {seed}: give one of them")
    texts = {(data.checksum, data.block_size): folder for folder, (_, data, _) in opened.items()}
    if len(texts) > 1:
        raise ValueError(f"{' and '.join(texts.values())} differ in their data or in block_size: give runs of one text")
    _, data, _ = next(iter(opened.values()))
    ends = torch.cat([y.flatten() for _, y in data.eval_batches("test", options.max_tokens)]) == data.tokenizer.eot
    document = ends.cumsum(0) - ends.long()  # of each token
    if not document.any():
        raise ValueError("only one document would be read, and intervals are over documents: raise --max_tokens")
    for folder, (model, data, context) in tqdm(opened.items(), desc="testing", unit="run"):
        read = predictions(model, data, context, options.max_tokens)
        nats = [common.cross_entropy(logits, y, reduction="none").double().cpu() for logits, y in read]
        losses.setdefault(names[folder], {})[found[folder]["seed"]] = torch.cat(nats)
    bits = partial(measures.bits_per_byte, counts=data.meta["splits"]["test"])
    first, rows, numbers = next(iter(losses)), [], {}
    for name, own in losses.items():
        drawn = numbers[name] = {"bits_per_byte": {seed: bits(float(nats.mean())) for seed, nats in own.items()}}
        rows.append([name, runs.mean_cell([(value, ".4f") for value in drawn["bits_per_byte"].values()]), "", ""])
        both = own.keys() & losses[first].keys()
        if name != first and both:
            more = torch.stack([own[seed] - losses[first][seed] for seed in sorted(both)])
            of_seeds = [bits(float(nats.mean())) for nats in more]
            interval = measures.bootstrap(document.bincount(more.mean(dim=0)), document.bincount())
            drawn |= {"more": statistics.fmean(of_seeds), "of_seeds": of_seeds, "interval": [*map(bits, interval)]}
            cell = runs.mean_cell([(number, "+.4f") for number in of_seeds])
            better = sum(number > 0 for number in of_seeds)
            rows[-1][2:] = "{} ({:+.4f} to {:+.4f})".format(cell, *drawn["interval"]), f"{better} of {len(both)}"
    compared = [name for name in numbers if "more" in numbers[name]]
    figure = canvas(width=7, height=1.5 + 0.3 * len(compared))
    (axes,) = figure.axes
    for place, name in enumerate(compared):
        axes.plot(numbers[name]["interval"], [place, place], color=COLORS[0])
        axes.plot([numbers[name]["more"]], [place], "o", color=COLORS[0])
    axes.axvline(0, color="0.6", linestyle="--")
    axes.set_yticks(range(len(compared)), compared)
    axes.invert_yaxis()
    axes.set_xlabel(f"bits per byte more than {first}, 95% over {1 + int(document.max()):,} documents")
    headers = ["run", "bits/byte", f"more than {first} (95%, documents)", f"seeds in which {first} is better"]
    save(figure, "compare", f"XMoE table 1 at our scale: {listed(found)}", numbers, options, [headers, *rows])
