"""XMoE's language models: a decoder with sparse experts under any router (tables 1 and 2).

    python train_lm.py                                         the demo: threshold router, on text that is on this disk
    torchrun train_lm.py --router switch                       another router, with equal parameters and FLOPs
    torchrun train_lm.py --router threshold --expert_size 128  smaller experts: 64 of them, capacity to match
    torchrun --nproc_per_node 8 train_lm.py --preset openwebtext-323M     the paper's rows, on 8 GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train_lm.py --preset ...
    python train_lm.py --table 1                               every row of a table, beside the paper's numbers
    python train_lm.py --router switch --eval_only --eval_capacity_factor 0.5     a trained model, routed otherwise

Prints, at every evaluation, cross entropy and perplexity, and how each MoE layer routes; in the end the test perplexity
under the evaluation's capacity limit (the paper's protocol) and without one, and a sample. A run is kept in
out/train_lm/NAME; the same command goes on where it stopped. `--help` lists every constant.
"""

import dataclasses
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
from data.prepare import ready
from data.tokens import TokenData
from flops import count_parameters, flops_per_token
from model import GPT, ModelConfig, describe_routing
from pretrained import load_gpt2

# ---------------------------------------------------------------------------------------------------------------------
# Constants: change one here, or give --name value


@dataclasses.dataclass
class Config(ModelConfig):
    preset: str = "demo"  # demo, or wikitext103 / openwebtext at -124M, -323M or -556M
    table: int | None = None  # run every row of XMoE's table 1 or 2 at the preset's scale
    seeds: int = 1  # repeat with so many seeds; give mean and deviation
    data: str = "pydocs"  # a corpus under data/prepared, or the folder of a prepared one
    seed: int = 0  # of weights, data order and dropout
    steps: int = 500  # optimizer steps
    batch_tokens: int = 1024  # tokens of a step, over all processes and micro-batches
    micro_tokens: int = 1024  # tokens of one forward pass; under a capacity limit it changes the numbers
    learning_rate: float = 1e-3  # peak
    min_learning_rate: float = 1e-5  # where the cosine ends
    warmup: float = 0.1  # share of the steps
    beta1: float = 0.9  # Adam
    beta2: float = 0.95  # Adam
    weight_decay: float = 0.1  # of matrices and embeddings
    grad_clip: float = 1.0  # largest norm of the gradient; 0 for no limit
    balance_coef: float = 0.01  # alpha, the weight of the balance loss
    eval_every: int = 125  # steps from one evaluation and checkpoint to the next
    eval_tokens: int = 32768  # validation tokens of each
    log_every: int = 10  # steps from one look at the loss to the next
    prompt: str = ""  # what the final sample goes on from
    sample_tokens: int = 120  # length of the final sample
    sample_temperature: float = 0.8  # what its logits are divided by
    sample_top_k: int = 50  # it is drawn from so many tokens
    out_dir: str = "out/train_lm"  # where runs are kept
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "auto"  # bfloat16 (CUDA, CPUs with AMX), float16 (with loss scaling), float32, float64
    compile: bool = False  # torch.compile
    resume: bool = True  # go on from the run's newest checkpoint; false: start again
    eval_only: bool = False  # no training: evaluate the run's checkpoint, or --init_from
    init_from: str | None = None  # folder of a GPT-2 checkpoint in Hugging Face's format (router dense)

    def __post_init__(self):
        super().__post_init__()
        common.check_run(self)
        if self.table not in (None, *TABLES):
            raise ValueError(f"train_lm.py has tables {', '.join(map(str, TABLES))}, not {self.table}")
        if self.init_from and self.router != "dense":
            raise ValueError("--init_from loads a dense GPT-2: give --router dense")

    @property
    def not_identity(self) -> set[str]:
        """Constants that do not make another run: evaluating a trained model under another t or gamma, say."""
        at_test = {"eval_threshold", "eval_capacity_factor"} if self.eval_only else set()
        return at_test | {"eval_only", "prompt", "sample_tokens", "sample_temperature", "sample_top_k"}


# XMoE 4.1-4.2: 256 sequences of 1,024 tokens a step; micro-batches of 16, as in the authors' runs.
PAPER = dict(vocab_size=50257, block_size=1024, n_layer=12, dropout=0.1, learning_rate=4.5e-4, min_learning_rate=4.5e-6)
PAPER |= dict(init_std=0.014, batch_tokens=256 * 1024, micro_tokens=16 * 1024, eval_every=500, eval_tokens=1 << 20)
SMALL = dict(n_head=12, n_embd=768, ffn_size=3072)
LARGE = dict(n_head=16, n_embd=1024, ffn_size=4096)
CORPORA = {"wikitext103": 4_000, "openwebtext": 60_000}
SIZES = {"124M": dict(SMALL, router="dense"), "323M": SMALL, "556M": LARGE}
PRESETS = {"demo": {}} | {
    f"{data}-{size}": dict(PAPER, data=data, steps=steps, **shape)
    for data, steps in CORPORA.items()
    for size, shape in SIZES.items()
}

# Rows of the tables: what to change, and the paper's test perplexity on OpenWebText and WikiText-103. `split` is the
# number of experts that an FFN's width is divided into: 8 x 3072, 16 x 1536, 32 x 768, 64 x 384.
TABLE1 = [  # method, router, split, (OpenWebText, WikiText-103) at 323M and at 556M
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
DENSE = ("dense", "dense", 1, (22.61, 22.24), ("", ""))  # 124M; the paper has no dense model of the 556M rows' width
# A dense model's FFNs, all of them, split into E experts and trained with t = 1 and no drop; at test gamma = FLOPs * E,
# and t = 0.9 below 1.00x.
TABLE2 = {
    1: [(1.00, *DENSE[3])],
    8: [(1.00, 22.89, 21.93), (0.75, 22.89, 21.93), (0.50, 22.90, 21.93), (0.25, 23.07, 21.97)],
    16: [(1.00, 22.94, 21.92), (0.75, 22.97, 21.92), (0.50, 23.02, 21.92), (0.25, 23.27, 21.93)],
}

# ---------------------------------------------------------------------------------------------------------------------
# One run


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy (scalar) of logits (B, T, V), in fp32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: GPT, data: TokenData, split: str, context, max_tokens: int | None = None) -> dict:
    """Cross entropy, perplexities, balance loss and routing statistics, in micro-batches of the training's size."""
    model.eval()
    model.start_stats()
    sums = torch.zeros(3, dtype=torch.float64)  # cross entropy, balance loss, tokens
    for x, y in data.eval_batches(split, max_tokens, context.rank, context.world):
        x, y = context.send_all(x, y)
        with context.autocast():
            logits, balance = model(x)
            loss = token_loss(logits, y)
        sums += torch.tensor([float(loss), float(balance), 1.0], dtype=torch.float64) * y.numel()
    loss, balance, tokens = context.sum(sums).tolist()
    model.train()
    loss, counts = loss / tokens, data.meta["splits"][split]
    return {
        "loss": loss,
        "ppl": math.exp(min(loss, 700)),
        "word_ppl": math.exp(min(loss * counts["tokens"] / counts["words"], 700)),
        "balance": balance / tokens,
        "tokens": int(tokens),
        "layers": model.stats(context.sum),
    }


def describe(scores: dict) -> str:
    """What one evaluation found, a line an MoE layer."""
    line = f"{scores['loss']:.4f}  ppl {scores['ppl']:.2f} per token, {scores['word_ppl']:.1f} per word"
    lines = [line + (f"  balance {scores['balance']:.3f}" if scores["layers"] else "")]
    for i, layer in enumerate(scores["layers"], 1):
        lines.append(f"  MoE layer {i}: {describe_routing(layer)}")
    return "\n".join(lines)


def open_data(config: Config, context) -> TokenData:
    """The prepared corpus, whose vocabulary the config then has; the demo's is made here where it is missing."""
    folder = ready(config.data, make=context.rank == 0)
    context.barrier()
    micros = config.batch_tokens // config.micro_tokens
    data = TokenData(folder, config.block_size, config.micro_tokens, micros, config.seed)
    common.check_data(data, config, context)
    return data


def build(config: Config, checkpoint: dict | None, context) -> GPT:
    """The model of a checkpoint, of `--init_from`, or drawn from the seed."""
    common.seed_all(config.seed)
    model = GPT(config)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    elif config.init_from:
        arguments, weights = load_gpt2(config.init_from)
        common.check_weights(config.init_from, arguments, config)
        model.load_state_dict(weights)
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
    counts, flops = count_parameters(model), flops_per_token(config)
    say(f"{name}: {counts['total']:,} parameters, {counts['active']:,.0f} active a token; "
        f"{flops['total'] / 1e6:.1f} MFLOPs a token forward, {flops['moe'] / 1e6:.1f} of them in MoE layers; "
        f"{context.world} x {context.device.type}, {context.dtype}")  # fmt: skip
    if model.moe_layers:
        say("healthy routing: few choices cut and tokens unserved, load imbalance near 1, entropy well above 0")

    optimizer = common.adamw(model, config.learning_rate, (config.beta1, config.beta2), config.weight_decay)
    scaler = torch.amp.GradScaler(context.device.type, enabled=context.dtype == torch.float16)
    start, seconds = common.restore(checkpoint, optimizer, scaler, folder)
    del checkpoint  # it holds a copy of everything
    forward = common.parallel(model, config, context)

    loss_sum = model.ln_f.weight.new_zeros(())  # since the last evaluation, on the device; once not finite, it stays so
    since, clock = start, time.perf_counter()
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, unit="step", disable=context.rank > 0)
    model.train()
    for step in bar:
        for group in optimizer.param_groups:
            peak, floor = config.learning_rate, config.min_learning_rate
            group["lr"] = common.cosine(step, config.steps, config.warmup, peak, floor)
        for micro in mine:
            common.seed_all(config.seed, 1 + step, micro)  # dropout, whichever process gets this micro-batch
            x, y = context.send_all(*data.batch("train", step, micro))
            if context.world > 1:
                forward.require_backward_grad_sync = micro == mine[-1]
            with context.autocast():
                logits, balance = forward(x)
                loss = token_loss(logits, y)
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
            speed = (done - since) * config.batch_tokens / (time.perf_counter() - clock)
            bar.set_postfix(loss=f"{mean_loss:.3f}", tok_s=f"{speed:,.0f}")
        if due:
            seconds += time.perf_counter() - clock
            fastest = common.peak_flops(context)
            scores = evaluate(model, data, "valid", context, config.eval_tokens)
            if not math.isfinite(scores["loss"]):  # the last update broke what the loss before it did not show
                common.not_finite(bar, done)
            mfu = f", MFU {3 * flops['total'] * speed / fastest:.1%} at full capacity" if fastest else ""
            say(f"step {done}: train {mean_loss:.4f}  {speed:,.0f} tokens/s{mfu}  valid {describe(scores)}")
            folder.log({"step": done, "train_loss": mean_loss, "tokens_per_second": speed, **scores})
            folder.save({
                "kind": "lm", "step": done, "seconds": seconds, "config": dataclasses.asdict(config),
                "arguments": {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)},
                **folder.data,
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
            })  # fmt: skip
            loss_sum.zero_()
            since, clock = done, time.perf_counter()
    result = {
        "name": name, **test(model, data, context), **sample(config, model, data, context),
        "parameters": counts, "flops": flops, "seconds": round(seconds, 1),
        "data": data.checksum, "config": folder.config, "machine": common.machine(context),
    }  # fmt: skip
    folder.finish(result)
    return result


def test(model: GPT, data: TokenData, context) -> dict:
    """Test perplexity at the evaluation gamma (the paper's protocol), and without a limit."""
    scores = evaluate(model, data, "test", context)
    config = model.config
    if config.eval_capacity_factor >= config.num_experts or config.select == "expert_choice":
        # Capacity for all tokens is no limit; and to expert_choice the limit is what chooses.
        return {"test": scores, "test_no_limit": scores}
    with model.test_routing(capacity_factor=math.inf):
        return {"test": scores, "test_no_limit": evaluate(model, data, "test", context)}


def evaluate_run(config: Config, name: str, context) -> dict:
    """Tests a trained model (or `--init_from`), routed as the eval_ constants say; kept beside the run."""
    with common.clear_errors():
        data = open_data(config, context)
        folder = common.RunFolder(Path(config.out_dir, name), config, context)
        checkpoint = folder.load(tokenizer=data.meta["tokenizer"]["sha256"], data=data.checksum)
        if not checkpoint and not config.init_from:
            raise ValueError(f"{folder.path} has no checkpoint: train first, with the same constants")
        model = build(config, checkpoint, context)
    file = f"eval-t={config.eval_threshold}-gamma={config.eval_capacity_factor}"
    key = {"name": name, "data": data.checksum, "step": checkpoint["step"] if checkpoint else 0}
    result = folder.result(file, **key) or {**key, **test(model, data, context)}
    folder.finish(result, file)
    return result | sample(config, model, data, context)


def sample(config: Config, model: GPT, data: TokenData, context) -> dict:
    """What the model writes after the prompt, without a capacity limit, and the experts that served each token."""
    if config.select == "expert_choice" or context.rank > 0:
        return {}
    common.seed_all(config.seed)
    prompt = data.tokenizer.encode_batch([config.prompt])[0]
    ids = torch.tensor([[data.tokenizer.eot, *prompt]], device=context.device)
    model.start_stats()
    with context.autocast():
        ids = model.generate(ids, config.sample_tokens, config.sample_temperature, config.sample_top_k)
    served = [layer["served"] for layer in model.stats()]
    return {"sample": data.tokenizer.decode(ids[0, 1:].tolist()), "sample_served": served}


def report(config: Config, result: dict) -> str:
    """A finished result in words."""
    # Expert choice looks at later tokens: what it reaches is not the perplexity of a language model.
    note = " (not causal: experts choose among later tokens too)" if config.select == "expert_choice" else ""
    text = f"\n{result['name']}, test{note}; words are those of the raw text, separated by white space"
    text += f"\nwith gamma {config.eval_capacity_factor:g}: {describe(result['test'])}"
    if result["test_no_limit"] != result["test"]:
        text += f"\nwithout a limit: {describe(result['test_no_limit'])}"
    if "sample" in result:
        served = ", ".join(f"{n:.1f}" for n in result.get("sample_served", []))
        text += f"\n\nsample{f' ({served} experts served per token)' if served else ''}:\n{result['sample']}"
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def results_of(given: dict, row: dict, context, run=train) -> tuple[Config, list[dict]]:
    return common.results_of(Config, PRESETS, given, row, lambda config, name: run(config, name, context))


def perplexity(results: list[dict], where: str = "test", key: str = "ppl") -> str:
    return common.spread([result[where][key] for result in results])


def layer_mean(results: list[dict], key: str, form: str) -> str:
    """Mean over seeds and MoE layers of a routing statistic; empty for a dense model."""
    values = [layer[key] for result in results for layer in result["test"]["layers"]]
    return format(statistics.fmean(values), form) if values else ""


def table1(base: Config, given: dict, context) -> str:
    """XMoE table 1: every router, with the same parameters and the same FLOPs."""
    wide, rows = base.preset.endswith("556M"), []
    for method, router, split, *papers in [DENSE, *TABLE1]:
        row = {"router": router} | ({} if router == "dense" else {"expert_size": base.ffn_size // split})
        config, results = results_of(given, row, context)
        size = results[0]["parameters"]["total"] / 1e6
        cells = [method, f"{config.num_experts} x {config.expert_size}", f"{size:.1f}M"]
        cells += [f"{p:.2f}" if p else "" for p in papers[wide]]
        cells += [perplexity(results), perplexity(results, "test_no_limit"), perplexity(results, key="word_ppl")]
        routing = (("wanted", ".2f"), ("served", ".2f"), ("cut", ".1%"), ("unserved", ".2%"))
        rows.append(cells + [layer_mean(results, *what) for what in routing])
    headers = ["method", "experts", "params", "paper, OWT", "paper, WT103", "ours", "ours, no limit", "ours, per word"]
    return common.markdown_table([*headers, "wanted", "served", "cut", "unserved"], rows)


def table2(base: Config, given: dict, context) -> str:
    """XMoE table 2: a dense model trained as experts (t = 1, no drop), with fewer FLOPs at test."""
    rows = []
    for experts, points in TABLE2.items():
        row = {"router": "threshold", "moe_every": 1, "num_experts": experts, "expert_size": base.ffn_size // experts}
        row |= {"threshold": 1.0, "capacity_factor": float(experts)}
        row = {"router": "dense"} if experts == 1 else row
        _, trained = results_of(given, row, context)
        for flops, *paper in points:
            at_test = {"eval_only": True, "eval_threshold": 0.9, "eval_capacity_factor": flops * experts}
            results = trained if flops == 1 else results_of(given, row | at_test, context, evaluate_run)[1]
            kept = [layer["served"] / experts for result in results for layer in result["test"]["layers"]]
            cells = ["dense" if experts == 1 else "XMoE", f"{experts} x {base.ffn_size // experts}", f"{flops:.2f}x"]
            cells += [f"{statistics.fmean(kept or [1]):.1%}", *(f"{p:.2f}" for p in paper)]
            rows.append(cells + [perplexity(results), perplexity(results, key="word_ppl")])
    headers = ["method", "experts", "FLOPs", "really kept", "paper, OWT", "paper, WT103", "ours", "ours, per word"]
    return common.markdown_table(headers, rows)


TABLES = {1: table1, 2: table2}


def main():
    given, config, context = common.start(Config, PRESETS)
    if config.table:
        text = TABLES[config.table](config, given, context)
        if context.rank == 0:
            seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
            print(f"\nXMoE table {config.table}: test perplexity, preset {config.preset}, {seeds}\n\n{text}")
        return
    config, results = results_of(given, {}, context, evaluate_run if config.eval_only else train)
    if context.rank == 0:
        for result in results:
            print(report(config, result))
        if len(results) > 1:
            no_limit = perplexity(results, "test_no_limit")
            print(f"\n{len(results)} seeds: test perplexity {perplexity(results)}, without a limit {no_limit}")


if __name__ == "__main__":
    main()
