"""One training run: its folder, where it goes on, its bar, its checkpoints.

A run is kept in out_dir/NAME: config.json, metrics.jsonl (a line an evaluation), ckpt.pt and the one before it,
result.json. The same command goes on from the newest sound checkpoint and ends as if it had never been stopped.
"""

import json
import math
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from engine import parallel
from engine.config import identity, run_name
from engine.device import Context, clear_errors, fail, machine, peak_flops, show, warn


def read_json(file: Path) -> dict:
    """What a file holds; {} where there is none. Raises ValueError where it holds no JSON object."""
    if not file.exists():
        return {}
    try:
        return dict(**json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON, or no object ({error}): delete it or restore it") from None


def write(file: Path, content: dict | str | bytes):
    """Weights, JSON, text or bytes; the file takes its name when it is whole and on the disk. Or one clear line."""
    part = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # two that evaluate may write the same file
    if file.suffix == ".json":
        content = json.dumps(content, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as f:
            if file.suffix == ".pt":
                torch.save(content, f)
            else:
                f.write(content if isinstance(content, bytes) else content.encode())
            f.flush()
            os.fsync(f.fileno())
        part.replace(file)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):  # where the disk is gone for good
            part.unlink()
        cause = error if isinstance(error, OSError) else error.__context__ or error  # torch hides the reason
        fail(f"{file} cannot be written ({cause}): what was saved before is whole")


def check_zip(file: Path):
    """Raises ValueError where a file is damaged, which torch may miss, or larger inside than torch makes it."""
    with zipfile.ZipFile(file) as z:
        records = z.infolist()
        if any(record.compress_type for record in records) or sum(r.file_size for r in records) > file.stat().st_size:
            raise ValueError("it is compressed, as torch's files never are")
        if z.testzip():
            raise ValueError("a checksum differs")


HOLDS = dict(model=dict, step=int, constants=dict, identity=dict, vocab_size=int) | {"class": str}  # in a checkpoint


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError where the file is damaged, or holds something else."""
    try:
        check_zip(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # processes of a node share it
        if not isinstance(state, dict) or any(not isinstance(state.get(name), kind) for name, kind in HOLDS.items()):
            raise ValueError("it holds something else")
        return state
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"checkpoint {file} is corrupt ({error})") from None


def newest(folder: Path, names: tuple[str, ...] = ("ckpt.pt", "ckpt.prev.pt")) -> tuple[str, dict]:
    """-> name and content of the first of these checkpoints that is sound, on the CPU; "" and {} if there are none.

    Raises ValueError if there are some, and none is sound.
    """
    damaged = ""
    for name in names:
        if not (folder / name).exists():
            continue
        try:
            state = load_checkpoint(folder / name)
        except ValueError as error:
            damaged += f"{error}; "
            continue
        if damaged:
            warn(f"{damaged}using {name}")
        return name, state
    if damaged:
        raise ValueError(f"{damaged}no other is left: training with --resume false starts again")
    return "", {}


SIGNALS = signal.SIGTERM, signal.SIGINT  # the second is Ctrl-C


def stop(number: int, where: str = ""):
    """Ends the process with one line and the exit code of this signal, 143 or 130."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        show(f"stopped{where}; the same command goes on", sys.stderr)
    sys.exit(128 + number)


def tensorboard(folder: Path, step: int):
    """What writes for TensorBoard; of a run that goes on, without what it will write again."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs one more library: pip install tensorboard") from None
    return SummaryWriter(folder / "tensorboard", purge_step=step + 1)


def numbers(found: dict | list, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number inside a record, by its path such as layers/0/served."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        if isinstance(value, dict | list):
            yield from numbers(value, f"{name}{key}/")
        elif isinstance(value, int | float):
            yield f"{name}{key}", value


class Kept(dict):
    """A result that was read again."""


class Window:
    """The steps since the last evaluation, of which the bar and the log speak."""

    def __init__(self, device, since: int, tokens: int = 0, seconds: float = 0.0, loss_sum: float = 0.0):
        self.since, self.tokens, self.clock = since, tokens, time.perf_counter() - seconds
        # On the device: once not finite, it stays so, and nobody waits for it at every step.
        self.loss_sum = torch.tensor(loss_sum, device=device)

    def seconds(self) -> float:
        return time.perf_counter() - self.clock

    def state(self, context: Context) -> dict:
        """What makes it again on any number of processes, each of which then has the mean of their sums."""
        loss_sum = float(context.sum(self.loss_sum)) / context.world
        return {"since": self.since, "tokens": self.tokens, "seconds": self.seconds(), "loss_sum": loss_sum}


# What --resume false deletes.
MADE = ["ckpt.pt", "ckpt.prev.pt", "model.pt", "metrics.jsonl", "result.json", "eval-*.json"]
MADE += ["*/test-*.tsv", "*/test-*.json"]


class Run:
    """The folder of one training run, and what surrounds its steps.

    `result`: the run is finished, and this is what it found; else empty. `kept`: what a script wants in checkpoints
    beside model and optimizer, restored when the run goes on; a function in it is called when one is saved. `total`
    steps, with an evaluation `every` so many, are the config's unless they are given. Only rank 0 writes. Raises
    ValueError where the micro-batches of a step cannot be dealt evenly, or the folder holds another run.
    """

    def __init__(self, config, presets: dict[str, dict], context: Context, *data, total=None, every=None):
        self.config, self.context = config, context
        self.total, self.every = total or config.steps, every or config.eval_every
        self.name = run_name(config, presets)
        self.folder = Path(config.out_dir, self.name)
        micros = data[0].micros_per_step
        if micros % context.world:
            batch = "batch_tokens" if hasattr(config, "batch_tokens") else "batch_size"
            raise ValueError(
                f"{micros} micro-batches a step cannot be dealt to {context.world} processes: change {batch}"
            )
        parallel.check(config, context)
        self.micros = range(context.rank, micros, context.world)  # this process's
        self.tokenizer = data[0].tokenizer
        self.identity = identity(config)
        self.identity["data_checksum"] = "+".join(source.checksum for source in data)
        self.identity["tokenizer_checksum"] = self.tokenizer.sha256
        self.result, self.checkpoint, self.checkpoint_name = {}, {}, ""
        self.agree("data", self.identity)
        before = read_json(self.folder / "config.json")
        if not config.resume:  # it may be trained again on data that have changed
            before = {name: value for name, value in before.items() if not name.endswith("_checksum")}
        self.refuse_other(before, "config.json")
        if config.resume:
            self.find()
        self.agree(f"files in {self.folder}", [bool(self.result), self.checkpoint.get("step")])
        self.kept = self.checkpoint.get("kept", {})

    def agree(self, what: str, seen: dict | list):
        if len(set(self.context.gather(json.dumps(seen)))) > 1:
            raise ValueError(f"the processes see different {what}: put what they read on a shared disk")

    def find(self):
        """Looks in the folder for a result, or else for the newest sound checkpoint."""
        self.result = Kept(read_json(self.folder / "result.json"))
        self.refuse_other(self.result.get("config", {}), "result.json")
        if self.result:
            self.context.say(f"{self.name}: finished before, in {self.folder} (--resume false trains it again)")
        else:
            self.checkpoint_name, self.checkpoint = newest(self.folder)
            self.refuse_other(self.checkpoint.get("identity", {}), self.checkpoint_name)
            step = self.checkpoint.get("step", 0)
            if type(step) is not int or not 0 <= step <= self.total:
                what = f"is of step {step!s:.50}, and the last is {self.total}: delete it"
                raise ValueError(f"{self.folder / self.checkpoint_name} {what}")

    def refuse_other(self, found: dict, name: str):
        """The one place that decides whether a file belongs to this run: by its constants and its data's checksums."""
        if not isinstance(found, dict):
            raise ValueError(f"{self.folder / name} does not say of which run it is: delete it")
        for constant, ours in self.identity.items():
            theirs = found.get(constant, ours)
            if theirs != ours:
                other = f"{constant} ({theirs!s:.100} there, {ours!s:.100} now)"
                raise ValueError(f"{self.folder / name} is of a run with another {other}: choose another --out_dir")

    def resume(self, model, optimizer, flops_per_token: float, bits_per_byte: float | None = None):
        """Makes the folder, and puts everything where the checkpoint left it, or at the start.

        flops_per_token: forward, for MFU. bits_per_byte: those of a loss of 1, if the bar is to show them.
        """
        self.model, self.optimizer = model, optimizer
        self.flops_per_token, self.bits_per_byte = flops_per_token, bits_per_byte
        state, self.checkpoint = self.checkpoint, {}
        self.start = state.get("step", 0)
        self.seconds, self.log = 0.0, ""  # of metrics.jsonl
        self.window, self.board = Window(self.context.device, 0), None
        try:
            if state:
                parallel.load_model(model, state["model"])
                parallel.load_optimizer(model, optimizer, state["optimizer"])
                self.seconds, self.log = float(state["seconds"]), "" + state["log"]
                self.window = Window(self.context.device, **state["window"])
                self.context.say(f"{self.name}: goes on from step {self.start}")
        except Exception as error:  # what is missing, or of another shape, shows itself in a dozen ways
            file = self.folder / self.checkpoint_name
            raise ValueError(f"{file} is not a whole checkpoint of this run ({error!s:.200}): delete it") from None
        if self.context.rank == 0:
            self.make_folder()

    def make_folder(self):
        """A run that starts again deletes what runs make. Raises ValueError where another process trains here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / "lock")
        try:
            self.lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(f"another process is training in {self.folder}: wait for it, or end it") from None
        except (OSError, NotImplementedError) as error:  # which do not name it
            raise ValueError(f"{self.folder / 'lock'} cannot be locked ({error}): choose another --out_dir") from None
        made = [] if self.config.resume else [file for name in MADE for file in self.folder.glob(name)]
        if made and not (self.folder / "config.json").exists():
            raise ValueError(f"{made[0]} is of no run, which has a config.json: delete it, or choose another --out_dir")
        for file in [*made, *self.folder.rglob("[!e]*.[0-9]*.tmp")]:  # these of a killed run, not of an evaluation
            file.unlink()
        if self.checkpoint_name == "ckpt.prev.pt":  # ckpt.pt is damaged or gone, and must not take this one's place
            (self.folder / "ckpt.prev.pt").replace(self.folder / "ckpt.pt")
        self.write("config.json", self.identity)
        self.write(self.tokenizer.filename, self.tokenizer.file)
        self.board = tensorboard(self.folder, self.start) if self.config.tensorboard else None
        if self.log:
            self.write("metrics.jsonl", self.log)  # without the lines of steps that will be taken again

    def write(self, name: str, content: dict | str | bytes):
        """A file of the folder, from rank 0 alone."""
        if self.context.rank == 0:
            write(self.folder / name, content)

    # -- the steps

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, under a bar on a terminal. Behind each, a process that is asked to stop does so."""
        self.asked = 0  # the signal that asks this process to stop
        steps, silent = range(self.start, self.total), self.context.rank > 0
        self.bar = tqdm(steps, initial=self.start, total=self.total, unit="step", disable=silent or None)
        self.model.train()
        before = [signal.signal(number, self.ask) for number in SIGNALS]
        try:
            for step in self.bar:
                yield step
                if (step + 1) % self.config.log_every == 0:
                    self.look(step + 1)
                self.stop_if_asked(step + 1)
        finally:
            for number, handler in zip(SIGNALS, before):
                signal.signal(number, handler)

    def ask(self, number: int, frame):
        """The step, or the evaluation, is finished and saved before the process ends; a second signal ends it."""
        if self.asked:
            stop(number)
        self.asked = number

    def add(self, loss: torch.Tensor, tokens: int):
        """Counts one micro-batch of this process; `loss` is the part of its loss that the bar shows."""
        self.window.loss_sum += loss.detach() / len(self.micros)
        self.window.tokens += tokens * self.context.world

    def look(self, done: int):
        """Reads the loss, shows it, and ends a run whose loss is not finite."""
        if done == self.window.since:  # it was looked at when it was saved
            return
        window = self.window.state(self.context)
        self.train_loss = window["loss_sum"] / (done - self.window.since)
        self.check_finite(self.train_loss, done)
        self.speed = self.window.tokens / window["seconds"]
        words = f"loss {self.train_loss:.3f}"
        if self.bits_per_byte:
            words = f"bits_per_byte {self.bits_per_byte * self.train_loss:.3f}"
        words += f", {self.speed:,.0f} tok/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(words)
        elif self.context.rank == 0:  # a line in a log, which a bar would fill
            show(f"step {done}/{self.total}: {words}", sys.stderr)

    def check_finite(self, loss: float, done: int):
        if not math.isfinite(loss):
            self.bar.close()
            fail(f"the loss is not finite at step {done} or just before (not saved): change --learning_rate or --seed")

    def due(self, done: int) -> bool:
        """Whether an evaluation is due behind so many steps; if so, the training loss is looked at first."""
        if done % self.every and done != self.total:
            return False
        self.look(done)
        self.seconds += self.window.seconds()
        return True

    def save(self, done: int, scores: dict, loss: float, words: str):
        """Logs an evaluation and saves a checkpoint, unless the last update broke the weights, which its loss shows."""
        self.check_finite(loss, done)
        speed, fastest = f"{self.speed:,.0f} tokens/s", peak_flops(self.context)
        if fastest:
            speed += f", MFU {3 * self.flops_per_token * self.speed / fastest:.1%} at full capacity"
        self.context.say(f"step {done}: train {self.train_loss:.4f}  {speed}  {words}")
        record = {"step": done, "train_loss": self.train_loss, "tokens_per_second": self.speed}
        self.log += json.dumps(record | scores) + "\n"
        self.write("metrics.jsonl", self.log)
        for name, value in numbers(record | scores):
            if self.board:
                self.board.add_scalar(name, value, done)
        self.window = Window(self.context.device, done)
        self.save_checkpoint(done)
        self.window.clock = time.perf_counter()  # writing a file is not training

    def save_checkpoint(self, done: int):
        """What it takes to go on behind so many steps. At every moment one of the two files is whole."""
        window = self.window.state(self.context)
        self.check_finite(window["loss_sum"], done)
        state = {
            "optimizer": parallel.optimizer_state(self.model, self.optimizer),
            "seconds": self.seconds,
            "log": self.log,
            "window": window,
            "kept": {name: value() if callable(value) else value for name, value in self.kept.items()},
        }
        last = self.folder / "ckpt.pt"
        if self.context.rank == 0 and last.exists():
            with clear_errors():
                last.replace(self.folder / "ckpt.prev.pt")
        self.save_model("ckpt.pt", self.model, done, **state)

    def save_model(self, name: str, model, step: int, **state):
        """A file with what it takes to make the model again, and with `state`."""
        state |= {"step": step, "class": parallel.kind(model).__name__, "identity": self.identity}
        state |= {"constants": vars(model.config), "vocab_size": model.vocab_size}
        self.write(name, state | {"model": parallel.whole_state(model)})

    def stop_if_asked(self, done: int):
        """Ends all processes behind the same step where one was asked to stop; torchrun asks all of them."""
        number = self.context.most(self.asked)
        if not number:
            return
        if done != self.window.since:  # an evaluation has just saved it
            self.save_checkpoint(done)
        self.context.barrier()  # torchrun ends the others when the first one ends
        self.bar.close()
        stop(number, f" at step {done}")

    def finish(self, result: dict) -> dict:
        """Adds what every result has, and writes it."""
        result = {"name": self.name} | result | {"seconds": round(self.seconds, 1)}
        result |= {"config": self.identity, "machine": machine(self.context)}
        self.write("result.json", result)
        if self.context.rank == 0:
            self.lock.release()
        return json.loads(json.dumps(result))  # as one that is read again
