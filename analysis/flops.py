"""Parameters and FLOPs, counted from the weights of a model; XLM-E's tables 3 and 4. Letters as in model.py.

Only matrix products count, with two FLOPs a multiply-add, of whatever matrices there are. A training step costs three
forward passes.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from engine.table import markdown_table
from model import Encoder


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_parameters(model: nn.Module) -> dict[str, float]:
    """`total`, and `active`: what one token passes through at full capacity."""
    total = active = numel(model)
    for moe in model.moe_layers:
        experts = numel(moe.experts) + numel(moe.norms)
        idle = 1 - served_rows(moe) / moe.router.E
        active -= experts * idle
    return {"total": total, "active": active}


def served_rows(moe: nn.Module) -> float:
    """Experts per token that the capacity leaves room for: at most as many as a token may choose, gamma, and E."""
    router = moe.router
    return min(router.max_choices, moe.gamma, router.E)


def row_flops(moe: nn.Module) -> float:
    """Forward FLOPs of one token in one expert."""
    sizes = [p.numel() for p in moe.experts.parameters() if p.dim() == 3]  # (E, F, D) each
    return 2 * sum(sizes) / moe.router.E


def moe_flops(moe: nn.Module) -> float:
    """Forward FLOPs of one token in one sparse layer at full capacity: router and experts."""
    sizes = [p.numel() for p in moe.router.parameters() if p.dim() == 2]
    return 2 * sum(sizes) + served_rows(moe) * row_flops(moe)


def matrix_flops(body: nn.Module) -> float:
    """Forward FLOPs of a token that passes through all of a module."""
    flops = 0.0
    for name, module in body.named_modules():
        if hasattr(module, "router"):
            flops += moe_flops(module)
        elif isinstance(module, nn.Linear) and "router" not in name:
            flops += 2 * module.weight.numel()
    return flops


def flops_per_token(body: nn.Module, config, head: float) -> float:
    """Forward FLOPs of one token. Attention counts the full T x T, as MFU figures do.

    body: the module whose matrices every token passes through; head: FLOPs of the output layer a token.
    """
    attention = 4 * config.block_size * config.n_embd
    return matrix_flops(body) + config.n_layer * attention + head


def masked_head_flops(model: nn.Module) -> float:
    """Forward FLOPs of the output layer of a MaskedLM, of one masked token: its dense layer and the logits."""
    D = model.config.n_embd
    return 2 * D * (D + model.vocab_size)


def translation_flops(model: nn.Module, N: float, T: float) -> float:
    """Forward FLOPs of one pair, a source of N tokens and a translation of T."""
    config = model.config
    D, M = config.n_embd, config.decoder_layers
    source = matrix_flops(nn.ModuleList([model.encoder, model.moes]))
    target = matrix_flops(model.decoder)
    cross = 2 * M * D * 2 * D  # the decoder's keys and values of one source token, in all of its blocks
    looks = config.n_layer * N * N + M * T * (T + N)  # pairs of tokens, one of which attends to the other
    logits = 2 * D * model.vocab_size
    return N * (source + cross) + T * (target - cross + logits) + 4 * D * looks


TOKENS = 125_000 * 2048 * 512  # of the base model's training
# The discriminators of table 3. Of the larger two the text says a vocabulary of 500K; 2^19 gives the table's numbers.
SIZES = {
    "base": dict(V=250_002, n_layer=12, n_head=12, n_embd=768),
    "large": dict(V=1 << 19, n_layer=24, n_head=16, n_embd=1024),
    "xl": dict(V=1 << 19, n_layer=48, n_head=24, n_embd=1536),
}
PAPER_PARAMETERS = {"base": "279M", "large": "840M", "xl": "2.2B"}


@dataclass
class Flops:
    """There are no options."""


def flops(options: Flops):
    """XLM-E's tables 3 and 4: parameters and training FLOPs of the paper's sizes."""
    print("XLM-E table 3: parameters of the discriminator with its head\n")
    print(table3())
    print("\nXLM-E table 4: training FLOPs of 125,000 steps of batches of 2,048 x 512 tokens\n")
    print(table4())
    print("""
No way of counting gives exactly the paper's numbers: 6.3e19 without TRTD, 9.5e19 with it. By the text both rows train
both networks, on one batch a step and on two. ELECTRA's script counts its own vocabulary.""")


def encoder(V: int, **sizes) -> Encoder:
    """A dense encoder of the paper, whose weights have shapes but no values."""
    others = dict(router="dense", block_size=512, dropout=0.1, init_std=0.02, relative_bias=True)
    config = SimpleNamespace(**others, **sizes, ffn_size=4 * sizes["n_embd"])
    with torch.device("meta"):
        return Encoder(config, V)


def table3() -> str:
    """Parameters, ours beside the paper's."""
    rows = []
    for name, sizes in SIZES.items():
        D = sizes["n_embd"]
        head = D * D + D + 2 * D + D + 1  # a dense layer, a norm, and a number for each token
        ours = head + numel(encoder(**sizes))
        rows.append([name, f"{sizes['V']:,}", PAPER_PARAMETERS[name], f"{ours:,}"])
    return markdown_table(["preset", "vocabulary", "paper", "ours"], rows)


def table4() -> str:
    """Training FLOPs of the base model, by ELECTRA's accounting and by ours, beside the paper's."""
    large, small = encoder(**SIZES["base"]), encoder(**SIZES["base"] | {"n_layer": 4})
    D = large.config.n_embd
    ours = []
    heads = 2 * D * D + 2 * D, 0.15 * masked_head_flops(small)  # the generator's, of the masked tokens alone
    for network, head in zip((large, small), heads):
        ours.append(3 * flops_per_token(network, network.config, head))
    electra = electra_flops(large.config, True), electra_flops(small.config, False)
    rows = [
        ["discriminator, one batch", "6.3e19"],
        ["both networks, one batch", "9.5e19"],
        ["both networks, both batches", ""],
    ]
    for one, other in (electra, ours):  # training FLOPs of one token in the discriminator and in the generator
        for row, cost in zip(rows, (one, one + other, 2 * (one + other))):
            row.append(f"{TOKENS * cost:.2e}")
    return markdown_table(["base", "paper", "ELECTRA's script", "products, backward twice"], rows)


def electra_flops(config, discriminator: bool, V: int = 30_522) -> float:
    """Training FLOPs of one token of XLM-E's generator or discriminator, as the script that came with ELECTRA counts.

    Every operation counts, the backward pass costs as much as the forward pass, an embedding costs a product with the
    whole table of V rows, ELECTRA's, and one token of 6.4 is masked. The networks are dense, as the paper's are.
    """
    D, T, H, inner = config.n_embd, config.block_size, config.n_head, config.ffn_size
    # Operations a number: norm 5, softmax 5, dropout 4, GELU 8, bias 1 or 2.
    scores = 4 * D * T + 10 * T * H
    attention = 8 * D * D + scores + 9 * D + 5  # the script counts 5 for one norm where 5 D would be right
    ffn = 4 * D * inner + 9 * inner + 11 * D
    inputs = 2 * D * (T + 2) + 11 * D + 2 * D * V
    head = 2 * D * D + 11 * D
    if not discriminator:
        hidden = 2 * D * D + 14 * D
        logits = 2 * D * V + 7 * V
        head = (hidden + logits) / 6.4
    return 2 * (config.n_layer * (attention + ffn) + inputs + head)
