"""What counting reaches: the scores of models that only know how often tokens, and pairs of tokens, were seen.

`remembered` is a translation memory. They stand beside the numbers of trained models, so that one sees where a network
has learned less.
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


def masked_scores(data: MaskedData, max_tokens: int | None = None) -> dict[str, Tensor]:
    """How well counts fill in the validation text, masked in the first way. Nothing where the training text is large.

    Of each language, (3, J): summed cross entropies in nats, how often the most probable token is right, and how many
    are masked. `tokens`: by the counts of the language, interpolated with those of all. `neighbours`: by the pairs of
    the language as well, p(x | l, r) ~ p(x | l) p(x | r) / p(x) between l and r. What is shown in a masked
    place (the mask, another token or the right one) is weighed by its odds, as a model may learn to.
    """
    train, V = torch.from_numpy(data.tokens["train"].astype("int64")), data.vocab_size
    if len(train) > COUNTED_UP_TO:
        return {}
    streams, of_all = data.streams["train"].tolist(), unigrams(train, V)
    tables = torch.stack([unigrams(train[first : first + count], V, of_all) for first, count in streams])  # (J, V)
    J = len(tables)
    own = torch.arange(J).repeat_interleave(torch.tensor([count for _, count in streams])) * V + train  # in J * V
    size = J * V, V
    following, preceding = counts_beside(own[:-1], train[1:], size), counts_beside(own[1:], train[:-1], size)
    found = {name: torch.zeros(3, J, dtype=torch.float64) for name in ("tokens", "neighbours")}
    for _, _, batch in data.eval_batches("valid", 1, max_tokens):
        ids = batch.ids.flatten()
        for some in torch.arange(len(batch.masked)).split(max(1, 2**22 // V)):  # M places
            place, language, target = batch.masked[some], batch.language[some], batch.targets[some]
            left, shown, right = (ids.roll(shift)[place] for shift in (1, 0, -1))  # `<s>` begins a row, never masked
            single = tables[language]  # (M, V)
            follow = interpolated(following.index_select(0, language * V + left).to_dense(), single)
            precede = interpolated(preceding.index_select(0, language * V + right).to_dense(), single)
            for name, p in {"tokens": single, "neighbours": follow * precede / single}.items():
                p = p.scatter_reduce(1, shown[:, None], data.masking.odds(shown)[:, None], "prod")
                loss = p.sum(dim=1).log() - p.gather(1, target[:, None]).squeeze(1).log()
                best = (p.argmax(dim=1) == target).double()
                found[name].index_add_(1, language, torch.stack([loss, best, torch.ones_like(loss)]))
    return found


def counts_beside(one: Tensor, other: Tensor, size: tuple[int, int]) -> Tensor:
    """Sparse counts of how often each (N,) of the one stood beside each (N,) of the other."""
    ones = torch.ones(len(one))
    return torch.sparse_coo_tensor(torch.stack([one, other]), ones, size, check_invariants=True).coalesce()


def unigrams(tokens: Tensor, size: int, rest: Tensor | None = None) -> Tensor:
    """(V,) the probability of each of V = size tokens, by their counts among tokens (N,); rest (V,), None: uniform."""
    counts = torch.bincount(tokens, minlength=size).double()
    return interpolated(counts, torch.full_like(counts, 1 / size) if rest is None else rest)


def interpolated(counts: Tensor, rest: Tensor) -> Tensor:
    """Counts (..., V) -> probabilities, with `rest` (..., V) for what was not seen: all of it where nothing was."""
    kinds = counts.count_nonzero(dim=-1).clamp(min=1).unsqueeze(-1)
    return (counts + kinds * rest) / (counts.sum(dim=-1, keepdim=True) + kinds)


def bigram_loss(seen: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], size: int) -> float:
    """Mean cross entropy in nats of each held-out token given the one before it, by counts of the pairs seen.

    seen, held_out: first and second tokens of pairs, (N,) each and (M,) each, of V = size different ones.
    """
    single = unigrams(seen[1], size)
    codes, counts = torch.unique(seen[0] * size + seen[1], return_counts=True)
    kinds = torch.bincount(codes // size, minlength=size)  # (V,) different tokens behind each
    total = torch.bincount(seen[0], minlength=size)
    first, second = held_out
    wanted = first * size + second
    place = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    count = torch.where(codes[place] == wanted, counts[place], 0)
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
