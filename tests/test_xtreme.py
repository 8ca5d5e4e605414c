"""XTREME: what is read, also where it is broken; rows of tokens that lose nothing; scores as they were published."""

import gzip
import json
import random
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import write_files

from data import xtreme
from data.scores import COUNTING, answers_by_place, guess, labels_by_word, score_task, tags_by_word
from data.tokenizers import XLMR
from data.xtreme import NER, UPOS, Example, read, read_examples, submission
from data.xtreme_rows import UNKNOWN, Row, TaskData, batch_of, best_answer, by_example, rows_of

T, STRIDE = 24, 6


@pytest.fixture
def tokenizer(xlmr) -> XLMR:
    return xlmr


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


TSV = {"train-en.tsv": "A\tDET\nrow\tNOUN\n\n\nRead\tVERB\n \n.\tPUNCT", "dev-en.tsv": "dev\tX\n\n"}
TSV |= {"test-de.tsv.gz": "\u3000\tSYM\r\n\r\nZwei Worte\tX\r\n", "test-en.ud25.tsv": "en\tX\n"}
UD = "es_gsd-ud-test.conllu en_ewt-ud-train.conllu.gz sv_talbanken-ud-train.conllu pl_pdb-ud-test.conllu"
UD = dict.fromkeys(UD.split(), CONLLU)  # Swedish and Polish are none of the benchmark's
TREES = [(("da", "me", "lo", "#"), ["VERB", "PRON", "PRON", "ADV"]), (("snake_", "_"), ["NOUN", "SYM"])]
BROKEN_TREE = (("me", "lo", "#"), ["PRON", "PRON", "ADV"])
BAD_TREE = {"de_gsd-ud-test.conllu": CONLLU.replace("1\tda\t", "1 da ").replace("\t", " ", 1)}
BAD_TAGS = {"test-de.tsv": "a\tX\nb\nc\tX\tX\nd\tX\te\nf\tQ\n\nh\n\n"}
NO_LABEL = "1 x an example without its label"
WRONG_TAGS = f"2 x a line with 3 columns; 1 x the unknown tag ''; 1 x the unknown tag 'Q'; {NO_LABEL}"
WRONG_LABELS = "2 x a line that is not two sentences and a label; 1 x the unknown label '-'"
PANX = "de:Anna\tB-PER\nde::\tO\nde:10:30\tO\nen:x\tO\nde:\tO\n\n"
ANNA = [(("Anna", ":", "10:30", "en:x", "de:"), ["B-PER", "O", "O", "O", "O"])]
TWICE = {"de/test": PANX, "test-de.part.tsv": "Eva\tB-PER\n", "test-de.tsv": PANX.replace("de:", "", 1)}
NLI = {"train-en.tsv": 'One "a".\tTwo.\tcontradictory\r\nA\tB\tentailment\n'}
NLI |= {"test-de.tsv.gz": "A\tB\tneutral\nC\tD\t-\nE\n\n", "xnli.test.tsv": "language\tgold_label\n"}
SOME = {"test-de.tsv": "a\tb\nc\td\tneutral\n", "test-fr.tsv": "a\tb\n"}
ROME = "It is in Rome, not in (ancient) Rome: aaa."
PLACES = {("Rome", 9): 9, ("Rome", 7): 9, ("Rome", 30): 32, ("Rome", -5): 9, ("Rome", 10**9): 32}
PLACES |= {("(ancient)", 0): 22, ("aa", 41): 39, ("Paris", 9): -1}  # where it is nearest
IN_ROME = squad(*[("?", ROME, [answer]) for answer in PLACES])
FOUND = [(("?", ROME), [(answer, place)]) for (answer, _), place in PLACES.items()]
READ = [  # task, split, files, language -> texts and gold of its examples, notes
    ("pos", "train", TSV, {"en": [(("A", "row"), ["DET", "NOUN"]), (("Read",), ["VERB"]), ((".",), ["PUNCT"])]}, ""),
    ("pos", "valid", TSV, {"en": [(("dev",), ["X"])]}, ""),
    ("pos", "test", TSV, {"de": [(("\u3000",), ["SYM"]), (("Zwei Worte",), ["X"])], "en": [(("en",), ["X"])]}, ""),
    ("pos", "train", UD, {"en": TREES}, ""),
    ("pos", "test", UD, {"es": TREES}, ""),
    ("pos", "test", BAD_TREE, {"de": [BROKEN_TREE, TREES[1]]}, "1 x a line with 9 columns; 1 x a line with 8 columns"),
    ("pos", "test", BAD_TAGS, {"de": [(("a", "b", "f"), ["X", "", "Q"])]}, WRONG_TAGS),
    ("ner", "test", {"panx/test-de.tsv": PANX}, {"de": ANNA}, ""),
    ("ner", "test", {"de/test": PANX}, {"de": ANNA}, ""),
    ("ner", "train", {"de/test": PANX}, {}, ""),
    ("ner", "train", {"udpos/train-en.tsv": "a\tX\n", "squad/train-v1.1.json": "{}"}, {}, ""),  # of other tasks
    ("xnli", "train", NLI, {"en": [(('One "a".', "Two."), "contradiction"), (("A", "B"), "entailment")]}, ""),
    ("xnli", "test", NLI, {"de": [(("A", "B"), "neutral"), (("C", "D"), "-")]}, WRONG_LABELS),
    ("xnli", "test", SOME, {"de": [(("c", "d"), "neutral")], "fr": [(("a", "b"), None)]}, f"{NO_LABEL}; {NO_LABEL}"),
    ("xquad", "test", {"xquad.de.json": IN_ROME}, {"de": FOUND}, "7 x an answer that is not at its position in the text"),
]


@pytest.mark.parametrize("task, split, files, examples, notes", READ)
def test_what_is_read(task, split, files, examples, notes, tmp_path):
    found, said = read(task, split, write_files(tmp_path, files))
    assert {language: [one[1:] for one in own] for language, own in found.items()} == examples
    assert "; ".join(note.split(": ", 1)[1] for note in said) == notes
    assert {note.split(": ")[0] for note in said} <= {str(tmp_path / name) for name in files}


def test_the_same_examples_in_two_files_count_once(tmp_path):
    found, notes = read("ner", "test", write_files(tmp_path, TWICE))
    assert [one.texts[0] for one in found["de"]] == ["Anna", "Eva"]
    assert notes == [f"{tmp_path / 'test-de.tsv'} holds the same examples as another file: skipped"]


QUESTION = ("Where is it?", "It is in Rome, in Rome.", [("Rome", 9), ("in Rome", 15)])
NAMES = [  # task, split, file, and the language that it is read as
    ("xquad", "train", "train-v1.1.json", "en"),
    ("xquad", "valid", "dev-v1.1.json.gz", "en"),
    ("xquad", "test", "xquad.zh.json", "zh"),
    ("xquad", "test", "xquad.ro.json", None),
    ("mlqa", "test", "MLQA_V1/test/test-context-de-question-de.json.gz", "de"),
    ("mlqa", "test", "MLQA_V1/test/test-context-de-question-en.json", None),
    ("mlqa", "test", "MLQA_V1/dev/dev-context-de-question-de.json", None),
    ("tydiqa", "train", "tydiqa-goldp-v1.1-train/tydiqa.goldp.bn.train.json", "bn"),
    ("tydiqa", "train", "tydiqa-goldp-v1.1-train/tydiqa-goldp-v1.1-train.json", None),  # of all languages
    ("tydiqa", "train", "tydiqa-goldp-v1.1-dev/tydiqa.goldp.en.dev.json", None),
    ("tydiqa", "valid", "tydiqa.goldp.ko.dev.json", "ko"),
    ("tydiqa", "valid", "tydiqa-goldp-dev-telugu.json", "te"),
    ("tydiqa", "valid", "LICENSE", None),
]


@pytest.mark.parametrize("task, split, name, language", NAMES)
def test_answers_under_the_names_that_they_come_with(tmp_path, task, split, name, language):
    found, notes = read(task, split, write_files(tmp_path, {name: squad(QUESTION)}))
    assert notes == [] and found == ({language: [Example("0", QUESTION[:2], QUESTION[2])]} if language else {})


ONE = squad(("a", "b", [("b", 0)]))
BROKEN = ["{", "[]", "", '{"data": [{"paragraphs": null}]}', ONE.replace('"question"', '"x"')]
BROKEN += [ONE.replace('"qas": [', '"qas": [3, '), ONE.replace('"answer_start": 0', '"answer_start": "x"')]
GOOD = {"pos": ("tsv", "a\tX\n", ""), "xquad": ("json", squad(QUESTION), '{"data": []}')}
GOOD |= {"xnli": ("tsv", "a\tb\tneutral\n", "")}


@pytest.mark.parametrize("task", GOOD)
def test_files_that_cannot_be_read_are_left_out_in_a_line(tmp_path, task):
    ending, good, empty = GOOD[task]
    write_files(tmp_path, {f"test.ru.{ending}": good})
    bad = [("", empty, "holds no example"), ("", good.encode() + b"\xff\xfe\n", "is not UTF-8")]
    bad += [(".gz", gzip.compress(good.encode() * 50)[:-9], "is damaged"), (".gz", good.encode(), "is damaged")]
    bad += [("", text, "is not in SQuAD's format") for text in BROKEN if ending == "json"]
    for compressed, content, what in bad:
        path = tmp_path / f"test.de.{ending}{compressed}"
        write_files(tmp_path, {path.name: content})
        found, [note] = read(task, "test", tmp_path)
        assert found.keys() == {"ru"} and note.startswith(f"{path} {what}") and note.endswith("skipped")
        assert "\n" not in note
        path.unlink()


UNLABELLED = {  # how test sets come without labels: task, file, text, and the texts that are in it
    "XTREME's tags": ("pos", "test-de.tsv", "a\nb\n\nc\n\n", [("a", "b"), ("c",)]),
    "empty tags": ("ner", "test-de.tsv", "de:a\t\nde:b\t\n\nde:c\t", [("a", "b"), ("c",)]),
    "CoNLL-U": ("pos", "de_gsd-ud-test.conllu", "1\ta" + 8 * "\t_" + "\n", [("a",)]),
    "XTREME's pairs": ("xnli", "test-de.tsv", "a\tb\r\nc\td\r\n", [("a", "b"), ("c", "d")]),
    "empty labels": ("pawsx", "test-de.tsv", "a\tb\t\nc\td\t\n", [("a", "b"), ("c", "d")]),
    "XTREME's answers": ("xquad", "xquad.de.json", squad(("?", "a b", [("", 0)])), [("?", "a b")]),
    "no answers": ("mlqa", "test-context-de-question-de.json", squad(("?", "a b", [])), [("?", "a b")]),
    "none at all": ("tydiqa", "x.ko.dev.json", squad(("?", "a", [])).replace("answers", "x"), [("?", "a")]),
}


@pytest.mark.parametrize("case", UNLABELLED)
def test_test_sets_without_labels_are_kept_and_named(tmp_path, tokenizer, case):
    task, name, text, texts = UNLABELLED[case]
    kind, labels, scored = TASKS[task].kind, TASKS[task].labels, TASKS[task].test
    write_files(tmp_path, {name: text})
    found, notes = read(task, scored, tmp_path)
    assert notes == [f"{tmp_path / name}: {len(texts)} x an example without its label"]
    [own] = found.values()
    assert [one[1:] for one in own] == [(each, None) for each in texts]
    rows = rows_of(kind, own, tokenizer, T, STRIDE, list(labels))
    assert {target for row in rows for target in row.targets} == {UNKNOWN}
    name = name.replace("test", "train").replace("dev", "train").replace("xquad", "train").replace("de", "en")
    write_files(tmp_path / "train", {name.replace("ko", "en"): text})
    reason = f"holds no English training examples of {task}; .*{len(texts)} x an example without its label"
    with pytest.raises(ValueError, match=reason):
        read_examples(task, str(tmp_path / "train"))


def test_predictions_are_written_as_the_benchmark_wants_them():
    one, two = Example("7", ("a", "b"), None), Example("9", ("c",), None)
    tags = ["B-PER", "O"], ["O"]
    assert submission("ner", "de", [one, two], tags) == ("panx/test-de.tsv", "B-PER\nO\n\nO\n")
    assert submission("pos", "zh", [two], [["X"]]) == ("udpos/test-zh.tsv", "X\n")
    assert submission("xnli", "de", [one, two], ["neutral", "x"]) == ("xnli/test-de.tsv", "neutral\nx\n")
    answers = {"7": "", "9": "東京"}
    for task in ("xquad", "mlqa", "tydiqa"):
        assert submission(task, "ja", [one, two], list(answers.values())) == (f"{task}/test-ja.json", answers)


@pytest.fixture
def hub(monkeypatch) -> SimpleNamespace:
    """Stands in for the `datasets` package: what it is asked for, the rows that it has, and the names of tags."""
    hub = SimpleNamespace(asked=[], rows=[], names={})

    def load_dataset(repository, config, split):
        hub.asked.append((repository, config, split))
        if not hub.rows:
            raise ConnectionError("no route\nto host")
        features = {key: SimpleNamespace(feature=SimpleNamespace(names=names)) for key, names in hub.names.items()}
        return type("Rows", (list,), {"features": features})(hub.rows)

    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


TASKS = xtreme.TASKS
CODES = {task: TASKS[task].languages.split() for task in TASKS}
ASKED = {  # all that the hub is asked for
    ("pos", "test"): [(f"udpos.{xtreme.NAMES.get(code)}", "test") for code in CODES["pos"]],
    ("ner", "test"): [(f"PAN-X.{code}", "test") for code in CODES["ner"]],
    ("ner", "train"): [("PAN-X.en", "train")],  # of what is not scored English alone is read
    ("xquad", "train"): [("SQuAD", "train")],
    ("xquad", "test"): [(f"XQuAD.{code}", "validation") for code in CODES["xquad"]],
    ("mlqa", "valid"): [("SQuAD", "validation")],
    ("mlqa", "test"): [(f"MLQA.{code}.{code}", "test") for code in CODES["mlqa"]],
    ("tydiqa", "valid"): [("tydiqa", "validation")] * 9,
    ("xnli", "test"): [("XNLI", "test")] * 15,
    ("pawsx", "test"): [(f"PAWS-X.{code}", "test") for code in CODES["pawsx"]],
}


@pytest.mark.parametrize("task, split", ASKED)
def test_what_the_hub_is_asked_for(hub, task, split):
    hub.names = {"pos_tags": ["X", "VERB"], "ner_tags": ["O", "B-PER"]}
    tags = {"tokens": ["a", "b"], "pos_tags": [1, 0], "ner_tags": [1, 0]}
    answers = {"text": ["Rome", "Paris"], "answer_start": [9, 0]}
    answer = {"id": "english-1-0", "question": "Where?", "context": "It is in Rome.", "answers": answers}
    hub.rows = [tags | answer | {"language": "en", "sentence1": "A", "sentence2": "B", "label": "1"}]
    if task == "xnli":
        hub.rows[0]["gold_label"] = "neutral"
    found, notes = read(task, split, None)
    assert hub.asked == [("google/xtreme", *asked) for asked in ASKED[task, split]]
    gold = {"pos": ["VERB", "X"], "ner": ["B-PER", "O"], "xnli": "neutral", "pawsx": "1"}
    expected = gold.get(task, [("Rome", 9), ("Paris", -1)])
    assert [one.gold for one in found["en"]] == [expected]
    alone = task in ("tydiqa", "xnli", "pawsx")  # rows are told apart by what they say of their language
    assert len(found) == (1 if alone else len(ASKED[task, split]))
    unknown = f"{task} from the hub, {split}, en: 1 x an answer that is not at its position in the text"
    assert (unknown in notes) == (TASKS[task].kind == "answer")


def test_labels_from_the_hub(hub):
    hub.rows = [{"premise": "A", "hypothesis": "B", "label": number} for number in (0, 1, 2, -1)]
    found, notes = read("xnli", "train", None)
    assert [one.gold for one in found["en"]] == ["entailment", "neutral", "contradiction"]
    assert notes == ["xnli from the hub, train, en: 1 x an example without its label"]
    assert hub.asked == [("nyu-mll/multi_nli", None, "train")]


def test_without_the_hub_it_is_said_in_one_line(hub):
    with pytest.raises(OSError, match=r"google/xtreme XNLI [^\n]*no route[^\n]*--source[^\n]*$"):
        read("xnli", "test", None)


# ---------------------------------------------------------------------------------------------------------------------
# rows


def tag_rows(tokenizer, *sentences: list[str], T: int = T) -> list[Row]:
    examples = [Example("", tuple(words), [UPOS[i % 17] for i, _ in enumerate(words)]) for words in sentences]
    rows = rows_of("tags", examples, tokenizer, T, STRIDE, list(UPOS))
    for row in rows:
        assert row.ids[0] == tokenizer.bos and row.ids[-1] == tokenizer.eos and len(row.ids) <= T
        assert not {tokenizer.bos, tokenizer.eos} & set(row.ids[1:-1])
    return rows


def test_every_word_has_one_mark(tokenizer):
    rng = random.Random(0)
    words = [*"def return 日本語 x \u200b tokenizer 😀 ﬁ .".split(), "", "a b", "internationalisation" * 9]
    assert tokenizer.encode_batch(["\u200b"]) == [[]]  # it vanishes
    assert len(tokenizer.encode_batch([words[-1]])[0]) > T  # more pieces than a row has places
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


@pytest.mark.parametrize("language", TEXTS)
def test_parts_cover_the_text_and_the_answer_is_where_the_targets_say(tokenizer, language):
    """In the rows that hold all its tokens, and in no other. No row is there for nothing.

    It comes back exactly where it begins and ends with pieces, and else with the rest of these two.
    """
    text = TEXTS[language]
    ids, spans = tokenizer.encode_offsets(text)
    head = [tokenizer.bos, *tokenizer.encode_batch(["Which?"])[0], tokenizer.eos, tokenizer.eos]
    ahead, places = len(head), {place for span in spans for place in span}
    room = 60 - ahead - 1
    rng, exact = random.Random(0), 0
    for _ in range(200):
        begin = rng.randrange(len(text) - 1)
        answer = text[begin : begin + rng.randint(2, 30)]
        end = begin + len(answer.rstrip())  # blanks at its edges are no part of it
        start = end - len(answer.strip())
        own = [n for n, (first, last) in enumerate(spans) if last > start and first < end]
        rows = answer_rows(tokenizer, Example("0", ("Which?", text), [(answer, begin), ("another", 0)]))
        assert 20 * (len(rows) - 2) + room < len(ids) <= 20 * (len(rows) - 1) + room
        for first, row in zip(range(0, len(ids), 20), rows, strict=False):
            whole = first <= own[0] and own[-1] < first + room
            targets = [ahead + own[0] - first, ahead + own[-1] - first] if whole else [0, 0]
            marks = list(enumerate(spans[first:][:room], ahead))
            assert row == Row(0, [*head, *ids[first:][:room], tokenizer.eos], marks, targets)
        found = text[spans[own[0]][0] : spans[own[-1]][1]].strip()
        assert answer.strip() in found
        if {begin, begin + len(answer)} <= places:
            assert found == answer.strip()
            exact += 1
    assert exact > 20


def test_long_questions_no_text_and_no_known_place(tokenizer):
    for gold in ([("Paris", -1)], []):
        rows = answer_rows(tokenizer, Example("0", ("Which?", TEXTS["en"]), gold))
        assert len(rows) > 1 and all(row.targets == [UNKNOWN, UNKNOWN] for row in rows)
    for question, text in (("why " * 99, "def return " * 9), ("why", ""), ("", "\u200b"), ("why", "x")):
        rows = answer_rows(tokenizer, Example("0", (question, text), [("def", 0)]), T=16, stride=500)
        ids = tokenizer.encode_batch([text])[0]
        places = [place for row in rows for place, _ in row.marks]
        assert len(places) >= len(ids) and (ids or len(rows) == 1)
        assert all(row.ids.count(tokenizer.eos) == 3 and len(row.marks) >= 5 for row in rows[:-1])


def test_label_rows(tokenizer):
    bos, eos = tokenizer.bos, tokenizer.eos
    a, b = tokenizer.encode_batch(["def return", "self"])
    texts = {("def return", "self"): "neutral", ("self",): "entailment", ("", "self"): "?"}
    examples = [Example("", *each) for each in texts.items()]
    two, one, unknown = rows_of("label", examples, tokenizer, 99, STRIDE, list(xtreme.NLI))
    assert two == Row(0, [bos, *a, eos, eos, *b, eos], [], [1])
    assert one == Row(1, [bos, *b, eos], [], [0])
    assert unknown == Row(2, [bos, eos, eos, *b, eos], [], [UNKNOWN])
    long, short = tokenizer.encode_batch(["return " * 99, "self tokenizer"])
    for texts in (("return " * 99, "self tokenizer"), ("self tokenizer", "return " * 99)):
        (row,) = rows_of("label", [Example("0", texts, "neutral")], tokenizer, T, STRIDE, list(xtreme.NLI))
        cut = [long[: T - 4 - len(short)], short][:: 1 if texts[0][0] == "r" else -1]
        assert row.ids == [bos, *cut[0], eos, eos, *cut[1], eos] and len(row.ids) == T


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_padding_and_flat_places(tokenizer):
    rows = tag_rows(tokenizer, ["def", "return", "self"], ["x"], ["tokenizer", "."])
    batch = batch_of(rows, tokenizer.pad)
    width = max(len(row.ids) for row in rows)
    assert batch.ids.tolist() == [row.ids + [tokenizer.pad] * (width - len(row.ids)) for row in rows]
    assert batch.ids.dtype == batch.words.dtype == batch.targets.dtype == torch.int64
    real = [number * width + place for number, row in enumerate(rows) for place in range(len(row.ids))]
    assert batch.real.tolist() == real
    first = [row.ids[place] for row in rows for place, _ in row.marks]
    assert batch.ids.flatten()[batch.words].tolist() == first and len(first) == 6
    assert batch.targets.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch_of([rows[0], rows[0]], tokenizer.pad).real is None


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
    assert one.checksum == numbered(20, seed=3).checksum
    assert len({one.checksum, numbered(20, start="x").checksum, numbered(21).checksum}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# scores


@pytest.mark.parametrize("tags", [NER, UPOS])
def test_f1_of_tags_is_seqevals(tags):
    """Which reads UPOS like version 0.0.12 where each has its first letter before it, as if that were B or I."""
    f1_score = pytest.importorskip("seqeval.metrics").f1_score
    rng = random.Random(0)
    for _ in range(300):
        gold = [rng.choices(tags, k=rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        predicted = [[tag if rng.random() < 0.6 else rng.choice(tags) for tag in own] for own in gold]
        theirs = [[[tag if tags == NER else f"{tag[0]}-{tag}" for tag in own] for own in x] for x in (gold, predicted)]
        with warnings.catch_warnings(action="ignore"):
            assert score_task("ner", "en", gold, predicted)["f1"] == pytest.approx(100 * f1_score(*theirs))


@pytest.mark.parametrize(
    "task, language, gold, predicted, f1, em",
    [
        ("xquad", "en", ["The Cat"], "cat.", 100, 100),
        ("xquad", "en", ["one two three"], "two three four five", 400 / 7, 0),
        ("xquad", "en", ["no", "yes sir"], "yes", 200 / 3, 0),
        ("xquad", "en", ["cat"], "", 0, 0),
        ("xquad", "en", ["the"], "", 0, 100),  # nothing is left of both
        ("xquad", "de", ["der Hund"], "Hund", 200 / 3, 0),  # only English articles
        ("xquad", "zh", ["北京，"], "北京", 0, 0),  # only ASCII punctuation, and no characters as words
        ("mlqa", "de", ["der Hund"], "Hund", 100, 100),
        ("mlqa", "es", ["el gato"], "gato", 100, 100),
        ("mlqa", "vi", ["những con mèo"], "con mèo", 100, 100),
        ("mlqa", "ar", ["القاهرة"], "قاهرة", 100, 100),
        ("mlqa", "hi", ["दिल्ली।"], "दिल्ली", 100, 100),
        ("mlqa", "zh", ["北京"], "北方", 50, 0),
        ("mlqa", "zh", ["$5"], "5", 100, 100),  # ASCII's symbols too
        ("mlqa", "zh", ["NBA球员 ABC"], "ABC球", 200 / 3, 0),
        ("mlqa", "ar", ["بال"], "ب", 100, 100),  # its article is dropped anywhere
        ("mlqa", "vi", ["cái"], "", 0, 100),
        ("tydiqa", "en", ["«one»"], "one", 0, 0),
        ("spans", "x1", ["abcd"], "bcde", 75, 0),  # a character is a word
        ("spans", "x1", ["the"], "The", 200 / 3, 0),
        ("tydiqa", "en", ["12% of the U.S."], "12 of US", 100, 100),
    ],
)
def test_scores_of_answers_by_hand(task, language, gold, predicted, f1, em):
    found = score_task(task, language, [[(text, 0) for text in gold]], [predicted])
    assert found == {"f1": pytest.approx(f1), "em": em}


# ---------------------------------------------------------------------------------------------------------------------
# predictions, and what finds answers without a model


def test_the_best_answer_is_that_of_all_spans():
    generator = torch.Generator().manual_seed(0)
    for longest in (1, 2, 30):
        begins, ends = torch.randn(2, 12, generator=generator)
        row = Row(0, [], [(place, (10 * place, 10 * place + 5)) for place in range(4, 11)], [])
        spans = {(i, j): begins[i] + ends[j] for i in range(4, 11) for j in range(i, min(i + longest, 11))}
        i, j = max(spans, key=spans.get)
        score, begin, end = best_answer(row, begins, ends, longest)
        assert (begin, end) == (10 * i, 10 * j + 5) and score == pytest.approx(float(spans[i, j]))
    assert best_answer(row._replace(marks=[]), begins, ends, 30) == (float("-inf"), 0, 0)


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


def test_counting_pairs_is_of_characters_neighbours_and_what_both_texts_have():
    train = [Example("", texts, label) for *texts, label in (("ab", "cd", "1"), ("ab", "dc", "0"))]
    count = COUNTING["pairs"]
    assert count(train)([Example("", texts, "") for texts in (("x", "ycd"), ("x", "dcy"))]) == ["1", "0"]  # by order
    train = [Example("", texts, label) for *texts, label in ("ab0", "ba0", "bb1", "aa1")]
    assert count(train)([Example("", (text, text), "") for text in "ab"]) == ["1", "1"]  # by what is shared
    assert count(train)([Example("", ("a", "b"), "")]) == ["0"]


def test_counting_answers_takes_the_place_where_most_of_them_stand():
    """Of as many characters as answers have."""
    golds = [("abc", 0), ("cde", 2), ("de", 3), ("d", 3), ("efghij", 4)]  # median 3; e, d and f stand in 3, 3 and 1
    train = [Example("", ("?", "abcdefghij"), [gold, ("abcde", 0)]) for gold in golds]
    texts = "klmnopqrst", "uvwx", "y"
    assert answers_by_place(train)([Example("", ("?", text), None) for text in texts]) == ["mno", "wx", ""]
