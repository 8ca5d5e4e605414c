"""Ciphers: languages that differ in nothing but their words, and pairs that never join two of them."""

from collections import defaultdict
from itertools import chain, combinations
from pathlib import Path

import pytest

from data import ciphers, corpora, folder
from data.files import SPLITS
from data.prepare import prepare
from data.tokenizers import load_tokenizer

TESTS = Path(__file__).parent
ALPHABETS = ciphers.alphabets()
PLAIN = {character: piece for own in ALPHABETS.values() for piece, character in enumerate(own)}


@pytest.fixture(scope="module")
def english() -> list[tuple[str, str]]:
    """Documents of this repository's tests, which have words enough for 128 pieces."""
    lines = "\n".join(path.read_text() for path in sorted(TESTS.glob("test_*.py"))).splitlines()
    documents = []
    for i in range(150):
        split = {1: "valid", 2: "test"}.get(i % 10, "train")
        documents.append((split, " ".join(lines[20 * i : 20 * i + 20])))
    return documents


def language_of(text: str) -> str:
    """The one language whose characters the text has."""
    (language,) = (name for name, own in ALPHABETS.items() if set(own).issuperset(text))
    return language


def plain(text: str) -> tuple[int, ...]:
    return tuple(PLAIN[character] for character in text)


def test_ciphers_are_permutations():
    assert list(ALPHABETS) == list(ciphers.LANGUAGES) and ALPHABETS == ciphers.alphabets()
    assert len(PLAIN) == len(ciphers.LANGUAGES) * ciphers.PIECES  # no character twice
    orders = [[sorted(own).index(character) for character in own] for own in ALPHABETS.values()]
    assert all(sum(map(int.__eq__, one, two)) < 10 for one, two in combinations(orders, 2))


def test_languages_have_documents_and_characters_of_their_own(english):
    rows = ciphers.by_language(english)
    assert list(rows) == list(ciphers.LANGUAGES)
    texts, sizes = set(), []
    for language, own in rows.items():
        assert {split for split, _ in own} == set(SPLITS)
        assert own[0] == ("train", "".join(ALPHABETS[language]))
        for _, text in own[1:]:
            assert language_of(text) == language and plain(text) not in texts
            texts.add(plain(text))
        sizes.append(sum(len(text) for split, text in own if split == "train"))
    assert max(sizes) < 1.05 * min(sizes)
    _, names = ciphers.in_pieces(english)
    _, text = rows["en"][1]
    written = "".join(names[piece] for piece in plain(text)).replace("\u2581", " ")
    everything = " ".join(text for _, text in english)
    # Characters beyond ASCII may be no pieces.
    one, other = (words.lower().encode("ascii", "ignore").decode().split() for words in (written, everything))
    assert " ".join(one[:3]) in " ".join(other)


def test_pairs_say_the_same_and_two_languages_are_never_paired(english):
    rows = ciphers.by_pair(english)
    assert len(rows) == 10 and {"en-x2", "x2-en", "x1-x3"} < set(rows) and not {"x2-x3", "x3-x2"} & set(rows)
    splits, train, held_out = defaultdict(set), [], set()
    for name, own in rows.items():
        for split, one, two in own:
            assert f"{language_of(one)}-{language_of(two)}" == name and plain(one) == plain(two)
            assert ciphers.SHORTEST <= len(one) <= ciphers.LONGEST
            splits[plain(one)].add(split)
            if split == "train":
                train.append(plain(one))
        held_out.add(tuple(plain(one) for split, one, _ in own if split == "valid"))
    assert all(len(found) == 1 for found in splits.values())
    assert len(train) == len(set(train)) > 300  # every training pair in one order of one pair of languages
    assert len(held_out) == 1 and 30 < len(*held_out) <= ciphers.HELD_OUT


def test_ciphers_are_prepared_with_a_token_a_character(tmp_path, monkeypatch, english):
    for name in ("ciphers", "ciphers-pairs"):
        monkeypatch.setitem(corpora.CORPORA, name, corpora.CORPORA[name]._replace(read=lambda: english))
    monkeypatch.setattr(folder, "PREPARED", tmp_path)
    one, two = folder.ready("ciphers"), folder.ready("ciphers-pairs")
    assert (one / "xlmr.model").read_bytes() == (two / "xlmr.model").read_bytes()
    alone = prepare("ciphers", languages="x1", out=tmp_path / "alone")  # learned from all languages all the same
    assert (alone / "xlmr.model").read_bytes() == (one / "xlmr.model").read_bytes()
    tokenizer = load_tokenizer(one)
    text = "".join(chain(*ALPHABETS.values()))
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk not in ids and len(set(ids)) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(text) + 5
