"""One training run: where it goes on, its bar, its checkpoints.

A run is kept in a folder of out_dir: config.json, metrics.jsonl (a line an evaluation), ckpt.pt and the one before it,
result.json. It is found by its constants, wherever they come from: the command line, a preset, or the script itself. So
an edited constant makes a run of its own. The same command goes on from the newest sound checkpoint and ends as if it
had never been stopped.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tqdm import tqdm

from engine.config import identity
from engine.device import Context, fail, show, warn
from engine.files import MADE, code_of, folder_of, newest, others, read_json, to_json, write

SIGNALS = signal.SIGTERM, signal.SIGINT  # the second is Ctrl-C


def stop(number: int, where: str = ""):
    """Ends the process with one line and the exit code of this signal, 143 or 130."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        show(f"stopped{where}; the same command goes on", sys.stderr)
    sys.exit(128 + number)


class Run:
    """The folder of one training run, and what surrounds its steps.

    `result`: the run is finished, and this is what it found; else empty. `kept`: what a script wants in checkpoints
    beside model and optimizer, restored when the run goes on. `total` steps, with an evaluation `every` so many, are
    the config's unless they are given. Only rank 0 writes. Raises ValueError where the micro-batches of a step cannot
    be dealt evenly, or a file in its folder is of another run.
    """

    def __init__(self, config, presets: dict, context: Context, *data, total=None, every=None):
        self.config, self.presets, self.context = config, presets, context
        self.total, self.every = total or config.steps, every or config.eval_every
        self.tokenizer = data[0].tokenizer
        self.identity = identity(config)
        self.identity["data_checksum"] = "+".join(source.checksum for source in data)
        self.identity["tokenizer_checksum"] = self.tokenizer.sha256
        self.precision = str(context.dtype).removeprefix("torch.")  # what --dtype auto is on this machine
        self.code = code_of(config)
        micros, world = data[0].micros_per_step, context.world
        if micros % world:
            raise ValueError(f"{micros} micro-batches a step cannot be dealt to {world} processes: change them")
        self.micros = range(context.rank, micros, world)  # this process's
        self.folder, self.reason = context.gather(folder_of(config, presets, self.identity))[0]
        self.name = self.folder.name
        self.find()
        self.extra = self.checkpoint.get("extra", {})

    def find(self):
        """Looks in the folder for a result, or else for the newest sound checkpoint. Both must be this run's."""
        self.result, self.checkpoint, self.checkpoint_name = {}, {}, ""
        if self.config.resume:
            self.result = read_json(self.folder / "result.json")
            if not self.result:
                self.checkpoint_name, self.checkpoint = newest(self.folder)
        theirs = self.result.get("config") or self.checkpoint.get("identity")
        for other in others(theirs, self.identity):
            file = self.folder / (self.checkpoint_name or "result.json")
            raise ValueError(f"{file} is of a run with another {other}: delete it")
        seen = [self.name, self.identity, self.precision, bool(self.result), self.checkpoint.get("step")]
        if len(set(self.context.gather(json.dumps(seen)))) > 1:
            where = f"files in {self.folder}: use a shared disk, and pass --dtype"
            raise ValueError(f"the processes see different data, precision or {where}")
        before = (self.result or self.checkpoint).get("code", {})
        tests_alone = getattr(self.config, "eval_only", False)
        if self.result:
            self.result["name"] = self.name  # the folder may have been renamed
            if not tests_alone:
                self.context.say(f"{self.name}: finished before, in {self.folder} (--resume false trains it again)")
        edited = [*others(before, self.code)]
        if edited:
            words = f"{', '.join(name.partition(' (')[0] for name in edited)} changed since {self.name} was trained"
            what = "numbers are" if self.result else "weights are"
            hint = "" if tests_alone else "; --resume false trains it anew, in place of this one"
            warn(f"{words}: its {what} of the code before{hint}")
        for name in edited:
            self.code[name] += f", before {before[name]}"  # what goes on is of both

    def resume(self, model, optimizer, flops_per_token: float, loss_in_words="loss {:.4f}".format):
        """Makes the folder, and puts everything where the checkpoint left it.

        flops_per_token: forward; loss_in_words: how the training loss is told, best in the evaluation's unit.
        """
        self.model, self.optimizer, self.flops_per_token = model, optimizer, flops_per_token
        self.loss_in_words = loss_in_words
        state, self.checkpoint = self.checkpoint, {}
        self.start, self.seconds, self.log = state.get("step", 0), 0.0, ""  # the last is what metrics.jsonl holds
        self.open_window()
        if state:
            try:
                self.seconds, self.log = float(state["seconds"]), "" + state["log"]  # TypeError if it is no text
                self.open_window(**state["window"])
                model.load_state_dict(state["model"])
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
            except Exception as error:  # what is missing, or of another shape, shows itself in a dozen ways
                file = self.folder / self.checkpoint_name
                raise ValueError(f"{file} is not a whole checkpoint of this run ({error!s:.200}): delete it") from None
            self.context.say(f"{self.name}: goes on from step {self.start}")
            before = state.get("precision", self.precision)
            if before != self.precision:
                warn(f"it began in {before}, and goes on in {self.precision}: --dtype decides")
        if self.context.rank == 0:
            self.make_folder()

    def make_folder(self):
        """A run that starts again deletes what runs make. Raises ValueError where another process trains here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Held as long as there is this object, whichever thread then drops it.
        self.lock = FileLock(self.folder / "lock", thread_local=False)
        try:
            self.lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(f"another process is training in {self.folder}: wait for it, or end it") from None
        except (OSError, NotImplementedError) as error:
            raise ValueError(f"{self.folder} cannot be locked ({error}): choose another --out_dir") from None
        found, _ = folder_of(self.config, self.presets, self.identity)
        if found != self.folder:  # as where a constant was edited while the first run was being prepared
            raise ValueError(f"another run has taken {self.folder} meanwhile: give the command again")
        self.write("config.json", self.identity)
        if self.reason:
            self.context.say(f"{self.name}: a run of its own, as {self.reason}")
        for name in MADE if not self.config.resume else ():
            for file in self.folder.glob(name):
                file.unlink()
        if self.checkpoint_name == "ckpt.prev.pt":  # ckpt.pt is damaged or gone, and must not take this one's place
            (self.folder / "ckpt.prev.pt").replace(self.folder / "ckpt.pt")
        self.write(self.tokenizer.filename, self.tokenizer.file)
        if self.log:
            self.write("metrics.jsonl", self.log)  # without the lines of steps that will be taken again

    def write(self, name: str, content: dict | str | bytes):
        """A file of the folder, from rank 0 alone."""
        if self.context.rank == 0:
            write(self.folder / name, content)

    # -- the steps

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, under a bar on a terminal. Behind each, a process that is asked to stop does so.

        A checkpoint is saved before each step that an evaluation follows, so that a kill in it loses this step alone.
        """
        self.asked = 0  # the signal that asks this process to stop
        steps, silent = range(self.start, self.total), self.context.rank > 0
        self.bar = tqdm(steps, initial=self.start, total=self.total, unit="step", disable=silent or None)
        self.model.train()
        before = {number: signal.signal(number, self.ask) for number in SIGNALS}
        try:
            for step in self.bar:
                if self.ends_stretch(step + 1) and step not in (self.start, self.since):  # which are saved
                    self.save_checkpoint(step)
                yield step
                if (step + 1) % self.config.log_every == 0:
                    self.look(step + 1)
                self.stop_if_asked(step + 1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's

    def ask(self, number: int, frame):
        """A step and its evaluation are finished and saved before the process ends; a second signal ends it at once."""
        if self.asked:
            stop(number)
        self.asked = number

    def stop_if_asked(self, done: int):
        """Ends all processes behind the same step where one was asked to stop; torchrun asks all of them."""
        if not self.context.sum(torch.tensor(self.asked)):
            return
        if done != self.since:  # an evaluation has just saved it
            self.save_checkpoint(done)
        self.context.barrier()  # torchrun ends the others when the first one ends
        self.bar.close()
        stop(self.asked or signal.SIGTERM, f" at step {done}")

    def open_window(self, since=0, tokens=0, seconds=0.0, loss_sum=0.0):
        """Begins to count the steps since the last evaluation, of which the bar and the log speak."""
        self.since, self.tokens = since, tokens
        self.clock = time.perf_counter() - seconds
        # On the device: once not finite, it stays so, and nobody waits for it at every step.
        dtype = torch.promote_types(self.context.dtype, torch.float32)
        self.loss_sum = torch.tensor(loss_sum, dtype=dtype, device=self.context.device)

    def window(self) -> dict:
        """What opens it again on any number of processes, each of which then has the mean of their sums."""
        loss_sum = float(self.context.sum(self.loss_sum)) / self.context.world
        seconds = time.perf_counter() - self.clock
        return {"since": self.since, "tokens": self.tokens, "seconds": seconds, "loss_sum": loss_sum}

    def add(self, loss: torch.Tensor, tokens: int):
        """Counts one micro-batch of this process; `loss` is its part of the step's loss, as the bar shows it."""
        self.loss_sum += loss.detach()
        self.tokens += tokens * self.context.world

    def look(self, done: int):
        """Reads the loss, shows it, and ends a run whose loss is not finite."""
        if done == self.since:  # it was looked at when it was saved
            return
        window = self.window()
        self.train_loss = window["loss_sum"] / (done - self.since)
        self.check_finite(self.train_loss, done)
        self.speed = self.tokens / window["seconds"]
        words = f"{self.loss_in_words(self.train_loss)}, {self.speed:,.0f} tok/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(words)
        elif self.context.rank == 0:  # a line in a log, which a bar would fill
            show(f"step {done}/{self.total}: {words}", sys.stderr)

    def check_finite(self, loss: float, done: int):
        if not math.isfinite(loss):
            self.bar.close()
            fail(f"the loss is not finite at step {done} or just before (not saved): change --learning_rate or --seed")

    def due(self, done: int) -> bool:
        """Whether an evaluation is due after so many steps; if so, the training loss is looked at first."""
        if not self.ends_stretch(done):
            return False
        self.look(done)
        self.seconds += time.perf_counter() - self.clock
        return True

    def ends_stretch(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total

    def save(self, done: int, scores: dict, words: str, loss: float = 0.0):
        """Logs an evaluation and saves a checkpoint, unless its loss, if it has one, is not finite."""
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
        """What it takes to go on after so many steps, unless the last update broke the weights. At every moment one of
        the two files is whole."""
        begun, window = time.perf_counter(), self.window()
        everything = sum(p.detach().sum() for p in self.model.parameters())
        self.check_finite(window["loss_sum"] + float(everything), done)
        state = {"seconds": self.seconds, "log": self.log, "window": window, "extra": self.extra}
        state |= {"precision": self.precision, "code": self.code}
        state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        self.save_model("ckpt.pt", self.model, done, **state)
        self.clock += time.perf_counter() - begun  # writing a file is not training

    def save_model(self, name: str, model, step: int, **state):
        """A file with what it takes to make the model again, and with `state`."""
        state |= {"class": type(model).__name__, "step": step, "identity": self.identity}
        state |= {"constants": vars(model.config), "vocab_size": model.vocab_size}
        self.write(name, state | {"model": model.state_dict()})

    def finish(self, result: dict) -> dict:
        """Adds what every result has, and writes it."""
        result = {"name": self.name} | result
        result |= {"seconds": round(self.seconds, 1), "config": self.identity, "code": self.code}
        result |= {"machine": self.context.machine}
        self.write("result.json", result)
        return json.loads(json.dumps(result))  # as one that is read again
