"""Parameters, active parameters and FLOPs of the models; and FLOPs as ELECTRA counts them (XLM-E table 4)."""

from torch import nn

from model import EncoderConfig, SparseModel, TransformerConfig
from translator import TranslatorConfig


def served_rows(config: TransformerConfig) -> float:
    """Rows per token and MoE layer that the capacity leaves room for: at most K, gamma and E."""
    wants = {"topk": config.top_k, "threshold": config.num_experts, "expert_choice": config.num_experts}
    return min(wants.get(config.select, 1), config.capacity_factor, config.num_experts)


def count_parameters(model: SparseModel) -> dict[str, float]:
    """`total`, `active` (what one token passes through at full capacity) and `moe` (experts and routers)."""

    def size(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    idle = 1 - served_rows(model.config) / model.config.num_experts
    experts = size(*(moe.layers for moe in model.moe_layers))
    return {"total": size(model), "active": size(model) - idle * experts, "moe": size(*model.moe_layers)}


def flops_per_token(config: TransformerConfig, predicted: float = 1.0, outputs: int | None = None) -> dict[str, float]:
    """Forward FLOPs of one token: `total` and `moe` (experts and routers). A training step costs three times as much.

    Products only, two FLOPs a multiply-add; attention counts the full T x T, as MFU figures do; MoE layers are taken at
    full capacity, so what is really spent is `served` of `stats` over `served_rows` of it. `predicted` is the share of
    the tokens that the output layer sees, `outputs` its size if not V; the encoder's has one more matrix.
    """
    D, L = config.n_embd, config.n_layer
    moe = config.num_sparse * sparse_flops(config)
    head = D * (outputs or config.vocab_size) + (0 if config.causal else D * D)
    dense = 2 * (L * 4 * D * D + config.num_ffns * 2 * D * config.ffn_size + predicted * head)
    return {"total": moe + dense + 4 * L * config.block_size * D, "moe": moe}


def sparse_flops(config: TransformerConfig) -> float:
    """Forward FLOPs of one token in one sparse layer at full capacity: router and experts."""
    if config.router == "dense":
        return 0.0
    D, dim, E = config.n_embd, config.routing_dim, config.num_experts
    router = 0 if config.select == "hash" else dim * D + E * dim if dim else E * D
    return 2 * (router + served_rows(config) * max(config.expert_layers, 1) * 2 * D * config.expert_size)


def translation_flops(config: TranslatorConfig, N: float, T: float) -> dict[str, float]:
    """Forward FLOPs of one pair, a source of N tokens and a translation of T: `total` and `moe`, as above.

    A block has 4 D x D matrices for attention; in the decoder as many for the source, two of them for its N tokens.
    """
    D, L, M = config.n_embd, config.n_layer, config.decoder_layers
    encoder, decoder = config.sparse_blocks(decoder=False), config.sparse_blocks(decoder=True)
    moe = (N * (encoder + len(config.sparse_after)) + T * decoder) * sparse_flops(config)
    dense = N * (L - encoder) + T * (M - decoder)
    matrices = 2 * (N * (4 * L + 2 * M) + T * 6 * M) * D * D + 2 * dense * 2 * D * config.ffn_size
    scores = 4 * (L * N * N + M * T * (T + N)) * D
    return {"total": moe + matrices + scores + 2 * T * D * config.vocab_size, "moe": moe}


def electra_flops(config: EncoderConfig, discriminator: bool, vocabulary: int, lookup: bool) -> float:
    """Training FLOPs of one token of XLM-E's generator or discriminator, as the script that came with ELECTRA counts.

    Every operation counts, the backward pass as much as the forward one, and a masked token is one of 6.4; with
    `lookup` an embedding is taken for a product with the whole table. Sparse layers are ours: twice their products.
    """
    D, T, H, F_, V = config.n_embd, config.block_size, config.n_head, config.ffn_size, vocabulary
    norm, softmax, dropout, gelu = 5, 5, 4, 8  # operations a number
    attention = 8 * D * D + 4 * D * T + (softmax + dropout + 1) * T * H + (5 + dropout) * D + norm  # not norm * D: sic
    ffn = 4 * D * F_ + (gelu + 1) * F_ + (2 + dropout + norm) * D
    inputs = 2 * D * V * lookup + 2 * D * (T + 2) + (2 + norm + dropout) * D
    if discriminator:
        head = 2 * D * D + (3 + gelu) * D
    else:
        head = (2 * D * V + 2 * D * D + (1 + gelu + norm) * D + (softmax + 2) * V) / 6.4
    moe = flops_per_token(config)["moe"]
    return 2 * (config.n_layer * (attention + ffn) + inputs + head + moe)


WAYS = ("ELECTRA's script", "ELECTRA's, our vocabulary", "products, backward twice")  # to count FLOPs


def electra_training_flops(networks: dict[str, EncoderConfig], mask_share: float) -> list[dict[str, float]]:
    """Training FLOPs of one token in the "generator" and the "discriminator", where there is one, for each of WAYS.

    The second way has the real vocabulary, and no product for looking up an embedding; the third has products alone,
    and a backward pass of twice the forward one.
    """
    counts = [{}, {}, {}]
    for name, config in networks.items():
        disc = name == "discriminator"
        products = flops_per_token(config, 1, 1) if disc else flops_per_token(config, mask_share)
        counts[0][name] = electra_flops(config, disc, 30_522, lookup=True)
        counts[1][name] = electra_flops(config, disc, config.vocab_size, lookup=False)
        counts[2][name] = 3 * products["total"]
    return counts
