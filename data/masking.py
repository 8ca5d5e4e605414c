"""Masks for masked language models: which tokens a model has to predict, and what it sees in their place."""

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.tokenizers import XLMR

DRAWS = 5  # random numbers that masking uses for each token


class Masking:
    """Chooses a share of the tokens of each part (a text in a batch) and hides them.

    Of a part's n tokens that are not special, n * share are chosen, rounded up or down at random so that the mean is
    exact, and at least one if n > 0. replace: the probabilities that a chosen token is replaced by the mask token and
    by a random token; otherwise it stays unchanged.
    """

    def __init__(self, tokenizer: XLMR, share: float, replace: tuple):
        self.share, self.replace = share, replace
        self.mask = tokenizer.mask
        self.special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self.special[list(tokenizer.special)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def choose(self, ids: ndarray, part: ndarray, random: ndarray) -> ndarray:
        """(N,) bool: the chosen tokens, those with the lowest random ranks in their part.

        ids: (N,); part: (N,) the number of each token's part, ascending; random: (DRAWS, N) uniform in [0, 1).
        """
        rank, _, rounding = random[:3]  # without the second, masks would differ from those of published results
        maskable = ~self.special[ids]
        rank = np.where(maskable, rank, np.inf)
        n = np.bincount(part, maskable)  # maskable tokens of each part
        round_up = np.empty(len(n))
        round_up[part] = rounding  # one number for each part: its last token's
        count = np.maximum(np.floor(n * self.share + round_up), n > 0)
        order = np.lexsort((rank, part))
        chosen = np.empty(len(part), dtype=bool)
        chosen[order] = index_within(part) < count[part]  # the lowest ranks of each part
        return chosen

    def hide(self, ids: ndarray, chosen: ndarray, random: ndarray) -> ndarray:
        """(N,) the ids with the chosen ones replaced; ids and random as in `choose`."""
        action, token = random[3:]
        becomes_mask, becomes_random = self.replace
        random_ids = self.ordinary[(token * len(self.ordinary)).astype(np.int64)]
        shown = np.where(action < becomes_mask + becomes_random, random_ids, ids)
        shown = np.where(action < becomes_mask, self.mask, shown)
        return np.where(chosen, shown, ids)

    def odds(self, shown: Tensor) -> Tensor:
        """How many times likelier each token in `shown` is at a chosen position if it is the right one.

        By Bayes' rule, this factor multiplies the probability that the token is right. It is 1 for the mask token.
        """
        becomes_mask, becomes_random = self.replace
        odds = 1 + len(self.ordinary) * (1 - becomes_mask - becomes_random) / max(becomes_random, 1e-9)
        return torch.where(shown == self.mask, 1.0, odds).double()


def index_within(part: ndarray) -> ndarray:
    """(N,) each entry's index within its part; part: (N,) the number of its part, ascending."""
    return np.arange(len(part)) - part.searchsorted(part)
