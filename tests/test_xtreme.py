"""XTREME: what is read, also where it is broken; rows of tokens that lose nothing; scores as they were published."""

import gzip
import json
import random
import re
import string
import sys
import unicodedata
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import xtreme
from data.tokenizers import XLMR, train_sentencepiece
from data.xtreme import NER, UPOS, Example, read
from data.xtreme_rows import UNKNOWN, Row, TaskData, batch_of, rows_of
from data.xtreme_scores import scores

ROOT = Path(__file__).parent.parent
T, STRIDE = 24, 6


@pytest.fixture(scope="session")
def tokenizer() -> XLMR:
    """Learned from this repository's Python; other scripts are spelt in bytes."""
    return train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], 500, kind=XLMR)


def write(path: Path, text: str | bytes) -> Path:
    """A file, compressed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def squad(*questions: tuple[str, str, list[tuple[str, int]]]) -> str:
    """SQuAD's JSON of (question, text, answers), an article each; their ids are 0, 1 and so on."""
    data = []
    for number, (question, context, answers) in enumerate(questions):
        answers = [{"text": text, "answer_start": start} for text, start in answers]
        asked = {"id": str(number), "question": question, "answers": answers}
        data.append({"title": "one", "paragraphs": [{"context": context, "qas": [asked]}]})
    return json.dumps({"version": "1.1", "data": data})


# ---------------------------------------------------------------------------------------------------------------------
# reading


def test_tags_of_tsv(tmp_path):
    write(tmp_path / "train-en.tsv", "A\tDET\nrow\tNOUN\n\n\nRead\tVERB\n \n.\tPUNCT")
    write(tmp_path / "dev-en.tsv", "dev\tX\n\n")
    write(tmp_path / "test-de.tsv.gz", "\u3000\tSYM\r\n\r\nZwei Worte\tX\r\n")
    write(tmp_path / "test-en.ud25.tsv", "en\tX\n")
    found, notes = read("pos", "train", tmp_path)
    assert found.keys() == {"en"} and notes == []
    assert [one.texts for one in found["en"]] == [("A", "row"), ("Read",), (".",)]
    assert [one.gold for one in found["en"]] == [["DET", "NOUN"], ["VERB"], ["PUNCT"]]
    assert len({one.id for one in found["en"]}) == 3
    found, notes = read("pos", "test", tmp_path)
    assert [one.texts for one in found["de"]] == [("\u3000",), ("Zwei Worte",)] and found.keys() == {"de", "en"}
    assert read("pos", "valid", tmp_path)[0]["en"][0].texts == ("dev",)


CONLLU = """# sent_id = 1
# text = Dámelo ya
1-3\tDámelo\t_\t_\t_\t_\t_\t_\t_\t_
1\tda\tdar\tVERB\t_\t_\t0\troot\t_\t_
2\tme\tyo\tPRON\t_\t_\t1\tiobj\t_\t_
3\tlo\tél\tPRON\t_\t_\t1\tobj\t_\t_
3.1\tgone\t_\tNOUN\t_\t_\t_\t_\t_\t_
4\t#\tya\tADV\t_\t_\t1\tadvmod\t_\t_

1\t_\t_\tNOUN\t_\t_\t0\troot\t_\t_
2\t_\t_\tVERB\t_\t_\t0\troot\t_\t_

1\tsnake_\t_\tNOUN\t_\t_\t0\troot\t_\t_
2\t_\t_\tSYM\t_\t_\t1\troot\t_\t_
"""


def test_tags_of_conllu(tmp_path):
    for name in ("es_gsd-ud-test.conllu", "en_ewt-ud-train.conllu.gz", "sv_talbanken-ud-train.conllu"):
        write(tmp_path / name, CONLLU)
    for split, language, name in (
        ("test", "es", "es_gsd-ud-test.conllu"),
        ("train", "en", "en_ewt-ud-train.conllu.gz"),
    ):
        found, notes = read("pos", split, tmp_path)
        assert found.keys() == {language}  # Swedish is none of the benchmark's, and not English
        assert [one.texts for one in found[language]] == [("da", "me", "lo", "#"), ("snake_", "_")]
        assert [one.gold for one in found[language]] == [["VERB", "PRON", "PRON", "ADV"], ["NOUN", "SYM"]]
        assert notes == [f"{tmp_path / name}: 1 x a sentence without its words"]


def test_bad_lines_of_tags(tmp_path):
    path = write(tmp_path / "test-de.tsv", "a\tX\nb\nc\tX\tX\nd\tX\te\nf\tQ\ng\t\n\n")
    found, notes = read("pos", "test", tmp_path)
    assert found["de"][0][1:] == (("a", "f", "g"), ["X", "Q", ""])
    said = [
        "2 x a line with 3 columns",
        "1 x a line with 1 columns",
        "1 x the unknown tag 'Q'",
        "1 x the unknown tag ''",
    ]
    assert notes == [f"{path}: {what}" for what in said]
    assert scores("pos", "de", [found["de"][0].gold], [["X", "X", "X"]])["f1"] < 100
    path = write(
        tmp_path / "conllu" / "de_gsd-ud-test.conllu", CONLLU.replace("1\tda\t", "1 da ").replace("\t", " ", 1)
    )
    found, notes = read("pos", "test", path.parent)
    assert found["de"][0].texts == ("me", "lo", "#")
    assert f"{path}: 1 x a line with 9 columns" in notes


def test_words_of_panx_lose_the_language_before_them(tmp_path):
    write(tmp_path / "test-de.tsv", "de:Anna\tB-PER\nde::\tO\nde:10:30\tO\nen:x\tO\nde:\tO\n\n")
    for task, words in (("ner", ("Anna", ":", "10:30", "en:x", "de:")), ("pos", ("de:Anna", "de::"))):
        found, _ = read(task, "test", tmp_path)
        assert found["de"][0].texts[: len(words)] == words


QUESTION = ("Where is it?", "It is in Rome, in Rome.", [("Rome", 9), ("in Rome", 15)])


def answer_file(language: str = "") -> str:
    question, context, answers = QUESTION
    return squad((question + language, context, answers))


@pytest.mark.parametrize(
    "task, split, files",
    [
        ("xquad", "train", {"train-v1.1.json": "en", "dev-v1.1.json": None}),
        ("xquad", "valid", {"train-v1.1.json": None, "dev-v1.1.json.gz": "en"}),
        ("xquad", "test", {"xquad.ar.json": "ar", "xquad.zh.json.gz": "zh", "xquad.en.json": "en"}),
        (
            "mlqa",
            "test",
            {
                "MLQA_V1/test/test-context-de-question-de.json": "de",
                "MLQA_V1/test/test-context-de-question-en.json": None,
                "MLQA_V1/test/test-context-en-question-en.json.gz": "en",
                "MLQA_V1/dev/dev-context-de-question-de.json": None,
            },
        ),
        (
            "tydiqa",
            "train",
            {
                "tydiqa-goldp-v1.1-train/tydiqa.goldp.en.train.json": "en",
                "tydiqa-goldp-v1.1-train/tydiqa.goldp.bn.train.json": "bn",
                "tydiqa-goldp-v1.1-train/tydiqa-goldp-v1.1-train.json": None,  # of all languages
                "tydiqa-goldp-v1.1-dev/tydiqa.goldp.en.dev.json": None,
            },
        ),
        ("tydiqa", "valid", {"tydiqa.goldp.ko.dev.json": "ko", "tydiqa-goldp-dev-telugu.json.gz": "te"}),
    ],
)
def test_answers_under_the_names_that_they_come_with(tmp_path, task, split, files):
    for name, language in files.items():
        write(tmp_path / name, answer_file(str(language)))
    write(tmp_path / "LICENSE", "not data")
    write(tmp_path / "en" / "train.xlm-roberta-base", "rows that XTREME's scripts leave")
    found, notes = read(task, split, tmp_path)
    assert notes == []
    expected = {language: [("Where is it?" + language, QUESTION[1])] for language in files.values() if language}
    assert {language: [one.texts for one in own] for language, own in found.items()} == expected
    assert all(one.gold == QUESTION[2] and one.id == "0" for own in found.values() for one in own)


def test_answers_that_are_not_where_they_should_be(tmp_path):
    text = "It is in Rome."
    asked = [("there", text, [("Rome", 9)]), ("moved", text, [("Rome", 4)]), ("gone", text, [("Paris", 9)])]
    asked += [("none", text, []), ("emptied", text, [("", 0)]), ("behind", text, [("Rome", -5)])]
    asked += [("first", text, [("It", 3)])]
    path = write(tmp_path / "xquad.de.json", squad(*asked))
    found, notes = read("xquad", "test", tmp_path)
    gold = {one.texts[0]: one.gold for one in found["de"]}
    right = [("Rome", 9)]
    assert gold == {"there": right, "moved": right, "gone": [("Paris", -1)], "behind": right, "first": [("It", 0)]}
    said = ["3 x an answer that is elsewhere in its text", "2 x a question without an answer"]
    assert notes == [f"{path}: {what}" for what in (*said, "1 x an answer that is not in its text")]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "",
        "3",
        '{"data": 1}',
        '{"data": [{"paragraphs": null}]}',
        '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "b"}]}]}]}',
        squad(("a", "b", [("b", 0)])).replace('"answer_start": 0', '"answer_start": "x"'),
        squad(("a", "b", [("b", 0)])).replace('"answer_start": 0', '"answer_start": null'),
    ],
)
def test_broken_json_is_left_out_in_one_line(tmp_path, content):
    path = write(tmp_path / "xquad.de.json", content)
    write(tmp_path / "xquad.ru.json", answer_file())
    found, notes = read("xquad", "test", tmp_path)
    assert found.keys() == {"ru"}
    assert len(notes) == 1 and "\n" not in notes[0]
    assert notes[0].startswith(f"{path} is not in SQuAD's format") and notes[0].endswith(": left out")


@pytest.mark.parametrize("task, ending", [("pos", "tsv"), ("ner", "tsv"), ("xquad", "json"), ("xnli", "tsv")])
def test_files_that_cannot_be_read_are_left_out(tmp_path, task, ending):
    good = {"json": answer_file(), "tsv": "a\tb\tneutral\n" if task == "xnli" else "a\tX\n"}[ending]
    write(tmp_path / f"test.ru.{ending}", good)
    write(tmp_path / f"test.de.{ending}", good.encode() + b"\xff\xfe\n")
    write(tmp_path / f"test.fr.{ending}", "" if ending == "tsv" else '{"data": []}')
    (tmp_path / f"test.es.{ending}.gz").write_bytes(gzip.compress(good.encode() * 50)[:-9])
    (tmp_path / f"test.zh.{ending}.gz").write_bytes(good.encode())
    whole = gzip.compress(good.encode())
    (tmp_path / f"test.hi.{ending}.gz").write_bytes(whole[:10] + b"\xff" * 20 + whole[30:])
    found, notes = read(task, "test", tmp_path)
    notes = [note for note in notes if "unknown" not in note]
    assert found.keys() == {"ru"} and len(notes) == 5 and not any("\n" in note for note in notes)
    wrong = {"de": "is not UTF-8", "fr": "holds no example", "es": "is damaged", "zh": "is damaged", "hi": "is damaged"}
    for language, what in wrong.items():
        assert any(f"test.{language}." in note and what in note and note.endswith("left out") for note in notes)


def test_labels_of_tsv_and_json(tmp_path):
    write(tmp_path / "train-en.tsv", 'One "a".\tTwo.\tcontradictory\r\nA\tB\tentailment\n')
    rows = [
        {"sentence1": "A", "sentence2": "B", "gold_label": "neutral"},
        {"premise": "C", "hypothesis": "D", "label": "-"},
    ]
    path = write(tmp_path / "test-de.jsonl.gz", "\n".join(map(json.dumps, rows)) + '\n{\n[1]\n{"label": 1}\n')
    write(tmp_path / "xnli.test.tsv", "language\tgold_label\n")  # all languages in one
    found, notes = read("xnli", "train", tmp_path)
    assert [one[1:] for one in found["en"]] == [(('One "a".', "Two."), "contradiction"), (("A", "B"), "entailment")]
    found, notes = read("xnli", "test", tmp_path)
    assert {language: [one[1:] for one in own] for language, own in found.items()} == {
        "de": [(("A", "B"), "neutral"), (("C", "D"), "-")]
    }
    said = ["3 x a line that is not two sentences and a label", "1 x the unknown label '-'"]
    assert notes == [f"{path}: {what}" for what in said]
    assert scores("xnli", "de", ["neutral", "-"], ["neutral", "neutral"]) == {"accuracy": 50}


def test_labels_of_pawsx(tmp_path):
    write(tmp_path / "test-ko.tsv", "A\tB\t1\nA\tB\nA\tB\t0\n")
    write(tmp_path / "test-fr.jsonl", '{"sentence1": "A", "sentence2": "B", "label": 1}\n')
    found, notes = read("pawsx", "test", tmp_path)
    assert [one.gold for one in found["ko"]] == ["1", "0"] and [one.gold for one in found["fr"]] == ["1"]
    assert len(notes) == 1 and "1 x a line that is not" in notes[0]


def test_one_file_is_trained_on_and_scored_whatever_its_name(tmp_path):
    path = write(tmp_path / "mine", "a\tX\n")
    for split in ("train", "test"):
        assert read("pos", split, path)[0]["en"][0].texts == ("a",)
    path = write(tmp_path / "train-de.tsv", "a\tX\n")
    assert read("pos", "train", path)[0].keys() == {"de"}
    assert read("pos", "valid", path)[0] == {}  # a checkpoint is not chosen by what it was trained on
    with pytest.raises(FileNotFoundError, match="should hold the files of pos"):
        read("pos", "test", tmp_path / "nothing")


class FakeHub:
    """Stands in for the `datasets` package."""

    def __init__(self):
        self.asked, self.rows, self.names = [], [], {}

    def load_dataset(self, repository, config, split):
        self.asked.append((repository, config, split))
        if not self.rows:
            raise ConnectionError("no route\nto host")
        features = {key: SimpleNamespace(feature=SimpleNamespace(names=names)) for key, names in self.names.items()}

        class Rows(list):
            pass

        rows = Rows(self.rows)
        rows.features = features
        return rows


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def test_tags_from_the_hub(hub):
    hub.names = {"pos_tags": ["X", "VERB"], "ner_tags": ["O", "B-PER"]}
    hub.rows = [{"tokens": ["a", "b"], "pos_tags": [1, 0], "ner_tags": [1, 0], "langs": ["en", "en"]}]
    found, notes = read("pos", "test", None)
    assert notes == [] and list(found) == xtreme.TASKS["pos"].languages.split() and len(found) == 33
    assert found["zh"][0][1:] == (("a", "b"), ["VERB", "X"])
    names = xtreme.NAMES
    assert hub.asked == [("google/xtreme", f"udpos.{names[language]}", "test") for language in found]
    hub.asked.clear()
    found, _ = read("ner", "test", None)
    assert len(found) == 40 and found["jv"][0].gold == ["B-PER", "O"]
    assert hub.asked[0] == ("google/xtreme", "PAN-X.af", "test")
    hub.asked.clear()
    # of what is not scored English alone is read
    assert read("ner", "valid", None)[0].keys() == {"en"}
    assert hub.asked == [("google/xtreme", "PAN-X.en", "validation")]
    hub.asked.clear()
    assert read("ner", "train", None)[0].keys() == {"en"} and hub.asked == [("google/xtreme", "PAN-X.en", "train")]


def test_answers_from_the_hub(hub):
    answers = {"text": ["Rome", "in Rome", "Paris"], "answer_start": [9, 6, 0]}
    row = {"question": "Where?", "context": "It is in Rome.", "answers": answers}
    unanswered = row | {"id": "english-2-0", "answers": {"text": [], "answer_start": []}}
    hub.rows = [row | {"id": "english-1-0"}, row | {"id": "bengali-1-0"}, unanswered]
    gold = [("Rome", 9), ("in Rome", 6), ("Paris", -1)]
    found, notes = read("tydiqa", "valid", None)
    wrong = [
        f"tydiqa from the hub, valid, {language}: 1 x an answer that is not in its text" for language in ("bn", "en")
    ]
    assert {*wrong, "tydiqa from the hub, valid, en: 1 x a question without an answer"} <= set(notes)
    assert found["en"] == [Example("english-1-0", ("Where?", "It is in Rome."), gold)]
    assert [one.id for one in found["bn"]] == ["bengali-1-0"] and found.keys() == {"bn", "en"}
    assert set(hub.asked) == {("google/xtreme", "tydiqa", "validation")}
    expected = {
        ("xquad", "train"): {"SQuAD": "train"},
        ("xquad", "valid"): None,
        ("xquad", "test"): {f"XQuAD.{code}": "validation" for code in "ar de el en es hi ru th tr vi zh".split()},
        ("mlqa", "train"): {"SQuAD": "train"},
        ("mlqa", "valid"): {"SQuAD": "validation"},
        ("mlqa", "test"): {f"MLQA.{code}.{code}": "test" for code in "ar de en es hi vi zh".split()},
    }
    for (task, split), asked in expected.items():
        hub.asked.clear()
        found, _ = read(task, split, None)
        assert all(len(own) == 2 for own in found.values())
        assert asked is None or hub.asked == [("google/xtreme", *one) for one in asked.items()]
    hub.asked.clear()
    read("xquad", "valid", None)
    assert set(hub.asked) == {("google/xtreme", "SQuAD", "validation")}


def test_labels_from_the_hub(hub):
    hub.rows = [{"premise": "A", "hypothesis": "B", "label": number} for number in range(3)]
    found, _ = read("xnli", "train", None)
    assert [one.gold for one in found["en"]] == ["entailment", "neutral", "contradiction"]
    assert hub.asked == [("nyu-mll/multi_nli", None, "train")]
    row = {"sentence1": "A", "sentence2": "B"}
    hub.rows = [row | {"language": language, "gold_label": "neutral"} for language in ("en", "sw", "sw")]
    found, _ = read("xnli", "test", None)
    assert {language: len(own) for language, own in found.items()} == {"en": 1, "sw": 2} and len(hub.asked) == 16
    assert found["sw"][0][1:] == (("A", "B"), "neutral") and hub.asked[-1] == ("google/xtreme", "XNLI", "test")
    hub.rows = [row | {"label": "1"}]
    assert read("pawsx", "test", None)[0]["ja"][0][1:] == (("A", "B"), "1")
    assert ("google/xtreme", "PAWS-X.ja", "test") in hub.asked


def test_without_the_hub_it_is_said_in_one_line(hub, monkeypatch):
    with pytest.raises(OSError, match=r"google/xtreme XNLI .*no route.*--source") as error:
        read("xnli", "test", None)
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match="pip install datasets"):
        read("xnli", "test", None)


def test_the_benchmark_has_these_languages():
    sizes = {"pos": 33, "ner": 40, "xquad": 11, "mlqa": 7, "tydiqa": 9, "xnli": 15, "pawsx": 7}
    assert {task: len(set(xtreme.TASKS[task].languages.split())) for task in sizes} == sizes
    assert all("en" in xtreme.TASKS[task].languages.split() for task in sizes)
    assert len(set(UPOS)) == 17 and len(set(NER)) == 7


def test_applications_of_few_messages_are_one_label():
    pytest.importorskip("django")
    examples = xtreme.read_examples("apps", None, None, None, None)
    assert examples.labels == "admin admindocs auth conf flatpages gis humanize other postgres".split()
    english = {text for one in examples.train for text in one.texts}
    assert len(examples.test) > 90 and not english & {text for one in examples.test["en"] for text in one.texts}


# ---------------------------------------------------------------------------------------------------------------------
# rows


def tag_rows(tokenizer, *sentences: list[str], T: int = T) -> list[Row]:
    examples = [
        Example(str(n), tuple(words), [UPOS[i % 17] for i in range(len(words))]) for n, words in enumerate(sentences)
    ]
    rows = rows_of("tags", examples, tokenizer, T, STRIDE, list(UPOS))
    for row in rows:
        assert row.ids[0] == tokenizer.bos and row.ids[-1] == tokenizer.eos and len(row.ids) <= T
        assert not {tokenizer.bos, tokenizer.eos} & set(row.ids[1:-1])
    return rows


def test_every_word_has_one_mark(tokenizer):
    rng = random.Random(0)
    words = [
        "def",
        "return",
        "日本語",
        "x",
        "\u200b",
        "tokenizer",
        "internationalisation" * 9,
        "😀",
        "",
        "a b",
        "ﬁ",
        ".",
    ]
    assert tokenizer.encode_batch(["\u200b"]) == [[]]  # it vanishes
    assert len(tokenizer.encode_batch([words[6]])[0]) > T  # more pieces than a row has places
    sentences = [rng.choices(words, k=rng.randint(1, 40)) for _ in range(50)]
    rows = tag_rows(tokenizer, *sentences)
    assert len(rows) > len(sentences)
    for number, sentence in enumerate(sentences):
        own = [row for row in rows if row.example == number]
        assert [word for row in own for _, word in row.marks] == list(range(len(sentence)))
        assert [tag for row in own for tag in row.targets] == [word % 17 for word in range(len(sentence))]
        for row in own:
            ends = [place for place, _ in row.marks[1:]] + [len(row.ids) - 1]
            assert row.marks[0][0] == 1
            for (place, word), end in zip(row.marks, ends):
                pieces = tokenizer.encode_batch([sentence[word]])[0] or [tokenizer.unk]
                assert row.ids[place:end] == pieces[: T - 2]


def test_a_row_takes_as_many_words_as_fit(tokenizer):
    word = "def"
    size = len(tokenizer.encode_batch([word])[0])
    fit = (T - 2) // size
    assert [len(row.marks) for row in tag_rows(tokenizer, [word] * fit)] == [fit]
    assert [len(row.marks) for row in tag_rows(tokenizer, [word] * (2 * fit + 1))] == [fit, fit, 1]
    assert [len(row.ids) for row in tag_rows(tokenizer, ["x" * 999], T=9)] == [9]


TEXTS = {
    "en": "Tokens  of a text,\nsplit by the (small) tokenizer: it returns 12 rows for every file. " * 3,
    "zh": "东京是日本的首都。铁壁威廉（William）在1946年的时间，“单系的”，出生。" * 3,
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทยและมีประชากรมากที่สุด" * 2,
    "ja": "ﾄｳｷｮｳは日本の首都である。ﬁve ½ ㍿ 😀 がぎ" * 3,
    "ar": 'قال "آلة لإنهاء الحرب"، ثم ذهب الأرستقراطية. ' * 3,
}


def answer_rows(tokenizer, *examples: Example, T: int = 60, stride: int = 20) -> list[Row]:
    rows = rows_of("answer", list(examples), tokenizer, T, stride, [])
    assert all(len(row.ids) <= T for row in rows)
    return rows


def span_of(row: Row, text: str) -> str:
    """What the targets say."""
    spans = dict(row.marks)
    first, last = (spans[place] for place in row.targets)
    return text[first[0] : last[1]].strip()


@pytest.mark.parametrize("language", TEXTS)
def test_windows_cover_the_text(tokenizer, language):
    text, question = TEXTS[language], "Which file?"
    rows = answer_rows(tokenizer, Example("0", (question, text), [(text[:4], 0)]))
    asked = tokenizer.encode_batch([question])[0]
    head = [tokenizer.bos, *asked, tokenizer.eos, tokenizer.eos]
    ids, spans = tokenizer.encode_offsets(text)
    assert ids == tokenizer.encode_batch([text])[0] and spans[-1][1] <= len(text)
    assert len(rows) > 2
    for number, row in enumerate(rows):
        assert row.ids[: len(head)] == head and row.ids[-1] == tokenizer.eos
        assert row.ids[len(head) : -1] == ids[20 * number :][: 60 - len(head) - 1]
        assert [place for place, _ in row.marks] == list(range(len(head), len(row.ids) - 1))
        begins = [begin for _, (begin, _) in row.marks]
        assert begins == [begin for begin, _ in spans[20 * number :][: len(begins)]]
        assert all(len(row.ids) == 60 for row in rows[:-1])
    assert 20 * (len(rows) - 1) + len(rows[-1].marks) == len(ids)
    assert 20 * (len(rows) - 2) + len(rows[-2].marks) < len(ids)  # and no row is there for nothing


@pytest.mark.parametrize("language", TEXTS)
def test_the_answer_is_where_the_targets_say(tokenizer, language):
    """In the rows that hold all its tokens, and in no other.

    It comes back exactly where it begins and ends with pieces, and else with the rest of these two.
    """
    text = TEXTS[language]
    ids, spans = tokenizer.encode_offsets(text)
    ahead = len(tokenizer.encode_batch(["Which?"])[0]) + 3
    places = {place for span in spans for place in span}
    rng, exact, others = random.Random(0), 0, 0
    for _ in range(200):
        begin = rng.randrange(len(text) - 1)
        answer = text[begin : begin + rng.randint(1, 30)]
        own = [n for n, (first, last) in enumerate(spans) if last > begin and first < begin + len(answer)]
        rows = answer_rows(tokenizer, Example("0", ("Which?", text), [(answer, begin), ("another", 0)]))
        for number, row in enumerate(rows):
            part = range(20 * number, 20 * number + len(row.marks))
            if own[0] not in part or own[-1] not in part:
                assert row.targets == [0, 0]
                others += 1
                continue
            assert row.targets == [ahead + own[0] - 20 * number, ahead + own[-1] - 20 * number]
            found = span_of(row, text)
            assert answer.strip() in found
            if {begin, begin + len(answer)} <= places:
                assert found == answer.strip()
                exact += 1
    assert exact > 40 and others > 100


def test_an_answer_ends_before_a_stop(tokenizer):
    """Where both are in one piece."""

    class Pairs(XLMR):
        def encode_offsets(self, text):
            spans = [(begin, min(begin + 2, len(text))) for begin in range(0, len(text), 2)]
            return [5] * len(spans), spans

    pairs = Pairs(tokenizer.file)
    text = "“单系的”，出生。，"
    (row,) = answer_rows(pairs, Example("0", ("", text), [("“单系的”", 0)]))
    assert span_of(row, text) == "“单系的”"
    assert [text[begin:end] for _, (begin, end) in row.marks] == ["“单", "系的", "”", "出生", "。，"]


def test_without_a_known_place_nothing_is_trained(tokenizer):
    for gold in ([("Paris", -1)], []):
        rows = answer_rows(tokenizer, Example("0", ("Which?", TEXTS["en"]), gold))
        assert len(rows) > 1 and all(row.targets == [UNKNOWN, UNKNOWN] for row in rows)


def test_long_questions_and_no_text(tokenizer):
    for question, text in (("why " * 99, "def return " * 9), ("why", ""), ("", "\u200b"), ("why", "x")):
        rows = answer_rows(tokenizer, Example("0", (question, text), [("def", 0)]), T=16, stride=500)
        ids = tokenizer.encode_batch([text])[0]
        places = [place for row in rows for place, _ in row.marks]
        assert len(places) >= len(ids) and (ids or len(rows) == 1)
        assert all(row.ids.count(tokenizer.eos) == 3 and len(row.marks) >= 5 for row in rows[:-1])


def test_label_rows(tokenizer):
    bos, eos = tokenizer.bos, tokenizer.eos
    a, b = tokenizer.encode_batch(["def return", "self"])
    labels = list(xtreme.NLI)
    two, one, unknown = rows_of(
        "label",
        [
            Example("0", ("def return", "self"), "neutral"),
            Example("1", ("self",), "entailment"),
            Example("2", ("", "self"), "?"),
        ],
        tokenizer,
        99,
        STRIDE,
        labels,
    )
    assert two == Row(0, [bos, *a, eos, eos, *b, eos], [], [1])
    assert one == Row(1, [bos, *b, eos], [], [0])
    assert unknown == Row(2, [bos, eos, eos, *b, eos], [], [UNKNOWN])
    long, short = tokenizer.encode_batch(["return " * 99, "self tokenizer"])
    for texts in (("return " * 99, "self tokenizer"), ("self tokenizer", "return " * 99)):
        (row,) = rows_of("label", [Example("0", texts, "neutral")], tokenizer, T, STRIDE, labels)
        cut = [long[: T - 4 - len(short)], short][:: 1 if texts[0][0] == "r" else -1]
        assert row.ids == [bos, *cut[0], eos, eos, *cut[1], eos] and len(row.ids) == T
    (row,) = rows_of("label", [Example("0", ("return " * 99,) * 2, "neutral")], tokenizer, T, STRIDE, labels)
    assert len(row.ids) == T and {row.ids.index(eos) - 1, T - 3 - row.ids.index(eos)} == {(T - 4) // 2}


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_padding_and_flat_places(tokenizer):
    rows = tag_rows(tokenizer, ["def", "return", "self"], ["x"], ["tokenizer", "."])
    batch = batch_of(rows, tokenizer.pad)
    B, width = batch.ids.shape
    assert (B, width) == (3, max(len(row.ids) for row in rows))
    assert batch.ids.dtype == batch.words.dtype == batch.targets.dtype == torch.int64
    flat = batch.ids.flatten()
    for number, row in enumerate(rows):
        assert batch.ids[number].tolist() == row.ids + [tokenizer.pad] * (width - len(row.ids))
    real = [number * width + place for number, row in enumerate(rows) for place in range(len(row.ids))]
    assert batch.real.tolist() == real
    first = [row.ids[place] for row in rows for place, _ in row.marks]
    assert flat[batch.words].tolist() == first and len(first) == 6
    assert batch.targets.tolist() == [0, 1, 2, 0, 0, 1]
    same = batch_of([rows[0], rows[0]], tokenizer.pad)
    assert same.real is None


def numbered(count: int, batch_size: int = 6, micro_size: int = 2, seed: int = 0, start: str = "") -> TaskData:
    rows = [Row(number, [0, 10 + number, 2], [], [number]) for number in range(count)]
    return TaskData(rows, SimpleNamespace(pad=1), batch_size, micro_size, seed, start)


def seen(data: TaskData, step: int) -> list[int]:
    """The rows of a step."""
    return [row for micro in range(data.micros_per_step) for row in data.batch(step, micro).targets.tolist()]


@pytest.mark.parametrize("count", [6, 12, 20, 4])
def test_an_epoch_is_every_row_once(count):
    data = numbered(count)
    assert data.steps_per_epoch == -(-count // 6)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch)
        rows = [row for step in steps for row in seen(data, step)]
        assert sorted(rows[:count]) == list(range(count))
        assert rows[count:] == (rows * 6)[: len(rows) - count]  # filled up with its first
        epochs.append(rows)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_is_a_function_of_seed_step_and_micro():
    one, two = numbered(20), numbered(20)
    for step, micro in [(3, 1), (0, 0), (9, 2), (0, 1), (3, 1)]:
        again, batch = two.batch(step, micro), one.batch(step, micro)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(batch, again))
        assert batch.ids.shape == (2, 3)
    assert [seen(one, step) for step in (5, 1)] == [seen(two, step) for step in (1, 5)][::-1]
    assert [seen(one, step) for step in range(4)] != [seen(numbered(20, seed=1), step) for step in range(4)]
    wide = numbered(20, micro_size=6)  # the same rows in one forward pass
    assert [seen(one, step) for step in range(8)] == [seen(wide, step) for step in range(8)]


def test_the_checksum_is_of_rows_and_start():
    data = numbered(20)
    assert data.checksum == numbered(20, seed=3).checksum
    assert len({data.checksum, numbered(20, start="x").checksum, numbered(21).checksum}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# scores, written again from their definitions


def runs_of(tags: list[str]) -> set[tuple]:
    """(class, first, last) of each run of a tag; SYM and SCONJ, whose S is that of a single, never run on."""
    found, place = set(), 0
    for tag, group in groupby(tags):
        size = len(list(group))
        if tag[0] == "S":
            found |= {(tag, place + one, place + one) for one in range(size)}
        else:
            found.add((tag, place, place + size - 1))
        place += size
    return found


def entities(tags: list[str]) -> set[tuple]:
    """(class, first, last) as CoNLL's script counts: an I- without its like before it begins one."""
    found, begin = set(), None
    for place, (last, tag) in enumerate(zip(["O", *tags], [*tags, "O"])):
        if begin is not None and (tag[0] in "BO" or tag[2:] != last[2:]):
            found.add((last[2:], begin, place - 1))
            begin = None
        if tag != "O" and begin is None:
            begin = place
    return found


def f1_of(gold: list[set], predicted: list[set]) -> float:
    right = sum(len(one & two) for one, two in zip(gold, predicted))
    precision = right / max(1, sum(map(len, predicted)))
    recall = right / max(1, sum(map(len, gold)))
    return 100 * 2 * precision * recall / (precision + recall) if right else 0.0


@pytest.mark.parametrize("task, labels, parts", [("pos", UPOS, runs_of), ("ner", NER, entities)])
@pytest.mark.parametrize("noise", [0, 0.1, 0.5, 1])
def test_f1_of_tags(task, labels, parts, noise):
    rng = random.Random(0)
    gold = []
    for _ in range(200):
        tags = []
        while len(tags) < rng.randint(1, 25):
            tag = rng.choice(labels)
            tags += [tag.replace("I-", "B-")] + [tag.replace("B-", "I-")] * rng.choice([0, 0, 1, 3])
        gold.append(tags)
    predicted = [[rng.choice(labels) if rng.random() < noise else tag for tag in tags] for tags in gold]
    expected = f1_of([parts(tags) for tags in gold], [parts(tags) for tags in predicted])
    assert scores(task, "en", gold, predicted) == {"f1": pytest.approx(expected, abs=1e-9)}
    assert (expected == 100) == (noise == 0)


def test_f1_of_tags_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    predicted = [["B-PER", "I-PER", "O", "B-ORG"], ["B-LOC", "B-ORG"]]
    assert scores("ner", "en", gold, predicted)["f1"] == pytest.approx(100 * 4 / 7)  # 2 right of 3 and of 4
    assert scores("ner", "en", [["O", "O"]], [["O", "O"]])["f1"] == 0
    assert scores("ner", "en", [["I-LOC", "I-LOC"]], [["B-LOC", "I-LOC"]])["f1"] == 100
    assert scores("pos", "en", [["SCONJ", "NOUN"]], [["CCONJ", "NOUN"]])["f1"] == 50
    assert scores("pos", "en", [["NOUN", "NOUN", "X"]], [["NOUN", "VERB", "X"]])["f1"] == pytest.approx(40)
    assert scores("pos", "en", [["", "X"]], [["X", "X"]])["f1"] == 0


def test_tags_need_seqeval(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    with pytest.raises(ImportError, match="pip install seqeval"):
        scores("ner", "en", [["O"]], [["O"]])


PUNCTUATION = {chr(i) for i in range(0x110000) if unicodedata.category(chr(i))[0] == "P"} | set(string.punctuation)
ARTICLES = {  # MLQA, section 4 and its script
    "en": "a an the",
    "es": "un una unos unas el la los las",
    "de": "ein eine einen einem eines einer der die das den dem des",
    "vi": "của là cái chiếc những",
}


def squad_tokens(text: str) -> list[str]:
    """As SQuAD's script has it: lower, punctuation, articles, white space. Words are cut at what is no letter."""
    kept = text.lower().translate({ord(char): None for char in string.punctuation})
    words = re.split(r"(\W)", kept)
    return "".join(" " if word in ("a", "an", "the") else word for word in words).split()


def mlqa_tokens(text: str, language: str) -> list[str]:
    kept = "".join(char for char in text.lower() if char not in PUNCTUATION)
    if language == "ar":
        kept = kept.replace("ال", " ")  # its pattern is this at any place
    elif language in ARTICLES:
        words = re.split(r"(\W)", kept)
        kept = "".join(" " if word in ARTICLES[language].split() else word for word in words)
    if language == "zh":
        kept = "".join(f" {char} " if "\u4e00" <= char <= "\u9fa5" else char for char in kept)
    return kept.split()


def answer_scores(tokens, gold: list[str], predicted: str) -> tuple[float, float]:
    """The best F1 and the best exact match over several right answers, in percent."""
    f1, em, mine = 0.0, 0.0, tokens(predicted)
    for right in map(tokens, gold):
        rest, shared = list(right), 0
        for word in mine:
            if word in rest:
                rest.remove(word)
                shared += 1
        if shared:
            precision, recall = shared / len(mine), shared / len(right)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
        em = max(em, float(mine == right))
    return 100 * f1, 100 * em


WORDS = {
    "en": "the The a an cat, theory U.S. 12% state-of-the-art “quoted” ... ' A",
    "es": "el la los gato, ¿qué? una Unos 3.5 «sí» año elefante",
    "de": "der Die das ein Einem Haus, Straße „ja“ 12 dieser Übung",
    "vi": "của là cái Những chiếc Hà Nội, Việt-Nam 12 laø",
    "ar": "الحرب، ال والسلام القاهرة؟ في 12 مدينة بال .",
    "hi": "भारत। राजधानी है, 12 दिल्ली \u093f का the",
    "zh": "1946年的时间， 北京 NBA球员 。 “单系的” 的 ABC 12 龥㐀",
}


@pytest.mark.parametrize(
    "task, language", [("mlqa", one) for one in WORDS] + [(one, "en") for one in ("xquad", "tydiqa")]
)
def test_scores_of_answers(task, language):
    rng = random.Random(1)
    words = WORDS[language].split() + [" "]
    glue = "" if language == "zh" else " "
    pairs = []
    for _ in range(400):
        gold = [glue.join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))]
        near = [word for word in gold[-1].split(" ") if rng.random() < 0.8]
        predicted = rng.choice(
            ["", glue.join(near), glue.join(rng.choices(words, k=3)), gold[0].upper(), gold[-1] + "!"]
        )
        pairs.append((gold, predicted))
    tokens = squad_tokens if task != "mlqa" else lambda text: mlqa_tokens(text, language)
    expected = [answer_scores(tokens, gold, predicted) for gold, predicted in pairs]
    gold = [[(text, 0) for text in texts] for texts, _ in pairs]
    for right, (_, predicted), (f1, em) in zip(gold, pairs, expected):
        assert scores(task, language, [right], [predicted]) == {"f1": pytest.approx(f1), "em": em}
    mean = scores(task, language, gold, [predicted for _, predicted in pairs])
    f1, em = np.mean(expected, axis=0)
    assert mean == {"f1": pytest.approx(f1), "em": pytest.approx(em)}
    assert 10 < em < 90 and 10 < f1 < 90


@pytest.mark.parametrize(
    "task, language, gold, predicted, f1, em",
    [
        ("xquad", "en", ["The Cat"], "cat.", 100, 100),
        ("xquad", "en", ["a cat"], "the dog", 0, 0),
        ("xquad", "en", ["one two three"], "two three four five", 400 / 7, 0),
        ("xquad", "en", ["no", "yes sir"], "yes", 200 / 3, 0),
        ("xquad", "en", ["cat"], "", 0, 0),
        ("xquad", "en", ["the"], "", 0, 100),  # nothing is left of both
        ("xquad", "de", ["der Hund"], "Hund", 200 / 3, 0),  # only English articles
        ("xquad", "zh", ["北京，"], "北京", 0, 0),  # only ASCII punctuation, and no characters as words
        ("mlqa", "de", ["der Hund"], "Hund", 100, 100),
        ("mlqa", "es", ["el gato"], "gato", 100, 100),
        ("mlqa", "en", ["der Hund"], "Hund", 200 / 3, 0),
        ("mlqa", "vi", ["những con mèo"], "con mèo", 100, 100),
        ("mlqa", "ar", ["القاهرة"], "قاهرة", 100, 100),
        ("mlqa", "hi", ["दिल्ली।"], "दिल्ली", 100, 100),
        ("mlqa", "zh", ["北京，"], "北京", 100, 100),
        ("mlqa", "zh", ["北京"], "北方", 50, 0),
        ("mlqa", "zh", ["$5"], "5", 100, 100),  # ASCII's symbols too
    ],
)
def test_scores_of_answers_by_hand(task, language, gold, predicted, f1, em):
    found = scores(task, language, [[(text, 0) for text in gold]], [predicted])
    assert found == {"f1": pytest.approx(f1), "em": em}


def test_accuracy():
    counts = Counter()
    for task in ("xnli", "pawsx", "apps"):
        counts.update(scores(task, "de", ["a", "b", "c", "a"], ["a", "c", "c", "b"]))
    assert counts == {"accuracy": 150}
