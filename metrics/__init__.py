"""What a training measures: perplexity, and in the modules routing, FLOPs, trivial baselines, scores of tasks."""

import math
import os
from collections.abc import Iterable

from tqdm import tqdm


def perplexity(loss: float) -> float:
    """exp(loss) for a mean cross entropy in nats, finite even after divergence."""
    return math.exp(min(loss, 700))


def in_perplexity(loss: float) -> str:
    return f"perplexity {perplexity(loss):.2f}"


def bits_per_byte(loss: float, counts: dict) -> float:
    """From nats per token, comparable across tokenizers; counts: the `tokens` and `bytes` of the text."""
    nats = loss * counts["tokens"] / counts["bytes"]
    return nats / math.log(2)


def progress(steps: Iterable, words: str) -> tqdm:
    """Iterates over the steps of a measurement, with a progress bar on rank 0's terminal."""
    return tqdm(steps, words, leave=False, delay=1, disable=int(os.environ.get("RANK", 0)) > 0 or None)
