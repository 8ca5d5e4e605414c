"""Bad luck, drawn by chance: `python tests/soak.py [FAULTS] [SEED]` troubles a tiny train_lm.py until it is done.

Not a test of the suite: a fault takes some ten seconds. Every run must end with the weights, losses and figures of one
that nobody troubled, bit for bit; a process that is stopped or refused says so in a line, without a traceback. Prints a
table: how often each fault was tried, and what went wrong.
"""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import ROOT, TINY_LM, flip_a_byte, only_run, words  # noqa: E402

from data.prepare import prepare  # noqa: E402
from data.tokenizers import train_sentencepiece  # noqa: E402

OPTIONS = TINY_LM | {"steps": 60, "eval_every": 10, "eval_tokens": 64, "dropout": 0.1}
DAMAGES = {  # to the files of a run that stands still
    "flipped byte in ckpt.pt": lambda run: flip_a_byte(run / "ckpt.pt"),
    "half of ckpt.pt": lambda run: (run / "ckpt.pt").write_bytes((run / "ckpt.pt").read_bytes()[:5000]),
    "other torch file": lambda run: torch.save({"a": 1}, run / "ckpt.pt"),
    "broken history": lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"),
    "broken result": lambda run: (run / "result.json").write_text("null"),
}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
CODES = {"kill": -9, "term": 143, "Ctrl-C": 130}


def start(options: dict, log: Path, largest: int | None = None) -> subprocess.Popen:
    """A run, whose files may have so many bytes."""
    limit = None
    if largest:
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))  # noqa: E731
    command = [sys.executable, str(ROOT / "train_lm.py"), *words(options)]
    return subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, preexec_fn=limit)


def trouble(fault: str, options: dict, log: Path) -> str:
    """Starts the run with this fault -> what went wrong, in a word; empty: nothing."""
    if fault in DAMAGES:
        run = only_run(options["out_dir"])
        (run / "result.json").unlink(missing_ok=True)  # what a finished run no longer needs is not looked at
        DAMAGES[fault](run)
        return ""
    process, code = start(options, log, largest=60_000 if fault == "full disk" else None), 0
    if fault in SIGNALS:
        time.sleep(random.uniform(4, 9))  # the imports take most of it
        process.send_signal(SIGNALS[fault])
        code = CODES[fault]
    if fault == "two at once":
        second = log.with_name("second.txt")
        if start(options, second).wait() and "another process" not in second.read_text():
            return "the second one failed otherwise"
    found = process.wait()
    early = fault in SIGNALS and found == -SIGNALS[fault]  # before it had a handler
    if "Traceback" in log.read_text() and "KeyboardInterrupt" not in log.read_text():
        return "traceback"
    if fault == "full disk":
        return "" if found in (0, 1) else f"exit code {found}"
    return "" if found in (0, code) or early or found == 1 and fault == "Ctrl-C" else f"exit code {found}"


def outcome(folder: Path) -> tuple[dict, list, dict]:
    run = only_run(folder)
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    state, result = torch.load(run / "ckpt.pt", weights_only=True), json.loads((run / "result.json").read_text())
    return state["model"], [record["train_loss"] for record in log], result["test"]


def equal(ours: tuple, theirs: tuple) -> bool:
    return ours[1:] == theirs[1:] and all(torch.equal(w, theirs[0][name]) for name, w in ours[0].items())


def main(faults: int = 20, seed: int = 0):
    base, tried, wrong = Path(tempfile.mkdtemp(prefix="soak")), Counter(), Counter()
    random.seed(seed)
    rng = np.random.default_rng(0)
    text = "\n\n".join(" ".join(map(str, rng.integers(200, size=20))) for _ in range(500))
    (base / "text.txt").write_text(text)
    (base / "pieces").mkdir()
    tokenizer = train_sentencepiece([text], vocab_size=320).save(base / "pieces")
    data = prepare("text", base / "text.txt", tokenizer, out=base / "data")
    whole, run = (OPTIONS | {"data": data, "out_dir": base / name} for name in ("whole", "run"))
    for options in (whole, run):
        options["out_dir"].mkdir()
    start(whole, base / "whole.txt").wait()
    expected, log = outcome(whole["out_dir"]), base / "log.txt"
    while tried.total() < faults:
        shutil.rmtree(run["out_dir"])
        run["out_dir"].mkdir()
        for _ in range(random.randint(1, 4)):
            possible = [*SIGNALS, "two at once", "full disk"]
            files = {path.name for path in run["out_dir"].glob("*/*")}
            if {"ckpt.pt", "ckpt.prev.pt", "metrics.jsonl"} <= files:
                possible += DAMAGES
            fault = random.choice(possible)
            found = trouble(fault, run, log)
            tried[fault] += 1
            wrong[fault, found] += bool(found)
        found = "" if start(run, log).wait() == 0 and equal(outcome(run["out_dir"]), expected) else "another end"
        wrong["the end", found] += bool(found)
    for fault, count in sorted(tried.items()):
        print(f"{fault:26}{count:5}")
    for (fault, found), count in wrong.items():
        if count:
            print(f"WRONG: {fault}: {found}, {count} times")
    shutil.rmtree(base)
    sys.exit(int(any(wrong.values())))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
