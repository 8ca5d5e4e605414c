"""Masking: how many tokens are chosen, which, and what is shown in their places."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from data.masking import DRAWS, Masking, span_turns

V, MASK = 1000, 999
SPECIAL = (0, 1, 2, 3, MASK)
TOKENIZER = SimpleNamespace(special=SPECIAL, mask=MASK, vocab_size=V)


def within(count: int, n: int, p: float) -> bool:
    """Five standard deviations of a binomial: off by chance once in two million."""
    return abs(count - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def mask(ids: np.ndarray, share, replace=(1.0, 0.0), span=None, seed=0) -> tuple:
    """The ids (B, T) after masking, and which were chosen, where every row is a part."""
    masking = Masking(TOKENIZER, share, replace, span)
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


def test_15_percent_are_chosen_in_the_mean_and_no_special_ones(masked):
    ids, _, chosen = masked
    maskable = ~np.isin(ids, SPECIAL)
    assert not (chosen & ~maskable).any()
    count = chosen.sum(axis=1)
    for rows, size in ((slice(0, None, 2), 88), (slice(1, None, 2), 99)):
        few = int(size * 0.15)
        assert set(count[rows]) == {few, few + 1} and (maskable[rows].sum(axis=1) == size).all()
        assert within((count[rows] > few).sum(), 2000, size * 0.15 % 1)
    assert all(within(chosen[:, place].sum(), 4000, 0.15) for place in (1, 39, 41, 89))


def test_80_percent_become_the_mask_and_10_a_random_token(masked):
    ids, hidden, chosen = masked
    assert (hidden[~chosen] == ids[~chosen]).all()
    new, old = hidden[chosen], ids[chosen]
    assert within((new == MASK).sum(), len(new), 0.8)
    drawn = new[(new != MASK) & (new != old)]
    assert within(len(drawn), len(new), 0.1 * (1 - 1 / 995)) and not np.isin(drawn, SPECIAL).any()
    assert within((drawn < 500).sum(), len(drawn), 496 / 995)


def test_at_least_one_is_chosen_where_there_is_any():
    ids = np.full((3, 8), 2)
    ids[1, 5] = ids[2] = 7
    for seed in range(20):
        hidden, chosen = mask(ids, 0.15, seed=seed)
        assert np.flatnonzero(chosen[1]).tolist() == [5] and not chosen[0].any() and chosen[2].sum() in (1, 2)
        assert ((hidden == MASK) == chosen).all()
    assert (mask(ids, 1.0)[1] == (ids == 7)).all()


def test_spans():
    ids = np.full((400, 1000), 9)
    ids[:, ::100] = 2
    _, chosen = mask(ids, 0.02, span=3.0)
    count = chosen.sum(axis=1)
    assert not chosen[:, ::100].any() and set(count) <= {19, 20}  # 990 * 0.02 = 19.8
    assert within((count == 20).sum(), 400, 0.8)
    runs = Counter()
    for row in chosen:
        runs.update(map(len, "".join(" x"[one] for one in row.astype(int)).split()))
    # Spans hardly touch one another. n tokens are 1 + (n - 1) / 3 spans in the mean, of which the last is cut.
    mean = chosen.sum() / runs.total()
    assert mean == pytest.approx(19.8 / (1 + 18.8 / 3), abs=0.1)
    assert runs[1] / runs.total() == pytest.approx(1 / 3, abs=0.06) and max(runs) > 8
    lengths, part = np.array([4, 1, 1, 2, 1]), np.array([0, 0, 1, 1, 1])  # a span ends with its part
    assert span_turns(np.array([0.1, 0.9, 0.8, 0.2, 0.7]), lengths, part).tolist() == [0.1, 0.1, 0.8, 0.2, 0.2]
