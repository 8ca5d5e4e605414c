"""XMoE's figures 1, 4, 5, 6, 7 and 8, from runs of train_lm.py; `evaluate` is that script's."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from analysis import shared
from analysis.shared import EvalOptions, FigureOptions, Panel, TrainedRun
from data.files import progress
from engine.device import warn
from metrics import timing
from metrics.routing import mean_over_layers
from model import cross_entropy

SHARES = 0.125, 0.25, 0.5, 0.75, 1.0  # limits of the experts' FLOPs at test, in dense FFNs
THRESHOLDS = 0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0  # at test
ROUNDS = 10  # timed passes per batch, after one to warm up
SERVED = "experts that serve a token"
LIMIT, SPENT = "limit of the experts' FLOPs, in dense FFNs", "FLOPs of the experts, in dense FFNs"


def test(run: TrainedRun, max_tokens: int) -> tuple[float, list]:
    """Test perplexity under the model's current settings, and the statistics of its MoE layers."""
    scores = run.evaluate(run.model, run.data, "test", run.context, max_tokens)
    return scores["ppl"], scores["layers"]


def activations(options: EvalOptions, evaluate: Callable):
    """XMoE's figures 1 and 6: the share of positive activations in FFNs, by number and size of experts.

    GELU maps negative inputs to almost 0, so computing them is wasted work. In the paper the share falls with the
    number of full-sized experts (figure 1) and rises as experts get smaller (figure 6). A dense model is measured in
    the blocks where sparse models have experts. A point is a run of train_lm.py, averaged over its layers.
    """
    number, width, share = "experts per layer", "width of an expert", "share of positive activations"
    runs, records, full = shared.select_runs("train_lm", options), [], []
    for run in shared.loaded(runs, options, evaluate):
        count, size = shared.experts_of(run.config)
        records.append(run.record | {number: count, width: size, share: positive_share(run, options.max_tokens)})
        if size == run.config["ffn_size"]:
            full.append(records[-1])
    panels = [
        Panel("Experts as wide as an FFN (figure 1)", full, "experts", number, share, joined=False),
        Panel("All (figure 6)", records, "experts", width, share, joined=False),
    ]
    shared.show(activations, options, records, ("experts", number, width), panels)


def positive_share(run: TrainedRun, max_tokens: int) -> float:
    """Share of positive activations in the MoE layers, or in a dense model in every `moe_every`-th FFN."""
    if run.model.moe_layers:
        _, layers = test(run, max_tokens)
        return mean_over_layers("positive", layers)
    blocks, signs = run.model.blocks, Counter()

    def count(fc, inputs, a):
        signs.update(positive=int((a > 0).sum()), units=a.numel())

    every = min(run.model.config.moe_every, len(blocks))
    for block in blocks[every - 1 :: every]:
        block.ffn.fc.register_forward_hook(count)
    test(run, max_tokens)
    return signs["positive"] / signs["units"]


def gamma(options: EvalOptions, evaluate: Callable):
    """XMoE's figure 4: test perplexity of trained models with less compute in their experts.

    Compute is in units of a dense FFN. Left is the limit of a layer, as in the paper; right is what was spent, which is
    less if tokens request fewer experts than the limit allows. The flatter a line, the more compute can be saved.
    """
    runs, records = shared.select_runs("train_lm", options), []
    for run in shared.loaded(runs, options, evaluate):
        records += [run.record | point for point in test_limited(run, options.max_tokens)]
    panels = [
        Panel("By the limit (figure 4)", records, "experts", LIMIT, "perplexity"),
        Panel("By the compute spent", records, "experts", SPENT, "perplexity"),
    ]
    shared.show(gamma, options, records, ("experts", LIMIT), panels)


def test_limited(run: TrainedRun, max_tokens: int) -> Iterator[dict]:
    """The experts' FLOPs per token, in dense FFNs, and the test perplexity under each limit."""
    _, size = shared.experts_of(run.config)
    for share in SHARES if run.model.moe_layers else (1.0,):
        limit(run, share)
        ppl, layers = test(run, max_tokens)
        served = mean_over_layers("served", layers) if layers else 1
        yield {LIMIT: share, SPENT: served * size / run.config["ffn_size"], "perplexity": ppl}


def limit(run: TrainedRun, share: float):
    """Limits the experts' FLOPs at test to a share of a dense FFN's."""
    _, size = shared.experts_of(run.config)
    for moe in run.model.moe_layers:
        moe.eval_capacity_factor = share * run.config["ffn_size"] / size


def experts(options: FigureOptions):
    """XMoE's figure 5: how many experts a token requests during training.

    With XMoE's router, the probabilities of a token's experts must sum to t: in the paper tokens need many experts at
    first, and ever fewer as training proceeds. A line is an MoE layer in runs of train_lm.py. The table has the last
    evaluation.
    """
    records, last, wanted = [], [], "experts that a token asks for"
    for run in shared.select_runs("train_lm", options, shared.router_of, "has no experts"):
        for evaluation in run.log:
            for i, layer in enumerate(evaluation["layers"]):
                records.append(block_record(run, i) | {"step": evaluation["step"], wanted: layer["wanted"]})
        last += records[-len(evaluation["layers"]) :]
    panel = Panel("", records, "experts", "step", wanted, from_zero=True)
    shared.show(experts, options, records, ("experts", "step"), [panel], last)


def block_record(run: TrainedRun, i: int) -> dict:
    """The keys common to all records of a run's MoE layer i, counted from 0."""
    return run.record | {"experts": f"{run.name}, block {(1 + i) * run.config['moe_every']}"}


def tokens(options: EvalOptions):
    """Which tokens get many experts: rare ones, or those whose next token is uncertain?

    The test tokens are sorted into ten groups of equal size: left by their frequency in the training text, from most to
    least frequent, right by the loss of the next token, from lowest to highest. A line is an MoE layer of a run of
    train_lm.py, a point the mean over a group.
    """
    records, panels, tenth = [], [], "tenth of the tokens"
    runs = shared.select_runs("train_lm", options, shared.router_of, "has no experts")
    for run in shared.loaded(runs, options):
        served, orders = served_and_orders(run, options.max_tokens)
        for name, order in orders.items():
            for i, layer in enumerate(served):
                for number, group in enumerate(layer[order].float().tensor_split(10), 1):
                    point = {"sorted by": name, tenth: number, SERVED: float(group.mean())}
                    records.append(block_record(run, i) | point)
    for (name,), group in shared.grouped(records, "sorted by").items():
        panels.append(Panel(f"By {name}", group, "experts", tenth, SERVED, from_zero=True))
    shared.show(tokens, options, records, ("experts", "sorted by", tenth), panels)


@torch.no_grad()
def served_and_orders(run: TrainedRun, max_tokens: int) -> tuple[Tensor, dict]:
    """How many experts serve each of N test tokens, (layers, N), and two orders of the tokens, (N,) indices each."""
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
    keys = {"rarity": rarity, "the loss of the next token": loss}
    return served, {name: torch.cat(values).argsort(stable=True) for name, values in keys.items()}


def threshold(options: EvalOptions, evaluate: Callable):
    """XMoE's figure 7: perplexity by threshold t, in training and at test.

    Left: runs trained with different t (`python train_lm.py --threshold 0.5` and so on), tested with the same t. They
    may also differ in their seed, but in nothing else. Middle: the first run tested with other t, with its capacity
    limit and without. With t = 0 a token takes one expert, with t = 1 it requests all. In the paper perplexity falls as
    t rises, in both cases, and 0.9 is slightly better than 1.
    """
    by = "t is changed"

    def point(run: TrainedRun, changed: str, t: float) -> dict:
        ppl, layers = test(run, options.max_tokens)
        served = mean_over_layers("served", layers)
        return {"run": run.folder, by: changed, "threshold t": t, "perplexity": ppl, SERVED: served}

    fits = partial(shared.reads, constant="threshold")
    first, *others = shared.select_runs("train_lm", options, fits, "has no threshold router")
    runs, trained, tested = [first], [], []
    for run in others:
        if run.config == first.config | {name: run.config[name] for name in ("seed", "threshold")}:
            runs.append(run)
        else:
            warn(f"{run.folder} is left out: it differs from {first.folder} in more than --threshold and --seed")
    for run in shared.loaded(runs, options, evaluate):
        trained.append(point(run, "in training", run.config["threshold"]))
        for t in progress(THRESHOLDS, "thresholds") if run is first else ():
            run.model.config.eval_threshold = t  # which the routers read
            tested.append(point(run, "at test", t))
            with run.model.no_limit():
                tested.append(point(run, "at test, no limit", t))
    panels = [
        Panel("Changed in training", trained, by, "threshold t", "perplexity", joined=False),
        Panel("Changed at test", tested, by, "threshold t", "perplexity"),
        Panel("Experts at test", tested, by, "threshold t", SERVED, from_zero=True),
    ]
    shared.show(threshold, options, trained + tested, (by, "threshold t"), panels)


def speed(options: EvalOptions, evaluate: Callable):
    """XMoE's figure 8: time of a forward pass over one batch by the experts' FLOPs.

    Each model is timed under several limits of its experts' FLOPs, a dense model at 1. In the paper time falls with
    FLOPs, and smaller experts take longer for the same FLOPs. The models take turns on the first batch of their test
    text; medians over the rounds are shown.
    """
    runs, records, calls = shared.select_runs("train_lm", options), [], {}
    for run in shared.loaded(runs, options, evaluate):
        size = run.data.micro_tokens
        x, _ = next(run.data.eval_batches("test", size))
        for point in test_limited(run, size):
            del point["perplexity"]  # measured on one batch alone
            calls[len(records)] = partial(pass_forward, run, run.context.send(x), point[LIMIT])
            records.append(run.record | point)
    times = timing.in_turns(calls, run.context, ROUNDS)
    for record, ms in zip(records, times.values()):
        record["ms per batch"] = median(ms)
    title = "On {device}, threads {threads}".format(**run.context.machine)
    panel = Panel(title, records, "experts", SPENT, "ms per batch", from_zero=True)
    shared.show(speed, options, records, ("experts", LIMIT), [panel])


@torch.no_grad()
def pass_forward(run: TrainedRun, x: Tensor, share: float):
    """One batch, with the experts' FLOPs limited to a share of a dense FFN's."""
    limit(run, share)
    run.model.eval()
    with run.context.autocast():
        run.model(x)
