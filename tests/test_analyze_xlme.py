"""`analyze.py retrieval`, `alignment` and `gap`: XLM-E's tables 5 to 7, on encoders and sets that are made here."""

import dataclasses
import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import table_rows
from test_analyze import refused, run

import common
import measures
from data import bitext_sets
from data.bitext_sets import Aligned
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from figures import crosslingual
from model import GPT, MaskedLM, ModelConfig

pytest.importorskip("matplotlib")
CPU = common.Context(0, 1, torch.device("cpu"), torch.float32)
WORDS = "Hund Katze Haus rot blau und dog cat house red blue and".split()


@pytest.fixture(scope="session")
def tokenizer() -> XLMR:
    rng = np.random.default_rng(0)
    return train_sentencepiece([" ".join(rng.permutation(WORDS)) for _ in range(300)], 288, XLMR)


def save_model(folder: Path, tokenizer: XLMR, kind=MaskedLM, **changes) -> Path:
    """The folder of a run whose model has weights large enough for every layer to matter."""
    folder.mkdir(parents=True)
    sizes = dict(vocab_size=tokenizer.vocab_size, block_size=24, n_layer=2, n_head=2, n_embd=16, ffn_size=32)
    config = ModelConfig(router="dense", **sizes | changes)
    torch.manual_seed(len(folder.name))
    model = kind(config)
    for name, p in model.named_parameters():
        if "ln_" not in name:
            p.data = 0.3 * torch.randn_like(p)
    tokenizer.save(folder)
    state = {"step": 1, "class": kind.__name__, "arguments": dataclasses.asdict(config)}
    state |= {"tokenizer": tokenizer.sha256}
    torch.save(state | {"model": model.state_dict()}, folder / "ckpt.pt")
    return folder


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory) -> list[Path]:
    """Two encoders, of unlike depths."""
    base = tmp_path_factory.mktemp("runs")
    return [save_model(base / "one", tokenizer), save_model(base / "other", tokenizer, n_layer=4, relative_bias=True)]


def numbers_of(folder: Path, name: str) -> dict:
    assert (folder / f"{name}.png").stat().st_size > 5_000 and "<svg" in (folder / f"{name}.svg").read_text()
    return json.loads((folder / f"{name}.json").read_text())


def table_in(said: str) -> list[list[str]]:
    return table_rows("\n".join(line for line in said.splitlines() if line.startswith("|")))


def states_of(encoder, row: list[int]) -> list[torch.Tensor]:
    """(T, D) by layer, of one row alone."""
    states = []
    with torch.no_grad():
        encoder(torch.tensor([row]), None, states)
    return [state[0] for state in states]


# ---------------------------------------------------------------------------------------------------------------------
# Retrieval


def sentences(count: int, seed: int, length: int = 6) -> list[str]:
    """No two alike, not even as bags of words."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        words = rng.choice(WORDS, rng.integers(2, length))
        found.setdefault(tuple(sorted(words)), " ".join(words))
    return list(found.values())


def write(path: Path, lines: list[str]):
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")
    with opened as file:
        file.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def tatoeba(tmp_path) -> Path:
    """German: the English sentences themselves. Dutch: shuffled against them. Finnish: a tenth as many, others."""
    folder = tmp_path / "tatoeba"
    folder.mkdir()
    english = sentences(30, 0)
    write(folder / "tatoeba.deu-eng.deu.gz", english)
    write(folder / "tatoeba.deu-eng.eng.gz", english)
    write(folder / "nld-eng.nld", english[1:] + english[:1])
    write(folder / "nld-eng.eng", english)
    write(folder / "tatoeba.fin-eng.fin", sentences(10, 1))
    write(folder / "tatoeba.fin-eng.eng", english[:10])
    write(folder / "tatoeba.xxx-eng.xxx", ["none of the 36"])
    return folder


def test_tatoeba_is_read_in_every_layout(tatoeba):
    texts = bitext_sets.tatoeba(tatoeba)
    english = sentences(30, 0)
    assert list(texts) == ["deu", "fin", "nld"]
    assert texts["deu"] == list(zip(english, english)) and texts["nld"][0] == (english[1], english[0])
    assert len(texts["fin"]) == 10
    assert len(bitext_sets.TATOEBA_14) == 14 and len(set(bitext_sets.TATOEBA_36)) == 36
    assert set(bitext_sets.TATOEBA_14) < set(bitext_sets.TATOEBA_36)


def test_translations_that_are_found(tatoeba, folders, tmp_path, monkeypatch, capsys):
    """Copies are all found and shuffled ones never, by every layer; the rest is as many as a loop finds."""
    run(monkeypatch, "retrieval", *folders, "--source", tatoeba, "--out", tmp_path, "--micro_tokens", 40)
    said = capsys.readouterr().out
    numbers = numbers_of(tmp_path, "retrieval")
    assert numbers["layers"] == [2, 2, 3, 3]
    options = crosslingual.Retrieval(folders=tuple(map(str, folders)), device="cpu", dtype="float32")
    for one, found in zip(crosslingual.open_encoders(options, CPU), numbers["languages"], strict=True):
        L = one.encoder.config.n_layer
        assert found["deu"] == [[1.0] * (L + 1)] * 2 and found["nld"] == [[0.0] * (L + 1)] * 2
        pairs = bitext_sets.tatoeba(tatoeba)["fin"]
        vectors = []
        for side in zip(*pairs):
            rows = [[one.tokenizer.bos, *ids, one.tokenizer.eos] for ids in one.tokenizer.encode_batch(list(side))]
            vectors.append([[F.normalize(h.mean(dim=0), dim=0) for h in states_of(one.encoder, row)] for row in rows])
        finnish, english = vectors
        for layer in range(L + 1):
            near = [[float(e[layer] @ f[layer]) for f in finnish] for e in english]
            forth = [row.index(max(row)) == i for i, row in enumerate(near)]
            back = [column.index(max(column)) == i for i, column in enumerate(zip(*near))]
            assert [side[layer] for side in found["fin"]] == pytest.approx([sum(forth) / 10, sum(back) / 10])
    rows = table_in(said)
    fourteen, thirty_six = numbers["means"]["Tatoeba-14"], numbers["means"]["Tatoeba-36"]
    assert rows[0][:4] == [f"{folders[0].parent.name}/one", "2", "100.0", "100.0"] and rows[1][0].endswith("weights")
    third = [f"{100 * (1 + 0 + numbers['languages'][2]['fin'][way][3]) / 3:.1f}" for way in (0, 1)]
    assert rows[2][4:] == third and rows[2][4:] == [f"{100 * side[3]:.1f}" for side in thirty_six["found"][2]]
    assert rows[4][:4] == ["chance", "", "3.3", "3.3"] and thirty_six["chance"] == pytest.approx((2 / 30 + 1 / 10) / 3)
    assert ["paper: XLM-E", "", "74.4", "72.3", "65.0", "62.3"] in rows
    assert len(fourteen["missing"]) == 13 and "nld" not in thirty_six["missing"]
    assert f"Tatoeba-14, without what {tatoeba} lacks: ara, bul" in said


def test_what_only_looks_alike_is_no_seed(folders, tmp_path):
    names = [str(tmp_path / name) for name in ("x/runs/one", "y/runs/one", "z/runs/one", "runs/one-seed=1")]
    for name, config in zip(names, ({"n_embd": 1}, {"n_embd": 2}, {"n_embd": 1}, {"n_embd": 2, "seed": 1})):
        shutil.copytree(folders[0], name)
        Path(name, "config.json").write_text(json.dumps(config))
    options = crosslingual.Retrieval(folders=(*names, f"{names[0]}/"), device="cpu", dtype="float32")
    opened = crosslingual.open_encoders(options, CPU)
    assert [one.kind for one in opened[::2]] == ["runs/one", *names[1:3], str(tmp_path / "runs/one")]
    rows = crosslingual.rows_by_kind([opened[0], opened[0], opened[1]], [[1.0, 5.0], [3.0, 5.0], [4.0, 6.0]], ".1f")
    assert [row[2:] for row in rows] == [["2.0 ± 1.4", "5.0 ± 0.0"], ["4.0", "6.0"]]


def test_seeds_are_a_mean_and_a_deviation(tatoeba, folders, tmp_path, monkeypatch, capsys):
    names = tmp_path / "runs" / "one", tmp_path / "runs" / "one-seed=1"
    for seed, name in enumerate(names):
        shutil.copytree(folders[0], name)
        constants = {"seed": seed} | ({} if seed else {"of_before": None, "compile": False})  # an older version's
        (name / "config.json").write_text(json.dumps(constants))
    run(monkeypatch, "retrieval", *names, "--source", tatoeba, "--out", tmp_path)
    rows = table_in(capsys.readouterr().out)
    assert [row[0] for row in rows[:3]] == ["runs/one", "runs/one, random weights", "chance"]
    assert rows[0][2:4] == ["100.0 ± 0.0"] * 2 and rows[1][2:4] == ["100.0"] * 2  # random weights: once


def test_layer_and_number_of_sentences_are_options(tatoeba, folders, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "retrieval", folders[0], "--source", tatoeba, "--out", tmp_path, "--layer", 0, "--most", 5)
    rows = table_in(capsys.readouterr().out)
    assert rows[0][1] == "0" and rows[2] == ["chance", "", "20.0", "20.0", "20.0", "20.0"]


def test_whitened_vectors_find_copies_and_no_shuffled_ones(tatoeba, folders, tmp_path, monkeypatch, capsys):
    numbers = {}
    for whiten in ("false", "true"):
        run(monkeypatch, "retrieval", folders[0], "--source", tatoeba, "--out", tmp_path, "--whiten", whiten)
        numbers[whiten] = numbers_of(tmp_path, "retrieval")["languages"]
        assert ("like spread" in capsys.readouterr().out) == (whiten == "true")
    for one in numbers["true"]:
        assert set(one["deu"][0]) == {1.0} and set(one["nld"][0]) == {0.0}
    assert numbers["true"][0]["fin"] != numbers["false"][0]["fin"]


def test_a_long_sentence_is_cut(folders):
    options = crosslingual.Retrieval(folders=(str(folders[0]),))
    one, _ = crosslingual.open_encoders(options, CPU)
    text = " ".join(WORDS * 4)
    row = [one.tokenizer.bos, *one.tokenizer.encode_batch([text])[0][:22], one.tokenizer.eos]
    vectors = measures.sentence_vectors(one.encoder, one.tokenizer, (text,), 100, CPU)
    for layer, h in zip(vectors, states_of(one.encoder, row), strict=True):
        torch.testing.assert_close(layer[0], F.normalize(h.mean(dim=0), dim=0), rtol=1e-4, atol=1e-5)


def test_without_a_source_it_is_held_out_pairs(tokenizer, folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    texts = {language: sentences(60, seed, 9) for seed, language in enumerate(("de", "en", "sw"))}
    for language in ("de", "sw"):
        for split, part in {"train": slice(0, 40), "valid": slice(40, 50), "test": slice(50, 60)}.items():
            for side in (language, "en"):
                write(tmp_path / "text" / f"{language}-en.{split}.{side}", texts[side][part])
    spm = tokenizer.save(tmp_path)
    prepared = prepare("bitext", tmp_path / "text", tokenizer=spm, out=tmp_path / "prepared")
    monkeypatch.setattr(crosslingual, "ready", lambda name: prepared)
    run(monkeypatch, "retrieval", folders[0], "--out", tmp_path)
    assert "Django" in capsys.readouterr().out
    numbers = numbers_of(tmp_path, "retrieval")
    assert numbers["means"]["Django's messages"]["chance"] == pytest.approx(1 / 10)
    found = bitext_sets.held_out(prepared)
    assert found == {language: list(zip(texts[language][40:50], texts["en"][40:50])) for language in ("de", "sw")}


def test_what_is_no_tatoeba_is_one_clear_line(tatoeba, folders, tmp_path, monkeypatch, capsys):
    def says(**options) -> str:
        given = {"source": tatoeba} | options
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        return refused(monkeypatch, capsys, "retrieval", folders[0], "--out", tmp_path, *words)

    assert "layer must be from 0 to 2" in says(layer=99) and "not -1" in says(layer=-1)
    assert "most must be over 0" in says(most=0)
    assert "no pair of files such as tatoeba.deu-eng.deu" in says(source=tmp_path / "none")
    english = tatoeba / "nld-eng.eng"
    lines = english.read_text().splitlines()
    write(english, lines[:-1])
    assert "nld-eng.nld and nld-eng.eng" in says() and "line 30" in says()
    for file in (english, tatoeba / "nld-eng.nld"):
        file.write_text("")
    assert "nld-eng.nld holds no sentence" in says()
    english.unlink()
    assert "nld-eng.eng" in says()


def test_what_is_no_encoder_is_one_clear_line(tatoeba, tokenizer, folders, tmp_path, monkeypatch, capsys):
    def says(folder: Path) -> str:
        return refused(monkeypatch, capsys, "retrieval", folders[0], folder, "--source", tatoeba)

    assert "does not exist: train it with train_mlm.py" in says(tmp_path / "train_mlm" / "demo")
    assert "neither the folder of a run" in says(tatoeba)
    assert "is no encoder" in says(save_model(tmp_path / "gpt", tokenizer, GPT))
    changed = save_model(tmp_path / "changed", tokenizer)
    (changed / tokenizer.filename).unlink()
    assert "no tokenizer" in says(changed)


# ---------------------------------------------------------------------------------------------------------------------
# Word alignment


@pytest.fixture
def gold(tmp_path) -> Path:
    folder = tmp_path / "gold"
    folder.mkdir()
    (folder / "de-en.src-tgt").write_text("Hund und  Katze ||| dog and cat\nrot ||| red house \nHaus rot ||| red\n")
    (folder / "de-en.gold").write_text("1-1 2p2 3-3\n1-1 1p2\n\n")
    write(folder / "en-ro.src-tgt.gz", ["dog cat ||| Katze Hund"])
    write(folder / "en-ro.gold", ["1-2 2-1 2p2 3-1 0-1"])
    return folder


def test_gold_alignments_are_read_from_1(gold):
    sets, notes = bitext_sets.word_alignments(gold)
    assert sets["de-en"] == [
        Aligned(["Hund", "und", "Katze"], ["dog", "and", "cat"], {(0, 0), (2, 2)}, {(0, 0), (1, 1), (2, 2)}),
        Aligned(["rot"], ["red", "house"], {(0, 0)}, {(0, 0), (0, 1)}),
        Aligned(["Haus", "rot"], ["red"], set(), set()),
    ]
    assert sets["en-ro"] == [Aligned(["dog", "cat"], ["Katze", "Hund"], {(0, 1), (1, 0)}, {(0, 1), (1, 0), (1, 1)})]
    assert notes == [f"{gold / 'en-ro.gold'}: 2 links that point past their sentence, left out"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_alignment_is_a_loop_over_pieces(together, rounds, folders):
    """Of sentences that fit into one row together, that do not, and that are too long even alone."""
    rng = np.random.default_rng(0)
    pairs = []
    for m, n in ((2, 3), (4, 1), (1, 3), (6, 6), (40, 3)):
        pairs.append(Aligned(*([*rng.choice(WORDS, size)] for size in (m, n)), set(), set()))
    options = crosslingual.Alignment(folders=(str(folders[1]),), together=together, rounds=rounds, micro_tokens=30)
    one, _ = crosslingual.open_encoders(options, CPU)
    long = Counter()
    links = crosslingual.align(pairs, one, options, CPU, long)
    bos, eos, T = one.tokenizer.bos, one.tokenizer.eos, one.encoder.config.block_size
    apart = cut = 0
    for pair, found in zip(pairs, links, strict=True):
        ids, owners = [[], []], [[], []]
        for side, words in enumerate((pair.one, pair.two)):
            for number, word in enumerate(words):
                for piece in one.tokenizer.encode_batch([word])[0]:
                    ids[side].append(piece)
                    owners[side].append(number)
        m, n = map(len, ids)
        if together and m + n + 3 <= T:
            states = states_of(one.encoder, [bos, *ids[0], eos, *ids[1], eos])
            e, f = [h[1 : m + 1] for h in states], [h[m + 2 : m + n + 2] for h in states]
        else:
            apart, cut = apart + 1, cut + (max(m, n) > T - 2)
            e, f = ([h[1:-1] for h in states_of(one.encoder, [bos, *own[: T - 2], eos])] for own in ids)
        for layer in range(5):
            S = [[float(x @ y) for y in f[layer]] for x in e[layer]]
            aligned = reference.iterative(reference.transport(S, 2), rounds, 0.9)
            assert found[layer] == {(owners[0][i], owners[1][j]) for i, j in aligned}, (pair, layer)
    assert 0 < cut < apart and [*long.values()] == ([apart] if together else []) + [cut]
    assert together == (apart < 5)


def test_the_same_sentence_is_aligned_with_itself(tokenizer, tmp_path, monkeypatch, capsys):
    """By embeddings, where a piece is like itself and hardly like another: AER 0, as of the diagonal."""
    wide, folder = save_model(tmp_path / "wide", tokenizer, n_embd=256), tmp_path / "gold"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = [" ".join(rng.permutation(WORDS)[:5]) for _ in range(20)]
    write(folder / "de-de.src-tgt", [f"{text} ||| {text}" for text in words])
    write(folder / "de-de.gold", ["1-1 2-2 3-3 4p4 5p5"] * 20)
    run(monkeypatch, "alignment", wide, "--source", folder, "--out", tmp_path, "--together", "false", "--layer", 0)
    rows = table_in(capsys.readouterr().out)
    assert [row[2:] for row in rows[:3]] == [["0.00", "0.00"]] * 3
    one, twin = numbers_of(tmp_path, "alignment")["errors"]
    assert one["de-de"][0] == 0 and twin == {"de-de": [0, 0, 0]}


def test_table_6(gold, folders, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "alignment", *folders, "--source", gold, "--out", tmp_path, "--layer", 1)
    said = capsys.readouterr()
    assert "warning: " in said.err and "2 links that point past" in said.err
    numbers = numbers_of(tmp_path, "alignment")
    rows = table_in(said.out)
    sets, _ = bitext_sets.word_alignments(gold)
    options = crosslingual.Alignment(folders=tuple(map(str, folders)))
    for row, one, errors in zip(rows, crosslingual.open_encoders(options, CPU), numbers["errors"]):
        for name, pairs in sets.items():
            links = crosslingual.align(pairs, one, options, CPU, Counter())
            for layer, found in enumerate(zip(*links)):
                expected = reference.aer(found, [pair.sure for pair in pairs], [pair.possible for pair in pairs])
                assert errors[name][layer] == pytest.approx(100 * expected)
        cells = [errors["de-en"][1], errors["en-ro"][1]]
        assert row[1:] == ["1", *(f"{error:.2f}" for error in (*cells, sum(cells) / 2))]
    # Of 3 + 1 + 2 links three are sure and one is possible alone, where 3 are sure; of 2 links one is possible alone.
    diagonal = 100 * (1 - (3 + 4) / (6 + 3)), 100 * (1 - 1 / (2 + 2))
    assert rows[4][2:4] == [f"{error:.2f}" for error in diagonal]
    assert ["paper: XLM-E", "", "16.49", "24.41", ""] in rows and ["paper: fast_align", "", "32.14", "", ""] in rows


def test_the_diagonal():
    def of(m, n):
        return crosslingual.diagonal(Aligned(["a"] * m, ["b"] * n, set(), set()))

    assert of(3, 3) == {(0, 0), (1, 1), (2, 2)} and of(1, 4) == {(0, 0)}
    assert of(4, 2) == {(0, 0), (1, 0), (2, 1), (3, 1)}  # 3 * 2 / 4 would be 2, past the end
    assert of(2, 6) == {(0, 0), (1, 3)}


def test_what_is_no_alignment_is_one_clear_line(gold, folders, tmp_path, monkeypatch, capsys):
    def says(*words) -> str:
        return refused(monkeypatch, capsys, "alignment", folders[0], *words)

    assert "--source FOLDER with de-en.src-tgt" in says()
    assert "no file such as de-en.src-tgt" in says("--source", tmp_path / "none")
    file, links = gold / "de-en.src-tgt", gold / "de-en.gold"
    (gold / "more").mkdir()
    for each in (file, links):
        shutil.copy(each, gold / "more")
    assert "holds de-en twice, once in " in says("--source", gold)
    shutil.rmtree(gold / "more")
    text = file.read_text()
    for broken in (text.replace("rot |||", "rot"), text.replace("||| red\n", "|||\n"), text.replace("rot |||", "|||")):
        file.write_text(broken)
        assert "line" in says("--source", gold) and "not `source ||| target`" in says("--source", gold)
    file.write_text(text + "rot ||| red\n")
    assert "4 sentence pairs and de-en.gold 3 lines" in says("--source", gold)
    file.write_text(text)
    links.write_text("2p2\n\n\n")
    assert "holds no sure link" in says("--source", gold)
    links.unlink()
    assert "de-en.gold" in says("--source", gold)


def test_broken_lines_are_counted(gold, folders, tmp_path, monkeypatch, capsys):
    (gold / "de-en.gold").write_text("1-1 2-x\n1-1\n1 - 1\n")
    run(monkeypatch, "alignment", folders[0], "--source", gold, "--out", tmp_path)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2 and "de-en.gold: 2 broken lines, whose sentences are left out" in said[0]
    assert len(bitext_sets.word_alignments(gold)[0]["de-en"]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# The gap


def save_result(folder: Path, model: str, task: str, english: float, others: float, **more):
    """What finetune_xtreme.py leaves behind, as far as it is read."""
    metrics = ("f1", "em") if task == "xquad" else ("accuracy",)
    languages = {"en": dict.fromkeys(metrics, english), "de": dict.fromkeys(metrics, others - 1)}
    languages["zh"] = dict.fromkeys(metrics, others + 1)
    result = {"languages": languages, "gap": dict.fromkeys(metrics, english - others)}
    result |= {"mean": dict.fromkeys(metrics), "counted": {}}
    result["guesses"] = {language: dict.fromkeys(metrics, 33.0) for language in ("de", "zh")}
    if task == "xquad":
        result["gap"]["f1"] = -1.0  # the gap is of EM
    else:
        result["counted"] = {"de": {"accuracy": 44.0}, "zh": {"accuracy": 46.0}}
    for scores in filter(None, (result["guesses"], result["counted"])):
        scores["en"] = dict.fromkeys(metrics, 99.0)  # is not among the others
    constants = {"model": model, "task": task, "seed": 0, "epochs": 3} | more
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result | {"config": constants}))


@pytest.fixture
def finished(tmp_path) -> Path:
    base = tmp_path / "finetune_xtreme"
    save_result(base / "a", "out/train_electra/demo", "xnli", 70, 60)
    save_result(base / "b", "out/train_electra/demo", "xnli", 74, 62, seed=1)
    save_result(base / "c", "out/train_electra/demo", "xquad", 50, 41)
    save_result(base / "d", "out/train_mlm/demo", "xnli", 60, 61)
    return base


def test_table_7(finished, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "gap", finished, finished / "a", "--out", tmp_path)  # a run that is named twice counts once
    rows = table_in(capsys.readouterr().out)
    xlm_e, mlm, paper = "out/train_electra/demo", "out/train_mlm/demo", ["10.4", "11.5", "11.2"]
    assert rows == [
        [xlm_e, "XQuAD", "50.0", "41.0", "9.0", "33.0", "", "15.9", "16.3", "14.9"],
        [xlm_e, "XNLI", "72.0 ± 2.8", "61.0 ± 1.4", "11.0 ± 1.4", "33.0 ± 0.0", "45.0 ± 0.0", *paper],
        [mlm, "XNLI", "60.0", "61.0", "-1.0", "33.0", "45.0", *paper],
    ]
    gaps = numbers_of(tmp_path, "gap")["gaps"]
    assert gaps == {xlm_e: {"xquad": 9, "xnli": 11}, mlm: {"xnli": -1}}


def test_a_task_that_is_not_tested_in_english_has_no_gap(finished, tmp_path, monkeypatch, capsys):
    file = finished / "d" / "result.json"
    result = json.loads(file.read_text())
    del result["languages"]["en"]
    file.write_text(json.dumps(result | {"gap": {}}))
    run(monkeypatch, "gap", finished / "a", finished / "d", "--out", tmp_path)
    rows = table_in(capsys.readouterr().out)
    assert rows[-1][:7] == ["out/train_mlm/demo", "XNLI", "", "61.0", "", "33.0", "45.0"]
    assert numbers_of(tmp_path, "gap")["gaps"] == {"out/train_electra/demo": {"xnli": 10}, "out/train_mlm/demo": {}}


def test_what_is_no_result_is_one_clear_line(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "no result of finetune_xtreme.py in out/finetune_xtreme" in refused(monkeypatch, capsys, "gap")
    save_result(finished / "e", "out/train_mlm/demo", "xnli", 60, 61, epochs=4)
    assert "with another epochs" in refused(monkeypatch, capsys, "gap", finished)
    save_result(finished / "f", "out/train_mlm/demo", "xnli", 60, 61, frozen=False)
    for order in ("df", "fd"):  # whichever of the two has a constant that the other lacks
        assert "with another frozen" in refused(monkeypatch, capsys, "gap", *(finished / name for name in order))
    shutil.rmtree(finished / "f")
    shutil.copytree(finished / "d", finished / "d" / "again")
    assert "of the same encoder, task and seed" in refused(monkeypatch, capsys, "gap", finished / "d")
    shutil.rmtree(finished / "d" / "again")
    (finished / "e" / "result.json").write_text("{")
    assert "not readable JSON" in refused(monkeypatch, capsys, "gap", finished)
    for languages in ({}, {"languages": {"en": {"accuracy": 60.0}}}):
        (finished / "e" / "result.json").write_text(json.dumps({"name": "demo", "gap": {}, "config": {}} | languages))
        run(monkeypatch, "gap", finished, "--out", tmp_path)
        assert "result.json is left out" in capsys.readouterr().err
