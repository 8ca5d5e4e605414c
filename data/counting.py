"""What counting reaches: the losses of models that only know how often tokens, and pairs of tokens, were seen.

And the translations of a memory of what it was shown. They stand beside the numbers of trained models: a network that
does not beat them has learned nothing worth a table.
Counts are interpolated as by Witten and Bell (1991): where n tokens followed, of `kinds` different ones, the counts
have a share of n / (n + kinds), and what is less specific has the rest.
"""

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from data.batches import MaskedData, TokenData, TranslationData

COUNTED_UP_TO = 2**24  # tokens of a training text that is counted in passing


def text_losses(data: TokenData, steps: int) -> dict[str, float]:
    """Mean cross entropies in nats of the test text: by its tokens' counts, by those of pairs of tokens that so many
    steps of training see, and by those of all pairs. Nothing where the training text is large.
    """
    if len(data.tokens["train"]) > COUNTED_UP_TO:
        return {}
    train, test = (torch.from_numpy(data.tokens[split].astype("int64")) for split in ("train", "test"))
    pairs, held_out = torch.stack([train[:-1], train[1:]]), (test[:-1], test[1:])
    seen = data.seen(steps)[1:]
    return {
        "unigrams": -float(unigrams(train, data.vocab_size)[test].log().mean()),
        "bigrams": bigram_loss(pairs[:, seen], held_out, data.vocab_size),
        "all bigrams": bigram_loss(pairs, held_out, data.vocab_size),
    }


def language_losses(data: MaskedData, maskings: int, max_tokens: int | None = None) -> tuple[Tensor, Tensor] | None:
    """The cross entropy of masked validation tokens by their counts in their language's training text.

    -> summed over each language, (J,), and how many there are, (J,), in all maskings; None where the training text is
    large. A language's counts are interpolated with those of all.
    """
    if len(data.tokens["train"]) > COUNTED_UP_TO:
        return None
    train = torch.from_numpy(data.tokens["train"].astype("int64"))
    of_all = unigrams(train, data.vocab_size)
    tables = []
    for first, count in data.streams["train"].tolist():
        tables.append(unigrams(train[first : first + count], data.vocab_size, of_all).log())
    tables = torch.stack(tables)  # (J, V)
    losses, counts = torch.zeros(2, len(tables), dtype=torch.float64)
    for _, _, batch in data.eval_batches("valid", maskings, max_tokens):
        losses.index_add_(0, batch.language, -tables[batch.language, batch.targets])
        counts += torch.bincount(batch.language, minlength=len(counts))
    return losses, counts


def unigrams(tokens: Tensor, size: int, rest: Tensor | None = None) -> Tensor:
    """(V,) the probability of each of V = size tokens, by their counts among tokens (N,); rest (V,), None: uniform."""
    counts = torch.bincount(tokens, minlength=size).double()
    kinds = counts.count_nonzero()
    return (counts + kinds * (1 / size if rest is None else rest)) / (counts.sum() + kinds)


def bigram_loss(seen: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], size: int) -> float:
    """Mean cross entropy in nats of each held-out token given the one before it, by counts of the pairs seen.

    seen, held_out: first and second tokens of pairs, (N,) each and (M,) each, of V = size different ones.
    """
    single = unigrams(seen[1], size)
    pairs, counts = torch.unique(seen[0] * size + seen[1], return_counts=True)
    kinds = torch.bincount(pairs // size, minlength=size)  # (V,) different tokens behind each
    total = torch.bincount(seen[0], minlength=size)
    first, second = held_out
    wanted = first * size + second
    place = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    count = torch.where(pairs[place] == wanted, counts[place], 0)
    rest = kinds.clamp(min=1)[first]  # of a token that was never first, all is left to `single`
    probability = (count + rest * single[second]) / (total[first] + rest)
    return -float(probability.log().mean())


def remembered(data: TranslationData, language: str) -> list[str]:
    """A translation memory: for every test text of a pair of languages, the translation of the most similar training
    text.

    Similar: the cosine of the tokens that either has, a token's weight being log(N / those of N training texts that
    have it). Nothing where the training text is large.
    """
    if len(data.tokens["train"]) > COUNTED_UP_TO:
        return []
    train, test = (different_tokens(data, split, language) for split in ("train", "test"))
    tokens, text = np.concatenate(train), np.repeat(np.arange(len(train)), [len(own) for own in train])
    counts = np.bincount(tokens, minlength=data.vocab_size)
    weight = np.log(len(train) / np.maximum(counts, 1)) ** 2  # (V,) squared: both texts have one
    having = np.split(text[tokens.argsort(kind="stable")], counts.cumsum())  # token -> training texts
    length = np.sqrt(np.bincount(text, weight[tokens], minlength=len(train))) + 1e-9
    found = []
    for own in test:
        shared = np.zeros(len(train))
        for token in own:
            shared[having[token]] += weight[token]
        found.append((shared / length).argmax())  # a test text's own length is the same for all
    first, _ = data.streams["train"][data.languages.index(language)]
    rows = data.pairs("train", first + np.array(found, dtype=np.int64))
    where = zip(rows.starts[:, 1], rows.sizes[:, 1])
    return [data.tokenizer.decode(data.tokens["train"][start : start + size].tolist()) for start, size in where]


def different_tokens(data: TranslationData, split: str, language: str) -> list[ndarray]:
    """Of each source of a pair of languages, (n,) ids; the `</s>`, which all have, weighs nothing."""
    first, count = data.streams[split][data.languages.index(language)]
    rows = data.pairs(split, np.arange(first, first + count))
    where = zip(rows.starts[:, 0], rows.sizes[:, 0])
    return [np.unique(data.tokens[split][start : start + size]) for start, size in where]
