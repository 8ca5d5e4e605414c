"""`finetune_xtreme.py` as a user runs it, on tiny encoders and tasks of a few words whose rules are obvious."""

import dataclasses
import json
import math
import shutil
import signal
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from helpers import TORCHRUN, Script, finish, losses, metrics, only_run, result_of, stopped, table_rows

import finetune_xtreme
import train_electra
import train_lm
import train_mlm
from data import xtreme, xtreme_rows, xtreme_scores
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine import pretrained
from engine.config import check, run_name
from engine.device import setup
from engine.optim import adamw
from engine.run import load_checkpoint
from finetune_xtreme import PRESETS, ROWS, TABLES, TITLES, Config, FineTuned
from routers import Router

XTREME = Script(finetune_xtreme)
TINY = dict(epochs=2, batch_size=8, micro_size=4, learning_rate=1e-2, dropout=0.1, log_every=1, device="cpu")
TINY |= dict(dtype="float32")
ENCODER = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=32, steps=1, eval_every=1, batch_tokens=128)
ENCODER |= dict(micro_tokens=128, device="cpu", dtype="float32")
SPARSE = dict(experts=4, expert_size=16, moe_after=(1,))
ENCODERS = {  # script, and its constants
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
    lines = []
    for sentence in sentences:
        lines += [f"{word}\t{TAG[word]}\n" for word in translate(sentence, language)]
        lines.append("\n")
    return "".join(lines)


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


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """XTREME's folders of three tasks: English to train on and to choose by; English and German to score."""
    folder, files = tmp_path_factory.mktemp("xtreme"), {}
    for seed, (split, count) in enumerate(COUNTS.items()):
        sentences = drawn(count, seed)
        for language in ("en", "de") if split == "test" else ("en",):
            files[f"udpos/{split}-{language}.tsv"] = tag_lines(sentences, language)
            files[f"xnli/{split}-{language}.tsv"] = label_lines(sentences, language)
            name = f"xquad/xquad.{language}.json" if split == "test" else f"squad/{split}-v1.1.json"
            files[name] = answers(sentences, language)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
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
        sentences, found = drawn(20, ("train", "valid", "test").index(split)), {}
        for language in ("de", "en"):
            found[language] = []
            for words in sentences:
                text = " ".join(translate(words, language))
                found[language].append(xtreme.Example("", (text,), "a" if "dog" in words else "b"))
        return found

    monkeypatch.setattr(xtreme, "applications", applications)


def for_apps(options: dict) -> dict:
    return {name: value for name, value in options.items() if name not in ("source", "task")}


def saved(options: dict, name: str = "ckpt.pt") -> dict:
    return load_checkpoint(only_run(options["out_dir"]) / name)


def predictions(folder: Path) -> dict[str, str]:
    """What a run has predicted, by the names of its files."""
    run = only_run(folder)
    return {str(file.relative_to(run)): file.read_text() for file in sorted(run.glob("*/test-*"))}


def opened(options: dict) -> tuple:
    """Config, examples, model, training data and context of a run before its first step."""
    config = Config(**{name: str(value) if isinstance(value, Path) else value for name, value in options.items()})
    context = setup("cpu", config.dtype)
    examples, model, data = finetune_xtreme.set_up(config)
    return config, examples, context.place(model), data, context


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def in_words(scores: dict) -> str:
    return ", ".join(f"{metric} {value:.1f}" for metric, value in scores.items())


def line(name: str, scores: dict, guess: dict, counted: dict) -> str:
    """A line of the report."""
    return f"{name:10}{in_words(scores):22}{in_words(guess):24}{in_words(counted)}".rstrip()


@pytest.mark.parametrize(
    "encoder, task", [("hypersphere", "pos"), ("electra", "xquad"), ("switch", "xnli"), ("electra", "apps")]
)
def test_every_kind_of_task_is_trained_scored_and_reported(encoder, task, options, encoders, monkeypatch, capsys):
    options |= {"task": task, "model": encoders[encoder], "epochs": 1}
    XTREME.run(for_apps(options) if task == "apps" else options, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    assert list(result["languages"]) == list(result["guesses"]) == ["de", "en"] and result["unlabelled"] == []
    assert list(result["counted"]) == ([] if task == "xquad" else ["de", "en"])
    for kind, mean in (("languages", "mean"), ("guesses", "guess"), ("counted", "counting")):
        for metric, value in result[mean].items():
            assert value == pytest.approx(fmean(scores[metric] for scores in result[kind].values()))
    english, german = (result["languages"][language] for language in ("en", "de"))
    assert list(english) == {"pos": ["f1"], "xquad": ["f1", "em"]}.get(task, ["accuracy"])
    assert result["gap"] == pytest.approx({metric: english[metric] - german[metric] for metric in english})
    report = out.split("\n\n")[-1].splitlines()
    for language in ("de", "en"):
        scores = [result[kind].get(language, {}) for kind in ("languages", "guesses", "counted")]
        assert line(language, *scores) in report
    assert line("mean", result["mean"], result["guess"], result["counting"]) in report
    assert ("a smoke test, no task of XTREME's" in report[0]) == (task == "apps")
    assert report[-1] == f"English is ahead of the mean of the others by {in_words(result['gap'])}"
    assert result["step"] == {"apps": 3, "xquad": 7}.get(task, 6)  # rows / 8


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


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_routers_and_experts_stay_bit_for_bit(frozen, options, encoders, monkeypatch):
    XTREME.run(options | {"frozen": frozen, "weight_decay": 0.01}, monkeypatch)
    before, after = pretrained.load(encoders["hypersphere"])[0].state_dict(), saved(options, "model.pt")["model"]
    moved = {name for name, x in before.items() if not torch.equal(x, after[f"encoder.{name}"])}
    sparse = {name for name in before if name.startswith("moes.")}
    assert "moes.0.router.temperature" in sparse
    assert moved == (before.keys() - sparse if frozen else before.keys())
    # expert embeddings are put back on their sphere
    torch.testing.assert_close(after["encoder.moes.0.router.experts"].norm(dim=1), torch.full((4,), 0.1))


@pytest.mark.parametrize("task", TASKS)
def test_every_step_has_its_learning_rate_and_the_mean_gradient(task, options, monkeypatch):
    """That of the balance loss, too, which passes through frozen experts."""
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
    config, _, model, data, _ = opened(options)
    for moe in model.moe_layers:
        moe.requires_grad_(False)
    for micro in range(2):
        batch = data.batch(0, micro)
        logits, balance = model(batch.ids, batch.real, batch.words)
        (0.25 * balance).backward(retain_graph=True)
        assert model.encoder.layers[0].ffn.fc.weight.grad.abs().sum() > 0
        (torch.nn.functional.cross_entropy(logits, batch.targets) / 2).backward()
    groups = adamw(model, config).param_groups
    expected = [p.grad for group in groups for p in group["params"]]
    torch.testing.assert_close(seen[0], expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Stopped runs, and several processes


def test_a_signal_between_evaluations_changes_nothing(options, tmp_path, monkeypatch, capsys):
    options |= {"task": "pos", "train_examples": 16}
    whole, ended = (options | {"out_dir": tmp_path / name} for name in ("whole", "ended"))
    assert "stopped at step 3" in stopped(XTREME, 2, signal.SIGTERM, ended, capsys)
    XTREME.run(ended, monkeypatch)
    XTREME.run(whole, monkeypatch)
    ours, theirs = saved(ended), saved(whole)
    for name in ("model", "kept"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True)
    assert losses(ended["out_dir"]) == losses(whole["out_dir"])


def test_a_run_that_was_killed_while_it_predicted_ends_as_if_it_was_not(options, tmp_path, monkeypatch):
    """Of the development set of two epochs, or of either language; a finished run predicts nothing again."""
    calls, predict = [], finetune_xtreme.predict

    def counted(*arguments):
        if len(calls) == stop_at:
            raise InterruptedError
        calls.append(1)
        return predict(*arguments)

    stop_at, whole = None, options | {"out_dir": tmp_path / "whole"}
    monkeypatch.setattr(finetune_xtreme, "predict", counted)
    for _ in range(2):
        XTREME.run(whole, monkeypatch)
        assert len(calls) == 4
    for place in range(4):
        calls.clear()
        stop_at, killed = place, options | {"out_dir": tmp_path / str(place)}
        with pytest.raises(InterruptedError):
            XTREME.run(killed, monkeypatch)
        stop_at = None
        XTREME.run(killed, monkeypatch)
        ours, theirs = result_of(killed["out_dir"]), result_of(whole["out_dir"])
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
        torch.testing.assert_close(saved(killed)["model"], saved(whole)["model"], rtol=0, atol=0)
        assert predictions(killed["out_dir"]) == predictions(whole["out_dir"])


def test_other_examples_or_another_encoder_are_other_data(options, source, encoders, tmp_path, monkeypatch, capsys):
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

    def rate(*args, linear=finetune_xtreme.linear):
        steps.append(1)
        return linear(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", record)
        patch.setattr(finetune_xtreme, "linear", rate)
        XTREME.run(options, patch)
    ours = result_of(options["out_dir"])
    assert ours["loads"] == [[[counts[expert] for expert in range(4)]]]
    two = options | {"out_dir": tmp_path / "two"}
    shutil.copytree(options["out_dir"], two["out_dir"])
    folder = only_run(two["out_dir"])
    state = saved(two, "ckpt.prev.pt")
    assert state["step"] == 98 and int(state["kept"]["pending"][0].sum()) > 0
    (folder / "ckpt.prev.pt").replace(folder / "ckpt.pt")
    for name in ("result.json", "model.pt", "xnli/test-de.tsv"):
        (folder / name).unlink()
    assert "goes on from step" in finish(XTREME.start(two, *TORCHRUN), two)
    theirs = result_of(two["out_dir"])
    for name in ("languages", "guesses", "valid", "step", "loads"):
        assert ours[name] == theirs[name], name
    assert metrics(options["out_dir"])[-1]["train_loss"] == pytest.approx(losses(two["out_dir"])[-1], rel=1e-7)
    ours, theirs = saved(options), saved(two)
    torch.testing.assert_close(theirs["model"], ours["model"], rtol=1e-7, atol=1e-9)
    assert ours["step"] == 105 and torch.equal(ours["kept"]["pending"][0], theirs["kept"]["pending"][0])


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and what is predicted


def test_the_checkpoint_is_the_best_in_english_development(options, monkeypatch):
    weights, points, predict = [], iter([50.0, 80.0, 80.0, 60.0]), finetune_xtreme.predict

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
    config, examples, model, data, context = opened(options)
    model.load_state_dict(weights[1])
    for language, own in examples.test.items():
        expected = predict(model, own, config, data.tokenizer, context)
        assert predictions(options["out_dir"])[f"xnli/test-{language}.tsv"].split() == expected


def unlabelled(task: str, file: Path):
    """Takes the labels away, as XTREME's scripts do."""
    text = file.read_text()
    if task == "xquad":
        data = json.loads(text)
        for row in data["data"][0]["paragraphs"]:
            row["qas"][0]["answers"] = [{"answer_start": 0, "text": ""}]
        text = json.dumps(data)
    else:
        text = "".join("\t".join(line.split("\t")[:-1]) + "\n" for line in text.splitlines())
    file.write_text(text)


@pytest.mark.parametrize("missing", [["de"], ["de", "en"]])
@pytest.mark.parametrize("task", TASKS)
def test_what_is_predicted_does_not_need_labels(task, missing, options, source, tmp_path, monkeypatch, capsys):
    """Of every example; scores follow from the files alone. Rows are so short that texts take several."""
    options |= {"task": task, "block_size": 16, "source": tmp_path / "source"}
    if task == "xquad":
        options |= {"stride": 3, "longest_answer": 4}
    shutil.copytree(source, options["source"])
    XTREME.run(options, monkeypatch)
    result, (_, examples, *_) = result_of(options["out_dir"]), opened(options)
    expected = predictions(options["out_dir"])
    for language, own in examples.test.items():
        name = {"pos": "udpos/test-{}.tsv", "xnli": "xnli/test-{}.tsv", "xquad": "xquad/test-{}.json"}[task]
        text = expected[name.format(language)]
        if task == "pos":
            found = [sentence.split("\n") for sentence in text.removesuffix("\n").split("\n\n")]
        else:
            found = text.splitlines() if task == "xnli" else [json.loads(text)[one.id] for one in own]
        gold = [one.gold for one in own]
        assert xtreme_scores.scores(task, language, gold, found) == pytest.approx(result["languages"][language])
    for language in missing:
        names = {"pos": "udpos/test-{}.tsv", "xnli": "xnli/test-{}.tsv", "xquad": "xquad/xquad.{}.json"}
        unlabelled(task, options["source"] / names[task].format(language))
    capsys.readouterr()
    options["out_dir"] = tmp_path / "unlabelled"
    XTREME.run(options, monkeypatch)
    said, folder = capsys.readouterr(), only_run(options["out_dir"])
    assert predictions(options["out_dir"]) == expected
    result = result_of(options["out_dir"])
    assert result["unlabelled"] == missing and result["languages"].keys() == {"de", "en"} - {*missing}
    assert said.err.count("x an example without its label") == len(missing)
    last = said.out.strip().splitlines()[-1]
    assert last == f"no test labels, not scored: {', '.join(missing)}; what was predicted is in {folder}"
    cells = finetune_xtreme.cells(result)
    assert (cells["F1 or accuracy"][0] is None) == (len(missing) == 2) and cells["English dev"][0] is not None


def test_dropout_is_that_of_the_command_line(options):
    """Whatever the encoder was trained with."""
    _, _, model, _, _ = opened(options | {"dropout": 0.3})
    found = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(found) > 3 and set(found) == {0.3} == {layer.attn.dropout for layer in model.encoder.layers}


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
    lengths = torch.tensor([len(row.ids) for row in own])
    mask = torch.arange(batch.ids.shape[1]) < lengths.unsqueeze(1)
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
# Presets and tables


def test_a_preset_takes_the_middle_of_what_was_searched():
    rates = {"xmoe-pos": 2e-5, "xmoe-ner": 7e-6, "xmoe-pawsx": 2e-5, "xlme-xnli": 7e-6, "xlme-xquad": 3e-5}
    for preset, rate in rates.items():
        assert PRESETS[preset]["learning_rate"] == rate
    assert PRESETS["xmoe-tydiqa"]["epochs"] == 20 and PRESETS["xmoe-xnli"]["balance_coef"] == 1e-2
    for preset, constants in PRESETS.items():
        config = Config(preset=preset, **constants)
        check(config)
        length = {"answer": 384, "tags": 128, "label": 128}[xtreme.TASKS[config.task].kind]
        assert preset == "demo" or (preset.endswith(f"-{config.task}") and config.block_size == length)


def names_of(script) -> set[str]:
    """The runs of all tables of a script at the demo's scale."""
    found = set()
    for table in script.TABLES.values():
        for _, change in table(script.Config()).rows:
            found.add(f"{script.__name__}/{run_name(script.Config(**change), script.PRESETS)}")
    return found


@pytest.mark.parametrize("number", TITLES)
def test_a_row_s_encoder_is_a_run_of_the_other_scripts_under_its_name(number):
    known = names_of(train_mlm) | names_of(train_electra)
    for router in ({}, {"router": "topk"}):  # two experts a token are in no table of train_mlm.py
        known.add(f"train_mlm/{run_name(train_mlm.Config(**router, top_k=2), train_mlm.PRESETS)}")
    assert known >= {encoder.format("demo") for own, _, encoder, *_ in ROWS if own == number}


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
        config = dataclasses.replace(base, **change)
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
    (tmp_path / "out/train_mlm").mkdir(parents=True)
    for name, encoder in (("", "hypersphere"), ("-top_k=2", "hypersphere")):
        (tmp_path / f"out/train_mlm/demo{name}").symlink_to(encoders[encoder])
    for name in ("-router=switch", "-router=topk-top_k=2"):
        (tmp_path / f"out/train_mlm/demo{name}").symlink_to(encoders["switch"])
    options["out_dir"] = tmp_path / "runs"
    XTREME.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[:2] for row in rows] == [[label, "xnli"] for own, label, *_ in ROWS if own == "7"]
    found = [json.loads(file.read_text()) for file in options["out_dir"].glob("*/result.json")]
    assert sorted((result["config"]["model"], result["config"]["frozen"]) for result in found) == [
        ("out/train_mlm/demo", True),
        ("out/train_mlm/demo-router=switch", False),
        ("out/train_mlm/demo-router=topk-top_k=2", False),
        ("out/train_mlm/demo-top_k=2", True),
    ]
    (mine,) = (result for result in found if result["config"]["model"] == "out/train_mlm/demo")
    scores = mine["languages"]
    numbers = [mine["mean"]["accuracy"], None, mine["guess"]["accuracy"], mine["counting"]["accuracy"]]
    english, german = (scores[language]["accuracy"] for language in ("en", "de"))
    numbers += [english, english - german, mine["valid"]["accuracy"]]
    assert rows[1][3:] == ["" if number is None else f"{number:.1f}" for number in numbers]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input

BAD = {
    "no model": ({"model": "out/train_mlm/x"}, "out/train_mlm/x does not exist: train it with train_mlm.py"),
    "no model in it": ({"model": "."}, ". is neither the folder of a run nor of a model"),
    "no such source": ({"source": "nowhere"}, "nowhere is no folder: it should hold the files of xnli"),
    "preset": ({"preset": "xmoe-apps"}, "preset must be one of demo, xmoe-pos"),
    "no such table": ({"table": "9", "task": "apps"}, "table must be one of 1, 3, 5, 6, 7, xlme1, xlme2, xlme7, not 9"),
    "not of this task": ({"stride": 4}, "--stride is not read with --task xnli"),
    "no table": ({"encoders": "small"}, "--encoders is not read with --task xnli"),
    "apps has no files": ({"task": "apps"}, "--source is not read with --task apps"),
    "micro-batch": ({"micro_size": 3}, "micro_size = 3 does not divide batch_size = 8"),
    "longest row": ({"block_size": 7}, "block_size = 7 leaves a row no room"),
    "longer row": ({"block_size": 64}, "has 32 positions, fewer than --block_size 64"),
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
    shutil.copytree(encoders["hypersphere"], tmp_path / "changed")
    train_sentencepiece([" ".join(GERMAN)] * 9, 280, XLMR).save(tmp_path / "changed")
    assert "was trained with another vocabulary than the tokenizer in it" in refused(model=tmp_path / "changed")
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
    files = tmp_path / "files"
    shutil.copytree(source / "xnli", files)
    options |= {"source": files / "test-en.tsv"}
    assert "test-en.tsv is no folder: it should hold" in XTREME.refused(options, monkeypatch, capsys)
    (files / "train-en.tsv").write_text("".join(f"dog {i}\tcat\tmaybe\n" for i in range(60)))
    with pytest.raises(SystemExit):
        XTREME.run(options | {"source": files}, monkeypatch)
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line == "error: no training example of xnli has a label that is known"
    for name in ("train-en.tsv", "dev-en.tsv"):
        (files / name).unlink()
    said = XTREME.refused(options | {"source": files}, monkeypatch, capsys)
    assert "holds no English training examples of xnli" in said


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
    assert "48 rows of at most 32 tokens, 6 steps" in said.out
    result = result_of(options["out_dir"])
    assert list(result["languages"]) == ["en"] and result["gap"] == {}
    assert "English is ahead" not in said.out


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
