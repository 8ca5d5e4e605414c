"""`train_mt.py` as a user runs it, on two small pairs of languages and tiny models.

The network and its beam search are tested in test_translator.py; what all scripts share, in test_run.py.
"""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TORCHRUN,
    Script,
    flip_a_byte,
    metrics,
    only_run,
    result_of,
    saved,
    table_rows,
    words,
    write_files,
)

import train_mt
from data.batches import TranslationData
from data.prepare import prepare
from engine.config import command_line
from engine.device import seed_all, setup
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
    """Texts of three to eight words and a full stop, translated word by word."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(list(words), rng.integers(3, 9)) for _ in range(count)]
    return [(" ".join(text) + ".", " ".join(map(words.get, text)) + ".") for text in drawn]


def lines(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{one}\t{two}\n" for one, two in pairs)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Two pairs of languages, whose words are a piece each: five to ten tokens a text."""
    base, files = tmp_path_factory.mktemp("pairs"), {}
    for seed, (split, count) in enumerate({"train": 120, "valid": 6, "test": 5}.items()):
        for language in ("de", "ru"):
            files[f"{language}-en.{split}.tsv"] = lines(sentences(count, seed))
    return prepare("bitext", write_files(base / "text", files), pieces=340, out=base / "corpus")


@pytest.fixture
def options(corpus, tmp_path) -> dict:
    return TINY | {"data": corpus, "out_dir": tmp_path / "out"}


def opened(options: dict) -> tuple:
    """What a run of these options has before its first step."""
    config = Config(**options)
    context = setup("cpu", config.dtype)
    data = TranslationData.open(config.data, config, context, exponent=1.0, target=config.target)
    seed_all(config.seed)
    return config, context, data, context.place(Translator(config, data.vocab_size))


# --- Whole runs

ROWS = {  # what to say, and how many layers are sparse
    "dense": ({"router": "dense", "dtype": "bfloat16"}, 0),
    "threshold": ({"expert_ffns": 2}, 2),
    "encoder alone": ({"router": "switch", "expert_ffns": 2, "decoder_moe": False}, 1),
    "X-MoE": ({"router": "hypersphere", "moe_after": "1", "experts": 4}, 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_translates_and_reports(row, options, monkeypatch, capsys):
    given, sparse = ROWS[row]
    run(options | given, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    limited, free = result["test"], result["test_no_limit"]
    for scores in (limited, free):
        assert list(scores["pairs"]) == ["de-en", "ru-en"] and scores["sentences"] == 10
        assert scores["bleu"] == pytest.approx(np.mean([pair["bleu"] for pair in scores["pairs"].values()]))
        assert f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}" in out
        assert len(scores["layers"]) == sparse
    assert "nw:2" in limited["pairs"]["de-en"]["chrf_signature"]
    assert out.count("reference: ") == out.count("ours:      ") == 5
    if row in ("threshold", "encoder alone"):
        assert any(layer["cut"] > 0 for layer in limited["layers"])
        assert all(layer["cut"] == 0 for layer in free["layers"])
    else:  # these have no limit, or nothing but one
        assert limited == free and "without a limit" not in out
    assert all(record["bleu"] >= 0 for record in metrics(options["out_dir"]))


def test_pairs_are_learned_by_heart(tmp_path, monkeypatch, capsys):
    """BLEU 100 of the very pairs that it was trained on."""
    pairs = sentences(16, 5, {f"{a}{b}": f"{b}o{a}" for a in "bdfgklmn" for b in ("at", "er", "il", "ut", "op")})
    write_files(tmp_path / "text", {f"de-en.{split}.tsv": lines(pairs) for split in ("train", "valid", "test")})
    folder = prepare("bitext", tmp_path / "text", pieces=370, out=tmp_path / "data")
    options = TINY | {"data": folder, "out_dir": tmp_path / "out", "n_embd": 64, "ffn_size": 128, "steps": 80}
    options |= {"micro_tokens": 512, "batch_tokens": 512, "eval_every": 80, "learning_rate": 8e-3}
    options |= {"warmup_steps": 20, "label_smoothing": 0.0, "threshold": 0.9}
    options |= {"capacity": math.inf}  # a limit may cost a word
    run(options, monkeypatch)
    assert result_of(tmp_path / "out")["test"]["bleu"] == pytest.approx(100)
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("".join(f"{one}\n" for one, _ in pairs))
    run(translating(options) | {"translate": tmp_path / "in.txt"}, monkeypatch)
    assert capsys.readouterr().out == "".join(f"{two}\n" for _, two in pairs)


# --- Formulas


def test_evaluation_is_its_literal_definition(options):
    _, context, data, model = opened(options | {"dtype": "float64", "capacity": math.inf, "dropout": 0.5})
    scores, total, count, size = train_mt.evaluate(model, data, "valid", context, 10**9), 0.0, 0, 0
    assert model.training
    model.eval()
    for name in data.languages:
        for one, two in zip(*data.texts("valid", name)):
            source, target = data.tokenizer.encode_batch([one, two])
            with torch.no_grad():
                logits, _ = model(torch.tensor([[*source, 2]]), None, torch.tensor([[0, *target]]), None)
            for row, label in zip(logits.log_softmax(dim=1), [*target, 2]):
                total, count = total - float(row[label]), count + 1
            size += len(two.encode())
    assert scores["tokens"] == count and scores["loss"] == pytest.approx(total / count)
    assert scores["bpb"] == pytest.approx(total / size / math.log(2))  # bits, by the bytes of the translations


def test_scores_are_of_texts_as_people_write_them():
    """Tokenised or lowercased text would score otherwise; sacrebleu does the tokenising."""
    reference = ["He said: “it isn't red, is it?” (Not yet.)", "The U.S. house costs $1,000.50."]
    same = train_mt.score_translations(reference, reference, "en")
    assert same["bleu"] == pytest.approx(100) and same["chrf"] == pytest.approx(100)
    tokenised = ["He said : “ it is n't red , is it ? ” ( Not yet . )", "The U . S . house costs $ 1 , 000.50 ."]
    assert train_mt.score_translations(tokenised, reference, "en")["bleu"] < 80
    assert train_mt.score_translations([text.lower() for text in reference], reference, "en")["bleu"] < 90
    # Chinese has no spaces: a text that differs in one place would otherwise have no word right.
    reference, ours = ["我昨天在学校的图书馆里看了一本书。"], ["我昨天在学校的图书馆里读了一本书。"]
    for language in ("zh", "zh_Hans"):
        scores = train_mt.score_translations(ours, reference, language)
        assert scores["bleu"] > 60 and "tok:zh|" in scores["bleu_signature"]
    assert "tok:13a|" in same["bleu_signature"]
    with pytest.raises(ImportError, match=r"sacrebleu\[ja\]"):  # it splits Japanese with the help of another
        train_mt.score_translations([""], [""], "ja")


def test_what_is_scored_is_what_was_written_not_pieces(options, monkeypatch):
    """A model that translates perfectly gets 100, though its vocabulary knows neither the ½ nor double spaces."""
    config, context, data, model = opened(options)
    texts = {"de-en": (["eins", "zwei"], ["The  red dog… ½", "One"]), "ru-en": (["раз"], ["Two　red houses run."])}
    monkeypatch.setattr(data, "texts", lambda split, name: texts[name])
    known = {one: two for sides in texts.values() for one, two in zip(*sides)}
    monkeypatch.setattr(train_mt, "translate_texts", lambda model, texts, *rest: [known[text] for text in texts])
    scores = train_mt.score_split(model, data, "test", config, context)
    assert [pair["bleu"] for pair in scores["pairs"].values()] == pytest.approx([100, 100])
    named = [("de-en", "eins"), ("de-en", "zwei"), ("ru-en", "раз")]
    assert scores["examples"] == [(name, one, known[one], known[one]) for name, one in named]
    known["раз"] = "Three dogs are here."
    scores = train_mt.score_split(model, data, "test", dataclasses.replace(config, target="zh"), context, most=1)
    de, ru = scores["pairs"].values()
    assert ru["bleu"] < 50 < de["bleu"] and scores["sentences"] == 2 and "tok:zh" in de["bleu_signature"]


def test_text_comes_out_detokenised_in_the_order_it_came(options, monkeypatch):
    """Of ids whose pieces are parts of words and punctuation; inside, the longest come first."""
    config, context, data, model = opened(options)
    texts = ["rot.", "", "Hundehaus und Katze und Haus.", "\u200b", "Katze  läuft."]
    assert len(data.tokenizer.encode_batch(texts)[2]) > 6

    config = dataclasses.replace(config, micro_tokens=40)

    def copied(model, source, *_):
        assert source.numel() <= 20  # as in training, where half of the tokens are the translations'
        return [row[row > 2].tolist() for row in source]

    monkeypatch.setattr(train_mt, "translate", copied)
    found = train_mt.translate_texts(model, texts, data.tokenizer, config, context)
    assert found == ["rot.", "", "Hundehaus und Katze und Haus.", "", "Katze läuft."]
    newline = data.tokenizer.processor.piece_to_id("<0x0A>") + 1
    [words] = data.tokenizer.encode_batch(["a b"])
    monkeypatch.setattr(train_mt, "translate", lambda model, source, *_: [[*words, newline, 5]] * len(source))
    assert "\n" not in train_mt.translate_texts(model, ["rot"], data.tokenizer, config, context)[0]


# --- The best checkpoint, resuming and processes


def test_the_best_weights_are_tested_and_kept_whatever_happens(options, monkeypatch, capsys):
    """Of a run that is killed behind its last checkpoint, and whose last checkpoint is damaged."""
    scores = iter([(9.0, 3.0), (9.0, 4.0), (7.0, 9.0), (9.0, 4.0), (8.0, 9.0)])  # of steps 2 to 8, and of 8 again
    weights, score_split = [], train_mt.score_split

    def fixed(model, data, split, *rest, **more):
        if split != "valid":
            return score_split(model, data, split, *rest, **more)
        weights.append(copy.deepcopy(model.state_dict()))
        return dict(zip(("bleu", "chrf"), next(scores))) | {"pairs": {}, "layers": []}

    monkeypatch.setattr(train_mt, "score_split", fixed)
    options |= {"steps": 8, "dropout": 0.1}
    run(options, monkeypatch)
    folder, before = only_run(options["out_dir"]), result_of(options["out_dir"])
    assert before["best"] == {"step": 4, "bleu": 9.0}  # of equal BLEU the one of higher chrF2++
    for name in ("result.json", "model.pt"):
        (folder / name).unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    said, best, after = capsys.readouterr(), saved(options, "model.pt"), result_of(options["out_dir"])
    assert "goes on from step 7" in said.out
    assert said.out.count("weights of step 4, whose validation BLEU is best: 9.00") == 2
    assert (best["step"], saved(options, "ckpt.pt")["step"]) == (4, 8)
    assert all(torch.equal(weight, weights[1][name]) for name, weight in best["model"].items())
    config, context, data, model = opened(options)
    model.load_state_dict(best["model"])
    again = score_split(model, data, "test", config, context)
    assert json.loads(json.dumps(again)) == after["test"]
    assert all(after[name] == before[name] for name in ("best", "test", "test_no_limit", "parameters"))


# --- Tables, and a translation memory


def test_table_3_has_every_row(options, monkeypatch, capsys):
    options |= {"table": 3, "steps": 1, "eval_every": 1, "eval_sentences": 1, "expert_ffns": 2, "beam": 1}
    run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["dense", "Switch", "top-2", "top-4", "XMoE", "XMoE"]
    assert [row[1] for row in rows] == ["", "2 x 32", "4 x 16", "8 x 8", "4 x 16", "8 x 8"]
    assert rows[0][2:4] == ["mean", "26.4 / 51.5"] and rows[5][2:4] == ["mean", "28.7 / 53.7"]
    results = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    (dense,) = (result for result in results if result["config"]["router"] == "dense")
    expected = [dense[what][metric] for what in ("memory", "lookup") for metric in ("bleu", "chrf")]
    assert rows[0][11:16] == [f"{score:.2f}" for score in (*expected, dense["best"]["bleu"])]
    expected = [pair[metric] for pair in dense["test"]["pairs"].values() for metric in ("bleu", "chrf")]
    assert rows[0][17:] == [f"{score:.2f}" for score in expected]
    assert rows[0][5] == f"{dense['test']['bleu']:.2f}" and rows[0][7] == rows[0][10] == ""  # no rows are kept there
    assert all(float(row[7]) < float(row[10]) for row in rows[1:])  # rows kept: without a limit, more


def test_counting_is_scored_by_pair_and_in_the_mean(options, monkeypatch):
    _, _, data, _ = opened(options)
    expected = {name: data.texts("test", name)[1] for name in data.languages}
    own = {"de-en": expected["de-en"], "ru-en": ["a text of its own"] * 5}
    monkeypatch.setattr("metrics.bleu.remembered", lambda data, name: own[name])
    scores = {name: train_mt.score_translations(own[name], expected[name], "en") for name in own}
    assert scores["de-en"]["bleu"] == pytest.approx(100) and scores["ru-en"]["bleu"] < 20
    found = train_mt.score_counting(data)
    assert found["memory"].pop("pairs") == scores
    means = {metric: (scores["de-en"][metric] + scores["ru-en"][metric]) / 2 for metric in ("bleu", "chrf")}
    assert found["memory"] == pytest.approx(means)
    assert found["lookup"]["chrf"] > 90  # the words of these languages stand in one order
    own |= {"de-en": [], "ru-en": []}  # languages without a test set
    assert train_mt.score_counting(data)["memory"] == {}
    monkeypatch.setattr("metrics.counting.COUNTED_UP_TO", 0)  # where the training text is large
    assert train_mt.score_counting(data) == {"memory": {}, "lookup": {}}


def test_since_step_is_the_first_evaluation_that_beats_the_memory(options, monkeypatch, capsys):
    """Of each pair of languages; nothing where that never comes; and a run that goes on keeps it."""
    score_split, chrf = train_mt.score_split, iter([30.0, 31.0, 29.0, 32.0])

    def fixed(model, data, split, *rest, **options):
        scores = score_split(model, data, split, *rest, **options)
        if split == "valid":
            scores["pairs"]["de-en"]["chrf"] = scores["pairs"]["ru-en"]["chrf"] = next(chrf)
        return scores

    pairs = {name: {"bleu": 1.0, "chrf": memory} for name, memory in {"de-en": 30.0, "ru-en": 32.0}.items()}
    counted = {name: {"bleu": 1.0, "chrf": 31.0, "pairs": pairs} for name in ("memory", "lookup")}
    monkeypatch.setattr(train_mt, "score_split", fixed)
    monkeypatch.setattr(train_mt, "score_counting", lambda data: counted)
    run(options | {"steps": 8}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    assert result["since_step"] == {"de-en": 4, "ru-en": None} and result["memory"] == counted["memory"]
    assert "beats the memory since step 4" in out and "beats the memory at no evaluation" in out
    assert train_mt.cells(result)["beats memory since step"][0] is None
    (only_run(options["out_dir"]) / "result.json").unlink()
    chrf = iter([29.0])
    run(options | {"steps": 8}, monkeypatch)
    assert result_of(options["out_dir"])["since_step"] == {"de-en": 4, "ru-en": None}
    result["since_step"]["ru-en"] = 6
    assert train_mt.cells(result)["beats memory since step"][0] == 6
    assert train_mt.cells(result | {"since_step": {}})["beats memory since step"][0] is None


def rows_of(number: int, *argv: str) -> list[tuple]:
    """(labels, config) of each row of a table."""
    base = command_line(Config, PRESETS, [*argv, "--table", str(number)])
    rows = train_mt.TABLES[number](base).rows
    return [(labels, dataclasses.replace(base, **change)) for labels, change in rows]


def built(config) -> Translator:
    with torch.device("meta"):
        return Translator(config, 32_000)


def test_at_the_papers_scale_every_language_has_its_own_model():
    rows = rows_of(3, "--preset", "wmt23")
    assert [config.data for _, config in rows] == 6 * ["wmt23-uk", "wmt23-de", "wmt23-ru", "wmt23-he", "wmt23-zh"]
    paper = {labels[2]: labels[3] for labels, _ in rows[-5:]}
    assert paper == dict(uk="32.0 / 55.7", de="29.2 / 53.2", ru="28.5 / 53.9", he="35.5 / 60.1", zh="18.0 / 45.4")
    # Embeddings; 24 attentions, 18 FFNs, 42 norms in the blocks and two behind them.
    D, F = 512, 2048
    dense = 32_000 * D + 24 * 4 * (D * D + D) + 18 * (2 * D * F + F + D) + (42 + 2) * 2 * D
    assert flops.numel(built(rows[0][1])) == dense == 79_438_848
    for (labels, config), k in zip(rows[5::5], (1, 2, 4, 2, 4), strict=True):
        E, size, model = 32 * k, 2048 // k, built(config)
        assert labels[1] == f"{E} x {size}" and {moe.capacity_factor for moe in model.moe_layers} == {k}
        # 9 blocks have experts, and a routing vector for each
        assert flops.numel(model) == dense + 9 * (E * (2 * D * size + size + D + D) - (2 * D * F + F + D))


def test_table_4_has_x_moes_layer_in_the_encoder(options, monkeypatch, capsys):
    run(options | {"table": 4, "steps": 1, "eval_every": 1, "eval_sentences": 1, "experts": 4}, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["dense", "one expert for all", "SMoE", "X-MoE"]
    assert [row[4] for row in rows] == ["", "1.00", "1.00", "1.00"]
    rows = rows_of(4, "--preset", "wmt10")
    assert {config.moe_after for _, config in rows} == {(6,)} and rows[0][1].sampling_exponent == 0.7
    # 32 experts of three FFNs with a norm each; E routing vectors, which the hypersphere has in E / 2 dimensions.
    D, F, E = 512, 2048, 32
    expert = 3 * (2 * D * F + F + D + 2 * D)
    experts = 79_438_848 + E * expert
    found = [flops.numel(built(config)) for _, config in rows]
    assert found == [79_438_848, 79_438_848 + expert + D, experts + E * D, experts + 16 * D + E * 16 + 1]


# --- Translating files


def translating(options: dict) -> dict:
    """What `--translate` reads of them, with the run that they made."""
    read = ("beam", "micro_tokens", "device", "dtype")
    return {name: options[name] for name in read} | {"model": only_run(options["out_dir"])}


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
    found = out.split("\n")
    assert len(found) == len(lines) + 1 and found[1] == found[3] == found[7] == ""
    assert "warning: 1 of 7 texts are cut to block_size - 1 = 31 tokens" in err
    assert found[4] == found[6]
    command = [*TORCHRUN, str(ROOT / "train_mt.py"), *words(trained | {"translate": tmp_path / "in.txt"})]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0 and done.stdout.decode() == out, done.stderr.decode()


def test_translations_in_a_file_are_utf8_whatever_the_locale(trained, tmp_path, monkeypatch):
    """And batches may be larger than those of training."""
    text = "да 犬 \N{DOG FACE}"
    monkeypatch.setattr(train_mt, "translate_texts", lambda model, texts, *rest: texts)
    write_files(tmp_path, {"in.txt": f"{text}\n"})
    with open(tmp_path / "out.txt", "w", encoding="cp1252") as file:
        monkeypatch.setattr(sys, "stdout", file)
        run(trained | {"translate": tmp_path / "in.txt", "micro_tokens": 10_007}, monkeypatch)
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == f"{text}\n"


def test_what_cannot_be_translated_is_one_clear_line(trained, tmp_path, monkeypatch, capsys):
    assert "nowhere" in refused(trained | {"translate": tmp_path / "nowhere"}, monkeypatch, capsys)
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    given = trained | {"translate": tmp_path / "latin"}
    assert "is not UTF-8: " in refused(given, monkeypatch, capsys)
    for more in ({"steps": 3}, {"table": "3"}):
        line = refused(given | more, monkeypatch, capsys)
        assert f"--{min(more)} is not read with " in line and f"--translate {given['translate']}: leave it out" in line
