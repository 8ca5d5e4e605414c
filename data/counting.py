"""What counting reaches: scores without any network, to print beside those of trained models.

Counts are interpolated as by Witten and Bell (1991): where n tokens of `kinds` different ones were seen, their counts
weigh n / (n + kinds), and a less specific distribution has the rest. Where the training text is so large that counting
would take long, these functions return nothing.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

COUNTED_UP_TO = 2**24  # tokens of a training text


def is_large(data) -> bool:
    return len(data.tokens["train"]) > COUNTED_UP_TO


def tokens_of(data, split: str) -> Tensor:
    return torch.from_numpy(data.tokens[split].astype("int64"))


def interpolated(counts: Tensor, rest: Tensor) -> Tensor:
    """(V,) probabilities by counts (V,), and by `rest` (V,), which has all the weight where nothing was seen."""
    kinds = counts.count_nonzero().clamp(min=1)
    return (counts + kinds * rest) / (counts.sum() + kinds)


def unigrams(tokens: Tensor, V: int, rest=None) -> Tensor:
    """(V,) the probabilities of V tokens by their counts among tokens (N,), and by `rest`; None: uniform."""
    counts = torch.bincount(tokens, minlength=V).double()
    if rest is None:
        rest = torch.full_like(counts, 1 / V)
    return interpolated(counts, rest)


def text_losses(data, steps: int) -> dict[str, float]:
    """Cross entropies of TokenData's test text, in nats per token, by counts of its training text.

    They count single tokens, the pairs of neighbours that so many steps of training see, or all pairs.
    """
    if is_large(data):
        return {}
    V = data.vocab_size
    train, test = tokens_of(data, "train"), tokens_of(data, "test")
    one, two = train[:-1], train[1:]  # all pairs of neighbours
    targets = data.seen(steps)[1:]  # which second tokens training sees
    seen = one[targets], two[targets]
    held_out = test[:-1], test[1:]
    single = unigrams(train, V)[test].log().mean()
    return {
        "unigrams": -float(single),
        "bigrams": bigram_loss(seen, held_out, V),
        "all bigrams": bigram_loss((one, two), held_out, V),
    }


def bigram_loss(seen: tuple, held_out: tuple, V: int) -> float:
    """Mean cross entropy, in nats, of each held-out token given the one before it, by counts of the pairs seen.

    seen, held_out: the first and the second tokens of pairs, (N,) and (M,) each, of V different ones.
    """
    first, second = held_out
    codes = seen[0] * V + seen[1]  # each different pair as one number
    codes, counts = codes.unique(return_counts=True)
    wanted = first * V + second
    place = torch.searchsorted(codes, wanted)
    place = place.clamp(max=len(codes) - 1)
    found = codes[place] == wanted
    count = torch.where(found, counts[place], 0)
    n = torch.bincount(seen[0], minlength=V)[first]
    kinds = torch.bincount(codes // V, minlength=V)[first]
    kinds = kinds.clamp(min=1)  # a first token that was never seen leaves all weight to single tokens
    single = unigrams(seen[1], V)[second]
    probability = (count + kinds * single) / (n + kinds)
    return -float(probability.log().mean())


class Beside:
    """Counts which of V tokens stood beside each key."""

    def __init__(self, keys: Tensor, tokens: Tensor, V: int):
        self.keys, order = keys.sort()
        self.tokens = tokens[order]
        self.V = V

    def count(self, key: int) -> Tensor:
        both = torch.tensor([key, key + 1])
        begin, end = torch.searchsorted(self.keys, both)
        tokens = self.tokens[begin:end]
        return torch.bincount(tokens, minlength=self.V)


def masked_scores(data, max_tokens=None) -> dict[str, Tensor]:
    """How well counts predict the masked tokens of MaskedData's validation text, in the first of its maskings.

    `tokens` uses the counts of a language, interpolated with those of all languages. `neighbours` also uses the tokens
    l and r on both sides: p(x | l, r) ~ p(x | l) p(x | r) / p(x). Both know that the token shown may be the right one.

    Returns (3, J) for each: summed cross entropies in nats of each language, how often the most probable token is
    right, and how many tokens are masked.
    """
    if is_large(data):
        return {}
    V, J = data.vocab_size, len(data.languages)
    train = tokens_of(data, "train")
    of_all = unigrams(train, V)
    singles, language = [], []
    for first, count in data.streams["train"].tolist():
        language += [len(singles)] * count
        own = train[first : first + count]
        singles.append(unigrams(own, V, of_all))
    keys = torch.tensor(language) * V + train  # a language and a token as one number
    following = Beside(keys[:-1], train[1:], V)
    preceding = Beside(keys[1:], train[:-1], V)
    by_tokens = torch.zeros(3, J).double()
    by_neighbours = torch.zeros(3, J).double()
    for _, _, batch in data.eval_batches("valid", 1, max_tokens):
        ids = batch.ids.flatten()
        odds = data.masking.odds(ids[batch.masked])
        ids = [*ids.tolist(), data.tokenizer.bos]  # a row follows its last token, and begins with `<s>`
        masked = zip(batch.masked.tolist(), batch.language.tolist(), odds)
        for (place, language, odd), target in zip(masked, batch.targets.tolist()):
            single = singles[language]
            after = following.count(language * V + ids[place - 1])
            before = preceding.count(language * V + ids[place + 1])
            after, before = interpolated(after, single), interpolated(before, single)
            both = after * before / single
            by_tokens[:, language] += score(single, ids[place], odd, target)
            by_neighbours[:, language] += score(both, ids[place], odd, target)
    return {"tokens": by_tokens, "neighbours": by_neighbours}


def score(p: Tensor, shown: int, odds: Tensor, target: int) -> Tensor:
    """(3,) the cross entropy of a target, whether it is the most probable, and 1; p: (V,), not normalised."""
    p = p.clone()
    p[shown] *= odds
    loss = p.sum().log() - p[target].log()
    right = p.argmax() == target
    return torch.tensor([loss, right, 1]).double()


def remembered(data, language: str) -> list[str]:
    """For each test source of a language pair of TranslationData, the translation of the most similar training source.

    Similar is the cosine of the tokens that they have; a token weighs log(N / n) where n of N training sources have it.
    """
    if is_large(data):
        return []
    train = different_tokens(data, "train", language)
    having = defaultdict(list)  # token -> the numbers of the training sources that have it
    for number, tokens in enumerate(train):
        for token in tokens:
            having[token].append(number)
    weight = np.zeros(data.vocab_size)
    for token, numbers in having.items():
        idf = np.log(len(train) / len(numbers))
        weight[token] = idf**2  # both sources have the token
    lengths = [weight[tokens].sum() for tokens in train]
    lengths = np.sqrt(lengths) + 1e-9
    nearest = []
    for tokens in different_tokens(data, "test", language):
        shared = np.zeros(len(train))
        for token in tokens:
            shared[having[token]] += weight[token]
        nearest.append((shared / lengths).argmax())  # a test source's own length is the same for all
    first, _ = data.stream("train", language)
    nearest = first + np.array(nearest, dtype=int)
    return list(map(data.tokenizer.decode, texts_of(data, "train", nearest, side=1)))


def different_tokens(data, split: str, language: str) -> list[list[int]]:
    """The different tokens of each source of a language pair. All have the `</s>`, which therefore weighs nothing."""
    first, count = data.stream(split, language)
    numbers = np.arange(first, first + count)
    return [sorted(set(tokens)) for tokens in texts_of(data, split, numbers, side=0)]


def texts_of(data, split: str, numbers: np.ndarray, side: int) -> Iterator[list[int]]:
    """The tokens of the sources (side 0) or of the translations (side 1) of the pairs with these numbers."""
    pairs = data.pairs(split, numbers)
    starts = pairs.starts[:, side]
    ends = starts + pairs.sizes[:, side]
    for start, end in zip(starts, ends):
        yield data.tokens[split][start:end].tolist()
