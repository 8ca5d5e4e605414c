"""Injects faults at random times, to show that training scripts lose nothing that they have saved.

    python tests/soak.py                                      300 faults, shared by the five scripts that train
    python tests/soak.py --faults 1000 --scripts train_lm     more faults, for one script

A round starts in an empty folder: a tiny run suffers some faults, and then the same command finishes it. Its weights,
losses and scores must equal those of an undisturbed run, bit for bit, and a stopped or refused command must say so in
one line. Prints how often each fault was tried, and how often a run went wrong; its files are kept in out/soak.
Needs Linux or macOS.
"""

import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

os.environ["OMP_NUM_THREADS"] = "1"  # a fork copies no other thread
sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import torch
import torch._dynamo  # noqa: F401
import tyro
from tqdm import tqdm

from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine.files import load_checkpoint, newest, read_json, write
from engine.run import SIGNALS

TINY = "--n_layer 2 --n_head 2 --n_embd 16 --ffn_size 32 --block_size 16 --micro_tokens 128 --batch_tokens 256 "
TINY += "--steps 20 --eval_every 3 --dropout 0.1 "
SPARSE = "--experts 4 --expert_size 16 --moe_after 1 "
OPTIONS = {  # of each script; `make_data` writes to the folder {base}
    "train_lm": TINY + "--data {base}/text --eval_tokens 64 --sample_tokens 4",
    "train_mlm": TINY + SPARSE + "--data {base}/languages --eval_maskings 2",
    "train_electra": TINY + "--data {base}/languages --pairs {base}/pairs --generator_layers 1 --eval_tokens 256",
    "train_mt": TINY + "--data {base}/pairs --decoder_layers 2 --warmup_steps 2 --eval_sentences 2 --beam 2",
    "finetune_xtreme": "--model {base}/encoder --task pos --source {base}/tags --train_examples 60 --test_examples 3 "
    "--batch_size 8 --micro_size 4 --epochs 3",
}
KINDS = {"SIGKILL": 10, "SIGTERM": 4, "SIGINT": 4}  # fault -> weight of the random choice
KINDS |= {"two at once": 2, "full disk": 4, "damaged file": 12}
OUT = Path("out/soak")  # keeps runs that went wrong
VARYING = {"seconds", "window", "log", "constants"}  # parts of a checkpoint or result that may differ


def begin(call: Callable, output: Path, max_bytes: int | None = None) -> multiprocessing.Process:
    """Calls a function in a fork, with its output in a file. max_bytes limits the size of its files."""
    import resource

    def work():
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        tqdm.set_lock(threading.RLock())  # a fork that is killed must not hold the parent's lock
        if max_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
        sys.exit(call())

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def end(process: multiprocessing.Process) -> int:
    """Waits for its exit code, or minus the signal that killed it."""
    process.join()
    return process.exitcode


def step_of(run: Path) -> int:
    """The step of the newest intact checkpoint; -1 if there is none."""
    with suppress(ValueError):
        return newest(run)[1].get("step", -1)
    return -1


def outcome(run: Path) -> dict:
    """The files of a run, without timings: they must be the same however often it was stopped."""
    contents = {}
    for file in filter(Path.is_file, run.rglob("*")):
        if file.name in ("ckpt.prev.pt", "lock"):  # the step of the former depends on where the run was stopped
            continue
        content = re.sub(rb'"tokens_per_second": [^,}]*', b"", file.read_bytes())
        if file.suffix == ".pt" or file.name == "result.json":
            content = load_checkpoint(file) if file.suffix == ".pt" else read_json(file)
            content = {name: value for name, value in content.items() if name not in VARYING}
        contents[file.name] = plain(content)
    return contents


def plain(content):
    """Replaces tensors by bytes, so that == compares bit for bit."""
    if isinstance(content, torch.Tensor):
        numbers = content.reshape(-1).view(torch.uint8)
        return content.dtype, content.shape, numbers.numpy().tobytes()
    if isinstance(content, dict):
        return {name: plain(x) for name, x in content.items()}
    if isinstance(content, list | tuple):
        return [plain(x) for x in content]
    return content


def damage(file: Path, foreign: Path):
    """Damages a file in one of four ways. foreign: the same file of a run with another seed."""
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 0xFF
    half = file.read_bytes()[: len(data) // 2]
    file.write_bytes(random.choice([data, half, foreign.read_bytes()]))
    if random.random() < 0.25:
        file.unlink()


class Soak:
    """The runs of one script: an undisturbed one, one with another seed, and one that suffers the faults.

    The method of each fault returns what went wrong, or "".
    """

    def __init__(self, script: str, base: Path):
        self.script, self.base = script, base / script
        self.main = importlib.import_module(script).main
        self.tried, self.wrong = Counter(), 0
        self.out = self.base / "troubled"
        self.base.mkdir()
        begun = time.perf_counter()
        for seed in ("0", "1"):
            if end(self.start(self.base / seed, seed=seed)):
                sys.exit(f"{script}.py fails without any fault: {(self.base / 'output').read_text()}")
        self.seconds = (time.perf_counter() - begun) / 2
        (self.undisturbed,) = (self.base / "0").glob("*/")
        (self.foreign,) = (self.base / "1").glob("*/")
        self.run = self.out / self.undisturbed.name
        self.expected = outcome(self.undisturbed)

    def start(self, out: Path, seed: str = "0", output: str = "output", **limit) -> multiprocessing.Process:
        sys.argv = [self.script, *OPTIONS[self.script].format(base=self.base.parent).split()]
        sys.argv += f"--out_dir {out} --seed {seed} --log_every 1 --device cpu --dtype float32".split()
        (self.base / output).write_text("")  # in case it is killed before it opens the file
        return begin(self.main, self.base / output, **limit)

    def judge(self, code: int, allowed: set[int], output: str = "output") -> str:
        """Returns what is wrong with the end of a command, or ""."""
        printed = (self.base / output).read_text()
        lines = re.findall(r"^(?:error|stopped).*", re.sub(r"\r|\x1b\[A", "\n", printed), re.M)
        if "Traceback" in printed:
            return "a traceback"
        if code not in allowed:
            return f"exit code {code}"
        if len(lines) != (code > 0):
            return f"{len(lines)} lines"
        if code:
            return ""
        contents = outcome(self.run)
        names = contents.keys() | self.expected.keys()
        different = [name for name in names if contents.get(name) != self.expected.get(name)]
        return f"different {', '.join(different)}" if different else ""

    def signal(self, kind: str) -> str:
        process, number = self.start(self.out), getattr(signal, kind)
        time.sleep(random.uniform(0, self.seconds))
        os.kill(process.pid, number)
        allowed = {0, -number}  # the latter if `main` had not started yet
        if kind != "SIGKILL":
            allowed.add(128 + number)
        return self.judge(end(process), allowed)

    def two_at_once(self) -> str:
        """One of two commands is refused, unless the other has finished."""
        one = self.start(self.out)
        time.sleep(random.uniform(0, self.seconds))
        two = self.start(self.out, output="second")
        codes = {"output": end(one), "second": end(two)}
        refusals = [(self.base / output).read_text() for output, code in codes.items() if code]
        if len(refusals) == 2 or not all("another process is training in" in text for text in refusals):
            return "refused for another reason"
        return "".join(self.judge(code, {0, 1}, output) for output, code in codes.items())

    def full_disk(self) -> str:
        """Limits the size of files to less than a checkpoint."""
        (self.run / "result.json").unlink(missing_ok=True)  # a finished run writes nothing
        before, size = step_of(self.run), (self.undisturbed / "ckpt.pt").stat().st_size
        code = end(self.start(self.out, max_bytes=int(random.uniform(0.1, 1) * size)))
        lost = step_of(self.run) < before
        return "a checkpoint is lost" if lost else self.judge(code, {0, 1})

    def damaged_file(self) -> str:
        """The command must finish, or refuse the damaged file, which is then restored."""
        if not (self.run / "ckpt.pt").exists():
            shutil.rmtree(self.out)
            shutil.copytree(self.undisturbed, self.run)
        files = [file for file in self.run.glob("*.*") if (self.foreign / file.name).exists()]
        files.remove(self.run / "config.json")  # identifies the run: the command would start another one
        file = random.choice(files)
        if file.name != "result.json":
            (self.run / "result.json").unlink(missing_ok=True)  # a finished run reads nothing else
        content = file.read_bytes()
        damage(file, self.foreign / file.name)
        code = end(self.start(self.out))
        if code:
            file.write_bytes(content)
        return self.judge(code, {0, 1})

    def trouble(self, kind: str):
        """Injects one fault, or ends a round."""
        if kind == "the end":
            wrong = self.judge(end(self.start(self.out)), {0})
        elif kind.startswith("SIG"):
            wrong = self.signal(kind)
        else:
            wrong = getattr(self, kind.replace(" ", "_"))()
        self.tried[kind] += 1
        if wrong:
            self.wrong += 1
            kept = OUT / f"{self.script}-{self.wrong}"
            shutil.copytree(self.base, kept, dirs_exist_ok=True)
            print(f"WRONG: {self.script}, {kind}: {wrong}; see {kept}", flush=True)
        if wrong or kind == "the end":
            shutil.rmtree(self.out)
            self.out.mkdir()

    def go(self, faults: int) -> "Soak":
        """Injects this many faults, in rounds of two or three."""
        self.out.mkdir()
        for kind in random.choices([*KINDS], [*KINDS.values()], k=faults):
            self.trouble(kind)
            if random.random() < 0.4:
                self.trouble("the end")
        self.trouble("the end")
        print(f"{self.script}: tried {dict(self.tried)}, wrong {self.wrong}", flush=True)
        return self


def make_data(base: Path):
    """Makes a text, two languages and pairs of our code, trains an encoder, and makes a task."""
    pages = [page.read_text() for page in Path(__file__).parents[1].glob("*/*.py")]
    text = base / "text.txt"
    text.write_text("\n\n".join(pages))
    small = {"normalization_rule_name": "identity"}  # XLM-R's rules are as large as a checkpoint
    tokenizer = train_sentencepiece(pages, 400, XLMR, **small).save(base)
    prepare("text", text, tokenizer, out=base / "text")
    for place, split in enumerate(("train", "dev", "test")):
        lines = [f"{word}\t{'NOUN' if word.isalpha() else 'SYM'}\n" for word in pages[place].split()]
        write(base / "tags" / f"{split}-en.tsv", "\n".join(lines))  # one word per sentence
    lines = "\n".join(line for page in pages for line in page.splitlines() if line.strip())
    for language, content in {"en": lines, "de": lines.swapcase()}.items():
        write(base / "texts" / f"{language}.txt", content.replace("\n", "\n\n"))
        write(base / "both" / f"de-en.{language}", content)
    prepare("cc100", base / "texts", tokenizer, max_tokens=4000, out=base / "languages")
    prepare("bitext", base / "both", tokenizer, max_tokens=4000, out=base / "pairs")
    command = "train_mlm " + OPTIONS["train_mlm"] + " --steps 1 --device cpu --out_dir {base}/encoders"
    sys.argv = command.format(base=base).split()
    importlib.import_module("train_mlm").main()
    next((base / "encoders").glob("*/")).rename(base / "encoder")


def main(faults: int = 300, scripts: tuple[Literal[*OPTIONS], ...] = tuple(OPTIONS), seed: int = 0):
    """faults: total over all scripts; scripts: which scripts to test; seed: random seed of the faults"""
    torch.set_num_threads(1)
    random.seed(seed)
    OUT.mkdir(parents=True, exist_ok=True)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # a fork has no handler until `main` sets one
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        base = Path(folder)
        if end(begin(lambda: make_data(base), base / "output")):
            sys.exit((base / "output").read_text())
        soaks = [Soak(script, base).go(-(-faults // len(scripts))) for script in scripts]
    sys.exit(any(soak.wrong for soak in soaks))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
