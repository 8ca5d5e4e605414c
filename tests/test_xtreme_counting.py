"""What finds an answer among an example's rows, and what finds answers without a model."""

import math

import pytest
import torch

from data.xtreme import Example
from data.xtreme_rows import Row, best_answer, by_example
from data.xtreme_scores import guess, labels_by_word, tags_by_word


def test_the_best_answer_is_that_of_all_spans():
    generator = torch.Generator().manual_seed(0)
    for longest in (1, 2, 30):
        begins, ends = torch.randn(2, 12, generator=generator)
        row = Row(0, [], [(place, (10 * place, 10 * place + 5)) for place in range(4, 11)], [])
        spans = {(i, j): begins[i] + ends[j] for i in range(4, 11) for j in range(i, min(i + longest, 11))}
        i, j = max(spans, key=spans.get)
        score, begin, end = best_answer(row, begins, ends, longest)
        assert (begin, end) == (10 * i, 10 * j + 5) and score == pytest.approx(float(spans[i, j]))
    assert best_answer(row._replace(marks=[]), begins, ends, 30) == (-math.inf, 0, 0)


def test_the_rows_of_an_example_are_put_together():
    example, row = Example("", ("?", "one two"), []), Row(0, [], [], [])
    rows = [row, row._replace(example=1), row]
    found = {0: [(5.0, 0, 3)], 1: [(7.0, 4, 7)], 2: [(1.0, 4, 7)]}
    assert by_example("answer", [example, example], rows, found) == ["one", "two"]
    found = {0: ["A", "B"], 1: ["C"], 2: ["D"]}
    assert by_example("tags", [example, example], rows, found) == [["A", "B", "D"], ["C"]]


def tagged(text: str, tags: str) -> Example:
    return Example("", tuple(text.split()), tags.split())


def test_a_guess_is_the_most_frequent_tag_or_label_or_the_first_words():
    train = [tagged("a b c", "X Y Y"), tagged("d", "X"), tagged("e f", "Y Z")]
    assert guess("tags", train, [tagged("g h", "X X"), tagged("i", "X")]) == [["Y", "Y"], ["Y"]]
    train = [Example("", ("a",), label) for label in ("no", "yes", "no")]
    assert guess("label", train, train[:2]) == ["no", "no"]
    one = Example("", ("which ?", "the  red dog and the cat"), [("red dog", 5), ("the cat", 17)])
    two = one._replace(gold=[("red dog and the", 5)])  # answers of 2, 2 and 4 words
    assert guess("answer", [one, two], [one]) == ["the red"]


def test_counting_gives_each_word_its_most_frequent_tag():
    train = [tagged("The run ends", "DET NOUN VERB"), tagged("a run run", "DET VERB VERB"), tagged("x y", "X X")]
    train += [tagged("the x z", "DET NOUN NOUN"), tagged("x u", "NOUN NOUN")]
    found = tags_by_word(train)([tagged("THE Run of", ""), tagged("x", "")])
    assert found == [["DET", "VERB", "NOUN"], ["NOUN"]]


def test_counting_gives_each_example_its_likeliest_label():
    """A word counts once in a text, and in each text by itself; unknown ones do not."""
    train = [Example("", texts, label) for *texts, label in (("a b", "c", "x"), ("a", "b", "x"), ("b", "a", "y"))]
    cases = {  # what 3 P(label, words) is: x, y
        ("A!", "new"): "x",  # 2 * 3/4, 1 * 1/3
        ("new", "a"): "y",  # 2 * 1/4, 1 * 2/3
        ("b, b b", "new"): "x",  # 2 * 2/4, 1 * 2/3; three times it would be y
        ("new", "new"): "x",  # 2, 1
    }
    assert labels_by_word(train)([Example("", texts, "") for texts in cases]) == list(cases.values())
