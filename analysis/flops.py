"""Parameters and FLOPs, counted from the weights of a model. Letters as in model.py.

Products alone count, two FLOPs a multiply-add; a training step costs three forward passes.
"""

from torch import nn


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_parameters(model: nn.Module) -> dict[str, float]:
    """`total`, `active` (what one token passes through at full capacity) and `moe` (experts and routers)."""
    total = active = numel(model)
    sparse = 0
    for moe in model.moe_layers:
        experts = numel(moe.experts) + numel(moe.norms)
        active -= experts * (1 - served_rows(moe) / moe.router.E)
        sparse += numel(moe)
    return {"total": total, "active": active, "moe": sparse}


def served_rows(moe: nn.Module) -> float:
    """Rows per token that the capacity leaves room for: at most K, gamma and E."""
    return min(moe.router.max_choices, moe.gamma, moe.router.E)


def moe_flops(moe: nn.Module) -> float:
    """Forward FLOPs of one token in one sparse layer at full capacity: router and experts.

    What is really spent on experts is `served` of the routing statistics over `served_rows` of it.
    """
    router = sum(p.numel() for p in moe.router.parameters() if p.dim() == 2)
    experts = sum(p.numel() for p in moe.experts.parameters() if p.dim() == 3)  # (E, F, D) each
    return 2 * (router + served_rows(moe) * experts / moe.router.E)


def matrix_flops(body: nn.Module) -> dict[str, float]:
    """Forward FLOPs of a token that passes through all of a module: `total` and, of that, `moe`."""
    moe = dense = 0.0
    for name, module in body.named_modules():
        if hasattr(module, "router"):
            moe += moe_flops(module)
        elif isinstance(module, nn.Linear) and "router" not in name:
            dense += 2 * module.weight.numel()
    return {"total": dense + moe, "moe": moe}


def flops_per_token(body: nn.Module, config, head: float) -> dict[str, float]:
    """Forward FLOPs of one token: `total` and, of that, `moe`.

    body: the module whose matrices every token passes through; head: FLOPs of the output layer a token. Attention
    counts the full T x T, as MFU figures do.
    """
    flops = matrix_flops(body)
    flops["total"] += 4 * config.n_layer * config.block_size * config.n_embd + head
    return flops


def masked_head_flops(model: nn.Module) -> float:
    """Forward FLOPs of a MaskedLM's output layer, of a masked token: its dense layer and the logits."""
    D = model.config.n_embd
    return 2 * D * (D + model.vocab_size)


def translation_flops(model: nn.Module, N: float, T: float) -> dict[str, float]:
    """Forward FLOPs of one pair, a source of N tokens and a translation of T: `total` and, of that, `moe`."""
    config = model.config
    D, M = config.n_embd, config.decoder_layers
    source = matrix_flops(nn.ModuleList([model.encoder, model.moes]))
    target = matrix_flops(model.decoder)
    cross = 2 * M * D * 2 * D  # keys and values of a token of the source, in all blocks of the decoder
    total = N * (source["total"] + cross) + T * (target["total"] - cross)
    pairs = config.n_layer * N * N + M * T * (T + N)  # of tokens, one of which attends to the other
    total += 4 * D * pairs
    total += 2 * D * model.vocab_size * T  # logits
    return {"total": total, "moe": N * source["moe"] + T * target["moe"]}


def electra_flops(config, discriminator: bool, vocabulary: int, lookup: bool) -> float:
    """Training FLOPs of one token of XLM-E's generator or discriminator, as the script that came with ELECTRA counts.

    Every operation counts, the backward pass as much as the forward one, and a masked token is one of 6.4; with
    `lookup` an embedding is taken for a product with the whole table. Of dense networks, as the paper's are.
    """
    D, T, V = config.n_embd, config.block_size, vocabulary
    inner, H = config.ffn_size, config.n_head
    # Operations a number: norm 5, softmax 5, dropout 4, GELU 8.
    scores = 4 * D * T + (5 + 4 + 1) * T * H
    attention = 8 * D * D + scores + (5 + 4) * D + 5  # one norm of 5, not of 5 D: sic
    ffn = 4 * D * inner + (8 + 1) * inner + (2 + 4 + 5) * D
    inputs = 2 * D * (T + 2) + (2 + 5 + 4) * D
    if lookup:
        inputs += 2 * D * V
    if discriminator:
        head = 2 * D * D + (3 + 8) * D
    else:
        hidden = 2 * D * D + (1 + 8 + 5) * D
        logits = 2 * D * V + (5 + 2) * V
        head = (hidden + logits) / 6.4
    return 2 * (config.n_layer * (attention + ffn) + inputs + head)
