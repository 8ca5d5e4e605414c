"""`analyze.py retrieval` and `alignment`: XLM-E's tables 5 and 6, on random encoders and made-up test sets."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import reference_scores
import torch
import torch.nn.functional as F
from helpers import save_run
from test_analyze import levels, lines, refused
from test_flops import SMALL
from test_train_electra import corpora as electra_corpora

from analysis import xlm_e
from data import bitext_sets
from data.batches import PairData
from data.bitext_sets import Aligned
from data.tokenizers import XLMR, train_sentencepiece
from engine import pretrained
from engine.device import Context
from metrics import crosslingual
from model import GPT, MaskedLM

__all__ = ["electra_corpora"]  # a fixture
pytest.importorskip("matplotlib")
CPU = Context(0, 1, torch.device("cpu"), torch.float32)
WORDS = "Hund Katze Haus rot blau und dog cat house red blue and".split()


@pytest.fixture(scope="session")
def tokenizer() -> XLMR:
    rng = np.random.default_rng(0)
    return train_sentencepiece([" ".join(rng.permutation(WORDS)) for _ in range(300)], 288, XLMR)


def save_model(folder: Path, tokenizer: XLMR, kind=MaskedLM, **changes) -> Path:
    """The folder of a run, its weights large enough for every layer to matter."""
    sizes = dict(router="dense", block_size=24, n_embd=16, ffn_size=32)
    config = SimpleNamespace(**SMALL | sizes | changes)
    torch.manual_seed(len(folder.name))
    model = kind(config, tokenizer.vocab_size)
    for name, p in model.named_parameters():
        if "ln_" not in name:
            p.data = 0.3 * torch.randn_like(p)
    save_run(folder, model, tokenizer)
    (folder / "config.json").write_text(json.dumps(vars(config) | {"seed": 0}))
    return folder


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory) -> list[Path]:
    """Two encoders of different depths."""
    base = tmp_path_factory.mktemp("runs")
    return [save_model(base / "one", tokenizer), save_model(base / "other", tokenizer, n_layer=4, relative_bias=True)]


def records_of(kept: dict, run: Path) -> list[dict]:
    return [record for record in kept["records"] if record["run"] == str(run)]


def states_of(encoder, row: list[int]) -> list[torch.Tensor]:
    """(T, D) by layer, of a single row."""
    states = []
    with torch.no_grad():
        encoder(torch.tensor([row]), None, states)
    return [state[0] for state in states]


def sentences(count: int, seed: int, length: int = 6) -> list[str]:
    """Sentences that differ even as bags of words."""
    rng, by_words = np.random.default_rng(seed), {}
    while len(by_words) < count:
        words = rng.choice(WORDS, rng.integers(2, length))
        by_words.setdefault(tuple(sorted(words)), " ".join(words))
    return list(by_words.values())


def write(path: Path, lines: list[str]):
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def tatoeba(tmp_path) -> Path:
    """German: copies of the English sentences. Dutch: copies in another order. Finnish: 10 other sentences."""
    folder = tmp_path / "tatoeba"
    folder.mkdir()
    english = sentences(30, 0)
    write(folder / "tatoeba.deu-eng.deu", english)
    write(folder / "tatoeba.deu-eng.eng", english)
    write(folder / "nld-eng.nld", english[1:] + english[:1])
    write(folder / "nld-eng.eng", english)
    write(folder / "tatoeba.fin-eng.fin", sentences(10, 1))
    write(folder / "tatoeba.fin-eng.eng", english[:10])
    write(folder / "tatoeba.xxx-eng.xxx", ["none of the 36"])
    return folder


def test_retrieval_equals_a_loop_over_sentences(tatoeba, folders, draw):
    """Every layer finds all copies, no reordered ones, and as many of the others as a loop does."""
    assert len(bitext_sets.TATOEBA_14) == 14
    assert len(set(bitext_sets.TATOEBA_36)) == 36
    axes, kept = draw("retrieval", *folders, "--source", tatoeba)
    loops = {}
    for folder in folders:
        encoder, tokenizer = pretrained.load_encoder(folder)
        vectors = []
        for side in zip(*bitext_sets.tatoeba(tatoeba)["fin"]):
            rows = [[tokenizer.bos, *ids, tokenizer.eos] for ids in tokenizer.encode_batch(list(side))]
            vectors.append([[F.normalize(h.mean(dim=0), dim=0) for h in states_of(encoder, row)] for row in rows])
        finnish, english = vectors
        for layer, record in enumerate(records_of(kept, folder)):
            cosine = [[float(e[layer] @ f[layer]) for f in finnish] for e in english]
            forth = sum(row.index(max(row)) == i for i, row in enumerate(cosine))
            back = sum(column.index(max(column)) == i for i, column in enumerate(zip(*cosine)))
            loops[folder, layer] = forth, back
            # Tatoeba-36 has German (100%), Dutch (0%) and Finnish; Tatoeba-14 German only.
            assert record["Tatoeba-36, en to xx"] == pytest.approx((100 + 0 + 10 * forth) / 3)
            assert record["Tatoeba-36, xx to en"] == pytest.approx((100 + 0 + 10 * back) / 3)
            assert record["Tatoeba-14, en to xx"] == record["Tatoeba-14 found, %"] == 100
        assert layer == encoder.config.n_layer
    assert len(set(loops.values())) > 2, "the layers do not differ"
    head, *rows = kept["table"]
    assert head[2:5] == ["Tatoeba-14, en to xx", "Tatoeba-14, xx to en", "Tatoeba-14 found, %"]
    table = {row[0]: row[1:] for row in rows}
    one, other = (records_of(kept, folder)[0]["encoder"] for folder in folders)
    assert one.startswith("dense, n_layer 2")
    assert table[one][:4] == [2, "100", "100", "100"]
    assert table[other][0] == 3
    assert table[other][4] == f"{(100 + 10 * loops[folders[1], 3][0]) / 3:.5g}"
    assert table["chance"][1:5] == ["3.3333", "3.3333", "3.3333", f"{100 * (2 / 30 + 1 / 10) / 3:.5g}"]
    assert table["paper: XLM-E"] == ["", "74.4", "72.3", "73.35", "65", "62.3", "63.65"]
    percents = [record["Tatoeba-36 found, %"] for record in records_of(kept, folders[0])]
    assert lines(axes[1])[0] == (one, [0, 1, 2], percents)


def test_seeds_become_a_mean_and_a_deviation(tatoeba, tokenizer, tmp_path, draw):
    names = tmp_path / "runs" / "one", tmp_path / "runs" / "one-seed=1"
    for seed, name in enumerate(names):
        save_model(name, tokenizer)
        (name / "config.json").write_text(json.dumps({"objective": "rtd", "seed": seed}))
    _, kept = draw("retrieval", *names, f"{names[0]}/", "--source", tatoeba)  # one is passed twice
    assert [row[0] for row in kept["table"][1:4]] == ["XLM-E", "untrained", "chance"]
    _, again = draw("retrieval", *names, "--source", tatoeba)
    assert again["table"] == kept["table"]  # the same untrained encoder
    one, two = (records_of(kept, name)[2]["Tatoeba-36, xx to en"] for name in names)
    assert kept["table"][1][6] == f"{fmean([one, two]):.5g} ± {abs(one - two) / 2**0.5:.5g}"


def test_a_long_sentence_is_cut(folders):
    encoder, tokenizer = pretrained.load_encoder(folders[0])
    text = " ".join(WORDS * 4)
    row = [tokenizer.bos, *tokenizer.encode_batch([text])[0][:22], tokenizer.eos]
    vectors = crosslingual.sentence_vectors(encoder, tokenizer, (text,), 100, CPU)
    for layer, h in zip(vectors, states_of(encoder, row), strict=True):
        torch.testing.assert_close(layer[0], F.normalize(h.mean(dim=0), dim=0), rtol=1e-4, atol=1e-5)


def test_without_a_source_held_out_pairs_are_used(electra_corpora, folders, monkeypatch, draw):
    pairs = electra_corpora["pairs"]
    monkeypatch.setattr(xlm_e, "ready", lambda name: pairs)
    _, kept = draw("retrieval", folders[0])
    assert kept["table"][0][2] == "ciphers, en to xx"
    assert kept["table"][3:] == [["chance", "", "2", "2", "2"]]
    trained, untrained = (records_of(kept, name) for name in (folders[0], "untrained"))
    assert len(trained) == len(untrained)
    assert trained[1]["ciphers found, %"] != untrained[1]["ciphers found, %"]
    texts = list(zip(*PairData(pairs, 16, 64).texts("valid", "aa-en")))
    assert bitext_sets.held_out(pairs)["aa"] == texts
    (first, *_), *_ = bitext_sets.letters(pairs).values()  # characters are aligned by position
    one, two = texts[0]
    assert (first.one, first.two) == ([*one], [*two])
    assert first.sure == first.possible == {(i, i) for i in range(len(one))}
    monkeypatch.setattr(bitext_sets, "letters", lambda _: {"aa-en": [Aligned([*"abc"], [*"abc"], {(0, 0)}, {(0, 0)})]})
    _, kept = draw("alignment", folders[0])
    assert [row[0] for row in kept["table"][1:]] == [kept["table"][1][0], "untrained", "the diagonal"]


def test_folders_without_an_encoder_are_refused_in_one_line(tatoeba, tokenizer, folders, tmp_path, monkeypatch, capsys):
    def error(folder: Path) -> str:
        return refused(monkeypatch, capsys, "retrieval", folders[0], folder, "--source", tatoeba)

    assert "does not exist: train it first" in error(tmp_path / "train_mlm" / "demo")
    assert "neither the folder of a run" in error(tatoeba)
    assert "is no encoder" in error(save_model(tmp_path / "gpt", tokenizer, GPT))
    changed = save_model(tmp_path / "changed", tokenizer)
    (changed / tokenizer.filename).unlink()
    assert "no tokenizer" in error(changed)


@pytest.fixture
def gold(tmp_path) -> Path:
    folder = tmp_path / "gold"
    folder.mkdir()
    (folder / "de-en.src-tgt").write_text("Hund und  Katze ||| dog and cat\nrot ||| red house \nHaus rot ||| red\n")
    (folder / "de-en.gold").write_text("1-1 2p2 3-3\n1-1 1p2\n\n")
    write(folder / "en-ro.src-tgt", ["dog cat ||| Katze Hund"])
    write(folder / "en-ro.gold", ["1-2 2-1 2p2 3-1 0-1"])
    return folder


def test_gold_alignments_count_words_from_1(gold):
    """Two links of en-ro point outside their sentences."""
    sets = bitext_sets.word_alignments(gold)
    three, unequal, unaligned = sets["de-en"]
    assert three[:2] == (["Hund", "und", "Katze"], ["dog", "and", "cat"])
    assert three[2:] == ({(0, 0), (2, 2)}, {(0, 0), (1, 1), (2, 2)})
    assert unequal == (["rot"], ["red", "house"], {(0, 0)}, {(0, 0), (0, 1)})
    assert unaligned == (["Haus", "rot"], ["red"], set(), set())
    [pair] = sets["en-ro"]
    assert pair == (["dog", "cat"], ["Katze", "Hund"], {(0, 1), (1, 0)}, {(0, 1), (1, 0), (1, 1)})


def test_gold_alignments_counted_from_0_are_recognized(gold, capsys):
    """Also with a link past the end. Words counted from 1, with links to 0 for no word, are in the test above."""
    expected = bitext_sets.word_alignments(gold)
    assert not capsys.readouterr().err
    write(gold / "de-en.gold", ["0-0 1p1 2-2 3-3", "0-0 0p1", ""])
    write(gold / "en-ro.gold", ["0-1 1-0 1p1 2-0"])
    assert bitext_sets.word_alignments(gold) == expected
    lines = [f"{gold / name}.gold: words are counted from 0" for name in ("de-en", "en-ro")]
    assert capsys.readouterr().err.splitlines() == lines


def test_alignment_equals_a_loop_over_pieces(folders):
    """For sentences that fit into one row together, only separately, or not at all."""
    rng, pairs = np.random.default_rng(0), []
    for m, n in ((2, 3), (4, 1), (1, 3), (6, 6), (40, 3)):
        pairs.append(Aligned(*([*rng.choice(WORDS, size)] for size in (m, n)), set(), set()))
    encoder, tokenizer = pretrained.load_encoder(folders[1])
    length = {word: len(tokenizer.encode_batch([word])[0]) for word in WORDS}
    for total in (21, 22):  # total pieces that just fit into one row of 24, or just do not
        words = []
        while sum(map(length.get, words)) != total:
            words = [str(word) for word in rng.choice(WORDS, 8)]
        pairs.append(Aligned(words[:4], words[4:], set(), set()))
    bos, eos, T = tokenizer.bos, tokenizer.eos, encoder.config.block_size
    separate = cut = 0
    for pair in pairs:
        links = xlm_e.align(pair, encoder, tokenizer, CPU)
        ids, owners = [[], []], [[], []]
        for side, words in enumerate((pair.one, pair.two)):
            for number, word in enumerate(words):
                for piece in tokenizer.encode_batch([word])[0]:
                    ids[side].append(piece)
                    owners[side].append(number)
        m, n = map(len, ids)
        if m + n + 3 <= T:
            states = states_of(encoder, [bos, *ids[0], eos, *ids[1], eos])
            e, f = [h[1 : m + 1] for h in states], [h[m + 2 : m + n + 2] for h in states]
        else:
            separate, cut = separate + 1, cut + (max(m, n) > T - 2)
            e, f = ([h[1:-1] for h in states_of(encoder, [bos, *side[: T - 2], eos])] for side in ids)
        for layer in range(5):
            S = [[float(x @ y) for y in f[layer]] for x in e[layer]]
            aligned = reference_scores.itermax(reference_scores.sinkhorn(S, 2), 2, 0.9)
            assert links[layer] == {(owners[0][i], owners[1][j]) for i, j in aligned}, (pair, layer)
    assert 0 < cut < separate < 5


def test_table_6_has_the_error_rates_of_a_loop(gold, folders, draw):
    (axes,), kept = draw("alignment", *folders, "--source", gold)
    sets = bitext_sets.word_alignments(gold)
    table = {row[0]: row[1:] for row in kept["table"][1:]}
    assert kept["table"][0] == ["encoder", "layer", "mean AER, %", "de-en", "en-ro"]
    for folder, shown in zip(folders, (2, 3)):
        encoder, tokenizer = pretrained.load_encoder(folder)
        rates = []  # by layer, for each set
        for pairs in sets.values():
            links = [xlm_e.align(pair, encoder, tokenizer, CPU) for pair in pairs]
            sure, possible = [pair.sure for pair in pairs], [pair.possible for pair in pairs]
            rates.append([100 * reference_scores.aer(layer, sure, possible) for layer in zip(*links)])
        records = records_of(kept, folder)
        for record, expected in zip(records, zip(*rates), strict=True):
            errors = record["de-en"], record["en-ro"], record["mean AER, %"]
            assert errors == pytest.approx((*expected, fmean(expected)))
        numbers = [f"{number:.5g}" for number in list(records[shown].values())[3:]]
        assert table[records[shown]["encoder"]] == [shown, *numbers]
    assert lines(axes)[0][2] == [record["mean AER, %"] for record in records_of(kept, folders[0])]
    # de-en: of 6 links 3 are sure and 4 possible, and gold has 3 sure ones. en-ro: of 2 links 1 is possible.
    diagonal = 100 * (1 - (3 + 4) / (6 + 3)), 100 * (1 - 1 / (2 + 2))
    assert table["the diagonal"][2:] == [f"{error:.5g}" for error in diagonal]
    assert levels(axes) == {"the diagonal": pytest.approx(fmean(diagonal))}
    assert table["paper: XLM-E"] == ["", "", "16.49", "24.41"]
    assert table["paper: fast_align"] == ["", "", "32.14", ""]


@pytest.mark.parametrize("m, n, ends", [(3, 3, [0, 1, 2]), (1, 4, [0]), (4, 2, [0, 0, 1, 1]), (3, 8, [0, 3, 5])])
def test_the_diagonal_links_words_at_the_same_relative_position(m, n, ends):
    """With 4 and 2 words the last is clamped to the end; 8 / 3 and 16 / 3 round to 3 and 5."""
    assert xlm_e.diagonal(Aligned(["a"] * m, ["b"] * n, set(), set())) == {*enumerate(ends)}


BROKEN = [  # command, changed files, their content (None: deleted), the error
    ("retrieval", "*", None, "no pair of files such as tatoeba.deu-eng.deu"),
    ("retrieval", "*deu*", None, "has no language of Tatoeba-14"),
    ("retrieval", "nld-eng.eng", None, "nld-eng.eng"),
    ("retrieval", "nld-eng.eng", "dog\ncat\n", "nld-eng.nld and nld-eng.eng"),
    ("alignment", "*", None, "no file such as de-en.src-tgt"),
    ("alignment", "de-en.gold", None, "de-en.gold"),
    ("alignment", "de-en.src-tgt", "a ||| b\nrot red\na ||| b\n", "line 2: not `source ||| target`"),
    ("alignment", "de-en.src-tgt", "a ||| b\nrot |||\na ||| b\n", "line 2: not `source ||| target`"),
    ("alignment", "de-en.src-tgt", "a ||| b\n||| red\na ||| b\n", "line 2: not `source ||| target`"),
    ("alignment", "de-en.src-tgt", "rot ||| red\n", "1 sentence pairs, but de-en.gold has 3 lines"),
    ("alignment", "de-en.gold", "1-1\n1-1 2-x\n\n", "de-en.gold, line 2: 2-x is not a link such as 1-1 or 2p3"),
]


@pytest.mark.parametrize("command, files, content, error", BROKEN)
def test_a_broken_test_set_is_refused_in_one_line(
    command, files, content, error, tatoeba, gold, folders, tmp_path, monkeypatch, capsys
):
    source = {"retrieval": tatoeba, "alignment": gold}[command]
    for file in [*source.glob(files)]:
        file.unlink()
        if content is not None:
            file.write_text(content)
    line = command, folders[0], "--out", tmp_path, "--source", source
    assert error in refused(monkeypatch, capsys, *line)
