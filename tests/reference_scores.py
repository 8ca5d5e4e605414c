"""Counting baselines and word alignment, written literally as slow loops. Tests compare the fast code with these."""

# --- Counting: pairs are adjacent tokens, V is the vocabulary size


def interpolated(tokens, backoff):
    """Witten and Bell (1991): V probabilities from the counts of tokens, interpolated with `backoff` (V,)."""
    n, kinds = len(tokens), len(set(tokens))
    if n == 0:
        return backoff
    return [n / (n + kinds) * tokens.count(v) / n + kinds / (n + kinds) * backoff[v] for v in range(len(backoff))]


def bigrams(pairs, first, V):
    """V probabilities of the token after `first`, from pairs (first, second)."""
    unigrams = interpolated([second for _, second in pairs], [1 / V] * V)
    return interpolated([second for one, second in pairs if one == first], unigrams)


def between(pairs_after, pairs_before, left, right, unigrams):
    """V probabilities of the token between two tokens, which are treated as independent given that token.

    pairs_after: (left, token); pairs_before: (token, right)
    """
    after = interpolated([token for one, token in pairs_after if one == left], unigrams)
    before = interpolated([token for token, two in pairs_before if two == right], unigrams)
    return normalized([a * b / u for a, b, u in zip(after, before, unigrams)])


def given_input(p, token, kept, random):
    """Bayes: V probabilities of the right token, from prior p, if the input shows `token`.

    kept: the probability that the right token is shown; random: that a random one is, for each token
    """
    return normalized([value * (kept * (v == token) + random) for v, value in enumerate(p)])


def normalized(values):
    total = sum(values)
    return [value / total for value in values]


# --- Word alignment (XLM-E 4.6)


def sinkhorn(S, rounds):
    """S[i][j] -> a transport plan (XLM-Align 3.1): each round scales columns, then rows, to a sum of 1."""
    m, n = len(S), len(S[0])
    A = []
    for row in S:
        A.append([s if s > 0 else 1e-6 for s in row])
    for _ in range(rounds):
        for j in range(n):
            total = sum(A[i][j] for i in range(m))
            for i in range(m):
                A[i][j] /= total
        for i in range(m):
            total = sum(A[i])
            A[i] = [a / total for a in A[i]]
    return A


def mutual_best(A):
    """Pairs (i, j): j is the best match of i, and i of j."""
    pairs = set()
    for i, row in enumerate(A):
        for j in range(len(row)):
            column = [other[j] for other in A]
            if row.index(max(row)) == j and column.index(max(column)) == i:
                pairs.add((i, j))
    return pairs


def itermax(A, rounds, ratio):
    """SimAlign's Itermax: each further round adds mutual best matches among pairs that are not fully aligned."""
    m, n = len(A), len(A[0])
    pairs = mutual_best(A)
    if min(m, n) <= 2:
        return pairs
    for _ in range(rounds - 1):
        rows, columns = {i for i, _ in pairs}, {j for _, j in pairs}
        if len(rows) == m or len(columns) == n:
            break
        weight = {0: 1.0, 1: ratio, 2: 0.0}  # by how many of the two are aligned
        weighted = []
        for i in range(m):
            weighted.append([A[i][j] * weight[(i in rows) + (j in columns)] for j in range(n)])
        pairs = pairs | {(i, j) for i, j in mutual_best(weighted) if i not in rows or j not in columns}
    return pairs


def aer(links, sure, possible):
    """XLM-E eq. 10, counting links one by one over all sentences."""
    predicted_sure = predicted_possible = predicted = all_sure = 0
    for A, S, P in zip(links, sure, possible):
        for link in A:
            predicted += 1
            predicted_sure += link in S
            predicted_possible += link in P or link in S
        all_sure += len(S)
    return 1 - (predicted_sure + predicted_possible) / (predicted + all_sure)
