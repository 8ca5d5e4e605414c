"""Reading data: what batches hold, what they depend on, how they are masked, and what evaluation reads."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import batches
from data.batches import Masked, MaskedData, Masking, PairData, TokenData, Translation, TranslationData, source_batches
from data.files import SPLITS
from data.prepare import checksum, prepare
from data.tokenizers import XLMR, train_sentencepiece

ROOT = Path(__file__).parent.parent
T, B = 16, 4


def same(one, two) -> bool:
    """Whether two batches are equal, tensor by tensor."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, two, strict=True))


def within(count: int, n: int, p: float) -> bool:
    """Five standard deviations of a binomial: off by chance once in two million."""
    return abs(count - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def lines_of(name: str, count: int) -> list[str]:
    rng = np.random.default_rng(list(name.encode()))
    return [f"{name} {i} " + " ".join(map(str, rng.integers(99, size=2 + i % 5))) for i in range(count)]


# In these folders no token comes twice in a split, so that it tells its own place.


def numbered(kind: type, base: Path, languages: dict[str, dict[str, int | list]], **arguments):
    """A folder of languages (tokens in each split) or pairs (sizes of both texts in each split), as `kind` reads it.

    ids count from 4 on over all languages; a text of a pair ends in </s>.
    """
    base.mkdir(parents=True, exist_ok=True)
    meta = {"name": "numbered", "kind": kind.kind, "dtype": "uint32", "languages": {}, "splits": {}, "files": {}}
    longest = 0
    for split in SPLITS:
        sizes, units = [], 0
        for language, own in languages.items():
            if kind.kind == "pairs":
                counts = {"first": units, "pairs": len(own[split])}
                sizes += [size for both in own[split] for size in both]
                units += len(own[split])
            else:
                counts = {"first": sum(sizes), "tokens": own[split]}
                sizes.append(own[split])
            meta["languages"].setdefault(language, {})[split] = counts
        ids = np.arange(4, 4 + sum(sizes), dtype="uint32")
        if kind.kind == "pairs":
            index = np.cumsum([0, *sizes], dtype="int64")
            ids[index[1:] - 1] = 2
            index.tofile(base / f"{split}.idx")
        ids.tofile(base / f"{split}.bin")
        meta["splits"][split] = {"tokens": len(ids), "pairs": units}
        longest = max(longest, len(ids))
    mask = longest + 4
    meta["tokenizer"] = {"vocab_size": mask + 1}
    (base / "meta.json").write_text(json.dumps(meta | {"checksum": checksum(meta)}))

    class Numbered(kind):
        tokenizer = SimpleNamespace(bos=0, pad=1, eos=2, mask=mask, special=(0, 1, 2, 3, mask), vocab_size=mask + 1)

    return Numbered(base, **({"block_size": T, "micro_tokens": T * B} | arguments))


def numbered_texts(base: Path, sizes: dict[str, tuple[int, int]], **arguments) -> MaskedData:
    """Languages of (train and test, valid) tokens."""
    languages = {name: {"train": size, "valid": valid, "test": size} for name, (size, valid) in sizes.items()}
    return numbered(MaskedData, base, languages, **arguments)


def numbered_pairs(base: Path, sizes: dict[str, list[tuple[int, int]]], kind=PairData, **arguments):
    """The same pairs in every split; sizes count the </s>."""
    always = {} if kind is TranslationData else {"replace": (1.0, 0.0)}
    languages = {name: dict.fromkeys(SPLITS, own) for name, own in sizes.items()}
    return numbered(kind, base, languages, **(always | arguments))


def restored(batch: Masked) -> torch.Tensor:
    """(B, T) ids before masking."""
    ids = batch.ids.clone()
    ids.view(-1)[batch.masked] = batch.targets
    return ids


def steps(data, count: int, split: str = "train") -> list:
    return [data.batch(split, step) for step in range(count)]


# ---------------------------------------------------------------------------------------------------------------------
# one language


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A prepared corpus of one language, never written to by a test."""
    base = tmp_path_factory.mktemp("corpus")
    tokenizer = train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], 600)
    (base / "mine.txt").write_text("\n\n".join(lines_of("document", 600)))
    return prepare("text", base / "mine.txt", tokenizer.save(base), out=base / "prepared")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_y_is_x_one_token_ahead_in_windows_from_everywhere(folder):
    data = TokenData(folder, T, T * B)
    tokens = np.fromfile(folder / "valid.bin", dtype="uint16")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)
    found = Counter()
    for x, y in steps(data, 300, "valid"):
        assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        for row in torch.cat([x, y[:, -1:]], dim=1).numpy():
            [place] = np.flatnonzero((windows == row).all(axis=1))
            found[place] += 1
    assert len(windows) < 400 and min(found) == 0 and max(found) == len(windows) - 1
    assert len(found) > 0.9 * len(windows)  # 1 - exp(-3) is 0.95


def test_windows_are_as_likely_in_every_part(folder):
    data = TokenData(folder, T, T * 100)
    data.tokens["train"] = np.arange(10_000)
    starts = torch.cat([x[:, 0] for x, _ in steps(data, 40)])
    for tenth in torch.histc(starts.float(), bins=10, min=0, max=10_000 - T - 1):
        assert within(int(tenth), 4000, 0.1)


def test_seen_are_the_targets_of_so_many_steps(tmp_path):
    """No token comes twice, so that it tells its own place."""
    data = numbered(TokenData, tmp_path, {"x": dict.fromkeys(SPLITS, 400)}, micros_per_step=2)
    for count in (0, 1, 3, 200):
        expected = torch.zeros(400, dtype=torch.bool)
        for step in range(count):
            for micro in range(2):
                _, y = data.batch("train", step, micro)
                expected[y.flatten() - 4] = True
        assert torch.equal(data.seen(count), expected)
    assert not expected[0] and expected.sum() > 390  # nothing comes before the first


def test_log_frequencies_follow_the_training_text(folder):
    data = TokenData(folder, T, T * B)
    counts = Counter(data.tokens["train"].tolist())
    p = data.log_frequencies().exp()
    assert p.shape == (data.vocab_size,) and float(p.sum()) == pytest.approx(1, abs=1e-5)
    by_hand = [(counts[token] + 1) / (len(data.tokens["train"]) + data.vocab_size) for token in range(data.vocab_size)]
    torch.testing.assert_close(p, torch.tensor(by_hand))
    assert len(counts) < data.vocab_size  # a token that never comes has its share, too


@pytest.mark.parametrize("kind", [TokenData, MaskedData, PairData, TranslationData])
def test_batches_depend_on_seed_split_step_and_micro_alone(folder, many, aligned, kind):
    path = {TokenData: folder, MaskedData: many}.get(kind, aligned)
    one, two = kind(path, 32, 128, 2, seed=1), kind(path, 32, 128, 2, seed=1)
    asked = [(split, step, micro) for split in ("train", "valid") for step in (0, 900, 50, 7, 0) for micro in (1, 0)]
    first = {key: one.batch(*key) for key in asked}
    assert all(same(two.batch(*key), first[key]) for key in reversed(asked))
    train = [batch[0].numpy().tobytes() for (split, *_), batch in first.items() if split == "train"]
    assert len(set(train)) == 8
    other = kind(path, 32, 128, 2, seed=2)
    assert not any(same(other.batch(*key), first[key]) for key in asked)


@pytest.mark.parametrize("kind", [TokenData, MaskedData, PairData, TranslationData])
def test_processes_share_the_data_of_one(folder, many, aligned, kind):
    """Four micro-batches a step dealt to two processes are, together, one process's: none twice, none missing."""
    path = {TokenData: folder, MaskedData: many}.get(kind, aligned)
    alone, *ranks = (kind(path, 32, 128, micros_per_step=4) for _ in range(3))
    whole = [alone.batch("train", step, micro) for step in range(3) for micro in range(4)]
    dealt = [ranks[micro % 2].batch("train", step, micro) for step in range(3) for micro in range(4)]
    assert all(map(same, whole, dealt))
    assert len({batch[0].numpy().tobytes() for batch in whole}) == 12


def test_evaluation_reads_the_split_once_in_order(folder):
    data = TokenData(folder, T, T * B)
    tokens = torch.from_numpy(np.fromfile(folder / "valid.bin", dtype="uint16").astype(np.int64))
    count = (len(tokens) - 1) // T * T
    whole = list(data.eval_batches("valid"))
    assert torch.equal(torch.cat([x for x, _ in whole]).flatten(), tokens[:count])
    assert torch.equal(torch.cat([y for _, y in whole]).flatten(), tokens[1 : count + 1])
    assert all(len(x) == B for x, _ in whole[:-1])
    ranks = [list(data.eval_batches("valid", rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, ranks)) == len(whole)
    assert all(same(ranks[i % 3][i // 3], batch) for i, batch in enumerate(whole))
    assert sum(x.numel() for x, _ in data.eval_batches("valid", max_tokens=5 * T)) == 5 * T


def test_a_split_of_exactly_one_window(folder):
    sizes = {split: len(tokens) for split, tokens in TokenData(folder, T, T).tokens.items()}
    split, size = min(sizes.items(), key=lambda item: item[1])
    data = TokenData(folder, size - 1, size - 1)
    x, y = data.batch(split, 9)
    assert x.shape == (1, size - 1) and torch.equal(x[0, 1:], y[0, :-1])
    assert len(list(data.eval_batches(split))) == 1
    with pytest.raises(ValueError, match=f"{split}.bin has {size} tokens and block_size {size} needs {size + 1}"):
        TokenData(folder, size, size)
    with pytest.raises(ValueError, match="micro_tokens 15 must be at least one block of 16"):
        TokenData(folder, T, T - 1)
    with pytest.raises(ValueError, match=f"block_size {T} does not divide micro_tokens {T + 1}"):
        TokenData(folder, T, T + 1)


def test_damaged_folders(copy, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"data/README\.md says how"):
        TokenData(tmp_path / "absent", T, T * B)
    content = (copy / "train.bin").read_bytes()
    (copy / "train.bin").write_bytes(content[:-2])
    again = r"prepare it again: python -m data\.prepare "
    with pytest.raises(ValueError, match=rf"train\.bin has changed .* {again}"):
        TokenData(copy, T, T * B)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=rf"train\.bin has .* instead of .* {again}"):
        patch.setattr(batches, "HASHED_UP_TO", 0)  # a file that is too large is not read
        TokenData(copy, T, T * B)
    (copy / "train.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    with pytest.raises(ValueError, match=r"train\.bin has changed"):
        TokenData(copy, T, T * B)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "HASHED_UP_TO", 0)
        TokenData(copy, T, T * B)
    (copy / "train.bin").write_bytes(content)
    TokenData(copy, T, T * B)
    (copy / "test.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.bin is missing"):
        TokenData(copy, T, T * B)
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json has changed"):
        TokenData(copy, T, T * B)
    (copy / "meta.json").unlink()
    for name, how in {
        "mine": r"data/README\.md says how",
        "cc100": r"prepare it: python -m data\.prepare cc100",
    }.items():
        with pytest.raises(FileNotFoundError, match=f"no prepared data .*; {how}"):
            TokenData(copy.parent / "nowhere" / name, T, T * B)


def test_an_edited_count_is_noticed(copy):
    path = copy / "meta.json"
    meta = json.loads(path.read_text())
    meta["splits"]["valid"]["words"] += 1
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"meta\.json has changed since it was written; .* prepare it again"):
        TokenData(copy, T, T * B)
    for missing in ("splits", "checksum", "tokenizer"):
        path.write_text(json.dumps({key: value for key, value in meta.items() if key != missing}))
        with pytest.raises(ValueError, match=r"meta\.json has changed"):
            TokenData(copy, T, T * B)


def test_a_changed_tokenizer_is_noticed(copy, folder):
    train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], vocab_size=500).save(copy)
    with pytest.raises(ValueError, match=r"tokenizer\.model has changed since it was written"):
        TokenData(copy, T, T * B)
    assert TokenData(folder, T, T * B).tokenizer.vocab_size == 600


def test_a_corpus_is_opened_as_the_config_says(many):
    config = SimpleNamespace(block_size=T, micro_tokens=T * B, batch_tokens=3 * T * B, seed=5)
    waited = []
    context = SimpleNamespace(rank=0, barrier=lambda: waited.append(True))
    data = MaskedData.open(str(many), config, context, exponent=0.5, mask_share=0.3)
    by_hand = MaskedData(many, T, T * B, 3, 5, 0.5, 0.3)
    assert waited and data.micros_per_step == 3 and same(data.batch("train", 2, 1), by_hand.batch("train", 2, 1))
    assert not same(data.batch("train", 2, 1), MaskedData(many, T, T * B, 3, 0, 0.5, 0.3).batch("train", 2, 1))


def test_a_folder_of_another_kind_is_refused(folder, many, aligned):
    with pytest.raises(ValueError, match="holds 'text', a corpus of text; MaskedData reads languages: .* catalogs"):
        MaskedData(folder, T, T)
    with pytest.raises(ValueError, match="holds 'bitext', a corpus of pairs; MaskedData reads languages"):
        MaskedData(aligned, T, T)
    with pytest.raises(
        ValueError, match="holds 'cc100', a corpus of languages; PairData reads pairs: .* catalogs-pairs"
    ):
        PairData(many, T, T)
    with pytest.raises(ValueError, match="TranslationData reads pairs: .* catalogs-en"):
        TranslationData(many, T, 2 * T)
    assert TokenData(many, T, T).tokenizer.kind == "xlmr"  # causal models can read it too


# ---------------------------------------------------------------------------------------------------------------------
# masks

V, MASK = 1000, 999
TOKENIZER = SimpleNamespace(special=(0, 1, 2, 3, MASK), mask=MASK, vocab_size=V)


def hide(masking: Masking, ids: np.ndarray, rng: np.random.Generator, where=True) -> tuple[np.ndarray, np.ndarray]:
    """ids (B, T) and what was chosen, every row a part."""
    part = np.arange(ids.size) // ids.shape[1]
    where = np.broadcast_to(where, ids.shape).flatten()
    found = masking.hide(ids.flatten(), part, rng.random((Masking.draws, ids.size)), where)
    return tuple(each.reshape(ids.shape) for each in found)


def test_masking_is_15_percent_80_10_10():
    rng = np.random.default_rng(0)
    rows, width = 4000, 101
    ids = rng.integers(4, 999, (rows, width))
    ids[:, 0], ids[:, 40], ids[::2, 90:] = 0, 2, 1
    before = ids.copy()
    choosable = ~np.isin(ids, TOKENIZER.special)
    hidden, chosen = hide(Masking(TOKENIZER, 0.15, (0.8, 0.1), None), ids, rng)
    assert (ids == before).all() and not (chosen & ~choosable).any() and (hidden[~chosen] == ids[~chosen]).all()
    n, count = choosable.sum(axis=1), chosen.sum(axis=1)
    assert set(n) == {88, 99} and set(count[n == 88]) == {13, 14} and set(count[n == 99]) == {14, 15}
    for size in (88, 99):  # 13.2 and 14.85 in the mean
        assert within((count[n == size] > int(size * 0.15)).sum(), rows // 2, size * 0.15 % 1)
    for place in (1, 39, 41, 89):
        assert within(chosen[:, place].sum(), rows, 0.15)
    assert within(chosen[1::2, 100].sum(), rows // 2, 0.15)
    new, old = hidden[chosen], ids[chosen]
    assert within((new == MASK).sum(), len(new), 0.8)
    drawn = (new != MASK) & (new != old)
    assert within(drawn.sum(), len(new), 0.1 * (1 - 1 / 995))
    assert within((new == old).sum(), len(new), 0.1 + 0.1 / 995)
    assert not np.isin(new[drawn], TOKENIZER.special).any()
    assert within((new[drawn] < 500).sum(), int(drawn.sum()), 496 / 995)


def test_always_mask_and_at_least_one():
    ids = np.full((3, 8), 7)
    where = np.zeros((3, 8), dtype=bool)
    where[1, 5] = where[2] = True
    for seed in range(20):
        hidden, chosen = hide(Masking(TOKENIZER, 0.15, (1.0, 0.0), None), ids, np.random.default_rng(seed), where)
        assert chosen[1].tolist() == [False] * 5 + [True] + [False] * 2
        assert chosen[0].sum() == 0 and chosen[2].sum() in (1, 2)
        assert ((hidden == MASK) == chosen).all()
    _, chosen = hide(Masking(TOKENIZER, 1.0, (0.8, 0.1), None), ids, np.random.default_rng(0), where)
    assert (chosen == where).all()


def test_spans():
    ids = np.full((400, 1000), 9)
    ids[:, ::100] = 2
    rng = np.random.default_rng(0)
    _, chosen = hide(Masking(TOKENIZER, 0.02, (1.0, 0.0), 3.0), ids, rng)
    assert not chosen[:, ::100].any() and set(chosen.sum(axis=1)) <= {19, 20}  # 990 * 0.02 = 19.8
    assert within((chosen.sum(axis=1) == 20).sum(), 400, 0.8)
    # few enough to hardly touch one another; n tokens are 1 + (n - 1) / 3 spans in the mean, the last of them cut
    starts = (np.diff(chosen.astype(int), axis=1, prepend=0) == 1).sum()
    assert chosen.sum() / starts == pytest.approx(19.8 / (1 + 18.8 / 3), abs=0.1)
    lengths = Counter(len(run) for row in chosen for run in "".join("x" if c else " " for c in row).split())
    assert lengths[1] / starts == pytest.approx(1 / 3, abs=0.06) and max(lengths) > 8


@pytest.mark.parametrize(
    "option, reason",
    [
        ({"mask_share": 1.5}, "mask_share 1.5 must be over 0 and at most 1"),
        ({"mask_share": 0}, "mask_share 0 must be"),
        ({"replace": (0.8, 0.3)}, "replace .* must be two probabilities"),
        ({"replace": (-0.1, 0.3)}, "replace .* must be"),
        ({"span": 1.0}, "span 1.0 must be over 1 token"),
        ({"block_size": 7}, "block_size 7 must be at least 8"),
        ({"micro_tokens": 31}, "micro_tokens 31 must be at least one block of 32"),
    ],
)
def test_bad_arguments(many, aligned, option, reason):
    for kind, path in ((MaskedData, many), (PairData, aligned)):
        with pytest.raises(ValueError, match=reason):
            kind(path, **({"block_size": 32, "micro_tokens": 64} | option))


# ---------------------------------------------------------------------------------------------------------------------
# many languages


@pytest.fixture(scope="session")
def many(tmp_path_factory) -> Path:
    """A prepared corpus of three languages, never written to by a test."""
    base = tmp_path_factory.mktemp("languages")
    spm = train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], 500, XLMR).save(base)
    (base / "source").mkdir()
    for language, count in (("de", 500), ("sw", 300), ("zh-Hans", 20)):
        (base / "source" / f"{language}.txt").write_text("\n\n".join(lines_of(language, count)))
    return prepare("cc100", base / "source", tokenizer=spm, out=base / "prepared")


def windows_of(data: MaskedData, batch: Masked, split: str = "train") -> list[tuple[int, int, int]]:
    """(language, place in its text, tokens) of each row; checks that a row is `<s>` and text of one language."""
    found = []
    for row in restored(batch).numpy():
        text = row[1:][row[1:] != 1] - 4
        assert row[0] == 0 and (np.diff(text) == 1).all() and (row[1 + len(text) :] == 1).all()
        streams = data.streams[split].tolist()
        [language] = [j for j, (start, size) in enumerate(streams) if start <= text[0] < start + size]
        start, size = streams[language]
        assert text[-1] < start + size
        found.append((language, int(text[0] - start), len(text)))
    return found


def test_a_batch_is_what_it_says(many):
    data = MaskedData(many, T, T * B, mask_share=0.3)
    windows = np.lib.stride_tricks.sliding_window_view(data.tokens["train"], T - 1)
    for batch in steps(data, 20):
        assert batch.ids.shape == (B, T) and batch.real is None
        assert all(part.dtype == torch.int64 for part in batch if part is not None)
        assert len(batch.masked) == len(batch.targets) == len(batch.language)
        assert not np.isin(batch.targets, data.tokenizer.special).any()
        for number, row in enumerate(restored(batch).numpy()):
            places = np.flatnonzero((windows == row[1:]).all(axis=1))
            [language] = set(batch.language[batch.masked // T == number].tolist())
            start, size = data.streams["train"][language]
            assert any(start <= place <= start + size - (T - 1) for place in places)
            n = int((~np.isin(row, data.tokenizer.special)).sum())
            assert int((batch.masked // T == number).sum()) in (int(n * 0.3), int(n * 0.3) + 1)


def test_the_tokenizer_of_the_folder_is_xlmrs(many):
    data = MaskedData(many, T, T * B)
    assert isinstance(data.tokenizer, XLMR) and data.vocab_size == 500 == data.tokenizer.vocab_size
    assert data.languages == ["de", "sw", "zh-Hans"] and len(data.masking.ordinary) == 495


def test_a_language_is_drawn_by_its_smoothed_size(tmp_path):
    sizes = {"a": (102_400, 9), "b": (100, 9), "c": (1000, 0)}
    for exponent, weights in ((0.7, (102_400**0.7, 100**0.7, 1000**0.7)), (1, (102_400, 100, 1000)), (0, (1, 1, 1))):
        data = numbered_texts(tmp_path / str(exponent), sizes, exponent=exponent, micro_tokens=T * 100)
        drawn = Counter(language for batch in steps(data, 100) for language, *_ in windows_of(data, batch))
        for language, weight in enumerate(weights):
            assert within(drawn[language], 10_000, weight / sum(weights))
    # by the training tokens in valid too, and a language without text there has no share of it
    data = numbered_texts(tmp_path / "valid", sizes, exponent=0.7, micro_tokens=T * 100)
    drawn = Counter(language for batch in steps(data, 20, "valid") for language, *_ in windows_of(data, batch, "valid"))
    assert set(drawn) == {0, 1} and within(drawn[1], 2000, 1 / 129)  # 1024 ** 0.7 is 128


def test_windows_are_as_likely_everywhere_in_a_language(tmp_path):
    data = numbered_texts(tmp_path, {"a": (20, 9), "b": (400, 9)}, exponent=0, micro_tokens=T * 100)
    found = Counter(window for batch in steps(data, 60) for window in windows_of(data, batch))
    counts = [found[0, place, T - 1] for place in range(6)]  # 20 - 15 + 1 windows
    assert sum(counts) == sum(n for (language, *_), n in found.items() if language == 0)
    assert all(within(count, sum(counts), 1 / 6) for count in counts)
    assert {place for language, place, _ in found if language == 1} == set(range(386))


def test_masks_are_drawn_anew_for_every_micro_batch(many):
    data = MaskedData(many, 64, 640, replace=(1.0, 0.0), span=3.0)
    found = [data.batch("train", step, micro) for step in range(3) for micro in range(4)]
    assert len({tuple(batch.masked.tolist()) for batch in found}) == 12
    for batch in found:  # `replace` and `span` are heard
        assert (batch.ids.flatten()[batch.masked] == data.tokenizer.mask).all()
        assert (batch.masked.diff() == 1).sum() > 0.4 * len(batch.masked)


def test_a_language_shorter_than_a_window_is_padded(tmp_path):
    data = numbered_texts(tmp_path, {"a": (5, 9), "b": (300, 9)}, exponent=0, mask_share=1)
    seen = set()
    for batch in steps(data, 40):
        assert batch.ids.shape == (B, T)
        rows = windows_of(data, batch)
        lengths = [6 if language == 0 else T for language, *_ in rows]
        seen.update(lengths)
        expected = [row * T + place for row, length in enumerate(lengths) for place in range(length)]
        assert (batch.real is None and min(lengths) == T) or batch.real.tolist() == expected
        assert batch.masked.tolist() == [position for position in expected if position % T]
        assert batch.language.tolist() == [rows[position // T][0] for position in batch.masked.tolist()]
    assert seen == {6, T}


EVALUATED = {"a": (900, 100), "b": (900, 0), "c": (900, 47), "d": (900, 16), "e": (900, 15), "f": (900, 1)}


def reading(data, k: int = 0, **arguments) -> list[tuple[int, Masked]]:
    """(first, batch) of masking k of the valid split."""
    return [(first, batch) for turn, first, batch in data.eval_batches("valid", k + 1, **arguments) if turn == k]


def spread(batches: list[tuple[int, Masked]], count: int) -> np.ndarray:
    """(3, count) ids before and after masking and language (-1 where not masked) of the real tokens, by number."""
    table = np.full((3, count), -1)
    for first, batch in batches:
        real = np.arange(batch.ids.numel()) if batch.real is None else batch.real.numpy()
        places = first + np.arange(len(real))
        assert (table[0, places] == -1).all()
        table[0, places], table[1, places] = restored(batch).flatten()[real], batch.ids.flatten()[real]
        table[2, first + np.searchsorted(real, batch.masked.numpy())] = batch.language
    return table


def test_evaluation_reads_every_token_once_per_masking(tmp_path):
    data = numbered_texts(tmp_path, EVALUATED)
    count = data.eval_tokens("valid")
    assert count == 179 + 7 + 4 + 2 + 1 + 1  # the text and one <s> for each window
    assert [k for k, *_ in data.eval_batches("valid", 3)] == sorted([0, 1, 2] * len(reading(data)))
    tables = [spread(reading(data, k), count) for k in range(3)]
    for table in tables:
        assert sorted(table[0][table[0] != 0]) == list(range(4, 183)) and (table[0] == 0).sum() == 15
        assert (table[0] == tables[0][0]).all()
    assert not (tables[0][2] == tables[1][2]).all()
    firsts = [first for first, _ in reading(data)]
    assert firsts == sorted(firsts) and firsts[0] == 0
    for _, batch in reading(data):
        windows_of(data, batch, "valid")
        lengths = (restored(batch) != 1).sum(dim=1)
        assert lengths.max() == batch.ids.shape[1] and (lengths.diff() <= 0).all() and batch.ids.numel() <= T * B
        assert not np.isin(batch.targets, (0, 1)).any() and len(batch.masked)
    chosen = tables[0][2] >= 0
    ends = np.cumsum([size for _, size in EVALUATED.values()]) + 4
    assert (tables[0][2][chosen] == np.searchsorted(ends, tables[0][0][chosen], side="right")).all()


@pytest.mark.parametrize("change", [{"seed": 5}, {"micro_tokens": 7 * T}, {"micro_tokens": T}, {"micros_per_step": 3}])
def test_evaluation_depends_on_neither_seed_nor_batch_size(tmp_path, change):
    plain = numbered_texts(tmp_path / "a", EVALUATED)
    other = numbered_texts(tmp_path / "b", EVALUATED, **change)
    count = plain.eval_tokens("valid")
    for k in range(2):
        assert (spread(reading(plain, k), count) == spread(reading(other, k), count)).all()


@pytest.mark.parametrize("kind", [MaskedData, PairData])
def test_evaluation_is_dealt_to_processes(many, aligned, kind):
    data = kind(many if kind == MaskedData else aligned, 32, 64)
    whole = list(data.eval_batches("valid", maskings=3))
    ranks = [list(data.eval_batches("valid", maskings=3, rank=rank, world=4)) for rank in range(4)]
    assert sum(map(len, ranks)) == len(whole) > 8
    for i, (k, first, batch) in enumerate(whole):
        other = ranks[i % 4][i // 4]
        assert other[:2] == (k, first) and same(other[2], batch)


def test_limited_evaluation_takes_all_languages_evenly(tmp_path):
    data = numbered_texts(tmp_path, EVALUATED)

    def masked_rows(**arguments) -> dict[int, list[int]]:
        """The first token of a window -> its ids after masking."""
        rows = [row for _, batch in reading(data, **arguments) for row in zip(batch.ids, restored(batch))]
        return {int(original[1]): row[original != 1].tolist() for row, original in rows}

    full = masked_rows()
    # the first windows of a, c, d, e, f: 16 + 16 + 16 + 16 + 2; then the second of a and of c
    for limit, windows in ((66, 5), (81, 5), (98, 7), (1, 1), (10**6, 15)):
        some = masked_rows(max_tokens=limit)
        assert len(some) == windows and some.items() <= full.items()  # masked as in a full evaluation
    assert sorted(masked_rows(max_tokens=66)) == [4, 104, 151, 167, 182]
    assert data.eval_tokens("valid", max_tokens=66) == 66


def test_evaluation_masks_what_training_masks(tmp_path):
    data = numbered_texts(tmp_path, {"a": (900, 15_000)}, block_size=101, micro_tokens=1010)
    table = np.concatenate([spread(reading(data, k), data.eval_tokens("valid")) for k in range(3)], axis=1)
    old, new, language = table
    chosen = language == 0
    assert within(chosen.sum(), 45_000, 0.15)
    assert within((new == data.tokenizer.mask).sum(), chosen.sum(), 0.8)
    assert within((new == old)[chosen].sum(), chosen.sum(), 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# pairs


@pytest.fixture(scope="session")
def texts_of_pairs(tmp_path_factory) -> tuple[Path, dict]:
    """Files of two pairs of languages, English second in one and first in the other, and what they hold."""
    base = tmp_path_factory.mktemp("aligned")
    found = {}
    for name in ("de-en", "en-ru"):
        for split, count in (("train", 150), ("valid", 20), ("test", 15)):
            sides = [lines_of(f"{name} {split} {side}", count) for side in name.split("-")]
            sides = [[text + " 7" * (9 * (i % 6 == 0)) for i, text in enumerate(side)] for side in sides]
            for side, texts in zip(name.split("-"), sides):
                (base / f"{name}.{split}.{side}").write_text("".join(f"{text}\n" for text in texts))
            found[name, split] = list(zip(*sides))
    return base, found


@pytest.fixture(scope="session")
def aligned(tmp_path_factory, texts_of_pairs) -> Path:
    """A prepared corpus of those, never written to by a test."""
    return prepare("bitext", texts_of_pairs[0], pieces=400, out=tmp_path_factory.mktemp("pairs") / "prepared")


MIXED = [(n % 7 + 2, n % 5 + 2) for n in range(60)]  # tokens of both texts, their </s> included


def rows_of(data: PairData, batch: Masked) -> list[tuple[int, list[int], list[int]]]:
    """(pair, first, second) of every row; checks that it is `<s> first </s> second </s>` and padding."""
    found, width, index = [], batch.ids.shape[1], data.index["train"]
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


def test_held_out_pairs_are_kept_as_text_and_as_tokens(aligned, texts_of_pairs):
    data, pairs = PairData(aligned, 999, 999), {"valid": 0, "test": 0}
    for name in data.languages:
        for split in pairs:
            assert list(zip(*data.texts(split, name))) == texts_of_pairs[1][name, split]
            for both in texts_of_pairs[1][name, split]:
                rows = data.pairs(split, np.array([pairs[split]]))
                for start, size, ids in zip(rows.starts[0], rows.sizes[0], data.tokenizer.encode_batch(list(both))):
                    assert data.tokens[split][start : start + size].tolist() == [*ids, 2]
                pairs[split] += 1
    assert pairs == {"valid": 40, "test": 30}


def test_a_pair_is_drawn_by_the_smoothed_size_of_its_languages(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "POOL_MICROS", 20)
    data = numbered_pairs(tmp_path, {"a-b": MIXED, "c-d": MIXED[:25], "e-f": MIXED[:1]}, micro_tokens=400)
    drawn = Counter(pair for batch in steps(data, 300) for pair, *_ in rows_of(data, batch))
    total, shares = sum(drawn.values()), np.array([60, 25, 1]) ** 0.7
    shares /= shares.sum()
    for pair in range(86):
        share = shares[0] / 60 if pair < 60 else shares[1] / 25 if pair < 85 else shares[2]
        assert within(drawn[pair], total, share)


def test_the_budget_is_kept_and_padding_small(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [tuple(size) for size in rng.integers(2, 40, (700, 2)).tolist()]
    for budget in (64, 1000, 20_000):
        data = numbered_pairs(tmp_path / str(budget), {"a-b": sizes}, block_size=64, micro_tokens=budget)
        found = steps(data, batches.POOL_MICROS)
        assert all(batch.ids.numel() <= budget for batch in found)
        real = sum(batch.ids.numel() if batch.real is None else len(batch.real) for batch in found)
        padded = sum(batch.ids.numel() for batch in found)
        assert real > 0.95 * padded > (0.6 if budget == 64 else 0.95) * 0.95 * budget * len(found)
        widths = [batch.ids.shape[1] for batch in found]
        assert widths != sorted(widths) and widths != sorted(widths, reverse=True)


def test_pools_follow_one_another(aligned, monkeypatch):
    """A micro-batch of a later pool needs no earlier one, and pools differ."""
    monkeypatch.setattr(batches, "POOL_MICROS", 4)
    one, two = PairData(aligned, 32, 128), PairData(aligned, 32, 128)
    whole = steps(one, 12)
    for step in (11, 3, 4, 0, 8):
        assert same(two.batch("train", step), whole[step])
    assert len({restored(batch).numpy().tobytes() for batch in whole}) == 12


@pytest.mark.parametrize("block", [8, 15, 16])
def test_cutting_keeps_both_halves(tmp_path, block):
    sizes = [(one, two) for one in (2, 4, 5, 7, 8, 9, 30) for two in (2, 4, 5, 7, 8, 9, 30)]
    data = numbered_pairs(tmp_path, {"a-b": sizes}, block_size=block, mask_share=1.0)
    seen = set()
    for batch in steps(data, 150):
        assert batch.ids.shape[1] <= block
        for pair, first, second in rows_of(data, batch):
            seen.add(pair)
            one, two = sizes[pair]
            while one + two > block - 1:  # one token of the longer half at a time, of the second where they are equal
                one, two = (one - 1, two) if one > two else (one, two - 1)
            assert (len(first) + 1, len(second) + 1) == (one, two)
        assert not np.isin(batch.targets, (0, 1, 2)).any()
    assert seen == set(range(len(sizes)))


def test_halves_are_masked_independently(tmp_path):
    sizes = [(11, 21)] * 30  # 10 and 20 tokens to choose from: 1.5 and 3 of them
    data = numbered_pairs(tmp_path, {"a-b": sizes[:10], "c-d": sizes[10:]}, block_size=40, micro_tokens=400)
    firsts, places, found = [], Counter(), steps(data, 300)
    assert len({tuple(batch.masked.tolist()) for batch in found}) == 300  # drawn anew for each
    for batch in found:
        hidden = (batch.ids != restored(batch)).numpy()
        assert (batch.ids.flatten()[batch.masked] == data.tokenizer.mask).all()
        assert not hidden[:, [0, 11, 32]].any() and (hidden[:, 12:32].sum(axis=1) == 3).all()
        firsts += hidden[:, 1:11].sum(axis=1).tolist()
        places.update(np.flatnonzero(hidden.sum(axis=0)).tolist())
        rows = rows_of(data, batch)
        assert batch.language.tolist() == [int(rows[place // 33][0] >= 10) for place in batch.masked.tolist()]
    assert set(firsts) == {1, 2} and within(firsts.count(2), len(firsts), 0.5)
    assert len(places) == 30
    mixed = numbered_pairs(tmp_path / "m", {"a-b": sizes}, block_size=40, micro_tokens=400, replace=(0.5, 0.5))
    seen = torch.cat([batch.ids.flatten()[batch.masked] for batch in steps(mixed, 60)])
    assert within(int((seen == mixed.tokenizer.mask).sum()), len(seen), 0.5)


@pytest.mark.parametrize("span", [None, 3.0])
def test_halves_are_masked_in_spans(tmp_path, span):
    options = {"block_size": 80, "micro_tokens": 800, "mask_share": 0.2, "span": span}
    data = numbered_pairs(tmp_path, {"a-b": [(31, 41)] * 30}, **options)
    hidden = np.concatenate([(batch.ids != restored(batch)).numpy() for batch in steps(data, 50)])
    assert (hidden[:, 1:31].sum(axis=1) == 6).all() and (hidden[:, 32:72].sum(axis=1) == 8).all()
    runs = hidden.sum() / (np.diff(hidden.astype(int), axis=1, prepend=0) == 1).sum()
    assert runs > 2.2 if span else runs < 1.5


def masks(data: PairData, found: list[tuple[int, Masked]]) -> dict[int, list[int]]:
    """pair -> the tokens of it that are masked (each tells its own place)."""
    hidden = {}
    for _, batch in found:
        originals = restored(batch)
        for number, (pair, _, _) in enumerate(rows_of(data, batch)):
            assert pair not in hidden
            hidden[pair] = originals[number][batch.ids[number] != originals[number]].tolist()
    return hidden


SIZED = {"a-b": [*MIXED, (30, 3), (3, 30), (30, 30)], "c-d": MIXED[:20]}


def test_evaluation_reads_every_pair_once_per_masking(tmp_path):
    data = numbered_pairs(tmp_path, SIZED)
    found = [masks(data, reading(data, k)) for k in range(3)]
    assert all(sorted(turn) == list(range(83)) for turn in found) and found[0] != found[1] != found[2]
    expected, lengths = 0, []
    for first, batch in reading(data, 1):
        assert first == expected and batch.ids.numel() <= T * B
        expected += batch.ids.numel() if batch.real is None else len(batch.real)
        lengths += (restored(batch) != 1).sum(dim=1).tolist()
    assert expected == data.eval_tokens("valid") and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("change", [{"seed": 5}, {"micro_tokens": 200}, {"micros_per_step": 3}])
def test_evaluation_of_pairs_depends_on_neither_seed_nor_batch_size(tmp_path, change):
    plain = numbered_pairs(tmp_path / "a", SIZED)
    other = numbered_pairs(tmp_path / "b", SIZED, **change)
    assert masks(other, reading(other)) == masks(plain, reading(plain))
    count = plain.eval_tokens("valid")
    assert (spread(reading(other), count) == spread(reading(plain), count)).all()


def test_evaluation_masks_halves_independently(tmp_path):
    data = numbered_pairs(tmp_path, {"a-b": [(11, 11)] * 100}, block_size=32, micro_tokens=64, mask_share=0.1)
    places = [[(token - 4) % 11 for token in tokens] for tokens in masks(data, reading(data)).values()]
    assert all(len(both) == 2 for both in places)  # one of ten in each half
    assert within(sum(one == two for one, two in places), 100, 0.1)


@pytest.mark.parametrize("half", [0, 1])
def test_context_is_all_that_differs(tmp_path, half):
    data = numbered_pairs(tmp_path, SIZED, mask_share=0.3)
    both = masks(data, reading(data, 1))
    known, blind = (reading(data, 1, masked=(half,), shown=shown) for shown in ((0, 1), (half,)))
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
        assert torch.equal(one.masked // one.ids.shape[1], two.masked // two.ids.shape[1])
        assert torch.equal(restored(one).flatten()[one.masked], restored(two).flatten()[two.masked])
    assert 0 < total < data.eval_tokens("valid")


def test_limited_evaluation_takes_all_pairs_evenly(tmp_path):
    data = numbered_pairs(tmp_path, SIZED)
    full = masks(data, reading(data))
    some = masks(data, reading(data, max_tokens=30))
    assert sorted(some) == [0, 1, 63, 64] and some.items() <= full.items()
    assert data.eval_tokens("valid", 30) == 2 * (5 + 7)
    assert len(masks(data, reading(data, max_tokens=1))) == 1


def test_damaged_pairs(aligned, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(aligned, tmp_path / "copy"))
    index = copy / "valid.idx"
    content = index.read_bytes()
    index.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"valid\.idx has changed"):
        PairData(copy, T, T)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"valid\.idx has 640 bytes instead of 648"):
        patch.setattr(batches, "HASHED_UP_TO", 0)
        PairData(copy, T, T)
    index.write_bytes(content[:-8] + b"\1" * 8)
    with pytest.raises(ValueError, match=r"valid\.idx has changed"):
        PairData(copy, T, T)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.idx is missing"):
        PairData(copy, T, T)


# ---------------------------------------------------------------------------------------------------------------------
# translation


def translations_of(batch: Translation) -> list[tuple[list[int], list[int]]]:
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
    sources, read = found
    written = [ids.tolist() for ids in batch.labels.split([len(row) for row in read])]
    for source, before, after in zip(sources, read, written):
        assert before == [0, *after[:-1]] and after[-1] == 2 and source[-1] == 2
        assert source.count(2) == after.count(2) == 1
    assert batch.tokens == sum(map(len, sources)) + sum(map(len, read))
    return list(zip(sources, written))


def one_pass(data: TranslationData, number: int = 0) -> list[Translation]:
    """The micro-batches of a pass; its length is found by adding up pairs."""
    pairs = sum(len(own) for own in data.fitting["train"])
    found, step = [], 0
    for _ in range(number + 1):
        found = []
        while sum(len(batch.source) for batch in found) < pairs:
            found.append(data.batch("train", step))
            step += 1
    return found


def test_a_pass_has_each_pair_of_the_corpus_once(aligned, texts_of_pairs):
    data = TranslationData(aligned, 32, 128, seed=3)
    known = set()
    for name in ("de-en", "en-ru"):
        for pair in texts_of_pairs[1][name, "train"]:
            source, target = pair if name == "de-en" else pair[::-1]  # into English, wherever it stands
            known.add((*data.tokenizer.encode_batch([source])[0], 2, *data.tokenizer.encode_batch([target])[0], 2))
    orders = []
    for number in range(3):
        found = one_pass(data, number)
        assert all(batch.source.numel() + batch.target.numel() <= 128 for batch in found)
        real = sum(batch.tokens for batch in found)
        assert real > 0.85 * sum(batch.source.numel() + batch.target.numel() for batch in found)
        rows = [(*source, *target) for batch in found for source, target in translations_of(batch)]
        assert len(rows) == 300 and set(rows) == known
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2]
    widths = [batch.source.shape[1] for batch in found]
    assert widths != sorted(widths) and widths != sorted(widths, reverse=True)
    two = TranslationData(aligned, 32, 128, 2, seed=3)
    assert same(two.batch("train", 3, 1), data.batch("train", 7))  # the same sequence, however it is dealt


def test_pairs_of_the_same_lengths_meet_others_in_the_next_pass(tmp_path):
    data = numbered_pairs(tmp_path, {"a-en": [(2, 2)] * 80}, TranslationData, micro_tokens=40)
    together = [{frozenset(batch.source[:, 0].tolist()) for batch in one_pass(data, number)} for number in range(2)]
    assert set.union(*map(set, together[0])) == set.union(*map(set, together[1])) == set(range(4, 324, 4))
    assert not together[0] & together[1]


def test_a_smoothed_pass_has_every_language_in_its_share_and_every_pair_in_turn(tmp_path):
    sizes = {"a-en": [(2, 2)] * 80, "b-en": [(3, 3)] * 20}
    data = numbered_pairs(tmp_path, sizes, TranslationData, exponent=0.5, micro_tokens=40)
    # sqrt(80) : sqrt(20) is 2 : 1, of 100 pairs
    drawn = Counter(int(source[0]) for batch in steps(data, 5 * 12) for source in batch.source)
    rows = Counter("a" if token < 4 + 80 * 4 else "b" for token in drawn.elements())
    assert within(rows["b"], sum(rows.values()), 1 / 3) and len(drawn) == 100
    counts = [drawn[4 + 4 * pair] for pair in range(80)]
    assert max(counts) - min(counts) <= 2


def test_evaluation_has_every_pair_once_on_any_number_of_processes(aligned):
    data = TranslationData(aligned, 32, 128)
    whole = list(data.eval_batches("valid"))
    rows = Counter(str(row) for batch in whole for row in translations_of(batch))
    assert len(rows) == 40 and set(rows.values()) == {1}
    dealt = [list(data.eval_batches("valid", rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, dealt)) == len(whole)
    assert all(same(dealt[i % 3][i // 3], batch) for i, batch in enumerate(whole))
    some = [row for batch in data.eval_batches("valid", 80) for row in translations_of(batch)]
    assert 0 < len(some) < 10 and sum(len(source) + len(target) for source, target in some) <= 80
    assert sum(len(batch.source) for batch in data.eval_batches("valid", 1)) == 1


def test_long_pairs_are_left_out_and_counted(aligned):
    whole = TranslationData(aligned, 64, 128)
    assert whole.left_out == {"train": 0, "valid": 0, "test": 0}
    longest = {}  # split -> the longer side of every pair, with </s>
    for split in SPLITS:
        ends = np.flatnonzero(whole.tokens[split] == 2) + 1  # of each text
        longest[split] = np.diff(ends, prepend=0).reshape(-1, 2).max(axis=1).tolist()
    limit = int(np.median(longest["valid"])) + 2
    data = TranslationData(aligned, limit, 128)
    assert data.left_out == {split: sum(size > limit for size in sizes) for split, sizes in longest.items()}
    assert min(data.left_out.values()) > 0
    rows = [row for batch in one_pass(data) for row in translations_of(batch)]
    assert max(len(side) for row in rows for side in row) <= limit
    assert len({str(row) for row in rows}) == len(rows) == 300 - data.left_out["train"]
    assert sum(len(batch.source) for batch in data.eval_batches("valid")) == 40 - data.left_out["valid"]
    assert len(data.texts("valid", "de-en")[0]) == 20  # scores are of all sentences
    with pytest.raises(ValueError, match="all (train|valid) pairs of .* are longer than block_size 8 tokens"):
        TranslationData(aligned, 8, 128)


def test_one_long_side_is_enough_to_leave_a_pair_out(tmp_path):
    data = numbered_pairs(tmp_path, {"a-en": [(9, 2), (8, 8), (2, 9), (3, 4)]}, TranslationData, block_size=8)
    assert data.left_out == dict.fromkeys(SPLITS, 2)
    assert sorted(len(source) for source, _ in translations_of(next(data.eval_batches("valid")))) == [3, 8]


def test_held_out_texts_are_kept_as_they_were_written(aligned, texts_of_pairs, tmp_path):
    data = TranslationData(aligned, 32, 128)
    for split in ("valid", "test"):
        german, english = map(list, zip(*texts_of_pairs[1]["de-en", split]))
        assert data.texts(split, "de-en") == (german, english)
        english, russian = map(list, zip(*texts_of_pairs[1]["en-ru", split]))
        assert data.texts(split, "en-ru") == (russian, english)  # the source is what is not English
    copy = Path(shutil.copytree(aligned, tmp_path / "copy"))
    (copy / "test.jsonl").write_text((copy / "test.jsonl").read_text().replace("1", "2"))
    with pytest.raises(ValueError, match=r"test\.jsonl has changed"):
        TranslationData(copy, 32, 128)
    (copy / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl is missing; .* prepare it again"):
        TranslationData(copy, 32, 128)


def test_bad_arguments_of_translation(aligned):
    with pytest.raises(ValueError, match="pairs without the language 'fr': de-en, en-ru; see --target"):
        TranslationData(aligned, 32, 128, target="fr")
    with pytest.raises(ValueError, match="micro_tokens 40 must hold a pair of two times block_size 32"):
        TranslationData(aligned, 32, 40)


def test_sources_to_translate_come_longest_first_within_the_budget():
    ids = [[5] * n for n in (3, 9, 0, 4, 4, 30)]
    found = list(source_batches(ids, pad=1, eos=2, micro_tokens=10))
    assert [numbers for numbers, _ in found] == [[5], [1], [3, 4], [0, 2]]  # 31, 10, 2 x 5 and 2 x 4 tokens
    for numbers, (source, real) in found:
        rows = [[*ids[number], 2] for number in numbers]
        assert source.tolist() == [row + [1] * (source.shape[1] - len(row)) for row in rows]
        flat = [i * source.shape[1] + j for i, row in enumerate(rows) for j in range(len(row))]
        assert (list(range(source.numel())) if real is None else real.tolist()) == flat
    assert list(source_batches([], pad=1, eos=2, micro_tokens=12)) == []
