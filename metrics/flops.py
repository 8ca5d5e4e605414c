"""Parameters and FLOPs, counted from a model's weights. Letters as in model.py.

Only matrix products count, at two FLOPs per multiply-add. A training step costs three forward passes.
"""

from torch import nn


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_parameters(model: nn.Module) -> dict[str, float]:
    """`total`, and `active`: those that one token uses at full capacity."""
    total = active = numel(model)
    for moe in model.moe_layers:
        active -= numel(moe.experts) * (1 - served_rows(moe) / moe.router.E)
    return {"total": total, "active": active}


def served_rows(moe: nn.Module) -> float:
    """Experts per token at full capacity: the smallest of the router's K, gamma and E."""
    router = moe.router
    return min(router.K, moe.capacity_factor, router.E)


def row_flops(moe: nn.Module) -> float:
    """Forward FLOPs per token of one expert."""
    return 2 * sum(p.numel() for p in moe.experts.parameters() if p.dim() == 3) / moe.router.E  # (E, F, D) each


def moe_flops(moe: nn.Module) -> float:
    """Forward FLOPs per token of one sparse layer, router and experts, at full capacity."""
    sizes = [p.numel() for p in moe.router.parameters() if p.dim() == 2]
    return 2 * sum(sizes) + served_rows(moe) * row_flops(moe)


def matrix_flops(body: nn.Module) -> float:
    """Forward FLOPs per token of a module without its attention products."""
    flops = 0.0
    for name, module in body.named_modules():
        if hasattr(module, "router"):
            flops += moe_flops(module)
        elif isinstance(module, nn.Linear) and "router" not in name:
            flops += 2 * module.weight.numel()
    return flops


def flops_per_token(body: nn.Module, config, head: float) -> float:
    """Forward FLOPs per token. Attention counts the full T x T matrix, as is usual for MFU.

    body: the module that every token passes through; head: FLOPs of the output layer per token.
    """
    attention = 4 * config.block_size * config.n_embd
    return matrix_flops(body) + config.n_layer * attention + head


def as_served(model: nn.Module, work: float, layers: list[dict], tokens: float = 1) -> float:
    """Adjusts `work`, FLOPs at full capacity, to the experts that served each token in an evaluation.

    layers: statistics of the sparse layers; tokens: how many tokens each layer processes for this work.
    """
    for moe, layer in zip(model.moe_layers, layers):
        work += tokens * (layer["served"] - served_rows(moe)) * row_flops(moe)
    return work


def masked_head_flops(model: nn.Module) -> float:
    """Forward FLOPs of a MaskedLM's head per masked token: the dense layer and the logits."""
    D = model.config.n_embd
    return 2 * D * (D + model.vocab_size)


def translation_flops(model: nn.Module, N: float, T: float) -> float:
    """Forward FLOPs of one pair: a source of N tokens and a translation of T tokens."""
    config = model.config
    D, M = config.n_embd, config.decoder_layers
    source = matrix_flops(nn.ModuleList([model.encoder, model.moes]))
    target = matrix_flops(model.decoder)
    cross = 2 * M * D * 2 * D  # cross-attention keys and values of one source token, in all M blocks
    scores = config.n_layer * N * N + M * T * (T + N)  # attention scores per head
    logits = 2 * D * model.vocab_size
    return N * (source + cross) + T * (target - cross + logits) + 4 * D * scores
