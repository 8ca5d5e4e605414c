"""Times of calls, taken in turns."""

import time
from collections.abc import Callable

import torch
from tqdm import tqdm


def in_turns(calls: dict[object, Callable], context, rounds: int) -> dict[object, list]:
    """Times each call in turn, round by round -> milliseconds per call and round.

    The first round is a warm-up. The order reverses every round, so that no call always follows the same one.
    """
    times = {name: [] for name in calls}
    order = list(calls)
    for turn in tqdm(range(1 + rounds), desc="timing", unit="round", leave=False, disable=None):
        for name in order:
            start = clock(context)
            calls[name]()
            if turn > 0:
                times[name].append(clock(context) - start)
        order.reverse()
    return times


def clock(context) -> float:
    """Milliseconds, read after the device has finished all queued work."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()
