"""Masks for masked language models: which tokens a model has to predict, and what it is shown in their places."""

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.tokenizers import XLMR

DRAWS = 5  # random numbers that masking uses for each token


class Masking:
    """Chooses a share of the tokens of each part (a text in a batch) and hides them.

    Of a part's n tokens that are not special n * share are chosen: the number is rounded up or down at random, so that
    its mean is exact, but it is at least one where n is. With `span` they are chosen in spans, whose lengths follow a
    geometric distribution with that mean. replace: the probabilities that a chosen token is replaced by the mask token,
    and that it is replaced by a random token; otherwise it stays as it is.
    """

    def __init__(self, tokenizer: XLMR, share: float, replace: tuple, span: float | None):
        self.share = share
        self.replace = replace
        self.span = span
        self.mask = tokenizer.mask
        self.special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self.special[list(tokenizer.special)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def choose(self, ids: ndarray, part: ndarray, random: ndarray) -> ndarray:
        """(N,) bool: which of the tokens are chosen, those with the lowest random turns of a part.

        With spans, a span begins at every token, and a token has the lowest turn of the spans over it; the last chosen
        span may be cut.

        ids: (N,); part: (N,) the number of each token's part, ascending; random: (DRAWS, N) uniform in [0, 1).
        """
        turn, length, rounding = random[:3]
        maskable = ~self.special[ids]
        turn = np.where(maskable, turn, np.inf)
        if self.span is not None:
            lengths = 1 + np.floor(np.log(1 - length) / np.log(1 - 1 / self.span))  # geometric
            turn = span_turns(turn, lengths, part)
            turn = np.where(maskable, turn, np.inf)
        n = np.bincount(part, maskable)  # of each part
        round_up = np.empty(len(n))
        round_up[part] = rounding  # one number for each part: that of its last token
        count = np.floor(n * self.share + round_up)
        count = np.maximum(count, n > 0)
        order = np.lexsort((turn, part))
        chosen = np.empty(len(part), dtype=bool)
        chosen[order] = places(part) < count[part]  # the lowest turns of each part
        return chosen

    def hide(self, ids: ndarray, chosen: ndarray, random: ndarray) -> ndarray:
        """(N,) the ids, with the chosen ones replaced; the arguments are those of `choose`."""
        luck, other = random[3:]
        becomes_mask, becomes_random = self.replace
        which = other * len(self.ordinary)
        drawn = self.ordinary[which.astype(np.int64)]
        shown = np.where(luck < becomes_mask + becomes_random, drawn, ids)
        shown = np.where(luck < becomes_mask, self.mask, shown)
        return np.where(chosen, shown, ids)

    def odds(self, shown: Tensor) -> Tensor:
        """How much more probable it is to see the tokens `shown` in chosen places where they are right than elsewhere.

        By Bayes' rule, the probability that a shown token is right is multiplied by this. It is 1 for the mask token.
        """
        becomes_mask, becomes_random = self.replace
        stays = 1 - becomes_mask - becomes_random
        odds = 1 + len(self.ordinary) * stays / max(becomes_random, 1e-9)
        return torch.where(shown == self.mask, 1.0, odds).double()


def places(part: ndarray) -> ndarray:
    """(N,) how many entries of the same part come before each; part: (N,) the number of its part, ascending."""
    return np.arange(len(part)) - part.searchsorted(part)


def span_turns(turn: ndarray, lengths: ndarray, part: ndarray) -> ndarray:
    """(N,) the lowest turn of the spans over each token, where a span of lengths[i] tokens begins at each token i."""
    lowest = turn.copy()
    for back in range(1, min(int(lengths.max()), len(turn))):
        same_part = part[:-back] == part[back:]
        reaches = same_part & (lengths[:-back] > back)
        reaching = np.where(reaches, turn[:-back], np.inf)
        lowest[back:] = np.minimum(lowest[back:], reaching)
    return lowest
