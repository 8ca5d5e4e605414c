"""XLM-E: cross-lingual pre-training as replaced token detection, with ELECTRA's generator and discriminator.

    python train_electra.py                                        the demo, on sentences and pairs on this disk
    python train_electra.py --objective mlm                        the baseline: XLM, a masked LM on the same batches
    python train_electra.py --tlm false                            sentences alone; --relative_bias false: no gate
    python train_electra.py --router hypersphere                   sparse layers in the discriminator, any router
    torchrun --nproc_per_node 8 train_electra.py --preset base     the paper's model and schedule, on 8 GPUs
    python train_electra.py --table 2                              every row of the ablation
    python train_electra.py --figure 1                             accuracy against FLOPs, XLM-E and the baseline
    python train_electra.py --flops                                parameters and FLOPs of the paper's sizes

A step has a batch of sentences (MLM, MRTD) and one of translation pairs (TLM, TRTD). The generator fills in the masked
tokens; the discriminator says of every token whether it was replaced. Prints, at every evaluation, for both kinds of
text, seen and held out: losses, how often the generator is right, accuracy and F1 of the discriminator beside the F1 of
the best blind guess, and the share of the tokens that really were replaced (the F1 of a guess at that rate); whether a
translation helps the generator; and how many held-out sentences have their translation as the nearest. A run is kept in
out/train_electra/NAME; the same command goes on where it stopped. The checkpoint's `encoder.` is the discriminator.
`--help` lists every constant.
"""

import dataclasses
import json
import math
import time
from itertools import chain, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common
from data.masked import Masked, MaskedData
from data.pairs import PairData
from data.prepare import ready
from flops import WAYS, count_parameters, electra_training_flops
from model import PAD, Encoder, EncoderConfig, MaskedLM, SparseModel

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclasses.dataclass
class Config(EncoderConfig):
    preset: str = "demo"  # demo, or the paper's base, large and xl
    table: int | None = None  # run every row of XLM-E's table 2 at the preset's scale
    figure: int | None = None  # draw XLM-E's figure 1 from the runs of XLM-E and of its baseline
    flops: bool = False  # print parameters and FLOPs of the paper's sizes (tables 3 and 4)
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "catalogs"  # a corpus of many languages under data/prepared, or the folder of a prepared one
    pairs: str = "catalogs-pairs"  # translation pairs under data/prepared, or the folder of prepared ones
    spm: str | None = None  # SentencePiece model for catalogs, such as XLM-R's; default: one trained on them
    sampling_exponent: float = 0.7  # alpha of eq. 9: a language is drawn in proportion to its size to this power
    objective: str = "rtd"  # rtd: XLM-E; mlm: its baseline XLM, a masked LM of n_layer layers
    tlm: bool = True  # masked LM on translation pairs as well
    trtd: bool | None = None  # replaced token detection on translation pairs as well; default: with rtd and tlm
    relative_bias: bool | None = None  # gated relative position bias (section 3.3), in both networks; default: with rtd
    generator_layers: int = 2  # of the generator, which is as wide as the discriminator
    router: str = "dense"  # of the discriminator, or of the baseline: dense, hypersphere (X-MoE), switch, topk, ...
    lambda_disc: float = 50.0  # lambda, the weight of the discriminator's losses
    mask_share: float = 0.15  # of the tokens are masked; of a pair, in each half
    span: float | None = None  # mean length of masked spans; default: single tokens (section 3.1: spans do worse)
    seed: int = 0  # of weights, data order, masks, replaced tokens and dropout
    steps: int = 2000  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes, for sentences and again for pairs
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1.5e-3  # peak
    warmup: float = 0.2  # share of the steps; then a line down to 0
    beta1: float = 0.9  # Adam
    beta2: float = 0.98  # Adam
    eps: float = 1e-6  # Adam
    weight_decay: float = 0.01  # of matrices and embeddings
    grad_clip: float = 2.0  # largest norm of the gradient; 0 for no limit
    balance_coef: float = 0.01  # the weight of the balance loss, where there are sparse layers
    eval_every: int = 250  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 1 << 14  # validation tokens of sentences, and of pairs, at most (retrieval has its own limit)
    eval_maskings: int = 10  # the final scores are means over so many fixed maskings; the others take one
    log_every: int = 10  # steps from one look at the loss to the next
    out_dir: str = "out/train_electra"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "auto"  # bfloat16 (CUDA, CPUs with AMX), float16 (with loss scaling), float32, float64
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again

    def __post_init__(self):
        super().__post_init__()
        common.check_run(self)
        if self.objective not in ("rtd", "mlm"):
            raise ValueError(f"objective must be rtd or mlm, not {self.objective!r}")
        rtd = self.objective == "rtd"
        if self.trtd and not (rtd and self.tlm):
            raise ValueError("trtd needs --objective rtd, and --tlm true: its generator must learn from pairs")
        self.trtd = rtd and self.tlm if self.trtd is None else self.trtd
        self.relative_bias = rtd if self.relative_bias is None else self.relative_bias
        for name in ("generator_layers", "eval_maskings", "lambda_disc"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.sampling_exponent <= 1:
            raise ValueError(f"sampling_exponent must lie in [0, 1], not {self.sampling_exponent}")
        for name, known in (("table", TABLES), ("figure", FIGURES)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"train_electra.py has {name} {', '.join(map(str, known))}, not {getattr(self, name)}")

    @property
    def generator(self) -> EncoderConfig:
        """The generator's constants."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(EncoderConfig)}
        dense = dict(router="dense", score=None, gate=None, select=None)
        return EncoderConfig(**shared | dense | {"n_layer": self.generator_layers})

    @property
    def tasks(self) -> dict[str, bool]:
        """The kinds of text to train on, and whether the discriminator does."""
        # Sentences come last: they train every parameter, so that gradients are whole when processes exchange them.
        return ({"pairs": self.trtd} if self.tlm else {}) | {"sentences": self.objective == "rtd"}

    not_identity = {"figure", "flops"}


# XLM-E appendices A and B; micro-batches are ours. Of Large and XL the text says that they have a vocabulary of 500K,
# but only one of 2^19 gives the parameters of table 3.
BASE = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, generator_layers=4, dropout=0.1)
BASE |= dict(data="cc100", pairs="opus100", steps=125_000, batch_tokens=2048 * 512, micro_tokens=32 * 512)
BASE |= dict(learning_rate=5e-4, warmup=0.08, eval_every=5000, eval_tokens=1 << 25)
LARGE = dict(n_layer=24, n_head=16, n_embd=1024, ffn_size=4096, generator_layers=6, vocab_size=1 << 19)
XL = dict(n_layer=48, n_head=24, n_embd=1536, ffn_size=6144, generator_layers=8, vocab_size=1 << 19)
PRESETS = {"demo": dict(n_embd=128, ffn_size=512), "base": BASE, "large": BASE | LARGE, "xl": BASE | XL}

TABLE2 = [  # what to change, and the paper's numbers after fine-tuning: XNLI, MLQA (F1 / EM)
    ("XLM", dict(objective="mlm"), "66.2 / 47.8"),
    ("XLM - TLM", dict(objective="mlm", tlm=False), "64.0 / 46.0"),
    ("XLM-E", {}, "76.6, 68.3 / 49.8"),
    ("XLM-E - TRTD", dict(tlm=False), "75.1, 67.8 / 49.7"),
    ("XLM-E - TRTD - gate", dict(tlm=False, relative_bias=False), "67.4 / 49.2"),
]
SIZES = {"base": ("279M", "6.3e19", "9.5e19"), "large": ("840M", "", ""), "xl": ("2.2B", "", "")}  # tables 3 and 4

# ---------------------------------------------------------------------------------------------------------------------
# The two networks


class Electra(SparseModel):
    """A discriminator, and a generator that shares its token and position embeddings (sections 2 and 3)."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.n_embd
        self.config, self.encoder = config, Encoder(config)
        self.dense, self.ln_h, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 1)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=config.init_std)
            nn.init.zeros_(linear.bias)
        self.generator = MaskedLM(config.generator)
        self.generator.encoder.wte, self.generator.encoder.wpe = self.encoder.wte, self.encoder.wpe

    def forward(self, ids: Tensor, masked: Tensor, real: Tensor | None = None, targets: Tensor | None = None):
        """The generator's logits (M, V) and the balance loss; with `targets` the discriminator's answers as well.

        ids (B, T) after masking; masked (M,) places in B * T; real (S,) as in `Encoder`; targets (M,) what stood there.
        The answers are logits (S,), above 0 where a token seems replaced, and whether it was, (S,) bool.
        """
        logits, balance = self.generator(ids, masked, real)
        if targets is None:
            return logits, balance
        drawn = sample(logits)  # (M,)
        corrupt = ids.flatten().index_copy(0, masked, drawn)  # (B * T,), eqs. 2 and 4
        h, balance = self.encoder(corrupt.view_as(ids), real)
        answers = self.out(self.ln_h(F.gelu(self.dense(h)))).flatten()  # (B * T,)
        # A token that was drawn as it stood there counts as original.
        replaced = torch.zeros_like(corrupt, dtype=torch.bool).index_copy(0, masked, drawn != targets)
        if real is not None:
            answers, replaced = answers[real], replaced[real]
        return logits, balance, answers, replaced


def kept_parameters(model: Electra | MaskedLM) -> int:
    """Parameters of what one keeps: the discriminator with its head, or the whole baseline."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("generator."))


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(M,) tokens from softmax(logits), (M, V), without gradient: each is the largest of V logits with Gumbel noise.

    torch.multinomial is slower, and meets a NaN with an assertion on the device.
    """
    logits = logits.float()
    return (logits - torch.rand_like(logits).log_().neg_().log_()).argmax(dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def look(forward, batch: Masked, detect: bool, context) -> tuple[Tensor, Tensor]:
    """One forward pass -> (10,) sums, of which `scores_of` makes means, and the balance loss."""
    ids, masked, targets, real = context.send_all(batch.ids, batch.masked, batch.targets, batch.real)
    with context.autocast():
        logits, balance, *answers = forward(ids, masked, real, targets) if detect else forward(ids, masked, real)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.new_full((), ids.numel() if real is None else len(real))
    sums = [F.cross_entropy(logits, targets, reduction="sum"), logits.new_full((), max(1, len(targets)))]  # eq. 1
    sums += [(logits.argmax(dim=1) == targets).sum(), tokens, tokens * balance.detach()]
    if detect:
        answer, replaced = answers[0].to(logits.dtype), answers[1]
        called = answer > 0
        sums += [F.binary_cross_entropy_with_logits(answer, replaced.to(answer.dtype), reduction="sum")]  # eqs. 3, 5
        sums += [(called == replaced).sum(), replaced.sum(), called.sum(), (called & replaced).sum()]
    return torch.stack(sums + [logits.new_zeros(())] * (10 - len(sums))), balance


def scores_of(sums: Tensor) -> dict[str, float]:
    """Losses and shares from the sums of `look`; blind_f1: the best F1 of an answer that sees no text."""
    mlm, masked, guessed, tokens, balance, rtd, right, replaced, called, found = sums.tolist()
    scores = {"mlm": mlm / masked, "generator": guessed / masked, "masked": int(masked), "tokens": int(tokens)}
    scores |= {"balance": balance / tokens}
    if rtd:
        share = replaced / tokens
        scores |= {"rtd": rtd / tokens, "accuracy": right / tokens, "f1": 2 * found / max(1, called + replaced)}
        scores |= {"replaced": share, "blind_f1": 2 * share / (1 + share)}  # which says "replaced" of every token
    return scores


def tally(model: Electra | MaskedLM, batches, detect: bool, config: Config, context) -> dict[str, float]:
    """The scores of all batches of all processes; each batch's draws are fixed."""
    sums = torch.zeros(10, dtype=torch.float64)
    for masking, first, batch in batches:
        common.seed_all(config.seed, masking, first, 3)  # a number of its own, and no trailing 0: NumPy ignores those
        sums += look(model, batch, detect, context)[0].cpu()
    return scores_of(context.sum(sums))


@torch.no_grad()
def evaluate(model: Electra | MaskedLM, data: dict, config: Config, context, maskings: int) -> dict:
    """Scores on the validation text of both kinds.

    `translation`: how often the generator is right about one half of a pair, with the whole other half beside it and
    without, the same tokens masked. `layers`: routing statistics of sparse layers. `retrieval`: see there.
    """
    model.eval()
    model.start_stats()
    share = config.eval_tokens, context.rank, context.world
    scores = {}
    for kind, source in data.items():
        batches = source.eval_batches("valid", maskings, *share)
        scores[kind] = tally(model, batches, config.objective == "rtd", config, context)
    scores["layers"] = model.stats(context.sum)
    scores["translation"] = {}
    for name, beside in (("with", True), ("without", False)):
        halves = [data["pairs"].eval_batches("valid", maskings, *share, half, beside) for half in (0, 1)]
        scores["translation"][name] = tally(model, chain(*halves), False, config, context)["generator"]
    scores |= retrieval(model.encoder, data["pairs"], config, context)
    model.train()
    return scores


def retrieval(encoder: Encoder, pairs: PairData, config: Config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (table 5).

    Accuracy@1 in both directions, the mean over language pairs, for each layer (0: embeddings); `chance` beside it. A
    sentence's vector is the mean of its states, compared by cosine. At most `most` sentences of a language pair.
    """
    found = torch.zeros(len(pairs.languages), config.n_layer + 3, dtype=torch.float64)
    for j in range(context.rank, len(pairs.languages), context.world):
        rows = list(islice(pairs.raw("valid", pairs.languages[j]), most))
        if rows:
            one, two = (sentence_vectors(encoder, side, pairs, config, context) for side in zip(*rows))
            near, here = one @ two.mT, torch.arange(len(rows))  # (L + 1, n, n), (n,)
            right = sum((near.argmax(dim=dim).cpu() == here).double().mean(dim=1) for dim in (1, 2)) / 2
            found[j] = torch.cat([right, torch.tensor([1 / len(rows), 1.0])])
    *right, chance, pairs_in_all = context.sum(found).sum(dim=0).tolist()
    return {"retrieval": [x / pairs_in_all for x in right], "chance": chance / pairs_in_all}


def sentence_vectors(encoder: Encoder, texts, data: PairData, config: Config, context) -> Tensor:
    """(L + 1, n, D): means over the tokens of `<s> text </s>`, of length 1, for each layer and each array of ids."""
    bos, eos = data.tokenizer.bos, data.tokenizer.eos
    rows = [torch.tensor([bos, *text[: config.block_size - 2], eos]) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    vectors = torch.empty(config.n_layer + 1, len(rows), config.n_embd, device=context.device)
    while order:
        size = max(1, config.micro_tokens // len(rows[order[0]]))
        chunk, order = order[:size], order[size:]
        ids = pad_sequence([rows[i] for i in chunk], batch_first=True, padding_value=PAD)
        keep = ids != PAD
        ids, real, keep = context.send_all(ids, keep.flatten().nonzero().squeeze(1), keep)
        states = []
        with context.autocast():
            encoder(ids, real, states)
        mean = torch.stack([(state.float() * keep[..., None]).sum(dim=1) for state in states])  # the length falls out
        vectors[:, chunk] = F.normalize(mean, dim=2)
    return vectors


def middle(config: Config) -> int:
    """The layer whose sentence vectors are shown: the 9th of 12, as in section 4.6."""
    return round(0.75 * config.n_layer)


COLUMNS = {  # of the table that `describe` makes
    "mlm": ("MLM, TLM", ".3f"),
    "generator": ("generator right", ".1%"),
    "rtd": ("MRTD, TRTD", ".4f"),
    "accuracy": ("discriminator right", ".1%"),
    "f1": ("F1", ".3f"),
    "blind_f1": ("F1 of guessing", ".3f"),
    "replaced": ("really replaced", ".1%"),
}


def describe(seen: dict, scores: dict, config: Config) -> str:
    """A line for each kind of text, seen and held out, and what follows from them."""
    rows = []
    for text, kinds in (("seen", seen), ("held out", scores)):
        for kind in [kind for kind in ("sentences", "pairs") if kind in kinds]:
            cells = (format(kinds[kind][k], form) if k in kinds[kind] else "" for k, (_, form) in COLUMNS.items())
            rows.append([f"{text}, {kind}", *cells])
    headers = ["text", *(header for header, _ in COLUMNS.values())]
    beside, layer = scores["translation"], middle(config)
    found, first, chance = scores["retrieval"][layer], scores["retrieval"][0], scores["chance"]
    lines = [
        common.markdown_table(headers, rows),
        f"masked tokens of one half of held-out pairs: {beside['with']:.2%} right with the translation beside it, "
        f"{beside['without']:.2%} without",
        f"held-out translations found: {found:.1%} by layer {layer} ({first:.1%} by embeddings, {chance:.1%} chance)",
    ]
    for i, moe in enumerate(scores["layers"], 1):
        lines.append(
            f"sparse layer {i}: experts served per token {moe['served']:.2f}, tokens unserved {moe['unserved']:.2%}, "
            f"load imbalance {moe['imbalance']:.2f}, entropy {moe['entropy']:.2f}"
        )
    if scores["layers"]:
        lines.append(
            f"balance loss, sentences and pairs: {scores['sentences']['balance']:.3f}, {scores['pairs']['balance']:.3f}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs


def training_flops(config: Config) -> list[dict[str, float]]:
    """Training FLOPs of one token in each network, for each of `WAYS`. The baseline counts as a generator."""
    networks = {"generator": config.generator, "discriminator": config}
    return electra_training_flops(networks if config.objective == "rtd" else {"generator": config}, config.mask_share)


def step_flops(config: Config) -> list[float]:
    """FLOPs of a training step, for each of `WAYS`; pairs, too, attend over block_size positions in this count."""
    passes = {"generator": len(config.tasks), "discriminator": sum(config.tasks.values())}
    return [config.batch_tokens * sum(passes[k] * x for k, x in way.items()) for way in training_flops(config)]


def flops_table() -> str:
    """XLM-E's table 3 (parameters) and table 4 (FLOPs), ours beside the paper's."""
    sizes, flops = [], []
    for preset, (parameters, alone, both) in SIZES.items():
        config = Config(**{"vocab_size": 250_002} | PRESETS[preset])
        with torch.device("meta"):
            model = Electra(config)
        own = kept_parameters(model)
        gates = sum(p.numel() for name, p in model.encoder.named_parameters() if "gate" in name or "distance" in name)
        sizes.append([preset, f"{config.vocab_size:,}", parameters, f"{own:,}", f"{own - gates:,}"])
        ways, tokens = training_flops(config), config.batch_tokens * config.steps
        for what, names, batches, paper in (
            ("discriminator, one batch", ["discriminator"], 1, alone),
            ("both networks, one batch", ["generator", "discriminator"], 1, both),
            ("both networks, both batches", ["generator", "discriminator"], 2, ""),
        ):
            cells = [f"{tokens * batches * sum(way[name] for name in names):.2e}" for way in ways]
            flops.append([preset, what, paper, *cells])
    headers = ["preset", "counted", "paper", *WAYS]
    return "\n".join([
        "XLM-E table 3: parameters of the discriminator with its head\n",
        common.markdown_table(["preset", "vocabulary", "paper", "ours", "ours without the gated bias"], sizes),
        "\nXLM-E table 4: training FLOPs of 125,000 steps, each with batches of 2,048 x 512 tokens\n",
        common.markdown_table(headers, flops),
        """
The paper's 6.3e19 (- TRTD) and 9.5e19 (XLM-E) are close to what ELECTRA's own script gives at its defaults for the
discriminator alone, and for both networks, on one batch a step. It has a vocabulary of 30,522, takes the look-up of an
embedding for a product, and counts the backward pass as much as the forward one. By the paper's text both rows train
both networks, on one batch a step without TRTD and on two with it. Counted so, with the real vocabulary and no product
for a look-up, they cost what the last column but one says; the last is what the products amount to on a GPU.""",
    ])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One run


def open_data(config: Config, context) -> dict[str, MaskedData | PairData]:
    """Both corpora, whose vocabulary the config then has; catalogs are prepared here where they are missing."""
    folders = [ready(name, config.spm, make=context.rank == 0) for name in (config.data, config.pairs)]
    context.barrier()
    micros = config.batch_tokens // config.micro_tokens
    shape = config.block_size, config.micro_tokens, micros, config.seed, config.sampling_exponent, config.mask_share
    readers = zip(("sentences", "pairs"), (MaskedData, PairData), folders)
    data = {kind: reader(folder, *shape, replace=(1.0, 0.0), span=config.span) for kind, reader, folder in readers}
    if len({source.meta["tokenizer"]["sha256"] for source in data.values()}) > 1:
        raise ValueError(f"{folders[0]} and {folders[1]} have different tokenizers: prepare both with the same --spm")
    for source in data.values():
        common.check_data(source, config, context)
    return data


def train(config: Config, name: str, context) -> dict:
    """Trains (or goes on training) one model -> its result, which is also in result.json."""
    say = tqdm.write if context.rank == 0 else lambda _: None
    with common.clear_errors():
        mine = common.deal(config, context)  # this process's micro-batches of every step
        data = open_data(config, context)
        folder, result, checkpoint = common.open_run(config, name, context, *data.values())
        if result:
            return result
        common.seed_all(config.seed)
        model = (Electra if config.objective == "rtd" else MaskedLM)(config)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
        model.to(context.device, torch.float64 if context.dtype == torch.float64 else torch.float32)
        folder.begin(data["pairs"].tokenizer)
    counts, flops = count_parameters(model) | {"kept": kept_parameters(model)}, step_flops(config)
    say(f"{name}: {counts['total']:,} parameters, {counts['kept']:,} of them to keep; "
        f"{flops[-1] / 1e9:.1f} GFLOPs a step; {len(data['sentences'].languages)} languages, "
        f"{len(data['pairs'].languages)} pairs; {context.world} x {context.device.type}, {context.dtype}")  # fmt: skip

    betas = config.beta1, config.beta2
    optimizer = common.adamw(model, config.learning_rate, betas, config.weight_decay, config.eps)
    scaler = torch.amp.GradScaler(context.device.type, enabled=context.dtype == torch.float16)
    start, seconds = common.restore(checkpoint, optimizer, scaler, folder)
    scores = checkpoint["scores"] if checkpoint else None
    del checkpoint  # it holds a copy of everything
    forward = common.parallel(model, config, context)

    kinds, last_micro = list(config.tasks), (mine[-1], "sentences")
    loss_sum = torch.zeros((), device=context.device)  # since the last evaluation; once not finite, it stays so
    sums = torch.zeros(len(kinds), 10, device=context.device)  # since the last look, so that fp32 can count the tokens
    seen = torch.zeros(len(kinds), 10, dtype=torch.float64)  # since the last evaluation
    since, clock = start, time.perf_counter()
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, unit="step", disable=context.rank > 0)
    model.train()
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = common.linear(step, config.steps, config.warmup, config.learning_rate)
        for micro in mine:
            for i, (kind, detect) in enumerate(config.tasks.items()):
                common.seed_all(config.seed, 1 + step, micro, 1 + i)  # dropout and draws, whichever process gets this
                if context.world > 1:
                    forward.require_backward_grad_sync = (micro, kind) == last_micro
                found, balance = look(forward, data[kind].batch("train", step, micro), detect, context)
                loss = found[0] / found[1] + config.balance_coef * balance  # MLM or TLM
                if detect:
                    loss = loss + config.lambda_disc * found[5] / found[3]  # MRTD or TRTD
                scaler.scale(loss / len(mine)).backward()
                loss_sum += loss.detach() / len(mine)
                sums[i] += found.detach()
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
            seen += context.sum(sums).cpu()
            sums.zero_()
            speed = (done - since) * config.batch_tokens * len(kinds) / (time.perf_counter() - clock)
            now = scores_of(seen[-1])
            right = {"gen": f"{now['generator']:.1%}"} | ({"disc_f1": f"{now['f1']:.3f}"} if "f1" in now else {})
            bar.set_postfix(loss=f"{mean_loss:.3f}", **right, tok_s=f"{speed:,.0f}")
        if due:
            seconds += time.perf_counter() - clock
            scores = evaluate(model, data, config, context, config.eval_maskings if last else 1)
            losses = [scores[kind].get(loss, 0) for kind in data for loss in ("mlm", "rtd")]
            if not all(map(math.isfinite, losses)):  # the last update broke what the loss before it did not show
                common.not_finite(bar, done)
            was = {kind: scores_of(row) for kind, row in zip(kinds, seen)}
            cost = f"{speed:,.0f} tokens/s, {done * flops[-1]:.2e} FLOPs"
            say(f"step {done}: {cost}\n{describe(was, scores, config)}")
            record = {"step": done, "train_loss": mean_loss, "tokens_per_second": speed}
            folder.log(record | {"flops": done * flops[-1], "seen": was, "held_out": scores})
            folder.save({
                "kind": "encoder", "step": done, "seconds": seconds, "config": dataclasses.asdict(config),
                "arguments": {f.name: getattr(config, f.name) for f in dataclasses.fields(EncoderConfig)},
                **folder.data, "scores": scores,
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
            })  # fmt: skip
            loss_sum.zero_()
            seen.zero_()
            since, clock = done, time.perf_counter()
    result = {
        "name": name, "held_out": scores, "parameters": counts, "seconds": round(seconds, 1),
        "flops": {way: config.steps * count for way, count in zip(WAYS, flops)},
        "data": folder.data["data"], "config": folder.config, "machine": common.machine(context),
    }  # fmt: skip
    folder.finish(result)
    return result


def report(result: dict, config: Config) -> str:
    """A finished result in words."""
    flops = ", ".join(f"{count:.2e} ({way})" for way, count in result["flops"].items())
    return f"\n{result['name']}, training FLOPs: {flops}\n\n{describe({}, result['held_out'], config)}"


# ---------------------------------------------------------------------------------------------------------------------
# Tables and figures


def results_of(given: dict, row: dict, context) -> tuple[Config, list[dict]]:
    return common.results_of(Config, PRESETS, given, row, lambda config, name: train(config, name, context))


def both(results: list[dict], key: str, form: str) -> str:
    """One score each for held-out sentences and pairs, over all seeds; empty where there is no discriminator."""
    kinds = [[result["held_out"][kind].get(key) for result in results] for kind in ("sentences", "pairs")]
    return " / ".join(common.spread(values, form) for values in kinds if None not in values)


def table2(given: dict, context) -> str:
    """XLM-E table 2, pre-training: without TRTD, without the gated bias, and XLM, on held-out text."""
    lines = []
    for name, row, theirs in TABLE2:
        config, results = results_of(given, row, context)
        params, flops = results[0]["parameters"]["kept"], results[0]["flops"][WAYS[-1]]
        found = common.spread([result["held_out"]["retrieval"][middle(config)] for result in results], ".1%")
        right, f1 = both(results, "generator", ".1%"), both(results, "f1", ".3f")
        lines.append([name, f"{params / 1e6:.1f}M", f"{flops:.2e}", theirs, right, f1, found])
    headers = ["model", "params", "FLOPs", "paper: XNLI, MLQA", "masked tokens right", "F1", "translations found"]
    return common.markdown_table(headers, lines)


def figure1(given: dict, context) -> str:
    """XLM-E figure 1 at our scale: held-out accuracy against training FLOPs, from the logs of both objectives."""
    runs = [results_of(given, row, context) for row in ({}, dict(objective="mlm"))]
    with common.clear_errors():
        return "" if context.rank else draw(runs)


def draw(runs: list[tuple[Config, list[dict]]]) -> str:
    """Both panels of figure 1 from the runs of XLM-E and of XLM, into out_dir. ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--figure needs one more library: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for name, color, (config, results) in zip(("XLM-E", "XLM (MLM + TLM)"), ("tab:red", "tab:blue"), runs):
        for i, result in enumerate(results):
            lines = Path(config.out_dir, result["name"], "metrics.jsonl").read_text().splitlines()
            flops, scores = zip(*((record["flops"], record["held_out"]) for record in map(json.loads, lines)))
            style = dict(color=color, marker="o", label=None if i else name)
            left.plot(flops, [100 * s["retrieval"][middle(config)] for s in scores], **style)
            right.plot(flops, [100 * s["sentences"]["generator"] for s in scores], **style)
            if "f1" in scores[0]["sentences"]:
                style |= dict(linestyle=":", label=None if i else "XLM-E, F1 on replaced tokens")
                right.plot(flops, [100 * s["sentences"]["f1"] for s in scores], **style)
    left.axhline(100 * scores[0]["chance"], color="gray", linestyle="--", label="chance")
    left.set(ylabel="%", title=f"Held-out translations found, layer {middle(config)} of {config.n_layer}")
    right.set(ylabel="%", title="Masked tokens of held-out sentences right")
    for axes in (left, right):
        axes.set(xlabel="training FLOPs (products)")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    file = Path(config.out_dir, "figure1.png")
    figure.savefig(file, dpi=120)
    return f"drawn in {file}"


TABLES, FIGURES = {2: table2}, {1: figure1}


def main():
    given, config, context = common.start(Config, PRESETS)
    if config.flops:
        text = flops_table()
    elif config.table or config.figure:
        what, number, make = ("table", config.table, TABLES) if config.table else ("figure", config.figure, FIGURES)
        if rows := given.keys() & {"objective", "tlm", "trtd", "relative_bias"}:
            common.fail(f"--{what} has rows of its own for --{min(rows)}: leave it out")
        text = make[number](given, context)
        seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
        title = f"XLM-E {what} {number}, preset {config.preset}, {config.eval_maskings} maskings, {seeds}"
        text = f"\n{title}\n\n{text}"
    else:
        config, results = results_of(given, {}, context)
        text = "\n".join(report(result, config) for result in results)
        if len(results) > 1:
            right, f1 = both(results, "generator", ".1%"), both(results, "f1", ".3f")
            text += f"\n\n{len(results)} seeds, sentences / pairs: generator right {right}, F1 {f1}"
    if context.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
