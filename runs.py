"""What training scripts share that is no paper's idea: the command line, a run's folder, resuming, the bar, tables.

A run is kept in out_dir/NAME: config.json, metrics.jsonl (a line an evaluation), ckpt.pt and the one before it,
result.json. The same command goes on from the newest sound checkpoint and ends as if it had never been stopped.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from tqdm import tqdm

import common

# Constants that say where and how to run, not what to compute: they do not name a run, and may differ when it resumes.
# A script's Config adds its own as `not_identity`.
NOT_IDENTITY = {"preset", "table", "seeds", "out_dir", "resume", "device", "log_every", "vocab_size"}

# ---------------------------------------------------------------------------------------------------------------------
# The command line: Config < preset < what is given


LIMITS = {  # what constants must be: (the test, their names)
    "over 0 and finite": (
        lambda x: 0 < x < math.inf,
        """steps seeds batch_tokens micro_tokens eval_every eval_tokens log_every vocab_size block_size n_layer n_head
        n_embd ffn_size decoder_layers generator_layers moe_every expert_ffns num_experts expert_size top_k
        eval_maskings eval_sentences warmup_steps beam sample_top_k init_std learning_rate eps init_temperature
        sample_temperature""",
    ),
    "at least 0 and finite": (
        lambda x: 0 <= x < math.inf,
        """seed min_learning_rate weight_decay grad_clip balance_coef lambda_disc expert_layers routing_dim
        sample_tokens""",
    ),
    "from -10 to 10": (lambda x: -10 <= x <= 10, "length_penalty"),
    "from 0 to 1": (lambda x: 0 <= x <= 1, "warmup threshold eval_threshold sampling_exponent"),
    "at least 0 and below 1": (lambda x: 0 <= x < 1, "dropout beta1 beta2 label_smoothing"),
    "over 0 and at most 1": (lambda x: 0 < x <= 1, "mask_share"),
    "at least 1 and finite": (lambda x: 1 <= x < math.inf, "span"),
    "over 0 (inf is no limit)": (lambda x: x > 0, "capacity_factor eval_capacity_factor"),
    "a name": (bool, "out_dir data pairs"),
}


def check(config):
    """ValueError where a constant is out of its range, or two do not go together."""
    constants = dataclasses.asdict(config)
    for words, (good, names) in LIMITS.items():
        for name in names.split():
            if constants.get(name) is not None and not good(constants[name]):
                raise ValueError(f"{name} must be {words}, not {constants[name]!r}")
    if config.batch_tokens % config.micro_tokens:
        raise ValueError(f"micro_tokens = {config.micro_tokens} does not divide batch_tokens = {config.batch_tokens}")


def command_line(Config: type, presets: dict[str, dict], argv: list[str] | None = None):
    """-> the config that the command line makes, by tyro: `--name value`, `--help`.

    Raises ValueError, in one line, for a value out of range or an option that the chosen model does not read.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = re.search(r"--preset[= ](\S+)", " ".join(argv))
    preset = given[1] if given else next(iter(presets))
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    config = parse(Config(**{"preset": preset} | presets[preset]), argv)
    check(config)
    unread = said(config, presets).keys() & config.unread()
    if unread:
        model = f"router {config.router}" + (f", objective {config.objective}" if hasattr(config, "objective") else "")
        raise ValueError(f"--{min(unread)} is not read by a model with {model}: leave it out")
    return config


def parse(default, argv: list[str]):
    """A dataclass with what argv changes in it. The comments behind its fields are the help."""
    words = {"true": "True", "false": "False", "none": "None"}  # tyro wants Python's spelling
    texts = {f"--{field.name}" for field in dataclasses.fields(default) if field.type is str}
    args = []
    for before, word in zip(["", *argv], argv):
        args.append(word if before in texts else words.get(word, word))
    return tyro.cli(
        type(default),
        args=args,
        default=default,
        description=sys.modules[type(default).__module__].__doc__,
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
        console_outputs=int(os.environ.get("LOCAL_RANK", 0)) == 0,
    )


def said(config, presets: dict[str, dict]) -> dict:
    """The constants that differ from their preset's."""
    default = type(config)(**presets[config.preset])
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def identity(config) -> dict:
    """The constants that make a run what it is, as JSON has them."""
    dropped = NOT_IDENTITY | config.not_identity | config.unread()
    constants = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in constants.items() if name not in dropped}


def run_name(config, presets: dict[str, dict]) -> str:
    """The preset, and what differs from it."""
    kept, words = identity(config), [config.preset]
    for name, value in said(config, presets).items():
        if name in kept:
            value = ",".join(map(str, kept[name])) if name == "moe_after" else value
            words.append(f"{name}={value}")
    name = re.sub(r"[^\w.,=+-]+", "_", "-".join(words))
    if len(name) > 160:  # a folder's name has limits; config.json says the rest
        name = f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def with_vocabulary(config, data):
    """The config with the data's vocabulary. ValueError where it has another."""
    if config.vocab_size not in (None, data.vocab_size):
        raise ValueError(
            f"the model's vocabulary is {config.vocab_size}, that of {data.folder} is {data.vocab_size}: "
            "--vocab_size none takes the data's"
        )
    return dataclasses.replace(config, vocab_size=data.vocab_size)


def check_weights(path: str, arguments: dict, config):
    """ValueError where a checkpoint's arguments are not those of the config."""
    differ = [f"{k} {v}, not {getattr(config, k)}" for k, v in arguments.items() if getattr(config, k) != v]
    if differ:
        raise ValueError(f"{path} has {'; '.join(differ)}")


# ---------------------------------------------------------------------------------------------------------------------
# A run's folder. Only rank 0 writes.


class Folder:
    """`config.json`, `metrics.jsonl`, `ckpt.pt` (and the one before it) and `result.json` of one run.

    Raises ValueError where the folder belongs to a run with other constants.
    """

    def __init__(self, path: Path, constants: dict, context: common.Context, fresh: bool = False):
        self.path, self.constants, self.context, self.fresh = path, constants, context, fresh
        self.writes, self.broken = context.rank == 0, []
        file = path / "config.json"
        old = read_json(file) if file.exists() and not fresh else {}
        differ = [f"{k} ({old[k]} there, {v} now)" for k, v in constants.items() if old.get(k, v) != v]
        if differ:
            raise ValueError(f"{path} holds a run with another {', '.join(differ)}: choose another --out_dir")
        context.barrier()  # nobody writes before all have read

    def begin(self, tokenizer):
        """Makes the folder ready to be written to: a fresh run forgets the one before it."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        old = [*self.path.glob("*.pt"), *self.path.glob("*.json"), *self.path.glob("metrics.jsonl")]
        for file in old if self.fresh else ():
            file.unlink()
        self.write_json("config", self.constants)
        tokenizer.save(self.path)

    def result(self, name: str = "result", /, **same) -> dict | None:
        """What `write_json` wrote, if it has these values."""
        file = self.path / f"{name}.json"
        result = read_json(file) if file.exists() and not self.fresh else {}
        return result if result and all(result.get(k) == v for k, v in same.items()) else None

    def write_json(self, name: str, value: dict):
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / f"{name}.json") as f:
                f.write(json.dumps(value, indent=1).encode())

    def log(self, record: dict):
        if self.writes:
            with open(self.path / "metrics.jsonl", "a") as f:
                f.write(json.dumps(record) + "\n")

    def cut_log(self, step: int):
        """Forgets evaluations after `step`, and a torn last line: a resumed run will write them again."""
        file = self.path / "metrics.jsonl"
        if self.writes and file.exists():
            whole = re.findall(r'^(\{"step": (\d+),.*\}\n)', file.read_text(), re.M)
            with replacing(file) as f:
                f.writelines(line.encode() for line, at in whole if int(at) <= step)

    def save(self, state: dict, name: str = "ckpt.pt"):
        """Written beside, flushed, then renamed; the previous one is kept. At every moment one of the two is whole."""
        if not self.writes:
            return
        file = self.path / name
        before = None
        if name == "ckpt.pt" and not self.broken:  # a damaged one must not take the place of the sound one before it
            before = file.with_suffix(".prev.pt")
        with replacing(file, before) as new:
            torch.save(state, new)
        self.broken = []

    def load(self, **same) -> dict | None:
        """The newest readable checkpoint, on the CPU; None if there is none.

        Raises ValueError if none can be read, if processes see different ones, or if its values are not `same`.
        """
        state = None
        for file in (self.path / "ckpt.pt", self.path / "ckpt.prev.pt"):
            if state or self.fresh or not file.exists():
                continue
            try:
                state = load_checkpoint(file)
            except ValueError as error:
                self.broken.append(str(error))
        if self.broken and not state:
            raise ValueError(f"{'; '.join(self.broken)}: nothing to go on from; --resume false starts again")
        step = state["step"] if state else 0
        if self.broken and self.writes:
            print(f"warning: {self.broken[0]}; using the one before it, of step {step}", file=sys.stderr)
        if len(set(self.context.gather(step))) > 1:
            raise ValueError(f"the processes see different checkpoints in {self.path}: it must be on a shared disk")
        for what, ours in same.items():
            if state and state[what] != ours:
                raise ValueError(f"{self.path} was trained with another {what}: choose another --out_dir")
        return state


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError where the file is damaged. Its checksums are looked at first: torch misses a flipped byte."""
    try:
        with zipfile.ZipFile(file) as z:
            bad = z.testzip()
        if bad is None:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # processes of a node share it
    except Exception as error:  # damage shows itself in a dozen ways
        bad = error
    raise ValueError(f"checkpoint {file} is corrupt ({bad})")


def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON ({error}): delete it or restore it") from None


@contextmanager
def replacing(file: Path, before: Path | None = None):
    """A file to write to that takes the place of `file` when it is whole and on the disk; the old becomes `before`."""
    part = file.with_name(file.name + ".tmp")
    with open(part, "wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())
    if before and file.exists():
        file.replace(before)
    part.replace(file)


# ---------------------------------------------------------------------------------------------------------------------
# One run


class Run:
    """What surrounds the steps of one training run: where it starts, the bar, when to evaluate, what is saved.

    `result`: it is finished; `checkpoint`: to go on from; both None for a new run. data: what it is trained on. To
    resume, the script loads the checkpoint's weights, `begin` the optimizer, and `steps` goes on behind the last step;
    no state of random numbers is kept, since `micros` seeds every micro-batch. Raises ValueError where the
    micro-batches of a step cannot be dealt evenly, or the folder holds something else.
    """

    def __init__(self, config, presets: dict[str, dict], context: common.Context, *data):
        self.config, self.context, self.name = config, context, run_name(config, presets)
        micros = config.batch_tokens // config.micro_tokens
        if micros % context.world:
            raise ValueError(
                f"batch_tokens / micro_tokens = {micros} micro-batches a step cannot be dealt to "
                f"{context.world} processes: change batch_tokens"
            )
        self.mine = range(context.rank, micros, context.world)
        self.tokenizer = data[0].tokenizer
        self.checksums = {"tokenizer": self.tokenizer.sha256, "data": "+".join(source.checksum for source in data)}
        self.folder = Folder(Path(config.out_dir, self.name), identity(config), context, fresh=not config.resume)
        self.result = self.folder.result(data=self.checksums["data"])
        if len(set(context.gather(bool(self.result)))) > 1:
            raise ValueError(f"the processes see different results in {self.folder.path}: it must be on a shared disk")
        self.checkpoint = None if self.result else self.folder.load(**self.checksums)
        if self.result:
            self.say(f"{self.name}: finished before, in {self.folder.path} (--resume false trains it again)")

    def say(self, text: str):
        if self.context.rank == 0:
            tqdm.write(text)

    def begin(self, kind: str, model, optimizer, flops_per_token: float) -> torch.nn.Module:
        """Makes the folder, and puts everything where the checkpoint left it -> what to call in training.

        kind: lm, encoder or encdec.
        """
        self.kind, self.model, self.optimizer, self.flops_per_token = kind, model, optimizer, flops_per_token
        self.scaler = torch.amp.GradScaler(self.context.device.type, enabled=self.context.dtype == torch.float16)
        self.start, self.seconds = 0, 0.0
        if self.checkpoint:
            optimizer.load_state_dict(self.checkpoint["optimizer"])
            self.scaler.load_state_dict(self.checkpoint["scaler"])
            self.start, self.seconds = self.checkpoint["step"], self.checkpoint["seconds"]
            self.say(f"{self.name}: goes on from step {self.start}")
        self.checkpoint = None  # it holds a copy of everything
        with common.clear_errors():
            self.folder.begin(self.tokenizer)
            self.folder.cut_log(self.start)
        self.restart_clock(self.start)
        self.forward = common.parallel(model, self.config, self.context)
        return self.forward

    def restart_clock(self, step: int):
        """What the bar and the log say is of the steps since the last evaluation."""
        self.since, self.tokens, self.clock = step, 0, time.perf_counter()
        # On the device: once not finite, it stays so, and nobody waits for it at every step.
        self.loss_sum = torch.zeros((), device=self.context.device)

    def steps(self) -> Iterator[int]:
        steps, silent = self.config.steps, self.context.rank > 0
        self.bar = tqdm(range(self.start, steps), initial=self.start, total=steps, unit="step", disable=silent)
        self.model.train()
        yield from self.bar

    def micros(self, step: int) -> Iterator[int]:
        """This process's micro-batches of a step. Dropout and draws depend on nothing but (seed, step, micro)."""
        for micro in self.mine:
            common.seed_all(self.config.seed, 1 + step, micro)
            if self.context.world > 1:  # gradients are exchanged with the last one
                self.forward.require_backward_grad_sync = micro == self.mine[-1]
            yield micro

    def backward(self, loss: torch.Tensor, shown: torch.Tensor, tokens: int):
        """The gradient of one micro-batch's share of the step; `shown`: the part of its loss to look at."""
        self.scaler.scale(loss / len(self.mine)).backward()
        self.loss_sum += shown.detach() / len(self.mine)
        self.tokens += tokens * self.context.world

    def end_step(self, step: int) -> bool:
        """Shows how the step went -> whether an evaluation is due. Ends a run whose loss is not finite."""
        done = step + 1
        due = done % self.config.eval_every == 0 or done == self.config.steps
        if due or done % self.config.log_every == 0:
            self.train_loss = float(self.context.sum(self.loss_sum)) / self.context.world / (done - self.since)
            self.check_finite(self.train_loss, done)
            self.speed = self.tokens / (time.perf_counter() - self.clock)
            self.bar.set_postfix(loss=f"{self.train_loss:.3f}", tok_s=f"{self.speed:,.0f}")
        if due:
            self.seconds += time.perf_counter() - self.clock
        return due

    def check_finite(self, loss: float, step: int):
        if not math.isfinite(loss):
            self.bar.close()
            common.fail(
                f"the loss is not finite at step {step} or just before (not saved): change --learning_rate or --seed"
            )

    def save(self, step: int, scores: dict, loss: float, words: str, **state):
        """Logs an evaluation and saves a checkpoint with `state` in it. Its loss must be finite, too: the last update
        may have broken what the loss before it did not show."""
        done, fastest = step + 1, common.peak_flops(self.context)
        self.check_finite(loss, done)
        mfu = f", MFU {3 * self.flops_per_token * self.speed / fastest:.1%} at full capacity" if fastest else ""
        self.say(f"step {done}: train {self.train_loss:.4f}  {self.speed:,.0f} tokens/s{mfu}  {words}")
        record = {"step": done, "train_loss": self.train_loss, "tokens_per_second": self.speed}
        self.folder.log(record | scores)
        state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "seconds": self.seconds}
        self.folder.save(self.weights(done) | state)
        self.restart_clock(done)

    def weights(self, step: int) -> dict:
        """What it takes to make the model again."""
        arguments = dataclasses.asdict(self.model.config)
        return {
            "kind": self.kind,
            "step": step,
            "arguments": arguments,
            "model": self.model.state_dict(),
        } | self.checksums

    def finish(self, result: dict) -> dict:
        """Adds what every result has, and writes it."""
        result = {"name": self.name} | result
        result |= {"seconds": round(self.seconds, 1), "data": self.checksums["data"], "config": self.folder.constants}
        result["machine"] = common.machine(self.context)
        self.folder.write_json("result", result)
        return result


# ---------------------------------------------------------------------------------------------------------------------
# Tables, and what a script's main does


class Table(NamedTuple):
    """Rows of runs beside the paper's numbers."""

    title: str
    labels: tuple[str, ...]  # headers of what is known before a run: the method, the paper's numbers
    rows: list[tuple[tuple[str, ...], dict]]  # the labels' cells, and what to change for the row
    cells: Callable[[dict], dict]  # a result -> {header: (number or None, its format)}

    def render(self, results: list[list[dict]]) -> str:
        """Markdown; for each row the results of all seeds, none where it has not been run."""
        found = [list(map(self.cells, seeds)) for seeds in results]
        headers = {}
        for cells in itertools.chain(*found):
            headers |= cells
        lines = []
        for (labels, _), seeds in zip(self.rows, found):
            lines.append([*labels, *(mean_cell(header, seeds) for header in headers)])
        return markdown_table([*self.labels, *headers], lines)


def mean_cell(header: str, seeds: list[dict]) -> str:
    """The mean of one number a seed, with the deviation where there are several; empty where there is none."""
    cells = [cells[header] for cells in seeds if header in cells]
    values = [value for value, _ in cells if value is not None]
    if not values:
        return ""
    form = cells[0][1]
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def markdown_table(headers: list[str], rows: list[list]) -> str:
    """A table that reads well in a terminal and in a README."""
    columns = []
    for column in zip(headers, *rows):
        width = max(len(str(cell)) for cell in column)
        columns.append([str(cell).ljust(width) for cell in column])
    head, *lines = ["| " + " | ".join(line) + " |" for line in zip(*columns)]
    rule = "|" + "|".join("-" * (len(column[0]) + 2) for column in columns) + "|"
    return "\n".join([head, rule, *lines])


def seeds_of(config, change: dict) -> list:
    """A table row's config, once for every seed."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [dataclasses.replace(config, **change, seed=seed) for seed in seeds]


def start(Config: type, presets: dict[str, dict]):
    """-> the config of the command line, and where this process stands; or one clear line."""
    with common.clear_errors():
        config = command_line(Config, presets)
        return config, common.setup(config.device, config.dtype)


def refuse_rows(config, presets: dict[str, dict], changes: Iterable[dict]):
    """ValueError where the command line says what the rows of a table say themselves."""
    changed = set().union(*changes) - {"data", "moe_after"}  # which tables take from the command line
    given = said(config, presets).keys() & changed
    if given:
        raise ValueError(f"its rows have a --{min(given)} of their own: leave it out")


def carry_out(config, presets: dict, context, tables: dict, train: Callable, report: Callable, cells: Callable):
    """A table, or one run a seed and its report. train(config, context) -> result; report(config, result) -> text."""
    table = Table("", ("run",), [(("",), {})], cells)  # no table: one row that changes nothing
    if config.table:
        with common.clear_errors():
            if config.table not in tables:
                raise ValueError(f"table must be one of {', '.join(map(str, tables))}, not {config.table}")
            table = tables[config.table](config)
            refuse_rows(config, presets, [change for _, change in table.rows])
    with common.clear_errors():
        configs = [seeds_of(config, change) for _, change in table.rows]
    results = []
    for seeds in configs:
        results.append([train(one, context) for one in seeds])
    if context.rank > 0:
        return
    if not config.table:
        for result in results[0]:
            print(report(config, result))
    if config.table or config.seeds > 1:
        seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
        print(f"\n{table.title or config.preset}, preset {config.preset}, {seeds}\n\n{table.render(results)}")
