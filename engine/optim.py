"""The optimizer and learning rate schedules."""

import math

import torch


def adamw(model: torch.nn.Module, config) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings, not norms, biases or scalars (the experts' are told by their names).

    Routers learn at `router_lr` times the rate of the rest, and what distances add to attention at `distance_lr` times,
    where a config has these.
    """
    of_routers = getattr(config, "router_lr", 1.0)
    of_distances = getattr(config, "distance_lr", 1.0)
    groups = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        is_norm = "ln_" in name or "norms." in name
        is_bias = name.endswith(("bias", "b_in", "b_out"))
        decay = 0.0 if p.dim() < 2 or is_norm or is_bias else config.weight_decay
        times = of_routers if "router." in name else of_distances if "distance." in name else 1.0
        group = groups.setdefault((decay, times), {"params": [], "weight_decay": decay, "times": times})
        group["params"].append(p)
    return torch.optim.AdamW(
        list(groups.values()),
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        eps=config.eps,
        fused=True,
    )


def clip_gradients(model: torch.nn.Module, limit: float):
    """Scales the gradients down to a norm of `limit`, if theirs is larger; limit 0 does not."""
    if limit:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float):
    for group in optimizer.param_groups:
        group["lr"] = value * group["times"]


def cosine(step: int, steps: int, warmup: float, peak: float, floor: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a cosine down to `floor`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    share = (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * share


def linear(step: int, steps: int, warmup: float, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a line down to 0 at `steps`."""
    rising = max(1, round(warmup * steps))
    falling = max(1, steps - rising)
    return peak * min((step + 1) / rising, (steps - step) / falling)


def inverse_sqrt(step: int, warmup: int, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up to `peak` in `warmup` steps, then falling as 1 / sqrt(step)."""
    rising = (step + 1) / warmup
    falling = math.sqrt(warmup / (step + 1))
    return peak * min(rising, falling)
