"""Bad luck, drawn by chance: `python tests/soak.py` troubles tiny runs of all scripts that train, until they are done.

Not a test of the suite: a thousand faults take half an hour on a core. A round begins in an empty folder; after one to
four faults the same command goes on to the end, and weights, losses and figures must equal, bit for bit, those of a run
that nobody troubled; whatever was stopped or refused said so in one line. Each command is a fork of this process, which
has imported everything: a fault falls anywhere between the first line of `main` and the last file.

Prints a table: of every script and fault, how often it was tried, and what went wrong. soak.jsonl says when each fell
and what was on the disk; the folders of what went wrong are kept beside it. A full disk takes root, who can mount one.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from itertools import cycle, islice, product
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads but its own
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import sacrebleu  # noqa: E402, F401
import seqeval.metrics  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401
import tyro  # noqa: E402
from helpers import metrics, only_run, result_of, said, words  # noqa: E402
from tqdm import tqdm  # noqa: E402

import finetune_xtreme  # noqa: E402
import runs  # noqa: E402
import train_electra  # noqa: E402
import train_lm  # noqa: E402
import train_mlm  # noqa: E402
import train_mt  # noqa: E402
from data.prepare import prepare  # noqa: E402
from data.tokenizers import XLMR, train_sentencepiece  # noqa: E402

COUNTS = {"SIGKILL": 50, "SIGTERM": 20, "Ctrl-C": 20, "two at once": 10, "full disk": 12, "damaged file": 100}
SIGNALS = {"SIGKILL": (signal.SIGKILL, -9), "SIGTERM": (signal.SIGTERM, 143), "Ctrl-C": (signal.SIGINT, 130)}
DISKS = ("limit on files", "small", "read-only") if os.getuid() == 0 else ("limit on files",)
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=20)
TINY |= dict(eval_every=3)
SPARSE = dict(num_experts=4, expert_size=16, moe_after=(1,))
OPTIONS = {  # of each script; a Path is a folder of what `prepare_all` makes
    train_lm: TINY | dict(data=Path("text"), eval_tokens=64, sample_tokens=4),
    train_mlm: TINY | SPARSE | dict(data=Path("languages"), eval_maskings=2),
    train_electra: TINY
    | dict(data=Path("languages"), pairs=Path("pairs"), generator_layers=1, eval_tokens=256, eval_maskings=2),
    train_mt: TINY | dict(data=Path("pairs"), decoder_layers=2, warmup_steps=2, eval_sentences=2, beam=2),
    finetune_xtreme: dict(
        model=Path("encoder"), source=Path("tasks"), task="pos", epochs=5, batch_size=8, micro_size=4
    ),
}
TAGS = ("NOUN", "VERB")
SCRIPTS = {script.__name__: script for script in OPTIONS}


def flip(file: Path, foreign: Path):
    data = bytearray(file.read_bytes() or b"0")
    data[random.randrange(len(data))] ^= 0xFF
    file.write_bytes(data)


def make_folder(file: Path, foreign: Path):
    file.unlink()
    (file / "inside").mkdir(parents=True)


DAMAGES = {  # to a file of a run; foreign: the same of another run
    "flipped byte": flip,
    "half": lambda file, foreign: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file, foreign: file.write_bytes(b""),
    "null": lambda file, foreign: file.write_text("null"),
    "other tensors": lambda file, foreign: torch.save({"a": torch.zeros(3)}, file),
    "another run's": lambda file, foreign: shutil.copy(foreign, file),
    "a folder": make_folder,
    "gone": lambda file, foreign: file.unlink(),
}

# ---------------------------------------------------------------------------------------------------------------------
# Commands, and what they leave


def begin(call, log: Path, largest: int = resource.RLIM_INFINITY) -> int:
    """A process that makes that call, and whose files have so many bytes at most -> its id. Words: log.out, log.err."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(log.with_suffix(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        tqdm.set_lock(threading.RLock())  # forks share that of the parent: it would stay with one that is killed
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        call()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def end(process: int) -> int:
    """Its exit code; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def step_of(run: Path, *names: str) -> int:
    """That of the newest sound checkpoint of these; -1: there is none."""
    for name in names or ("ckpt.pt", "ckpt.prev.pt"):
        try:
            return runs.load_checkpoint(run / name)["step"]
        except ValueError:
            pass
    return -1


def sizes(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(run.glob("*"))}


def outcome(out: Path) -> dict:
    """What must be the same, however often a run was stopped."""
    run = only_run(out)
    found = {"result.json": result_of(out), "metrics.jsonl": metrics(out)}
    for file in sorted(run.iterdir()):
        if file.suffix == ".pt" and file.name != "ckpt.prev.pt":  # which depends on where it was stopped
            found[file.name] = runs.load_checkpoint(file)
            found[file.name]["arguments"].pop("out_dir", None)
        elif file.name not in ("ckpt.prev.pt", *found):
            found[file.name] = file.read_bytes()
    for record in (*found["metrics.jsonl"], *found.values()):
        for name in ("seconds", "tokens_per_second", "sha256", "log"):
            if isinstance(record, dict):
                record.pop(name, None)
    return found


def same(one, two) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


# ---------------------------------------------------------------------------------------------------------------------
# Faults


class Soak:
    """The runs of one script: a whole one, one of another seed, one that is stopped half-way, and one in trouble.

    Each kind of fault says what went wrong in words: "" is nothing, None that it came too late to do anything.
    """

    def __init__(self, name: str, base: Path, log: Path):
        self.name, self.base, self.log, self.tried, self.wrong = name, base / name, log, Counter(), Counter()
        self.options = dict(dropout=0.1, log_every=1, device="cpu", dtype="float32")
        for option, value in OPTIONS[SCRIPTS[name]].items():
            self.options[option] = base / value if isinstance(value, Path) else value
        self.base.mkdir()
        self.out, half = self.base / "run", self.base / "half"
        for out, seed in ((self.base / "foreign", 1), (self.base / "whole", 0)):
            begun = time.perf_counter()
            assert end(self.start(out, seed=seed)) == 0, (self.base / "words.err").read_text()
            self.seconds = time.perf_counter() - begun
        self.whole, self.foreign = only_run(self.base / "whole"), only_run(self.base / "foreign")
        self.run, self.half, self.expected = self.out / self.whole.name, half / self.whole.name, outcome(out)
        self.steps, process = step_of(self.whole), self.start(half)
        while step_of(self.half) < self.steps / 2:
            time.sleep(0.01)
        os.kill(process, signal.SIGTERM)
        assert end(process) == 143, "it could not be stopped half-way"

    def start(self, out: Path, words_in: str = "words", seed: int = 0, **limit) -> int:
        out.mkdir(exist_ok=True)
        argv = [self.name, *words(self.options | {"out_dir": out, "seed": seed})]

        def call():
            sys.argv = argv
            SCRIPTS[self.name].main()

        return begin(call, self.base / words_in, **limit)

    def judge(self, code: int, *allowed: int, words_in: str = "words") -> str:
        """What is wrong with how a command ended."""
        text = (self.base / words_in).with_suffix(".err").read_text()
        self.said = [line for line in said(text) if not line.startswith("warning: ")]
        if "Traceback" in text:
            return "traceback"
        if code not in allowed:
            return f"exit code {code}"
        if len(self.said) != (code > 0):
            return f"{len(self.said)} lines"
        if code == 0:
            ours = outcome(self.out)
            other = [name for name in ours.keys() | self.expected if not same(ours.get(name), self.expected.get(name))]
            return f"other {', '.join(sorted(other))}" if other else ""
        return ""

    def signal(self, fault: str) -> str | None:
        left = 1 - 0.8 * max(0, step_of(self.run)) / self.steps
        self.moment = random.uniform(0, left * self.seconds)
        process, (number, wanted) = self.start(self.out), SIGNALS[fault]
        time.sleep(self.moment)
        os.kill(process, number)
        code, self.disk = end(process), sizes(self.run)
        return self.judge(code, 0, wanted, -number) or (None if code == 0 else "")  # minus: main had no handler yet

    def two_at_once(self) -> str | None:
        self.moment = random.uniform(0, self.seconds)
        one = self.start(self.out)
        time.sleep(self.moment)
        two = self.start(self.out, "second")
        codes = {"words": end(one), "second": end(two)}
        for words_in, code in codes.items():
            wrong = self.judge(code, 0, 1, words_in=words_in)
            if wrong or code and "another process is training in" not in self.said[0]:
                return wrong or "refused otherwise"
        refused = sum(codes.values())
        return "neither ended" if refused == 2 else "" if refused else None

    def full_disk(self, how: str) -> str | None:
        """A limit on each file; a disk too small for a checkpoint, or for a second one; one that cannot be written."""
        (self.run / "result.json").unlink(missing_ok=True)  # a finished run writes nothing
        size, before, small = sizes(self.whole)["ckpt.pt"], step_of(self.run), self.base / "small"
        there = {*self.run.glob("*.tmp")}  # of a process that was killed before
        self.moment = random.uniform(0, 1)  # as a share of what it takes
        if how == "limit on files":
            code = end(self.start(self.out, largest=int(self.moment * size)))
        else:
            room = sum(sizes(self.run).values()) + 8192 + int(self.moment * 2 * size)
            small.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", small], check=True)
            try:
                shutil.copytree(self.out, small, dirs_exist_ok=True)
                if how == "read-only":
                    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
                code = end(self.start(small))
                shutil.rmtree(self.out)
                shutil.copytree(small, self.out)
            finally:
                subprocess.run(["umount", small], check=True)
        wrong = self.judge(code, 0, 1)
        if wrong or code == 0:
            return wrong or None
        if {*self.run.glob("*.tmp")} - there:
            return "a temporary file is left"
        return "a checkpoint is lost" if step_of(self.run) < before else ""

    def damaged_file(self, name: str, kind: str) -> str:
        """The command then goes on to the end, or refuses what cannot be mended; the file is put back in that case."""
        file, self.moment = self.run / name, None
        if not file.is_file():
            shutil.rmtree(self.out)
            shutil.copytree(self.half if (self.half / name).exists() else self.whole, self.run)
        if name != "result.json":
            (self.run / "result.json").unlink(missing_ok=True)  # a finished run looks at nothing else
        before, content = step_of(self.run), file.read_bytes()
        DAMAGES[kind](file, self.foreign / name)
        self.disk = sizes(self.run)
        other = "ckpt.prev.pt" if name == "ckpt.pt" else "ckpt.pt"
        hopeless = kind == "a folder" or name == "config.json"
        hopeless = hopeless or name in ("ckpt.pt", "ckpt.prev.pt") and step_of(self.run, other) < 0
        code = end(self.start(self.out))
        wrong = self.judge(code, 0, int(hopeless))
        if code == 1 and not wrong:
            self.tried["damaged file, refused"] += 1
            if file.is_dir():
                shutil.rmtree(file)
            file.write_bytes(content)
            return "a checkpoint is lost" if step_of(self.run) < before else ""
        return wrong

    def trouble(self, fault: str, *more: str) -> bool:
        """One fault, or the end, and a line in the log -> whether it came in time."""
        self.disk, self.moment, self.said = sizes(self.run), None, []
        if fault in SIGNALS:
            wrong = self.signal(fault)
        elif fault == "the end":
            wrong = self.judge(end(self.start(self.out)), 0)
        else:
            wrong = getattr(self, fault.replace(" ", "_"))(*more)
        record = {"script": self.name, "fault": fault, "what": more, "moment": self.moment, "disk": self.disk}
        record |= {"said": self.said, "step": step_of(self.run), "wrong": wrong}
        with (self.log / "soak.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.tried[fault] += wrong is not None
        if wrong:
            self.wrong[fault] += 1
            kept = self.log / f"{self.name}-{self.wrong.total()}"
            shutil.copytree(self.base, kept, ignore=shutil.ignore_patterns("whole", "foreign", "half"))
            print(f"WRONG: {self.name}, {' '.join((fault, *more))}: {wrong}; see {kept}", flush=True)
            shutil.rmtree(self.out)
            self.out.mkdir()
        return wrong is not None

    def go(self, scale: float):
        """All faults, in rounds. One that came too late is tried again."""
        places = [*product(sizes(self.whole), DAMAGES)]
        random.shuffle(places)
        kinds, faults = {"damaged file": places, "full disk": [(how,) for how in DISKS]}, []
        for fault, count in COUNTS.items():
            faults += [(fault, *more) for more in islice(cycle(kinds.get(fault, [()])), round(scale * count))]
        random.shuffle(faults)
        while faults:
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir()
            for fault in [faults.pop() for _ in range(min(len(faults), random.randint(1, 4)))]:
                if not self.trouble(*fault):
                    faults.insert(random.randint(0, len(faults)), fault)
            self.trouble("the end")


# ---------------------------------------------------------------------------------------------------------------------


def prepare_all(base: Path):
    """A text in two languages, which is its own translation, words with their tags, and an encoder."""
    rng, texts = np.random.default_rng(0), {}
    meanings = rng.integers(40, size=(500, 6))
    for language, letters in {"aa": "abcdefgh", "en": "opqrstuv"}.items():
        known = ["".join(rng.choice(list(letters), rng.integers(2, 6))) for _ in range(40)]
        texts[language] = [" ".join(known[x] for x in row[: 2 + i % 5]) for i, row in enumerate(meanings)]
    for folder in ("raw", "raw-pairs", "tasks/udpos"):
        (base / folder).mkdir(parents=True)
    for split, part in {"train": slice(440), "valid": slice(440, 470), "test": slice(470, 500)}.items():
        most = 60 if split == "train" else 5  # translating takes the longest
        for language, lines in texts.items():
            (base / "raw" / f"{language}.{split}.txt").write_text("\n\n".join(lines[part]))
            (base / "raw-pairs" / f"aa-en.{split}.{language}").write_text("".join(f"{x}\n" for x in lines[part][:most]))
            tagged = ["".join(f"{x}\t{TAGS[x[0] in 'abcdopqr']}\n" for x in line.split()) for line in lines[part]]
            name = f"{split.replace('valid', 'dev')}-{language.replace('aa', 'de')}.tsv"
            (base / "tasks/udpos" / name).write_text("\n".join(tagged[:24]))
    lines = [x for lines in texts.values() for x in lines]
    small = {"normalization_rule_name": "identity"}  # XLM-R's rules are as large as a checkpoint here
    tokenizer = train_sentencepiece(lines, 300, XLMR, **small).save(base)
    prepare("text", base / "raw", tokenizer, out=base / "text")
    prepare("cc100", base / "raw", tokenizer, out=base / "languages")
    prepare("bitext", base / "raw-pairs", tokenizer, out=base / "pairs")
    options = TINY | SPARSE | dict(data=base / "languages", steps=1, out_dir=base / "encoder-runs", device="cpu")
    sys.argv = ["train_mlm", *words(options)]
    train_mlm.main()
    only_run(base / "encoder-runs").rename(base / "encoder")


def table(soaks: list[Soak]) -> str:
    rows = []
    for fault in (*COUNTS, "damaged file, refused", "the end"):
        rows.append([fault, *(f"{soak.tried[fault]}, {soak.wrong[fault]}" for soak in soaks)])
    return runs.markdown_table(["tried, wrong", *(soak.name for soak in soaks)], rows)


def main(scale: float = 1.0, seed: int = 0, scripts: tuple[str, ...] = tuple(SCRIPTS), log: Path = Path("out/soak")):
    """scale: times COUNTS faults a script; scripts: which; log: folder of soak.jsonl and of what went wrong."""
    torch.set_num_threads(1)
    random.seed(seed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a fork has no handler until main sets it
    log.mkdir(parents=True, exist_ok=True)
    soaks = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        base = Path(folder)
        assert end(begin(lambda: prepare_all(base), base / "words")) == 0, (base / "words.err").read_text()
        for script in scripts:
            soaks.append(Soak(script, base, log))
            soaks[-1].go(scale)
            print(table(soaks), flush=True)
    sys.exit(any(soak.wrong for soak in soaks))


if __name__ == "__main__":
    tyro.cli(main)
