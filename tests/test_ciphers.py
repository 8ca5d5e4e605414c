"""Ciphers: languages that differ in nothing but their words, pairs that never join two of them, and tasks in them."""

import argparse
import random
import typing
from collections import defaultdict
from itertools import chain, combinations
from pathlib import Path

import pytest

from data import cipher_tasks, ciphers, corpora, folder, xtreme
from data.files import SPLITS
from data.prepare import prepare
from data.tokenizers import load_tokenizer

ALPHABETS = ciphers.ALPHABETS
PLAIN = {character: piece for own in ALPHABETS.values() for piece, character in enumerate(own)}


@pytest.fixture(scope="module")
def english() -> list[tuple[str, str]]:
    """Documents of Python's own code, which has words enough for 128 pieces."""
    lines = Path(argparse.__file__).read_text().splitlines() + Path(typing.__file__).read_text().splitlines()
    documents = []
    for i in range(len(lines) // 20):
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
    assert list(ALPHABETS) == list(ciphers.LANGUAGES)
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


@pytest.mark.parametrize("form", [ciphers.by_language, ciphers.by_pair])
def test_backwards_are_the_ciphers_and_never_english(form, english):
    expected = {}
    for name, rows in form(english).items():
        turn = [-1 if language.startswith("x") else 1 for language in name.split("-")]
        expected[name] = [(split, *(text[::step] for text, step in zip(texts, turn))) for split, *texts in rows]
    assert form(english, backwards=True) == expected


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
    assert tokenizer.vocab_size == len(text) + 5 == 517


# --- What the translator reads


def read_back(language: str, cipher: str) -> list[int]:
    """The pieces that a cipher stands for; of x2 the lower one of two."""
    pieces = list(plain(cipher))
    if language == "x1":
        return pieces[::-1]
    if language == "x2":
        assert not any(piece % 2 for piece in pieces)
        return pieces
    found = [pieces[0]]
    for before, piece in zip(pieces, pieces[1:]):  # k is the same in English
        found.append(piece if before // 2 % 2 == 0 else piece - 1 if piece % 2 else piece + 1)
    return found


def test_a_translator_reads_a_token_a_character_and_writes_english(tmp_path, monkeypatch, english):
    monkeypatch.setitem(corpora.CORPORA, "ciphers-mt", corpora.CORPORA["ciphers-mt"]._replace(read=lambda: english))
    monkeypatch.setattr(folder, "PREPARED", tmp_path)
    tokenizer = load_tokenizer(folder.ready("ciphers-mt"))
    rows = ciphers.to_english(english)
    piece_of = {}  # token of English -> the piece that it is in the ciphers
    for language in ("x1", "x3", "x2"):
        for _, cipher, text in rows[f"{language}-en"]:
            assert language_of(cipher) == language
            (space, *source), target = tokenizer.encode_batch([cipher, text])
            assert tokenizer.unk not in source + target and len(source) == len(cipher) == len(target)
            assert tokenizer.decode([space, *source]) == cipher and tokenizer.decode(target) == text
            for token, piece in zip(target, read_back(language, cipher)):
                expected = piece_of.setdefault(token, piece)
                assert piece == (expected // 2 * 2 if language == "x2" else expected)
    assert len(set(piece_of.values())) == len(piece_of) > 100


def test_a_translator_is_trained_on_nothing_of_held_out_documents(monkeypatch, english):
    monkeypatch.setattr(ciphers, "HELD_OUT", 10**6)
    every = {text for own in ciphers.to_english(english).values() for split, _, text in own if split != "train"}
    monkeypatch.setattr(ciphers, "HELD_OUT", 7)
    texts = defaultdict(list)
    for name, rows in ciphers.to_english(english).items():
        for split, _, text in rows:
            texts["train" if split == "train" else f"{split} {name}"].append(text)
    train = texts.pop("train")
    assert len(train) == len(set(train)) > 1000 and every.isdisjoint(train)
    assert all(6 <= len(text) <= 20 for text in train)
    for split in ("valid", "test"):
        one, *others = [texts[f"{split} {language}-en"] for language in ciphers.HARDER]
        assert others == [one, one] and len(one) == 7 and every.issuperset(one)
        said = " ".join(ciphers.sentences(" ".join(text for own, text in english if own == split).lower()))
        assert all(text in said for text in one)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.fixture
def tasks(english, tmp_path, monkeypatch) -> dict[str, xtreme.Examples]:
    """What is read of the three tasks, which are made the first time and no other."""
    calls = []
    monkeypatch.setattr(cipher_tasks, "pydocs", lambda: calls.append(1) or english)
    monkeypatch.setattr(cipher_tasks, "PREPARED", tmp_path)
    found = {task: xtreme.read_examples(task, None) for task in xtreme.LABORATORY}
    assert calls == [1] and [path.name for path in tmp_path.glob("[!.]*")] == ["ciphers-examples"]
    return found


def test_tasks_say_the_same_in_every_language_and_are_learned_in_english(tasks):
    for task, examples in tasks.items():
        assert examples.notes == [] and list(examples.test) == list(ciphers.LANGUAGES)
        assert examples.labels == list(xtreme.TASKS[task].labels)
        assert len(examples.train) > 30 and len(examples.valid) > 3 and len(examples.test["en"]) > 5
        said = []
        for language, own in {"en": examples.train + examples.valid, **examples.test}.items():
            assert {language_of("".join(one.texts)) for one in own} == {language}
        for own in examples.test.values():
            golds = [[(plain(text), place) for text, place in one.gold] if task == "spans" else one.gold for one in own]
            said.append([(one.id, tuple(map(plain, one.texts)), gold) for one, gold in zip(own, golds)])
        assert all(each == said[0] for each in said)


def test_tasks_are_of_documents_that_no_language_is_trained_on(english):
    """Nor do they have a sentence of a training text."""
    rows = [("train", "X1 y2. Aa bb!"), ("valid", "Aa bb! One two three."), ("test", "Four Five. aa BB! Zx qy.")]
    found = cipher_tasks.documents(english + rows)
    counts = {split: sum(own == split for own, _ in english) for split in SPLITS}
    assert len(found["test"]) == counts["test"] + 1 and len(found["train"] + found["valid"]) == counts["valid"] + 1
    assert len(found["valid"]) == (counts["valid"] + 1) // 8
    words = [[(len(pieces) > 0, tag) for pieces, tag in text] for text in (found["train"] + found["valid"])]
    assert [(True, "O")] * 3 in words  # one two three
    [tags] = [[tag for _, tag in text] for text in found["test"][-1:]]
    assert tags == ["O", "NAME", "O", "O"]
    trained = set()
    for rows in (*ciphers.by_language(english).values(), *ciphers.by_pair(english).values()):
        trained |= {plain(text) for split, *texts in rows if split == "train" for text in texts}
    held_out = {tuple(cipher_tasks.pieces_of(text)) for own in found.values() for text in own}
    assert not trained & held_out


WORDS = {"Tensor": "NAME", "tensor": "O", "(GPU),": "NAME", "torch.nn": "CODE", "a_b": "CODE", "fileName": "CODE"}
WORDS |= {"run()": "CODE", "end.": "O", "3.5": "NUMBER", "int8,": "NUMBER", "Http2": "NUMBER", "C++": "NAME", "--": "O"}


def test_tags_are_read_off_the_text_in_its_case():
    assert {word: cipher_tasks.tag_of(word, False) for word in WORDS} == WORDS
    first = {word: "O" if tag == "NAME" else tag for word, tag in WORDS.items()}
    assert {word: cipher_tasks.tag_of(word, True) for word in WORDS} == first


def test_tags_stand_at_their_words(tasks, english):
    _, names = ciphers.in_pieces(english)
    tags = defaultdict(set)
    for one in tasks["tags"].train:
        assert sum(map(len, one.texts)) <= 28 and set(one.gold) != {"O"}
        for word, tag in zip(one.texts, one.gold):
            tags["".join(names[piece] for piece in plain(word))].add(tag)
    assert tags["\u2581assert"] == {"O"} and tags["\u2581tmp_path)"] <= {"CODE"} and any("7" in word for word in tags)
    assert all("NUMBER" in own for word, own in tags.items() if "7" in word)
    assert all(own.isdisjoint({"O", "NAME"}) for word, own in tags.items() if "_" in word.strip("\u2581_.,()'\""))


def test_what_is_woven_into_a_pair_stands_nowhere_in_it():
    document = [([piece], "O") for piece in range(60)]
    labels = set()
    for (one, two), label in cipher_tasks.paired([document], random.Random(0)):
        assert 6 <= len(one) <= 13 and 6 <= len(two) <= 13
        own = {*one, *(range(one[-1] + 1, one[-1] + 1 + len(two)))}
        assert (set(two) <= own) == (label == "1")
        assert all(piece not in own or piece == one[-1] + 1 + place for place, piece in enumerate(two))
        labels.add(label)
    assert labels == {"0", "1"}


def test_woven_texts_have_bits_of_both_in_turns():
    """Either of them begins."""
    rng, first = random.Random(0), set()
    for _ in range(100):
        one, two = list(range(20)), list(range(100, 130))
        text = cipher_tasks.woven(one, two, rng)
        assert [number % 100 for number in text] == one
        runs = "".join("ab"[number >= 100] for number in text).replace("ab", "a b").replace("ba", "b a").split()
        assert all(2 <= len(run) <= 5 for run in runs[:-1]) and len(runs[-1]) <= 5
        first.add(runs[0][0])
    assert first == {"a", "b"}


def test_an_answer_is_what_another_document_has_put_in(tasks, english):
    texts = chain.from_iterable(cipher_tasks.documents(english).values())
    documents = [tuple(cipher_tasks.pieces_of(text)) for text in texts]

    def is_in(pieces: tuple, document: tuple) -> bool:
        return any(document[place : place + len(pieces)] == pieces for place in range(len(document)))

    places = set()
    for one in tasks["spans"].test["en"]:
        [(answer, place)] = one.gold
        start, text = map(plain, one.texts)
        strange, rest = text[place : place + len(answer)], text[:place] + text[place + len(answer) :]
        assert plain(answer) == strange and 3 <= len(strange) <= 7 and 2 <= len(start) <= 4 and 12 <= len(rest) <= 16
        whole = {number for number, document in enumerate(documents) if is_in(start + rest, document)}
        theirs = {number for number, document in enumerate(documents) if is_in(strange, document)}
        assert whole and theirs and len(whole | theirs) > 1  # a short bit may stand in both
        places.add(place)
    assert len(places) > 5
