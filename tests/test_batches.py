"""Batches: their contents, what they depend on, and what evaluation reads."""

import itertools
import json
import math
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_data import pairs
from test_train_electra import corpora as electra_corpora

from data import batches, folder
from data.batches import Masked, MaskedData, PairData, TokenData, Translation, TranslationData, source_batches
from data.files import SPLITS, checksum
from data.folder import Spans
from data.masking import DRAWS, Masking
from data.prepare import prepare
from metrics import counting

__all__ = ["electra_corpora"]  # a fixture
KINDS = [TokenData, MaskedData, PairData, TranslationData]
T, B = 16, 4


def within(count: int, n: int, p: float) -> bool:
    """Whether a binomial count is within five standard deviations: off by chance once in two million."""
    return abs(count - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def same(one, two) -> bool:
    """Whether two batches are equal, tensor by tensor."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, two, strict=True))


def steps(data, count: int, split="train") -> list:
    return [data.batch(split, step) for step in range(count)]


def nonpad_places(ids: torch.Tensor, nonpad: torch.Tensor | None) -> list[int]:
    return list(range(ids.numel())) if nonpad is None else nonpad.tolist()


def rows_without_padding(ids: torch.Tensor, nonpad: torch.Tensor | None) -> list[list[int]]:
    """The rows of a batch without padding; checks that the rest is padding, at the end of rows."""
    places = nonpad_places(ids, nonpad)
    lengths = np.bincount(np.array(places) // ids.shape[1], minlength=len(ids))
    padding = np.arange(ids.shape[1]) >= lengths[:, None]  # (B, T)
    assert np.flatnonzero(~padding).tolist() == places
    assert (ids.numpy()[padding] == 1).all()
    assert (nonpad is None) == (not padding.any())
    return [row[:length] for row, length in zip(ids.tolist(), lengths)]


def restored(batch: Masked) -> torch.Tensor:
    """(B, T) ids before masking."""
    ids = batch.ids.clone()
    ids.view(-1)[batch.masked] = batch.targets
    return ids


# Two kinds of folders: prepared corpora, and numbered ones, in which every token of a split is unique


@pytest.fixture(scope="session")
def many(electra_corpora) -> Path:
    """A prepared corpus of three languages."""
    return electra_corpora["data"]


PAIRS = {}  # (languages, split) -> pairs of texts
for split, count in {"train": 150, "valid": 20, "test": 15}.items():
    PAIRS |= {(languages, split): pairs(languages, count, split) for languages in ("de-en", "en-ru")}


@pytest.fixture(scope="session")
def aligned(tmp_path_factory) -> Path:
    """A prepared corpus of those pairs."""
    base = tmp_path_factory.mktemp("aligned")
    for (languages, split), texts in PAIRS.items():
        for side, lines in zip(languages.split("-"), zip(*texts)):
            (base / f"{languages}.{split}.{side}").write_text("\n".join(lines))
    return prepare("bitext", base, pieces=400, out=base / "prepared")


@pytest.fixture
def folder_of(many, aligned) -> dict[type, Path]:
    return {TokenData: many, MaskedData: many, PairData: aligned, TranslationData: aligned}


def numbered(kind: type, base: Path, languages: dict, **arguments):
    """A folder of languages, name -> token count, or (count in train and test, count in valid); or of language pairs,
    name -> the sizes of both texts of each pair, the same in all splits.

    Ids count from 4 through all languages; each text of a pair ends in </s>, included in its size.
    """
    pairs = kind.kind == "pairs"
    meta = {"name": "numbered", "kind": kind.kind, "dtype": "uint32", "splits": {}, "files": {}}
    meta["languages"] = {name: {} for name in languages}
    base.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        first, ends = 0, [0]
        for name, sizes in languages.items():
            if not pairs:
                sizes = [[sizes[split == "valid"] if isinstance(sizes, tuple) else sizes]]
            ends += (ends[-1] + np.cumsum(sizes)).tolist()
            count = len(sizes) if pairs else sizes[0][0]
            meta["languages"][name][split] = {"first": first, "pairs" if pairs else "tokens": count}
            first += count
        ids = np.arange(4, 4 + ends[-1], dtype="uint32")
        if pairs:
            np.array(ends).tofile(base / f"{split}.idx")
            ids[np.array(ends[1:]) - 1] = 2
        ids.tofile(base / f"{split}.bin")
        meta["splits"][split] = {"tokens": len(ids), "pairs": first}
    mask = 4 + max(counts["tokens"] for counts in meta["splits"].values())
    meta["tokenizer"] = {"vocab_size": mask + 1}
    meta["checksum"] = checksum(meta)
    (base / "meta.json").write_text(json.dumps(meta))

    class Numbered(kind):
        tokenizer = SimpleNamespace(bos=0, pad=1, eos=2, mask=mask, special=(0, 1, 2, 3, mask), vocab_size=mask + 1)

    return Numbered(base, **({"block_size": T, "micro_tokens": T * B} | arguments))


numbered_texts = partial(numbered, MaskedData)
numbered_pairs = partial(numbered, PairData, replace=(1.0, 0.0))  # masked tokens always become the mask
numbered_translations = partial(numbered, TranslationData)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_depend_only_on_seed_split_step_and_micro(folder_of, kind):
    one, two, other = [kind(folder_of[kind], 32, 128, 4, seed) for seed in (1, 1, 2)]
    keys = [(split, step, micro) for split in ("train", "valid") for step in (0, 900, 7, 0) for micro in (2, 1, 0)]
    first = {key: one.batch(*key) for key in keys}
    assert all(same(two.batch(*key), first[key]) for key in reversed(keys))
    assert not any(same(other.batch(*key), first[key]) for key in keys)
    train = {batch[0].numpy().tobytes() for (split, *_), batch in first.items() if split == "train"}
    assert len(train) == 9  # all are different


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_out_evaluation_whatever_the_seed(folder_of, kind):
    sizes = (8, 16) if kind is TokenData else (32, 64)
    one, data = kind(folder_of[kind], *sizes), kind(folder_of[kind], *sizes, seed=5)
    all_batches = list(one.eval_batches("valid"))
    ranks = [list(data.eval_batches("valid", rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, ranks)) == len(all_batches) > 8
    for i, batch in enumerate(all_batches):
        other = ranks[i % 3][i // 3]
        if issubclass(kind, MaskedData):  # masking, first token, batch
            assert other[:2] == batch[:2]
            other, batch = other[2], batch[2]
        assert same(other, batch)


@pytest.mark.parametrize("kind", [PairData, TranslationData])
def test_pairs_come_in_the_same_order_however_many_a_step_has(folder_of, kind):
    one, two = kind(folder_of[kind], 32, 64), kind(folder_of[kind], 32, 64, 2)
    batches = one.batch("train", 7), two.batch("train", 3, 1)
    assert torch.equal(*(restored(batch) if kind is PairData else batch.source for batch in batches))


@pytest.mark.parametrize("kind, sizes", [(TokenData, (32, 65)), (PairData, (32, 31)), (TranslationData, (32, 31))])
def test_a_micro_batch_must_hold_a_row(folder_of, kind, sizes):
    block, micro = sizes
    bound = "a multiple of" if kind is TokenData else "at least"
    with pytest.raises(ValueError, match=f"micro_tokens = {micro} must be {bound} block_size = {block}"):
        kind(folder_of[kind], block, micro)


def test_a_damaged_folder_is_an_error_of_one_line(aligned, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(aligned, tmp_path / "copy"))
    edited = json.loads((aligned / "meta.json").read_text())
    edited["splits"]["valid"]["tokens"] += 1
    damages = [("meta.json", content.encode()) for content in ("{", "[]", "{}", json.dumps(edited))]
    names = ("test.jsonl", "xlmr.model", "train.bin", "valid.idx")
    damages += [(name, (aligned / name).read_bytes()[:-2]) for name in names]
    for name, content in damages:
        (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} has changed .* prepare it again: python -m data.prepare"):
            PairData(copy, T, T)
        if name.endswith(("bin", "idx")):
            with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{name} has .* bytes instead of"):
                patch.setattr(folder, "HASHED_UP_TO", 0)  # as if it were too large to hash
                PairData(copy, T, T)
        shutil.copy(aligned / name, copy)
    (copy / "valid.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.bin is missing; remove the folder and prepare it again"):
        PairData(copy, T, T)
    with pytest.raises(FileNotFoundError, match="there is no wmt10: .* python -m data.prepare wmt10, else"):
        PairData(tmp_path / "wmt10", T, T)


def test_y_is_one_token_ahead_of_x_in_windows_from_everywhere(tmp_path):
    data = numbered(TokenData, tmp_path, {"x": 400})
    starts = Counter()
    for x, y in steps(data, 3000, "valid"):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) == ((B, T), torch.int64)
        assert torch.equal(y, x + 1)
        assert (x.diff() == 1).all()
        starts.update((x[:, 0] - 4).tolist())
    assert not same(data.batch("train", 0), data.batch("valid", 0))
    assert sorted(starts) == list(range(400 - T))
    for first in range(0, 380, 38):
        assert within(sum(starts[place] for place in range(first, first + 38)), 12_000, 38 / 384)


def test_seen_are_the_targets_of_the_first_steps(tmp_path):
    data = numbered(TokenData, tmp_path, {"x": 400}, micros_per_step=2)
    for count in (0, 1, 3, 200):
        expected = torch.zeros(400, dtype=torch.bool)
        for step in range(count):
            for micro in range(2):
                _, y = data.batch("train", step, micro)
                expected[y.flatten() - 4] = True
        assert torch.equal(data.seen(count), expected)
    assert expected.sum() > 390
    assert not expected[0]  # the first token is never a target


def test_log_frequencies_follow_the_training_text(many):
    data = TokenData(many, T, T)
    counts = Counter(data.tokens["train"].tolist())
    assert len(counts) < data.vocab_size  # a token that never occurs has a share, too
    expected = torch.tensor([counts[token] + 1 for token in range(data.vocab_size)])
    torch.testing.assert_close(data.log_frequencies().exp(), expected / (counts.total() + data.vocab_size))
    data.tokens["train"] = np.repeat(np.array([3, 5], "uint16"), 2**24)  # every third token is counted
    assert data.log_frequencies()[[3, 5]].exp().tolist() == pytest.approx([0.5, 0.5], rel=1e-3)


def test_evaluation_reads_the_split_once_and_in_order(many):
    data = TokenData(many, T, T * B)
    tokens = torch.from_numpy(data.tokens["valid"].astype("int64"))
    count = (len(tokens) - 1) // T * T
    xs, ys = zip(*data.eval_batches("valid"))
    assert torch.equal(torch.cat(xs).flatten(), tokens[:count])
    assert torch.equal(torch.cat(ys).flatten(), tokens[1 : count + 1])
    assert all(len(x) == B for x in xs[:-1])
    for limit, read in {5 * T: 5 * T, 6 * T - 1: 5 * T, 1: T}.items():
        assert sum(x.numel() for x, _ in data.eval_batches("valid", limit)) == read


def test_a_split_of_exactly_one_window_is_enough(many):
    size, split = min((len(tokens), split) for split, tokens in TokenData(many, T, T).tokens.items())
    data = TokenData(many, size - 1, size - 1)
    assert len(list(data.eval_batches(split))) == 1
    assert same(data.batch(split, 9), next(data.eval_batches(split)))
    with pytest.raises(ValueError, match=f"{split}.bin has {size:,} tokens and block_size {size} needs {size + 1:,}"):
        TokenData(many, size, size)


def windows_of(data: MaskedData, batch: Masked, split="train") -> list[tuple[int, int, int]]:
    """(language, place in its text, tokens) of each row; checks that a row is `<s>` and text of one language."""
    windows = []
    for start, *row in rows_without_padding(restored(batch), batch.nonpad):
        assert start == 0
        assert (np.diff(row) == 1).all()
        for language, (first, size) in enumerate(data.streams[split].tolist()):
            if first <= row[0] - 4 < first + size:
                assert row[-1] - 4 < first + size
                windows.append((language, row[0] - 4 - first, len(row)))
    assert len(windows) == len(batch.ids)
    return windows


def test_a_language_is_drawn_by_its_smoothed_size(tmp_path):
    sizes = {"a": (102_400, 9), "b": (100, 9), "c": (1000, 0)}
    weights = {1: [102_400, 100, 1000], 0: [1, 1, 1], 0.7: [102_400**0.7, 100**0.7, 1000**0.7]}
    for exponent, expected in weights.items():
        data = numbered_texts(tmp_path, sizes, exponent=exponent, micro_tokens=T * 100)
        drawn = Counter(row[0] for batch in steps(data, 100) for row in windows_of(data, batch))
        for language, weight in enumerate(expected):
            assert within(drawn[language], 10_000, weight / sum(expected))
    drawn = Counter(row[0] for batch in steps(data, 20, "valid") for row in windows_of(data, batch, "valid"))
    assert set(drawn) == {0, 1}  # a language without text in valid is not drawn there
    assert within(drawn[1], 2000, 1 / 129)  # by the training tokens: 1024 ** 0.7 is 128


def test_windows_are_from_everywhere_and_padded_in_a_short_language(tmp_path):
    data = numbered_texts(tmp_path, {"a": 5, "b": 60}, exponent=0, mask_share=1)
    windows = Counter()
    for batch in steps(data, 1000):
        assert batch.ids.shape == (B, T)
        rows = windows_of(data, batch)
        windows.update(rows)
        assert batch.masked.tolist() == [n for n in nonpad_places(batch.ids, batch.nonpad) if n % T]
        assert batch.language.tolist() == [rows[place // T][0] for place in batch.masked.tolist()]
        assert batch.tokens == sum(1 + length for *_, length in rows)  # with `<s>`
    assert set(windows) == {(0, 0, 5)} | {(1, place, T - 1) for place in range(46)}
    assert all(within(windows[1, place, T - 1], 4000, 1 / 92) for place in range(46))


EVALUATED = {"a": (900, 100), "b": (900, 0), "c": (900, 47), "d": (900, 16), "e": (900, 15), "f": (900, 1)}
READ = 179 + 7 + 4 + 2 + 1 + 1  # the text and an <s> for each window


def reading(data, k=0, **arguments) -> list[tuple[int, Masked]]:
    """(first, batch) of masking k of the valid split."""
    return [(first, batch) for turn, first, batch in data.eval_batches("valid", k + 1, **arguments) if turn == k]


def spread(batches: list[tuple[int, Masked]], count: int) -> np.ndarray:
    """(3, count) the ids of all non-padding tokens before and after masking, and their language (-1: not masked)."""
    table = np.full((3, count), -1)
    for first, batch in batches:
        nonpad = nonpad_places(batch.ids, batch.nonpad)
        places = slice(first, first + len(nonpad))
        assert (table[:, places] == -1).all()  # no earlier batch has these tokens
        table[:2, places] = torch.stack([restored(batch), batch.ids]).flatten(1)[:, nonpad]
        table[2, first + np.searchsorted(nonpad, batch.masked.numpy())] = batch.language
    return table


def test_evaluation_reads_every_token_once_per_masking_at_any_batch_size(tmp_path):
    data = numbered_texts(tmp_path, EVALUATED)
    before, after, language = spread(reading(data), READ)
    assert data.eval_tokens("valid") == READ
    assert sorted(before[before != 0]) == list(range(4, 183))
    chosen = language >= 0
    ends = np.cumsum([size for _, size in EVALUATED.values()]) + 4
    assert (language[chosen] == ends.searchsorted(before[chosen], side="right")).all()
    assert (before == after)[~chosen].all()
    assert (before != after).any()
    again, _, other = spread(reading(data, 1), READ)
    assert (again == before).all()
    assert (other != language).any()
    for size, k in itertools.product((7 * T, T), range(2)):
        sized = numbered_texts(tmp_path, EVALUATED, micro_tokens=size)
        assert (spread(reading(data, k), READ) == spread(reading(sized, k), READ)).all()
    for _, batch in reading(data):
        windows_of(data, batch, "valid")
        lengths = (restored(batch) != 1).sum(dim=1)
        assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
        assert lengths[0] == batch.ids.shape[1]
        assert batch.ids.numel() <= T * B


def test_limited_evaluation_covers_all_languages_evenly(tmp_path):
    data = numbered_texts(tmp_path, EVALUATED)

    def rows(limit=None) -> dict[int, list[int]]:
        """The first token of a window -> its ids after masking."""
        ids = {}
        for _, batch in reading(data, max_tokens=limit):
            ids |= dict(zip(restored(batch)[:, 1].tolist(), rows_without_padding(batch.ids, batch.nonpad)))
        return ids

    # The first windows of a, c, d, e, f have 16 + 16 + 16 + 16 + 2 tokens; the second ones of a and c follow.
    for limit, windows in ((66, 5), (81, 5), (98, 7), (1, 1), (10**6, 15)):
        some = rows(limit)
        assert len(some) == windows
        assert some.items() <= rows().items()  # masked as in a full evaluation
    assert sorted(rows(66)) == [4, 104, 151, 167, 182]
    assert data.eval_tokens("valid", 66) == 66


def test_limited_evaluation_takes_languages_in_turn():
    rows = batches.evenly(np.repeat(np.arange(4), 40), np.ones(160, dtype=int), max_tokens=158)
    assert rows.tolist() == [40 * language + row for row in range(40) for language in range(4)][:158]


MIXED = [(n % 7 + 2, n % 5 + 2) for n in range(60)]  # tokens of both texts, with </s>
SIZED = {"a-b": [*MIXED, (30, 3), (3, 30), (30, 30)], "c-d": MIXED[:20]}


def pairs_of(data: PairData, batch: Masked) -> list[tuple[int, list[int], list[int]]]:
    """(pair, first, second) of every row; checks that it is `<s> first </s> second </s>` of one pair from its begin."""
    rows = []
    starts = data.index["train"][:-1].reshape(-1, 2)
    for row in rows_without_padding(restored(batch), batch.nonpad):
        assert (row[0], row[-1], row.count(2)) == (0, 2, 2)
        middle = row.index(2)
        first, second = row[1:middle], row[middle + 1 : -1]
        assert all((np.diff(half) == 1).all() for half in (first, second))
        [pair] = np.flatnonzero(starts[:, 0] == first[0] - 4)
        assert starts[pair, 1] == second[0] - 4
        rows.append((int(pair), first, second))
    return rows


def test_micro_batches_keep_to_the_budget_with_little_padding(tmp_path):
    sizes = np.random.default_rng(0).integers(2, 40, (700, 2)).tolist()
    for budget in (64, 1000, 20_000):
        data = numbered_pairs(tmp_path, {"a-b": sizes}, block_size=64, micro_tokens=budget)
        ids = [batch.ids for batch in steps(data, batches.POOL_MICROS)]
        padded = [x.numel() for x in ids]
        assert max(padded) <= budget
        assert sum(int((x != 1).sum()) for x in ids) > 0.95 * sum(padded)
        assert sum(padded) > (0.57 if budget == 64 else 0.9) * budget * len(ids)
        widths = [x.shape[1] for x in ids]
        assert widths not in (sorted(widths), sorted(widths, reverse=True))


@pytest.mark.parametrize("block", [8, 15, 16])
def test_the_longer_half_is_cut_first(tmp_path, block):
    lengths = (2, 4, 5, 7, 8, 9, 30)
    sizes = [(one, two) for one in lengths for two in lengths]
    data = numbered_pairs(tmp_path, {"a-b": sizes}, block_size=block, mask_share=1.0)
    seen = set()
    for batch in steps(data, 150):
        assert not np.isin(batch.targets, (0, 1, 2)).any()
        for pair, first, second in pairs_of(data, batch):
            seen.add(pair)
            one, two = sizes[pair]
            while one + two > block - 1:  # one token of the longer half at a time, of the second if equal
                one, two = (one - 1, two) if one > two else (one, two - 1)
            assert (len(first) + 1, len(second) + 1) == (one, two)
    assert seen == set(range(len(sizes)))


def test_halves_are_masked_independently(tmp_path):
    sizes = [(11, 21)] * 30  # 10 and 20 maskable tokens: 1.5 and 3 are chosen
    data = numbered_pairs(tmp_path, {"a-b": sizes[:10], "c-d": sizes[10:]}, block_size=40, micro_tokens=400)
    firsts, places = Counter(), Counter()
    for batch in steps(data, 300):
        hidden = (batch.ids == data.tokenizer.mask).numpy()  # `<s>`, 10 tokens, </s>, 20 tokens, </s>
        assert np.flatnonzero(hidden).tolist() == batch.masked.tolist()
        assert (hidden[:, 12:32].sum(axis=1) == 3).all()
        firsts.update(hidden[:, 1:11].sum(axis=1).tolist())
        places.update((batch.masked % 33).tolist())
        pairs = [pair for pair, *_ in pairs_of(data, batch)]
        assert batch.language.tolist() == [int(pairs[place // 33] >= 10) for place in batch.masked.tolist()]
    assert set(firsts) == {1, 2}
    assert within(firsts[2], firsts.total(), 0.5)
    assert sorted(places) == [*range(1, 11), *range(12, 32)]


def masks(data: PairData, batches: list[tuple[int, Masked]]) -> dict[int, list[int]]:
    """pair -> its masked tokens"""
    hidden = {}
    for _, batch in batches:
        for (pair, *_), before, after in zip(pairs_of(data, batch), restored(batch), batch.ids):
            assert pair not in hidden
            hidden[pair] = before[before != after].tolist()
    return hidden


def test_evaluation_reads_every_pair_once_per_masking(tmp_path):
    data = numbered_pairs(tmp_path, SIZED)
    turns = [masks(data, reading(data, k)) for k in range(3)]
    assert all(sorted(turn) == list(range(83)) for turn in turns)
    assert turns[0] != turns[1] != turns[2]
    assert (spread(reading(data), data.eval_tokens("valid"))[0] >= 0).all()
    assert all(batch.ids.numel() <= T * B for _, batch in reading(data))


def test_evaluation_masks_halves_independently(tmp_path):
    data = numbered_pairs(tmp_path, {"a-b": [(11, 11)] * 100}, block_size=32, micro_tokens=64, mask_share=0.1)
    hidden = masks(data, reading(data)).values()  # one of ten tokens in each half
    assert within(sum(one % 11 == two % 11 for one, two in hidden), 100, 0.1)


def translations_of(batch: Translation) -> list[tuple[list[int], list[int]]]:
    """Source and translation of every row, both with </s>; checks the batch's layout."""
    sources = rows_without_padding(batch.source, batch.source_nonpad)
    read = rows_without_padding(batch.target, batch.target_nonpad)
    written = [row.tolist() for row in batch.labels.split([len(row) for row in read])]
    pairs = []
    for source, before, after in zip(sources, read, written):
        assert before == [0, *after[:-1]]
        assert all(text.index(2) == len(text) - 1 for text in (source, after))
        pairs.append((source, after))
    assert batch.tokens == sum(map(len, sources)) + sum(map(len, read))
    return pairs


def passes(data: TranslationData, count: int) -> list[list[Translation]]:
    """The micro-batches of the first passes; a pass ends when it has as many pairs as the corpus."""
    pairs, step, batches = sum(map(len, data.fitting["train"])), itertools.count(), []
    for _ in range(count):
        batches.append([])
        while sum(len(batch.source) for batch in batches[-1]) < pairs:
            batches[-1].append(data.batch("train", next(step)))
    return batches


def known_pairs(data: TranslationData, split: str) -> set[str]:
    """PAIRS as strings of `translations_of`, translated into English from either side."""
    pairs = PAIRS["de-en", split] + [pair[::-1] for pair in PAIRS["en-ru", split]]
    both = [data.tokenizer.encode_batch(list(pair)) for pair in pairs]
    return {str(([*source, 2], [*target, 2])) for source, target in both}


def test_a_pass_has_each_pair_of_the_corpus_once(aligned):
    data = TranslationData(aligned, 64, 256, seed=3)
    orders = []
    for micros in passes(data, 3):
        padded = [batch.source.numel() + batch.target.numel() for batch in micros]
        assert max(padded) <= 256
        assert sum(batch.tokens for batch in micros) > 0.85 * sum(padded)
        rows = [str(row) for batch in micros for row in translations_of(batch)]
        assert len(rows) == 300
        assert set(rows) == known_pairs(data, "train")
        orders.append(rows)
        widths = [batch.source.shape[1] for batch in micros]
        assert widths not in (sorted(widths), sorted(widths, reverse=True))
    assert orders[0] != orders[1] != orders[2]


def test_a_smoothed_pass_has_each_language_by_its_share_and_its_pairs_in_turn(tmp_path):
    sizes = {"a-en": [(2, 2)] * 80, "b-en": [(3, 3)] * 20}
    data = numbered_translations(tmp_path, sizes, exponent=0.5, micro_tokens=40)
    drawn = Counter(torch.cat([batch.source[:, 0] for batch in steps(data, 5 * 12)]).tolist())
    of_a = [drawn[4 + 4 * pair] for pair in range(80)]
    assert len(drawn) == 100
    assert max(of_a) - min(of_a) <= 2
    assert within(sum(of_a), drawn.total(), 2 / 3)  # sqrt(80) : sqrt(20) is 2 : 1


def test_evaluation_translates_every_pair_once(aligned):
    data = TranslationData(aligned, 64, 128)
    rows = [str(row) for batch in data.eval_batches("valid") for row in translations_of(batch)]
    assert len(rows) == 40
    assert set(rows) == known_pairs(data, "valid")
    some = [row for batch in data.eval_batches("valid", 80) for row in translations_of(batch)]
    assert 0 < len(some) < 10
    assert sum(len(source) + len(target) for source, target in some) <= 80
    assert sum(len(batch.source) for batch in data.eval_batches("valid", 1)) == 1


def test_pairs_with_a_long_side_are_excluded_and_counted(aligned, tmp_path):
    data = numbered_translations(tmp_path, {"a-en": [(9, 2), (8, 8), (2, 9), (3, 4)]}, block_size=8)
    assert data.left_out == dict.fromkeys(SPLITS, 2)
    for batch in (data.batch("train", 0), next(data.eval_batches("valid"))):
        assert sorted(len(source) for source, _ in translations_of(batch)) == [3, 8]
    with pytest.raises(ValueError, match="all valid pairs of .* are longer than block_size 8 tokens"):
        TranslationData(aligned, 8, 128)
    with pytest.raises(ValueError, match="pairs without the language 'ru': de-en; see --target"):
        TranslationData(aligned, 32, 128, target="ru")


def test_held_out_texts_keep_their_original_form(aligned):
    pairs, data = PairData(aligned, T, T), TranslationData(aligned, 64, 128)
    for languages in ("de-en", "en-ru"):
        texts = PAIRS[languages, "test"]
        assert list(zip(*pairs.texts("test", languages))) == texts
        translated = list(zip(*data.texts("test", languages)))
        assert translated == [pair[::-1] if languages == "en-ru" else pair for pair in texts]


def test_sources_to_translate_come_longest_first_within_the_budget():
    ids = {number: [5] * n + [2] for number, n in enumerate((3, 9, 0, 4, 4, 30))}
    numbers, sources = zip(*source_batches(ids, pad=1, micro_tokens=10))
    assert numbers == ([5], [1], [3, 4], [0, 2])  # 31, 10, 2 x 5 and 2 x 4 tokens
    for batch, source in zip(numbers, sources):
        assert rows_without_padding(*source) == [ids[number] for number in batch]
    assert list(source_batches({}, pad=1, micro_tokens=12)) == []


def pairs_of_ids(rows: dict[str, list[tuple]], decode) -> SimpleNamespace:
    """A fake TranslationData of one language pair, from split -> ids of sources and translations, for counting."""
    sides = {split: list(itertools.chain(*texts)) for split, texts in rows.items()}
    data = SimpleNamespace(vocab_size=1000, tokenizer=SimpleNamespace(decode=decode))
    data.tokens = {split: np.concatenate(texts).astype(np.uint16) for split, texts in sides.items()}
    data.stream = lambda split, language: (0, len(rows[split]))

    def pairs(split, numbers):
        sizes = np.array(list(map(len, sides[split])))
        starts = sizes.cumsum() - sizes
        return Spans(numbers * 0, starts.reshape(-1, 2)[numbers], sizes.reshape(-1, 2)[numbers])

    data.pairs = pairs
    return data


def test_a_memory_returns_the_source_with_the_highest_cosine():
    """A token in few sources weighs more, in the tokens that two sources share and in their lengths."""
    rng, rows = np.random.default_rng(3), {}
    for split, count in {"train": 40, "test": 20}.items():
        rows[split] = [(np.minimum(rng.geometric(0.15, 6), 29), [30 + n]) for n in range(count)]
    train = [set(source) for source, _ in rows["train"]]
    weight = {token: math.log(40 / max(1, sum(token in source for source in train))) for token in range(30)}

    def cosine(a: set, b: set) -> float:
        lengths = [math.sqrt(sum(weight[token] ** 2 for token in tokens)) for tokens in (a, b)]
        return sum(weight[token] ** 2 for token in a & b) / math.prod(lengths)

    nearest = counting.remembered(pairs_of_ids(rows, lambda ids: ids[0] - 30), "a-b")
    for n, (source, _) in zip(nearest, rows["test"], strict=True):
        highest = max(cosine(set(source), other) for other in train)
        assert cosine(set(source), train[n]) == pytest.approx(highest)


def test_a_lookup_takes_the_token_with_the_highest_dice_coefficient():
    """Tokens count once in a pair; `</s>`, 2, is in all; products of ids overflow the file's type."""
    train = [([500, 501, 2], [600, 601, 2]), ([500, 2], [600, 603, 2]), ([501, 502, 2], [602, 601, 2])]
    train += [([502, 502, 2], [602, 602, 602, 2]), ([503, 2], [601, 2])]
    train += [([504, 504, 2], [604, 605, 605, 605, 2]), ([2], [605, 2])]
    data = pairs_of_ids({"train": train, "test": [([501, 500, 502, 999, 2], [2]), ([504, 2], [2])]}, lambda ids: ids)
    # 501 shares two pairs with 601, which has three, and one with 600 and with 602: 4 / 5 is highest.
    assert counting.looked_up(data, "a-b") == [[601, 600, 602, 0, 2], [604, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# Masking: how many tokens are chosen, which ones, and what replaces them

V, MASK = 1000, 999
SPECIAL = (0, 1, 2, 3, MASK)
TOKENIZER = SimpleNamespace(special=SPECIAL, mask=MASK, vocab_size=V)


def mask(ids: np.ndarray, share, replace=(1.0, 0.0), seed=0) -> tuple:
    """The ids (B, T) after masking, and which were chosen; every row is a part."""
    masking = Masking(TOKENIZER, share, replace)
    random = np.random.default_rng(seed).random((DRAWS, ids.size))
    chosen = masking.choose(ids.flatten(), np.arange(ids.size) // ids.shape[1], random)
    return masking.hide(ids.flatten(), chosen, random).reshape(ids.shape), chosen.reshape(ids.shape)


@pytest.fixture(scope="module")
def masked():
    """4,000 rows with 88 or 99 tokens that are not special, before and after masking."""
    ids = np.random.default_rng(0).integers(4, 999, (4000, 101))
    ids[:, 0] = 0
    ids[:, 40] = 2
    ids[::2, 90:] = 1
    return ids, *mask(ids, 0.15, (0.8, 0.1))


def test_15_percent_are_chosen_on_average_and_no_special_tokens(masked):
    ids, _, chosen = masked
    maskable = ~np.isin(ids, SPECIAL)
    assert not (chosen & ~maskable).any()
    count = chosen.sum(axis=1)
    for rows, size in ((slice(0, None, 2), 88), (slice(1, None, 2), 99)):
        few = int(size * 0.15)
        assert (maskable[rows].sum(axis=1) == size).all()
        assert set(count[rows]) == {few, few + 1}
        assert within((count[rows] > few).sum(), 2000, size * 0.15 % 1)
    assert all(within(chosen[:, place].sum(), 4000, 0.15) for place in (1, 39, 41, 89))


def test_80_percent_become_the_mask_and_10_a_random_token(masked):
    ids, hidden, chosen = masked
    assert (hidden[~chosen] == ids[~chosen]).all()
    new, old = hidden[chosen], ids[chosen]
    assert within((new == MASK).sum(), len(new), 0.8)
    drawn = new[(new != MASK) & (new != old)]
    assert not np.isin(drawn, SPECIAL).any()
    assert within(len(drawn), len(new), 0.1 * (1 - 1 / 995))
    assert within((drawn < 500).sum(), len(drawn), 496 / 995)


def test_at_least_one_token_is_chosen_if_any_is_maskable():
    ids = np.full((3, 8), 2)
    ids[1, 5] = ids[2] = 7
    for seed in range(20):
        hidden, chosen = mask(ids, 0.15, seed=seed)
        assert not chosen[0].any()
        assert np.flatnonzero(chosen[1]).tolist() == [5]
        assert chosen[2].sum() in (1, 2)
        assert ((hidden == MASK) == chosen).all()
    assert (mask(ids, 1.0)[1] == (ids == 7)).all()
