"""One training run: its folder, progress bar and checkpoints.

A run is a folder in out_dir: config.json, metrics.jsonl (a line per evaluation), ckpt.pt and ckpt.prev.pt, result.json.
Its constants identify it, whether they come from the command line, a preset or the script: an edited default trains a
separate run. The same command resumes from the newest intact checkpoint, and gives the result of an uninterrupted run.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tqdm import tqdm

from engine import pretrained
from engine.config import BATCHES, identity
from engine.device import Context, fail, show, warn
from engine.files import MADE, code_of, differing, folder_of, newest, read_json, to_json, write
from engine.parallel import compiles
from routers import RouterError

SIGNALS = [signal.SIGTERM, signal.SIGINT]  # the second is Ctrl-C
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
    SIGNALS.append(signal.SIGHUP)  # a terminal or a connection is closed


def stop(number: int, where: str = "", hint: str = "run the same command to resume"):
    """Ends the process with one line and the signal's exit code, such as 143."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        show(f"stopped{where}; {hint}", sys.stderr)
    sys.exit(128 + number)


class Run:
    """The folder of one training run, and everything around its steps. Only rank 0 writes.

    `result`: of a finished run, else empty. `extra`: what a script saves in checkpoints besides model and optimizer.
    `total`: number of steps, and `every`: steps between evaluations; default: the config's. Raises ValueError if the
    micro-batches of a step do not divide evenly over processes, or if a file in the folder belongs to another run.
    """

    def __init__(self, config, presets: dict, context: Context, *data, total=None, every=None):
        self.config, self.presets, self.context = config, presets, context
        self.total, self.every = total or config.steps, every or config.eval_every
        self.tokenizer = data[0].tokenizer
        self.identity = identity(config)
        self.identity["data_checksum"] = "+".join(source.checksum for source in data)
        self.identity["tokenizer_checksum"] = self.tokenizer.sha256
        if getattr(config, "init_from", None) and Path(config.init_from).exists():
            weights = pretrained.read(Path(config.init_from)).weights.values()
            checksums = [zlib.crc32(x.flatten().view(torch.uint8).numpy()) for x in weights]
            self.identity["init_from_checksum"] = zlib.crc32(repr(checksums).encode())
        self.precision = str(context.dtype).removeprefix("torch.")  # --dtype auto depends on the machine
        self.code = code_of(config)
        micros, world = data[0].micros_per_step, context.world
        if micros % world:
            batch, micro = next(names for names in BATCHES if hasattr(config, names[0]))
            fits = math.ceil(micros / world) * world * getattr(config, micro)
            hint = f"pass --{batch} {fits}, or a smaller --{micro}"
            raise ValueError(f"{micros} micro-batches a step do not divide evenly over {world} processes: {hint}")
        self.micros = range(context.rank, micros, world)  # of this process
        self.folder, self.reason = context.gather(folder_of(config, presets, self.identity))[0]
        self.name = self.folder.name
        self.find()
        self.extra = self.checkpoint.get("extra", {})

    def find(self):
        """Reads the result, or else the newest intact checkpoint. Raises ValueError if it belongs to another run."""
        self.result, self.checkpoint, self.checkpoint_name = {}, {}, ""
        if self.config.resume:
            self.result = read_json(self.folder / "result.json")
            if not self.result:
                self.checkpoint_name, self.checkpoint = newest(self.folder)
        for name in differing(self.result.get("config") or self.checkpoint.get("identity"), self.identity):
            file = self.folder / (self.checkpoint_name or "result.json")
            raise ValueError(f"{file} is of a run with another {name}: delete it")
        state = [self.name, self.identity, self.precision, bool(self.result), self.checkpoint.get("step")]
        if len(set(self.context.gather(json.dumps(state)))) > 1:
            where = f"files in {self.folder}: use a shared disk, and pass --dtype"
            raise ValueError(f"the processes see different data, precision or {where}")
        old_code = (self.result or self.checkpoint).get("code", {})
        hint = "" if getattr(self.config, "eval_only", False) else " (--resume false trains it again)"
        if self.result:
            self.result["name"] = self.name  # the folder may have been renamed
            if hint:
                self.context.say(f"{self.name}: finished before, in {self.folder}{hint}")
        edited = [*differing(old_code, self.code)]
        if edited:
            files = ", ".join(name.partition(" (")[0] for name in edited)
            warn(f"{files} changed since {self.name} was trained{hint}")
        for name in edited:
            self.code[name] += f", before {old_code[name]}"  # trained by both versions

    def resume(self, model, optimizer, flops_per_token: float, loss_in_words="loss {:.4f}".format):
        """Creates the folder, and restores model, optimizer and log from the checkpoint. flops_per_token: forward."""
        self.model, self.optimizer, self.flops_per_token = model, optimizer, flops_per_token
        self.loss_in_words = loss_in_words
        state, self.checkpoint = self.checkpoint, {}
        self.start, self.seconds, self.log = state.get("step", 0), 0.0, ""  # log: the content of metrics.jsonl
        self.open_window()
        if state:
            try:
                self.extra = state["extra"]
                self.seconds, self.log = float(state["seconds"]), "" + state["log"]  # TypeError if it is not text
                self.open_window(**state["window"])
                model.load_state_dict(state["model"])
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
            except Exception as error:  # missing keys and wrong shapes raise many kinds of errors
                file = self.folder / self.checkpoint_name
                problem = f"{file} is not a complete checkpoint of this run, or is from an older version"
                raise ValueError(f"{problem} ({error!s:.200}): delete it") from None
            self.context.say(f"{self.name}: goes on from step {self.start}")
            before = state.get("precision", self.precision)
            if before != self.precision:
                warn(f"it began in {before}, and resumes in {self.precision}: pass --dtype to choose")
        if self.context.rank == 0:
            self.make_folder()

    def make_folder(self):
        """Locks the folder; --resume false deletes the old run. Raises ValueError if another process trains here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Held until this object is deleted, even if by another thread.
        self.lock = FileLock(self.folder / "lock", thread_local=False)
        try:
            self.lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(f"another process is training in {self.folder}: wait for it, or stop it") from None
        except (OSError, NotImplementedError) as error:
            raise ValueError(f"{self.folder} cannot be locked ({error}): choose another --out_dir") from None
        folder, _ = folder_of(self.config, self.presets, self.identity)
        if folder != self.folder:  # two runs of the same name started at once
            raise ValueError(f"another run has just taken {self.folder}: run the command again")
        self.write("config.json", self.identity)
        if self.reason:
            self.context.say(f"{self.name}: a separate run, as {self.reason}")
        for name in MADE if not self.config.resume else ():
            for file in self.folder.glob(name):
                file.unlink()
        if self.checkpoint_name == "ckpt.prev.pt":  # ckpt.pt is damaged or missing
            (self.folder / "ckpt.prev.pt").replace(self.folder / "ckpt.pt")
        self.write(self.tokenizer.filename, self.tokenizer.file)
        if self.log:
            self.write("metrics.jsonl", self.log)  # without lines of steps that will be repeated

    def write(self, name: str, content: dict | str | bytes):
        """Writes a file in the folder, on rank 0 only."""
        if self.context.rank == 0:
            write(self.folder / name, content)

    # -- the steps

    def steps(self) -> Iterator[int]:
        """Yields the steps, with a progress bar on a terminal. After each step, a signalled process stops."""
        self.received = 0  # the signal sent to this process, 0 for none
        steps, silent = range(self.start, self.total), self.context.rank > 0
        self.bar = tqdm(steps, initial=self.start, total=self.total, unit="step", disable=silent or None)
        self.model.train()
        compiled = compiles(self.config, self.context)
        if compiled:
            self.context.say("compiling: the first steps take up to a few minutes")
        in_main = threading.current_thread() is threading.main_thread()  # only there, Python can handle signals
        before = {number: signal.signal(number, self.on_signal) for number in SIGNALS if in_main}
        try:
            for step in self.bar:
                # A kill during an evaluation loses only one step.
                if self.evaluates_after(step + 1) and step not in (self.start, self.since):  # already saved
                    self.save_checkpoint(step)
                if compiled and step == self.start + 2:  # tokens/s does not count the steps that compiled
                    self.seconds += time.perf_counter() - self.clock
                    self.clock, self.tokens = time.perf_counter(), 0
                yield step
                if (step + 1) % self.config.log_every == 0:
                    self.show_loss(step + 1)
                self.stop_if_signalled(step + 1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: not installed by Python

    def steps_with(self, prepare: Callable) -> Iterator[tuple]:
        """Yields each step and prepare(step), which a thread computes a step ahead, so that a GPU does not wait."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(prepare, self.start)
            for step in self.steps():
                prepared = future.result()
                future = thread.submit(prepare, min(step + 1, self.total - 1))
                yield step, prepared

    def on_signal(self, number: int, frame):
        """The process finishes and saves the step and its evaluation, then exits; a second signal ends it at once."""
        if self.received:
            stop(number)
        self.received = number

    def stop_if_signalled(self, done: int):
        """If one process was signalled, all stop after the same step; torchrun signals all of them."""
        if not self.context.sum(torch.tensor(self.received)):
            return
        if done != self.since:  # else the evaluation has just saved it
            self.save_checkpoint(done)
        self.context.barrier()  # torchrun kills the others when the first one exits
        self.bar.close()
        stop(self.received or signal.SIGTERM, f" at step {done}")

    def open_window(self, since=0, tokens=0, seconds=0.0, loss_sum=0.0):
        """Starts the averages since the last evaluation, which the progress bar and the log show."""
        self.since, self.tokens = since, tokens
        self.clock = time.perf_counter() - seconds
        # A sum on the device avoids a sync per step; once it is not finite, it stays so.
        dtype = torch.promote_types(self.context.dtype, torch.float32)
        self.loss_sum = torch.tensor(loss_sum, dtype=dtype, device=self.context.device)

    def window(self) -> dict:
        """Arguments of `open_window` to continue on any number of processes, with the mean of their loss sums."""
        loss_sum = float(self.context.sum(self.loss_sum)) / self.context.world
        seconds = time.perf_counter() - self.clock
        return {"since": self.since, "tokens": self.tokens, "seconds": seconds, "loss_sum": loss_sum}

    def add(self, loss: torch.Tensor, tokens: int):
        """Counts one micro-batch of this process; `loss`: its share of the step's loss."""
        self.loss_sum += loss.detach()
        self.tokens += tokens * self.context.world

    def show_loss(self, done: int):
        """Shows the mean loss; ends the run if that is not finite."""
        if done == self.since:  # shown when it was saved
            return
        window = self.window()
        self.train_loss = window["loss_sum"] / (done - self.since)
        self.check_finite(self.train_loss, done)
        self.speed = self.tokens / window["seconds"]
        words = f"{self.loss_in_words(self.train_loss)}, {self.speed:,.0f} tok/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(words)
        elif self.context.rank == 0:  # no terminal: a line in a log
            show(f"step {done}/{self.total}: {words}", sys.stderr)

    def check_finite(self, loss: float, done: int):
        if not math.isfinite(loss):
            self.bar.close()
            fail(f"the loss is not finite at step {done} or just before (not saved): change --learning_rate or --seed")

    def due(self, done: int) -> bool:
        """Whether an evaluation follows this step; if so, shows the training loss first."""
        if not self.evaluates_after(done):
            return False
        self.show_loss(done)
        self.seconds += time.perf_counter() - self.clock
        return True

    def evaluates_after(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total

    def save(self, done: int, scores: dict, words: str, loss: float = 0.0):
        """Logs an evaluation and saves a checkpoint; ends the run if the loss is not finite."""
        self.check_finite(loss, done)
        speed = f"{self.speed:,.0f} tokens/s"
        if self.context.device.type == "cuda":
            speed += f", {3e-12 * self.flops_per_token * self.speed:,.1f} TFLOP/s at full capacity"
        self.context.say(f"step {done}: train {self.loss_in_words(self.train_loss)}  {speed}  {words}")
        record = {"step": done, "train_loss": self.train_loss, "tokens_per_second": self.speed} | scores
        self.log += to_json(record, indent=None) + "\n"
        self.write("metrics.jsonl", self.log)
        self.open_window(done)
        self.save_checkpoint(done)

    def save_checkpoint(self, done: int):
        """Saves what it takes to resume, or ends a run whose weights are not finite. One file is always intact."""
        begun, window = time.perf_counter(), self.window()
        self.check_finite(window["loss_sum"] + float(sum(p.detach().sum() for p in self.model.parameters())), done)
        self.check_buffers()
        state = {"seconds": self.seconds, "log": self.log, "window": window, "extra": self.extra}
        state |= {"precision": self.precision, "code": self.code}
        state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        self.save_model("ckpt.pt", self.model, done, **state)
        self.clock += time.perf_counter() - begun  # writing a file is not training

    def check_buffers(self):
        """Raises RouterError if processes differ in a buffer: a checkpoint has that of rank 0."""
        buffers = {name: zlib.crc32(x.cpu().double().numpy().tobytes()) for name, x in self.model.named_buffers()}
        for others in self.context.gather(buffers):
            for name in differing(others, buffers):
                problem = f"{name} of router {self.model.config.router} differs between processes"
                raise RouterError(f"{problem}: count what it depends on with `tally` and `count`")

    def save_model(self, name: str, model, step: int, **state):
        """Saves what it takes to rebuild the model, and `state`."""
        state |= {"class": type(model).__name__, "step": step, "identity": self.identity}
        state |= {"constants": vars(model.config), "vocab_size": model.vocab_size}
        self.write(name, state | {"model": model.state_dict()})

    def finish(self, result: dict) -> dict:
        """Adds the fields that all results share, and writes result.json."""
        result = {"name": self.name} | result
        result |= {"seconds": round(self.seconds, 1), "config": self.identity, "code": self.code}
        result |= {"machine": self.context.machine}
        self.write("result.json", result)
        return json.loads(json.dumps(result))  # as if read from the file
