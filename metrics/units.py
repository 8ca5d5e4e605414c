"""Losses in units that can be compared, and intervals."""

import math

import torch
from torch import Tensor


def perplexity(loss: float) -> float:
    """exp(loss) for a mean cross entropy in nats, finite even after divergence."""
    return math.exp(min(loss, 700))


def in_perplexity(loss: float) -> str:
    return f"perplexity {perplexity(loss):.2f}"


def bits_per_byte(loss: float, counts: dict) -> float:
    """From nats per token, comparable across tokenizers; counts: the `tokens` and `bytes` of the text."""
    nats = loss * counts["tokens"] / counts["bytes"]
    return nats / math.log(2)


def bootstrap(totals: Tensor, sizes: Tensor) -> list[float]:
    """95% bootstrap interval of sum(totals) / sum(sizes), (R,) each, resampling rows with replacement."""
    rng, R = torch.Generator().manual_seed(0), len(sizes)
    ratios = []
    for _ in range(1000):
        rows = torch.randint(R, (R,), generator=rng)
        ratio = totals[rows].sum() / sizes[rows].sum()
        ratios.append(ratio.double())
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return torch.stack(ratios).quantile(ends).tolist()
