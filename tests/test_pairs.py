"""Translation pairs: corpora of them, their folders, and masked batches: budget, passes, cutting, masks, evaluation."""

import gzip
import hashlib
import json
import lzma
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_masked import FakeHub, refused, restored, same, within, write_mo

from data import bitext, masked, multilingual
from data import prepare as preparing
from data.corpora import SPLITS, split_of
from data.masked import Masked, MaskedData, mask_tokens
from data.pairs import PairData
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece

ROOT = Path(__file__).parent.parent
T, BUDGET = 16, 64


def texts_of(language: str, count: int) -> list[str]:
    rng = np.random.default_rng(list(language.encode()))
    return [f"{language} {i} " + " ".join(map(str, rng.integers(99, size=1 + i % 5))) for i in range(count)]


SIZES = {"de-en": 400, "en-zh-Hans": 150}


def sides(pair: str) -> tuple[str, str]:
    return tuple(pair.split("-", 1))


def expected_pairs(pair: str) -> list[tuple[str, str]]:
    return list(zip(*(texts_of(f"{pair}.{side}", SIZES[pair]) for side in sides(pair)), strict=True))


@pytest.fixture(scope="session")
def spm(tmp_path_factory) -> Path:
    texts = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]
    return train_sentencepiece(texts, vocab_size=500, kind=XLMR).save(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """One pair in two files for each of two parts, one as .gz; the other in a .tsv.xz. Nothing else is read."""
    base = tmp_path_factory.mktemp("bitext")
    for side, texts in zip(sides("de-en"), zip(*expected_pairs("de-en"))):
        (base / f"de-en.a.{side}").write_text("".join(f"{text}\n" for text in texts[:200]))
        with gzip.open(base / f"de-en.b.{side}.gz", "wt") as file:
            file.write("\n".join(texts[200:]))
    with lzma.open(base / "en-zh-Hans.tsv.xz", "wt") as file:
        file.writelines(f"{one}\t{two}\n" for one, two in expected_pairs("en-zh-Hans"))
    (base / "README.md").write_text("no pair")
    return base


@pytest.fixture(scope="session")
def folder(tmp_path_factory, source, spm) -> Path:
    """Two pairs of languages, never written to by a test."""
    return prepare("bitext", source, spm=spm, out=tmp_path_factory.mktemp("pairs") / "prepared")


def pairs_of(folder: Path, split: str, pair: str) -> list[tuple[str, str]]:
    data = PairData(folder, T, BUDGET)
    return [tuple(data.tokenizer.decode(ids.tolist()) for ids in both) for both in data.raw(split, pair)]


# ---------------------------------------------------------------------------------------------------------------------
# corpora and folders


def test_pairs_come_back(folder):
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["kind"] == "pairs" and list(meta["languages"]) == sorted(SIZES)
    for pair in SIZES:
        expected = {split: [] for split in SPLITS}
        for texts in expected_pairs(pair):
            expected[split_of(texts[1], valid=0.01, test=0.01)].append(texts)
        assert {split: pairs_of(folder, split, pair) for split in SPLITS} == expected
        assert {split: meta["languages"][pair][split]["pairs"] for split in SPLITS} == {
            split: len(found) for split, found in expected.items()
        }
    for split in SPLITS:
        tokens, index = (np.fromfile(folder / f"{split}.{name}", kind) for name, kind in (("bin", "u2"), ("idx", "i8")))
        assert index[0] == 0 and index[-1] == len(tokens) and (tokens[index[1:] - 1] == 2).all()
        assert (tokens == 2).sum() == len(index) - 1 == 2 * meta["splits"][split]["pairs"]
        for counts in (languages[split] for languages in meta["languages"].values()):
            begin, end = index[2 * counts["first"]], index[2 * (counts["first"] + counts["pairs"])]
            assert (begin, end) == (counts["start"], counts["start"] + counts["tokens"])
    assert preparing.summary(folder).splitlines()[-2] == "2 language pairs"
    assert f"{meta['splits']['train']['pairs']:,}" in preparing.summary(folder).splitlines()[1].split()


def test_checksums_cover_tokens_and_index(folder, tmp_path):
    meta = json.loads((folder / "meta.json").read_text())
    parts = [
        hashlib.sha256((folder / f"{split}.{name}").read_bytes()).hexdigest()
        for name in ("bin", "idx")
        for split in SPLITS
    ]
    assert meta["checksum"] == hashlib.sha256("\n".join([*parts, meta["tokenizer"]["sha256"]]).encode()).hexdigest()
    PairData(folder, T, BUDGET).verify()
    for name in ("train.bin", "valid.idx"):
        copy = Path(shutil.copytree(folder, tmp_path / name))
        content = bytearray((copy / name).read_bytes())
        content[16] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} has changed"):
            PairData(copy, T, BUDGET).verify()


def test_languages_can_be_chosen_and_limited(source, spm, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 300)
    out = prepare("bitext", source, spm=spm, languages=["de-en"], max_tokens=500, out=tmp_path / "out")
    languages = json.loads((out / "meta.json").read_text())["languages"]
    assert list(languages) == ["de-en"] and 500 <= languages["de-en"]["train"]["tokens"] < 600
    found = pairs_of(out, "train", "de-en")
    assert found == [both for both in expected_pairs("de-en") if split_of(both[1], 0.01, 0.01) == "train"][: len(found)]


def test_named_files_are_the_splits(spm, tmp_path):
    for split, name in (("train", "train"), ("valid", "dev"), ("test", "test")):
        for side in ("de", "en"):
            (tmp_path / f"de-en.{name}.{side}").write_text("".join(f"{split} {side} {i}\r\n" for i in range(5)))
    (tmp_path / "de-en.more.tsv").write_text("not\tread\n")
    out = prepare("bitext", tmp_path, spm=spm, out=tmp_path / "out")
    for split in SPLITS:
        assert pairs_of(out, split, "de-en") == [(f"{split} de {i}", f"{split} en {i}") for i in range(5)]


def test_bad_files_are_one_line(spm, tmp_path):
    def reason(**files: bytes) -> str:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        (tmp_path / "in").mkdir()
        for name, content in files.items():
            (tmp_path / "in" / f"de-en.{name}").write_bytes(content)
        (tmp_path / "in" / "NOTES.md").write_text("no pair")
        with pytest.raises((ValueError, OSError)) as error:
            prepare("bitext", tmp_path / "in", spm=spm, out=tmp_path / "out")
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
        return str(error.value)

    three, five = b"a\n" * 3, b"a\n" * 4 + b"a"
    assert "de-en.de has 3 lines and " in (line := reason(de=three, en=five)) and line.endswith("de-en.en 5")
    assert "de-en.de has 5 lines and " in (line := reason(de=five, en=three)) and line.endswith("de-en.en 3")
    assert "de-en.de, line 2: an empty text" in reason(de=b"a\n \na\n", en=three)
    assert "de-en.en, line 3: an empty text" in reason(de=three, en=b"a\na\n\n")
    assert "de-en.tsv, line 2: an empty text" in reason(tsv=b"a\tb\na\t\n")
    assert "de-en.tsv, line 2: 2 tabs instead of one" in reason(tsv=b"a\tb\na\tb\tc\n")
    assert "de-en.tsv, line 1: 0 tabs instead of one" in reason(tsv=b"a b\n")
    assert "de-en.en is not UTF-8: byte 5" in reason(de=three, en=b"a\ncaf\xe9\n")
    assert "holds no two files such as de-en.de and de-en.en" in reason()
    assert "the two sides of de-en, not de-en.de" in reason(de=three)
    assert "not de-en.de and de-en.tsv" in reason(de=three, tsv=b"a\tb\n")
    (tmp_path / "both").mkdir()
    for name in ("de-en.de", "de-en.de.gz", "de-en.en"):
        (tmp_path / "both" / name).write_bytes(b"a\n")
    with pytest.raises(ValueError, match=r"de-en\.de and .*de-en\.de\.gz are the same side"):
        prepare("bitext", tmp_path / "both", spm=spm, out=tmp_path / "out")
    assert "split 'valid' is empty (1 pairs in all)" in reason(tsv=b"a\tb\n")
    [held_out, *_] = [text for text in texts_of("x", 500) if split_of(text, 0.01, 0.01) == "valid"]
    assert "'de-en' of " in reason(tsv=f"a\t{held_out}\n".encode()) and not (tmp_path / "out").exists()


def test_bad_options_are_one_line(source, spm, tmp_path):
    local = ["bitext", "--source", source, "--spm", spm, "--out", tmp_path / "out"]
    assert "no language 'de-em' among 2; did you mean 'de-en'?" in refused(*local, "--languages", "de-em")
    assert "needs --spm PATH" in refused("bitext", "--source", source) and "needs --spm PATH" in refused("opus100")
    assert "needs --source" in refused("bitext", "--spm", spm)
    assert "--spm instead of --tokenizer" in refused("catalogs-pairs", "--tokenizer", spm)


def test_opus100_streams_its_splits(spm, tmp_path, monkeypatch):
    rows = {}
    for pair, splits in (("de-en", ("train", "validation", "test")), ("an-en", ("train",))):
        for split in splits:
            texts = zip(*(texts_of(f"{split} {side}", 9) for side in sides(pair)))
            rows[pair, split] = [dict(zip(sides(pair), both)) for both in texts]
    rows["de-en", "train"].insert(3, {"de": " ", "en": "nothing"})
    rows["de-en", "train"].insert(3, {"de": "\u200b", "en": "nothing that has a token"})

    class Hub(FakeHub):
        def load_dataset(self, *arguments, **options):
            for row in super().load_dataset(*arguments, **options):
                yield {"translation": row["text"]}

    hub = Hub(rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    out = prepare("opus100", spm=spm, languages=["an-en", "de-en"], out=tmp_path / "out")
    for split, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        texts = list(zip(texts_of(f"{theirs} de", 9), texts_of(f"{theirs} en", 9)))
        assert pairs_of(out, split, "de-en") == texts
    assert len(pairs_of(out, "train", "an-en")) == 9 and pairs_of(out, "valid", "an-en") == []
    assert ("Helsinki-NLP/opus-100", "de-en", "train", {"streaming": True}) in hub.asked and len(hub.asked) == 4
    names = list(bitext.opus100(None, True))
    assert len(names) == 99 and names == sorted(names) and "en-fr" in names and bitext.TRAIN_ONLY < set(names)
    with pytest.raises(OSError, match="cannot read Helsinki-NLP/opus-100 af-en .*no route"):
        prepare("opus100", spm=spm, out=tmp_path / "all")


def test_catalogs_pairs_share_the_vocabulary_of_catalogs(tmp_path, monkeypatch):
    monkeypatch.setattr(multilingual, "MIN_MESSAGES", 1)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "django")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "django" else None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    monkeypatch.setattr(preparing, "train_sentencepiece", lambda texts, kind: train_sentencepiece(texts, 400, kind))
    words = (ROOT / "data" / "masked.py").read_text().split()
    english = sorted({" ".join(words[i : i + 4]) for i in range(0, len(words), 2)})
    for language in ("de", "sw", "es", "es_AR"):
        write_mo(tmp_path / f"django/{language}/LC_MESSAGES/a.mo", {text: f"{language} {text}" for text in english})
    one = prepare("catalogs", out=tmp_path / "one")
    two, chosen = (prepare("catalogs-pairs", languages=some, out=tmp_path / "two") for some in (None, ["sw-en"]))
    two = prepare("catalogs-pairs", out=tmp_path / "two")
    metas = [json.loads((path / "meta.json").read_text()) for path in (one, two)]
    assert metas[0]["tokenizer"] == metas[1]["tokenizer"] and "kind" not in metas[0]
    assert list(metas[1]["languages"]) == ["de-en", "es-en", "es_AR-en", "sw-en"]
    for pair in metas[1]["languages"]:
        for split in SPLITS:
            found, name = pairs_of(two, split, pair), pair.removesuffix("-en")
            assert all(first == f"{name} {second}" for first, second in found)
            own = [" ".join(text.split()) for text in english if split_of(text, 0.05, 0.05) == split]
            assert sorted(second for _, second in found) == sorted(own) != [second for _, second in found]
    given = prepare("catalogs-pairs", spm=one / "xlmr.model", out=tmp_path / "given")
    assert json.loads((given / "meta.json").read_text())["checksum"] == metas[1]["checksum"]


# ---------------------------------------------------------------------------------------------------------------------
# batches. In these folders no token comes twice in a split, so that it tells its own place.

MIXED = [(n % 7 + 2, n % 5 + 2) for n in range(60)]  # tokens of both halves, their </s> included


def numbered(base: Path, sizes: dict[str, list[tuple[int, int]]], **arguments) -> PairData:
    """Pairs of texts of these sizes: ids from 4 on, in order, and </s>; the same in every split."""
    base.mkdir(parents=True, exist_ok=True)
    languages, flat = {}, [size for own in sizes.values() for both in own for size in both]
    index = np.concatenate([[0], np.cumsum(flat, dtype=np.int64)])
    ids = np.arange(4, 4 + index[-1], dtype="uint32")
    ids[index[1:] - 1] = 2
    first = 0
    for name, own in sizes.items():
        languages[name] = {split: {"first": first, "pairs": len(own)} for split in SPLITS}
        first += len(own)
    for split in SPLITS:
        ids.tofile(base / f"{split}.bin")
        index.tofile(base / f"{split}.idx")
    splits = {split: {"tokens": len(ids), "pairs": first} for split in SPLITS}
    meta = {"name": "numbered", "kind": "pairs", "splits": splits, "dtype": "uint32", "languages": languages}
    meta |= {"checksum": "none", "tokenizer": {"vocab_size": len(ids) + 5}}
    (base / "meta.json").write_text(json.dumps(meta))

    class Numbered(PairData):
        tokenizer = SimpleNamespace(bos=0, pad=1, eos=2, mask=len(ids) + 4, special=(0, 1, 2, 3, len(ids) + 4))

    return Numbered(base, **({"block_size": T, "micro_tokens": BUDGET} | arguments))


def rows_of(data: PairData, batch: Masked) -> list[tuple[int, list[int], list[int]]]:
    """(pair, first, second) of every row; checks that it is `<s> first </s> second </s>` and padding."""
    found, width = [], batch.ids.shape[1]
    index = data.index["train"]
    real = set(range(batch.ids.numel())) if batch.real is None else set(batch.real.tolist())
    for number, row in enumerate(restored(batch).tolist()):
        size = row.index(1) if 1 in row else width
        assert row[0] == 0 and set(row[size:]) <= {1} and row[size - 1] == 2 and row.count(2) == 2
        assert {place for place in range(width) if number * width + place in real} == set(range(size))
        middle = row.index(2)
        first, second = row[1:middle], row[middle + 1 : size - 1]
        pair = int(np.searchsorted(index, first[0] - 4, side="right") - 1) // 2
        assert [first[0] - 4, second[0] - 4] == index[2 * pair : 2 * pair + 2].tolist()
        assert all((np.diff(text) == 1).all() for text in (first, second))
        found.append((pair, first, second))
    return found


def stream(data: PairData, count: int) -> list[Masked]:
    return [data.batch("train", number) for number in range(count)]


def test_every_pair_of_a_pass_comes_once_in_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(masked, "ROUND", 97)
    data = numbered(tmp_path, {"a-b": MIXED, "c-d": MIXED[:25], "e-f": MIXED[:1]})
    data.batch("train", 200)
    cuts, total, taken = data._micros["train"], Counter(), Counter()
    batches = stream(data, cuts[8])
    for turn in range(8):
        counts = Counter(pair for batch in batches[cuts[turn] : cuts[turn + 1]] for pair, _, _ in rows_of(data, batch))
        total += counts
        for (first, size), quota in zip(data.streams["train"].tolist(), data.quotas("train", turn).tolist()):
            own = [total[pair] for pair in range(first, first + size)]
            taken[first] += quota
            # of whole passes every pair has one, of the last some have one more
            assert sum(own) == taken[first] and set(own) <= {taken[first] // size, taken[first] // size + 1}
    share = np.array([60, 25, 1]) ** 0.7
    assert (np.abs(data.quotas("train", 3) - 97 * share / share.sum()) < 1).all()
    passes = data._drawn_pairs("train", 0, 0, 120).reshape(2, 60).tolist()
    assert passes[0] != list(range(60)) == sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]


def test_the_budget_is_kept_and_padding_small(tmp_path, monkeypatch):
    monkeypatch.setattr(masked, "ROUND", 2000)
    rng = np.random.default_rng(0)
    sizes = [tuple(size) for size in rng.integers(2, 40, (700, 2)).tolist()]
    for budget in (64, 1000, 20_000):
        data = numbered(tmp_path / str(budget), {"a-b": sizes}, block_size=64, micro_tokens=budget)
        data.batch("train", 0)
        batches = stream(data, data._micros["train"][1])
        assert all(batch.ids.numel() <= budget for batch in batches)
        real = sum(batch.ids.numel() if batch.real is None else len(batch.real) for batch in batches)
        padded = sum(batch.ids.numel() for batch in batches)
        assert real > 0.85 * padded
        if budget < 20_000:
            assert padded > (0.6 if budget == 64 else 0.9) * budget * len(batches)
        widths = [batch.ids.shape[1] for batch in batches]
        assert len(widths) < 3 or (widths != sorted(widths) and widths != sorted(widths, reverse=True))


@pytest.mark.parametrize("block", [8, 15, 16])
def test_cutting_keeps_both_halves(tmp_path, monkeypatch, block):
    monkeypatch.setattr(masked, "ROUND", 98)
    sizes = [(one, two) for one in (2, 4, 5, 7, 8, 9, 30) for two in (2, 4, 5, 7, 8, 9, 30)]
    data = numbered(tmp_path, {"a-b": sizes}, block_size=block, mask_share=1.0)
    seen = set()
    for batch in stream(data, 40):
        assert batch.ids.shape[1] <= block
        for pair, first, second in rows_of(data, batch):
            seen.add(pair)
            (one, two), room, kept = sizes[pair], block - 1, (len(first) + 1, len(second) + 1)
            if one + two <= room:
                assert kept == (one, two)
            else:  # one token of the longer half at a time, of the second where they are equal
                while one + two > room:
                    one, two = (one - 1, two) if one > two else (one, two - 1)
                assert kept == (one, two)
        assert not np.isin(batch.targets, (0, 1, 2)).any()
    assert seen == set(range(len(sizes)))


def test_batches_depend_on_seed_split_step_and_micro_alone(folder, monkeypatch):
    monkeypatch.setattr(masked, "ROUND", 64)
    one, two = (PairData(folder, T, BUDGET, 2, seed=1) for _ in range(2))
    asked = [(split, step, micro) for split in ("train", "valid") for step in (0, 900, 50, 7, 0) for micro in (1, 0)]
    first = {key: one.batch(*key) for key in asked}
    assert all(same(two.batch(*key), first[key]) for key in reversed(asked))
    assert len({batch.ids.numpy().tobytes() for batch in first.values()}) == 16
    assert not same(PairData(folder, T, BUDGET, 2, seed=2).batch("train", 0, 0), first["train", 0, 0])


def test_processes_share_the_data_of_one(folder):
    alone, *ranks = (PairData(folder, 64, 512, micros_per_step=4) for _ in range(3))
    flat = PairData(folder, 64, 512)
    whole = [alone.batch("train", step, micro) for step in range(3) for micro in range(4)]
    dealt = [ranks[micro % 2].batch("train", step, micro) for step in range(3) for micro in range(4)]
    assert all(map(same, whole, dealt))
    # the same rows, however many micro-batches a step has; only the masks go by step and micro
    assert all(torch.equal(restored(one), restored(two)) for one, two in zip(whole, stream(flat, 12)))


def test_halves_are_masked_independently(tmp_path):
    sizes = [(11, 21)] * 30  # 10 and 20 tokens to choose from: 1.5 and 3 of them
    data = numbered(tmp_path, {"a-b": sizes[:10], "c-d": sizes[10:]}, block_size=40, micro_tokens=400)
    firsts, places, batches = [], Counter(), stream(data, 300)
    assert len({tuple(batch.masked.tolist()) for batch in batches}) == 300  # drawn anew for each
    for batch in batches:
        hidden = (batch.ids != restored(batch)).numpy()
        assert (batch.ids.flatten()[batch.masked] == data.tokenizer.mask).all()
        assert not hidden[:, [0, 11, 32]].any() and (hidden[:, 12:32].sum(axis=1) == 3).all()
        firsts += hidden[:, 1:11].sum(axis=1).tolist()
        places.update(np.flatnonzero(hidden.sum(axis=0)).tolist())
        rows = rows_of(data, batch)
        assert batch.language.tolist() == [int(rows[place // 33][0] >= 10) for place in batch.masked.tolist()]
    assert set(firsts) == {1, 2} and within(firsts.count(2), len(firsts), 0.5)
    assert len(places) == 30
    mixed = numbered(tmp_path / "m", {"a-b": sizes}, block_size=40, micro_tokens=400, replace=(0.5, 0.5))
    seen = torch.cat([batch.ids.flatten()[batch.masked] for batch in stream(mixed, 60)])
    assert within(int((seen == mixed.tokenizer.mask).sum()), len(seen), 0.5)


def test_spans(tmp_path):
    rng = np.random.default_rng(0)
    ids = np.full((400, 1000), 9)
    choosable = np.ones_like(ids, dtype=bool)
    choosable[:, ::100] = False
    _, positions = mask_tokens(ids, choosable, rng, 0.02, 5, np.array([9]), (1.0, 0.0), span=3.0)
    chosen = np.zeros(ids.shape, dtype=bool)
    chosen.ravel()[positions] = True
    assert not (chosen & ~choosable).any() and set(chosen.sum(axis=1)) <= {19, 20}  # 990 * 0.02 = 19.8
    assert within((chosen.sum(axis=1) == 20).sum(), 400, 0.8)
    # few enough to hardly touch one another; n tokens are 1 + (n - 1) / 3 spans in the mean, the last of them cut
    starts = (np.diff(chosen.astype(int), axis=1, prepend=0) == 1).sum()
    assert chosen.sum() / starts == pytest.approx(19.8 / (1 + 18.8 / 3), abs=0.1)
    lengths = Counter(len(run) for row in chosen for run in "".join("x" if c else " " for c in row).split())
    assert lengths[1] / starts == pytest.approx(1 / 3, abs=0.06) and max(lengths) > 8
    sizes = [(31, 41)] * 30
    for span in (None, 3.0):
        data = numbered(
            tmp_path / str(span), {"a-b": sizes}, block_size=80, micro_tokens=800, span=span, mask_share=0.2
        )
        hidden = np.concatenate([(batch.ids != restored(batch)).numpy() for batch in stream(data, 50)])
        assert (hidden[:, 1:31].sum(axis=1) == 6).all() and (hidden[:, 32:72].sum(axis=1) == 8).all()
        runs = hidden.sum() / (np.diff(hidden.astype(int), axis=1, prepend=0) == 1).sum()
        assert runs > 2.2 if span else runs < 1.5


def test_masked_data_takes_spans_and_replacements(folder, tmp_path, spm):
    (tmp_path / "de.txt").write_text("\n\n".join(texts_of("de", 900)))
    many = prepare("cc100", tmp_path, spm=spm, out=tmp_path / "many")
    batch = MaskedData(many, 64, 640, replace=(1.0, 0.0), span=3.0).batch("train", 0)
    assert (batch.ids.flatten()[batch.masked] == 499).all()
    assert (batch.masked.diff() == 1).sum() > 0.4 * len(batch.masked)
    for bad in ({"replace": (0.8, 0.3)}, {"replace": (-0.1, 0.3)}, {"span": 0.5}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} .*must be"):
            MaskedData(many, 64, 640, **bad)
    with pytest.raises(ValueError, match="holds 'cc100', not translation pairs; MaskedData reads it"):
        PairData(many, T, BUDGET)


# ---------------------------------------------------------------------------------------------------------------------
# evaluation


def reading(data: PairData, **arguments) -> dict[int, list[tuple[int, Masked]]]:
    found: dict[int, list] = {}
    for k, first, batch in data.eval_batches("valid", **arguments):
        found.setdefault(k, []).append((first, batch))
    return found


def masks(data: PairData, batches: list[tuple[int, Masked]]) -> dict[int, list[int]]:
    """pair -> the tokens of it that are masked (each tells its own place)."""
    found = {}
    for _, batch in batches:
        originals = restored(batch)
        for number, (pair, _, _) in enumerate(rows_of(data, batch)):
            assert pair not in found
            found[pair] = originals[number][batch.ids[number] != originals[number]].tolist()
    return found


SIZED = {"a-b": [*MIXED, (30, 3), (3, 30), (30, 30)], "c-d": MIXED[:20]}


def test_evaluation_reads_every_pair_once_per_masking(tmp_path):
    data = numbered(tmp_path, SIZED)
    turns = reading(data, maskings=3)
    found = [masks(data, turns[k]) for k in range(3)]
    assert all(sorted(turn) == list(range(83)) for turn in found) and found[0] != found[1] != found[2]
    for batches in turns.values():
        expected = 0
        for first, batch in batches:
            assert first == expected and batch.ids.numel() <= BUDGET
            expected += batch.ids.numel() if batch.real is None else len(batch.real)
        assert expected == data.eval_tokens("valid")
        assert all((length.diff() <= 0).all() for _, b in batches for length in [(restored(b) != 1).sum(dim=1)])
    whole = list(data.eval_batches("valid", maskings=3))
    for rank in range(3):
        dealt = list(data.eval_batches("valid", maskings=3, rank=rank, world=3))
        assert all(a[:2] == b[:2] and same(a[2], b[2]) for a, b in zip(dealt, whole[rank::3], strict=True))


def test_evaluation_depends_on_neither_seed_nor_batch_size(tmp_path):
    plain = masks(data := numbered(tmp_path / "a", SIZED), reading(data, maskings=1)[0])
    for name, change in (("b", {"seed": 5}), ("c", {"micro_tokens": 200}), ("d", {"micros_per_step": 3})):
        other = numbered(tmp_path / name, SIZED, **change)
        assert masks(other, reading(other, maskings=1)[0]) == plain


@pytest.mark.parametrize("half", [0, 1])
def test_context_is_all_that_differs(tmp_path, half):
    data = numbered(tmp_path, SIZED, mask_share=0.3)
    both = masks(data, reading(data, maskings=2)[1])
    known, blind = (reading(data, maskings=2, only=half, context=context)[1] for context in (True, False))
    index = data.index["valid"]
    for pair, tokens in masks(data, known).items():
        begin, end = index[2 * pair + half], index[2 * pair + half + 1]  # that half alone, and as when both are masked
        assert tokens and tokens == [token for token in both[pair] if begin <= token - 4 < end]
        assert len(both[pair]) > len(tokens)
    total = 0
    for (_, one), (first, two) in zip(known, blind, strict=True):
        assert torch.equal(one.targets, two.targets) and torch.equal(one.language, two.language)
        assert first == total
        total += two.ids.numel() if two.real is None else len(two.real)
        for row, (_, *texts) in zip(restored(two).tolist(), rows_of(data, one), strict=True):
            size = len(texts[half]) + 2
            assert row[:size] == [0, *texts[half], 2] and set(row[size:]) <= {1}
        width, other = one.ids.shape[1], two.ids.shape[1]
        assert torch.equal(one.masked // width, two.masked // other)
        assert torch.equal(restored(one).flatten()[one.masked], restored(two).flatten()[two.masked])
    assert total == data.eval_tokens("valid", halves=(half,)) < data.eval_tokens("valid")
    with pytest.raises(ValueError, match="context=False goes with only=0 or only=1"):
        next(data.eval_batches("valid", context=False))


def test_limited_evaluation_takes_all_languages_evenly(tmp_path):
    data = numbered(tmp_path, SIZED)
    full = masks(data, reading(data, maskings=1)[0])
    some = masks(data, reading(data, maskings=1, max_tokens=30)[0])
    assert sorted(some) == [0, 1, 63, 64] and all(full[pair] == some[pair] for pair in some)
    assert (
        data.eval_tokens("valid", 30) == 2 * (5 + 7)
        and len(masks(data, reading(data, maskings=1, max_tokens=1)[0])) == 1
    )


# ---------------------------------------------------------------------------------------------------------------------
# folders and arguments that do not do


def test_bad_folders_and_arguments(folder, tmp_path):
    with pytest.raises(ValueError, match="holds 'bitext', translation pairs; data.pairs.PairData reads it"):
        MaskedData(folder, T, BUDGET)
    with pytest.raises(ValueError, match="block_size 7 must be at least 8"):
        PairData(folder, 7, 70)
    with pytest.raises(ValueError, match="micro_tokens 15 must be at least one block of 16"):
        PairData(folder, T, T - 1)
    with pytest.raises(FileNotFoundError, match="data.prepare absent"):
        PairData(tmp_path / "absent", T, T)
    with pytest.raises(ValueError, match="no pair 'de-fr' among 2; did you mean 'de-en'?"):
        next(PairData(folder, T, T).raw("train", "de-fr"))
    kind = type(numbered(tmp_path / "n", {"a-b": MIXED}))
    path = tmp_path / "n" / "meta.json"
    whole = json.loads(path.read_text())
    too_many = {"a-b": {split: {"first": 1, "pairs": 60} for split in SPLITS}}
    for languages in ({}, {"a-b": {}}, too_many, [1]):
        path.write_text(json.dumps(whole | {"languages": languages}))
        with pytest.raises(ValueError, match=r"meta\.json (is damaged|does not fit)"):
            kind(tmp_path / "n", T, T)
    path.write_text(json.dumps(whole))
    index = tmp_path / "n" / "valid.idx"
    content = index.read_bytes()
    index.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"valid\.idx has 960 bytes instead of 968"):
        kind(tmp_path / "n", T, T)
    index.write_bytes(content[:-8] + b"\1" * 8)
    with pytest.raises(ValueError, match=r"valid\.idx does not fit valid\.bin"):
        kind(tmp_path / "n", T, T)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.idx is missing"):
        kind(tmp_path / "n", T, T)
    with pytest.raises(ValueError, match=r"bin holds no pairs"):
        numbered(tmp_path / "no", {"a-b": []})
