"""train_mt.py, run as a user runs it, on two small language pairs with tiny models: scores, tables, and translating.

The network and its beam search are tested in test_translator.py; what all scripts share, in test_scripts.py.
"""

import copy
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TORCHRUN, Script, flip_a_byte, metrics, only_run, result_of, saved, table_rows, words, write_files

import train_mt
from data.batches import TranslationData
from data.ciphers import VISIBLE
from data.prepare import prepare
from engine import pretrained
from engine.config import command_line
from engine.device import seed_all, setup
from engine.run import Run
from metrics import flops
from model import Translator
from train_mt import PRESETS, Config

MT = Script(train_mt)
run, refused = MT.run, MT.refused
TINY = dict(n_layer=2, decoder_layers=2, n_head=2, n_embd=16, ffn_size=32, block_size=32, micro_tokens=128, steps=4)
TINY |= dict(batch_tokens=256, eval_every=2, warmup_steps=2, log_every=1, dropout=0.0, eval_sentences=2)
TINY |= dict(beam=2, device="cpu", dtype="float32")
WORDS = {"Hund": "dog", "Katze": "cat", "Haus": "house", "rot": "red", "blau": "blue", "läuft": "runs", "und": "and"}


def sentences(count: int, seed: int, words: dict[str, str] = WORDS) -> list[tuple[str, str]]:
    """Random texts of three to eight words and a full stop, with their word-by-word translations."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(list(words), rng.integers(3, 9)) for _ in range(count)]
    return [(" ".join(text) + ".", " ".join(map(words.get, text)) + ".") for text in drawn]


def lines(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{source}\t{target}\n" for source, target in pairs)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Two language pairs in which each word is one token: five to ten tokens per text."""
    base, files = tmp_path_factory.mktemp("pairs"), {}
    for seed, (split, count) in enumerate({"train": 120, "valid": 6, "test": 5}.items()):
        for language in ("de", "ru"):
            files[f"{language}-en.{split}.tsv"] = lines(sentences(count, seed))
    return prepare("bitext", write_files(base / "text", files), pieces=340, out=base / "corpus")


@pytest.fixture
def options(corpus, tmp_path) -> dict:
    return TINY | {"data": corpus, "out_dir": tmp_path / "out"}


def opened(options: dict) -> tuple:
    """-> config, context, data, new model"""
    config = Config(**options)
    context = setup("cpu", config.dtype)
    data = TranslationData.open(config.data, config, context, exponent=1.0, target=config.target)
    seed_all(config.seed)
    return config, context, data, context.place(Translator(config, data.vocab_size))


# --- Whole runs

ROWS = {  # constants, number of sparse layers
    "dense": ({"router": "dense", "dtype": "bfloat16"}, 0),
    "threshold": ({"expert_ffns": 2}, 2),
    "encoder only": ({"router": "switch", "expert_ffns": 2, "decoder_moe": False}, 1),
    "X-MoE": ({"router": "hypersphere", "moe_after": "1", "experts": 4}, 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_translates_and_reports(row, options, monkeypatch, capsys):
    changes, sparse = ROWS[row]
    run(options | changes, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    limited, unlimited = result["test"], result["test_no_limit"]
    for scores in (limited, unlimited):
        assert list(scores["pairs"]) == ["de-en", "ru-en"]
        assert scores["sentences"] == 10
        assert scores["bleu"] == pytest.approx(np.mean([pair["bleu"] for pair in scores["pairs"].values()]))
        assert f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}" in out
        assert len(scores["layers"]) == sparse
    assert "nw:2" in limited["pairs"]["de-en"]["chrf_signature"]
    assert out.count("reference: ") == out.count("model:     ") == 5
    if row in ("threshold", "encoder only"):
        assert any(layer["cut"] > 0 for layer in limited["layers"])
        assert all(layer["cut"] == 0 for layer in unlimited["layers"])
    else:  # no capacity limit
        assert limited == unlimited
        assert "without a limit" not in out
    assert all(record["bleu"] >= 0 for record in metrics(options["out_dir"]))
    model, data = pretrained.load(only_run(options["out_dir"]))[0], opened(options)[2]
    counts = data.meta["splits"]["train"]
    length, work = counts["tokens"] / counts["pairs"] / 2, result["flops_per_pair"]
    served = flops.as_served(model, work, limited["layers"], length)
    assert result["flops_served_per_pair"] == pytest.approx(served)


def test_flops_per_token_are_those_of_a_pair_over_its_tokens(options, monkeypatch):
    def finish(run, result, old=Run.finish):
        return old(run, result | {"flops_per_token": run.flops_per_token})

    monkeypatch.setattr(Run, "finish", finish)
    run(options | {"steps": 2}, monkeypatch)
    result, counts = result_of(options["out_dir"]), opened(options)[2].meta["splits"]["train"]
    assert result["flops_per_token"] * counts["tokens"] / counts["pairs"] == pytest.approx(result["flops_per_pair"])


def test_a_model_can_overfit_a_few_pairs(tmp_path, monkeypatch, capsys):
    """BLEU is 100 on the training pairs, and --translate writes exactly their translations."""
    pairs = sentences(16, 5, {f"{a}{b}": f"{b}o{a}" for a in "bdfgklmn" for b in ("at", "er", "il", "ut", "op")})
    write_files(tmp_path / "text", {f"de-en.{split}.tsv": lines(pairs) for split in ("train", "valid", "test")})
    folder = prepare("bitext", tmp_path / "text", pieces=370, out=tmp_path / "data")
    options = TINY | {"data": folder, "out_dir": tmp_path / "out", "n_embd": 64, "ffn_size": 128, "steps": 80}
    options |= {"micro_tokens": 512, "batch_tokens": 512, "eval_every": 80, "learning_rate": 8e-3}
    options |= {"warmup_steps": 20, "label_smoothing": 0.0, "threshold": 0.9}
    options |= {"capacity": math.inf}  # dropped tokens may cost a word
    run(options, monkeypatch)
    assert result_of(tmp_path / "out")["test"]["bleu"] == pytest.approx(100)
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("".join(f"{source}\n" for source, _ in pairs))
    run(translating(options) | {"translate": tmp_path / "in.txt"}, monkeypatch)
    assert capsys.readouterr().out == "".join(f"{target}\n" for _, target in pairs)


# --- Evaluation and scores


def test_evaluation_matches_a_literal_loop(options):
    _, context, data, model = opened(options | {"dtype": "float64", "capacity": math.inf, "dropout": 0.5})
    draws = []
    model.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    for _ in range(2):
        scores, total, count = train_mt.evaluate(model, data, "valid", context, 10**9), 0.0, 0
    half = len(draws) // 2
    assert draws[:half] == draws[half:]
    assert len(set(draws)) == half > 1
    assert model.training
    model.eval()
    for name in data.languages:
        for texts in zip(*data.texts("valid", name)):
            source, target = data.tokenizer.encode_batch(list(texts))
            with torch.no_grad():
                logits, _ = model(torch.tensor([[*source, 2]]), None, torch.tensor([[0, *target]]), None)
            for row, label in zip(logits.log_softmax(dim=1), [*target, 2]):
                total, count = total - float(row[label]), count + 1
    assert scores["tokens"] == count
    assert scores["loss"] == pytest.approx(total / count)
    assert scores["ppl"] == pytest.approx(math.exp(total / count))


def test_scores_need_detokenized_text_with_case():
    """sacrebleu tokenizes; texts that are tokenized or lowercased score lower."""
    reference = ["He said: “it isn't red, is it?” (Not yet.)", "The U.S. house costs $1,000.50."]
    same = train_mt.score_translations(reference, reference, "en")
    assert (same["bleu"], same["chrf"]) == pytest.approx((100, 100))
    tokenised = ["He said : “ it is n't red , is it ? ” ( Not yet . )", "The U . S . house costs $ 1 , 000.50 ."]
    assert train_mt.score_translations(tokenised, reference, "en")["bleu"] < 80
    lowercased = [text.lower() for text in reference]
    assert train_mt.score_translations(lowercased, reference, "en")["bleu"] < 90
    assert "tok:13a|" in same["bleu_signature"]
    # Chinese has no spaces: as single words, two sentences that differ in one character would have nothing in common.
    reference, translation = ["我昨天在学校的图书馆里看了一本书。"], ["我昨天在学校的图书馆里读了一本书。"]
    for language in ("zh", "zh_Hans", "ZH-cn", "zho_Hant", "cmn", "cmn_Hans_CN", "yue", "chi"):
        scores = train_mt.score_translations(translation, reference, language)
        assert scores["bleu"] > 60
        assert "tok:zh|" in scores["bleu_signature"]
    packages = {"ja": "ja", "jpn_Jpan": "ja", "ko": "ko", "kor_Hang": "ko"}  # tokenizing these needs another package
    for language, package in packages.items():
        with pytest.raises(ImportError, match=rf"sacrebleu\[{package}\]"):
            train_mt.score_translations([""], [""], language)


def test_texts_are_scored_rather_than_tokens(options, monkeypatch):
    """A perfect translation scores 100, even if the vocabulary has neither ½ nor double spaces."""
    config, context, data, model = opened(options)
    texts = {"de-en": (["eins", "zwei"], ["The  red dog… ½", "One"]), "ru-en": (["раз"], ["Two　red houses run."])}
    monkeypatch.setattr(data, "texts", lambda split, name: texts[name])
    written = {source: target for sides in texts.values() for source, target in zip(*sides)}
    monkeypatch.setattr(train_mt, "translate_texts", lambda model, texts, *rest: [written[text] for text in texts])
    scores = train_mt.score_split(model, data, "test", config, context)
    assert [pair["bleu"] for pair in scores["pairs"].values()] == pytest.approx([100, 100])
    sources = [("de-en", "eins"), ("de-en", "zwei"), ("ru-en", "раз")]
    expected = [(name, source, written[source], written[source]) for name, source in sources]
    assert scores["examples"] == expected
    written["раз"] = "Three dogs are here."
    scores = train_mt.score_split(model, data, "test", dataclasses.replace(config, target="zh"), context, count=1)
    de, ru = scores["pairs"].values()
    assert ru["bleu"] < 50 < de["bleu"]
    assert scores["sentences"] == 2
    assert "tok:zh" in de["bleu_signature"]


def test_translations_are_detokenized_and_keep_the_order_of_their_sources(options, monkeypatch):
    """Words may have several tokens; batches are sorted by length."""
    config, context, data, model = opened(options | {"micro_tokens": 40, "batch_tokens": 40})
    texts = ["rot.", "", "Hundehaus und Katze und Haus.", "\u200b", "Katze  läuft."]
    assert len(data.tokenizer.encode_batch(texts)[2]) > 6

    def copy_source(model, source, *_):
        assert source.numel() <= 20  # half of the micro-batch, as in training
        return [row[row > 2].tolist() for row in source]

    monkeypatch.setattr(train_mt, "translate", copy_source)
    translations = train_mt.translate_texts(model, texts, data.tokenizer, config, context)
    assert translations == ["rot.", "", "Hundehaus und Katze und Haus.", "", "Katze läuft."]
    newline = data.tokenizer.processor.piece_to_id("<0x0A>") + 1
    [words] = data.tokenizer.encode_batch(["a b"])
    monkeypatch.setattr(train_mt, "translate", lambda model, source, *_: [[*words, newline, 5]] * len(source))
    assert "\n" not in train_mt.translate_texts(model, ["rot"], data.tokenizer, config, context)[0]


def test_the_weights_of_the_best_validation_bleu_are_tested(options, monkeypatch, capsys):
    """Also after a run that was killed after its last checkpoint, and whose last checkpoint is damaged."""
    scores = iter([(9.0, 3.0), (9.0, 4.0), (7.0, 9.0), (9.0, 4.0), (8.0, 9.0)])  # at steps 2, 4, 6, 8, and 8 again
    weights, score_split = [], train_mt.score_split

    def with_fixed_scores(model, data, split, *rest, **more):
        if split != "valid":
            return score_split(model, data, split, *rest, **more)
        weights.append(copy.deepcopy(model.state_dict()))
        return dict(zip(("bleu", "chrf"), next(scores))) | {"pairs": {}, "layers": []}

    monkeypatch.setattr(train_mt, "score_split", with_fixed_scores)
    options |= {"steps": 8, "dropout": 0.1}
    run(options, monkeypatch)
    folder, before = only_run(options["out_dir"]), result_of(options["out_dir"])
    assert before["best"] == {"step": 4, "bleu": 9.0}  # at equal BLEU, the higher chrF2++ is better
    for name in ("result.json", "model.pt"):
        (folder / name).unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    out, best, after = capsys.readouterr().out, saved(options, "model.pt"), result_of(options["out_dir"])
    assert "goes on from step 7" in out
    assert out.count("weights of step 4, with the best validation BLEU: 9.00") == 2
    assert best["step"] == 4
    assert saved(options, "ckpt.pt")["step"] == 8
    assert all(torch.equal(weight, weights[1][name]) for name, weight in best["model"].items())
    config, context, data, model = opened(options)
    model.load_state_dict(best["model"])
    test = score_split(model, data, "test", config, context)
    assert json.loads(json.dumps(test)) == after["test"]
    assert all(after[name] == before[name] for name in ("best", "test", "test_no_limit", "parameters"))


# --- Trivial baselines and tables


def test_table_3_has_every_row(options, monkeypatch, capsys):
    options |= {"table": 3, "steps": 1, "eval_every": 1, "eval_sentences": 1, "expert_ffns": 2, "beam": 1}
    run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["dense", "Switch", "top-2", "top-4", "XMoE", "XMoE"]
    assert [row[1] for row in rows] == ["", "2 x 32", "4 x 16", "8 x 8", "4 x 16", "8 x 8"]
    assert rows[0][2:4] == ["mean", "26.4 / 51.5"]
    assert rows[5][2:4] == ["mean", "28.7 / 53.7"]
    results = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    (dense,) = (result for result in results if result["config"]["router"] == "dense")
    expected = [dense[baseline][metric] for baseline in ("memory", "lookup") for metric in ("bleu", "chrf")]
    assert rows[0][11:16] == [f"{score:.2f}" for score in (*expected, dense["best"]["bleu"])]
    expected = [pair[metric] for pair in dense["test"]["pairs"].values() for metric in ("bleu", "chrf")]
    assert rows[0][16:] == [f"{score:.2f}" for score in expected]
    assert rows[0][5] == f"{dense['test']['bleu']:.2f}"
    assert rows[0][7] == rows[0][10] == ""  # rows kept: none in a dense model
    assert all(float(row[7]) < float(row[10]) for row in rows[1:])  # rows kept: more without a limit


def test_trivial_baselines_are_scored_per_pair_and_on_average(options, monkeypatch):
    _, _, data, _ = opened(options)
    references = {name: data.texts("test", name)[1] for name in data.languages}
    memory = {"de-en": references["de-en"], "ru-en": ["an unrelated text of words"] * 5}
    monkeypatch.setattr("metrics.bleu.remembered", lambda data, name: memory[name])
    scores = {name: train_mt.score_translations(memory[name], references[name], "en") for name in memory}
    assert scores["de-en"]["bleu"] == pytest.approx(100)
    assert scores["ru-en"]["bleu"] < 20
    counted = train_mt.score_counting(data)
    assert counted["memory"].pop("pairs") == scores
    means = {metric: (scores["de-en"][metric] + scores["ru-en"][metric]) / 2 for metric in ("bleu", "chrf")}
    assert counted["memory"] == pytest.approx(means)
    assert counted["lookup"]["chrf"] > 90  # these languages share their word order
    memory |= {"de-en": [], "ru-en": []}  # language pairs without a test set
    assert train_mt.score_counting(data)["memory"] == {}
    monkeypatch.setattr("metrics.counting.COUNTED_UP_TO", 0)  # as for a large training text
    assert train_mt.score_counting(data) == {"memory": {}, "lookup": {}}


def test_validation_translates_eval_sentences_under_the_limit_and_baselines_are_reported(options, monkeypatch, capsys):
    score_split, validations = train_mt.score_split, []

    def recorded(model, data, split, *rest, **more):
        scores = score_split(model, data, split, *rest, **more)
        if split == "valid":
            validations.append(scores)
        return scores

    pairs = {name: {"bleu": 1.0, "chrf": chrf} for name, chrf in {"de-en": 30.0, "ru-en": 32.0}.items()}
    counted = {name: {"bleu": 1.0, "chrf": 31.0, "pairs": pairs} for name in ("memory", "lookup")}
    monkeypatch.setattr(train_mt, "score_split", recorded)
    monkeypatch.setattr(train_mt, "score_counting", lambda data: counted)
    run(options, monkeypatch)
    assert validations
    for scores in validations:
        assert scores["sentences"] == 2 * options["eval_sentences"]
        assert scores["layers"][0]["cut"] > 0
    result = result_of(options["out_dir"])
    assert result["memory"] == counted["memory"]
    out = capsys.readouterr().out
    for chrf in ("30.00", "32.00"):
        assert f"    memory     BLEU 1.00  chrF2++ {chrf}\n    lookup     BLEU 1.00  chrF2++ {chrf}\n" in out
    character, letter = next(iter(VISIBLE.items()))  # of a cipher, which no font has
    result["test_no_limit"]["examples"] = [["de-en", f"{character:c}", "one", "two"]]
    assert f"de-en: {letter:c}\n  reference: one\n" in train_mt.report(Config(), result)


def rows_of(number: int, *argv: str) -> list[tuple]:
    """(labels, config) of each row of a table."""
    base = command_line(Config, PRESETS, [*argv, "--table", str(number)])
    rows = train_mt.TABLES[number](base).rows
    return [(labels, dataclasses.replace(base, **change)) for labels, change in rows]


def built(config) -> Translator:
    with torch.device("meta"):
        return Translator(config, 32_000)


def test_table_3_at_the_papers_scale_has_a_model_per_language():
    rows = rows_of(3, "--preset", "wmt23")
    languages = ("uk", "de", "ru", "he", "zh")
    assert [config.data for _, config in rows] == 6 * [f"wmt23-{language}" for language in languages]
    paper = ("32.0 / 55.7", "29.2 / 53.2", "28.5 / 53.9", "35.5 / 60.1", "18.0 / 45.4")
    assert [labels[2:] for labels, _ in rows[-5:]] == [*zip(languages, paper)]
    # Embeddings; 24 attentions, 18 FFNs, 42 norms in the blocks and two after them.
    D, F = 512, 2048
    dense = 32_000 * D + 24 * 4 * (D * D + D) + 18 * (2 * D * F + F + D) + (42 + 2) * 2 * D
    assert flops.numel(built(rows[0][1])) == dense == 79_438_848
    for (labels, config), split in zip(rows[5::5], (1, 2, 4, 2, 4), strict=True):
        E, size, model = 32 * split, 2048 // split, built(config)
        assert labels[1] == f"{E} x {size}"
        assert {moe.capacity_factor for moe in model.moe_layers} == {split}
        # 9 blocks have experts in place of an FFN, and a routing vector per expert.
        assert flops.numel(model) == dense + 9 * (E * (2 * D * size + size + D + D) - (2 * D * F + F + D))


def test_table_4_has_x_moes_layer_in_the_encoder(options, monkeypatch, capsys):
    run(options | {"table": 4, "steps": 1, "eval_every": 1, "eval_sentences": 1, "experts": 4}, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["dense", "one expert for all", "SMoE", "X-MoE"]
    assert [row[4] for row in rows] == ["", "1.00", "1.00", "1.00"]
    rows = rows_of(4, "--preset", "wmt10")
    assert {config.moe_after for _, config in rows} == {(6,)}
    assert rows[0][1].sampling_exponent == 0.7
    # 32 experts of three FFNs with norms; E routing vectors, of E / 2 dimensions on the hypersphere.
    D, F, E = 512, 2048, 32
    expert = 3 * (2 * D * F + F + D + 2 * D)
    experts = 79_438_848 + E * expert
    sizes = [flops.numel(built(config)) for _, config in rows]
    assert sizes == [79_438_848, 79_438_848 + expert + D, experts + E * D, experts + 16 * D + E * 16 + 1]


# --- Translating files


def translating(options: dict) -> dict:
    """The options that `--translate` reads, with the run of all options as its model."""
    names = ("beam", "micro_tokens", "device", "dtype")
    return {name: options[name] for name in names} | {"model": only_run(options["out_dir"])}


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> dict:
    options = TINY | {"data": corpus, "out_dir": tmp_path_factory.mktemp("trained")}
    with pytest.MonkeyPatch.context() as patch:
        run(options, patch)
    return translating(options)


def test_a_file_is_translated_line_by_line(trained, tmp_path, monkeypatch, capsys):
    lines = ["Hund rot.", "", "Katze\x0cund\u2028Haus.", "   ", "blau " * 60, "rot", "blau " * 31]
    (tmp_path / "in.txt").write_bytes("\r\n".join(lines).encode())
    run(trained | {"translate": tmp_path / "in.txt"}, monkeypatch)
    out, err = capsys.readouterr()
    *translations, after = out.split("\n")
    assert after == ""
    assert len(translations) == len(lines)
    assert translations[1] == translations[3] == ""
    assert translations[4] == translations[6]  # cut to the same 31 tokens
    assert "warning: 1 of 7 texts are cut to block_size - 1 = 31 tokens" in err
    command = [*TORCHRUN, train_mt.__file__, *words(trained | {"translate": tmp_path / "in.txt"})]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == out


def test_standard_input_is_translated(trained, tmp_path):
    """From a pipe, by one process or two; `tail -n +2` and so on can be put before it."""
    command = [train_mt.__file__, *words(trained | {"translate": "-"})]
    found = []
    for launcher in ([sys.executable], TORCHRUN):
        done = subprocess.run([*launcher, *command], capture_output=True, input=b"Hund rot.\n\nKatze")
        assert done.returncode == 0, done.stderr.decode()
        found.append(done.stdout.decode().splitlines())
    assert found[0] == found[1]
    assert len(found[0]) == 3 and found[0][1] == ""


def test_a_stopped_translation_has_written_what_was_done(trained, tmp_path, monkeypatch, capsys):
    write_files(tmp_path, {"in.txt": "Hund rot.\n\n" * 5})
    run(trained | {"translate": tmp_path / "in.txt"}, monkeypatch)
    whole = capsys.readouterr().out.splitlines()
    translate, calls = train_mt.translate, []

    def stopping(*given):
        calls.append(given)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return translate(*given)

    monkeypatch.setattr(train_mt, "AT_ONCE", 3)
    monkeypatch.setattr(train_mt, "translate", stopping)
    with pytest.raises(SystemExit) as stop:
        run(trained | {"translate": tmp_path / "in.txt"}, monkeypatch)
    out, err = capsys.readouterr()
    assert stop.value.code == 128 + signal.SIGTERM
    assert out.splitlines() == whole[:6]
    assert "stopped after 6 lines; they are translated\n" in err
    monkeypatch.setattr(train_mt, "translate", translate)
    run(trained | {"translate": tmp_path / "in.txt"}, monkeypatch)
    assert capsys.readouterr().out.splitlines() == whole


def test_translations_redirected_to_a_file_are_utf8_in_any_locale(trained, tmp_path, monkeypatch):
    """Their batches may be larger than those of training."""
    text = "да 犬 \N{DOG FACE}"
    monkeypatch.setattr(train_mt, "translate_texts", lambda model, texts, *rest: texts)
    write_files(tmp_path, {"in.txt": f"{text}\n"})
    with open(tmp_path / "out.txt", "w", encoding="cp1252") as file:
        monkeypatch.setattr(sys, "stdout", file)
        run(trained | {"translate": tmp_path / "in.txt", "micro_tokens": 10_007}, monkeypatch)
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == f"{text}\n"


def test_files_that_cannot_be_translated_are_refused_in_one_line(trained, tmp_path, monkeypatch, capsys):
    assert "nowhere" in refused(trained | {"translate": tmp_path / "nowhere"}, monkeypatch, capsys)
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    latin = trained | {"translate": tmp_path / "latin"}
    assert "is not UTF-8: " in refused(latin, monkeypatch, capsys)
    for name, value in {"steps": 3, "table": "3"}.items():
        line = refused(latin | {name: value}, monkeypatch, capsys)
        assert f"--{name} is not read with " in line
        assert f"--translate {latin['translate']}: leave it out" in line
