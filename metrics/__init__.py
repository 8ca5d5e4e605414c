"""What a training measures: perplexity, and in the modules routing, FLOPs, trivial baselines, scores of tasks."""

import math


def perplexity(loss: float) -> float:
    """exp(loss) for a mean cross entropy in nats, finite even after divergence."""
    return math.exp(min(loss, 700))


def in_perplexity(loss: float) -> str:
    return f"perplexity {perplexity(loss):.2f}"


def bits_per_byte(loss: float, counts: dict) -> float:
    """From nats per token, comparable across tokenizers; counts: the `tokens` and `bytes` of the text."""
    return loss * counts["tokens"] / counts["bytes"] / math.log(2)
