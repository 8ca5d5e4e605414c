"""XMoE's language models: a decoder with sparse experts under any router (tables 1 and 2).

    python train_lm.py                                         the demo: threshold router, on text that is on this disk
    torchrun train_lm.py --router switch                       another router, with equal parameters and FLOPs
    torchrun train_lm.py --router threshold --expert_size 64   smaller experts: 64 of them, capacity to match
    torchrun --nproc_per_node 8 train_lm.py --preset openwebtext-323M     the paper's rows, on 8 GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train_lm.py --preset ...
    python train_lm.py --table 1                               every row of a table, beside the paper's numbers
    python train_lm.py --router switch --eval_only true --eval_capacity_factor 0.5     a trained model, routed otherwise

Prints, at every evaluation, bits per byte and perplexity, and how each MoE layer routes; in the end the test perplexity
under the evaluation's capacity limit (the paper's protocol) and without one, and a sample. A run is kept in
out/train_lm/NAME; the same command goes on where it stopped. `--help` lists every constant.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

import common
import measures
import parallel
import runs
from data import counting
from data.batches import TokenData
from model import GPT, ModelConfig, sizes
from pretrained import fill, load_gpt2

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, small, or wikitext103 / openwebtext at -124M, -323M or -556M
    table: int | None = None  # run every row of XMoE's table 1 or 2 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "pydocs"  # a corpus under data/prepared, or the folder of a prepared one
    frequency_bias: bool = True  # the output has a bias, which starts at the log frequencies of the training tokens
    router_init_std: float | None = 0.1  # of the normal that a router's weights start from; None: init_std
    seed: int = 0  # of weights, data order and dropout
    steps: int = 1400  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 3e-3  # peak
    min_learning_rate: float = 3e-5  # where the cosine ends
    router_lr: float = 1.0  # routers learn at so many times the rate of the rest
    warmup: float = 0.1  # share of the steps
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam; in small batches a token is rare: its gradient must be remembered
    eps: float = 1e-8  # Adam
    weight_decay: float = 0.1  # of matrices and embeddings
    grad_clip: float = 1.0  # largest norm of the gradient; 0 for no limit
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    eval_every: int = 350  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 32768  # validation tokens of each
    log_every: int = 10  # steps from one look at the loss to the next
    prompt: str = ""  # what the final sample goes on from
    sample_tokens: int = 120  # length of the final sample
    sample_temperature: float = 0.8  # what its logits are divided by
    sample_top_k: int = 50  # it is drawn from so many tokens
    out_dir: str = "out/train_lm"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    expert_parallel: int = 1  # processes that share out the experts of one model, see parallel.py
    shard: bool = False  # weights and their state lie in pieces over all processes (FSDP2)
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    eval_only: bool = False  # no training: evaluate the run's checkpoint, or --init_from
    init_from: str | None = None  # folder of a GPT-2 checkpoint in Hugging Face's format (router dense)

    # Constants of other models: as a ClassVar a constant is no option of this script.
    moe_after: ClassVar = ()
    relative_bias: ClassVar = False
    decoder_layers: ClassVar = 0
    decoder_moe: ClassVar = True

    def __post_init__(self):
        super().__post_init__()
        if self.init_from and (self.router != "dense" or self.frequency_bias):
            raise ValueError("--init_from loads GPT-2: give --router dense --frequency_bias false")

    @property
    def not_identity(self) -> set[str]:
        """Constants that do not make another run: evaluating a trained model under another t or gamma, say."""
        at_test = {"eval_threshold", "eval_capacity_factor"} if self.eval_only else set()
        return at_test | {"eval_only", "prompt", "sample_tokens", "sample_temperature", "sample_top_k"}


# Half an hour on one core.
SMALL = dict(n_embd=256, ffn_size=1024, dropout=0.1, steps=5000, eval_every=1000)

# XMoE 4.1-4.2; 256 sequences of 1,024 tokens a step, in micro-batches of 16, are the authors' runs'.
PAPER = dict(vocab_size=50257, block_size=1024, n_layer=12, dropout=0.1, learning_rate=4.5e-4, min_learning_rate=4.5e-6)
PAPER |= dict(beta2=0.95, init_std=0.014, router_init_std=None, frequency_bias=False)
PAPER |= dict(batch_tokens=256 * 1024, micro_tokens=16 * 1024, eval_every=500, eval_tokens=1 << 20)
WIDTH768 = dict(n_head=12, n_embd=768, ffn_size=3072)
WIDTH1024 = dict(n_head=16, n_embd=1024, ffn_size=4096)
PRESETS = {"demo": {}, "small": SMALL}
for name, steps in {"wikitext103": 4_000, "openwebtext": 60_000}.items():
    corpus = PAPER | dict(data=name, steps=steps)
    PRESETS[f"{name}-124M"] = corpus | WIDTH768 | dict(router="dense")
    PRESETS[f"{name}-323M"] = corpus | WIDTH768
    PRESETS[f"{name}-556M"] = corpus | WIDTH1024

# Rows of the tables: what to change, and the paper's test perplexity on OpenWebText and WikiText-103. `split` is the
# number of experts that an FFN's width is divided into: 8 x 3072, 16 x 1536, 32 x 768, 64 x 384.
TABLE1 = [  # method, router, split, at 323M, at 556M
    ("dense", "dense", 1, (22.61, 22.24), ("", "")),  # 124M; the paper has no dense model of the 556M rows' width
    ("Switch", "switch", 1, (20.11, 20.60), (19.17, 19.72)),
    ("Hash", "hash", 1, (21.27, 21.63), (20.25, 22.01)),
    ("BASE", "base", 1, (20.49, 21.13), (19.72, 21.03)),
    ("top-2", "topk", 2, (19.81, 20.24), (18.94, 19.47)),
    ("top-4", "topk", 4, (19.75, 20.14), (18.94, 19.36)),
    ("top-8", "topk", 8, (19.79, 20.10), (18.99, 19.15)),
    ("XMoE", "threshold", 2, (19.57, 20.16), (18.72, 19.41)),
    ("XMoE", "threshold", 4, (19.49, 20.00), (18.68, 19.26)),
    ("XMoE", "threshold", 8, (19.46, 19.97), (18.72, 19.10)),
]
TABLE2 = [  # experts, FLOPs at test
    (8, 1.00, 22.89, 21.93),
    (8, 0.75, 22.89, 21.93),
    (8, 0.50, 22.90, 21.93),
    (8, 0.25, 23.07, 21.97),
    (16, 1.00, 22.94, 21.92),
    (16, 0.75, 22.97, 21.92),
    (16, 0.50, 23.02, 21.92),
    (16, 0.25, 23.27, 21.93),
]


def two_places(numbers: tuple) -> list[str]:
    return [f"{number:.2f}" if number else "" for number in numbers]


def table1(base: Config) -> runs.Table:
    """Every router, with the same parameters and the same FLOPs."""
    rows = []
    for method, router, split, at_323M, at_556M in TABLE1:
        size, change = base.ffn_size // split, {"router": router}
        experts = f"1 x {size}" if router == "dense" else f"{base.expert_ffns * split} x {size}"
        if router != "dense" and size != sizes(replace(base, router=router)).expert_size:
            change["expert_size"] = size
        paper = at_556M if base.preset.endswith("556M") else at_323M
        rows.append(((method, experts, *two_places(paper)), change))
    title = "XMoE table 1: test perplexity of every router at equal FLOPs"
    return runs.Table(title, ("method", "experts", "paper, OWT", "paper, WT103"), rows)


def table2(base: Config) -> runs.Table:
    """A dense model trained as experts in all blocks (t = 1, no drop).

    At test gamma is FLOPs x E and, below 1.00x, t is 0.9.
    """
    rows = [(("dense", "", "1.00x", *two_places(TABLE1[0][3])), {"router": "dense"})]
    for experts, flops, *paper in TABLE2:
        change = {"router": "threshold", "moe_every": 1, "threshold": 1.0}
        change |= {"num_experts": experts, "expert_size": base.ffn_size // experts, "capacity_factor": float(experts)}
        if flops < 1:
            change |= {"eval_only": True, "eval_threshold": 0.9, "eval_capacity_factor": flops * experts}
        rows.append((("XMoE", f"{experts} x {base.ffn_size // experts}", f"{flops:.2f}x", *two_places(paper)), change))
    title = "XMoE table 2: test perplexity of dense models split into experts, with fewer FLOPs at test"
    return runs.Table(title, ("method", "experts", "FLOPs", "paper, OWT", "paper, WT103"), rows)


ROUTING = {"wanted": ".2f", "served": ".2f", "cut": ".1%", "unserved": ".2%"}


def cells(result: dict) -> dict:
    """A row of either table; of the routing statistics the mean over MoE layers."""
    test, layers = result["test"], result["test"]["layers"]
    found = {
        "params, M": (result["parameters"]["total"] / 1e6, ".1f"),
        "bits/byte": (test["bpb"], ".3f"),
        "ours": (test["ppl"], ".2f"),
        "no limit": (result["test_no_limit"]["ppl"], ".2f"),
    }
    for name, form in ROUTING.items():
        found[name] = measures.mean_over_layers(name, layers), form
    return found


TABLES = {1: table1, 2: table2}

# ---------------------------------------------------------------------------------------------------------------------
# One run


@torch.no_grad()
def evaluate(model: GPT, data: TokenData, split: str, context, max_tokens: int | None = None) -> dict:
    """Cross entropy, balance loss and routing statistics, in micro-batches of the training's size."""
    model.eval()
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for x, y in data.eval_batches(split, max_tokens, context.rank, context.world):
        x, y = context.send_all(x, y)
        with context.autocast():
            logits, balance = model(x)
            loss = common.cross_entropy(logits.flatten(0, 1), y.flatten())
        sums += torch.tensor([float(loss), float(balance), 1.0], dtype=torch.float64) * y.numel()
    loss, balance, tokens = context.sum(sums).tolist()
    model.train()
    loss, counts = loss / tokens, data.meta["splits"][split]
    return {
        "loss": loss,  # nats a token
        "ppl": measures.perplexity(loss),
        "word_ppl": measures.perplexity(loss * counts["tokens"] / counts["words"]),  # of words between blanks
        "bpb": measures.bits_per_byte(loss, counts),
        "balance": balance / tokens,
        "tokens": int(tokens),
        "layers": [watch.finish(context.sum) for watch in watches],
    }


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    line = f"{scores['bpb']:.3f} bits per byte, perplexity {scores['ppl']:.2f} ({scores['word_ppl']:.1f} a word)"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    for i, layer in enumerate(scores["layers"], 1):
        lines.append(f"  MoE layer {i}: {measures.describe_routing(layer)}")
    return "\n".join(lines)


def describe_counting(found: dict[str, float]) -> str:
    if not found:
        return "counting: not done, the training text is large"
    return (
        f"counting reaches {found['unigrams']:.3f} bits per byte of the test text by tokens, {found['bigrams']:.3f} "
        f"by pairs of them that training sees, {found['all bigrams']:.3f} by all pairs of the training text"
    )


def build(config: Config, data: TokenData, checkpoint: dict | None, context) -> GPT:
    """The model of a checkpoint, of `--init_from`, or drawn from the seed."""
    common.seed_all(config.seed)
    model = common.place(GPT(config), context)  # first, so that float64 loads as float64
    if config.frequency_bias:
        model.bias.data.copy_(data.log_frequencies())
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    elif config.init_from:
        arguments, weights = load_gpt2(config.init_from)
        fill(model, arguments, weights, config.init_from)
    return model


def train(config: Config, context) -> dict:
    """Trains (or goes on training) a language model -> its result, which is also in result.json."""
    if config.eval_only:
        config = replace(config, resume=True)  # nothing is trained that could start again
    with common.clear_errors():
        data = TokenData.open(config.data, config, context)
        data.tokenizer.encode_batch([config.prompt.encode().decode()])  # what cannot be read is refused now
        run = runs.Run(config, PRESETS, context, data)
    other_sample = run.result.get("sample_of", sample_of(config)) != sample_of(config)
    if config.eval_only or other_sample:
        return evaluate_run(config, run, data, context)
    if run.result:
        return run.result
    with common.clear_errors():
        model = build(runs.with_vocabulary(config, data), data, run.checkpoint, context)
    parameters = measures.count_parameters(model)
    flops = measures.flops_per_token(model, config, head=2 * config.n_embd * data.vocab_size)
    run.say(
        f"{run.name}: {parameters['total']:,} parameters, {parameters['active']:,.0f} active a token; "
        f"{flops['total'] / 1e6:.1f} MFLOPs a token forward, {flops['moe'] / 1e6:.1f} of them in MoE layers"
    )
    if model.moe_layers:
        run.say("healthy routing: few tokens unserved, load imbalance near 1, entropy well above 0")
    counted = counting.text_losses(data, config.steps)
    counts = data.meta["splits"]
    counted = {name: measures.bits_per_byte(loss, counts["test"]) for name, loss in counted.items()}
    run.say(describe_counting(counted))
    parallel.split(model, config, context)
    optimizer = common.adamw(model, config)
    forward = run.begin(model, optimizer, flops["total"], measures.bits_per_byte(1.0, counts["train"]))
    for step in run.steps():
        peak, floor = config.learning_rate, config.min_learning_rate
        common.set_learning_rate(optimizer, common.cosine(step, config.steps, config.warmup, peak, floor))
        for micro in run.micros(step):
            x, y = context.send_all(*data.batch("train", step, micro))
            with context.autocast():
                logits, balance = forward(x)
                loss = common.cross_entropy(logits.flatten(0, 1), y.flatten())
            run.backward(loss + config.balance_coef * balance, shown=loss, tokens=x.numel())
        run.update()
        model.after_step()  # restores what a router keeps fixed: a hypersphere its norms, the others nothing
        if run.end_step(step):
            scores = evaluate(run.whole(), data, "valid", context, config.eval_tokens)
            run.save(step, scores, scores["loss"], f"valid {describe(scores)}")
    model = run.whole()
    scores = test(model, data, context) | {"counting": counted}
    if model.moe_layers and model.moe_layers[-1].router.select == "threshold":
        batches = [x for x, _ in data.eval_batches("test", 1 << 16)]
        for name, tokens in zip(("easy", "hard"), measures.easy_and_hard(model, batches, context)):
            scores[name] = [data.tokenizer.decode([token]) for token in tokens]
    scores |= {"parameters": parameters, "flops": flops}
    try:
        scores |= sample(config, model, data, context)
    except Exception:  # it costs nobody the result
        run.finish(scores)
        raise
    return run.finish(scores)


def test(model: GPT, data: TokenData, context) -> dict:
    """Test perplexity at the evaluation gamma (the paper's protocol), and without a limit."""
    scores = evaluate(model, data, "test", context)
    if not model.limited_at_test:
        return {"test": scores, "test_no_limit": scores}
    with model.no_limit():
        return {"test": scores, "test_no_limit": evaluate(model, data, "test", context)}


def evaluate_run(config: Config, run: runs.Run, data: TokenData, context) -> dict:
    """Tests a trained model (or `--init_from`), routed as the eval_ constants say; kept beside the run."""
    with common.clear_errors():
        checkpoint = run.checkpoint
        if not checkpoint:  # a finished run has not loaded one
            _, checkpoint = runs.newest(run.folder, refuse=run.refuse)
        if not checkpoint and not config.init_from:
            raise ValueError(f"{run.folder} has no checkpoint: train first, with the same constants but eval_ ones")
        model = build(runs.with_vocabulary(config, data), data, checkpoint, context)
    gamma = sizes(config).eval_capacity_factor if model.moe_layers else math.inf
    file = f"eval-t={config.eval_threshold}-gamma={gamma}.json"
    key = {"name": run.name, "data": data.checksum, "step": checkpoint.get("step", 0)}
    result = runs.read_result(run.folder / file)
    if not key.items() <= result.items():
        result = key | test(model, data, context) | {"parameters": measures.count_parameters(model)}
        result["sha256"] = runs.digest(result)
        run.write(file, result)
    return result | sample(config, model, data, context)


def sample(config: Config, model: GPT, data: TokenData, context) -> dict:
    """What the model writes after the prompt, without a capacity limit, and how many experts served a token."""
    if model.sees_later or context.rank > 0:
        return {}
    common.seed_all(config.seed)
    prompt = data.tokenizer.encode_batch([config.prompt])[0]
    ids = torch.tensor([[data.tokenizer.eot, *prompt]], device=context.device)
    with context.autocast():
        ids = model.generate(ids, config.sample_tokens, config.sample_temperature, config.sample_top_k)
        watches = [measures.RoutingStats(moe) for moe in model.moe_layers]  # of each token once
        with torch.no_grad(), model.no_limit():
            model.eval().hidden(ids[:, -config.block_size :])
    served = [watch.finish()["served"] for watch in watches]
    text = data.tokenizer.decode(ids[0, 1:].tolist())
    return {"sample": text, "sample_served": served, "sample_of": sample_of(config)}


def sample_of(config: Config) -> list:
    """What a sample is made of, beside the model."""
    return [config.prompt, config.sample_tokens, config.sample_temperature, config.sample_top_k]


def shown(token: str) -> str:
    """A token in one line, without the space before it."""
    return repr(token.removeprefix(" "))[1:-1]


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    chooses = config.router != "dense" and sizes(config).select == "expert_choice"
    note = " (not causal: experts choose among later tokens too)" if chooses else ""
    limited = result["test_no_limit"] != result["test"]
    text = f"\n{result['name']}, test{note}\n{'under the limit: ' * limited}{describe(result['test'])}"
    if limited:
        text += f"\nwithout a limit: {describe(result['test_no_limit'])}"
    if "counting" in result:
        text += f"\n{describe_counting(result['counting'])}"
    if "easy" in result:
        easy, hard = (" ".join(map(shown, result[name])) for name in ("easy", "hard"))
        text += f"\nfew experts of the last MoE layer are wanted by: {easy}\nmany by: {hard}"
    if "sample" in result:
        served = ", ".join(f"{n:.1f}" for n in result["sample_served"])
        text += f"\n\nsample{f' ({served} experts served per token)' if served else ''}:\n{result['sample']}"
    return text


def main():
    config, context = runs.start(Config, PRESETS)
    runs.carry_out(config, PRESETS, context, TABLES, train, report, cells)


if __name__ == "__main__":
    main()
