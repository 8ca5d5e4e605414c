"""Ciphers: languages that differ only in their words, the pairs made of them, and the tasks in them."""

import argparse
import hashlib
import json
import random
import typing
from collections import defaultdict
from itertools import chain, combinations, permutations
from pathlib import Path

import pytest

from data import cipher_tasks, ciphers, corpora, folder, xtreme
from data.files import SPLITS
from data.prepare import prepare
from data.tokenizers import load_tokenizer

ALPHABETS = ciphers.ALPHABETS
PLAIN = {character: piece for alphabet in ALPHABETS.values() for piece, character in enumerate(alphabet)}


@pytest.fixture(scope="module")
def english() -> list[tuple[str, str]]:
    """Documents of Python source code, which has enough words for 128 pieces."""
    lines = Path(argparse.__file__).read_text().splitlines() + Path(typing.__file__).read_text().splitlines()
    documents = []
    for i in range(len(lines) // 20):
        split = {1: "valid", 2: "test"}.get(i % 10, "train")
        documents.append((split, " ".join(lines[20 * i : 20 * i + 20])))
    return documents


def language_of(text: str) -> str:
    """The only language whose alphabet contains all characters of the text."""
    (language,) = (name for name, alphabet in ALPHABETS.items() if set(alphabet).issuperset(text))
    return language


def plain(text: str) -> tuple[int, ...]:
    return tuple(PLAIN[character] for character in text)


def test_alphabets_are_disjoint_and_differently_ordered():
    assert list(ALPHABETS) == list(ciphers.LANGUAGES)
    assert len(PLAIN) == len(ciphers.LANGUAGES) * ciphers.PIECES  # no character twice
    orders = [[sorted(alphabet).index(character) for character in alphabet] for alphabet in ALPHABETS.values()]
    assert all(sum(map(int.__eq__, one, two)) < 10 for one, two in combinations(orders, 2))


def test_ciphers_are_shown_in_letters_that_fonts_have():
    for alphabet in ciphers.ALPHABETS.values():
        shown = "".join(alphabet).translate(ciphers.VISIBLE)
        assert len(set(shown)) == ciphers.PIECES
        assert shown.isalpha() and "\u0100" <= min(shown) <= max(shown) < "\u0180"
    assert "replay the work".translate(ciphers.VISIBLE) == "replay the work"


def test_each_language_has_its_own_documents_and_characters(english):
    rows = ciphers.by_language(english)
    assert list(rows) == list(ciphers.LANGUAGES)
    texts, sizes = set(), []
    for language, documents in rows.items():
        assert {split for split, _ in documents} == set(SPLITS)
        assert documents[0] == ("train", "".join(ALPHABETS[language]))
        for _, text in documents[1:]:
            assert language_of(text) == language
            assert plain(text) not in texts
            texts.add(plain(text))
        sizes.append(sum(len(text) for split, text in documents if split == "train"))
    assert max(sizes) < 1.05 * min(sizes)


def test_english_pieces_spell_the_text(english):
    _, names = ciphers.in_pieces(english)
    _, text = ciphers.by_language(english)["en"][1]
    written = "".join(names[piece] for piece in plain(text)).replace("\u2581", " ")
    everything = " ".join(text for _, text in english).lower()
    assert " ".join(written.split()[:3]) in " ".join(everything.split())


def test_pairs_are_translations_and_two_languages_are_never_paired(english):
    rows = ciphers.by_pair(english)
    every_two = {f"{one}-{two}" for one, two in permutations(ciphers.LANGUAGES, 2)}
    assert set(rows) == every_two - {"x2-x3", "x3-x2"}
    splits, train, held_out = defaultdict(set), [], set()
    for name, pairs in rows.items():
        for split, one, two in pairs:
            assert f"{language_of(one)}-{language_of(two)}" == name
            assert plain(one) == plain(two)
            assert ciphers.SHORTEST <= len(one) <= ciphers.LONGEST
            splits[plain(one)].add(split)
            if split == "train":
                train.append(plain(one))
        held_out.add(tuple(plain(one) for split, one, _ in pairs if split == "valid"))
    assert set(map(len, splits.values())) == {1}
    assert len(train) == len(set(train)) > 300  # each text is in one pair of languages, in one order
    [texts] = held_out  # the same for all pairs of languages
    assert 30 < len(texts) <= ciphers.HELD_OUT


@pytest.mark.parametrize("form", [ciphers.by_language, ciphers.by_pair])
def test_backwards_reverses_the_ciphers_and_not_english(form, english):
    expected = {}
    for name, rows in form(english).items():
        turn = [-1 if language.startswith("x") else 1 for language in name.split("-")]
        expected[name] = [(split, *(text[::step] for text, step in zip(texts, turn))) for split, *texts in rows]
    assert form(english, backwards=True) == expected


def test_prepared_ciphers_have_one_token_per_character(tmp_path, monkeypatch, english):
    for name in ("ciphers", "ciphers-pairs"):
        monkeypatch.setitem(corpora.CORPORA, name, corpora.CORPORA[name]._replace(read=lambda: english))
    monkeypatch.setattr(folder, "PREPARED", tmp_path)
    one, two = folder.ready("ciphers"), folder.ready("ciphers-pairs")
    assert (one / "xlmr.model").read_bytes() == (two / "xlmr.model").read_bytes()
    alone = prepare("ciphers", languages="x1", out=tmp_path / "alone")  # learned from all languages nevertheless
    assert (alone / "xlmr.model").read_bytes() == (one / "xlmr.model").read_bytes()
    tokenizer = load_tokenizer(one)
    text = "".join(chain(*ALPHABETS.values()))
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk not in ids
    assert len(set(ids)) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(text) + 5 == 517


# --- The translator's ciphers


def read_back(language: str, cipher: str) -> list[int]:
    """The pieces that a cipher encodes; in x2, the lower of the two that share a character."""
    pieces = list(plain(cipher))
    if language == "x1":
        return pieces[::-1]
    if language == "x2":
        assert not any(piece % 2 for piece in pieces)
        return pieces
    decoded = [pieces[0]]
    for before, piece in zip(pieces, pieces[1:]):  # k is the same in English
        decoded.append(piece if before // 2 % 2 == 0 else piece - 1 if piece % 2 else piece + 1)
    return decoded


def test_a_translator_reads_one_token_per_character_and_writes_english(tmp_path, monkeypatch, english):
    monkeypatch.setitem(corpora.CORPORA, "ciphers-mt", corpora.CORPORA["ciphers-mt"]._replace(read=lambda: english))
    monkeypatch.setattr(folder, "PREPARED", tmp_path)
    tokenizer = load_tokenizer(folder.ready("ciphers-mt"))
    rows = ciphers.to_english(english)
    piece_of = {}  # token of English -> its piece in the ciphers
    for language in ("x1", "x3", "x2"):
        for _, cipher, text in rows[f"{language}-en"]:
            assert language_of(cipher) == language
            (space, *source), target = tokenizer.encode_batch([cipher, text])
            assert tokenizer.unk not in source + target
            assert len(source) == len(cipher) == len(target)
            assert tokenizer.decode([space, *source]) == cipher
            assert tokenizer.decode(target) == text
            for token, piece in zip(target, read_back(language, cipher)):
                expected = piece_of.setdefault(token, piece)
                assert piece == (expected // 2 * 2 if language == "x2" else expected)
    assert len(set(piece_of.values())) == len(piece_of) > 100


def test_a_translator_is_trained_on_no_text_of_held_out_documents(monkeypatch, english):
    monkeypatch.setattr(ciphers, "HELD_OUT", 10**6)
    held_out = {text for rows in ciphers.to_english(english).values() for split, _, text in rows if split != "train"}
    monkeypatch.setattr(ciphers, "HELD_OUT", 7)
    texts = defaultdict(list)
    for name, rows in ciphers.to_english(english).items():
        for split, _, text in rows:
            texts["train" if split == "train" else f"{split} {name}"].append(text)
    train = texts.pop("train")
    assert len(train) == len(set(train)) > 1000
    assert held_out.isdisjoint(train)
    assert all(6 <= len(text) <= 20 for text in train)
    for split in ("valid", "test"):
        first, *others = [texts[f"{split} {language}-en"] for language in ciphers.HARDER]
        assert others == [first, first]
        assert len(first) == 7
        assert held_out.issuperset(first)
        documents = " ".join(text for name, text in english if name == split)
        sentences = " ".join(ciphers.split_sentences(documents.lower()))
        assert all(text in sentences for text in first)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.fixture
def tasks(english, tmp_path, monkeypatch) -> dict[str, xtreme.Examples]:
    """The examples of the three tasks, which are made only once."""
    calls = []
    monkeypatch.setattr(cipher_tasks, "pydocs", lambda: calls.append(1) or english)
    monkeypatch.setattr(cipher_tasks, "PREPARED", tmp_path)
    examples = {task: xtreme.read_examples(task, None) for task in xtreme.LABORATORY}
    assert calls == [1]
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["ciphers-examples"]
    return examples


def test_tasks_have_the_same_examples_in_every_language_and_train_in_english(tasks):
    for task, examples in tasks.items():
        assert examples.notes == []
        assert examples.labels == list(xtreme.TASKS[task].labels)
        assert list(examples.test) == list(ciphers.LANGUAGES)
        sizes = len(examples.train), len(examples.valid), len(examples.test["en"])
        assert all(size > least for size, least in zip(sizes, (30, 3, 5)))
        for language, each in {"en": examples.train + examples.valid, **examples.test}.items():
            assert {language_of("".join(example.texts)) for example in each} == {language}
        for versions in zip(*examples.test.values(), strict=True):
            decoded = [one._replace(texts=tuple(map(plain, one.texts))) for one in versions]
            if task == "spans":
                decoded = [one._replace(gold=[(plain(text), place) for text, place in one.gold]) for one in decoded]
            assert decoded == decoded[:1] * len(versions)


def test_tasks_are_made_of_documents_that_no_language_is_trained_on(english):
    """Nor do they contain a sentence of the training text."""
    rows = [("train", "X1 y2. Aa bb!"), ("valid", "Aa bb! One two three."), ("test", "Four Five. aa BB! Zx qy.")]
    documents = cipher_tasks.documents(english + rows)
    counts = {split: sum(name == split for name, _ in english) for split in SPLITS}
    assert len(documents["test"]) == counts["test"] + 1
    assert len(documents["train"] + documents["valid"]) == counts["valid"] + 1
    assert len(documents["valid"]) == (counts["valid"] + 1) // 8
    words = [[(len(pieces) > 0, tag) for pieces, tag in text] for text in documents["train"] + documents["valid"]]
    assert [(True, "O")] * 3 in words  # one two three
    assert [tag for _, tag in documents["test"][-1]] == ["O", "NAME", "O", "O"]
    trained = set()
    for rows in (*ciphers.by_language(english).values(), *ciphers.by_pair(english).values()):
        trained |= {plain(text) for split, *texts in rows if split == "train" for text in texts}
    held_out = {tuple(cipher_tasks.pieces_of(text)) for texts in documents.values() for text in texts}
    assert trained.isdisjoint(held_out)


WORDS = {"Tensor": "NAME", "tensor": "O", "(GPU),": "NAME", "torch.nn": "CODE", "a_b": "CODE", "fileName": "CODE"}
WORDS |= {"run()": "CODE", "end.": "O", "3.5": "NUMBER", "int8,": "NUMBER", "Http2": "NUMBER", "C++": "NAME", "--": "O"}


def test_tags_depend_on_the_case_of_a_word():
    assert {word: cipher_tasks.tag_of(word, False) for word in WORDS} == WORDS
    first = {word: "O" if tag == "NAME" else tag for word, tag in WORDS.items()}
    assert {word: cipher_tasks.tag_of(word, True) for word in WORDS} == first


def test_tags_are_aligned_with_their_words(tasks, english):
    _, names = ciphers.in_pieces(english)
    tags = defaultdict(set)
    for example in tasks["tags"].train:
        assert sum(map(len, example.texts)) <= 28
        assert set(example.gold) != {"O"}
        for word, tag in zip(example.texts, example.gold):
            tags["".join(names[piece] for piece in plain(word))].add(tag)
    assert tags["\u2581assert"] == {"O"}
    assert tags["\u2581tmp_path)"] <= {"CODE"}
    numbers = [tags[word] for word in tags if "7" in word]
    assert {"NUMBER" in word_tags for word_tags in numbers} == {True}
    code = [tags[word] for word in tags if "_" in word.strip("\u2581_.,()'\"")]
    assert all(word_tags.isdisjoint({"O", "NAME"}) for word_tags in code)


def test_examples_of_tasks_are_those_of_published_results(monkeypatch):
    rng = random.Random(0)
    documents = [[([rng.randrange(128)], "NAME") for _ in range(200)] for _ in range(10)]
    monkeypatch.setattr(cipher_tasks, "documents", lambda _: dict.fromkeys(SPLITS, documents))
    text = json.dumps(cipher_tasks.make([]))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "523e40e0b5c796d1"


def test_bits_woven_into_a_wrong_text_occur_nowhere_in_the_right_one():
    document = [([piece], "O") for piece in range(60)]
    labels = set()
    for (one, two), label in cipher_tasks.paired([document], random.Random(0)):
        assert all(6 <= len(text) <= 13 for text in (one, two))
        right = {*one, *(range(one[-1] + 1, one[-1] + 1 + len(two)))}
        assert (set(two) <= right) == (label == "1")
        assert all(piece not in right or piece == one[-1] + 1 + place for place, piece in enumerate(two))
        labels.add(label)
    assert labels == {"0", "1"}


def test_woven_texts_alternate_bits_of_both_and_begin_with_either():
    rng, first = random.Random(0), set()
    for _ in range(100):
        one, two = list(range(20)), list(range(100, 130))
        text = cipher_tasks.woven(one, two, rng)
        assert [number % 100 for number in text] == one
        *runs, last = "".join("ab"[number >= 100] for number in text).replace("ab", "a b").replace("ba", "b a").split()
        assert all(2 <= len(run) <= 5 for run in runs)
        assert len(last) <= 5
        first.add(runs[0][0])
    assert first == {"a", "b"}


def test_an_answer_is_a_bit_inserted_from_another_document(tasks, english):
    texts = chain.from_iterable(cipher_tasks.documents(english).values())
    documents = [bytes(cipher_tasks.pieces_of(text)) for text in texts]

    def containing(pieces: tuple) -> set[int]:
        """The numbers of the documents that contain the pieces."""
        return {number for number, document in enumerate(documents) if bytes(pieces) in document}

    places = set()
    for example in tasks["spans"].test["en"]:
        [(answer, place)] = example.gold
        start, text = map(plain, example.texts)
        strange, rest = text[place : place + len(answer)], text[:place] + text[place + len(answer) :]
        assert plain(answer) == strange
        assert 3 <= len(strange) <= 7
        assert 2 <= len(start) <= 4
        assert 12 <= len(rest) <= 16
        around, inside = containing(start + rest), containing(strange)
        assert all((around, inside))
        assert len(around | inside) > 1  # a short bit may occur in both documents
        places.add(place)
    assert len(places) > 5
