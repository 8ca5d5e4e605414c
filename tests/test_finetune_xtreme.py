"""`finetune_xtreme.py` as a user runs it, with tiny encoders and tasks of a few words with obvious rules."""

import dataclasses
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from helpers import TORCHRUN, Script, finish, losses, metrics, only_run, result_of, saved, table_rows, write_files

import finetune_xtreme
import train_electra
import train_mlm
from data import xtreme, xtreme_rows
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine import pretrained
from engine.config import check, run_name
from engine.device import setup
from engine.run import Run
from finetune_xtreme import COLUMNS, PRESETS, ROWS, TABLES, TITLES, Config, FineTuned
from metrics import crosslingual
from metrics.scores import score_task
from routers import Router

XTREME = Script(finetune_xtreme)
TINY = dict(epochs=2, batch_size=8, micro_size=4, learning_rate=1e-2, dropout=0.1, log_every=1, device="cpu")
TINY |= dict(dtype="float32")
ENCODER = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=32, steps=1, eval_every=1, batch_tokens=128)
ENCODER |= dict(micro_tokens=128, device="cpu", dtype="float32")
ENCODER |= dict(experts=4, expert_size=16, moe_after=(1,))
ENCODERS = {"switch": dict(router="switch"), "hypersphere": dict(recompute=True)}

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
    """SQuAD's format. The answer is the only animal in the text."""
    rows = []
    for number, sentence in enumerate(sentences):
        words = [word for word in sentence if TAG[word] != "NOUN"] + ["and"]
        place = number % len(words)
        words.insert(place, list(KINDS["NOUN"])[number % 2])
        words = translate(words, language)
        answer = {"text": words[place], "answer_start": len("".join(f"{word} " for word in words[:place]))}
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
    """XTREME's folders of three tasks: training and development sets in English, test sets in English and German."""
    folder, files = tmp_path_factory.mktemp("xtreme"), {}
    for seed, (split, count) in enumerate(COUNTS.items()):
        sentences = drawn(count, seed)
        for language in ("en", "de") if split == "test" else ("en",):
            files[f"udpos/{split}-{language}.tsv"] = tag_lines(sentences, language)
            files[f"xnli/{split}-{language}.tsv"] = label_lines(sentences, language)
            name = f"xquad/xquad.{language}.json" if split == "test" else f"squad/{split}-v1.1.json"
            files[name] = answers(sentences, language)
    return write_files(folder, files)


@pytest.fixture(scope="session")
def encoders(tmp_path_factory) -> dict[str, Path]:
    """The folders of ENCODERS, each trained for one step."""
    base, texts, files, folders = tmp_path_factory.mktemp("encoders"), [], {}, {}
    for language in ("de", "en"):
        own = [" ".join(translate(words, language)) for words in drawn(200, 9)]
        texts += own
        for split, part in {"train": own[:160], "valid": own[160:180], "test": own[180:]}.items():
            files[f"{language}.{split}.txt"] = "\n\n".join(part)
    spm = train_sentencepiece(texts, 295, XLMR).save(base)
    data = prepare("cc100", write_files(base / "text", files), tokenizer=spm, out=base / "prepared")
    with pytest.MonkeyPatch.context() as patch:
        for name, constants in ENCODERS.items():
            given = ENCODER | constants | {"data": data, "eval_maskings": 1, "out_dir": base / name}
            Script(train_mlm).run(given, patch)
            folders[name] = only_run(base / name)
    return folders


@pytest.fixture
def options(encoders, source, tmp_path) -> dict:
    return TINY | {"model": encoders["hypersphere"], "source": source, "task": "xnli", "out_dir": tmp_path / "out"}


def predictions(folder: Path) -> dict[str, str]:
    """The predictions of a run, by file name."""
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


LEARNED = {  # one task of each kind
    "pos": dict(epochs=12, learning_rate=1e-2),
    "xquad": dict(epochs=15, learning_rate=1e-2),
    "xnli": dict(epochs=60, learning_rate=1e-3),  # a higher rate merges two of the three words
}


@pytest.mark.parametrize("task", LEARNED)
def test_every_kind_of_task_is_learned_scored_and_reported(task, options, monkeypatch, capsys):
    """The rule is obvious: every English example is right, and a guess is worse."""
    options |= {"task": task, "dropout": 0.0} | LEARNED[task]
    XTREME.run(options, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    assert list(result["languages"]) == list(result["guesses"]) == ["de", "en"]
    assert result["unlabelled"] == []
    assert list(result["counted"]) == ([] if task == "xquad" else ["de", "en"])
    for kind, mean in COLUMNS.items():
        for metric, value in result[mean].items():
            assert value == pytest.approx(fmean(scores[metric] for scores in result[kind].values()))
    english, german = (result["languages"][language] for language in ("en", "de"))
    assert list(english) == {"pos": ["f1"], "xquad": ["f1", "em"]}.get(task, ["accuracy"])
    assert result["gap"] == pytest.approx({metric: english[metric] - german[metric] for metric in english})
    title, table, gap = out.strip().split("\n\n")[-3:]
    rows = [[language, *(result[kind].get(language, {}) for kind in COLUMNS)] for language in ("de", "en")]
    rows.append(["mean", *(result[mean] for mean in COLUMNS.values())])
    assert table_rows(table) == [[name, *map(in_words, scores)] for name, *scores in rows]
    assert title.endswith("best in English development")
    assert gap == f"English minus the mean of the other languages: {in_words(result['gap'])}"
    assert set(result["languages"]["en"].values()) == {100.0} == set(result["valid"].values())
    assert max(result["guesses"]["en"].values()) < 70
    first, *_, last = losses(options["out_dir"])
    assert last < 0.5 * first


@pytest.fixture
def laboratory(monkeypatch):
    """Words in place of ciphers in the laboratory's tasks."""
    ours, found = {"NOUN": "NAME", "ADJ": "CODE", "VERB": "NUMBER", "CCONJ": "O"}, {}
    for language in ("en", "x1"):
        found[language] = []
        for words in drawn(40, 1):
            gold = [ours[TAG[word]] for word in words]
            found[language].append(xtreme.Example("", tuple(translate(words, language)), gold))
    examples = {"train": {"en": found["en"]}, "valid": {"en": found["en"]}, "test": found}
    monkeypatch.setattr(xtreme, "laboratory", lambda task: examples)


def test_a_task_in_ciphers_is_scored_in_every_language_beside_counting(laboratory, options, monkeypatch):
    del options["source"], options["task"]
    XTREME.run(options, monkeypatch)
    result = result_of(options["out_dir"])
    assert list(result["languages"]) == ["en", "x1"]
    assert result["counted"]["en"]["f1"] == 100.0
    assert result["counted"]["x1"]["f1"] < 100


def test_an_encoder_that_does_not_know_the_ciphers_is_refused(laboratory, options, monkeypatch, capsys):
    del options["source"], options["task"]
    monkeypatch.setattr(XLMR, "tokens", lambda self, pieces: [self.unk for _ in pieces])
    assert "does not know the ciphers' characters: train it with" in XTREME.refused(options, monkeypatch, capsys)


def test_random_weights_are_drawn_from_the_seed(options, encoders):
    """The encoder has the same shape, and a new head."""
    trained = pretrained.load(encoders["hypersphere"])[0].state_dict()
    found = []
    for changes in (dict(random_weights=True), dict(random_weights=True), dict(random_weights=True, seed=1), {}):
        _, _, model, data, _ = opened(options | changes)
        found.append((model.state_dict(), data.checksum))
    (one, checksum), (again, same), (two, other), (ours, _) = found
    assert checksum == same != other
    name = "encoder.layers.0.ffn.fc.weight"
    assert one.keys() == ours.keys()
    assert torch.equal(one[name], again[name])
    assert not torch.equal(one[name], two[name])
    assert torch.equal(ours[name], trained[name.removeprefix("encoder.")])
    assert all(not torch.equal(own[name], ours[name]) for own in (one, two))


def test_in_a_table_each_seed_has_the_encoder_of_that_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(_, change), *_] = TABLES["7"](Config()).rows
    row = dataclasses.replace(Config(table="7", seed=3), **change)
    write_files(Path("out/train_mlm"), {"demo-seed=3-router=switch-gate=softmax/ckpt.pt": ""})
    assert str(finetune_xtreme.encoder_of(row)) == "out/train_mlm/demo-seed=3-router=switch-gate=softmax"
    write_files(Path(change["model"]), {"ckpt.pt": ""})
    for single in (dataclasses.replace(row, table=None), dataclasses.replace(row, seed=0)):
        assert str(finetune_xtreme.encoder_of(single)) == change["model"]


MISSING = {  # command in the error -> config
    "python train_electra.py --preset demo": Config(),
    "python train_mlm.py --preset base --router switch --gate softmax": Config(
        encoders="base", model="out/train_mlm/base-router=switch-gate=softmax"
    ),
    "python train_electra.py --preset demo --seed 3 --masks electra": Config(
        table="xlme2", seed=3, model="out/train_electra/demo-masks=electra"
    ),
}


@pytest.mark.parametrize("command", MISSING)
def test_a_missing_encoder_names_the_command_that_trains_it(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"does not exist: {command} trains it$"):
        finetune_xtreme.encoder_of(MISSING[command])


def test_a_misspelled_encoder_is_not_turned_into_a_command():
    folder = Path("out/train_electra/demo-step")
    assert finetune_xtreme.encoder_of(Config(model=str(folder))) == folder


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_routers_and_experts_do_not_change(frozen, options, encoders, monkeypatch):
    XTREME.run(options | {"frozen": frozen, "weight_decay": 0.01}, monkeypatch)
    before, after = pretrained.load(encoders["hypersphere"])[0].state_dict(), saved(options, "model.pt")["model"]
    moved = {name for name, x in before.items() if not torch.equal(x, after[f"encoder.{name}"])}
    sparse = {name for name in before if name.startswith("moes.")}
    assert "moes.0.router.temperature" in sparse
    assert moved == (before.keys() - sparse if frozen else before.keys())
    # expert embeddings return to their sphere
    torch.testing.assert_close(after["encoder.moes.0.router.experts"].norm(dim=1), torch.full((4,), 0.1))


# ---------------------------------------------------------------------------------------------------------------------
# Stopped runs, and several processes


def test_a_run_killed_during_prediction_resumes_exactly(options, tmp_path, monkeypatch):
    """Killed in the second development set, or the second language; a finished run predicts nothing again."""
    calls, predict = [], finetune_xtreme.predict

    def counted(*arguments):
        calls.append(1)
        if len(calls) == stop_at:
            raise InterruptedError
        return predict(*arguments)

    stop_at, whole = None, options | {"out_dir": tmp_path / "whole"}
    monkeypatch.setattr(finetune_xtreme, "predict", counted)
    for _ in range(2):
        XTREME.run(whole, monkeypatch)
        assert len(calls) == 4
    for stop_at in (2, 4):
        calls.clear()
        killed = options | {"out_dir": tmp_path / str(stop_at)}
        with pytest.raises(InterruptedError):
            XTREME.run(killed, monkeypatch)
        XTREME.run(killed, monkeypatch)
        ours, theirs = (result_of(own["out_dir"]) | {"seconds": 0} for own in (killed, whole))
        assert ours == theirs
        assert predictions(killed["out_dir"]) == predictions(whole["out_dir"])
        torch.testing.assert_close(saved(killed)["model"], saved(whole)["model"], rtol=0, atol=0)


def test_predictions_and_sentence_vectors_have_no_capacity_limit(options):
    """Otherwise they would depend on the rest of the batch."""
    config, examples, model, data, context = opened(options)
    served = []
    for moe in model.moe_layers:
        moe.eval_capacity_factor = 0.01
        moe.watchers.append(lambda moe, h, routing, kept: served.append(torch.equal(kept, routing.wanted)))
    finetune_xtreme.predict(model, examples.valid, config, data.tokenizer, context)
    predicted = len(served)
    texts = [" ".join(words) for words in drawn(20, 3)]
    crosslingual.sentence_vectors(model.encoder, data.tokenizer, texts, 1000, context)
    assert all(served) and 0 < predicted < len(served)
    assert all(moe.eval_capacity_factor == 0.01 for moe in model.moe_layers)


def test_other_examples_or_encoders_make_a_separate_run(options, source, encoders, tmp_path, monkeypatch, capsys):
    options |= {"source": shutil.copytree(source, tmp_path / "source"), "model": tmp_path / "model"}
    for encoder, more in (("hypersphere", ""), ("switch", ""), ("hypersphere", "one\ttwo\tneutral\n")):
        shutil.rmtree(options["model"], ignore_errors=True)
        shutil.copytree(encoders[encoder], options["model"])
        with open(options["source"] / "xnli" / "dev-en.tsv", "a") as file:
            file.write(more)
        capsys.readouterr()
        XTREME.run(options, monkeypatch)
        is_other = bool(more) or encoder == "switch"
        assert ("differs in data_checksum" in capsys.readouterr().out) == is_other
    assert len([*options["out_dir"].glob("*/result.json")]) == 3


def test_other_test_examples_are_scored_without_training(options, source, tmp_path, monkeypatch, capsys):
    options |= {"source": shutil.copytree(source, tmp_path / "source")}
    XTREME.run(options, monkeypatch)
    first, weights = result_of(options["out_dir"]), saved(options, "model.pt")["model"]
    write_files(options["source"] / "xnli", {"test-fr.tsv": label_lines(drawn(6, 2), "de")})
    capsys.readouterr()
    XTREME.run(options, monkeypatch)
    printed, second = capsys.readouterr(), result_of(options["out_dir"])
    assert "scores other test examples, without training" in printed.out
    assert not re.search(r"^step \d+: train", printed.out, re.M)
    assert second["languages"] == first["languages"] | {"fr": first["languages"]["de"]}
    assert [second[name] for name in ("valid", "step", "config")] == [
        first[name] for name in ("valid", "step", "config")
    ]
    assert sorted(predictions(options["out_dir"])) == [f"xnli/test-{language}.tsv" for language in ("de", "en", "fr")]
    torch.testing.assert_close(saved(options, "model.pt")["model"], weights, rtol=0, atol=0)
    XTREME.run(options, monkeypatch)
    assert "without training" not in capsys.readouterr().out


AUTO = {"pos": "TokenClassification", "xquad": "QuestionAnswering", "xnli": "SequenceClassification"}


@pytest.mark.parametrize("task", AUTO)
def test_a_fine_tuned_run_exports(task, options, tmp_path, monkeypatch):
    """Its logits and labels are ours; run and export load as encoders, and can be fine-tuned further."""
    transformers = pytest.importorskip("transformers")
    options |= {"task": task, "epochs": 1}
    XTREME.run(options, monkeypatch)
    run, folder = only_run(options["out_dir"]), tmp_path / "exported"
    pretrained.export(run, folder)
    _, _, model, _, _ = opened(options)
    model.load_state_dict(saved(options, "model.pt")["model"])
    ids, batch = torch.randint(4, 290, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    ids[1, 8:], batch[1, 8:] = XLMR.pad, 0
    nonpad = batch.flatten().nonzero().squeeze(1)
    with torch.no_grad(), model.no_limit():
        expected, _ = model.eval()(ids, nonpad, nonpad)
    auto = getattr(transformers, f"AutoModelFor{AUTO[task]}")
    exported = auto.from_pretrained(folder, trust_remote_code=True).eval()
    output = exported(ids, attention_mask=batch)
    if task == "xquad":
        logits = torch.stack([output.start_logits, output.end_logits], dim=1).flatten(0, 1)
        text = batch.bool().repeat_interleave(2, dim=0)
        logits, expected = logits[text], expected[text]
    else:
        logits = output.logits[batch.bool()] if task == "pos" else output.logits
        assert list(exported.config.id2label.values()) == model.labels
        assert exported.config.label2id == {label: i for i, label in enumerate(model.labels)}
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    encoders = [pretrained.load_encoder(path)[0] for path in (run, folder)]
    torch.testing.assert_close(encoders[0].state_dict(), model.encoder.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(encoders[1].state_dict(), model.encoder.state_dict(), rtol=0, atol=0)


def test_two_processes_resume_with_the_loads_that_one_would_count(options, tmp_path, monkeypatch):
    """First choices of 100 steps are counted by hand, over a stop and two processes; the rest is equal too.

    The encoder was trained with activation checkpointing, under which each choice would be counted twice.
    """
    options |= {"train_examples": 28, "batch_size": 4, "micro_size": 2, "epochs": 15, "dtype": "float64", "task": "pos"}
    two, counts, calls = options | {"out_dir": tmp_path / "two"}, Counter(), []

    def save(self, done, *rest, old=Run.save):
        old(self, done, *rest)
        if done == 98:
            shutil.copytree(options["out_dir"], two["out_dir"])

    def record(self, *args, forward=Router.forward):
        routing = forward(self, *args)
        calls.extend([1] * self.training)
        if self.training and len(calls) <= 200:  # two micro-batches a step
            counts.update(routing.probs.argmax(dim=1).tolist())
        return routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", record)
        patch.setattr(Run, "save", save)
        XTREME.run(options, patch)
    ours = result_of(options["out_dir"])
    assert ours["loads"] == [[[counts[expert] for expert in range(4)]]]
    assert int(saved(two)["extra"]["loads"][0].sum()) > 0
    assert "goes on from step 98" in finish(XTREME.start(two, *TORCHRUN), two)
    theirs = result_of(two["out_dir"])
    for name in ("languages", "guesses", "valid", "step", "loads"):
        assert ours[name] == theirs[name], name
    assert metrics(options["out_dir"])[-1]["train_loss"] == pytest.approx(losses(two["out_dir"])[-1], rel=1e-7)
    ours, theirs = saved(options), saved(two)
    torch.testing.assert_close(theirs["model"], ours["model"], rtol=1e-7, atol=1e-9)
    assert ours["step"] == 105
    assert torch.equal(ours["extra"]["loads"], theirs["extra"]["loads"])


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and what is predicted


def test_the_best_checkpoint_in_english_development_is_scored(options, monkeypatch):
    """F1 chooses it, not EM."""
    weights, points, predict = [], iter([50.0, 80.0, 80.0, 60.0]), finetune_xtreme.predict

    def watched(model, examples, *rest):
        if len(examples) == COUNTS["dev"]:
            weights.append({name: x.clone() for name, x in model.state_dict().items()})
        return predict(model, examples, *rest)

    def given(task, language, gold, predicted):
        f1 = next(points) if len(gold) == COUNTS["dev"] else {"en": 90.0, "de": 60.0}[language]
        return {"f1": f1, "em": 100 - f1}

    monkeypatch.setattr(finetune_xtreme, "predict", watched)
    monkeypatch.setattr(finetune_xtreme, "score_task", given)
    options |= {"epochs": 4, "train_examples": 16}
    XTREME.run(options, monkeypatch)
    result = result_of(options["out_dir"])
    assert result["valid"] == {"f1": 80.0, "em": 20.0}
    assert result["step"] == 4
    assert result["mean"] == {"f1": 75.0, "em": 25.0}
    assert result["gap"] == {"f1": 30.0, "em": -30.0}
    torch.testing.assert_close(saved(options, "model.pt")["model"], weights[1], rtol=0, atol=0)


def test_a_guess_is_the_most_frequent_label_of_training(options, source, tmp_path, monkeypatch):
    options |= {"source": shutil.copytree(source, tmp_path / "source"), "epochs": 1}
    write_files(options["source"] / "xnli", {"test-de.tsv": "rot\trennt\tentailment\n" * 2 + "rot\tund\tneutral\n"})
    write_files(options["source"] / "xnli", {"train-en.tsv": "red\tand\tneutral\n" * 9})
    XTREME.run(options, monkeypatch)
    assert result_of(options["out_dir"])["guesses"]["de"]["accuracy"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("task, missing", [("pos", ["de"]), ("xquad", ["de"]), ("xnli", ["de", "en"])])
def test_predictions_do_not_need_labels(task, missing, options, source, tmp_path, monkeypatch, capsys):
    """Every example has one, and scores follow from the files alone. Rows are so short that texts take several."""
    options |= {"task": task, "block_size": 16, "source": tmp_path / "source"}
    if task == "xquad":
        options |= {"stride": 3, "longest_answer": 4}
    shutil.copytree(source, options["source"])
    folder = {"pos": "udpos"}.get(task, task)
    XTREME.run(options, monkeypatch)
    result, (_, examples, *_) = result_of(options["out_dir"]), opened(options)
    expected = predictions(options["out_dir"])
    for language, own in examples.test.items():
        text = expected[f"{folder}/test-{language}.{'json' if task == 'xquad' else 'tsv'}"]
        if task == "pos":
            found = [sentence.split("\n") for sentence in text.removesuffix("\n").split("\n\n")]
        else:
            found = text.splitlines() if task == "xnli" else [json.loads(text)[one.id] for one in own]
        gold = [one.gold for one in own]
        assert score_task(task, language, gold, found) == pytest.approx(result["languages"][language])
    for language in missing:  # removes labels as XTREME's scripts do
        file = options["source"] / folder / (f"xquad.{language}.json" if task == "xquad" else f"test-{language}.tsv")
        text = re.sub(r'"text": "\w+"', '"text": ""', file.read_text())
        file.write_text(re.sub(r"\t\w+\n", "\n", text))
    capsys.readouterr()
    options["out_dir"] = tmp_path / "unlabelled"
    XTREME.run(options, monkeypatch)
    said, run = capsys.readouterr(), only_run(options["out_dir"])
    assert predictions(options["out_dir"]) == expected
    result = result_of(options["out_dir"])
    assert result["unlabelled"] == missing
    assert result["languages"].keys() == {"de", "en"} - {*missing}
    assert said.err.count("x an example without its label") == len(missing)
    last = said.out.strip().splitlines()[-1]
    assert last == f"no test labels, not scored: {', '.join(missing)}; predictions are in {run}"
    cells = finetune_xtreme.cells(result)
    assert (cells["F1 or accuracy"][0] is None) == (len(missing) == 2)
    assert cells["English dev"][0] is not None


def test_dropout_and_balance_loss_are_the_options_and_rows_fit_the_encoder(options):
    """The constants that the encoder was trained with do not matter."""
    _, _, model, data, _ = opened(options | {"dropout": 0.3, "balance_coef": 0.125, "block_size": 64})
    assert {moe.router.config.balance_coef for moe in model.moe_layers} == {0.125}
    found = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(found) > 3
    assert set(found) == {0.3} == {layer.attn.dropout for layer in model.encoder.layers}
    assert model.longest_row == 32 >= max(len(row.ids) for row in data.rows)


@pytest.mark.parametrize("kind", ["label", "tags", "answer"])
@pytest.mark.parametrize("training", [True, False])
def test_heads_of_labels_and_tags_have_dropout_before_each_layer(kind, training, encoders):
    """At a rate of 1, their inputs are 0. XLM-R's head for answers has no dropout."""
    encoder, _ = pretrained.load_encoder(encoders["switch"], dropout=0.0)
    model, inputs = FineTuned(encoder, kind, list("ab"), dropout=1.0).train(training), []
    if kind == "label":
        model.dense.bias.data += 1.0
    for layer in filter(None, (model.dense, model.out)):
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(torch.tensor([[0, 5, 6, 2]]), None, torch.tensor([1, 2]))
    assert len(inputs) == 1 + (kind == "label")
    assert {bool(x.any()) for x in inputs} == {kind == "answer" or not training}


# ---------------------------------------------------------------------------------------------------------------------
# The same logits as transformers


HEADS = {  # kind of task -> name of the class, its last layer
    "label": ("SequenceClassification", "classifier.out_proj"),
    "tags": ("TokenClassification", "classifier"),
    "answer": ("QuestionAnswering", "qa_outputs"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_logits_equal_those_of_transformers(kind, tmp_path, encoders):
    transformers = pytest.importorskip("transformers")
    (name, head), labels = HEADS[kind], [] if kind == "answer" else list("abcde")
    shape = dict(vocab_size=295, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=len(labels) or 2)
    theirs = getattr(transformers, f"XLMRobertaFor{name}")(transformers.XLMRobertaConfig(**shape))
    theirs.eval().save_pretrained(tmp_path)
    shutil.copy(encoders["switch"] / "xlmr.model", tmp_path / "sentencepiece.bpe.model")
    encoder, tokenizer = pretrained.load(tmp_path)
    ours = FineTuned(encoder, kind, labels, 0.1).eval()
    ours.out.load_state_dict(theirs.get_submodule(head).state_dict())
    if kind == "label":
        ours.dense.load_state_dict(theirs.classifier.dense.state_dict())
    own = []
    for ids in tokenizer.encode_batch(["dog and cat", "red", "big dog"]):
        own.append(xtreme_rows.Row(0, [0, *ids, 2], [(0, 0), (len(ids), 1)], []))
    batch = xtreme_rows.batch_of(own, tokenizer.pad)
    mask = torch.arange(batch.ids.shape[1]) < torch.tensor([len(row.ids) for row in own]).unsqueeze(1)
    assert not mask.all()
    with torch.no_grad():
        logits, _ = ours(batch.ids, batch.nonpad, batch.words)
        expected = theirs(batch.ids, attention_mask=mask.long())
    if kind == "label":
        expected = expected.logits
    elif kind == "tags":
        expected = torch.stack([expected.logits[i, place] for i, row in enumerate(own) for place, _ in row.marks])
    else:
        expected = torch.stack([expected.start_logits, expected.end_logits], dim=1).flatten(0, 1)
        text = mask.repeat_interleave(2, dim=0)
        assert (logits[~text] == -math.inf).all()
        logits, expected = logits[text], expected[text]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Presets and tables


def test_every_preset_is_valid():
    for preset, constants in PRESETS.items():
        config = Config(preset=preset, **constants)
        check(config)
        length = 384 if xtreme.TASKS[config.task].kind == "answer" else 128
        assert preset == "demo" or (preset.endswith(f"-{config.task}") and config.block_size == length)


def test_fine_tuning_has_the_papers_constants():
    """X-MoE's appendix C and XLM-E's table 11; if they searched several values, the middle one."""
    most, searched = (0.1,) * 5, (2e-5, 7e-6, 3e-5, 3e-5, 3e-5)
    xmoe = dict(batch_size=(8, 8, 32, 32, 32, 32, 32), learning_rate=(*searched, 2e-5, 2e-5))
    xmoe |= dict(epochs=(10, 10, 3, 3, 20, 5, 10), warmup=(*most, 0.2, 0.1), weight_decay=(0, 0, 0, 0, 0, 0.01, 0))
    xlme = dict(batch_size=(16, 8, 32, 32, 32, 32, 32), learning_rate=(*searched, 7e-6, 1e-5))
    xlme |= dict(epochs=(10, 10, 4, 3, 20, 10, 10), warmup=(*most, 12_500 / 122_720, 0.1), weight_decay=(0,) * 7)
    for paper, columns in {"xmoe": xmoe, "xlme": xlme}.items():
        configs = [Config(**PRESETS[f"{paper}-{task}"]) for task in finetune_xtreme.ALL]
        for name, values in columns.items():
            assert tuple(getattr(config, name) for config in configs) == values, (paper, name)


def names_of_runs(script, preset: str, seed: int = 0) -> set[str]:
    """The paths of all rows of a script's tables."""
    base = script.Config(**{"preset": preset} | script.PRESETS[preset])
    changes = [change for table in script.TABLES.values() for _, change in table(base).rows]
    if script is train_mlm:
        top_2 = dict(top_k=2, gate="softmax")  # in no table of train_mlm.py
        changes += [top_2, top_2 | dict(router="topk")]
    runs = [dataclasses.replace(base, **change, seed=seed) for change in changes]
    return {f"{script.Config.out_dir}/{run_name(run, script.PRESETS)}" for run in runs}


ENCODERS_OF = [(train_mlm, preset) for preset in train_mlm.PRESETS]
ENCODERS_OF += [(train_electra, preset) for preset in train_electra.PRESETS]


@pytest.mark.parametrize("script, preset", ENCODERS_OF)
def test_the_encoder_of_a_row_is_a_row_of_the_script_that_trains_it(script, preset):
    names = names_of_runs(script, preset)
    for number in TITLES:
        if number.startswith("xlme") == (script is train_electra):
            for _, change in TABLES[number](Config(encoders=preset)).rows:
                assert change["model"] in names


@pytest.mark.parametrize("script, preset", ENCODERS_OF)
def test_the_seed_of_an_encoder_follows_its_preset(script, preset):
    with_seed = {name.replace(f"/{preset}", f"/{preset}-seed=3") for name in names_of_runs(script, preset)}
    assert with_seed == names_of_runs(script, preset, seed=3)


def test_a_row_has_the_constants_of_its_task():
    base = Config(preset="xmoe-xnli", **PRESETS["xmoe-xnli"], encoders="base")
    [(labels, change), *_] = TABLES["xlme1"](base).rows
    assert labels == ("XLM-E - TRTD", "pos", "74.2")
    assert len(TABLES["xlme1"](base).rows) == 21
    given = PRESETS["xmoe-pos"] | dict(preset="xmoe-pos", model="out/train_electra/base-tlm=False", encoders="base")
    assert dataclasses.replace(base, **change) == Config(**given)
    assert TABLES["6"](Config()).rows[-1][1]["balance_coef"] == 0.1
    with pytest.raises(ValueError, match="need no source"):
        TABLES["1"](Config(source="x"))
    rows = TABLES["1"](Config()).rows  # in ciphers
    own = [(labels, change["task"]) for labels, change in rows[:3]]
    assert own == [(("dense", task, ""), task) for task in ("tags", "pairs", "spans")]
    assert len(rows) == 15
    given = dict(preset="ciphers-tags", block_size=128, model="out/train_mlm/demo-router=dense")
    assert dataclasses.replace(Config(), **rows[0][1]) == Config(**given)


@pytest.mark.parametrize("number, averages", [("1", "61.4 63.8 65.3 64.1 65.0"), ("xlme1", "67.6 58.6 69.3")])
def test_the_average_follows_the_tasks_of_an_encoder(number, averages):
    """The papers' column Avg takes the mean of F1 and EM. Ours has two seeds, with an EM of 0."""
    table = finetune_xtreme.table(number, finetune_xtreme.Config(preset="xmoe-xnli"))
    found = []
    for labels, _ in table.rows:
        answer, form = "/" in labels[2], ".1f"
        seeds = [
            {"F1 or accuracy": (n, form), "EM": (0.0 if answer else None, form), "guess": (1, form)} for n in (7, 14)
        ]
        found.append((labels, seeds))
    rows = table.lines(found)
    own = [row for row in rows if row["task"] == "avg of 7"]
    assert rows[7] == own[0] and len(rows) == 8 * len(own)
    assert [row["paper"] for row in own] == averages.split()
    assert {row["F1 or accuracy"] for row in own} == {"8.2 ± 3.9"}  # (4 + 3 / 2) / 7 of 7 and of 14
    assert own[0]["guess"] == own[0]["EM"] == ""
    for _, seeds in found[:7]:
        seeds[0]["F1 or accuracy"] = seeds[0]["EM"] = None, ".1f"
    assert table.lines(found)[7]["F1 or accuracy"] == "11.0"
    assert finetune_xtreme.table("6", finetune_xtreme.Config()).average is None


@pytest.mark.parametrize("change", [{}, {"table": "xlme2", "seeds": 2}], ids=["run", "table"])
def test_a_missing_encoder_is_refused_before_any_work(change, tmp_path, monkeypatch, capsys):
    """In the table, only the last row's encoder of the last seed is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune_xtreme, "read_examples", lambda *_: pytest.fail("reads the examples"))
    missing = "out/train_electra/demo"
    if change:
        for _, row in TABLES["xlme2"](Config()).rows:
            for seed in range(2):
                path = Path(row["model"])
                path.with_name(path.name.replace("demo", "demo-seed=1") if seed else path.name).mkdir(
                    exist_ok=True, parents=True
                )
        missing = "out/train_electra/demo-seed=1"
        Path(missing).rmdir()
    assert f"{missing} does not exist" in XTREME.refused(change, monkeypatch, capsys)


def test_a_table_runs_every_row(options, encoders, tmp_path, monkeypatch, capsys):
    for name in ("model", "task", "learning_rate", "batch_size", "micro_size", "epochs"):
        del options[name]
    options |= {"preset": "xmoe-xnli", "table": "7", "train_examples": 8, "out_dir": tmp_path / "runs"}
    monkeypatch.chdir(tmp_path)
    assert "the rows of this table set --epochs" in XTREME.refused(options | {"epochs": 9}, monkeypatch, capsys)
    assert "encoders must be one of demo," in XTREME.refused(options | {"encoders": "tiny"}, monkeypatch, capsys)
    refused = XTREME.refused(options, monkeypatch, capsys)
    command = "python train_mlm.py --preset demo --router switch --gate softmax"
    assert f"out/train_mlm/demo-router=switch-gate=softmax does not exist: {command} trains it" in refused
    for _, change in TABLES["7"](Config()).rows:
        encoder = encoders["switch" if "router" in change["model"] else "hypersphere"]
        shutil.copytree(encoder, tmp_path / change["model"], dirs_exist_ok=True)
    XTREME.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[:2] for row in rows] == [[label, "xnli"] for own, label, *_ in ROWS if own == "7"]
    results = [json.loads(file.read_text()) for file in options["out_dir"].glob("*/result.json")]
    found = {result["config"]["model"]: result for result in results}
    names = "", "-top_k=2", "-router=switch", "-router=topk-top_k=2"
    assert {model.replace("-gate=softmax", "") for model in found} == {f"out/train_mlm/demo{name}" for name in names}
    assert all(result["config"]["frozen"] == ("router" not in model) for model, result in found.items())
    mine = found["out/train_mlm/demo-gate=softmax"]
    english, german = (mine["languages"][language]["accuracy"] for language in ("en", "de"))
    numbers = [mine["mean"]["accuracy"], None, mine["guess"]["accuracy"], mine["counting"]["accuracy"]]
    numbers += [english, english - german, mine["valid"]["accuracy"]]
    assert rows[1][3:] == ["" if number is None else f"{number:.1f}" for number in numbers]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(options, monkeypatch, capsys):
    other = train_sentencepiece([" ".join(GERMAN)] * 9, 280, XLMR)
    monkeypatch.setattr(pretrained, "load", lambda *_, load=pretrained.load, **more: (load(*_, **more)[0], other))
    assert "its tokenizer has 280 pieces, its model " in XTREME.refused(options, monkeypatch, capsys)


def test_broken_rows_are_skipped_with_a_warning(options, source, tmp_path, monkeypatch, capsys):
    shutil.copytree(source, tmp_path / "source")
    train, test = (tmp_path / "source" / "xnli" / f"{name}.tsv" for name in ("train-en", "test-de"))
    train.write_text(train.read_text() + "dog\n" * 3 + "dog\tcat\tmaybe\n")
    test.write_bytes(b"\xff\t\n")
    XTREME.run(options | {"source": tmp_path / "source", "epochs": 1}, monkeypatch)
    said = capsys.readouterr()
    assert said.err.count("warning: ") == 3
    assert f"warning: {train}: 3 x a line that is not" in said.err
    assert "48 rows of at most 32 tokens, 6 steps" in said.out
    result = result_of(options["out_dir"])
    assert list(result["languages"]) == ["en"]
    assert result["gap"] == {}
    assert "English is above" not in said.out
    train.write_text("dog\tcat\tmaybe\n" * 60)
    with pytest.raises(SystemExit):
        XTREME.run(options | {"source": tmp_path / "source"}, monkeypatch)
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line == "error: no training example of xnli has a known label"
