"""How well languages are aligned: sentence retrieval and word alignment (XLM-E 4.4, 4.6)."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def hidden_states(encoder: nn.Module, rows: list[list], context) -> tuple[list, Tensor]:
    """One forward pass over B rows of ids -> hidden states by layer (0: embeddings), (B, T, D) each, and a mask (B, T),
    False at padding."""
    tensors = [torch.tensor(row) for row in rows]
    ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    nonpad = mask.flatten().nonzero().squeeze(1)
    ids, nonpad, mask = context.send_all(ids.clamp(min=0), nonpad, mask)
    states = []
    with context.autocast(), encoder.no_limit():  # so that a text's states do not depend on its batch
        encoder(ids, nonpad, states)
    return [state.float() for state in states], mask


def middle_layer(L: int) -> int:
    """The layer whose sentence vectors are reported, of an encoder with L: the 9th of 12 (XLM-E 4.6); 0: embeddings."""
    return round(0.75 * L)


def sentence_vectors(encoder, tokenizer, texts: Sequence[str], micro_tokens: int, context) -> Tensor:
    """(L + 1, n, D): normalized means over the tokens of each text, by layer (0: embeddings), as in XLM-E 4.6.

    The mean includes <s> and </s>; texts are cut to the encoder's block_size. A forward pass has at most micro_tokens,
    or one text.
    """
    config = encoder.config
    room = config.block_size - 2
    rows = [[tokenizer.bos, *ids[:room], tokenizer.eos] for ids in tokenizer.encode_batch(list(texts))]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    vectors = torch.empty(config.n_layer + 1, len(rows), config.n_embd, device=context.device)
    while order:
        size = max(1, micro_tokens // len(rows[order[0]]))
        chunk, order = order[:size], order[size:]
        states, mask = hidden_states(encoder, [rows[i] for i in chunk], context)
        for layer, state in zip(vectors, states):
            layer[chunk] = F.normalize((state * mask.unsqueeze(2)).sum(dim=1), dim=1)  # equal to the normalized mean
    return vectors


def both_directions(one: Tensor, two: Tensor) -> Tensor:
    """(2, L + 1): share of n sentences whose nearest neighbour is the translation, by layer, from one to two and back.

    one, two (L + 1, n, D), normalized: row i of one translates row i of the other (XLM-E table 5).
    """
    cosine = one @ two.mT  # (L + 1, n, n)
    translation = torch.arange(one.shape[1], device=one.device)  # (n,)
    forth = cosine.argmax(dim=2) == translation  # (L + 1, n)
    back = cosine.argmax(dim=1) == translation
    return torch.stack([forth, back]).float().mean(dim=2)


def sinkhorn(similarity: Tensor, rounds: int = 2) -> Tensor:
    """(..., m, n) similarities of the pieces of two sentences -> a transport plan, as in XLM-Align.

    Values of 0 or less become 1e-6. Each round scales the columns, then the rows, to sum to 1.
    """
    pi = torch.where(similarity > 0, similarity, 1e-6)
    for _ in range(rounds):
        pi = pi / pi.sum(dim=-2, keepdim=True)
        pi = pi / pi.sum(dim=-1, keepdim=True)
    return pi


def itermax(plan: Tensor, ratio: float = 0.9) -> Tensor:
    """(..., m, n) -> bool, which pieces are aligned, by two rounds of SimAlign's Itermax (Jalili Sabet et al., 2020).

    Round 1 aligns mutual best matches. Round 2 does so again, with pairs weighted by `ratio` where one piece is aligned
    already, and by 0 where both are. It is skipped if all pieces of one side are aligned, or a side has at most two.
    """
    aligned = each_others_best(plan)
    if min(plan.shape[-2:]) <= 2:
        return aligned
    row = aligned.any(dim=-1, keepdim=True)  # (..., m, 1) whether a piece is aligned
    column = aligned.any(dim=-2, keepdim=True)
    complete = row.all(dim=-2, keepdim=True) | column.all(dim=-1, keepdim=True)
    free = ~(row & column)  # (..., m, n)
    weighted = free * torch.where(row | column, ratio * plan, plan)
    more = each_others_best(weighted) & free & ~complete
    return aligned | more


def each_others_best(plan: Tensor) -> Tensor:
    """(..., m, n) -> bool: the maxima of both their row and their column; ties go to the first."""
    none = torch.zeros_like(plan, dtype=torch.bool)
    in_row = none.scatter(-1, plan.argmax(dim=-1, keepdim=True), True)
    in_column = none.scatter(-2, plan.argmax(dim=-2, keepdim=True), True)
    return in_row & in_column


def alignment_error(predicted: Iterable[set], pairs: list) -> float:
    """AER in percent over all sentence pairs: 1 - (|A & S| + |A & P|) / (|A| + |S|), XLM-E eq. 10.

    For each pair, the links (word, word): predicted A, `pair.sure` S, and `pair.possible` P, a superset of S.
    """
    correct = total = 0
    for A, pair in zip(predicted, pairs, strict=True):
        correct += len(A & pair.sure) + len(A & pair.possible)
        total += len(A) + len(pair.sure)
    return 100 * (1 - correct / total)
