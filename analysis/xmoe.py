"""XMoE's figures 1, 4, 5, 6, 7 and 8, and table 1 with intervals, from runs of train_lm.py."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from analysis import measures
from analysis.flops import row_flops
from analysis.shared import (
    FROM_ZERO,
    LOG,
    Drawn,
    Measured,
    Opened,
    Panel,
    Runs,
    all_but,
    choose,
    each,
    experts_of,
    is_sparse,
    listed,
    named,
    open_runs,
    read_run,
    reads,
    sees_later,
    show,
)
from engine.device import machine
from engine.optim import cross_entropy
from model import GPT

SHARES = 0.125, 0.25, 0.5, 0.75, 1.0
LIMIT, SPENT = "FLOPs of experts, limit", "FLOPs of experts, spent"  # 1: those of a dense FFN

# ---------------------------------------------------------------------------------------------------------------------
# Testing a run again, perhaps with less work


@torch.no_grad()
def predictions(run: Opened, max_tokens: int) -> Iterator[tuple]:
    """The test text in order: logits (n, V) as the model is routed now, and the tokens (n,) that should come."""
    for x, y in run.data.eval_batches("test", max_tokens):
        x, y = run.context.send_all(x, y)
        with run.context.autocast():
            logits, _ = run.model(x)
        yield logits.flatten(0, 1), y.flatten()


def test(run: Opened, max_tokens: int) -> tuple[float, list]:
    """Perplexity of the test text as the model is routed now, and the statistics of its MoE layers."""
    watches = [measures.RoutingStats(moe) for moe in run.model.moe_layers]
    total = tokens = 0
    for logits, y in predictions(run, max_tokens):
        total += float(cross_entropy(logits, y)) * len(y)
        tokens += len(y)
    layers = [watch.finish() for watch in watches]
    return measures.perplexity(total / tokens), layers


def ffn_flops(model: GPT) -> float:
    """Forward FLOPs of one token in a dense FFN of the model's sizes."""
    return 4 * model.config.n_embd * model.config.ffn_size


def limit(model: GPT, config: dict, share: float):
    """Limits the experts of every MoE layer at test to a share of a dense FFN's FLOPs. config: the run's constants.

    A dense model that was split into experts (table 2, trained with t = 1) gets t = 0.9 below 1, as in the paper.
    """
    for moe in model.moe_layers:
        moe.eval_gamma = share * ffn_flops(model) / row_flops(moe)
    t = config.get("eval_threshold")
    is_split = config.get("expert_ffns") == config.get("threshold") == 1
    if is_split and share < 1:
        t = 0.9
    model.config.eval_threshold = t  # the routers read it there


def test_limited(run: Opened, config: dict, shares: tuple, max_tokens: int) -> Iterator[dict]:
    """Under each limit: FLOPs of the experts that served a token, as a share of a dense FFN's, and the perplexity."""
    model = run.model
    shares = sorted(shares) if model.moe_layers else [1.0]
    for share in shares:
        limit(model, config, share)
        ppl, layers = test(run, max_tokens)
        spent = 1.0
        if layers:
            served = measures.mean_over_layers("served", layers)
            spent = served * row_flops(model.moe_layers[0]) / ffn_flops(model)
        yield {LIMIT: share, SPENT: spent, "perplexity": ppl}


def check_shares(shares: tuple):
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"--shares must be numbers over 0, not {shares}")


def is_causal(config: dict) -> bool:
    return not sees_later(config)


def choose_causal(options: Measured) -> Runs:
    lacks = "has experts that choose among later tokens too: its perplexity is no language model's"
    return choose("train_lm", options.folders, is_causal, lacks)


def choose_threshold(options: Drawn) -> Runs:
    fits = partial(reads, constant="threshold")
    return choose("train_lm", options.folders, fits, "has no threshold router")


# ---------------------------------------------------------------------------------------------------------------------
# Figures 1 and 6


@dataclass
class Activations(Measured):
    """XMoE's figures 1 and 6: the share of positive activations in FFNs, by the number of experts and by their size.

    GELU makes almost 0 of what is not positive, so that work was for nothing. In the paper the share falls with the
    number of full-sized experts (figure 1) and rises as experts get smaller (figure 6). A dense model is looked at in
    the blocks where sparse models have experts. A point is a run of train_lm.py, the mean of its layers.
    """


def activations(options: Activations):
    found, records, full = choose("train_lm", options.folders), [], []
    for folder, run in each(found, options):
        config = found[folder]
        if is_sparse(config):
            experts, size = experts_of(config)
            _, layers = test(run, options.max_tokens)
            shares = [layer["positive"] for layer in layers]
        else:
            experts, size = 1, config["ffn_size"]
            shares = positive_in_dense(run, options.max_tokens)
        record = {"run": folder, "router": config["router"], "experts": experts, "size": size}
        record["positive"] = statistics.fmean(shares)
        records.append(record)
        if size == config["ffn_size"]:
            full.append(record)
    look = {"joined": False, "more": {"xscale": "log"}}
    panels = [
        Panel("By the number of full-sized experts (figure 1)", full, "router", "experts", "positive", **look),
        Panel("By the size of experts (figure 6)", records, "router", "size", "positive", **look),
    ]
    caption = f"XMoE figures 1 and 6 at our scale: {listed(found)}"
    keys = "router", "experts", "size"
    show("activations", caption, options, records, panels, keys)


def positive_in_dense(run: Opened, max_tokens: int) -> list[float]:
    """The shares of positive activations in FFNs of a dense model, in every `moe_every`-th block."""
    blocks, counts = run.model.blocks, {}

    def count(fc, inputs, a):
        positive, units = counts.get(fc, (0, 0))
        above = int((a > 0).sum())
        counts[fc] = positive + above, units + a.numel()

    every = min(run.model.config.moe_every, len(blocks))
    for block in blocks[every - 1 :: every]:
        block.ffn.fc.register_forward_hook(count)
    test(run, max_tokens)
    return [positive / units for positive, units in counts.values()]


# ---------------------------------------------------------------------------------------------------------------------
# Figure 4


@dataclass
class Gamma(Measured):
    """XMoE's figure 4 and table 2: test perplexity of trained models whose experts may do less work.

    1 is the work of a dense FFN. Left it is the limit that a layer has, as in the paper. Where tokens want fewer
    experts than the limit allows, less is spent: right is what was spent. The flatter a line, the more can be saved. A
    dense model that was split into experts (table 2) gets t = 0.9 below 1, as in the paper.
    """

    shares: tuple[float, ...] = SHARES  # limits, as shares of a dense FFN's FLOPs


def gamma(options: Gamma):
    found, records = choose_causal(options), []
    check_shares(options.shares)
    names = named(found)
    for folder, run in each(found, options):
        points = test_limited(run, found[folder], options.shares, options.max_tokens)
        own = {"run": folder, "experts": names[folder]}
        records += [own | point for point in points]
    panels = [
        Panel("Under a limit (figure 4)", records, "experts", LIMIT, "perplexity"),
        Panel("What was spent", records, "experts", SPENT, "perplexity"),
    ]
    caption = f"XMoE figure 4 at our scale: {listed(found)}"
    show("gamma", caption, options, records, panels, ("experts", LIMIT))


# ---------------------------------------------------------------------------------------------------------------------
# Figure 5


@dataclass
class Required(Drawn):
    """XMoE's figure 5: how many experts a token needs to reach the threshold, in the course of training.

    The probabilities of the chosen experts must sum to t. In the paper many are needed at first, and fewer and fewer
    as training goes on. A line is an MoE layer of a run of train_lm.py. Seeds of one experiment share a panel. The
    table has the last evaluation.
    """


def experts(options: Required):
    found = choose_threshold(options)
    names, records, last = named(found), [], []
    for folder, config in found.items():
        _, evaluations = read_run(folder, "train_lm")
        for evaluation in evaluations:
            for i, layer in enumerate(evaluation["layers"], 1):
                record = {"run": folder, "experts": names[folder]}
                record["layer"] = f"block {i * config['moe_every']}"
                record |= {"step": evaluation["step"], "wanted": layer["wanted"]}
                records.append(record)
        last += records[-i:]
    panels = []
    for name in dict.fromkeys(names.values()):
        own = [record for record in records if record["experts"] == name]
        panels.append(Panel(name, own, "layer", "step", "wanted", more=FROM_ZERO))
    caption = f"XMoE figure 5 at our scale: {listed(found)}"
    keys = "experts", "layer", "step"
    show("experts", caption, options, records, panels, keys, last)


# ---------------------------------------------------------------------------------------------------------------------
# Figure 7


THRESHOLDS = 0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0


@dataclass
class Threshold(Measured):
    """XMoE's figure 7: perplexity by the threshold t, in training and at test.

    Left are runs that were trained with different t (`python train_lm.py --threshold 0.5` and so on), each tested with
    its own. They may differ by the seed too, but by nothing else. Middle is the first of them tested with other t,
    under its capacity limit and without one. With t = 0 a token takes one expert, with t = 1 it wants all. In the paper
    perplexity falls as t rises, both ways, and 0.9 is a little better than 1.
    """

    thresholds: tuple[float, ...] = THRESHOLDS  # at test


def threshold(options: Threshold):
    found = choose_threshold(options)
    if not options.thresholds or not all(0 <= t <= 1 for t in options.thresholds):
        raise ValueError(f"--thresholds must lie from 0 to 1, not {options.thresholds}")
    found = alike_but_for_threshold(found, bool(options.folders))
    first, trained, tested = next(iter(found)), [], []
    for folder, run in each(found, options):
        point = partial(threshold_point, folder, run, options.max_tokens)
        trained.append(point("in training", found[folder]["threshold"]))
        for t in sorted(options.thresholds) if folder == first else ():
            run.model.config.eval_threshold = t  # the routers read it there
            tested.append(point("at test", t))
            with run.model.no_limit():
                tested.append(point("at test, no limit", t))
    records = trained + tested
    panels = [
        Panel("Another threshold in training", trained, "t is changed", "t", "perplexity", joined=False),
        Panel("Another threshold at test", tested, "t is changed", "t", "perplexity"),
        Panel("What it costs", records, "t is changed", "t", "served", more=LOG),
    ]
    caption = f"XMoE figure 7 at our scale: t changed in training ({listed(found)}), and at test ({first})"
    show("threshold", caption, options, records, panels, ("t is changed", "t"))


def alike_but_for_threshold(found: Runs, strict: bool) -> Runs:
    """The runs that differ from the first by their threshold and seed alone. strict: ValueError if others do not."""
    first, kept = next(iter(found)), {}
    wanted = all_but(found[first], "seed", "threshold")
    for folder, config in found.items():
        if all_but(config, "seed", "threshold") == wanted:
            kept[folder] = config
        elif strict:
            raise ValueError(f"{folder} and {first} differ by more than --threshold and --seed")
    return kept


def threshold_point(folder: str, run: Opened, max_tokens: int, what: str, t: float) -> dict:
    ppl, layers = test(run, max_tokens)
    served = measures.mean_over_layers("served", layers)
    record = {"run": folder, "t is changed": what, "t": t}
    return record | {"perplexity": ppl, "served": served}


# ---------------------------------------------------------------------------------------------------------------------
# Figure 8


@dataclass
class Speed(Measured):
    """XMoE's figure 8: wall time of one batch (forward pass of the whole model) by the experts' FLOPs.

    Each model is timed under several limits of its experts' FLOPs, and a dense model at 1. In the paper time falls with
    FLOPs, and smaller experts take longer for the same FLOPs. All take turns, round by round, on the first batch of
    their test text, and the medians are shown. Of runs that differ by seed alone only the first is timed.
    """

    shares: tuple[float, ...] = SHARES  # limits, as shares of a dense FFN's FLOPs
    rounds: int = 10  # how often each is timed, after a first time for warming up


def speed(options: Speed):
    check_shares(options.shares)
    found = choose("train_lm", options.folders)
    names = named(found)
    first = {name: folder for folder, name in reversed(names.items())}
    found = {folder: found[folder] for folder in reversed(first.values())}
    opened, records = open_runs(found, options), []
    for folder, run in opened.items():
        points = test_limited(run, found[folder], options.shares, run.data.micro_tokens)  # it warms up, too
        for point in points:
            records.append({"run": folder, "experts": names[folder]} | point | {"ms": []})
    for turn in tqdm(range(options.rounds), desc="timing", unit="round"):
        order = reversed(records) if turn % 2 else records  # so that none always follows the same one
        for record in order:
            folder = record["run"]
            limit(opened[folder].model, found[folder], record[LIMIT])
            record["ms"].append(time_batch(opened[folder]))
    for record in records:
        record["ms"] = statistics.median(record["ms"])
        del record["perplexity"]  # of one batch
    where = machine(opened[folder].context)
    caption = f"XMoE figure 8 at our scale, on {where['device']}, threads {where['threads']}: {listed(found)}"
    panel = Panel("Time of a batch, forward", records, "experts", SPENT, "ms", more=FROM_ZERO)
    keys = "experts", LIMIT
    show("speed", caption, options, records, [panel], keys)


@torch.no_grad()
def time_batch(run: Opened) -> float:
    """Milliseconds of a forward pass of the first batch of the test text."""
    x, _ = next(run.data.eval_batches("test", run.data.micro_tokens))
    x = run.context.send(x)
    start = time.perf_counter()
    with run.context.autocast():
        logits, _ = run.model(x)
    float(logits[0, 0, 0])  # waits for the device
    return 1e3 * (time.perf_counter() - start)


# ---------------------------------------------------------------------------------------------------------------------
# Table 1 with intervals


@dataclass
class Compare(Measured):
    """XMoE's table 1 with intervals: whether a router is better than others, and whether that may be chance.

    The first run named (of the demo's runs: the demo itself) is compared with every other on the same text. Runs that
    differ by seed alone count as one, with the mean difference over the seeds that both have. More bits per byte than
    the first is worse. The interval (95%) is over documents, drawn again a thousand times. It knows nothing of seeds,
    so the table has the deviation of the seeds' differences, and in how many seeds the first is better.
    """


def compare(options: Compare):
    found = choose_causal(options)
    names, losses, records = named(found), {}, []
    seeds = Counter((names[folder], config["seed"]) for folder, config in found.items())
    ((name, seed), times), *_ = seeds.most_common(1)
    if times > 1:
        raise ValueError(f"{times} of the runs are {name} with seed {seed}: give one of them")
    opened = open_runs(found, options)
    document = documents(opened, options.max_tokens)  # (N,)
    for folder, run in tqdm(opened.items(), desc="testing", unit="run"):
        nats = []
        for logits, y in predictions(run, options.max_tokens):
            loss = cross_entropy(logits, y, reduction="none")
            nats.append(loss.double().cpu())
        own = losses.setdefault(names[folder], {})
        own[found[folder]["seed"]] = torch.cat(nats)
    bits = partial(measures.bits_per_byte, counts=run.data.meta["splits"]["test"])
    first = next(iter(losses))
    for name, own in losses.items():
        more, words = difference(own, losses[first], document, bits)
        for seed, nats in own.items():
            record = {"run": name, "seed": str(seed)}
            record["bits/byte"] = bits(float(nats.mean()))
            record[f"more than {first}"] = more.get(seed)
            records.append(record | words)
    caption = f"XMoE table 1 at our scale: {listed(found)}"
    keys = "run", INTERVAL, BETTER
    show("compare", caption, options, records, [], keys)


INTERVAL, BETTER = "95%, by documents", "the first is better in"


def documents(opened: dict[str, Opened], max_tokens: int) -> Tensor:
    """(N,) the number of the document that each token of the test text belongs to.

    Raises ValueError where the runs do not read the same text, or only one document of it.
    """
    texts = {}
    for folder, run in opened.items():
        data = run.data
        texts[data.checksum, data.block_size] = folder
    if len(texts) > 1:
        raise ValueError(f"{' and '.join(texts.values())} differ in their data or in block_size: give runs of one text")
    batches = [y.flatten() for _, y in data.eval_batches("test", max_tokens)]
    tokens = torch.cat(batches)
    ends = (tokens == data.tokenizer.eot).long()
    document = ends.cumsum(0) - ends
    if not document.any():
        raise ValueError("only one document would be read, and intervals are over documents: raise --max_tokens")
    return document


def difference(own: dict, first: dict, document: Tensor, bits) -> tuple[dict, dict]:
    """Bits per byte more than the first, by seed; the interval over documents, and who is better, in words.

    own, first: seed -> nats of each token (N,). There is nothing to say of the first itself, or without a common seed.
    """
    both = sorted(own.keys() & first.keys())
    if own is first or not both:
        return {}, {INTERVAL: "", BETTER: ""}
    differences = [own[seed] - first[seed] for seed in both]
    more = torch.stack(differences)  # (seeds, N)
    of_seeds = [bits(float(nats.mean())) for nats in more]
    totals = document.bincount(more.mean(dim=0))
    interval = measures.bootstrap(totals, document.bincount())
    low, high = map(bits, interval)
    better = sum(number > 0 for number in of_seeds)
    words = {INTERVAL: f"{low:+.4f} to {high:+.4f}", BETTER: f"{better} of {len(both)} seeds"}
    return dict(zip(both, of_seeds)), words
