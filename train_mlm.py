"""X-MoE's encoders: masked language models of many languages, with sparse experts routed on a hypersphere (table 2).

    python train_mlm.py                                        the demo: X-MoE, on 97 languages that are on this disk
    torchrun train_mlm.py --router switch                      the SMoE baseline; --router dense: no experts
    python train_mlm.py --gate sigmoid --routing_dim 8         another gate, another sphere
    python train_mlm.py --router topk --score hypersphere      two experts a token
    torchrun --nproc_per_node 8 train_mlm.py --preset base     the paper's model and schedule, on 8 GPUs
    python train_mlm.py --table 2                              every row of a table, beside the paper's numbers

Prints, at every evaluation, masked-LM perplexity, how the sparse layers route, and X-MoE's measures of it: RC, the
representation collapse (smaller: more collapsed), and RF, the share of the tokens whose expert changed since the last
checkpoint. In the end the perplexity of every language. A run is kept in out/train_mlm/NAME; the same command goes on
where it stopped. `--help` lists every constant.
"""

import dataclasses
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
from data.masked import MaskedData
from data.prepare import ready
from flops import count_parameters, flops_per_token
from model import EncoderConfig, MaskedLM, MoE
from pretrained import load_xlmr
from routers import representation_collapse

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclasses.dataclass
class Config(EncoderConfig):
    preset: str = "demo"  # demo, or base: the paper's
    table: int | None = None  # run every row of X-MoE's table 2, 3 or 5 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    spm: str | None = None  # SentencePiece model for catalogs, such as XLM-R's; default: one trained on them
    sampling_exponent: float = 0.7  # a language is drawn in proportion to its tokens to this power; 1: as it comes
    mask_share: float = 0.15  # of the tokens are to be predicted: 80% masked, 10% replaced, 10% left as they are
    seed: int = 0  # of weights, data order, masks and dropout
    steps: int = 800  # optimizer steps
    batch_tokens: int = 2048  # tokens of a step, over all processes and micro-batches
    micro_tokens: int = 2048  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1e-3  # peak
    warmup: float = 0.08  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    eps: float = 1e-6  # Adam
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit (XLM-E's; X-MoE does not say)
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    eval_every: int = 200  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 25  # validation tokens of each, at most
    eval_maskings: int = 10  # the final perplexity is the mean over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_mlm"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "auto"  # bfloat16 (CUDA, CPUs with AMX), float16 (with loss scaling), float32, float64
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    init_from: str | None = None  # folder of an XLM-R checkpoint in Hugging Face's format; sparse layers start new

    def __post_init__(self):
        super().__post_init__()
        common.check_run(self)
        if self.eval_maskings < 1:
            raise ValueError(f"eval_maskings must be positive, not {self.eval_maskings}")
        if not 0 <= self.sampling_exponent <= 1:
            raise ValueError(f"sampling_exponent must lie in [0, 1], not {self.sampling_exponent}")
        if self.table not in (None, *TABLES):
            raise ValueError(f"train_mlm.py has tables {', '.join(map(str, TABLES))}, not {self.table}")

    not_identity = set()


# X-MoE appendices A and B; micro-batches and clipping are ours.
BASE = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, dropout=0.1, data="cc100")
BASE |= dict(steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512, learning_rate=5e-4, eval_every=5000)
PRESETS = {"demo": dict(expert_size=256), "base": BASE}

# Rows of the tables: what to change, and the paper's numbers.
SIGMOID = dict(router="hypersphere", gate="sigmoid")
TABLE2 = [  # validation perplexity
    ("dense", dict(router="dense"), "23.51"),
    ("SMoE, softmax", dict(router="switch"), "19.02"),
    ("X-MoE, softmax", dict(router="hypersphere"), "18.72"),
    ("SMoE, sigmoid", dict(router="switch", gate="sigmoid"), "19.59"),
    ("X-MoE, sigmoid", SIGMOID, "19.12"),
]
TABLE3 = [  # after fine-tuning: XNLI, MLQA (F1 / EM), experts frozen
    ("reduction, L2 norm", SIGMOID, "72.2, 64.3 / 46.0"),
    ("L2 norm", dict(SIGMOID, routing_dim=0), "71.5, 63.4 / 45.2"),
    ("reduction", dict(router="switch", gate="sigmoid", routing_dim="half"), "71.4, 63.0 / 45.2"),
    ("neither", dict(router="switch", gate="sigmoid"), "71.6, 63.6 / 45.5"),
]
TABLE5 = [  # after fine-tuning: XNLI, MLQA (F1 / EM); routing dimensions as multiples of E
    ("E / 4", 0.25, "71.4, 64.3 / 46.4"),
    ("E / 2", 0.5, "72.2, 64.3 / 46.0"),
    ("E", 1, "71.7, 63.8 / 45.9"),
    ("2 E", 2, "71.7, 62.7 / 44.8"),
    ("4 E", 4, "71.2, 63.1 / 45.0"),
]

# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


class Watch:
    """Looks at what enters a sparse layer's router and what it chooses: RC (X-MoE eq. 11) and RF."""

    def __init__(self, moe: MoE, tokens: int, context):
        E, D = moe.router.num_experts, moe.layers[0].w_in.shape[2]
        wide = dict(dtype=torch.float64, device=context.device if context.device.type == "cuda" else "cpu")
        self.count, self.total, self.outer = (torch.zeros(size, **wide) for size in ((E,), (E, D), (D, D)))
        self.chosen = torch.zeros(tokens, dtype=torch.int16)
        self.first, self.hook = None, moe.router.register_forward_hook(self)

    def __call__(self, router, arguments, routing):
        if self.first is None:  # only the first masking is looked at
            return
        h = arguments[0].to(self.outer.device).double()  # (S, D)
        chosen = routing.priority.argmax(dim=1).to(h.device)  # (S,)
        self.count += torch.bincount(chosen, minlength=len(self.count))
        self.total.index_add_(0, chosen, h)
        self.outer.addmm_(h.t(), h)
        self.chosen[self.first : self.first + len(chosen)] = chosen.cpu()

    def finish(self, before: Tensor | None, context) -> dict[str, float | None]:
        """RC and RF over all processes; RF is None where there was no checkpoint `before`, (N,) chosen experts."""
        self.hook.remove()
        count, total, outer = map(context.sum, (self.count, self.total, self.outer))
        self.chosen = context.sum(self.chosen.int()).short()
        changed = None if before is None else float((self.chosen != before).double().mean())
        return {"rc": representation_collapse(count, total, outer), "rf": changed}


@torch.no_grad()
def evaluate(model: MaskedLM, data: MaskedData, config: Config, context, maskings: int, before: list | None = None):
    """-> scores on the validation text, and the experts that its tokens chose, (N,) for each sparse layer.

    Scores are the mean cross entropy of the masked tokens and their perplexity, overall and of each language, the
    balance loss, and for each sparse layer routing statistics, RC, RF against the choices `before`, and temperature.
    """
    model.eval()
    model.start_stats()
    tokens = data.eval_tokens("valid", config.eval_tokens)
    watches = [Watch(moe, tokens, context) for moe in model.moe_layers]
    sums = torch.zeros(len(data.languages), 2, dtype=torch.float64)  # cross entropy and masked tokens of each language
    balances = torch.zeros(2, dtype=torch.float64)
    for k, first, batch in data.eval_batches("valid", maskings, config.eval_tokens, context.rank, context.world):
        for watch in watches:
            watch.first = first if k == 0 else None
        ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
        with context.autocast():
            logits, balance = model(ids, masked, real)
        losses = token_losses(logits, targets).cpu().double()
        sums.index_add_(0, batch.language, torch.stack([losses, torch.ones_like(losses)], dim=1))
        balances += torch.tensor([float(balance) * len(losses), len(losses)])
    sums, balances = context.sum(sums), context.sum(balances)
    model.train()
    layers = model.stats(context.sum)
    for i, (moe, watch, layer) in enumerate(zip(model.moe_layers, watches, layers)):
        layer |= watch.finish(before[i] if before else None, context)
        layer["temperature"] = temperature(moe)
    loss, count = sums.sum(dim=0).tolist()
    scores = {
        "loss": loss / count,
        "ppl": math.exp(min(loss / count, 700)),
        "balance": float(balances[0] / balances[1]),
        "tokens": tokens,
        "predicted": int(count),
        "languages": {name: math.exp(min(a / n, 700)) for name, (a, n) in zip(data.languages, sums.tolist()) if n},
        "layers": layers,
    }
    return scores, [watch.chosen for watch in watches]


def temperature(moe: MoE) -> float | None:
    """tau (X-MoE eq. 8); None where there is none."""
    return moe.router.temperature.item() if moe.router.score == "hypersphere" else None


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy (M,) of logits (M, V), in fp32 at least."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def describe(scores: dict) -> str:
    """What one evaluation found, a line a sparse layer."""
    line = f"{scores['loss']:.4f}  ppl {scores['ppl']:.2f} ({scores['predicted']:,} masked tokens)"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    for i, layer in enumerate(scores["layers"], 1):
        changed = "-" if layer["rf"] is None else f"{layer['rf']:.1%}"
        warmth = "" if layer["temperature"] is None else f", temperature {layer['temperature']:.4f}"
        lines.append(
            f"  sparse layer {i}: RC {layer['rc']:.2f}, RF {changed}, load imbalance {layer['imbalance']:.2f}, "
            f"entropy {layer['entropy']:.2f}{warmth}; experts served per token {layer['served']:.2f}, "
            f"tokens unserved {layer['unserved']:.2%}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# One run


def open_data(config: Config, context) -> MaskedData:
    """The prepared corpus, whose vocabulary the config then has; catalogs are prepared here where they are missing."""
    folder = ready(config.data, config.spm, make=context.rank == 0)
    context.barrier()
    micros = config.batch_tokens // config.micro_tokens
    shares = config.sampling_exponent, config.mask_share
    data = MaskedData(folder, config.block_size, config.micro_tokens, micros, config.seed, *shares)
    common.check_data(data, config, context)
    return data


def build(config: Config, checkpoint: dict | None, context) -> MaskedLM:
    """The model of a checkpoint, of `--init_from` with new sparse layers, or drawn from the seed."""
    common.seed_all(config.seed)
    model = MaskedLM(config)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    elif config.init_from:
        arguments, weights = load_xlmr(config.init_from)
        longest = arguments.pop("block_size")
        if config.block_size > longest:
            raise ValueError(f"{config.init_from} has {longest} positions, fewer than block_size = {config.block_size}")
        common.check_weights(config.init_from, arguments, config)
        weights["encoder.wpe.weight"] = weights["encoder.wpe.weight"][: len(model.encoder.wpe.weight)]
        model.load_state_dict(model.state_dict() | weights)
    return model.to(context.device, torch.float64 if context.dtype == torch.float64 else torch.float32)


def train(config: Config, name: str, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    say = tqdm.write if context.rank == 0 else lambda _: None
    with common.clear_errors():
        mine = common.deal(config, context)  # this process's micro-batches of every step
        data = open_data(config, context)
        folder, result, checkpoint = common.open_run(config, name, context, data)
        if result:
            return result
        model = build(config, checkpoint, context)
        folder.begin(data.tokenizer)
    counts, flops = count_parameters(model), flops_per_token(config, config.mask_share)
    say(f"{name}: {counts['total']:,} parameters, {counts['active']:,.0f} active a token; "
        f"{flops['total'] / 1e6:.1f} MFLOPs a token forward, {flops['moe'] / 1e6:.1f} of them in sparse layers; "
        f"{len(data.languages)} languages; {context.world} x {context.device.type}, {context.dtype}")  # fmt: skip

    betas = config.beta1, config.beta2
    optimizer = common.adamw(model, config.learning_rate, betas, config.weight_decay, config.eps)
    scaler = torch.amp.GradScaler(context.device.type, enabled=context.dtype == torch.float16)
    start, seconds = common.restore(checkpoint, optimizer, scaler, folder)
    scores, chosen = (checkpoint["scores"], checkpoint["chosen"]) if checkpoint else (None, None)
    del checkpoint  # it holds a copy of everything
    forward = common.parallel(model, config, context)

    loss_sum = model.bias.new_zeros(())  # since the last evaluation, on the device; once not finite, it stays so
    since, clock = start, time.perf_counter()
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, unit="step", disable=context.rank > 0)
    model.train()
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = common.linear(step, config.steps, config.warmup, config.learning_rate)
        for micro in mine:
            common.seed_all(config.seed, 1 + step, micro)  # dropout, whichever process gets this micro-batch
            batch = data.batch("train", step, micro)
            ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
            if context.world > 1:
                forward.require_backward_grad_sync = micro == mine[-1]
            with context.autocast():
                logits, balance = forward(ids, masked, real)
                loss = token_losses(logits, targets).mean()
            scaler.scale((loss + config.balance_coef * balance) / len(mine)).backward()
            loss_sum += loss.detach() / len(mine)
        scaler.unscale_(optimizer)
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        model.after_step()  # expert embeddings back on their sphere

        done, last = step + 1, step + 1 == config.steps
        due = done % config.eval_every == 0 or last
        if done % config.log_every == 0 or due:
            mean_loss = float(context.sum(loss_sum)) / context.world / (done - since)
            if not math.isfinite(mean_loss):
                common.not_finite(bar, done)
            speed = (done - since) * config.batch_tokens / (time.perf_counter() - clock)
            warmth = [f"{tau:.3f}" for moe in model.moe_layers if (tau := temperature(moe))]
            bar.set_postfix(
                loss=f"{mean_loss:.3f}", tok_s=f"{speed:,.0f}", **({"tau": ", ".join(warmth)} if warmth else {})
            )
        if due:
            seconds += time.perf_counter() - clock
            fastest = common.peak_flops(context)
            maskings = config.eval_maskings if last else 1
            scores, chosen = evaluate(model, data, config, context, maskings, chosen)
            if not math.isfinite(scores["loss"]):  # the last update broke what the loss before it did not show
                common.not_finite(bar, done)
            mfu = f", MFU {3 * flops['total'] * speed / fastest:.1%}" if fastest else ""
            say(f"step {done}: train {mean_loss:.4f}  {speed:,.0f} tokens/s{mfu}  valid {describe(scores)}")
            folder.log({"step": done, "train_loss": mean_loss, "tokens_per_second": speed, **scores})
            folder.save({
                "kind": "encoder", "step": done, "seconds": seconds, "config": dataclasses.asdict(config),
                "arguments": {f.name: getattr(config, f.name) for f in dataclasses.fields(EncoderConfig)},
                **folder.data, "scores": scores, "chosen": chosen,  # the next checkpoint's RF needs the choices
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
            })  # fmt: skip
            loss_sum.zero_()
            since, clock = done, time.perf_counter()
    result = {
        "name": name, "valid": scores, "parameters": counts, "flops": flops, "seconds": round(seconds, 1),
        "data": data.checksum, "config": folder.config, "machine": common.machine(context),
    }  # fmt: skip
    folder.finish(result)
    return result


def report(result: dict) -> str:
    """A finished result in words, the languages from the easiest to the hardest."""
    languages = sorted(result["valid"]["languages"].items(), key=lambda item: item[1])
    cells = [f"{name:>8} {ppl:9.2f}" for name, ppl in languages]
    lines = ["  ".join(cells[i : i + 6]) for i in range(0, len(cells), 6)]
    return "\n".join(
        [f"\n{result['name']}, perplexity of every language:", *lines, f"valid {describe(result['valid'])}"]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def results_of(given: dict, row: dict, context) -> tuple[Config, list[dict]]:
    return common.results_of(Config, PRESETS, given, row, lambda config, name: train(config, name, context))


def table(rows: list, paper: str, given: dict, context) -> str:
    """A line for each (name, what to change, the paper's number); RC and the others are means over sparse layers."""
    lines = []
    for name, row, theirs in rows:
        _, results = results_of(given, row, context)
        cells = [name, f"{results[0]['parameters']['total'] / 1e6:.1f}M", theirs]
        cells.append(common.spread([result["valid"]["ppl"] for result in results]))
        for key, form in (("rc", ".2f"), ("rf", ".1%"), ("imbalance", ".2f"), ("temperature", ".3f")):
            values = [layer[key] for result in results for layer in result["valid"]["layers"] if layer[key] is not None]
            cells.append(format(statistics.fmean(values), form) if values else "")
        lines.append(cells)
    headers = ["model", "params", f"paper, {paper}", "our perplexity", "RC", "RF", "load imbalance", "temperature"]
    return common.markdown_table(headers, lines)


def table2(base: Config, given: dict, context) -> str:
    """X-MoE table 2: validation perplexity of masked LM."""
    return table(TABLE2, "perplexity", given, context)


def table3(base: Config, given: dict, context) -> str:
    """X-MoE table 3, pre-training: dimension reduction and L2 norm, each on and off, sigmoid gate."""
    half = base.num_experts // 2
    rows = [(name, {k: half if v == "half" else v for k, v in row.items()}, paper) for name, row, paper in TABLE3]
    return table(rows, "fine-tuned: XNLI, MLQA", given, context)


def table5(base: Config, given: dict, context) -> str:
    """X-MoE table 5, pre-training: the routing dimension, sigmoid gate."""
    rows = [(name, dict(SIGMOID, routing_dim=int(k * base.num_experts)), paper) for name, k, paper in TABLE5]
    return table(rows, "fine-tuned: XNLI, MLQA", given, context)


TABLES = {2: table2, 3: table3, 5: table5}


def main():
    given, config, context = common.start(Config, PRESETS)
    if config.table:
        text = TABLES[config.table](config, given, context)
        if context.rank == 0:
            seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
            title = f"X-MoE table {config.table}, preset {config.preset}, {config.eval_maskings} maskings, {seeds}"
            print(f"\n{title}\n\n{text}")
        return
    config, results = results_of(given, {}, context)
    if context.rank == 0:
        for result in results:
            print(report(result))
        if len(results) > 1:
            ppl = common.spread([result["valid"]["ppl"] for result in results])
            print(f"\n{len(results)} seeds: perplexity {ppl}")


if __name__ == "__main__":
    main()
