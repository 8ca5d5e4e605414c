"""`finetune_xtreme.py` as a user runs it, on tiny encoders and tasks of a few words whose rules are obvious."""

import dataclasses
import hashlib
import json
import math
import shutil
import signal
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
import torch
from helpers import TORCHRUN, Script, finish, losses, metrics, only_run, result_of, stopped, table_rows

import common
import finetune_xtreme
import pretrained
import runs
import train_electra
import train_lm
import train_mlm
from data import xtreme, xtreme_rows, xtreme_scores
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from data.xtreme_rows import best_answer, by_example
from data.xtreme_scores import guess
from finetune_xtreme import PRESETS, ROWS, SEARCHED, TABLES, TITLES, Config, FineTuned
from model import sizes
from routers import Router

XTREME = Script(finetune_xtreme)
TINY = dict(epochs=2, batch_size=8, micro_size=4, learning_rate=1e-2, dropout=0.1, log_every=1, device="cpu")
TINY |= dict(dtype="float32")
ENCODER = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=32, steps=1, eval_every=1, batch_tokens=128)
ENCODER |= dict(micro_tokens=128, device="cpu", dtype="float32")
SPARSE = dict(num_experts=4, expert_size=16, moe_after=(1,))
ENCODERS = {  # script, and its constants
    "dense": (train_mlm, dict(router="dense")),
    "switch": (train_mlm, SPARSE | dict(router="switch")),
    "hypersphere": (train_mlm, SPARSE),
    "electra": (train_electra, dict(generator_layers=1)),
}
TASKS = ("pos", "xquad", "xnli")  # one of each kind

# ---------------------------------------------------------------------------------------------------------------------
# Tasks with a rule: a word's tag is its kind; what answers is an animal; one word says what follows from what

KINDS = {"NOUN": {"dog": "Hund", "cat": "Katze"}, "ADJ": {"red": "rot", "blue": "blau", "big": "gross"}}
KINDS |= {"VERB": {"runs": "rennt", "sleeps": "schlaeft"}, "CCONJ": {"and": "und"}}
GERMAN = {english: german for words in KINDS.values() for english, german in words.items()}
TAG = {word: tag for tag, words in KINDS.items() for pair in words.items() for word in pair}
LABEL = {"runs": "entailment", "sleeps": "neutral", "and": "contradiction"}
COUNTS = {"train": 48, "dev": 10, "test": 6}


def drawn(count: int, seed: int) -> list[list[str]]:
    """Different English sentences."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        sentence = tuple(rng.choice(list(GERMAN), rng.integers(3, 9)))
        found[sentence] = list(sentence)
    return list(found.values())


def translate(words: list[str], language: str) -> list[str]:
    return words if language == "en" else [GERMAN[word] for word in words]


def tag_lines(sentences: list[list[str]], language: str) -> str:
    return "".join("".join(f"{w}\t{TAG[w]}\n" for w in translate(s, language)) + "\n" for s in sentences)


def answers(sentences: list[list[str]], language: str) -> str:
    """SQuAD's format. The animal that answers stands among words that are none."""
    rows = []
    for number, sentence in enumerate(sentences):
        words = [word for word in sentence if TAG[word] != "NOUN"] + ["and"]
        animal = list(KINDS["NOUN"])[number % 2]
        words.insert(number % len(words), animal)
        words, animal = translate(words, language), translate([animal], language)[0]
        answer = {"text": animal, "answer_start": len("".join(f"{w} " for w in words[: words.index(animal)]))}
        question = {"id": f"q{number}", "question": "red dog", "answers": [answer]}
        rows.append({"context": " ".join(words), "qas": [question]})
    return json.dumps({"data": [{"paragraphs": rows}]})


def label_lines(sentences: list[list[str]], language: str) -> str:
    lines = []
    for number, sentence in enumerate(sentences):
        one = [word for word in sentence if word not in LABEL] + ["big"]
        word, label = list(LABEL.items())[number % 3]
        one, two = " ".join(translate(one, language)), translate([word], language)[0]
        lines.append(f"{one}\t{two}\t{label}\n")
    return "".join(lines)


FILES = {  # of each task: its files of a split, and what writes them
    "pos": ("udpos/{split}-{language}.tsv", tag_lines),
    "xnli": ("xnli/{split}-{language}.tsv", label_lines),
    "xquad": ("xquad/xquad.{language}.json", answers),
    "squad": ("squad/{split}-v1.1.json", answers),
}


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """XTREME's folders of three tasks: English to train on and to choose by; English and German to score."""
    folder = tmp_path_factory.mktemp("xtreme")
    for seed, (split, count) in enumerate(COUNTS.items()):
        for (task, (name, write)), language in product(FILES.items(), ("en", "de")):
            if language == "de" and (split != "test" or task == "squad"):
                continue
            if (task == "squad") == (split == "test") and task in ("squad", "xquad"):
                continue
            file = folder / name.format(split=split, language=language)
            file.parent.mkdir(exist_ok=True)
            file.write_text(write(drawn(count, seed), language))
    return folder


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("corpora")
    (base / "text").mkdir()
    (base / "pairs").mkdir()
    english = [" ".join(words) for words in drawn(200, 9)]
    german = [" ".join(translate(words.split(), "de")) for words in english]
    for split, part in {"train": slice(0, 160), "valid": slice(160, 180), "test": slice(180, 200)}.items():
        for language, texts in (("en", english), ("de", german)):
            (base / "text" / f"{language}.{split}.txt").write_text("\n\n".join(texts[part]))
            (base / "pairs" / f"de-en.{split}.{language}").write_text("".join(f"{text}\n" for text in texts[part]))
    spm = train_sentencepiece(german + english, 295, XLMR).save(base)
    return {
        "spm": spm,
        "data": prepare("cc100", base / "text", tokenizer=spm, out=base / "prepared"),
        "pairs": prepare("bitext", base / "pairs", tokenizer=spm, out=base / "prepared-pairs"),
        "text": prepare("text", base / "text", tokenizer=spm, out=base / "prepared-text"),
    }


@pytest.fixture(scope="session")
def encoders(corpora, tmp_path_factory) -> dict[str, Path]:
    """The folders of ENCODERS, each trained for a step, and of a decoder."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        out = tmp_path_factory.mktemp("decoder")
        Script(train_lm).run(ENCODER | {"router": "dense", "data": corpora["text"], "out_dir": out}, patch)
        folders["decoder"] = only_run(out)
        for name, (script, constants) in ENCODERS.items():
            out = tmp_path_factory.mktemp(name)
            folders[name] = out / name
            own = {"pairs": corpora["pairs"]} if script is train_electra else {}
            given = ENCODER | constants | own | {"data": corpora["data"], "eval_maskings": 1, "out_dir": out}
            Script(script).run(given, patch)
            only_run(out).replace(folders[name])
    return folders


@pytest.fixture
def options(encoders, source, tmp_path) -> dict:
    return TINY | {"model": encoders["hypersphere"], "source": source, "task": "xnli", "out_dir": tmp_path / "out"}


@pytest.fixture(autouse=True)
def few_applications(monkeypatch):
    """In place of Django's messages, which take seconds to read."""

    def applications(split: str) -> dict[str, list[xtreme.Example]]:
        seed = ("train", "valid", "test").index(split)
        found = {}
        for language in ("de", "en"):
            own = [(" ".join(translate(words, language)), words) for words in drawn(20, seed)]
            examples = [
                xtreme.Example(str(i), (text,), "a" if "dog" in words else "b") for i, (text, words) in enumerate(own)
            ]
            found[language] = examples
        return found

    monkeypatch.setattr(xtreme, "applications", applications)


def for_apps(options: dict) -> dict:
    return {name: value for name, value in options.items() if name not in ("source", "task")}


def saved(options: dict, name: str = "ckpt.pt") -> dict:
    return runs.load_checkpoint(only_run(options["out_dir"]) / name)


def same(result: dict) -> dict:
    return {name: value for name, value in result.items() if name not in ("seconds", "sha256")}


def predictions(folder: Path, language: str) -> list[dict]:
    return [json.loads(line) for line in (only_run(folder) / f"test-{language}.jsonl").read_text().splitlines()]


def opened(options: dict) -> tuple:
    """Config, examples, model, tokenizer and context of a run before its first step."""
    known = {field.name for field in dataclasses.fields(Config)}
    config = Config(**{name: value for name, value in options.items() if name in known})
    config = dataclasses.replace(config, model=str(config.model), source=str(config.source))
    context = common.setup("cpu", config.dtype)
    limits = config.train_examples, config.test_examples
    examples = xtreme.read_examples(config.task, config.source, config.train_source, *limits)
    model, tokenizer = finetune_xtreme.build(config, examples.labels)
    return config, examples, common.place(model, context), tokenizer, context


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.mark.parametrize("task", [*TASKS, "apps"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_trains_on_every_kind_of_task_and_reports(encoder, task, options, encoders, monkeypatch, capsys):
    options |= {"task": task, "model": encoders[encoder], "epochs": 1}
    XTREME.run(for_apps(options) if task == "apps" else options, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    main = {"pos": "f1", "xquad": "f1"}.get(task, "accuracy")
    if task == "xnli":
        _, examples, *_ = opened(options)
        by_word = [xtreme_scores.labels_by_word(examples.train)(examples.test[language]) for language in ("de", "en")]
        gold = [[one.gold for one in examples.test[language]] for language in ("de", "en")]
        assert [100 * np.mean(np.array(a) == b) for a, b in zip(by_word, gold)] == pytest.approx(
            [result["counted"][language]["accuracy"] for language in ("de", "en")]
        )
    assert list(result["languages"]) == list(result["guesses"]) == ["de", "en"]
    assert list(result["counted"]) == ([] if task == "xquad" else ["de", "en"])
    for kind, mean in (("languages", "mean"), ("guesses", "guess"), ("counted", "counting")):
        for metric, value in result[mean].items():
            assert value == pytest.approx(fmean(scores[metric] for scores in result[kind].values()))
    english, german = (result["languages"][language] for language in ("en", "de"))
    assert result["gap"] == pytest.approx({metric: english[metric] - german[metric] for metric in english})
    assert ("em" in english) == (task == "xquad") and main in english
    text = lambda scores: ", ".join(f"{metric} {value:.1f}" for metric, value in scores.items())  # noqa: E731
    report = out.split("\n\n")[-1]
    assert ("a smoke test, no task of XTREME's" in report) == (task == "apps")
    lines = report.splitlines()
    for language in ("de", "en"):
        guess, counted = result["guesses"][language], result["counted"].get(language, {})
        assert f"{language:10}{text(result['languages'][language]):22}{text(guess):24}{text(counted)}".rstrip() in lines
    guess, counted = result["guess"], result["counting"]
    assert f"{'mean':10}{text(result['mean']):22}{text(guess):24}{text(counted)}".rstrip() in lines
    assert ("each word's most frequent tag" in report) == (task == "pos")
    assert ("naive Bayes over words" in report) == (task in ("xnli", "apps"))
    assert f"English is ahead of the mean of the others by {text(result['gap'])}\n" in report
    assert f"English development: {text(result['valid'])}\n" in out
    assert result["step"] == 3 if task == "apps" else 6


LEARNED = {
    "pos": dict(epochs=8, learning_rate=1e-2),
    "xquad": dict(epochs=15, learning_rate=1e-2),
    "xnli": dict(epochs=60, learning_rate=1e-3),  # at a higher rate two of the three words become one
}


@pytest.mark.parametrize("task", TASKS)
def test_an_obvious_rule_is_learned(task, options, monkeypatch):
    """Every English example is right; guessing is not that good."""
    XTREME.run(options | {"task": task, "dropout": 0.0} | LEARNED[task], monkeypatch)
    result = result_of(options["out_dir"])
    assert set(result["languages"]["en"].values()) == {100.0} and set(result["valid"].values()) == {100.0}
    assert max(result["guesses"]["en"].values()) < 70
    first, *_, last = losses(options["out_dir"])
    assert last < 0.5 * first


@pytest.mark.parametrize("encoder", ["switch", "hypersphere"])
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_routers_and_experts_stay_bit_for_bit(frozen, encoder, options, encoders, monkeypatch):
    options |= {"model": encoders[encoder], "frozen": frozen, "weight_decay": 0.01}
    XTREME.run(options, monkeypatch)
    before, after = pretrained.load(encoders[encoder])[0].state_dict(), saved(options, "model.pt")["model"]
    moved = {name for name, x in before.items() if not torch.equal(x, after[f"encoder.{name}"])}
    sparse = {name for name in before if name.startswith("moes.")}
    assert sparse and ("moes.0.router.temperature" in sparse) == (encoder == "hypersphere")
    assert moved == before.keys() - sparse if frozen else moved == before.keys()
    if encoder == "hypersphere":  # expert embeddings are put back on their sphere
        torch.testing.assert_close(after["encoder.moes.0.router.experts"].norm(dim=1), torch.full((4,), 0.1))


def test_the_balance_loss_reaches_the_hidden_states_through_frozen_experts(options):
    _, examples, model, tokenizer, _ = opened(options)
    for moe in model.moe_layers:
        moe.requires_grad_(False)
    rows = xtreme_rows.rows_of("label", examples.train[:4], tokenizer, 32, 8, examples.labels)
    batch = xtreme_rows.batch_of(rows, tokenizer.pad)
    _, balance = model(batch.ids, batch.real, batch.words)
    balance.backward()
    assert model.encoder.wte.weight.grad.abs().sum() > 0 and model.encoder.layers[0].ffn.fc.weight.grad is not None
    assert all(p.grad is None for name, p in model.named_parameters() if "moes." in name or name.startswith("out"))


@pytest.mark.parametrize("task", TASKS)
def test_every_step_has_its_learning_rate_and_the_mean_gradient(task, options, monkeypatch):
    seen, rates = [], []

    def step(self, *_, f=torch.optim.AdamW.step):
        seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        rates.append(self.param_groups[0]["lr"])
        return f(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    options |= {"task": task, "dtype": "float64", "dropout": 0.0, "balance_coef": 0.5, "grad_clip": 0.0}
    options |= {"train_examples": 16, "warmup": 0.5}
    XTREME.run(options, monkeypatch)
    steps, half = len(rates), len(rates) // 2
    line = [(i + 1) / half if i < half else (steps - i) / (steps - half) for i in range(steps)]
    assert rates == pytest.approx([1e-2 * part for part in line])
    config, examples, model, tokenizer, _ = opened(options)
    for moe in model.moe_layers:
        moe.requires_grad_(False)
    rows = finetune_xtreme.make_rows(model, examples.train, config, tokenizer)
    data = xtreme_rows.TaskData(rows, tokenizer, 8, 4, 0, "")
    for micro in range(2):
        batch = data.batch(0, micro)
        logits, balance = model(batch.ids, batch.real, batch.words)
        (torch.nn.functional.cross_entropy(logits, batch.targets) / 2 + 0.25 * balance).backward()
    groups = common.adamw(model, config).param_groups
    expected = [p.grad for group in groups for p in group["params"]]
    torch.testing.assert_close(seen[0], expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Stopped runs, and several processes


class Stop(Exception):
    """What ends a run in the middle."""


def test_a_signal_between_evaluations_changes_nothing(options, tmp_path, monkeypatch, capsys):
    options |= {"task": "pos", "train_examples": 16}
    whole, ended = (options | {"out_dir": tmp_path / name} for name in ("whole", "ended"))
    assert "stopped at step 3" in stopped(XTREME, 2, signal.SIGTERM, ended, capsys)
    XTREME.run(ended, monkeypatch)
    XTREME.run(whole, monkeypatch)
    ours, theirs = (runs.load_checkpoint(only_run(each["out_dir"]) / "ckpt.pt") for each in (ended, whole))
    for name in ("model", "best", "loads", "pending"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True)
    assert losses(ended["out_dir"]) == losses(whole["out_dir"])


def test_a_run_that_was_stopped_anywhere_ends_as_if_it_was_not(options, tmp_path, monkeypatch, capsys):
    """At every step, and whenever a file takes its name."""
    options |= {"task": "pos", "train_examples": 16}
    whole = options | {"out_dir": tmp_path / "whole"}
    XTREME.run(whole, monkeypatch)
    renames = []

    def replace(file, target, rename=Path.replace):
        renames.append(Path(target).name)
        if len(renames) == stop_at:
            raise Stop
        return rename(file, target)

    def rate(step, *rest, linear=common.linear):
        if step == stop_at:
            raise Stop
        return linear(step, *rest)

    places = [(common, "linear", rate, step) for step in range(4)]
    places += [(Path, "replace", replace, number) for number in range(1, 14)]
    for place, name, function, stop_at in places:
        renames.clear()
        stopped = options | {"out_dir": tmp_path / f"{name}-{stop_at}"}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(place, name, function)
            XTREME.run(stopped, patch)
        XTREME.run(stopped, monkeypatch)
        assert same(result_of(stopped["out_dir"])) == same(result_of(whole["out_dir"]))
        torch.testing.assert_close(saved(stopped)["model"], saved(whole)["model"], rtol=0, atol=0)
        for language in ("de", "en"):
            assert predictions(stopped["out_dir"], language) == predictions(whole["out_dir"], language)
        hashes = [(only_run(each["out_dir"]) / "predicted.json").read_text() for each in (stopped, whole)]
        assert hashes[0] == hashes[1]
    names = "config.json xlmr.model metrics.jsonl ckpt.pt metrics.jsonl ckpt.prev.pt ckpt.pt model.pt"
    tested = "test-de.jsonl predicted.json test-en.jsonl predicted.json"
    assert " ".join(renames) == f"{names} {tested} result.json"


def test_no_language_is_predicted_twice(options, tmp_path, monkeypatch):
    """And a finished run predicts and trains nothing."""
    calls, predict = [], finetune_xtreme.predict
    monkeypatch.setattr(finetune_xtreme, "predict", lambda *args: (calls.append(1), predict(*args))[1])
    XTREME.run(options, monkeypatch)
    assert len(calls) == 4  # the development set of two epochs, and two languages
    XTREME.run(options, monkeypatch)
    assert len(calls) == 4

    def stop(*args):
        if len(calls) == stop_at:
            raise Stop
        calls.append(1)
        return predict(*args)

    for stop_at in range(4):
        calls.clear()
        stopped = options | {"out_dir": tmp_path / str(stop_at)}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(finetune_xtreme, "predict", stop)
            XTREME.run(stopped, patch)
        XTREME.run(stopped, monkeypatch)
        assert len(calls) == 4


@pytest.mark.parametrize("gone", [("result.json", "ckpt.pt", "ckpt.prev.pt"), ("result.json",)])
@pytest.mark.parametrize("damage", ["other", "", "null", "[" * 100_000, "\udcff"])
def test_predictions_of_before_are_not_believed(damage, gone, options, monkeypatch):
    """They are of other weights where a run is trained again, or they are damaged."""
    XTREME.run(options, monkeypatch)
    folder, before = only_run(options["out_dir"]), predictions(options["out_dir"], "de")
    false = "".join(json.dumps(record | {"predicted": "?"}) + "\n" for record in before)
    (folder / "test-de.jsonl").write_bytes((false if damage == "other" else damage).encode("utf-8", "surrogateescape"))
    whole = result_of(options["out_dir"])
    for name in gone:
        (folder / name).unlink()
    XTREME.run(options, monkeypatch)
    assert predictions(options["out_dir"], "de") == before and same(result_of(options["out_dir"])) == same(whole)


def test_a_folder_in_place_of_the_hashes_is_one_clear_line(options, monkeypatch, capsys):
    XTREME.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    for name in ("result.json", "predicted.json"):
        (folder / name).unlink()
    (folder / "predicted.json").mkdir()
    assert "predicted.json" in XTREME.refused(options, monkeypatch, capsys)


def test_hashes_of_predictions_are_those_of_the_weights(options, monkeypatch):
    """False predictions with a true hash, of a run whose weights are gone."""
    XTREME.run(options, monkeypatch)
    folder, before = only_run(options["out_dir"]), predictions(options["out_dir"], "de")
    text = "".join(json.dumps(record | {"predicted": "?"}) + "\n" for record in before)
    (folder / "test-de.jsonl").write_text(text)
    hashes = json.loads((folder / "predicted.json").read_text()) | {"de": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "predicted.json").write_text(json.dumps(hashes | {"sha256": runs.digest(hashes)}))
    for name in ("result.json", "ckpt.pt", "ckpt.prev.pt"):
        (folder / name).unlink()
    XTREME.run(options, monkeypatch)
    assert predictions(options["out_dir"], "de") == before


def test_other_test_examples_or_another_encoder_are_other_data(
    options, source, encoders, tmp_path, monkeypatch, capsys
):
    options |= {"source": tmp_path / "source", "model": tmp_path / "model"}
    shutil.copytree(source, options["source"])
    shutil.copytree(encoders["hypersphere"], options["model"])
    XTREME.run(options, monkeypatch)
    capsys.readouterr()
    file = options["source"] / "xnli" / "test-de.tsv"
    text = file.read_text()
    file.write_text(text + text)
    assert "is of a run with another data" in XTREME.refused(options, monkeypatch, capsys)
    file.write_text(text)
    shutil.rmtree(options["model"])
    shutil.copytree(encoders["switch"], options["model"])
    assert "is of a run with another data" in XTREME.refused(options, monkeypatch, capsys)


def test_loads_are_counted_and_two_processes_go_on_with_what_one_would_compute(options, tmp_path, monkeypatch):
    """First choices by hand, of 100 steps, over a stop and two processes; all else in the result, too."""
    options |= {"train_examples": 28, "batch_size": 4, "micro_size": 2, "epochs": 15, "dtype": "float64"}
    counts, steps = Counter(), []

    def record(self, *args, forward=Router.forward):
        routing = forward(self, *args)
        if self.training and len(steps) <= 100:
            counts.update(routing.probs.argmax(dim=1).tolist())
        return routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", record)
        patch.setattr(common, "linear", lambda *args, linear=common.linear: (steps.append(1), linear(*args))[1])
        XTREME.run(options, patch)
    ours = result_of(options["out_dir"])
    assert ours["loads"] == [[[counts[expert] for expert in range(4)]]]
    two = options | {"out_dir": tmp_path / "two"}
    shutil.copytree(options["out_dir"], two["out_dir"])
    folder = only_run(two["out_dir"])
    state = saved(two, "ckpt.prev.pt")
    assert state["step"] == 98 and int(state["pending"][0].sum()) > 0
    (folder / "ckpt.prev.pt").replace(folder / "ckpt.pt")
    for name in ("result.json", "model.pt", "test-de.jsonl", "test-en.jsonl"):
        (folder / name).unlink()
    assert "goes on from step" in finish(XTREME.start(two, *TORCHRUN), two)
    theirs = result_of(two["out_dir"])
    for name in ("languages", "guesses", "valid", "step", "loads"):
        assert ours[name] == theirs[name], name
    assert metrics(options["out_dir"])[-1]["train_loss"] == pytest.approx(losses(two["out_dir"])[-1], rel=1e-7)
    ours, theirs = saved(options), saved(two)
    torch.testing.assert_close(theirs["model"], ours["model"], rtol=1e-7, atol=1e-9)
    assert ours["step"] == 105 and torch.equal(ours["pending"][0], theirs["pending"][0])


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and what is predicted


def test_the_checkpoint_is_the_best_in_english_development(options, monkeypatch):
    weights, points, predict = [], iter([10.0, 50.0, 80.0, 80.0, 60.0]), finetune_xtreme.predict

    def watched(model, examples, *rest):
        if len(examples) == COUNTS["dev"]:
            weights.append({name: x.clone() for name, x in model.state_dict().items()})
        return predict(model, examples, *rest)

    def given(task, language, gold, predicted):
        if len(gold) == COUNTS["dev"]:
            return {"accuracy": next(points)}
        return {"accuracy": {"en": 90.0, "de": 60.0}[language]}

    monkeypatch.setattr(finetune_xtreme, "predict", watched)
    monkeypatch.setattr(xtreme_scores, "scores", given)
    options |= {"epochs": 4, "train_examples": 16}
    XTREME.run(options, monkeypatch)
    result = result_of(options["out_dir"])
    assert result["valid"] == {"accuracy": 80.0} and result["step"] == 4
    assert result["mean"] == {"accuracy": 75.0} and result["gap"] == {"accuracy": 30.0}
    kept = saved(options, "model.pt")["model"]
    assert all(torch.equal(x, kept[name]) for name, x in weights[1].items())
    assert not all(torch.equal(x, kept[name]) for name, x in weights[2].items())
    config, examples, model, tokenizer, context = opened(options)
    for wanted in (1, 3):
        model.load_state_dict(weights[wanted])
        own = [predict(model, examples.test[name], config, tokenizer, context) for name in ("de", "en")]
        found = [[row["predicted"] for row in predictions(options["out_dir"], name)] for name in ("de", "en")]
        assert wanted == 3 or own == found


@pytest.mark.parametrize("task", [*TASKS, "apps"])
def test_predictions_are_kept_and_a_file_is_predicted_as_they_were(task, options, tmp_path, monkeypatch, capsys):
    """Of every example; the scores follow from the file alone. Rows are so short that texts take several."""
    options |= {"task": task, "block_size": 16, "epochs": 3}
    if task == "xquad":
        options |= {"stride": 3, "longest_answer": 4}
    options = for_apps(options) if task == "apps" else options
    XTREME.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    result, (_, examples, *_) = result_of(options["out_dir"]), opened(options | {"source": options.get("source")})
    capsys.readouterr()
    for language, own in examples.test.items():
        kept = predictions(options["out_dir"], language)
        assert [set(record) for record in kept] == [{"id", "language", "gold", "predicted"}] * len(own)
        assert [(record["id"], record["language"]) for record in kept] == [(one.id, language) for one in own]
        gold, predicted = ([record[name] for record in kept] for name in ("gold", "predicted"))
        assert gold == json.loads(json.dumps([one.gold for one in own]))
        assert xtreme_scores.scores(task, language, gold, predicted) == pytest.approx(result["languages"][language])
        lines = [(" " if task == "pos" else "\t").join(one.texts) + "\n" for one in own]
        (tmp_path / "in.txt").write_text("".join(lines))
        XTREME.run({"predict": tmp_path / "in.txt", "model": folder, "device": "cpu", "dtype": "float32"}, monkeypatch)
        out = capsys.readouterr().out
        if task == "pos":
            blocks = [[tuple(line.split("\t")) for line in block.splitlines()] for block in out.split("\n\n")[:-1]]
            assert blocks == [list(zip(one.texts, tags)) for one, tags in zip(own, predicted)]
            assert any(len(set(tags)) > 1 for tags in predicted)
        else:
            assert out.splitlines() == predicted


def test_the_best_answer_is_that_of_all_spans():
    generator = torch.Generator().manual_seed(0)
    for longest in (1, 2, 30):
        begins, ends = torch.randn(2, 12, generator=generator)
        row = xtreme_rows.Row(0, [], [(place, (10 * place, 10 * place + 5)) for place in range(4, 11)], [])
        spans = {(i, j): begins[i] + ends[j] for i in range(4, 11) for j in range(i, min(i + longest, 11))}
        i, j = max(spans, key=spans.get)
        score, begin, end = best_answer(row, begins, ends, longest)
        assert (begin, end) == (10 * i, 10 * j + 5) and score == pytest.approx(float(spans[i, j]))
    assert best_answer(row._replace(marks=[]), begins, ends, 30) == (-math.inf, 0, 0)


def test_the_rows_of_an_example_are_put_together():
    example, row = xtreme.Example("", ("?", "one two"), []), xtreme_rows.Row(0, [], [], [])
    rows = [row, row._replace(example=1), row]
    found = {0: [(5.0, 0, 3)], 1: [(7.0, 4, 7)], 2: [(1.0, 4, 7)]}
    assert by_example("answer", [example, example], rows, found) == ["one", "two"]
    found = {0: ["A", "B"], 1: ["C"], 2: ["D"]}
    assert by_example("tags", [example, example], rows, found) == [["A", "B", "D"], ["C"]]


def test_dropout_is_that_of_the_command_line(options):
    """Whatever the encoder was trained with."""
    _, _, model, _, _ = opened(options | {"dropout": 0.3})
    found = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(found) > 3 and set(found) == {0.3} == {layer.attn.dropout for layer in model.encoder.layers}


def test_a_guess_is_what_counting_finds(options):
    _, examples, *_ = opened(options | {"task": "pos"})
    counts = Counter()
    for one in examples.train:
        for tag in one.gold:
            counts[tag] += 1
    most = max(counts, key=counts.get)
    assert guess("tags", examples.train, examples.test["de"]) == [[most] * len(one.gold) for one in examples.test["de"]]
    _, examples, *_ = opened(options)
    train = examples.train[:9] + [one for one in examples.train if one.gold == "neutral"]
    assert guess("label", train, examples.test["de"]) == ["neutral"] * len(examples.test["de"])
    one = xtreme.Example("", ("which ?", "the  red dog and the cat"), [("red dog", 5), ("the cat", 17)])
    two = one._replace(gold=[("red dog and the", 5)])
    assert median([2, 2, 4]) == 2 and guess("answer", [one, two], [one]) == ["the red"]


def test_counting_gives_each_word_its_most_frequent_tag():
    sentence = lambda text, tags: xtreme.Example("", tuple(text.split()), tags.split())  # noqa: E731
    train = [sentence("The run ends", "DET NOUN VERB"), sentence("a run run", "DET VERB VERB"), sentence("x y", "X X")]
    train += [sentence("the x z", "DET NOUN NOUN"), sentence("x u", "NOUN NOUN")]
    found = xtreme_scores.tags_by_word(train)([sentence("THE Run of", ""), sentence("x", "")])
    assert found == [["DET", "VERB", "NOUN"], ["NOUN"]]


@pytest.mark.parametrize("count", [12, 40])
def test_counting_gives_each_example_its_likeliest_label(count):
    """Bayes' theorem in fractions. A word counts once in a text, and in each text by itself; unknown ones do not."""
    rng, letters = np.random.default_rng(0), np.array(list("abcdefgh"))

    def drawn(words: np.ndarray) -> xtreme.Example:
        texts = (", ".join(rng.choice(words, 1 + rng.integers(4))).title() + "." for _ in range(2))
        return xtreme.Example("", tuple(texts), str(rng.choice(["x", "y", "z"], p=[0.4, 0.3, 0.3])))

    def has(one: xtreme.Example, place: int, letter: str) -> bool:
        return letter in one.texts[place].lower()

    train, examples = [drawn(letters[:5]) for _ in range(count)], [drawn(letters) for _ in range(300)]
    found = xtreme_scores.labels_by_word(train)(examples)
    for one, label in zip(examples, found, strict=True):
        likely = {}
        for each in "xyz":
            own = [other for other in train if other.gold == each]
            likely[each] = Fraction(len(own), len(train))
            for place, letter in product((0, 1), "abcde"):
                if has(one, place, letter):
                    likely[each] *= Fraction(sum(has(other, place, letter) for other in own) + 1, len(own) + 2)
        assert likely[label] == max(likely.values())
    assert set(found) == {"x", "y", "z"}


def test_a_tenth_is_held_out_where_there_is_no_development_set(options, source, tmp_path, monkeypatch, capsys):
    """Of a file to train on, too, which is not its own development set."""
    (tmp_path / "source").mkdir()
    for path in (source / "xnli").iterdir():
        if "dev" not in path.name:
            shutil.copy(path, tmp_path / "source")
    whole = {one.texts for one in xtreme.read("xnli", "train", tmp_path / "source")[0]["en"]}
    for given in ({"source": tmp_path / "source"}, {"train_source": str(source / "xnli" / "train-en.tsv")}):
        _, examples, *_ = opened(options | given)
        train, valid = ({one.texts for one in own} for own in (examples.train, examples.valid))
        assert train | valid == whole and not train & valid and 1 <= len(valid) <= 12


# ---------------------------------------------------------------------------------------------------------------------
# The same logits as transformers


@pytest.mark.parametrize("kind", ["label", "tags", "answer"])
def test_logits_are_those_of_transformers(kind, tmp_path, corpora):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=295, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5)
    outputs = 2 if kind == "answer" else 5
    name = {"label": "SequenceClassification", "tags": "TokenClassification", "answer": "QuestionAnswering"}[kind]
    theirs = getattr(transformers, f"XLMRobertaFor{name}")(transformers.XLMRobertaConfig(**shape, num_labels=outputs))
    theirs.eval().save_pretrained(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(corpora["spm"].read_bytes())
    encoder, tokenizer = pretrained.load(tmp_path)
    ours = FineTuned(encoder, kind, [] if kind == "answer" else list("abcde"), 0.1).eval()
    head = theirs.classifier if kind != "answer" else theirs.qa_outputs
    if kind == "label":
        ours.dense.load_state_dict(head.dense.state_dict())
    ours.out.load_state_dict((head.out_proj if kind == "label" else head).state_dict())
    own = [
        xtreme_rows.Row(0, tokenizer.encode_batch([text])[0][:30], [], []) for text in ("dog and cat", "red", "big dog")
    ]
    own = [row._replace(ids=[0, *row.ids, 2], marks=[(0, 0), (len(row.ids), 1)]) for row in own]
    batch = xtreme_rows.batch_of(own, tokenizer.pad)
    mask = torch.tensor([[place < len(row.ids) for place in range(batch.ids.shape[1])] for row in own])
    assert not mask.all() and len(ours.state_dict()) > 20
    with torch.no_grad():
        logits, _ = ours(batch.ids, batch.real, batch.words)
        expected = theirs(batch.ids, attention_mask=mask.long())
    if kind == "label":
        expected = expected.logits
    elif kind == "tags":
        expected = torch.stack([expected.logits[i, place] for i, row in enumerate(own) for place, _ in row.marks])
    else:
        expected = torch.stack([expected.start_logits, expected.end_logits], dim=1).flatten(0, 1)
        padding = ~mask.repeat_interleave(2, dim=0)
        assert (logits[padding] == -math.inf).all()
        logits, expected = logits[~padding], expected[~padding]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Presets, tables, the search


def test_the_presets_are_the_papers():
    """X-MoE appendix C and XLM-E table 11: rows of a step, rates, epochs, warm-up, decay; a tuple was searched."""
    tags, answers = (1e-5, 2e-5, 3e-5), (2e-5, 3e-5, 4e-5)
    ner, few = (5e-6, 6e-6, 7e-6, 8e-6, 9e-6), (2, 3, 4)
    papers = {
        "xmoe-pos": (8, tags, 10, 0.1, 0),
        "xmoe-ner": (8, ner, 10, 0.1, 0),
        "xmoe-xquad": (32, answers, few, 0.1, 0),
        "xmoe-mlqa": (32, answers, few, 0.1, 0),
        "xmoe-tydiqa": (32, answers, (10, 20, 40), 0.1, 0),
        "xmoe-xnli": (32, 2e-5, 5, 0.2, 0.01),
        "xmoe-pawsx": (32, (1e-5, 2e-5), 10, 0.1, 0),
        "xlme-pos": ((8, 16, 32), tags, 10, 0.1, 0),
        "xlme-ner": (8, ner, 10, 0.1, 0),
        "xlme-xquad": (32, answers, 4, 0.1, 0),
        "xlme-mlqa": (32, answers, few, 0.1, 0),
        "xlme-tydiqa": (32, answers, (10, 20, 40), 0.1, 0),
        "xlme-xnli": (32, (5e-6, 6e-6, 7e-6, 8e-6), 10, 12_500 / 122_720, 0),
        "xlme-pawsx": (32, (8e-6, 9e-6, 1e-5, 2e-5), 10, 0.1, 0),
    }
    samples = {f"sample-{task}" for task in xtreme.TASKS if task != "apps"}
    assert papers.keys() | samples | {"demo"} == PRESETS.keys() == SEARCHED.keys()
    assert not any(SEARCHED[preset] for preset in samples)
    for preset, numbers in papers.items():
        config, searched = Config(preset=preset, **PRESETS[preset]), {}
        for name, value in zip(("batch_size", "learning_rate", "epochs", "warmup", "weight_decay"), numbers):
            values = value if isinstance(value, tuple) else (value,)
            assert getattr(config, name) in values, (preset, name)
            if len(values) > 1:
                searched[name] = values
        if preset.startswith("xmoe"):
            searched["balance_coef"] = (0.0, 1e-3, 1e-2, 1e-1)
        assert SEARCHED[preset] == searched and config.frozen
        runs.check(config)
        assert config.block_size == (384 if xtreme.TASKS[config.task].kind == "answer" else 128)


def names_of(script, preset: str) -> set[str]:
    """The runs of all tables of a script."""
    found = set()
    for table in script.TABLES.values():
        base = script.Config(preset=preset, **script.PRESETS[preset])
        for _, change in table(base).rows:
            (config,) = runs.seeds_of(base, change)
            found.add(f"{script.__name__}/{runs.run_name(config, script.PRESETS)}")
    return found


@pytest.mark.parametrize("number", TITLES)
def test_a_row_s_encoder_is_a_run_of_the_other_scripts_under_its_name(number):
    known = names_of(train_mlm, "demo") | names_of(train_electra, "demo")
    for label, encoder, _, _ in [row for own, *row in ROWS if own == number]:
        name = encoder.format("demo")
        if "=topk" not in name:
            assert name in known, label
            continue
        config = train_mlm.Config(**dict(part.split("=") for part in name.split("-")[1:]))
        assert f"train_mlm/{runs.run_name(config, train_mlm.PRESETS)}" == name and sizes(config).top_k == 2


@pytest.mark.parametrize("preset", ["demo", "xmoe-xnli", "xlme-pos"])
@pytest.mark.parametrize("number", TITLES)
def test_a_row_has_the_constants_of_its_task_and_nothing_of_another(number, preset):
    base = Config(preset=preset, **PRESETS[preset], encoders="base")
    _, tasks = TITLES[number]
    encoders = [row for own, *row in ROWS if own == number]
    rows = TABLES[number](base).rows
    expected = [(label, task) for label, *_ in encoders for task in tasks]
    assert [labels[:2] for labels, _ in rows] == expected
    for ((_, task, _), change), (_, encoder, differs, _) in zip(rows, [own for own in encoders for _ in tasks]):
        (config,) = runs.seeds_of(base, change)
        own = f"sample-{task}" if preset == "demo" else f"{preset.split('-')[0]}-{task}"
        given = PRESETS[own] | {"task": task, "encoders": "base", "model": f"out/{encoder.format('base')}"}
        assert config == Config(preset=own, **given | differs)


def test_a_table_runs_every_row(options, encoders, tmp_path, monkeypatch, capsys):
    options = {name: value for name, value in options.items() if name not in ("model", "task", "learning_rate")}
    options |= {"preset": "xmoe-xnli", "table": "7", "source": options["source"].resolve()}
    for name in ("batch_size", "micro_size", "epochs"):
        options.pop(name)
    options |= {"train_examples": 8}
    monkeypatch.chdir(tmp_path)
    assert "its rows have a --epochs of their own" in XTREME.refused(options | {"epochs": 9}, monkeypatch, capsys)
    assert "out/train_mlm/tiny-router=switch does not exist" in XTREME.refused(
        options | {"encoders": "tiny"}, monkeypatch, capsys
    )
    for name, encoder in (("router=switch", "switch"), ("", "hypersphere"), ("router=topk", "switch")):
        folder = tmp_path / "out" / "train_mlm" / "-".join(filter(None, ("demo", name)))
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(encoders[encoder])
    (tmp_path / "out" / "train_mlm" / "demo-select=topk").symlink_to(encoders["hypersphere"])
    options["out_dir"] = tmp_path / "runs"
    XTREME.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[:2] for row in rows] == [[label, "xnli"] for label, *_ in [row for own, *row in ROWS if own == "7"]]
    found = [json.loads(file.read_text()) for file in options["out_dir"].glob("*/result.json")]
    assert sorted((result["config"]["model"], result["config"]["frozen"]) for result in found) == [
        ("out/train_mlm/demo", True),
        ("out/train_mlm/demo-router=switch", False),
        ("out/train_mlm/demo-router=topk", False),
        ("out/train_mlm/demo-select=topk", True),
    ]
    (mine,) = (result for result in found if result["config"]["model"] == "out/train_mlm/demo")
    scores = mine["languages"]
    numbers = [mine["mean"]["accuracy"], None, mine["guess"]["accuracy"], mine["counting"]["accuracy"]]
    english, german = (scores[language]["accuracy"] for language in ("en", "de"))
    numbers += [english, english - german, mine["valid"]["accuracy"]]
    assert rows[1][3:] == ["" if number is None else f"{number:.1f}" for number in numbers]


def test_the_search_runs_every_combination_and_names_the_best(options, monkeypatch, capsys):
    options |= {"preset": "xmoe-xnli", "search": True, "epochs": 1, "train_examples": 16}
    options.pop("task")
    given = {"balance_coef": 0.5}
    assert "its rows have a --balance_coef of" in XTREME.refused(options | given, monkeypatch, capsys)
    for given in ({"seeds": 2}, {"table": "1"}, {"preset": "demo", "task": "xnli"}):
        assert "--search is for one preset of a paper" in XTREME.refused(options | given, monkeypatch, capsys)
    points = iter([10.0, 30.0, 40.0, 20.0])
    monkeypatch.setattr(finetune_xtreme, "main_score", lambda scores: next(points))
    XTREME.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["0.01", "0.001", "0.1", "0.0"]
    found = {}
    for file in options["out_dir"].glob("*/result.json"):
        result = json.loads(file.read_text())
        found[str(result["config"]["balance_coef"])] = result
    assert len(found) == 4
    for coefficient, valid, mean in rows:
        assert valid == f"accuracy {found[coefficient]['valid']['accuracy']:.1f}"
        assert mean == f"accuracy {found[coefficient]['mean']['accuracy']:.1f}"


# ---------------------------------------------------------------------------------------------------------------------
# Bad input

BAD = {
    "no model": ({"model": "out/train_mlm/x"}, "out/train_mlm/x does not exist: train it with train_mlm.py"),
    "no model in it": ({"model": "."}, ". is neither the folder of a run nor of a model"),
    "no such source": ({"source": "nowhere"}, "nowhere does not exist: it should hold the files of xnli"),
    "preset": ({"preset": "xmoe-apps"}, "preset must be one of demo, xmoe-pos"),
    "no such table": ({"table": "9", "task": "apps"}, "table must be one of 1, 3, 5, 6, 7, xlme1, xlme2, xlme7, not 9"),
    "not of this task": ({"stride": 4}, "--stride is not read by a model with task xnli"),
    "no table": ({"encoders": "small"}, "--encoders is not read by a model with task xnli"),
    "apps has no files": ({"task": "apps"}, "--source is not read by a model with task apps"),
    "micro-batch": ({"micro_size": 3}, "micro_size = 3 does not divide batch_size = 8"),
    "rate": ({"learning_rate": "nan"}, "learning_rate must be over 0 and finite"),
    "longest row": ({"block_size": 7}, "block_size = 7 leaves a row no room"),
    "longer row": ({"block_size": 64}, "has 32 positions, fewer than --block_size 64"),
    "predict": ({"predict": "in.txt"}, "--predict reads --model, --device, --dtype alone: leave out --batch_size"),
    "predict answers": ({"predict": "in.txt", "longest_answer": 4}, "--predict reads --model, --device, --dtype alone"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, options, monkeypatch, capsys):
    given, message = BAD[case]
    assert message in XTREME.refused(options | given, monkeypatch, capsys)
    assert not options["out_dir"].exists()


def test_other_models_are_refused(options, encoders, corpora, tmp_path, monkeypatch, capsys):
    def refused(**given) -> str:
        return XTREME.refused(options | given, monkeypatch, capsys)

    assert "is no encoder: give a run of train_mlm.py" in refused(model=encoders["decoder"])
    alone = {"predict": "in.txt", "model": encoders["decoder"], "device": "cpu"}
    assert "holds no fine-tuned model: give a folder under" in XTREME.refused(alone, monkeypatch, capsys)
    XTREME.run(options | {"epochs": 1}, monkeypatch)
    capsys.readouterr()
    assert "holds checkpoints of something else" in refused(model=only_run(options["out_dir"]))
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5)
    transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**shape)).save_pretrained(tmp_path / "hub")
    capsys.readouterr()
    assert "has no sentencepiece.bpe.model" in refused(model=tmp_path / "hub")
    (tmp_path / "hub" / "sentencepiece.bpe.model").write_bytes(corpora["spm"].read_bytes())
    assert "its tokenizer has 295 pieces, not those of its model" in refused(model=tmp_path / "hub")


def test_bad_sources_are_one_clear_line(options, source, tmp_path, monkeypatch, capsys):
    def refused(**given) -> str:
        return XTREME.refused(options | given, monkeypatch, capsys)

    (tmp_path / "files").mkdir()
    assert "holds no English training examples of xnli" in refused(source=tmp_path / "files")
    for name in ("train-en.tsv", "dev-en.tsv"):
        shutil.copy(source / "xnli" / name, tmp_path / "files")
    assert "holds no test examples of xnli" in refused(source=tmp_path / "files")
    shutil.copy(source / "xnli" / "test-en.tsv", tmp_path / "files")
    assert "is one file, to score: what to train on is --train_source" in refused(source=tmp_path / "files/test-en.tsv")
    (tmp_path / "files" / "dev-en.tsv").unlink()
    (tmp_path / "files" / "train-en.tsv").write_text("dog\tcat\tneutral\n")
    assert "too few English training examples of xnli" in refused(source=tmp_path / "files")
    (tmp_path / "files" / "train-en.tsv").write_text("".join(f"dog {i}\tcat\tmaybe\n" for i in range(60)))
    with pytest.raises(SystemExit):
        XTREME.run(options | {"source": tmp_path / "files"}, monkeypatch)
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line == "error: no training example of xnli has a label that is known"


def test_broken_rows_are_reported_and_left_out(options, source, tmp_path, monkeypatch, capsys):
    shutil.copytree(source, tmp_path / "source")
    train, test = (tmp_path / "source" / "xnli" / f"{name}.tsv" for name in ("train-en", "test-de"))
    train.write_text(train.read_text() + "dog\n" * 3 + "dog\tcat\tmaybe\n")
    test.write_bytes(b"\xff\t\n")
    XTREME.run(options | {"source": tmp_path / "source", "epochs": 1}, monkeypatch)
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("warning: ")]
    assert lines == [
        f"warning: {train}: 3 x a line that is not two sentences and a label",
        f"warning: {train}: 1 x the unknown label 'maybe'",
        f"warning: {test} is not UTF-8: byte 0: left out",
    ]
    assert "48 rows of 49 training examples, up to 32 tokens each" in said.out
    result = result_of(options["out_dir"])
    assert result["longest_row"] == 32
    assert list(result["languages"]) == ["en"] and result["gap"] == {}
    assert "English is ahead" not in said.out


def test_a_file_that_cannot_be_predicted_is_one_clear_line(options, tmp_path, monkeypatch, capsys):
    XTREME.run(options | {"epochs": 1}, monkeypatch)
    file = tmp_path / "in.txt"
    capsys.readouterr()
    model = {"model": only_run(options["out_dir"]), "device": "cpu", "predict": file}
    assert "No such file or directory" in XTREME.refused(model, monkeypatch, capsys)
    for text, message in ((b"dog\tcat\ndog\n", "line 2: 1 texts between TABs, not 2"), (b"\xff", "is not UTF-8")):
        file.write_bytes(text)
        assert message in XTREME.refused(model, monkeypatch, capsys)
    file.write_bytes(b"")
    XTREME.run(model, monkeypatch)
    assert capsys.readouterr().out == ""


def test_weights_that_the_last_update_broke_are_not_saved(options, monkeypatch, capsys):
    """Every training loss was finite."""
    updates = []

    def step(self, *_, f=torch.optim.AdamW.step):
        found = f(self)
        updates.append(1)
        if len(updates) == 12:
            self.param_groups[0]["params"][0].data.fill_(math.inf)
        return found

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert "not finite at step 12" in XTREME.refused(options, monkeypatch, capsys)
    assert saved(options)["step"] == 6 and not (only_run(options["out_dir"]) / "result.json").exists()
