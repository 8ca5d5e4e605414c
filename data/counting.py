"""What counting reaches: scores without any network, to print beside those of trained models.

Counts are interpolated as by Witten and Bell (1991): where n tokens of `kinds` different ones were seen, their counts
weigh n / (n + kinds), and a less specific distribution has the rest. Of a large training text nothing is counted.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

COUNTED_UP_TO = 2**24  # tokens of a training text


def large(data) -> bool:
    return len(data.tokens["train"]) > COUNTED_UP_TO


def interpolated(counts: Tensor, rest: Tensor) -> Tensor:
    """(V,) probabilities by counts (V,), and by `rest`, (V,) or (), which has all the weight where nothing was seen."""
    kinds = counts.count_nonzero().clamp(min=1)
    return (counts + kinds * rest) / (counts.sum() + kinds)


def unigrams(tokens: Tensor, V: int) -> Tensor:
    """(V,) the probabilities of V tokens by their counts among tokens (N,)."""
    uniform = torch.tensor(1 / V, dtype=torch.float64)
    return interpolated(tokens.bincount(minlength=V), uniform)


def text_losses(data, steps: int) -> dict[str, float]:
    """Cross entropies of TokenData's test text, in nats per token, by counts of its training text.

    They count single tokens, the pairs of neighbours that so many steps of training see, or all pairs.
    """
    if large(data):
        return {}
    V = data.vocab_size
    train = torch.from_numpy(data.tokens["train"].astype("int64"))
    test = torch.from_numpy(data.tokens["test"].astype("int64"))
    pairs = train.unfold(0, 2, 1).T  # (2, N) all neighbours
    seen = pairs[:, data.seen(steps)[1:]]  # whose second token is a target
    held_out = test.unfold(0, 2, 1).T
    single = unigrams(train, V)[test].log().mean()
    return {
        "unigrams": -float(single),
        "bigrams": bigram_loss(seen, held_out, V),
        "all bigrams": bigram_loss(pairs, held_out, V),
    }


def bigram_loss(seen: Tensor, held_out: Tensor, V: int) -> float:
    """Mean cross entropy, in nats, of the second token of held-out pairs (2, M) given the first, by counts of the pairs
    (2, N) seen, of V different tokens."""
    first, second = held_out
    following = count_beside(*seen, V)
    single = unigrams(seen[1], V)
    total = 0.0
    for token in first.unique():
        p = interpolated(following(token), single)
        own = p[second[first == token]]
        total -= float(own.log().sum())
    return total / len(first)


def count_beside(keys: Tensor, tokens: Tensor, V: int):
    """-> a function of a key: (V,) how often each of V tokens stood beside it."""
    keys, order = keys.sort()
    tokens = tokens[order]

    def count(key: Tensor) -> Tensor:
        begin = torch.searchsorted(keys, key)
        end = torch.searchsorted(keys, key + 1)
        return torch.bincount(tokens[begin:end], minlength=V)

    return count


def masked_scores(data, max_tokens=None) -> dict[str, dict]:
    """How well counts predict the masked tokens of MaskedData's validation text, in the first of its maskings.

    `tokens` uses the counts of a language, interpolated with those of all languages. `neighbours` also uses the tokens
    l and r on both sides: p(x | l, r) ~ p(x | l) p(x | r) / p(x). Both know that the token shown may be the right one.
    """
    if large(data):
        return {}
    V = data.vocab_size
    train = torch.from_numpy(data.tokens["train"].astype("int64"))
    of_all = unigrams(train, V)
    sizes = torch.from_numpy(data.streams["train"][:, 1])
    singles = [interpolated(own.bincount(minlength=V), of_all) for own in train.split(sizes.tolist())]
    language = torch.arange(len(sizes)).repeat_interleave(sizes)
    keys = language * V + train  # a language and a token as one number
    following = count_beside(keys[:-1], train[1:], V)
    preceding = count_beside(keys[1:], train[:-1], V)
    sums = torch.zeros(2, len(sizes), 3, dtype=torch.float64)  # of each language losses, right ones, and their number
    for _, _, batch in data.eval_batches("valid", 1, max_tokens):
        ids = F.pad(batch.ids.flatten(), (0, 1), value=data.tokenizer.bos)
        shown = ids[batch.masked]
        odds = data.masking.odds(shown)
        key = batch.language * V
        left = key + ids[batch.masked - 1]
        right = key + ids[batch.masked + 1]  # behind the end of a row the `<s>` of the next
        for m, target in enumerate(batch.targets):
            language = batch.language[m]
            single = singles[language]
            after = interpolated(following(left[m]), single)
            before = interpolated(preceding(right[m]), single)
            both = after * before / single
            for own, p in zip(sums, (single.clone(), both)):
                p[shown[m]] *= odds[m]
                loss = p.sum().log() - p[target].log()
                own[language] += torch.stack([loss, p.argmax() == target, torch.ones(())])
    found = {}
    for name, own in zip(("tokens", "neighbours"), sums):
        loss, right, _ = own.sum(dim=0) / own[:, 2].sum()
        found[name] = {"ppl": float(loss.exp()), "right": float(right), "languages": {}}
        losses, _, counts = own.T.tolist()
        for language, loss, count in zip(data.languages, losses, counts):
            if count:
                found[name]["languages"][language] = math.exp(loss / count)
    return found


def in_words(found: dict[str, dict]) -> str:
    """What `masked_scores` found, in words."""
    if not found:
        return "counting: not done, the training text is large"
    tokens, both = map("perplexity {ppl:.2f}, {right:.1%} right".format_map, found.values())
    return f"counting: {tokens} by the tokens of each language; {both} by the two beside each as well (first masking)"


def remembered(data, language: str) -> list[str]:
    """For each test source of a language pair of TranslationData, the translation of the most similar training source.

    Similar is the cosine of the tokens that they have; a token weighs log(N / n) where n of N training sources have it.
    """
    sources, translations = texts(data, "train", language)
    train, n = different(sources, data.vocab_size)
    tokens = np.concatenate(train)
    sizes = list(map(len, train))  # each has the `</s>` at least, which weighs nothing
    begins = np.cumsum(sizes) - sizes
    weight = np.log(len(train) / n.clip(1)) ** 2  # both sources have the token
    squares = np.add.reduceat(weight[tokens], begins)
    lengths = np.sqrt(squares) + 1e-9
    found = []
    test, _ = texts(data, "test", language)
    for text in test:
        own = np.zeros(data.vocab_size)
        own[text] = weight[text]
        shared = np.add.reduceat(own[tokens], begins)
        nearest = (shared / lengths).argmax()  # a test source's own length is the same for all
        found.append(translations[nearest])
    return decoded(data, found)


def looked_up(data, language: str) -> list[str]:
    """Each test source of a language pair of TranslationData, token by token in its order.

    For a source's token stands the one that it shares most training pairs with, both counted once in a pair: of n and m
    pairs that have the one and the other, they share k, and 2 k / (n + m) is highest (Dice's coefficient).
    """
    V = data.vocab_size
    (sources, n), (targets, m) = (different(own, V) for own in texts(data, "train", language))
    keys = [np.add.outer(V * one.astype(int), two).ravel() for one, two in zip(sources, targets)]
    keys, k = np.unique(np.concatenate(keys), return_counts=True)
    source, target = np.divmod(keys, V)
    half = k / (n[source] + m[target])
    order = half.argsort()
    best = np.zeros(V, int)  # an unknown one becomes <s>, which no text shows
    best[source[order]] = target[order]  # of a source's tokens the last is kept
    test, _ = texts(data, "test", language)
    return decoded(data, [best[text] for text in test])


def decoded(data, texts: list[ndarray]) -> list[str]:
    return [data.tokenizer.decode(ids.tolist()) for ids in texts]


def different(texts: list[ndarray], V) -> tuple[list, ndarray]:
    """The different tokens of each text, ascending, and (V,) how many of the texts have each token."""
    own = list(map(np.unique, texts))
    return own, np.bincount(np.concatenate(own), minlength=V)


def texts(data, split, language) -> Iterator[list[ndarray]]:
    """The tokens, with `</s>`, of the sources of a language pair, and then those of the translations."""
    first, count = data.stream(split, language)
    _, starts, sizes = data.pairs(split, np.arange(first, first + count))
    for begins, ends in zip(starts.T, (starts + sizes).T):
        yield [data.tokens[split][begin:end] for begin, end in zip(begins, ends)]
