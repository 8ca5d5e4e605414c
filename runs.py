"""What training scripts share that is no paper's idea: the command line, a run's folder, resuming, the bar, tables.

A run is kept in out_dir/NAME: config.json, metrics.jsonl (a line an evaluation), ckpt.pt and the one before it,
result.json. The same command goes on from the newest sound checkpoint and ends as if it had never been stopped.
"""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from tqdm import tqdm

import common
import parallel

# Constants that say where and how to run, not what to compute: they may differ when a run resumes.
# A script's Config adds its own as `not_identity`.
NOT_IDENTITY = {"preset", "table", "seeds", "out_dir", "resume", "device", "log_every"}
NOT_IDENTITY |= {"expert_parallel", "shard", "compile"}
NOT_IDENTITY |= {"vocab_size"}  # the data's, and data are compared by their checksum

# ---------------------------------------------------------------------------------------------------------------------
# The command line: Config < preset < what is given


# What numbers must be. Those that are not named here must be over 0 and finite.
RANGES = {
    "at least 0 and finite": (
        lambda x: 0 <= x < math.inf,
        """seed expert_layers routing_dim sample_tokens min_learning_rate weight_decay grad_clip balance_coef
        lambda_disc""",
    ),
    "from -10 to 10": (lambda x: -10 <= x <= 10, "length_penalty"),
    "at least 1e-20 and finite": (lambda x: 1e-20 <= x < math.inf, "sample_temperature"),
    "from 0 to 1": (lambda x: 0 <= x <= 1, "warmup threshold eval_threshold sampling_exponent"),
    "at least 0 and below 1": (lambda x: 0 <= x < 1, "dropout beta1 beta2 label_smoothing"),
    "over 0 and at most 1": (lambda x: 0 < x <= 1, "mask_share"),
    "over 1 and finite": (lambda x: 1 < x < math.inf, "span"),
    "over 0 (inf is no limit)": (lambda x: x > 0, "capacity_factor eval_capacity_factor"),
}
RANGE_OF = {name: (words, good) for words, (good, names) in RANGES.items() for name in names.split()}
LARGEST = 1 << 63  # no integer reaches it


def check(config):
    """ValueError where a number is out of its range, or two do not go together."""
    for name, value in vars(config).items():
        if type(value) not in (int, float):
            continue
        if abs(value) >= LARGEST and type(value) is int:
            raise ValueError(f"{name} must be below 2 ** 63")
        words, good = RANGE_OF.get(name, ("over 0 and finite", lambda x: 0 < x < math.inf))
        if not good(value):
            raise ValueError(f"{name} must be {words}, not {value!r}")
    for batch, micro in (("batch_tokens", "micro_tokens"), ("batch_size", "micro_size")):
        if hasattr(config, batch) and getattr(config, batch) % getattr(config, micro):
            raise ValueError(f"{micro} = {getattr(config, micro)} does not divide {batch} = {getattr(config, batch)}")


def command_line(Config: type, presets: dict[str, dict], argv: list[str]):
    """-> the config that the command line makes, by tyro: `--name value`, `--help`.

    Raises ValueError, in one line, for a value out of range or an option that the chosen model does not read.
    """
    given = re.search(r"(?:^|\0)--preset[=\0]([^\0]+)", "\0".join(argv))  # not inside another option's text
    preset = given[1] if given else Config.preset
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    words = sys.modules[Config.__module__].__doc__
    config = parse(Config(**{"preset": preset} | presets[preset]), argv, words)
    if config.preset != preset:
        raise ValueError(f"--preset is given twice, as {preset!r} and as {config.preset!r}: give it once")
    check(config)
    if not getattr(config, "table", None):  # its rows are other models
        refuse_unread(config, presets, config.unread())
    return config


def refuse_unread(config, presets: dict[str, dict], names: set[str]):
    """ValueError where one of the names is given."""
    unread = min(said(config, presets).keys() & names, default=None)
    if unread:
        kinds = "router", "score", "gate", "select", "relative_bias", "objective", "task"
        values = {name: vars(config).get(name) for name in kinds if name != unread}
        reads = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        what = f"table {config.table}" if getattr(config, "table", None) else f"a model with {reads}"
        raise ValueError(f"--{unread} is not read by {what}: leave it out")


def refuse_others(config, presets: dict[str, dict], option: str, read: str):
    """ValueError where more is given than an option reads that only uses a trained model."""
    more = said(config, presets).keys() - {option, *read.split()}
    if more:
        raise ValueError(f"--{option} reads --{', --'.join(read.split())} alone: leave out --{min(more)}")


def parse(default, argv: list[str], description: str):
    """A dataclass with what argv changes in it. The comments behind its fields are the help, below a description."""
    words = {"true": "True", "false": "False", "none": "None"}  # tyro wants Python's spelling
    texts = {f"--{field.name}" for field in dataclasses.fields(default) if field.type is str}
    args = []
    for word in argv:
        args += word.split("=", 1) if word.startswith("--") else [word]
    for place, before in enumerate(args[:-1], 1):
        if before not in texts:
            args[place] = words.get(args[place], args[place])
    try:
        return tyro.cli(
            type(default),
            args=args,
            default=default,
            description=description,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
            console_outputs=int(os.environ.get("LOCAL_RANK", 0)) == 0,
        )
    except OverflowError as error:  # sizes are divided while the config is made
        raise ValueError(f"a number is too large ({error})") from None


def said(config, presets: dict[str, dict]) -> dict:
    """The constants that differ from their preset's."""
    default = type(config)(**presets[config.preset])
    return {name: value for name, value in vars(config).items() if value != getattr(default, name)}


def identity(config) -> dict:
    """The constants that make a run what it is, as JSON has them."""
    dropped = NOT_IDENTITY | config.not_identity | config.unread()
    constants = json.loads(json.dumps(vars(config)))
    return {name: value for name, value in constants.items() if name not in dropped}


def run_name(config, presets: dict[str, dict]) -> str:
    """The preset, and what differs from it."""
    kept, words = identity(config), [config.preset]
    for name, value in said(config, presets).items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        if name in kept:
            words.append(f"{name}={value}")
    name = re.sub(r"[^\w.,=+-]+", "_", "-".join(words))
    whole = name.encode()
    if len(whole) > 160:  # a folder's name has limits; config.json says the rest
        name = f"{whole[:150].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"
    return name


def with_vocabulary(config, data):
    """The config with the data's vocabulary. ValueError where it has another."""
    if config.vocab_size not in (None, data.vocab_size):
        raise ValueError(
            f"the model's vocabulary is {config.vocab_size}, that of {data.folder} is {data.vocab_size}: "
            "--vocab_size none takes the data's"
        )
    return dataclasses.replace(config, vocab_size=data.vocab_size)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_json(file: Path):
    """What a file holds; {} where there is none."""
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}): delete it or restore it") from None


def digest(content: dict) -> str:
    """A hash of what stands in a JSON file, but for the one in it."""
    content = json.loads(json.dumps({name: value for name, value in content.items() if name != "sha256"}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_result(file: Path) -> dict:
    """A result with its hash; {} where there is none, or it is not as it was written."""
    try:
        result = read_json(file)
    except ValueError:
        result = None
    if result == {} or isinstance(result, dict) and result.get("sha256") == digest(result):
        return result
    common.warn(f"{file} is not as it was written: it is made again")
    return {}


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError where the file is damaged, or something else. Its checksums are looked at first: torch misses a
    flipped byte."""
    try:
        with zipfile.ZipFile(file) as z:
            bad = z.testzip()
        if bad is None:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # processes of a node share it
            kinds = {"model": dict, "step": int, "class": str, "arguments": dict, "tokenizer": str}
            if isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
                return state
            bad = "it holds something else"
    except Exception as error:  # damage shows itself in a dozen ways
        bad = error
    raise ValueError(f"checkpoint {file} is corrupt ({bad})")


def newest(
    folder: Path, names: Iterable[str] = ("ckpt.pt", "ckpt.prev.pt"), refuse: Callable[[dict], str] = lambda state: ""
) -> tuple[str, dict]:
    """-> name and content of the first of these checkpoints that is sound, on the CPU; "" and {} if there are none.

    refuse: what speaks against a sound one, in words. Raises ValueError if none is left.
    """
    damaged = []
    for name in names:
        if not (folder / name).exists():
            continue
        try:
            state = load_checkpoint(folder / name)
        except ValueError as error:
            damaged.append(str(error))
            continue
        reason = refuse(state)
        if reason:
            damaged.append(f"checkpoint {folder / name} {reason}")
            continue
        if damaged:
            common.warn(f"{'; '.join(damaged)}; using {name}")
        return name, state
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}: no other is left; training with --resume false starts again")
    return "", {}


# ---------------------------------------------------------------------------------------------------------------------
# One run


class Run:
    """What surrounds the steps of one training run: its folder, where it starts, the bar, when to evaluate.

    `result`: it is finished; `checkpoint`: to go on from; both empty for a new run. data: what it is trained on. To
    resume, the script loads the checkpoint's weights, `begin` the optimizer, and `steps` goes on behind the last step;
    no state of random numbers is kept, since `micros` seeds every micro-batch. Only rank 0 writes. `total` steps, with
    an evaluation `every` so many, are the config's unless they are given. Raises ValueError where the micro-batches of
    a step cannot be dealt evenly, or the folder holds something else.
    """

    def __init__(self, config, presets: dict[str, dict], context: common.Context, *data, total=None, every=None):
        self.config, self.context = config, context
        self.total, self.every = total or config.steps, every or config.eval_every
        self.name, self.constants = run_name(config, presets), identity(config)
        self.folder = Path(config.out_dir, self.name)
        self.trains = not getattr(config, "eval_only", False)  # train_lm.py can evaluate alone
        micros = data[0].micros_per_step
        if self.trains and micros % context.world:
            raise ValueError(
                f"{micros} micro-batches a step cannot be dealt to {context.world} processes: "
                f"change batch_{'tokens' if hasattr(config, 'batch_tokens') else 'size'}"
            )
        parallel.check(config, context)
        self.mine = range(context.rank, micros, context.world)
        self.tokenizer = data[0].tokenizer
        self.checksums = {"tokenizer": self.tokenizer.sha256, "data": "+".join(source.checksum for source in data)}
        self.result, self.checkpoint, self.damaged = {}, {}, False
        if config.resume:
            self.find()

    def find(self):
        """Looks in the folder for a result, or else for a checkpoint."""
        constants = read_json(self.folder / "config.json")
        if not isinstance(constants, dict):
            raise ValueError(f"{self.folder / 'config.json'} holds no constants: delete it or restore it")
        other = self.other(constants)
        if other:
            raise ValueError(f"{self.folder} holds a run with another {other}: choose another --out_dir")
        result, file = read_result(self.folder / "result.json"), ""
        other = self.other(result.get("config", {}))
        if other:
            common.warn(f"{self.folder / 'result.json'} is of a run with another {other}: it is made again")
        elif result.get("data") == self.checksums["data"]:
            self.result = result
            again = " (--resume false trains it again)" * self.trains
            self.say(f"{self.name}: finished before, in {self.folder}{again}")
        else:
            file, self.checkpoint = newest(self.folder, refuse=self.refuse)
        found = bool(self.result), self.checkpoint.get("step")
        if len(set(self.context.gather(found))) > 1:
            raise ValueError(f"the processes see different files in {self.folder}: it must be on a shared disk")
        self.damaged = file == "ckpt.prev.pt"  # ckpt.pt, or it is not there

    def other(self, constants: dict) -> str:
        """The first constant that is not this run's, in words."""
        for name, ours in self.constants.items():
            theirs = constants.get(name, ours)
            if theirs != ours:
                return f"{name} ({theirs!s:.100} there, {ours} now)"
        return ""

    def refuse(self, state: dict) -> str:
        """Why a run cannot go on from this checkpoint, in words."""
        known = state.keys() >= {"data", "optimizer", "scaler", "seconds", "log", "part"}
        if not known or not isinstance(state.get("constants"), dict):
            return "is not of a run that goes on"
        other = self.other(state["constants"])
        for what, ours in self.checksums.items():
            other = other or what * (state[what] != ours)
        return other and f"is of a run with another {other}"

    def say(self, text: str):
        if self.context.rank == 0:
            tqdm.write(text)

    def begin(
        self,
        model,
        optimizer,
        flops_per_token: float,
        bits_per_byte: float | None = None,
        state: Callable[[], dict] = dict,
    ) -> torch.nn.Module:
        """Makes the folder, and puts everything where the checkpoint left it -> what to call in training.

        bits_per_byte: those of a loss of 1, if the bar is to show them in place of the loss.
        state() -> what else a checkpoint is to hold; asked of all processes.
        """
        self.model, self.optimizer, self.flops_per_token = model, optimizer, flops_per_token
        self.bits_per_byte, self.state = bits_per_byte, state
        half = self.context.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.context.device.type, enabled=half)
        self.start, self.seconds, self.saved = 0, 0.0, 0
        self.log = ""  # of metrics.jsonl, which is written anew with every checkpoint
        part = {}
        if self.checkpoint:
            parallel.load_optimizer(model, optimizer, self.checkpoint["optimizer"])
            self.scaler.load_state_dict(self.checkpoint["scaler"])
            self.start = self.checkpoint["step"]
            self.seconds, self.log = self.checkpoint["seconds"], self.checkpoint["log"]
            part = self.checkpoint["part"]
            self.say(f"{self.name}: goes on from step {self.start}")
        self.checkpoint = {}  # it holds a copy of everything
        if self.context.rank == 0:
            with common.clear_errors():
                self.make_folder()
        self.restart_clock(self.start)
        if part:  # it was stopped between two evaluations
            self.since, self.tokens = part["since"], part["tokens"]
            self.clock -= part["seconds"]
            self.loss_sum += part["loss_sum"].to(self.loss_sum.device)
        self.forward = parallel.wrap(model, self.config, self.context)
        return self.forward

    def make_folder(self):
        """A run that starts again forgets what is there. ValueError where another process trains in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "w")  # the system lets go of it when this process ends, however it ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.folder}: wait for it, or end it") from None
        if not self.config.resume:
            for file in [*self.folder.glob("*.pt"), *self.folder.glob("*.json*")]:
                file.unlink()
        if self.damaged:
            (self.folder / "ckpt.prev.pt").replace(self.folder / "ckpt.pt")
        self.write("config.json", self.constants)
        self.write(self.tokenizer.filename, self.tokenizer.file)
        file = self.folder / "metrics.jsonl"
        found = file.read_bytes() if file.exists() else b""
        if found != self.log.encode() and self.log:
            if not found.startswith(self.log.encode()):  # what is behind it is of steps that will be taken again
                common.warn(f"{file} is not as it was written: it is made again from the checkpoint")
            self.write(file.name, self.log)

    def write(self, name: str, content: dict | str | bytes):
        """A file of the folder: weights, JSON, text or bytes. It takes its name when it is whole and on the disk."""
        if self.context.rank > 0:
            return
        part = self.folder / f"{name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as f:
                if name.endswith(".pt"):
                    torch.save(content, f)
                elif name.endswith(".json"):
                    f.write(json.dumps(content, indent=1).encode())
                else:
                    f.write(content if isinstance(content, bytes) else content.encode())
                f.flush()
                os.fsync(f.fileno())
            part.replace(self.folder / name)
        except (OSError, RuntimeError) as error:
            if part.is_file():
                part.unlink()
            # torch hides the reason behind an "unexpected pos"
            cause = error if isinstance(error, OSError) else error.__context__ or error
            common.fail(f"{self.folder / name} cannot be written ({cause}): what was saved before is whole")

    def restart_clock(self, step: int):
        """What the bar and the log say is of the steps since the last evaluation."""
        self.since, self.tokens, self.clock = step, 0, time.perf_counter()
        # On the device: once not finite, it stays so, and nobody waits for it at every step.
        self.loss_sum = torch.zeros((), device=self.context.device)

    def steps(self) -> Iterator[int]:
        steps, silent = range(self.start, self.total), self.context.rank > 0
        self.bar = tqdm(steps, initial=self.start, total=self.total, unit="step", disable=silent)
        self.model.train()
        self.asked = 0  # the signal that asks this process to stop
        before = [signal.signal(number, self.ask) for number in common.SIGNALS]
        try:
            yield from self.bar
        finally:
            for number, handler in zip(common.SIGNALS, before):
                signal.signal(number, handler)

    def ask(self, number: int, frame):
        """A step, or an evaluation, is finished and saved before the process ends; a second signal ends it at once."""
        if self.asked:
            common.stop(number)
        self.asked = number

    def stop_if_asked(self, done: int):
        """Ends all processes where one was asked to stop behind so many steps; torchrun tells all of them."""
        number = self.context.most(self.asked)
        if not number:
            return
        if done > self.saved:
            loss = self.context.sum(self.loss_sum).cpu() / self.context.world
            self.check_finite(float(loss), done)
            seconds = time.perf_counter() - self.clock
            part = {"since": self.since, "tokens": self.tokens, "seconds": seconds, "loss_sum": loss}
            self.save_checkpoint(done, part)
        self.context.barrier()  # torchrun ends the others when the first one ends
        self.bar.close()
        common.stop(number, f" at step {done}")

    def micros(self, step: int) -> Iterator[int]:
        """This process's micro-batches of a step. Dropout and draws depend on nothing but (seed, step, micro)."""
        for micro in self.mine:
            common.seed_all(self.config.seed, 1 + step, micro)
            if self.context.world > 1:  # gradients are exchanged with the last one (with --shard, each)
                self.forward.require_backward_grad_sync = micro == self.mine[-1]
            yield micro

    def whole(self) -> torch.nn.Module:
        """What to evaluate: the model, put together where it is split. All processes must ask together."""
        return parallel.whole(self.model)

    def backward(self, loss: torch.Tensor, shown: torch.Tensor, tokens: int):
        """The gradient of one micro-batch's share of the step; `shown`: the part of its loss to look at."""
        self.scaler.scale(loss / len(self.mine)).backward()
        self.loss_sum += shown.detach() / len(self.mine)
        self.tokens += tokens * self.context.world

    def update(self):
        """Moves the weights along the gradient of all micro-batches, clipped to a norm of grad_clip (0: as it is)."""
        parallel.reduce(self.model)
        self.scaler.unscale_(self.optimizer)
        if self.config.grad_clip:
            parallel.clip_grad_norm_(self.model, self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def end_step(self, step: int) -> bool:
        """Shows how the step went -> whether an evaluation is due. Ends a run whose loss is not finite."""
        done = step + 1
        due = done % self.every == 0 or done == self.total
        if due or done % self.config.log_every == 0:
            self.train_loss = float(self.context.sum(self.loss_sum)) / self.context.world / (done - self.since)
            self.check_finite(self.train_loss, done)
            self.speed = self.tokens / (time.perf_counter() - self.clock)
            shown = {"loss": f"{self.train_loss:.3f}", "tok_s": f"{self.speed:,.0f}"}
            if self.bits_per_byte:
                shown = {"bits_per_byte": f"{self.bits_per_byte * self.train_loss:.3f}", "tok_s": shown["tok_s"]}
            self.bar.set_postfix(shown)
        if due:
            self.seconds += time.perf_counter() - self.clock
        else:
            self.stop_if_asked(done)
        return due

    def check_finite(self, loss: float, step: int):
        if not math.isfinite(loss):
            self.bar.close()
            common.fail(
                f"the loss is not finite at step {step} or just before (not saved): change --learning_rate or --seed"
            )

    def save(self, step: int, scores: dict, loss: float, words: str):
        """Logs an evaluation and saves a checkpoint. Its loss must be finite, too: the last update may have broken
        what the loss before it did not show."""
        done, fastest = step + 1, common.peak_flops(self.context)
        self.check_finite(loss, done)
        speed = f"{self.speed:,.0f} tokens/s"
        if fastest:
            speed += f", MFU {3 * self.flops_per_token * self.speed / fastest:.1%} at full capacity"
        self.say(f"step {done}: train {self.train_loss:.4f}  {speed}  {words}")
        record = {"step": done, "train_loss": self.train_loss, "tokens_per_second": self.speed}
        self.log += json.dumps(record | scores) + "\n"
        self.write("metrics.jsonl", self.log)
        self.save_checkpoint(done)
        self.restart_clock(done)
        self.stop_if_asked(done)

    def save_checkpoint(self, done: int, part: dict | None = None):
        """What it takes to go on behind so many steps; part: what is known of those since the last evaluation."""
        state = self.state() | {"part": part or {}, "seconds": self.seconds, "log": self.log}
        state |= {"optimizer": parallel.optimizer_state(self.model, self.optimizer), "scaler": self.scaler.state_dict()}
        last = self.folder / "ckpt.pt"
        if self.context.rank == 0 and last.exists():
            with common.clear_errors():
                last.replace(self.folder / "ckpt.prev.pt")  # at every moment one of the two is whole
        self.save_model("ckpt.pt", done, **state)
        self.saved = done

    def save_model(self, name: str, step: int, **state):
        """A file with what it takes to make the model again, as it was after so many steps, and with `state`."""
        arguments = dataclasses.asdict(self.model.config)
        state |= {"step": step, "class": parallel.kind(self.model).__name__, "arguments": arguments}
        state |= {"constants": self.constants, "model": parallel.whole_state(self.model)}
        self.write(name, state | self.checksums)

    def finish(self, result: dict) -> dict:
        """Adds what every result has, and writes it."""
        result = {"name": self.name} | result
        result |= {"seconds": round(self.seconds, 1), "data": self.checksums["data"], "config": self.constants}
        result["machine"] = common.machine(self.context)
        result["sha256"] = digest(result)
        self.write("result.json", result)
        if self.context.rank == 0:
            self.lock.close()
        return result


# ---------------------------------------------------------------------------------------------------------------------
# Tables, and what a script's main does


class Table(NamedTuple):
    """Rows of runs beside the paper's numbers."""

    title: str
    labels: tuple[str, ...]  # headers of what is known before a run: the method, the paper's numbers
    rows: list[tuple[tuple[str, ...], dict]]  # the labels' cells, and what to change for the row

    def render(self, results: list[list[dict]], cells: Callable[[dict], dict]) -> str:
        """Markdown of the results of each row's seeds, none where it has not been run.

        cells: a result -> {header: (number or None, its format)}, of the same headers for all.
        """
        found = [list(map(cells, seeds)) for seeds in results]
        headers = list(next(itertools.chain(*found), {}))
        lines = []
        for (labels, _), seeds in zip(self.rows, found):
            line = list(labels)
            for header in headers:
                line.append(mean_cell([numbers[header] for numbers in seeds]))
            lines.append(line)
        return markdown_table([*self.labels, *headers], lines)


def mean_cell(numbers: list[tuple[float | None, str]]) -> str:
    """The mean over seeds, with the deviation where there are several; empty where there is none."""
    values = [value for value, _ in numbers if value is not None]
    if not values:
        return ""
    form = numbers[0][1]
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def cell(value: str | float | None) -> str:
    """A measurement in a table: two digits behind the point, none from 100 on; empty where there is none."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return "" if value is None else str(value)


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


def chosen(entries: dict[str, tuple], words: str, question: str) -> tuple:
    """-> what the first word of the command line names, and the options behind it. words: the help."""
    name, *options = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(words)
        sys.exit()
    if name not in entries:
        script = Path(sys.argv[0]).name
        raise ValueError(f"{question}: python {script} {' | '.join(entries)}, each with --help")
    return *entries[name], options


def start(Config: type, presets: dict[str, dict]):
    """-> the config of the command line, and where this process stands; or one clear line."""
    for number in common.SIGNALS:
        signal.signal(number, lambda number, frame: common.stop(number))
    with common.clear_errors():
        config = command_line(Config, presets, sys.argv[1:])
        return config, common.setup(config.device, config.dtype)


def refuse_rows(config, presets: dict[str, dict], changes: Iterable[dict]):
    """ValueError where the command line says what the rows of a table say themselves."""
    of_both = {"data", "moe_after", "preset", "steps"}  # tables take them from the command line
    changed = set().union(*changes) - of_both
    if "router" in changed:  # these would make another router of it
        changed |= {"score", "select"}
    if "expert_size" in changed:  # these follow from it, so that all rows have equal FLOPs
        changed |= {"num_experts", "top_k", "capacity_factor"}
    given = said(config, presets).keys() & changed
    if given:
        raise ValueError(f"its rows have a --{min(given)} of their own: leave it out")


def carry_out(config, presets: dict, context, tables: dict, train: Callable, report: Callable, cells: Callable):
    """A table, or one run a seed and its report. train(config, context) -> result; report(config, result) -> text."""
    table = Table(config.preset, ("run",), [(("",), {})])  # one row that changes nothing
    with common.clear_errors():
        if config.table:
            if config.table not in tables:
                raise ValueError(f"table must be one of {', '.join(map(str, tables))}, not {config.table}")
            table = tables[config.table](config)
            refuse_rows(config, presets, [change for _, change in table.rows])
        configs = [seeds_of(config, change) for _, change in table.rows]
        refuse_unread(config, presets, set.intersection(*(one.unread() for seeds in configs for one in seeds)))
    results = []
    try:
        for seeds in configs:
            results.append([train(one, context) for one in seeds])
    except RuntimeError as error:
        if context.world == 1 or not re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
            raise
        common.fail(f"another process ended ({str(error).splitlines()[0]:.150}); the same command goes on")
    if context.rank > 0:
        return
    if not config.table:
        for result in results[0]:
            print(report(config, result))
    if config.table or config.seeds > 1:
        print(f"\n{table.title}, preset {config.preset}, seeds: {config.seeds}\n\n{table.render(results, cells)}")
