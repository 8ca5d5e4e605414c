"""XMoE's figures 1, 4, 5, 6, 7 and 8, from runs of train_lm.py, whose `evaluate` they are handed."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from analysis import measures, shared
from analysis.shared import Drawn, Measured, Panel, Trained
from engine.device import warn
from model import cross_entropy

SHARES = 0.125, 0.25, 0.5, 0.75, 1.0  # limits of the experts' FLOPs at test, of a dense FFN's
THRESHOLDS = 0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0  # at test
ROUNDS = 10  # how often a batch is timed, after a first time for warming up
SERVED = "experts that serve a token"
LIMIT, SPENT = "limit of the experts' FLOPs, in dense FFNs", "FLOPs of the experts, in dense FFNs"


def test(run: Trained, max_tokens: int) -> tuple[float, list]:
    """Perplexity of the test text as the model is routed now, and the statistics of its MoE layers."""
    scores = run.evaluate(run.model, run.data, "test", run.context, max_tokens)
    return scores["ppl"], scores["layers"]


def activations(options: Measured, evaluate: Callable):
    """XMoE's figures 1 and 6: the share of positive activations in FFNs, by the number and by the size of experts.

    GELU makes almost 0 of what is not positive, so that work was for nothing. In the paper the share falls with the
    number of full-sized experts (figure 1) and rises as experts get smaller (figure 6). A dense model is looked at in
    the blocks where sparse models have experts. A point is a run of train_lm.py, the mean of its layers.
    """
    number, width, share = "experts of a layer", "width of an expert", "share of positive activations"
    records, full = [], []
    runs = shared.choose("train_lm", options)
    for run in shared.opened(runs, options, evaluate):
        count, size = shared.experts_of(run.config)
        records.append(run.record | {number: count, width: size, share: positive_share(run, options.max_tokens)})
        if size == run.config["ffn_size"]:
            full.append(records[-1])
    panels = [
        Panel("Experts as wide as an FFN (figure 1)", full, "experts", number, share, joined=False),
        Panel("All (figure 6)", records, "experts", width, share, joined=False),
    ]
    shared.show(activations, options, records, ("experts", number, width), panels)


def positive_share(run: Trained, max_tokens: int) -> float:
    """Of the activations in the MoE layers, or in a dense model in the FFN of each `moe_every`-th block."""
    blocks = run.model.blocks
    every = min(run.model.config.moe_every, len(blocks))
    signs = Counter()

    def count(fc, inputs, a):
        positive = int((a > 0).sum())
        signs.update(positive=positive, units=a.numel())

    if not run.model.moe_layers:
        for block in blocks[every - 1 :: every]:
            block.ffn.fc.register_forward_hook(count)
    _, layers = test(run, max_tokens)
    if layers:
        return measures.mean_over_layers("positive", layers)
    return signs["positive"] / signs["units"]


def gamma(options: Measured, evaluate: Callable):
    """XMoE's figure 4: test perplexity of trained models whose experts may do less work.

    1 is the work of a dense FFN. Left it is the limit that a layer has, as in the paper. Where tokens want fewer
    experts than the limit allows, less is spent: right is what was spent. The flatter a line, the more can be saved.
    """
    runs, records = shared.choose("train_lm", options), []
    for run in shared.opened(runs, options, evaluate):
        for point in test_limited(run, options.max_tokens):
            records.append(run.record | point)
    panels = [
        Panel("By the limit of a layer (figure 4)", records, "experts", LIMIT, "perplexity"),
        Panel("By the work that is done", records, "experts", SPENT, "perplexity"),
    ]
    shared.show(gamma, options, records, ("experts", LIMIT), panels)


def test_limited(run: Trained, max_tokens: int) -> Iterator[dict]:
    """Under each limit: FLOPs of the experts that served a token, as a share of a dense FFN's, and the perplexity."""
    _, size = shared.experts_of(run.config)
    for share in SHARES if run.model.moe_layers else (1.0,):
        limit(run, share)
        ppl, layers = test(run, max_tokens)
        served = measures.mean_over_layers("served", layers) if layers else 1
        yield {LIMIT: share, SPENT: served * size / run.config["ffn_size"], "perplexity": ppl}


def limit(run: Trained, share: float):
    """Limits the experts of every MoE layer at test to a share of a dense FFN's FLOPs."""
    _, size = shared.experts_of(run.config)
    for moe in run.model.moe_layers:
        moe.eval_capacity_factor = share * run.config["ffn_size"] / size


def choose_threshold(options: Drawn) -> list[Trained]:
    fits = partial(shared.reads, constant="threshold")
    return shared.choose("train_lm", options, fits, "has no threshold router")


def experts(options: Drawn):
    """XMoE's figure 5: how many experts a token needs to reach the threshold, in the course of training.

    The probabilities of the chosen experts must sum to t. In the paper many are needed at first, and fewer and fewer
    as training goes on. A line is an MoE layer of runs of train_lm.py. The table has the last evaluation.
    """
    records, last, asked = [], [], "experts that a token asks for"
    for run in choose_threshold(options):
        for evaluation in run.log:
            for i, layer in enumerate(evaluation["layers"]):
                records.append(of_block(run, i) | {"step": evaluation["step"], asked: layer["wanted"]})
        last += records[-len(evaluation["layers"]) :]
    panel = Panel("", records, "experts", "step", asked, from_zero=True)
    shared.show(experts, options, records, ("experts", "step"), [panel], last)


def of_block(run: Trained, i: int) -> dict:
    """What the records of a run's i-th MoE layer have, from 0."""
    return run.record | {"experts": f"{run.name}, block {(1 + i) * run.config['moe_every']}"}


def tokens(options: Measured):
    """Which tokens XMoE's router gives many experts: rare ones, or those behind which much is open?

    The tokens of the test text are sorted into ten groups of one size: on the left by how often they stand in the
    training text, the most frequent first, on the right by the loss of the token behind them, the lowest first. A line
    is the mean of a group in a run of train_lm.py, in one of its MoE layers.
    """
    records, panels, tenth = [], [], "tenth of the tokens"
    for run in shared.opened(choose_threshold(options), options):
        served, orders = of_tokens(run, options.max_tokens)
        for name, order in orders.items():
            for i, layer in enumerate(served):
                groups = layer[order].float().tensor_split(10)
                for place, group in enumerate(groups, 1):
                    record = of_block(run, i) | {"sorted by": name, tenth: place, SERVED: float(group.mean())}
                    records.append(record)
    for (name,), own in shared.grouped(records, "sorted by").items():
        panels.append(Panel(f"By {name}", own, "experts", tenth, SERVED, from_zero=True))
    shared.show(tokens, options, records, ("experts", "sorted by", tenth), panels)


@torch.no_grad()
def of_tokens(run: Trained, max_tokens: int) -> tuple[Tensor, dict]:
    """Of N test tokens the experts that serve them, (layers, N), and two orders of them, (N,)."""
    model, counts = run.model.eval(), []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: counts.append(kept.sum(dim=1).cpu()))
    frequency, rarity, loss = run.data.log_frequencies(), [], []
    for x, y in run.data.eval_batches("test", max_tokens):
        with run.context.autocast():
            logits, _ = model(run.context.send(x))
        rarity.append(-frequency[x.flatten()])
        loss.append(cross_entropy(logits.flatten(0, 1), run.context.send(y.flatten()), per_token=True).cpu())
    layers = len(model.moe_layers)
    served = torch.stack([torch.cat(counts[layer::layers]) for layer in range(layers)])
    keys = {"rarity": rarity, "the loss behind them": loss}
    return served, {name: torch.cat(own).argsort(stable=True) for name, own in keys.items()}


def threshold(options: Measured, evaluate: Callable):
    """XMoE's figure 7: perplexity by the threshold t, in training and at test.

    Left are runs that were trained with different t (`python train_lm.py --threshold 0.5` and so on), each tested with
    its own. They may differ by the seed too, but by nothing else. Middle is the first of them tested with other t,
    under its capacity limit and without one. With t = 0 a token takes one expert, with t = 1 it wants all. In the paper
    perplexity falls as t rises, both ways, and 0.9 is a little better than 1.
    """
    by = "t is changed"

    def point(run: Trained, how: str, t: float) -> dict:
        ppl, layers = test(run, options.max_tokens)
        served = measures.mean_over_layers("served", layers)
        return {"run": run.folder, by: how, "threshold t": t, "perplexity": ppl, SERVED: served}

    first, *others = choose_threshold(options)
    runs, trained, tested = [first], [], []
    for run in others:
        own = {name: run.config[name] for name in ("seed", "threshold")}
        if run.config == first.config | own:
            runs.append(run)
        else:
            warn(f"{run.folder} is left out: it and {first.folder} differ by more than --threshold and --seed")
    for run in shared.opened(runs, options, evaluate):
        trained.append(point(run, "in training", run.config["threshold"]))
        for t in THRESHOLDS if run is first else ():
            run.model.config.eval_threshold = t  # the routers read it there
            tested.append(point(run, "at test", t))
            with run.model.no_limit():
                tested.append(point(run, "at test, no limit", t))
    panels = [
        Panel("Another threshold in training", trained, by, "threshold t", "perplexity", joined=False),
        Panel("Another threshold at test", tested, by, "threshold t", "perplexity"),
        Panel("What it costs at test", tested, by, "threshold t", SERVED, from_zero=True),
    ]
    shared.show(threshold, options, trained + tested, (by, "threshold t"), panels)


def speed(options: Measured, evaluate: Callable):
    """XMoE's figure 8: the time that a model takes for one batch, forward, by the FLOPs of its experts.

    Each model is timed under several limits of its experts' FLOPs, and a dense model at 1. In the paper time falls with
    FLOPs, and smaller experts take longer for the same FLOPs. All take turns, round by round, on the first batch of
    their test text, and the medians are shown.
    """
    runs, records = shared.choose("train_lm", options), []
    calls = {}
    for run in shared.opened(runs, options, evaluate):
        size = run.data.micro_tokens
        x, _ = next(run.data.eval_batches("test", size))
        for point in test_limited(run, size):
            del point["perplexity"]  # of one batch
            calls[len(records)] = partial(pass_forward, run, run.context.send(x), point[LIMIT])
            records.append(run.record | point)
    times = measures.in_turns(calls, run.context, ROUNDS)
    for record, own in zip(records, times.values()):
        record["ms a batch"] = median(own)
    title = "On {device}, threads {threads}".format(**run.context.machine)
    panel = Panel(title, records, "experts", SPENT, "ms a batch", from_zero=True)
    shared.show(speed, options, records, ("experts", LIMIT), [panel])


@torch.no_grad()
def pass_forward(run: Trained, x: Tensor, share: float):
    """One batch, with the experts limited to a share of a dense FFN's FLOPs."""
    limit(run, share)
    run.model.eval()
    with run.context.autocast():
        run.model(x)
