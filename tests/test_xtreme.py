"""XTREME: reading of sound and damaged files, rows of tokens that lose nothing, and scores as published."""

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
from data.tokenizers import XLMR
from data.xtreme import NER, UPOS, Example, read, read_examples, submission
from data.xtreme_rows import UNKNOWN, Row, TaskData, batch_of, best_answer, by_example, rows_of
from metrics.scores import COUNTING, answers_by_place, guess, labels_by_word, score_task, tags_by_word

T, STRIDE = 24, 6


@pytest.fixture
def tokenizer(xlmr) -> XLMR:
    return xlmr


def squad(*questions: tuple[str, str, list[tuple[str, int]]]) -> str:
    """SQuAD's JSON with one article for each (question, text, answers); ids count from 0."""
    data = []
    for number, (question, context, answers) in enumerate(questions):
        answers = [{"text": text, "answer_start": start} for text, start in answers]
        entry = {"id": str(number), "question": question, "answers": answers}
        data.append({"title": "one", "paragraphs": [{"context": context, "qas": [entry]}]})
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
UD = dict.fromkeys(UD.split(), CONLLU)  # Swedish and Polish are not in the benchmark
TREES = [(("da", "me", "lo", "#"), ["VERB", "PRON", "PRON", "ADV"]), (("snake_", "_"), ["NOUN", "SYM"])]
BROKEN_TREE = (("me", "lo", "#"), ["PRON", "PRON", "ADV"])
BAD_TREE = {"de_gsd-ud-test.conllu": CONLLU.replace("1\tda\t", "1 da ").replace("\t", " ", 1)}
BAD_TAGS = {"test-de.tsv": "a\tX\nb\nc\tX\tX\nd\tX\te\nf\tQ\n\nh\n\n"}
NO_LABEL = "1 x an example without its label"
MISPLACED = "an answer that is not at its position in the text"
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
PLACES |= {("(ancient)", 0): 22, ("aa", 41): 39, ("Paris", 9): -1}  # the nearest occurrence
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
    ("xquad", "test", {"xquad.de.json": IN_ROME}, {"de": FOUND}, f"7 x {MISPLACED}"),
]


@pytest.mark.parametrize("task, split, files, examples, notes", READ)
def test_files_are_read_and_their_problems_counted(task, split, files, examples, notes, tmp_path):
    sets, lines = read(task, split, write_files(tmp_path, files))
    assert {language: [example[1:] for example in each] for language, each in sets.items()} == examples
    lines = [line for line in lines if ": skipped, " not in line]  # see the next tests
    assert "; ".join(line.split(": ", 1)[1] for line in lines) == notes
    assert {line.split(": ")[0] for line in lines} <= {str(tmp_path / name) for name in files}


UNREAD = {  # task, split -> files that cannot be read, beside some that can or that belong to another split
    ("pos", "test"): "test-pl.tsv sv_talbanken-ud-test.tsv my-test-fr.tsv test-de.txt de_gsd-ud-test.jsonl",
    ("pos", "train"): "sv_talbanken-ud-train.conllu.gz train-en.csv",
    ("ner", "test"): "test-de.zip test-sv",
    ("xnli", "test"): "xnli.test.tsv xnli.test.jsonl",
    ("xnli", "valid"): "xnli.dev.tsv",
    ("xquad", "test"): "xquad.ro.json",
    ("mlqa", "test"): "test-context-de-question-en.json",
    ("tydiqa", "train"): "tydiqa-goldp-v1.1-train.json",
}


@pytest.mark.parametrize("task, split", UNREAD)
def test_files_that_are_not_read_are_named(task, split, tmp_path):
    names = UNREAD[task, split].split()
    write_files(tmp_path, dict.fromkeys(names, "word\tX\n") | {"LICENSE": "", "README.md": "", ".test-pl.tsv": ""})
    _, [note] = read(task, split, tmp_path)
    reason = f"a name has one language of {task} and its format"
    assert note == f"{tmp_path}: skipped, {reason}: {', '.join(sorted(names))}"


SPACED = {  # text of a file without a TAB -> words and tags
    "Eva B-PER\nran  O\n\nO O\n": [(("Eva", "ran"), ["B-PER", "O"]), (("O",), ["O"])],
    "Eva NNP I-NP B-PER\r\nran VBD I-VP O\r\n": [(("Eva", "ran"), ["B-PER", "O"])],  # CoNLL-2003
    "Eva B-PER\nran\n\nO O\n": [(("Eva", "ran"), ["B-PER", ""]), (("O",), ["O"])],
    "Eva B-DATE\nran O\nhome O\n": [(("Eva", "ran", "home"), ["B-DATE", "O", "O"])],
    "Zwei Worte\nEva\nO\n": [(("Zwei Worte", "Eva", "O"), None)],  # words alone
    "Zwei Worte\nEva\nTyp O\n": [(("Zwei Worte", "Eva", "Typ O"), None)],  # one of them looks tagged
}


@pytest.mark.parametrize("text", SPACED)
def test_spaces_may_separate_words_from_tags(text, tmp_path):
    sets, _ = read("ner", "test", write_files(tmp_path, {"test-de.tsv": text}))
    assert [example[1:] for example in sets["de"]] == SPACED[text]


def test_limits_are_of_training_and_of_each_language_and_development(tmp_path):
    rows = "".join(f"a\tb{i}\tneutral\n" for i in range(5))
    names = ("train-en", "dev-en", "test-de", "test-fr")
    write_files(tmp_path, {f"{name}.tsv": rows.replace("b", name) for name in names})
    train, valid, test, *_ = read_examples("xnli", str(tmp_path), 3, 2)
    assert [len(examples) for examples in (train, valid, *test.values())] == [3, 2, 2, 2]


def test_a_file_with_the_examples_of_another_is_skipped(tmp_path):
    sets, notes = read("ner", "test", write_files(tmp_path, TWICE))
    assert [example.texts[0] for example in sets["de"]] == ["Anna", "Eva"]
    assert notes == [f"{tmp_path / 'test-de.tsv'} holds the same examples as another file: skipped"]


QUESTION = ("Where is it?", "It is in Rome, in Rome.", [("Rome", 9), ("in Rome", 15)])
NAMES = [  # task, split, published file name, and its language, None if it is not read
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
def test_published_file_names_say_split_and_language(tmp_path, task, split, name, language):
    sets, notes = read(task, split, write_files(tmp_path, {name: squad(QUESTION)}))
    expected = {language: [Example("0", QUESTION[:2], QUESTION[2])]} if language else {}
    assert sets == expected
    assert language is None or not notes


ONE = squad(("a", "b", [("b", 0)]))
BROKEN = ["{", "[]", "", '{"data": [{"paragraphs": null}]}', ONE.replace('"question"', '"x"')]
BROKEN += [ONE.replace('"qas": [', '"qas": [3, '), ONE.replace('"answer_start": 0', '"answer_start": "x"')]
GOOD = {"pos": ("tsv", "a\tX\n", ""), "xquad": ("json", squad(QUESTION), '{"data": []}')}
GOOD |= {"xnli": ("tsv", "a\tb\tneutral\n", "")}


@pytest.mark.parametrize("task", GOOD)
def test_an_unreadable_file_is_skipped_with_one_note(tmp_path, task):
    ending, good, empty = GOOD[task]
    write_files(tmp_path, {f"test.ru.{ending}": good})
    bad = [("", empty, "holds no example"), ("", good.encode() + b"\xff\xfe\n", "is not UTF-8")]
    bad += [(".gz", gzip.compress(good.encode() * 50)[:-9], "is damaged"), (".gz", good.encode(), "is damaged")]
    bad += [("", text, "is not in SQuAD's format") for text in BROKEN if ending == "json"]
    for compressed, content, problem in bad:
        path = tmp_path / f"test.de.{ending}{compressed}"
        write_files(tmp_path, {path.name: content})
        sets, [note] = read(task, "test", tmp_path)
        assert sets.keys() == {"ru"}
        assert note.startswith(f"{path} {problem}")
        assert note.endswith("skipped")
        assert "\n" not in note
        path.unlink()


UNLABELLED = {  # forms of test sets without labels: task, file, its content, and the texts in it
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
def test_a_test_set_without_labels_is_kept_with_a_note(tmp_path, tokenizer, case):
    task, name, text, texts = UNLABELLED[case]
    kind, labels, scored = TASKS[task].kind, TASKS[task].labels, TASKS[task].test
    write_files(tmp_path, {name: text})
    sets, notes = read(task, scored, tmp_path)
    assert notes == [f"{tmp_path / name}: {len(texts)} x an example without its label"]
    [examples] = sets.values()
    assert [example[1:] for example in examples] == [(each, None) for each in texts]
    rows = rows_of(kind, examples, tokenizer, T, STRIDE, list(labels))
    assert {target for row in rows for target in row.targets} == {UNKNOWN}
    name = name.replace("test", "train").replace("dev", "train").replace("xquad", "train").replace("de", "en")
    write_files(tmp_path / "train", {name.replace("ko", "en"): text})
    reason = f"holds no English training examples of {task}; .*{len(texts)} x an example without its label"
    with pytest.raises(ValueError, match=reason):
        read_examples(task, str(tmp_path / "train"))


def test_predictions_are_written_in_the_format_of_the_benchmark():
    examples = [Example("7", ("a", "b"), None), Example("9", ("c",), None)]
    tags, labels, texts = (["B-PER", "O"], ["O"]), ["neutral", "x"], ["", "東京"]
    assert submission("ner", "de", examples, tags) == ("panx/test-de.tsv", "B-PER\nO\n\nO\n")
    assert submission("pos", "zh", examples[1:], [["X"]]) == ("udpos/test-zh.tsv", "X\n")
    assert submission("xnli", "de", examples, labels) == ("xnli/test-de.tsv", "neutral\nx\n")
    for task in ("xquad", "mlqa", "tydiqa"):
        assert submission(task, "ja", examples, texts) == (f"{task}/test-ja.json", {"7": "", "9": "東京"})


@pytest.fixture
def hub(monkeypatch) -> SimpleNamespace:
    """A fake `datasets` package, with its requests, its rows and the names of its tags."""
    hub = SimpleNamespace(requests=[], rows=[], names={})

    def load_dataset(repository, config, split):
        hub.requests.append((repository, config, split))
        if not hub.rows:
            raise ConnectionError("no route\nto host")
        features = {key: SimpleNamespace(feature=SimpleNamespace(names=names)) for key, names in hub.names.items()}
        return type("Rows", (list,), {"features": features})(hub.rows)

    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


TASKS = xtreme.TASKS
CODES = {task: TASKS[task].languages.split() for task in TASKS}
REQUESTS = {  # all requests to the hub
    ("pos", "test"): [(f"udpos.{xtreme.NAMES.get(code)}", "test") for code in CODES["pos"]],
    ("ner", "test"): [(f"PAN-X.{code}", "test") for code in CODES["ner"]],
    ("ner", "train"): [("PAN-X.en", "train")],  # only English unless the split is scored
    ("xquad", "train"): [("SQuAD", "train")],
    ("xquad", "test"): [(f"XQuAD.{code}", "validation") for code in CODES["xquad"]],
    ("mlqa", "valid"): [("SQuAD", "validation")],
    ("mlqa", "test"): [(f"MLQA.{code}.{code}", "test") for code in CODES["mlqa"]],
    ("tydiqa", "valid"): [("tydiqa", "validation")] * 9,
    ("xnli", "test"): [("XNLI", "test")] * 15,
    ("pawsx", "test"): [(f"PAWS-X.{code}", "test") for code in CODES["pawsx"]],
}


@pytest.mark.parametrize("task, split", REQUESTS)
def test_the_hub_is_asked_for_the_splits_of_the_benchmark(hub, task, split):
    hub.names = {"pos_tags": ["X", "VERB"], "ner_tags": ["O", "B-PER"]}
    tags = {"tokens": ["a", "b"], "pos_tags": [1, 0], "ner_tags": [1, 0]}
    answers = {"text": ["Rome", "Paris"], "answer_start": [9, 0]}
    answer = {"id": "english-1-0", "question": "Where?", "context": "It is in Rome.", "answers": answers}
    hub.rows = [tags | answer | {"language": "en", "sentence1": "A", "sentence2": "B", "label": "1"}]
    if task == "xnli":
        hub.rows[0]["gold_label"] = "neutral"
    sets, notes = read(task, split, None)
    assert hub.requests == [("google/xtreme", *request) for request in REQUESTS[task, split]]
    gold = {"pos": ["VERB", "X"], "ner": ["B-PER", "O"], "xnli": "neutral", "pawsx": "1"}
    expected = gold.get(task, [("Rome", 9), ("Paris", -1)])
    assert [example.gold for example in sets["en"]] == [expected]
    rows_have_language = task in ("tydiqa", "xnli", "pawsx")
    assert len(sets) == (1 if rows_have_language else len(REQUESTS[task, split]))
    misplaced = f"{task} from the hub, {split}, en: 1 x {MISPLACED}"
    assert (misplaced in notes) == (TASKS[task].kind == "answer")


def test_labels_of_multinli_are_read_from_the_hub(hub):
    hub.rows = [{"premise": "A", "hypothesis": "B", "label": number} for number in (0, 1, 2, -1)]
    sets, notes = read("xnli", "train", None)
    assert [example.gold for example in sets["en"]] == ["entailment", "neutral", "contradiction"]
    assert notes == ["xnli from the hub, train, en: 1 x an example without its label"]
    assert hub.requests == [("nyu-mll/multi_nli", None, "train")]


def test_an_unreachable_hub_is_an_error_of_one_line(hub):
    with pytest.raises(OSError, match=r"google/xtreme XNLI [^\n]*no route[^\n]*--source[^\n]*$"):
        read("xnli", "test", None)


# ---------------------------------------------------------------------------------------------------------------------
# rows


def tag_rows(tokenizer, *sentences: list[str], T: int = T) -> list[Row]:
    examples = [Example("", tuple(words), [UPOS[i % 17] for i, _ in enumerate(words)]) for words in sentences]
    rows = rows_of("tags", examples, tokenizer, T, STRIDE, list(UPOS))
    for row in rows:
        assert (row.ids[0], row.ids[-1]) == (tokenizer.bos, tokenizer.eos)
        assert len(row.ids) <= T
        assert not {tokenizer.bos, tokenizer.eos} & set(row.ids[1:-1])
    return rows


def test_every_word_has_one_mark(tokenizer):
    rng = random.Random(0)
    words = [*"def return 日本語 x \u200b tokenizer 😀 ﬁ .".split(), "", "a b", "internationalisation" * 9]
    assert tokenizer.encode_batch(["\u200b"]) == [[]]  # it has no pieces
    assert len(tokenizer.encode_batch([words[-1]])[0]) > T  # more pieces than fit into a row
    sentences = [rng.choices(words, k=rng.randint(1, 40)) for _ in range(50)]
    rows = tag_rows(tokenizer, *sentences)
    assert len(rows) > len(sentences)
    for number, sentence in enumerate(sentences):
        parts = [row for row in rows if row.example == number]
        assert [word for row in parts for _, word in row.marks] == list(range(len(sentence)))
        assert [tag for row in parts for tag in row.targets] == [word % 17 for word in range(len(sentence))]
        for row in parts:
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
def test_parts_cover_the_text_and_targets_mark_the_answer(tokenizer, language):
    """Targets are set in the rows that contain all its tokens, and in no other; no row is superfluous.

    The marked text is exactly the answer if it begins and ends with pieces, and otherwise has the rest of these two.
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
        end = begin + len(answer.rstrip())  # spaces at its edges do not belong to it
        start = end - len(answer.strip())
        tokens = [n for n, (first, last) in enumerate(spans) if last > start and first < end]
        rows = answer_rows(tokenizer, Example("0", ("Which?", text), [(answer, begin), ("another", 0)]))
        assert 20 * (len(rows) - 2) + room < len(ids) <= 20 * (len(rows) - 1) + room
        for first, row in zip(range(0, len(ids), 20), rows, strict=False):
            complete = first <= tokens[0] and tokens[-1] < first + room
            targets = [ahead + tokens[0] - first, ahead + tokens[-1] - first] if complete else [0, 0]
            marks = list(enumerate(spans[first:][:room], ahead))
            assert row == Row(0, [*head, *ids[first:][:room], tokenizer.eos], marks, targets)
        marked = text[spans[tokens[0]][0] : spans[tokens[-1]][1]].strip()
        assert answer.strip() in marked
        if {begin, begin + len(answer)} <= places:
            assert marked == answer.strip()
            exact += 1
    assert exact > 20


@pytest.mark.parametrize("gold", [[("Paris", -1)], []])
def test_an_answer_without_a_known_place_trains_nothing(tokenizer, gold):
    rows = answer_rows(tokenizer, Example("0", ("Which?", TEXTS["en"]), gold))
    assert len(rows) > 1
    assert all(row.targets == [UNKNOWN, UNKNOWN] for row in rows)


@pytest.mark.parametrize("query, text", [("why " * 99, "def return " * 9), ("why", ""), ("", "\u200b"), ("why", "x")])
def test_a_long_question_or_an_empty_text_makes_rows(tokenizer, query, text):
    rows = answer_rows(tokenizer, Example("0", (query, text), [("def", 0)]), T=16, stride=500)
    ids = tokenizer.encode_batch([text])[0]
    assert sum(len(row.marks) for row in rows) >= len(ids)
    assert ids or len(rows) == 1
    assert all(row.ids.count(tokenizer.eos) == 3 for row in rows[:-1])
    assert all(len(row.marks) >= 5 for row in rows[:-1])


def test_label_rows_join_sentences_and_truncate_the_longer(tokenizer):
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
        assert row.ids == [bos, *cut[0], eos, eos, *cut[1], eos]
        assert len(row.ids) == T


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_a_batch_is_padded_and_has_flat_indices(tokenizer):
    rows = tag_rows(tokenizer, ["def", "return", "self"], ["x"], ["tokenizer", "."])
    batch = batch_of(rows, tokenizer.pad)
    width = max(len(row.ids) for row in rows)
    assert batch.ids.tolist() == [row.ids + [tokenizer.pad] * (width - len(row.ids)) for row in rows]
    assert batch.ids.dtype == batch.words.dtype == batch.targets.dtype == torch.int64
    nonpad = [number * width + place for number, row in enumerate(rows) for place in range(len(row.ids))]
    assert batch.nonpad.tolist() == nonpad
    first = [row.ids[place] for row in rows for place, _ in row.marks]
    assert len(first) == 6
    assert batch.ids.flatten()[batch.words].tolist() == first
    assert batch.targets.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch_of([rows[0], rows[0]], tokenizer.pad).nonpad is None


def numbered(count: int, batch_size: int = 6, micro_size: int = 2, seed: int = 0, start: str = "") -> TaskData:
    rows = [Row(number, [0, 10 + number, 2], [], [number]) for number in range(count)]
    return TaskData(rows, SimpleNamespace(pad=1), batch_size, micro_size, seed, start)


def seen(data: TaskData, step: int) -> list[int]:
    """The numbers of a step's rows."""
    return [row for micro in range(data.micros_per_step) for row in data.batch(step, micro).targets.tolist()]


@pytest.mark.parametrize("count", [6, 12, 20, 4])
def test_an_epoch_has_every_row_once(count):
    data = numbered(count)
    assert data.steps_per_epoch == -(-count // 6)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch)
        rows = [row for step in steps for row in seen(data, step)]
        assert sorted(rows[:count]) == list(range(count))
        assert rows[count:] == (rows * 6)[: len(rows) - count]  # filled up with the epoch's first rows
        epochs.append(rows)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_only_on_seed_step_and_micro():
    one, two = numbered(20), numbered(20)
    for step, micro in [(3, 1), (0, 0), (9, 2), (0, 1), (3, 1)]:
        again, batch = two.batch(step, micro), one.batch(step, micro)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(batch, again))
        assert batch.ids.shape == (2, 3)
    assert [seen(one, step) for step in (5, 1)] == [seen(two, step) for step in (1, 5)][::-1]
    other = numbered(20, seed=1)
    assert [seen(one, step) for step in range(4)] != [seen(other, step) for step in range(4)]
    wide = numbered(20, micro_size=6)  # the same rows in one forward pass
    assert [seen(one, step) for step in range(8)] == [seen(wide, step) for step in range(8)]
    assert one.checksum == numbered(20, seed=3).checksum
    assert len({one.checksum, numbered(20, start="x").checksum, numbered(21).checksum}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# scores


@pytest.mark.parametrize("tags", [NER, UPOS])
def test_f1_of_tags_equals_seqevals(tags):
    """With a tag's first letter as its prefix, like B or I, today's seqeval reads UPOS as version 0.0.12 did."""
    f1_score = pytest.importorskip("seqeval.metrics").f1_score
    rng = random.Random(0)
    prefixed = {tag: tag if tags == NER else f"{tag[0]}-{tag}" for tag in tags}
    for _ in range(300):
        gold = [rng.choices(tags, k=rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        predicted = [[tag if rng.random() < 0.6 else rng.choice(tags) for tag in each] for each in gold]
        theirs = [[[prefixed[tag] for tag in each] for each in side] for side in (gold, predicted)]
        with warnings.catch_warnings(action="ignore"):
            assert score_task("ner", "en", gold, predicted)["f1"] == pytest.approx(100 * f1_score(*theirs))


@pytest.mark.parametrize(
    "task, language, gold, predicted, f1, em",
    [
        ("xquad", "en", ["The Cat"], "cat.", 100, 100),
        ("xquad", "en", ["one two three"], "two three four five", 400 / 7, 0),
        ("xquad", "en", ["no", "yes sir"], "yes", 200 / 3, 0),
        ("xquad", "en", ["cat"], "", 0, 0),
        ("xquad", "en", ["the"], "", 0, 100),  # both are empty without the article
        ("xquad", "de", ["der Hund"], "Hund", 200 / 3, 0),  # only English articles
        ("xquad", "zh", ["北京，"], "北京", 0, 0),  # only ASCII punctuation; a character is no word
        ("mlqa", "de", ["der Hund"], "Hund", 100, 100),
        ("mlqa", "es", ["el gato"], "gato", 100, 100),
        ("mlqa", "vi", ["những con mèo"], "con mèo", 100, 100),
        ("mlqa", "ar", ["القاهرة"], "قاهرة", 100, 100),
        ("mlqa", "hi", ["दिल्ली।"], "दिल्ली", 100, 100),
        ("mlqa", "zh", ["北京"], "北方", 50, 0),
        ("mlqa", "zh", ["$5"], "5", 100, 100),  # ASCII's symbols too
        ("mlqa", "zh", ["NBA球员 ABC"], "ABC球", 200 / 3, 0),
        ("mlqa", "ar", ["بال"], "ب", 100, 100),  # the article is removed anywhere
        ("mlqa", "vi", ["cái"], "", 0, 100),
        ("tydiqa", "en", ["«one»"], "one", 0, 0),
        ("spans", "x1", ["abcd"], "bcde", 75, 0),  # a character is a word
        ("spans", "x1", ["the"], "The", 200 / 3, 0),
        ("tydiqa", "en", ["12% of the U.S."], "12 of US", 100, 100),
    ],
)
def test_answers_have_the_scores_computed_by_hand(task, language, gold, predicted, f1, em):
    scores = score_task(task, language, [[(text, 0) for text in gold]], [predicted])
    assert scores == {"f1": pytest.approx(f1), "em": em}


# ---------------------------------------------------------------------------------------------------------------------
# predictions, and baselines without a model


def test_the_best_answer_has_the_highest_score_of_all_spans():
    generator = torch.Generator().manual_seed(0)
    for longest in (1, 2, 30):
        begins, ends = torch.randn(2, 12, generator=generator)
        row = Row(0, [], [(place, (10 * place, 10 * place + 5)) for place in range(4, 11)], [])
        spans = {(i, j): begins[i] + ends[j] for i in range(4, 11) for j in range(i, min(i + longest, 11))}
        i, j = max(spans, key=spans.get)
        score, begin, end = best_answer(row, begins, ends, longest)
        assert (begin, end) == (10 * i, 10 * j + 5)
        assert score == pytest.approx(float(spans[i, j]))
    assert best_answer(row._replace(marks=[]), begins, ends, 30) == (float("-inf"), 0, 0)


def test_predictions_of_rows_are_combined_by_example():
    example, row = Example("", ("?", "one two"), []), Row(0, [], [], [])
    rows = [row, row._replace(example=1), row]
    predicted = {0: [(5.0, 0, 3)], 1: [(7.0, 4, 7)], 2: [(1.0, 4, 7)]}
    assert by_example("answer", [example, example], rows, predicted) == ["one", "two"]
    predicted = {0: ["A", "B"], 1: ["C"], 2: ["D"]}
    assert by_example("tags", [example, example], rows, predicted) == [["A", "B", "D"], ["C"]]


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


def test_counting_tags_each_word_with_its_most_frequent_tag():
    train = [tagged("The run ends", "DET NOUN VERB"), tagged("a run run", "DET VERB VERB"), tagged("x y", "X X")]
    train += [tagged("the x z", "DET NOUN NOUN"), tagged("x u", "NOUN NOUN")]
    tags = tags_by_word(train)([tagged("THE Run of", ""), tagged("x", "")])
    assert tags == [["DET", "VERB", "NOUN"], ["NOUN"]]


def test_counting_predicts_the_most_likely_label():
    """A word counts once in each text, separately in each; unknown words do not count."""
    train = [Example("", texts, label) for *texts, label in (("a b", "c", "x"), ("a", "b", "x"), ("b", "a", "y"))]
    cases = {  # 3 P(label, words) of x, y
        ("A!", "new"): "x",  # 2 * 3/4, 1 * 1/3
        ("new", "a"): "y",  # 2 * 1/4, 1 * 2/3
        ("b, b b", "new"): "x",  # 2 * 2/4, 1 * 2/3; three times it would be y
        ("new", "new"): "x",  # 2, 1
    }
    assert labels_by_word(train)([Example("", texts, "") for texts in cases]) == list(cases.values())


def test_counting_pairs_uses_neighbouring_characters():
    train = [Example("", texts, label) for *texts, label in (("ab", "cd", "1"), ("ab", "dc", "0"))]
    examples = [Example("", texts, "") for texts in (("x", "ycd"), ("x", "dcy"))]
    assert COUNTING["pairs"](train)(examples) == ["1", "0"]


def test_counting_pairs_uses_characters_that_both_texts_share():
    train = [Example("", texts, label) for *texts, label in ("ab0", "ba0", "bb1", "aa1")]
    examples = [Example("", tuple(texts), "") for texts in ("aa", "bb", "ab")]
    assert COUNTING["pairs"](train)(examples) == ["1", "1", "0"]


def test_counting_answers_with_the_place_that_most_answers_cover():
    golds = [("abc", 0), ("cde", 2), ("de", 3), ("d", 3), ("efghij", 4)]  # median 3; e, d and f are in 3, 3 and 1
    train = [Example("", ("?", "abcdefghij"), [gold, ("abcde", 0)]) for gold in golds]
    examples = [Example("", ("?", text), None) for text in ("klmnopqrst", "uvwx", "y")]
    assert answers_by_place(train)(examples) == ["mno", "wx", ""]
