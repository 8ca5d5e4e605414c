"""X-MoE's encoders: masked language models of many languages, with sparse experts routed on a hypersphere (table 2).

    python train_mlm.py                                        the demo: X-MoE, on 97 languages that are on this disk
    torchrun train_mlm.py --router switch                      the SMoE baseline; --router dense: no experts
    python train_mlm.py --gate sigmoid --routing_dim 8         another gate, another sphere
    python train_mlm.py --select topk                          two experts a token
    torchrun --nproc_per_node 8 train_mlm.py --preset base     the paper's model and schedule, on 8 GPUs
    python train_mlm.py --table 2                              every row of a table, beside the paper's numbers

Prints, at every evaluation, masked-LM perplexity, how the sparse layers route, and X-MoE's measures of it: RC, the
representation collapse (smaller: more collapsed), and RF, the share of the tokens whose expert changed since the last
checkpoint. In the end the perplexity of every language. A run is kept in out/train_mlm/NAME; the same command goes on
where it stopped. `--help` lists every constant.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

import common
import measures
import parallel
import runs
from data import counting
from data.batches import MaskedData
from model import PAD, MaskedLM, ModelConfig
from pretrained import fill, load_xlmr

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, multilingual, small, or base: the paper's
    table: int | None = None  # run every row of X-MoE's table 2, 3 or 5 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    sampling_exponent: float = 0.7  # a language is drawn in proportion to its tokens to this power; 1: as it comes
    mask_share: float = 0.4  # of the tokens are to be predicted (80% masked, 10% replaced); 0.15 teaches less in a demo
    block_size: int = 64  # T, the longest sequence
    frequency_bias: bool = True  # the output's bias starts at the log frequencies of the training tokens
    relative_bias: bool = True  # XLM-E's gated bias; with learned positions alone 4,000 steps stay behind counting
    init_std: float = 0.02  # of the normal that weights start from
    seed: int = 0  # of weights, data order, masks and dropout
    steps: int = 8000  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 2e-3  # peak
    router_lr: float = 0.2  # routers learn at so many times the rate of the rest
    distance_lr: float = 10.0  # the relative bias likewise: in so few steps it would not grow to look at neighbours
    warmup: float = 0.08  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-9  # Adam; the gradients of experts that few tokens choose are small
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit (XLM-E's; X-MoE does not say)
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    eval_every: int = 2000  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 25  # validation tokens of each, at most
    eval_maskings: int = 10  # the final perplexity is the mean over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_mlm"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    init_from: str | None = None  # folder of an XLM-R checkpoint in Hugging Face's format; sparse layers start new

    # X-MoE 4.1: one sparse layer half-way, of 32 experts, each a stack of three FFNs. switch is its SMoE baseline.
    router: Literal["dense", "switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice"] = (
        "hypersphere"
    )
    moe_after: tuple[int, ...] = (2,)  # sparse layers stand behind these layers, from 1
    num_experts: int = 32  # E
    expert_size: int = 128  # F
    expert_layers: int = 3  # FFNs of an expert, each with a norm and a residual around it; 0: one bare FFN

    # Constants of other models: as a ClassVar a constant is no option of this script.
    moe_every: ClassVar = 2
    expert_ffns: ClassVar = 8
    decoder_layers: ClassVar = 0
    decoder_moe: ClassVar = True

    not_identity: ClassVar = set()

    def __post_init__(self):
        super().__post_init__()
        if self.router != "dense" and not self.moe_after:
            raise ValueError("moe_after must name a layer, such as --moe_after 2; without experts: --router dense")
        if self.init_from and self.relative_bias:
            raise ValueError("--init_from loads XLM-R, which has no such bias: give --relative_bias false")


# X-MoE appendices A and B; micro-batches and clipping are ours.
BASE = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, dropout=0.1, data="cc100")
BASE |= dict(steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512, learning_rate=5e-4, eval_every=5000)
BASE |= dict(moe_after=(6,), expert_size=3072, beta2=0.98, eps=1e-6, router_lr=1.0)
BASE |= dict(mask_share=0.15, frequency_bias=False, relative_bias=False, distance_lr=1.0)
# Twice the width, at which the demo's learning rate ended in collapse (before it had the bias and 40% masks).
SMALL = dict(n_embd=256, ffn_size=1024, expert_size=256, steps=5000, eval_every=1000, learning_rate=1e-3)
# The demo on real text in four languages (`python -m data.multilingual` makes it), with room for two sentences.
MULTILINGUAL = dict(data="multilingual", block_size=128, eval_tokens=1 << 16)
PRESETS = {"demo": {}, "multilingual": MULTILINGUAL, "small": SMALL, "base": BASE}

# What rows of the tables change. None leaves it to `sizes`: softmax; E / 2 on the hypersphere, else no projection.
SOFTMAX = dict(router="hypersphere", gate=None, routing_dim=None)
SIGMOID = dict(router="hypersphere", gate="sigmoid", routing_dim=None)
FINE_TUNED = "model", "paper, fine-tuned: XNLI, MLQA"  # F1 / EM


def table2(base: Config) -> runs.Table:
    """Dense, SMoE and X-MoE, with either gate."""
    rows = [
        (("dense", "23.51"), dict(router="dense")),
        (("SMoE, softmax", "19.02"), SOFTMAX | dict(router="switch")),
        (("X-MoE, softmax", "18.72"), SOFTMAX),
        (("SMoE, sigmoid", "19.59"), SIGMOID | dict(router="switch")),
        (("X-MoE, sigmoid", "19.12"), SIGMOID),
    ]
    return runs.Table("X-MoE table 2: validation perplexity", ("model", "paper, perplexity"), rows)


def table3(base: Config) -> runs.Table:
    """Dimension reduction and L2 norm, each on and off; the paper fine-tunes with frozen experts."""
    half = base.num_experts // 2
    rows = [
        (("reduction, L2 norm", "72.2, 64.3 / 46.0"), SIGMOID),
        (("L2 norm", "71.5, 63.4 / 45.2"), SIGMOID | dict(routing_dim=0)),
        (("reduction", "71.4, 63.0 / 45.2"), SIGMOID | dict(router="switch", routing_dim=half)),
        (("neither", "71.6, 63.6 / 45.5"), SIGMOID | dict(router="switch")),
    ]
    return runs.Table("X-MoE table 3, pre-training: reduction and norm, sigmoid gate", FINE_TUNED, rows)


def table5(base: Config) -> runs.Table:
    """The routing dimension."""
    E = base.num_experts
    rows = [
        (("E / 4", "71.4, 64.3 / 46.4"), SIGMOID | dict(routing_dim=E // 4)),
        (("E / 2", "72.2, 64.3 / 46.0"), SIGMOID),
        (("E", "71.7, 63.8 / 45.9"), SIGMOID | dict(routing_dim=E)),
        (("2 E", "71.7, 62.7 / 44.8"), SIGMOID | dict(routing_dim=2 * E)),
        (("4 E", "71.2, 63.1 / 45.0"), SIGMOID | dict(routing_dim=4 * E)),
    ]
    return runs.Table("X-MoE table 5, pre-training: the routing dimension, sigmoid gate", FINE_TUNED, rows)


def cells(result: dict) -> dict:
    """A row of any of the tables; of what is measured of routing the mean over sparse layers."""
    layers = result["valid"]["layers"]
    return {
        "params, M": (result["parameters"]["total"] / 1e6, ".1f"),
        "our perplexity": (result["valid"]["ppl"], ".2f"),
        "RC": (measures.mean_over_layers("rc", layers), ".2f"),
        "RF": (measures.mean_over_layers("rf", layers), ".1%"),
        "load imbalance": (measures.mean_over_layers("imbalance", layers), ".2f"),
        "temperature": (measures.mean_over_layers("temperature", layers), ".3f"),
    }


TABLES = {2: table2, 3: table3, 5: table5}

# ---------------------------------------------------------------------------------------------------------------------
# One run


@torch.no_grad()
def evaluate(model: MaskedLM, data: MaskedData, config: Config, context, maskings: int, before: list[Tensor] | None):
    """-> scores on the validation text, and the experts that its tokens chose, (N,) for each sparse layer.

    Scores are the mean cross entropy of the masked tokens and their perplexity, overall and of each language, the
    balance loss, and for each sparse layer routing statistics, RC, RF against the choices `before`, and temperature.
    """
    model.eval()
    tokens = data.eval_tokens("valid", config.eval_tokens)
    routing = [measures.RoutingStats(moe) for moe in model.moe_layers]
    collapse = [measures.Collapse(moe, tokens) for moe in model.moe_layers]
    losses, counts = torch.zeros(2, len(data.languages), dtype=torch.float64)  # masked tokens of each language
    balances = torch.zeros((), dtype=torch.float64)
    for k, first, batch in data.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world):
        for watch in collapse:
            # RC and RF are of the first masking, where this batch's tokens begin at `first` among all.
            watch.place = first if k == 0 else None
        ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
        with context.autocast():
            logits, balance = model(ids, masked, real)
        loss = common.cross_entropy(logits, targets, reduction="none").cpu().double()  # (M,)
        losses.index_add_(0, batch.language, loss)
        counts.index_add_(0, batch.language, torch.ones_like(loss))
        balances += float(balance) * len(loss)
    losses, counts, balances = (context.sum(x) for x in (losses, counts, balances))
    layers = []
    for i, moe in enumerate(model.moe_layers):
        layer = routing[i].finish(context.sum)
        layer |= collapse[i].finish(before[i] if before else None, context.sum)
        tau = moe.router.temperature.item() if moe.router.score == "hypersphere" else None  # X-MoE eq. 8
        layers.append(layer | {"temperature": tau})
    model.train()
    predicted = int(counts.sum())
    scores = perplexities(losses, counts, data.languages)
    scores |= {"balance": float(balances) / predicted, "tokens": tokens, "predicted": predicted, "layers": layers}
    return scores, [watch.chosen for watch in collapse]


def describe(scores: dict) -> str:
    """What one evaluation found, a line a sparse layer."""
    line = f"perplexity {scores['ppl']:.2f} ({scores['predicted']:,} masked tokens)"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    for i, layer in enumerate(scores["layers"], 1):
        changed = "-" if layer["rf"] is None else f"{layer['rf']:.1%}"
        tau = "" if layer["temperature"] is None else f", temperature {layer['temperature']:.4f}"
        lines.append(f"  sparse layer {i}: RC {layer['rc']:.2f}, RF {changed}{tau}; {measures.describe_routing(layer)}")
    return "\n".join(lines)


def describe_counting(found: dict[str, dict]) -> str:
    return (
        f"counting reaches a perplexity of {found['tokens']['ppl']:.2f} by the tokens of each language, "
        f"{found['neighbours']['ppl']:.2f} by the two beside each as well (first masking)"
    )


def perplexities(losses: Tensor, counts: Tensor, languages: list[str]) -> dict:
    """Summed cross entropies (J,) of so many tokens (J,) of each language -> the mean, and perplexities."""
    loss = float(losses.sum() / counts.sum())
    by_language = {}
    for name, total, count in zip(languages, losses.tolist(), counts.tolist()):
        if count:
            by_language[name] = measures.perplexity(total / count)
    return {"loss": loss, "ppl": measures.perplexity(loss), "languages": by_language}


def build(config: Config, data: MaskedData, checkpoint: dict | None, context) -> MaskedLM:
    """The model of a checkpoint, of `--init_from` with new sparse layers, or drawn from the seed."""
    common.seed_all(config.seed)
    model = common.place(MaskedLM(config), context)  # first, so that float64 loads as float64
    if config.frequency_bias:
        model.bias.data.copy_(data.log_frequencies())
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    elif config.init_from:
        arguments, weights = xlmr_weights(config)
        for name, w in model.state_dict().items():
            if "moes." in name or "encoder." not in name:  # sparse layers start new, and a head that is not there
                weights.setdefault(name, w)
        fill(model, arguments, weights, config.init_from)
    return model


def xlmr_weights(config: Config) -> tuple[dict, dict[str, Tensor]]:
    """Arguments and weights of `--init_from`, cut to as many positions as the config has, which must not be more."""
    arguments, weights = load_xlmr(config.init_from)
    longest = arguments.pop("block_size")
    if config.block_size > longest:
        raise ValueError(f"{config.init_from} has {longest} positions, fewer than block_size = {config.block_size}")
    weights["encoder.wpe.weight"] = weights["encoder.wpe.weight"][: PAD + 1 + config.block_size]
    return arguments, weights


def train(config: Config, context) -> dict:
    """Trains one encoder, or goes on where it stopped -> its result, as in result.json."""
    with common.clear_errors():
        shares = {"exponent": config.sampling_exponent, "mask_share": config.mask_share}
        data = MaskedData.open(config.data, config, context, **shares)
        run = runs.Run(config, PRESETS, context, data)
        if run.result:
            return run.result
        model = build(runs.with_vocabulary(config, data), data, run.checkpoint, context)
    parameters = measures.count_parameters(model)
    head = config.mask_share * measures.masked_head_flops(model.config)  # of the masked tokens alone
    flops = measures.flops_per_token(model.encoder, config, head)
    run.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['active']:,.0f} active a token, "
        f"{flops['total'] / 1e6:.1f} MFLOPs forward; {len(data.languages)} languages"
    )
    counted = counting.masked_scores(data, config.eval_tokens)
    counted = {name: perplexities(losses, many, data.languages) for name, (losses, _, many) in counted.items()}
    if counted:
        run.say(describe_counting(counted))
    scores, chosen = None, None  # of the last evaluation
    if run.checkpoint:
        scores, chosen = run.checkpoint["valid"], run.checkpoint["chosen"]
    parallel.split(model, config, context)
    optimizer = common.adamw(model, config)
    forward = run.begin(model, optimizer, flops["total"], state=lambda: {"valid": scores, "chosen": chosen})
    for step in run.steps():
        rate = common.linear(step, config.steps, config.warmup, config.learning_rate)
        common.set_learning_rate(optimizer, rate)
        for micro in run.micros(step):
            batch = data.batch("train", step, micro)
            ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
            with context.autocast():
                logits, balance = forward(ids, masked, real)
            mlm = common.cross_entropy(logits, targets)
            loss = mlm + config.balance_coef * balance  # X-MoE eq. 10
            run.backward(loss, shown=mlm, tokens=ids.numel() if real is None else len(real))
        run.update()
        model.after_step()  # expert embeddings back on their sphere
        if run.end_step(step):
            maskings = config.eval_maskings if step + 1 == config.steps else 1
            scores, chosen = evaluate(run.whole(), data, config, context, maskings, before=chosen)
            run.save(step, scores, scores["loss"], f"valid {describe(scores)}")
    return run.finish({"valid": scores, "counting": counted, "parameters": parameters, "flops": flops})


def report(config: Config, result: dict) -> str:
    """A finished result in words, the languages from the easiest to the hardest."""
    languages = sorted(result["valid"]["languages"].items(), key=lambda item: item[1])
    lines = [f"\n{result['name']}, perplexity of every language:"]
    for i in range(0, len(languages), 6):
        six = languages[i : i + 6]
        lines.append("  ".join(f"{name:>8} {ppl:9.2f}" for name, ppl in six))
    lines.append(f"valid {describe(result['valid'])}")
    counted = result["counting"]
    if "neighbours" in counted:
        better = sum(1 for name, ppl in languages if ppl < counted["neighbours"]["languages"][name])
        beaten = f"the model beats the latter in {better} of {len(languages)} languages"
        lines.append(f"{describe_counting(counted)}; {beaten}")
    return "\n".join(lines)


def main():
    config, context = runs.start(Config, PRESETS)
    runs.carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
