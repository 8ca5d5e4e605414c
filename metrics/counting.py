"""Counting baselines: scores without a neural network, to print beside those of trained models.

Counts are interpolated as in Witten and Bell (1991): if n tokens were seen, `kinds` of them distinct, the counts weigh
n / (n + kinds), and a less specific distribution has the rest. A large training text is not counted.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from data.files import progress

COUNTED_UP_TO = 2**24  # tokens of a training text


def large(data) -> bool:
    return len(data.tokens["train"]) > COUNTED_UP_TO


def interpolated(counts: Tensor, rest: Tensor) -> Tensor:
    """(V,) probabilities from counts (V,) and from `rest`, (V,) or (), which has all the weight if nothing was seen."""
    kinds = counts.count_nonzero().clamp(min=1)
    return (counts + kinds * rest) / (counts.sum() + kinds)


def unigrams(tokens: Tensor, V: int) -> Tensor:
    """(V,) the probability of each of V tokens, from tokens (N,)."""
    return interpolated(tokens.bincount(minlength=V), torch.tensor(1 / V, dtype=torch.float64))


def text_losses(data, steps: int) -> dict[str, float]:
    """Cross entropies of TokenData's test text, in nats per token, from counts in its training text: of single tokens,
    of the bigrams seen in `steps` steps of training, and of all bigrams."""
    if large(data):
        return {}
    V = data.vocab_size
    train = torch.from_numpy(data.tokens["train"].astype("int64"))
    test = torch.from_numpy(data.tokens["test"].astype("int64"))
    pairs = train.unfold(0, 2, 1).T  # (2, N) all bigrams
    seen = pairs[:, data.seen(steps)[1:]]  # those whose second token is a target
    held_out = test.unfold(0, 2, 1).T
    return {
        "unigrams": -float(unigrams(train, V)[test].log().mean()),
        "bigrams": bigram_loss(seen, held_out, V),
        "all bigrams": bigram_loss(pairs, held_out, V),
    }


def bigram_loss(seen: Tensor, held_out: Tensor, V: int) -> float:
    """Mean cross entropy in nats of the second token of bigrams held_out (2, M), from counts of those seen (2, N)."""
    first, second = held_out
    following = neighbour_counts(*seen, V)
    single = unigrams(seen[1], V)
    total = 0.0
    for token in progress(first.unique(), "counting", leave=False):
        total -= float(interpolated(following(token), single)[second[first == token]].log().sum())
    return total / len(first)


def neighbour_counts(keys: Tensor, tokens: Tensor, V: int):
    """-> a function of a key: (V,) how often each token comes with that key in keys (N,), tokens (N,)."""
    keys, order = keys.sort()
    tokens = tokens[order]

    def count(key: Tensor) -> Tensor:
        begin, end = torch.searchsorted(keys, torch.stack([key, key + 1]))
        return torch.bincount(tokens[begin:end], minlength=V)

    return count


def masked_scores(data, max_tokens=None) -> dict[str, dict]:
    """How well counts predict the masked tokens of MaskedData's validation text, in its first masking.

    `tokens` uses the counts of a language, interpolated with those of all languages. `neighbours` also uses the tokens
    l and r on both sides: p(x | l, r) ~ p(x | l) p(x | r) / p(x). Both account for targets that are shown unchanged.
    """
    if large(data):
        return {}
    V = data.vocab_size
    train = torch.from_numpy(data.tokens["train"].astype("int64"))
    all_languages = unigrams(train, V)
    sizes = torch.from_numpy(data.streams["train"][:, 1])
    singles = [interpolated(text.bincount(minlength=V), all_languages) for text in train.split(sizes.tolist())]
    keys = torch.arange(len(sizes)).repeat_interleave(sizes) * V + train  # a language and a token in one number
    following = neighbour_counts(keys[:-1], train[1:], V)
    preceding = neighbour_counts(keys[1:], train[:-1], V)
    sums = torch.zeros(2, len(sizes), 3, dtype=torch.float64)  # per language: loss, correct tokens, all tokens
    for _, _, batch in progress([*data.eval_batches("valid", 1, max_tokens)], "counting", leave=False):
        ids = F.pad(batch.ids.flatten(), (0, 1), value=data.tokenizer.bos)
        shown = ids[batch.masked]
        odds = data.masking.odds(shown)
        key = batch.language * V
        left = key + ids[batch.masked - 1]
        right = key + ids[batch.masked + 1]  # at the end of a row, the `<s>` of the next
        for m, target in enumerate(batch.targets):
            language = batch.language[m]
            single = singles[language]
            both = interpolated(following(left[m]), single) * interpolated(preceding(right[m]), single) / single
            for totals, p in zip(sums, (single.clone(), both)):
                p[shown[m]] *= odds[m]
                loss = p.sum().log() - p[target].log()
                totals[language] += torch.stack([loss, p.argmax() == target, torch.ones(())])
    scores = {}
    for name, totals in zip(("tokens", "neighbours"), sums):
        loss, right, _ = totals.sum(dim=0) / totals[:, 2].sum()
        scores[name] = {"ppl": float(loss.exp()), "right": float(right), "languages": {}}
        losses, _, counts = totals.T.tolist()
        for language, loss, count in zip(data.languages, losses, counts):
            if count:
                scores[name]["languages"][language] = math.exp(loss / count)
    return scores


def in_words(scores: dict[str, dict]) -> str:
    """The result of `masked_scores` as a line."""
    if not scores:
        return "counting: not done, the training text is large"
    tokens, both = map("perplexity {ppl:.2f}, {right:.1%} right".format_map, scores.values())
    return f"counting: {tokens} from each language's token counts; {both} with both neighbours as well (first masking)"


def remembered(data, language: str) -> list[str]:
    """A translation memory: for each test source of a language pair in TranslationData, the translation of the most
    similar training source.

    Similarity is the cosine of the sets of tokens; a token that n of N training sources contain weighs log(N / n).
    """
    sources, translations = texts(data, "train", language)
    train, n = distinct(sources, data.vocab_size)
    tokens = np.concatenate(train)
    sizes = list(map(len, train))  # at least 1: each has the `</s>`, which weighs nothing
    begins = np.cumsum(sizes) - sizes
    weight = np.log(len(train) / n.clip(1)) ** 2  # squared: once for each of the two sources
    lengths = np.sqrt(np.add.reduceat(weight[tokens], begins)) + 1e-9
    best = []
    for text in progress(next(texts(data, "test", language)), "counting", leave=False):
        weights = np.zeros(data.vocab_size)
        weights[text] = weight[text]
        shared = np.add.reduceat(weights[tokens], begins)
        nearest = (shared / lengths).argmax()  # the test source's length does not change the order
        best.append(data.tokenizer.decode(translations[nearest].tolist()))
    return best


def looked_up(data, language: str) -> list[str]:
    """Translates each test source of a language pair in TranslationData token by token, in the source's order.

    A source token becomes the target token with the highest Dice coefficient, 2 k / (n + m): n training pairs have the
    one, m the other, and k both.
    """
    V = data.vocab_size
    (sources, n), (targets, m) = (distinct(side, V) for side in texts(data, "train", language))
    keys = [np.add.outer(V * source.astype(int), target).ravel() for source, target in zip(sources, targets)]
    keys, k = np.unique(np.concatenate(keys), return_counts=True)
    source, target = np.divmod(keys, V)
    order = (k / (n[source] + m[target])).argsort()  # by half the coefficient
    best = np.zeros(V, int)  # an unknown token becomes <s>, which decoding drops
    best[source[order]] = target[order]  # of equal indices the last assignment counts
    return [data.tokenizer.decode(best[text].tolist()) for text in next(texts(data, "test", language))]


def distinct(texts: list[ndarray], V) -> tuple[list, ndarray]:
    """The distinct tokens of each text, ascending, and (V,) how many texts have each token."""
    tokens = list(map(np.unique, texts))
    return tokens, np.bincount(np.concatenate(tokens), minlength=V)


def texts(data, split, language) -> Iterator[list[ndarray]]:
    """The tokens, with `</s>`, of the sources of a language pair, and then those of the translations."""
    first, count = data.stream(split, language)
    _, starts, sizes = data.pairs(split, np.arange(first, first + count))
    for begins, ends in zip(starts.T, (starts + sizes).T):
        yield [data.tokens[split][begin:end] for begin, end in zip(begins, ends)]
