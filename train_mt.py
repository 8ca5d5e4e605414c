"""XMoE's and X-MoE's translation models: an encoder-decoder with sparse experts under any router.

    python train_mt.py                                         the demo: five languages to English, from this disk
    torchrun train_mt.py --router switch                       another router, with equal parameters and FLOPs
    python -m data.prepare multi30k-de --source DIR            then
    python train_mt.py --preset multi30k                       German captions to English
    torchrun --nproc_per_node 4 train_mt.py --preset wmt23 --data wmt23-uk       the paper's model, on 4 GPUs
    python train_mt.py --table 3                               every row of a table, beside the paper's numbers
    python train_mt.py --preset multi30k --translate FILE      a trained model, line by line; - for standard input

Prints, at every evaluation, cross entropy, how each MoE layer routes, and BLEU and chrF2++ of translations of the
validation set; in the end those of the test set, under the evaluation's capacity limit (the paper's protocol) and
without one, with sacrebleu's signatures, and five translations. A run is kept in out/train_mt/NAME; the same command
goes on where it stopped. `--help` lists every constant.
"""

import dataclasses
import math
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
from data.corpora import read_lines
from data.prepare import ready
from data.tokenizers import XLMR, load_tokenizer
from data.translation import TranslationData, source_batches
from flops import count_parameters, translation_flops
from model import describe_routing
from translator import Translator, TranslatorConfig

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclasses.dataclass
class Config(TranslatorConfig):
    preset: str = "demo"  # demo, multi30k, wmt23 (XMoE) or wmt10 (X-MoE)
    table: int | None = None  # run every row of XMoE's table 3 or X-MoE's table 4 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs-en"  # a corpus of translation pairs under data/prepared, or the folder of a prepared one
    target: str = "en"  # the language to translate into, from the other of each pair
    sampling_exponent: float = 1.0  # a pair of languages is drawn in proportion to its size to this power
    block_size: int = 128  # longest source and longest translation in training; longer pairs are left out
    n_embd: int = 128  # D
    ffn_size: int = 512  # inner width of a dense FFN
    dropout: float = 0.3  # after embeddings, attention and FFN
    seed: int = 0  # of weights, data order and dropout
    steps: int = 1500  # optimizer steps
    batch_tokens: int = 2048  # tokens of a step, both sides with their padding, over all processes and micro-batches
    micro_tokens: int = 2048  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 2e-3  # peak
    warmup_steps: int = 512  # steps to the peak; then it falls as 1 / sqrt(step)
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    weight_decay: float = 1e-4  # of matrices and embeddings
    grad_clip: float = 0.0  # largest norm of the gradient; 0 for no limit
    label_smoothing: float = 0.1  # share of the target that is spread over the vocabulary
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    average: int = 5  # the weights of so many last checkpoints are averaged; the better of that and the best one stays
    beam: int = 5  # beams of a translation
    length_penalty: float = 1.0  # a translation's log probability is divided by its length to this power
    eval_every: int = 300  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 20  # validation tokens of each loss, at most
    eval_sentences: int = 3000  # validation sentences of each BLEU, at most, from every pair of languages
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_mt"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "auto"  # bfloat16 (CUDA, CPUs with AMX), float16 (with loss scaling), float32, float64
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    translate: str | None = None  # no training: translate this file, or - for standard input, with the run's model

    def __post_init__(self):
        super().__post_init__()
        common.check_run(self)
        for name in ("warmup_steps", "average", "beam", "eval_sentences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}")
        if not 0 <= self.sampling_exponent <= 1:
            raise ValueError(f"sampling_exponent must lie in [0, 1], not {self.sampling_exponent}")
        if self.table not in (None, *TABLES):
            raise ValueError(f"train_mt.py has tables {', '.join(map(str, TABLES))}, not {self.table}")
        if self.table == 3 and self.moe_after:
            raise ValueError("table 3 has experts in place of FFNs: not with moe_after, nor with preset wmt10")
        if self.translate is not None and (self.table or self.seeds > 1):
            raise ValueError("--translate takes one trained model: not with --table or --seeds")

    not_identity = {"translate"}


# XMoE 4.2 and its authors' configurations; the papers are silent on batch and steps: those are ours.
PAPER = dict(n_layer=12, decoder_layers=6, n_embd=512, ffn_size=2048, n_head=8, block_size=256, expert_ffns=32)
PAPER |= dict(learning_rate=5e-4, warmup_steps=512, batch_tokens=1 << 18, micro_tokens=1 << 14, steps=50_000)
PAPER |= dict(eval_every=2_500, log_every=50)
SMALL = dict(n_embd=256, ffn_size=1024, steps=3_000, eval_every=500, dropout=0.1)
# X-MoE's router
HYPERSPHERE = dict(router="hypersphere", orthogonal=True)
PRESETS = {
    "demo": {},
    "multi30k": dict(SMALL, data="multi30k-de"),
    "wmt23": dict(PAPER, data="wmt23-de"),
    "wmt10": dict(PAPER, data="wmt10", sampling_exponent=0.7, moe_after="6", **HYPERSPHERE),
}

# Rows of XMoE's table 3: router, parts that an FFN is divided into, and BLEU and chrF2++ of uk, de, ru, he, zh.
TABLE3 = [
    ("dense", "dense", 1, ((29.2, 53.0), (28.2, 52.2), (25.3, 50.9), (32.8, 58.0), (16.7, 43.4), (26.4, 51.5))),
    ("Switch", "switch", 1, ((29.9, 53.9), (29.2, 53.1), (26.7, 52.0), (34.9, 59.7), (17.4, 44.8), (27.6, 52.7))),
    ("top-2", "topk", 2, ((30.7, 54.6), (29.2, 53.1), (27.4, 53.5), (35.9, 60.9), (17.6, 44.9), (28.2, 53.4))),
    ("top-4", "topk", 4, ((30.9, 54.9), (29.3, 53.1), (27.8, 53.5), (36.3, 60.9), (17.7, 45.1), (28.4, 53.5))),
    ("XMoE", "threshold", 2, ((31.7, 55.7), (29.4, 53.3), (28.4, 54.0), (36.1, 60.5), (18.1, 45.6), (28.7, 53.8))),
    ("XMoE", "threshold", 4, ((32.0, 55.7), (29.2, 53.2), (28.5, 53.9), (35.5, 60.1), (18.0, 45.4), (28.7, 53.7))),
]
LANGUAGES = ("uk", "de", "ru", "he", "zh")
TABLE4 = [
    ("dense", dict(router="dense")),
    ("SMoE", dict(router="switch", orthogonal=True)),
    ("X-MoE", HYPERSPHERE),
]

# ---------------------------------------------------------------------------------------------------------------------
# Translating and scoring


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean over M tokens (scalar) of (1 - s) (-log p[label]) - s mean_v log p[v], logits (M, V), in fp32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def translate_texts(model: Translator, texts: list[str], tokenizer: XLMR, config: Config, context, limit=False) -> list:
    """The translation of each text, detokenised, on one line. Batches of one length are dealt to the processes.

    limit: under the evaluation's capacity, where a translation depends on its batch too. A text of more than
    block_size - 1 tokens is cut, and a line says so; one without any is its own translation, which is empty.
    """
    ids, room = tokenizer.encode_batch(texts), config.block_size - 1
    long = sum(len(text) > room for text in ids)
    if long and context.rank == 0:
        print(f"warning: {long} of {len(ids)} texts are cut to block_size - 1 = {room} tokens", file=sys.stderr)
    written = [number for number, text in enumerate(ids) if text]
    special = dict(bos=tokenizer.bos, eos=tokenizer.eos, never=tokenizer.unwritten)
    budget = config.micro_tokens // 2  # about as many source tokens as in training, which a capacity counts
    batches = list(source_batches([ids[number][:room] for number in written], tokenizer.pad, tokenizer.eos, budget))
    mine, found = batches[context.rank :: context.world], dict.fromkeys(range(len(texts)), "")
    for numbers, (source, real) in tqdm(mine, desc="translating", unit="batch", leave=False, disable=context.rank > 0):
        source, real = context.send_all(source, real)
        with context.autocast():
            best = model.translate(
                source, real, beam=config.beam, length_penalty=config.length_penalty, limit=limit, **special
            )
        for number, ids in zip(numbers, best):
            found[written[number]] = " ".join(tokenizer.decode(ids).split())  # a piece may be a line feed
    parts = context.gather(found)
    return [next((part[number] for part in parts if part[number]), "") for number in found]


def score(translations: list[str], references: list[str]) -> dict[str, float | str]:
    """BLEU and chrF2++ of a corpus, both texts as people write them: sacrebleu splits words itself."""
    try:
        from sacrebleu import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU and chrF2++ need sacrebleu: pip install sacrebleu") from error
    scores = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF(word_order=2))):
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def bleu(model: Translator, data: TranslationData, split: str, config: Config, context, most=None, limit=True) -> dict:
    """Scores of every pair of languages, their means, five examples, and experts wanted and served per token."""
    texts = {name: [side[:most] for side in data.texts(split, name)] for name in data.languages}
    texts = {name: sides for name, sides in texts.items() if sides[0]}
    model.start_stats()
    sources = [source for sources, _ in texts.values() for source in sources]
    translations = iter(translate_texts(model, sources, data.tokenizer, config, context, limit))
    pairs, examples = {}, []
    for name, (sources, references) in texts.items():
        ours = [next(translations) for _ in sources]
        pairs[name] = score(ours, references)
        examples.append([(name, *texts) for texts in zip(sources, references, ours)])
    # from the languages in turn, and from all over the texts
    turns = [(examples[i % len(examples)], 2 * i + 1) for i in range(5)]
    shown = dict.fromkeys(own[place * len(own) // 10] for own, place in turns)
    return {
        "bleu": statistics.fmean(pair["bleu"] for pair in pairs.values()),
        "chrf": statistics.fmean(pair["chrf"] for pair in pairs.values()),
        "pairs": pairs,
        "sentences": sum(len(sources) for sources, _ in texts.values()),
        "examples": list(shown),
        "layers": model.stats(context.sum),
    }


@torch.no_grad()
def evaluate(model: Translator, data: TranslationData, split: str, config: Config, context) -> dict:
    """Cross entropy (without smoothing), perplexity, balance loss, routing statistics; BLEU under the limit."""
    model.eval()
    model.start_stats()
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for batch in data.eval_batches(split, config.eval_tokens, context.rank, context.world):
        labels, *inputs = context.send_all(
            batch.labels, batch.source, batch.target, batch.source_real, batch.target_real
        )
        with context.autocast():
            logits, balance = model(*inputs)
            loss = smoothed_loss(logits, labels, 0.0)
        sums += torch.tensor([float(loss), float(balance), 1.0], dtype=torch.float64) * len(labels)
    loss, balance, tokens = context.sum(sums).tolist()
    layers = [{"name": name} | layer for name, layer in zip(model.moe_names, model.stats(context.sum))]
    scores = {"bleu": 0.0, "chrf": 0.0}
    if math.isfinite(loss):  # otherwise no translation would come to its end
        scores = bleu(model, data, split, config, context, config.eval_sentences)
    model.train()
    return {
        "loss": loss / tokens,
        "ppl": math.exp(min(loss / tokens, 700)),
        "balance": balance / tokens,
        "tokens": int(tokens),
        "layers": layers,
        "bleu": scores["bleu"],
        "chrf": scores["chrf"],
    }


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    line = f"{scores['loss']:.4f}  ppl {scores['ppl']:.2f}  BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    return "\n".join(lines + [f"  {layer['name']}: {describe_routing(layer)}" for layer in scores["layers"]])


# ---------------------------------------------------------------------------------------------------------------------
# One run


def open_data(config: Config, context) -> TranslationData:
    """The prepared corpus, whose vocabulary the config then has; the demo's is made here where it is missing."""
    folder = ready(config.data, make=context.rank == 0)
    context.barrier()
    micros, exponent = config.batch_tokens // config.micro_tokens, config.sampling_exponent
    data = TranslationData(folder, config.block_size, config.micro_tokens, micros, config.seed, exponent, config.target)
    common.check_data(data, config, context)
    return data


def train(config: Config, name: str, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    say = tqdm.write if context.rank == 0 else lambda _: None
    with common.clear_errors():
        mine = common.deal(config, context)  # this process's micro-batches of every step
        data = open_data(config, context)
        folder, result, checkpoint = common.open_run(config, name, context, data)
        if result:
            return result
        common.seed_all(config.seed)
        model = Translator(config)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
        model.to(context.device, torch.float64 if context.dtype == torch.float64 else torch.float32)
        score([""], [""])  # is sacrebleu there?
        folder.begin(data.tokenizer)
    pairs = data.meta["splits"]["train"]["pairs"]
    length = data.meta["splits"]["train"]["tokens"] / pairs / 2
    counts, flops = count_parameters(model), translation_flops(config, length, length)
    say(f"{name}: {counts['total']:,} parameters, {counts['active']:,.0f} active a token; a pair of 2 x {length:.1f} "
        f"tokens takes {flops['total'] / 1e6:.1f} MFLOPs forward, {flops['moe'] / 1e6:.1f} of them in MoE layers; "
        f"{pairs:,} pairs of {', '.join(data.languages)}; {context.world} x {context.device.type}, "
        f"{context.dtype}")  # fmt: skip
    if config.data == Config.data:
        say(
            "a smoke run: real languages, but some 800 short texts of each; what is held out often shares their phrases"
        )
    if any(data.left_out.values()):
        long = ", ".join(f"{count:,} {split}" for split, count in data.left_out.items())
        say(f"left out of training and of the loss, longer than block_size = {config.block_size} tokens: {long} pairs")

    betas = config.beta1, config.beta2
    optimizer = common.adamw(model, config.learning_rate, betas, config.weight_decay)
    scaler = torch.amp.GradScaler(context.device.type, enabled=context.dtype == torch.float16)
    start, seconds = common.restore(checkpoint, optimizer, scaler, folder)
    kept, best = (checkpoint["kept"], checkpoint["best"]) if checkpoint else ([], None)
    del checkpoint  # it holds a copy of everything
    forward = common.parallel(model, config, context)

    loss_sum = model.ln_d.weight.new_zeros(())  # since the last evaluation, on the device; once not finite, it stays so
    since, tokens, clock = start, 0, time.perf_counter()
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, unit="step", disable=context.rank > 0)
    model.train()
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = common.inverse_sqrt(step, config.warmup_steps, config.learning_rate)
        for micro in mine:
            common.seed_all(config.seed, 1 + step, micro)  # dropout, whichever process gets this micro-batch
            batch = data.batch("train", step, micro)
            tokens += batch.tokens * context.world
            labels, *inputs = context.send_all(
                batch.labels, batch.source, batch.target, batch.source_real, batch.target_real
            )
            if context.world > 1:
                forward.require_backward_grad_sync = micro == mine[-1]
            with context.autocast():
                logits, balance = forward(*inputs)
                loss = smoothed_loss(logits, labels, config.label_smoothing)
            scaler.scale((loss + config.balance_coef * balance) / len(mine)).backward()
            loss_sum += loss.detach() / len(mine)
        scaler.unscale_(optimizer)
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        model.after_step()

        done, last = step + 1, step + 1 == config.steps
        due = done % config.eval_every == 0 or last
        if done % config.log_every == 0 or due:
            mean_loss = float(context.sum(loss_sum)) / context.world / (done - since)
            if not math.isfinite(mean_loss):
                common.not_finite(bar, done)
            speed = tokens / (time.perf_counter() - clock)
            bar.set_postfix(loss=f"{mean_loss:.3f}", tok_s=f"{speed:,.0f}")
        if due:
            seconds += time.perf_counter() - clock
            scores = evaluate(model, data, "valid", config, context)
            if not math.isfinite(scores["loss"]):  # the last update broke what the loss before it did not show
                common.not_finite(bar, done)
            fastest, per_token = common.peak_flops(context), flops["total"] / (2 * length)
            mfu = f", MFU {3 * per_token * speed / fastest:.1%} at full capacity" if fastest else ""
            say(f"step {done}: train {mean_loss:.4f}  {speed:,.0f} tokens/s{mfu}  valid {describe(scores)}")
            folder.log({"step": done, "train_loss": mean_loss, "tokens_per_second": speed, **scores})
            weights = {
                "kind": "encdec", "step": done, "model": model.state_dict(), **folder.data,
                "arguments": {f.name: getattr(config, f.name) for f in dataclasses.fields(TranslatorConfig)},
            }  # fmt: skip
            kept, former = [*kept, done][-config.average :], best
            if best is None or scores["bleu"] > best["bleu"]:
                best = {"step": done, "bleu": scores["bleu"]}
            folder.save_as(f"step{done}.pt", weights)
            folder.save({
                **weights, "seconds": seconds, "config": dataclasses.asdict(config), "kept": kept, "best": best,
                "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
            })  # fmt: skip
            # also by the checkpoint before this one, if this one cannot be read
            needed = {f"step{step}.pt" for step in (*kept, best["step"], (former or best)["step"])}
            for file in folder.path.glob("step*.pt") if folder.writes else ():
                if file.name not in needed:
                    file.unlink()
            loss_sum.zero_()
            since, tokens, clock = done, 0, time.perf_counter()
    with common.clear_errors():
        chosen = choose(model, data, kept, best, folder, config, context)
    result = {
        "name": name, **chosen, **test(model, data, config, context), "parameters": counts,
        "flops_per_pair": flops, "seconds": round(seconds, 1), "data": data.checksum, "config": folder.config,
        "machine": common.machine(context),
    }  # fmt: skip
    folder.finish(result)
    return result


def mean_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor; of those that are not numbers to be averaged, such as Hash's table, the last."""

    def mean(tensors: list[Tensor]) -> Tensor:
        if not tensors[0].is_floating_point():
            return tensors[-1]
        return sum(x.double() for x in tensors).div(len(tensors)).to(tensors[0].dtype)

    return {name: mean([state[name] for state in states]) for name in states[0]}


def choose(model: Translator, data: TranslationData, kept: list[int], best: dict, folder, config, context) -> dict:
    """Gives the model the mean weights of the last checkpoints, or the best one's, as validation BLEU has it."""
    context.barrier()  # all files are there
    states = [common.load_checkpoint(folder.path / f"step{step}.pt") for step in kept]
    model.load_state_dict(mean_weights([state["model"] for state in states]))
    mean = bleu(model, data, "valid", config, context, config.eval_sentences)["bleu"]
    weights = f"mean of the weights of steps {', '.join(map(str, kept))}"
    if mean < best["bleu"]:
        model.load_state_dict(common.load_checkpoint(folder.path / f"step{best['step']}.pt")["model"])
        weights = f"weights of step {best['step']}"
    folder.save_as("model.pt", {**states[-1], "step": weights, "model": model.state_dict()})
    return {"weights": weights, "valid": {"mean_bleu": mean, "best_bleu": best["bleu"], "best_step": best["step"]}}


def test(model: Translator, data: TranslationData, config: Config, context) -> dict:
    """Scores of the test set at the evaluation gamma (the paper's protocol), and without a limit."""
    scores = bleu(model, data, "test", config, context)
    if config.eval_capacity_factor >= config.num_experts or config.select == "expert_choice":
        # Capacity for all tokens is no limit; and to expert_choice the limit is what chooses.
        return {"test": scores, "test_no_limit": scores}
    return {"test": scores, "test_no_limit": bleu(model, data, "test", config, context, limit=False)}


def translate_lines(config: Config, given: dict, context):
    """Prints the translation of every line of a file, an empty one for one without text, by the run's model."""
    with common.clear_errors():
        # the run of these constants, or else of those that do not say how to search, or in what type
        dropped = (), ("beam", "length_penalty"), ("beam", "length_penalty", "dtype")
        constants = [{k: v for k, v in given.items() if k not in names} for names in dropped]
        names = [common.configure(Config, PRESETS, chosen)[1] for chosen in constants]
        files = [Path(config.out_dir, name, "model.pt") for name in names]
        file = next((file for file in files if file.exists()), None)
        if file is None:
            raise ValueError(f"{files[0]} does not exist: train first, with the same constants")
        state, tokenizer = common.load_checkpoint(file), load_tokenizer(file.parent)
        if state["tokenizer"] != tokenizer.sha256:
            raise ValueError(f"{file} was trained with another vocabulary than the tokenizer beside it")
        model = Translator(TranslatorConfig(**state["arguments"]))
        model.load_state_dict(state["model"])
        path = Path("/dev/stdin" if config.translate == "-" else config.translate)
        lines = [line.strip() for _, line in read_lines(path)] if context.rank == 0 else None  # a pipe is read once
    lines = context.gather(lines)[0]
    model.to(context.device, torch.float64 if context.dtype == torch.float64 else torch.float32)
    model.start_stats()
    translations = translate_texts(model, lines, tokenizer, config, context)
    served = ", ".join(
        f"{name} {layer['served']:.1f}" for name, layer in zip(model.moe_names, model.stats(context.sum))
    )
    if context.rank == 0:
        print("".join(f"{line}\n" for line in translations), end="")
        if served:
            print(f"experts served per token: {served}", file=sys.stderr)


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    valid, lines = result["valid"], [f"\n{result['name']}, test; beam {config.beam}; {result['weights']}"]
    lines.append(
        f"validation BLEU: {valid['mean_bleu']:.2f} with the mean of the last weights, "
        f"{valid['best_bleu']:.2f} with the best checkpoint's"
    )
    shown = {f"with gamma {config.eval_capacity_factor:g}": result["test"], "without a limit": result["test_no_limit"]}
    for how, scores in shown.items():
        if how == "without a limit" and scores == result["test"]:
            continue
        served = ", ".join(f"{layer['served']:.2f}" for layer in scores["layers"])
        served = f"; rows kept per token: {served}" if served else ""
        lines.append(f"{how}: BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}{served}")
        for name, pair in scores["pairs"].items() if len(scores["pairs"]) > 1 else ():
            lines.append(f"  {name:12} BLEU {pair['bleu']:6.2f}  chrF2++ {pair['chrf']:6.2f}")
    pair = next(iter(scores["pairs"].values()))
    lines += [f"BLEU {pair['bleu_signature']}", f"chrF2++ {pair['chrf_signature']}", ""]
    for name, source, reference, ours in scores["examples"]:
        lines.append(f"{name}: {source}\n  reference: {reference}\n  ours:      {ours}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def results_of(given: dict, row: dict, context) -> tuple[Config, list[dict]]:
    return common.results_of(Config, PRESETS, given, row, lambda config, name: train(config, name, context))


def table(rows: list, corpora: list[str], given: dict, context) -> str:
    """A line for each (name, what to change, the paper's BLEU and chrF2++ by language); BLEU / chrF2++ of the test set.

    With several corpora every one has models of its own.
    """
    lines, papers = [], {}
    for name, row, paper in rows:
        runs = [results_of(given, row | {"data": corpus}, context) for corpus in corpora]
        config, seeds = runs[0][0], list(zip(*(results for _, results in runs)))  # a seed has a model for each corpus
        ours, limitless = cells(seeds, "test"), cells(seeds, "test_no_limit")
        papers |= {pair: language for pair in ours if (language := re.split("[-_]", pair)[0]) in paper}
        if not {*LANGUAGES} <= {*papers.values()}:  # a mean of others is not to be compared
            papers.pop("mean", None)
        line = [name, f"{config.num_experts} x {config.expert_size}" if config.router != "dense" else ""]
        line += [f"{seeds[0][0]['parameters']['total'] / 1e6:.1f}M", *ours.values(), limitless["mean"]]
        line += [kept_rows(seeds, "test"), kept_rows(seeds, "test_no_limit")]
        lines.append(line + ["{} / {}".format(*paper[language]) for language in papers.values()])
    headers = ["method", "experts", "params", *ours, "mean, no limit", "rows kept", "no limit"]
    return common.markdown_table(headers + [f"paper, {pair}" for pair in papers], lines)


def cells(seeds: list[tuple[dict, ...]], where: str) -> dict[str, str]:
    """BLEU / chrF2++ of every pair of languages, and their mean, over seeds."""
    keys = "bleu", "chrf"
    pairs = [{name: pair for model in models for name, pair in model[where]["pairs"].items()} for models in seeds]
    for own in pairs:
        own["mean"] = {key: statistics.fmean(pair[key] for pair in own.values()) for key in keys}
    return {name: " / ".join(common.spread([own[name][key] for own in pairs]) for key in keys) for name in pairs[0]}


def kept_rows(seeds: list[tuple[dict, ...]], where: str) -> str:
    """Per token, the mean over models and MoE layers; empty for a dense model."""
    values = [layer["served"] for models in seeds for model in models for layer in model[where]["layers"]]
    return f"{statistics.fmean(values):.2f}" if values else ""


def table3(base: Config, given: dict, context) -> str:
    """XMoE table 3: routers of equal parameters and FLOPs; at the paper's scale each pair of languages by itself."""
    alone = base.preset == "wmt23" and "data" not in given
    rows = []
    for method, router, split, papers in TABLE3:
        row = {"router": router} | ({} if router == "dense" else {"expert_size": base.ffn_size // split})
        rows.append((method, row, dict(zip((*LANGUAGES, "mean"), papers))))
    return table(rows, [f"wmt23-{language}" for language in LANGUAGES] if alone else [base.data], given, context)


def table4(base: Config, given: dict, context) -> str:
    """X-MoE table 4: its layer half-way in the encoder, many languages to English. Our copy lacks its numbers."""
    depth = {"moe_after": base.moe_after or str(max(1, base.n_layer // 2))}
    rows = [(name, row if row["router"] == "dense" else row | depth, {}) for name, row in TABLE4]
    return table(rows, [base.data], given, context)


TABLES = {3: table3, 4: table4}


def main():
    given, config, context = common.start(Config, PRESETS)
    if config.table:
        text = TABLES[config.table](config, given, context)
        if context.rank == 0:
            seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
            paper = {3: "XMoE", 4: "X-MoE"}[config.table]
            title = f"{paper} table {config.table}, preset {config.preset}, {seeds}: test BLEU / chrF2++"
            print(f"\n{title}\n\n{text}")
        return
    if config.translate is not None:
        translate_lines(config, given, context)
        return
    config, results = results_of(given, {}, context)
    if context.rank == 0:
        for result in results:
            print(report(config, result))
        if len(results) > 1:
            limited, free = (
                common.spread([result[where]["bleu"] for result in results]) for where in ("test", "test_no_limit")
            )
            print(f"\n{len(results)} seeds: test BLEU {limited}, without a limit {free}")


if __name__ == "__main__":
    main()
