"""Translation data: corpora under a joint BPE, held-out texts, and batches of sources and translations."""

import gzip
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_masked import FakeHub, refused
from test_pairs import texts_of

from data import bitext
from data.corpora import SPLITS
from data.prepare import prepare
from data.tokenizers import XLMR
from data.translation import Translation, TranslationData, source_batches

T, BUDGET = 32, 128


def write_pairs(folder: Path, name: str, splits: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Files NAME.SPLIT.SIDE -> what they hold. Both sides of a pair carry its number."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for split, count in splits.items():
        texts = {side: texts_of(f"{name} {split} {side}", count) for side in name.split("-")}
        texts = {side: [x + " 7" * (9 * (i % 6 == 0)) for i, x in enumerate(own)] for side, own in texts.items()}
        for side, lines in texts.items():
            (folder / f"{name}.{split}.{side}").write_text("".join(f"{line}\n" for line in lines))
        found[split] = list(zip(*texts.values()))
    return found


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Two pairs of languages, English second in one and first in the other -> folder, texts."""
    base = tmp_path_factory.mktemp("aligned")
    sizes = {"train": 150, "valid": 20, "test": 15}
    return base, {name: write_pairs(base, name, sizes) for name in ("de-en", "en-ru")}


@pytest.fixture(scope="session")
def folder(tmp_path_factory, source) -> Path:
    return prepare("bitext", source[0], pieces=400, out=tmp_path_factory.mktemp("mt") / "prepared")


def pieces_of(data: TranslationData, text: str) -> list[int]:
    return data.tokenizer.encode_batch([text])[0]


def rows_of(batch: Translation) -> list[tuple[list[int], list[int]]]:
    """Source and translation of every row, both with </s>; checks how the batch is made of them."""
    found = []
    for ids, real in ((batch.source, batch.source_real), (batch.target, batch.target_real)):
        width = ids.shape[1]
        own = set(range(ids.numel())) if real is None else set(real.tolist())
        rows = []
        for number, row in enumerate(ids.tolist()):
            size = sum(number * width + place in own for place in range(width))
            assert size > 0 and set(row[size:]) <= {1} and own >= {number * width + place for place in range(size)}
            rows.append(row[:size])
        assert real is None or (real.diff() > 0).all()
        assert max(map(len, rows)) == width and (real is not None) == (min(map(len, rows)) < width)
        found.append(rows)
    labels = batch.labels.tolist()
    for source, read in zip(*found):
        written, labels = labels[: len(read)], labels[len(read) :]
        assert read == [0, *written[:-1]] and written[-1] == 2 and source[-1] == 2
        assert source.count(2) == written.count(2) == 1
    assert not labels
    labels = iter(batch.labels.tolist())
    return [(source, [next(labels) for _ in read]) for source, read in zip(*found)]


def test_a_joint_bpe_is_trained_on_both_sides_of_the_training_pairs(tmp_path):
    sides = {"train": ("ä bär", "a bear"), "valid": ("zebra", "zebra"), "test": ("quokka", "quokka")}
    for split, both in sides.items():
        for language, text in zip(("de", "en"), both):
            (tmp_path / f"de-en.{split}.{language}").write_text("".join(f"{text} {i}\n" for i in range(40)))
    folder = prepare("bitext", tmp_path, pieces=290, out=tmp_path / "out")
    meta, data = json.loads((folder / "meta.json").read_text()), TranslationData(folder, T, BUDGET)
    assert meta["kind"] == "pairs" and isinstance(data.tokenizer, XLMR)
    assert data.vocab_size == meta["tokenizer"]["vocab_size"] == 290 + XLMR.added
    pieces = {data.tokenizer.processor.id_to_piece(i) for i in range(290)}
    words = {piece for piece in pieces if not piece.startswith("<")}
    assert {"▁bär", "▁bear"} < pieces and not any(letter in word for word in words for letter in ("z", "k"))
    # BPE, not unigram: every piece is the merge of two others
    assert all(len(x) == 1 or any(x[:i] in pieces and x[i:] in pieces for i in range(1, len(x))) for x in words)


def test_held_out_texts_are_kept_as_they_were_written(folder, source, tmp_path):
    data = TranslationData(folder, T, BUDGET)
    for split in ("valid", "test"):
        assert data.texts(split, "de-en") == tuple(map(list, zip(*source[1]["de-en"][split])))
        english, russian = map(list, zip(*source[1]["en-ru"][split]))
        assert data.texts(split, "en-ru") == (russian, english)  # the source is what is not English
    assert not (folder / "train.jsonl").exists()
    data.verify()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "test.jsonl").write_text((copy / "test.jsonl").read_text().replace("1", "2"))
    with pytest.raises(ValueError, match=r"test\.jsonl has changed"):
        TranslationData(copy, T, BUDGET).verify()
    (copy / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl is missing; prepare it again"):
        TranslationData(copy, T, BUDGET).texts("test", "de-en")
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl is missing; prepare it again"):
        TranslationData(copy, T, BUDGET).verify()


def test_somebodys_own_texts_are_never_replaced(source, tmp_path):
    (tmp_path / "test.jsonl").write_text("mine")
    out = ["--out", tmp_path]
    assert "holds other files (test.jsonl)" in refused("bitext", "--pieces", "400", "--source", source[0], *out)
    assert (tmp_path / "test.jsonl").read_text() == "mine"


def test_a_batch_is_pairs_of_the_corpus_and_a_pass_has_each_once(folder, source):
    data = TranslationData(folder, T, BUDGET, seed=3)
    known = {}
    for name, splits in source[1].items():
        for pair in splits["train"]:
            one, two = pair if name == "de-en" else pair[::-1]
            known[tuple(pieces_of(data, one)), tuple(pieces_of(data, two))] = name
    data.batch("train", 0)
    batches = [data.batch("train", number) for number in range(data._micros["train"][1])]
    found = Counter((tuple(s[:-1]), tuple(t[:-1])) for batch in batches for s, t in rows_of(batch))
    assert set(found) == set(known) and set(found.values()) == {1}  # a turn is a pass: no pair stands beside its copy
    assert all(batch.source.numel() + batch.target.numel() <= BUDGET for batch in batches)
    real = sum(batch.tokens for batch in batches)
    assert real > 0.85 * sum(batch.source.numel() + batch.target.numel() for batch in batches)
    again = TranslationData(folder, T, BUDGET, seed=3).batch("train", 7)
    assert all(torch.equal(a, b) for a, b in zip(again, batches[7]) if a is not None)
    other = TranslationData(folder, T, BUDGET, seed=4).batch("train", 7)
    assert not torch.equal(other.source[0], batches[7].source[0])
    steps = TranslationData(folder, T, BUDGET, 2, seed=3)
    assert torch.equal(steps.batch("train", 3, 1).source, batches[7].source)


def test_evaluation_has_every_pair_once_on_any_number_of_processes(folder, source):
    data = TranslationData(folder, T, BUDGET)
    batches = list(data.eval_batches("valid"))
    rows = Counter(str(row) for batch in batches for row in rows_of(batch))
    assert len(rows) == 40 and set(rows.values()) == {1}
    dealt = [list(data.eval_batches("valid", rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, dealt)) == len(batches)
    assert Counter(str(row) for part in dealt for batch in part for row in rows_of(batch)) == rows
    some = [row for batch in data.eval_batches("valid", 60) for row in rows_of(batch)]
    assert 0 < len(some) < 10


def test_long_pairs_are_left_out_and_counted(folder, source):
    whole = TranslationData(folder, 64, BUDGET)
    sizes = {split: whole._sizes(split, np.arange(whole.meta["splits"][split]["pairs"])) for split in SPLITS}
    limit = int(np.median(sizes["valid"].max(axis=1))) + 2
    data = TranslationData(folder, limit, BUDGET)
    assert whole.left_out == {"train": 0, "valid": 0, "test": 0}
    assert data.left_out == {split: int((size.max(axis=1) > limit).sum()) for split, size in sizes.items()}
    data.batch("train", 0)
    rows = [row for n in range(data._micros["train"][1]) for row in rows_of(data.batch("train", n))]
    assert max(len(side) for row in rows for side in row) <= limit and min(data.left_out.values()) > 0
    assert len({str(row) for row in rows}) == len(rows) == 300 - data.left_out["train"]
    shares = np.diff(data.bounds["train"])  # a pair is as likely as any other
    assert shares == pytest.approx([len(data.kept["train", j]) / len(rows) for j in range(2)])
    assert len([1 for batch in data.eval_batches("valid") for _ in rows_of(batch)]) == 40 - data.left_out["valid"]
    assert len([1 for batch in data.eval_batches("valid", 1) for _ in rows_of(batch)]) == 1
    assert len(data.texts("valid", "de-en")[0]) == 20  # scores are of all sentences
    with pytest.raises(ValueError, match="all (train|valid) pairs of .* are longer than block_size 8 tokens"):
        TranslationData(folder, 8, BUDGET)


def test_sources_to_translate_come_longest_first_within_the_budget():
    ids = [[5] * n for n in (3, 9, 0, 4, 4, 30)]
    batches = list(source_batches(ids, pad=1, eos=2, micro_tokens=12))
    assert [number for numbers, _ in batches for number in numbers] == [5, 1, 3, 4, 0, 2]
    for numbers, (source, real) in batches:
        assert source.numel() <= 12 or len(numbers) == 1
        rows = [[*ids[number], 2] for number in numbers]
        assert source.tolist() == [row + [1] * (source.shape[1] - len(row)) for row in rows]
        flat = [i * source.shape[1] + j for i, row in enumerate(rows) for j in range(len(row))]
        assert (list(range(source.numel())) if real is None else real.tolist()) == flat


# ---------------------------------------------------------------------------------------------------------------------
# corpora


class Hub(FakeHub):
    """Whose rows have several columns."""

    def load_dataset(self, *arguments, **options):
        yield from (row["text"] for row in super().load_dataset(*arguments, **options))


def test_multi30k_reads_its_own_files_or_the_hub(tmp_path, monkeypatch):
    names = {"train": ("train", "train"), "valid": ("val", "validation"), "test": ("test_2016_flickr", "test")}
    rows, expected = {}, {}
    for split, (name, theirs) in names.items():
        texts = [texts_of(f"{split} {side}", 60 if split == "train" else 7) for side in ("de", "en")]
        for side, lines in zip(("de", "en"), texts):
            with gzip.open(tmp_path / f"{name}.{side}.gz", "wt") as file:
                file.writelines(f"{line}\n" for line in lines)
        expected[split] = list(zip(*texts))
        rows[None, theirs] = [{"de": one, "en": two} for one, two in expected[split]]

    monkeypatch.setitem(sys.modules, "datasets", hub := Hub(rows))
    folders = [prepare("multi30k-de", src, pieces=300, out=tmp_path / str(src is None)) for src in (tmp_path, None)]
    for folder in folders:
        data = TranslationData(folder, T, BUDGET)
        assert data.languages == ["de-en"]
        assert {split: list(zip(*data.texts(split, "de-en"))) for split in ("valid", "test")} == {
            split: expected[split] for split in ("valid", "test")
        }
    assert (folders[0] / "train.bin").read_bytes() == (folders[1] / "train.bin").read_bytes()
    assert {asked[0] for asked in hub.asked} == {"bentrevett/multi30k"}
    assert "multi30k-fr needs --source DIR with train.fr" in refused("multi30k-fr")
    assert "no val.fr (plain, .gz or .xz) in " in refused("multi30k-fr", "--source", tmp_path)


def test_wmt23_trains_on_the_hub_and_tests_on_wmt22_or_flores(tmp_path, monkeypatch):
    """The paper's test sets: WMT22 for German, Russian and Chinese; FLORES-200 for Ukrainian and Hebrew."""
    for year in ("wmt21", "wmt22"):
        for side in ("de", "en"):
            (tmp_path / f"{year}.{side}").write_text("\n".join(texts_of(f"{year} {side}", 8)) + "\n")
    import sacrebleu.utils

    monkeypatch.setattr(sacrebleu.utils, "get_source_file", lambda year, pair: str(tmp_path / f"{year}.{pair[:2]}"))
    monkeypatch.setattr(sacrebleu.utils, "get_reference_files", lambda year, pair: [str(tmp_path / f"{year}.en"), "x"])
    wmt = [{"translation": {"de": one, "en": two}} for one, two in zip(texts_of("de", 90), texts_of("en", 90))]
    cc = [{"english": two, "non_english": one} for one, two in zip(texts_of("uk", 90), texts_of("en", 90))]
    wmt.insert(5, {"translation": {"de": None, "en": "nothing"}})
    rows = {("de-en", "train"): wmt, ("en-uk", "train"): cc}
    for name in ("ukr_Cyrl", "eng_Latn"):
        for split in ("dev", "devtest"):
            rows[name, split] = [{"id": i, "text": x} for i, x in enumerate(texts_of(name + split, 6), 1)]

    monkeypatch.setitem(sys.modules, "datasets", hub := Hub(rows))
    german, ukrainian = (prepare(f"wmt23-{x}", pieces=350, out=tmp_path / x) for x in ("de", "uk"))
    data = TranslationData(german, T, BUDGET)
    assert data.texts("valid", "de-en") == (texts_of("wmt21 de", 8), texts_of("wmt21 en", 8))
    assert data.texts("test", "de-en") == (texts_of("wmt22 de", 8), texts_of("wmt22 en", 8))
    data = TranslationData(ukrainian, T, BUDGET)
    assert data.texts("test", "uk-en") == (texts_of("ukr_Cyrldevtest", 6), texts_of("eng_Latndevtest", 6))
    assert data.meta["splits"]["train"]["pairs"] == 90
    assert {asked[:2] for asked in hub.asked} >= {
        ("wmt/wmt19", "de-en"),
        ("sentence-transformers/parallel-sentences-ccmatrix", "en-uk"),
        ("openlanguagedata/flores_plus", "ukr_Cyrl"),
    }
    rows["ukr_Cyrl", "devtest"].pop(2)
    with pytest.raises(ValueError, match=r"flores_plus: ukr_Cyrl and eng_Latn have other sentences \(4, 3\)"):
        prepare("wmt23-uk", pieces=350, out=tmp_path / "uk2")
    rows["de-en", "train"] = [{"translation": {"en": "no German"}}]
    with pytest.raises(OSError, match="cannot read wmt/wmt19 de-en .*KeyError.*de"):
        prepare("wmt23-de", pieces=350, out=tmp_path / "de2")


def test_wmt23_takes_local_files_with_its_own_test_sets_or_theirs(tmp_path, monkeypatch):
    import sacrebleu.utils

    for side in ("ru", "en"):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in texts_of(f"wmt {side}", 8)))
    monkeypatch.setattr(sacrebleu.utils, "get_source_file", lambda year, pair: str(tmp_path / "ru"))
    monkeypatch.setattr(sacrebleu.utils, "get_reference_files", lambda year, pair: [str(tmp_path / "en")])
    write_pairs(tmp_path / "all", "ru-en", {"train": 90, "valid": 5, "test": 5})
    theirs = TranslationData(prepare("wmt23-ru", tmp_path / "all", pieces=300, out=tmp_path / "x"), T, BUDGET)
    assert theirs.texts("test", "ru-en")[0][1:] == texts_of("ru-en test ru", 5)[1:]
    (tmp_path / "own").mkdir()
    for side in ("ru", "en"):
        (tmp_path / "own" / f"ru-en.{side}").write_text("".join(f"{x}\n" for x in texts_of(f"own {side}", 90)))
    own = TranslationData(prepare("wmt23-ru", tmp_path / "own", pieces=300, out=tmp_path / "y"), T, BUDGET)
    assert own.meta["splits"]["train"]["pairs"] == 90 and own.texts("test", "ru-en")[1] == texts_of("wmt en", 8)
    assert "holds no zh-en.zh and zh-en.en" in refused("wmt23-zh", "--source", tmp_path / "own")

    def offline(*_):
        raise SystemExit(1)

    monkeypatch.setattr(sacrebleu.utils, "get_source_file", offline)
    with pytest.raises(OSError, match=r"cannot download wmt21 ru-en .* give --source"):
        prepare("wmt23-ru", tmp_path / "own", pieces=300, out=tmp_path / "z")


def test_wmt10_has_ten_languages_and_halves_gujarati(tmp_path, monkeypatch):
    rows = {}
    for language in bitext.WMT10:
        for split in ("train", "validation", "test"):
            if (language, split) != ("gu", "test"):
                both = zip(texts_of(f"{language} {split}", 40), texts_of(f"en {language} {split}", 40))
                rows[f"{language}-en", split] = [{"translation": {language: a, "en": b}} for a, b in both]

    monkeypatch.setitem(sys.modules, "datasets", Hub(rows))
    data = TranslationData(prepare("wmt10", pieces=500, out=tmp_path / "wmt10"), T, BUDGET)
    assert data.languages == sorted(f"{x}-en" for x in ("fr", "cs", "de", "fi", "lv", "et", "ro", "hi", "tr", "gu"))
    halves = [set(zip(*data.texts(split, "gu-en"))) for split in ("valid", "test")]
    assert len(halves[0]) + len(halves[1]) == 40 and min(map(len, halves)) > 5 and not halves[0] & halves[1]
    assert len(data.texts("test", "fr-en")[0]) == 40


def test_bad_input_is_one_clear_line(source, folder, tmp_path):
    for name, text in (("de", "a\nb\n"), ("en", "a\n")):
        (tmp_path / f"de-en.{name}").write_text(text)
    assert "de-en.de has 2 lines and " in refused("bitext", "--pieces", "99", "--source", tmp_path)
    (tmp_path / "de-en.en").write_text("a\n\n")
    assert "de-en.en, line 2: an empty text" in refused("bitext", "--pieces", "99", "--source", tmp_path)
    local = ["bitext", "--source", source[0], "--out", tmp_path / "out"]
    line = refused(*local, "--pieces", "400", "--languages", "de-em")
    assert "no language 'de-em' among 2; did you mean 'de-en'?" in line
    assert "too small for a vocabulary of 90,000 pieces" in refused(*local, "--pieces", "90000")
    assert "260 pieces are fewer than the characters of the training text" in refused(*local, "--pieces", "260")
    assert "pieces must be positive" in refused(*local, "--pieces", "0")
    assert "--pieces is for translation pairs" in refused("pydocs", "--pieces", "400")
    assert "without --spm" in refused(*local, "--pieces", "400", "--spm", folder / "xlmr.model")
    assert "or --pieces N" in refused(*local)
    with pytest.raises(ValueError, match="pairs without the language 'fr': de-en, en-ru; see --target"):
        TranslationData(folder, T, BUDGET, target="fr")
    with pytest.raises(ValueError, match="micro_tokens 40 must hold a pair of two times block_size 32"):
        TranslationData(folder, T, 40)
