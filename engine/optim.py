"""The optimizer and learning rate schedules."""

import math

import torch


def adamw(model: torch.nn.Module, config) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices and embeddings, not for norms, biases or scalars.

    If the config has them, `router_lr` and `rel_bias_lr` multiply the learning rate of routers and of the relative
    position bias.
    """
    router_lr = getattr(config, "router_lr", 1.0)
    rel_bias_lr = getattr(config, "rel_bias_lr", 1.0)
    groups, betas = {}, (0.9, config.beta2)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        is_norm = "ln_" in name or "norms." in name  # by name, since those of experts are matrices
        is_bias = name.endswith(("bias", "b_in", "b_out"))
        decay = 0.0 if p.dim() < 2 or is_norm or is_bias else config.weight_decay
        times = router_lr if "router." in name else rel_bias_lr if "rel_bias." in name else 1.0
        group = groups.setdefault((decay, times), {"params": [], "weight_decay": decay, "times": times})
        group["params"].append(p)
    return torch.optim.AdamW(groups.values(), lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def clip_gradients(model: torch.nn.Module, limit: float):
    """Clips the norm of the gradient to `limit`; 0: no clipping."""
    if limit:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float):
    for group in optimizer.param_groups:
        group["lr"] = value * group["times"]


def cosine(step: int, steps: int, warmup: float, peak: float, floor: float) -> float:
    """Learning rate of `step` (from 0): linear warm-up for a share of the steps, then cosine decay to `floor`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    share = (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * share


def linear(step: int, steps: int, warmup: float, peak: float) -> float:
    """Learning rate of `step` (from 0): linear warm-up for a share of the steps, then linear decay to 0 at `steps`."""
    rising = max(1, round(warmup * steps))
    falling = max(1, steps - rising)
    return peak * min((step + 1) / rising, (steps - step) / falling)


def inverse_sqrt(step: int, warmup: int, peak: float) -> float:
    """Learning rate of `step` (from 0): linear warm-up for `warmup` steps, then decay as 1 / sqrt(step)."""
    rising = (step + 1) / warmup
    falling = math.sqrt(warmup / (step + 1))
    return peak * min(rising, falling)
