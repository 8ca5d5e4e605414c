"""Ciphers: languages that differ in nothing but their words, pairs that never join two of them, and tasks in them."""

import random
from collections import defaultdict
from itertools import chain, combinations
from pathlib import Path

import pytest

from data import cipher_tasks, ciphers, corpora, folder, xtreme
from data.files import SPLITS
from data.tokenizers import load_tokenizer

TESTS = Path(__file__).parent
ALPHABETS = ciphers.alphabets()
PLAIN = {character: piece for own in ALPHABETS.values() for piece, character in enumerate(own)}


@pytest.fixture(scope="module")
def english() -> list[tuple[str, str]]:
    """Documents of this repository's tests, which have words enough for 128 pieces."""
    lines = "\n".join(path.read_text() for path in sorted(TESTS.glob("test_*.py"))).splitlines()
    documents = []
    for i in range(320):
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
    tokenizer = load_tokenizer(one)
    text = "".join(chain(*ALPHABETS.values()))
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk not in ids and len(set(ids)) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(text) + 5


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.fixture
def tasks(english, tmp_path, monkeypatch) -> dict[str, xtreme.Examples]:
    """What is read of the three tasks, whose folder is written the first time and no other."""
    calls = []
    monkeypatch.setattr(cipher_tasks, "pydocs", lambda: calls.append(1) or english)
    monkeypatch.setattr(cipher_tasks, "PREPARED", tmp_path)
    found = {task: xtreme.read_examples(task, None) for task in xtreme.LABORATORY}
    assert calls == [1] and [path.name for path in tmp_path.glob("[!.]*")] == ["ciphers-tasks"]
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
            said.append([(tuple(map(plain, one.texts)), gold) for one, gold in zip(own, golds)])
        assert all(each == said[0] for each in said)


def test_tasks_are_of_documents_that_no_language_is_trained_on(english):
    """Nor do they have a sentence of a training text."""
    rows = [("train", "X1 y2. Aa bb!"), ("valid", "Aa bb! One two three."), ("test", "Four Five. aa BB! Zx qy.")]
    found = cipher_tasks.documents(english + rows)
    counts = {split: sum(own == split for own, _ in english) for split in SPLITS}
    assert len(found["test"]) == counts["test"] + 1 and len(found["train"] + found["dev"]) == counts["valid"] + 1
    assert len(found["dev"]) == (counts["valid"] + 1) // 8
    words = [[(len(pieces) > 0, tag) for pieces, tag in text] for text in (found["train"] + found["dev"])]
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
        assert sum(map(len, one.texts)) <= 60 and set(one.gold) != {"O"}
        for word, tag in zip(one.texts, one.gold):
            tags["".join(names[piece] for piece in plain(word))].add(tag)
    assert tags["\u2581assert"] == {"O"} and tags["\u2581tmp_path)"] <= {"CODE"} and any("7" in word for word in tags)
    assert all("NUMBER" in own for word, own in tags.items() if "7" in word)
    assert all(own.isdisjoint({"O", "NAME"}) for word, own in tags.items() if "_" in word.strip("\u2581_.,()'\""))


def test_the_wrong_text_of_a_pair_is_the_right_one_with_bits_of_another(tasks):
    examples = tasks["pairs"].train
    right = {plain(one.texts[0]): plain(one.texts[1]) for one in examples if one.gold == "1"}
    wrong = {plain(one.texts[0]): plain(one.texts[1]) for one in examples if one.gold == "0"}
    assert right.keys() == wrong.keys()
    same = []
    for first, text in wrong.items():
        assert 10 <= len(first) <= 28 and 10 <= len(text) <= 28
        assert len(text) == len(right[first]) and text != right[first]
        same.append(sum(map(int.__eq__, text, right[first])) / len(text))
    assert 0.4 < sum(same) / len(same) < 0.65  # half of it stands in its place


def test_woven_texts_have_bits_of_both_in_turns():
    rng = random.Random(0)
    for _ in range(100):
        one, two = list(range(20)), list(range(100, 130))
        sides = [number >= 100 for number in cipher_tasks.woven(one, two, rng)]
        text = cipher_tasks.woven(one, two, rng)
        assert [number % 100 for number in text] == one and len(sides) == 20
        runs = "".join("ab"[side] for side in sides).replace("ab", "a b").replace("ba", "b a").split()
        assert all(2 <= len(run) <= 5 for run in runs[:-1]) and len(runs[-1]) <= 5
    assert cipher_tasks.woven([1, 2, 3], [1, 2, 4], rng) == [1, 2, 4]  # never the first one itself


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
        assert plain(answer) == strange and 4 <= len(strange) <= 12 and 4 <= len(start) <= 12 and 24 <= len(rest) <= 36
        whole = {number for number, document in enumerate(documents) if is_in(start + rest, document)}
        theirs = {number for number, document in enumerate(documents) if is_in(strange, document)}
        assert whole and theirs - whole
        places.add(place)
    assert len(places) > 5
