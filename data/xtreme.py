"""XTREME's seven tasks: their languages, and their examples, read from files or from the Hugging Face hub.

    pos, ner                  a tag for every word                   scored by F1 of entities (runs of tags)
    xquad, mlqa, tydiqa       the answer to a question in a text     F1 of words, and exact match (em)
    xnli, pawsx               a label for two sentences              accuracy

Three small tasks in English and its ciphers, tags, spans and pairs, are one of each kind: see data/cipher_tasks.py.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from data import cipher_tasks, ciphers
from data.corpora import HUB_SPLITS, network
from data.files import NO_TEXT, named_split, read_lines, source_files, split_of, uncompressed_name


class Task(NamedTuple):
    kind: str  # tags, answer or label
    languages: str  # codes of the benchmark's languages
    labels: tuple[str, ...] = ()  # the tags or labels
    folder: str = ""  # its name in XTREME's folder of all tasks
    hub: str = ""  # its config of the hub's google/xtreme, with the code or the name of a language
    test: str = "test"  # the split that the benchmark scores


UPOS = tuple("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split())
NER = tuple("B-LOC B-ORG B-PER I-LOC I-ORG I-PER O".split())
NLI = ("entailment", "neutral", "contradiction")  # in the hub's order
POS_LANGUAGES = "af ar bg de el en es et eu fa fi fr he hi hu id it ja kk ko mr nl pt ru ta te th tl tr ur vi yo zh"
NER_LANGUAGES = f"{POS_LANGUAGES} bn jv ka ml ms my sw"
TASKS = {
    "pos": Task("tags", POS_LANGUAGES, UPOS, "udpos", "udpos.{name}"),
    "ner": Task("tags", NER_LANGUAGES, NER, "panx", "PAN-X.{code}"),
    "xquad": Task("answer", "ar de el en es hi ru th tr vi zh", (), "xquad", "XQuAD.{code}"),
    "mlqa": Task("answer", "ar de en es hi vi zh", (), "mlqa", "MLQA.{code}.{code}"),
    "tydiqa": Task("answer", "ar bn en fi id ko ru sw te", (), "tydiqa", "tydiqa", test="valid"),
    "xnli": Task("label", "ar bg de el en es fr hi ru sw th tr ur vi zh", NLI, "xnli", "XNLI"),
    "pawsx": Task("label", "de en es fr ja ko zh", ("0", "1"), "pawsx", "PAWS-X.{code}"),
}
CIPHERS = " ".join(ciphers.LANGUAGES)
LABORATORY = {
    "tags": Task("tags", CIPHERS, ("NAME", "CODE", "NUMBER", "O")),
    "pairs": Task("label", CIPHERS, ("0", "1")),
    "spans": Task("answer", CIPHERS),
}
TASKS |= LABORATORY
SQUAD = ("xquad", "mlqa")  # tasks that train on SQuAD
NAMES = """af:Afrikaans ar:Arabic bg:Bulgarian bn:Bengali de:German el:Greek en:English es:Spanish et:Estonian eu:Basque
    fa:Persian fi:Finnish fr:French he:Hebrew hi:Hindi hu:Hungarian id:Indonesian it:Italian ja:Japanese kk:Kazakh
    ko:Korean mr:Marathi nl:Dutch pt:Portuguese ru:Russian sw:Swahili ta:Tamil te:Telugu th:Thai tl:Tagalog tr:Turkish
    ur:Urdu vi:Vietnamese yo:Yoruba zh:Chinese"""
NAMES = dict(pair.split(":") for pair in NAMES.split())  # code -> the hub's name
LANGUAGES = {code: code for code in [*NAMES, *"az gu jv ka lt ml ms my pa pl qu ro uk wo".split()]}
LANGUAGES |= {name.lower(): code for code, name in NAMES.items()}  # code or name in a file name -> code


class Example(NamedTuple):
    id: str  # of a question, otherwise ""
    texts: tuple[str, ...]  # the words of a sentence; a question and its text; one sentence or two
    gold: list | str | None  # a tag for each word; answers (text, its first character, -1: not in the text); a label


Sets = dict[str, list[Example]]  # language -> its examples
Parsed = Iterator[Example | str]  # the examples of a file or of the hub, and messages about what is wrong


class Examples(NamedTuple):
    """The examples of a task: English ones to train on and to choose a checkpoint, and every language's to score."""

    train: list[Example]
    valid: list[Example]
    test: Sets  # `gold` is None where the benchmark withholds the labels
    labels: list[str]
    notes: list[str]  # problems with files or single examples, one line each


def read_examples(task: str, source: str | None, most_train=None, most_test=None) -> Examples:
    """Reads a task: at most most_train training examples and most_test per language to score (None: all).

    source: a folder of the task's files, or of XTREME's folders of all tasks; None: the hub. Cipher tasks need none.
    Without a separate development set, a tenth of the training examples is held out as one.
    """
    scored, notes = TASKS[task].test, []
    splits = laboratory(task) if task in LABORATORY else {}
    if not splits:
        for split in dict.fromkeys(("train", scored, "valid")):
            splits[split], more = read(task, split, source and Path(source))
            notes += more
    test, train = splits.pop(scored), splits["train"].get("en")
    for examples, name in ((train, "English training"), (test, scored)):
        if not examples:
            missing = f"{source or 'the hub'} holds no {name} examples of {task}"
            raise ValueError("; ".join([missing, *notes[:3]]))
    valid = splits.get("valid", {}).get("en")
    if not valid:
        parts = {"train": [], "valid": []}
        for example in train:
            parts[split_of(" ".join(example.texts), valid=0.1, test=0.0)].append(example)
        train, valid = parts.values()
    if not train or not valid:
        raise ValueError(f"too few English training examples of {task} to hold out a development set")
    test = {language: examples[:most_test] for language, examples in test.items()}
    return Examples(train[:most_train], valid[:most_test], test, list(TASKS[task].labels), notes)


def laboratory(task) -> dict[str, Sets]:
    """split -> language -> the examples of a task in ciphers"""
    splits = defaultdict(dict)
    for split, plain in cipher_tasks.read(task).items():
        for language in languages_of(task, split):
            examples = enumerate(cipher_tasks.in_language(one, language) for one in plain)
            splits[split][language] = [Example(str(number), *example) for number, example in examples]
    return splits


def read(task, split, source: Path | None) -> tuple[Sets, list[str]]:
    """The examples of a split, and its problems, one line each.

    source: a folder; None: the hub, which gives only English unless the split is scored. An unusable file is skipped
    and named. Examples without a label are skipped, except in a test set that has no labels at all.
    """
    sets, seen, notes, unread = defaultdict(list), [], [], []
    if source:
        parts = files_of(task, split, source)
    else:
        languages = languages_of(task, split)
        parts = ((one, f"{task} from the hub, {split}, {one}", from_hub(task, split, one)) for one in languages)
    for language, where, parsed in parts:
        if not language:
            unread.append(where.name)
            continue
        try:
            parsed = list(parsed)
        except ValueError as error:
            notes.append(f"{error}: skipped")
            continue
        examples = [one for one in parsed if isinstance(one, Example)]
        if task == "ner":  # PAN-X as published prefixes every word with its language: `en:Anna`
            for number, example in enumerate(examples):
                words = [word.removeprefix(f"{language}:") or word for word in example.texts]
                examples[number] = example._replace(texts=tuple(words))
        if not examples:
            notes.append(f"{where} holds no example: skipped")
        elif (language, examples) in seen:
            notes.append(f"{where} holds the same examples as another file: skipped")
            continue
        seen.append((language, examples))
        problems = [one for one in parsed if isinstance(one, str)]
        problems += ["an example without its label" for example in examples if example.gold is None]
        notes += [f"{where}: {count:,} x {problem}" for problem, count in Counter(problems).most_common(5)]
        sets[language] += examples
    if unread:
        notes.append(f"{source}: skipped, a name has one language of {task} and its format: {', '.join(unread)}")
    for language, examples in sets.items():
        labelled = [example for example in examples if example.gold is not None]
        if labelled or split != TASKS[task].test:
            sets[language] = labelled
    return {language: examples for language, examples in sorted(sets.items()) if examples}, notes


def files_of(task, split, source: Path) -> Iterator[tuple[str | None, Path, Parsed]]:
    """(language, file, its contents) for each file whose name has the split and the language, such as train-en.tsv or
    test-context-de-question-de.json. The language is None for other formats, and for files of several languages or of
    none of the benchmark's.

    PAN-X as published, de/train, has the language in the folder's name. SQuAD's files have none. A file without a split
    in its name belongs to the one that is scored.
    """
    spec, is_squad = TASKS[task], task in SQUAD
    if any((source / each.folder).is_dir() for each in TASKS.values() if each.folder):  # XTREME's folder of all tasks
        source /= "squad" if is_squad and split != "test" else spec.folder
    endings, reader = FORMATS[spec.kind]
    for path in source_files(source):
        name = Path(uncompressed_name(path).lower())
        file_split = named_split(Path(name.stem)) or (spec.test if name.suffix else None)
        if file_split != split or NO_TEXT.search(name.name):
            continue
        languages = set(map(LANGUAGES.get, re.split(r"[._-]", name.stem))) - {None}
        languages = languages or {LANGUAGES.get(path.parent.name, "en" if is_squad else None)}
        is_read = name.suffix in endings and len(languages) == 1 and languages.issubset(spec.languages.split())
        yield languages.pop() if is_read else None, path, reader(path, spec.labels)


def languages_of(task, split) -> list[str]:
    """The languages to read from the hub or in ciphers: only English unless the split is scored."""
    return TASKS[task].languages.split() if split == TASKS[task].test else ["en"]


def read_tags(path: Path, labels: tuple) -> Parsed:
    """Sentences separated by blank lines, as `word TAB tag` lines, as words alone, or in CoNLL-U's ten columns.

    In a file without a TAB, spaces may separate the columns, the word first and the tag last, as in CoNLL-2003.

    CoNLL-U's empty nodes and multiword tokens are skipped, as are malformed lines, and sentences in which every word is
    `_`, because the treebank may not publish them. An unknown tag is kept, and no prediction can equal it.
    """
    conllu = uncompressed_name(path).endswith(".conllu")
    columns, word_at, tag_at = (10, 1, 3) if conllu else (2, 0, 1)
    lines = [*read_lines(path)]
    rows = [*map(str.split, lines)]
    tagged = sum(len(row) > 1 and row[-1] in labels for row in rows)
    if 2 * tagged > sum(map(bool, rows)) and "\t" not in "".join(lines):
        lines = ["\t".join(row[:1] + row[1:][-1:]) or "\n" for row in rows]
    for is_blank, block in groupby(lines, key=str.isspace):
        if is_blank:
            continue
        words, tags = [], []
        for line in block:
            if conllu and re.match(r"#|\d+[-.]\d+\t", line):
                continue
            cells = line.rstrip("\r\n").split("\t")
            if not conllu and len(cells) == 1:
                cells.append("")
            if len(cells) == columns:
                words.append(cells[word_at])
                tags.append(cells[tag_at])
            else:
                yield f"a line with {len(cells)} columns"
        if not set(tags) - {"", "_"}:
            tags = []
        yield from (f"the unknown tag {tag!r}" for tag in tags if tag not in labels)
        if set(words) - {"_"}:
            yield Example("", tuple(words), tags or None)


def read_answers(path: Path, labels: tuple) -> Parsed:
    """The questions of a file in SQuAD 1.1's JSON format."""
    text = "".join(read_lines(path))
    try:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                context = str(paragraph["context"])
                for question in paragraph["qas"]:
                    answers = [(str(one["text"]), int(one["answer_start"])) for one in question.get("answers") or ()]
                    id_and_text = str(question["id"]), str(question["question"])
                    "".join([*id_and_text, context]).encode()  # raises if the JSON has half a surrogate pair
                    yield from answer_example(*id_and_text, context, answers)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not in SQuAD's format ({type(error).__name__}: {error})") from None


def answer_example(name, question, context, answers: Iterable) -> Parsed:
    """A question as an example.

    answers: (text, its first character); none, or empty texts, where the benchmark withholds them. An answer that is
    not at its position is searched for: the nearest occurrence counts, and the position is -1 if there is none.
    """
    gold = []
    for text, start in answers:
        if text.strip():
            if start < 0 or not context.startswith(text, start):
                yield "an answer that is not at its position in the text"
                places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
                start = min(places, key=lambda place: abs(place - start), default=-1)
            gold.append((text, start))
    yield Example(name, (question, context), gold or None)


def read_labels(path: Path, labels: tuple) -> Parsed:
    """`sentence TAB sentence TAB label` lines; the label may be missing.

    A malformed line is skipped. An unknown label is kept, and no prediction can equal it.
    """
    for line in read_lines(path):
        cells = line.rstrip("\r\n").split("\t")
        if len(cells) not in (2, 3):
            yield "a line that is not two sentences and a label"
            continue
        one, two, label = (*cells, "")[:3]
        label = "contradiction" if label == "contradictory" else label  # MultiNLI's word for it
        if label and label not in labels:
            yield f"the unknown label {label!r}"
        yield Example("", (one, two), label or None)


FORMATS = {  # kind of task -> the suffixes of its files, and their reader
    "tags": ((".tsv", ".conllu", ""), read_tags),
    "answer": ((".json",), read_answers),
    "label": ((".tsv",), read_labels),
}


def submission(task, language, examples: list, predicted: list) -> tuple:
    """The name and content of a file with a test set's predictions, in the format of XTREME's evaluate.py.

    One tag per line with a blank line after each sentence; one label per line; answers as JSON, by question id.
    """
    kind, file = TASKS[task].kind, f"{TASKS[task].folder or task}/test-{language}"
    if kind == "answer":
        return f"{file}.json", dict(zip([example.id for example in examples], predicted))
    lines = chain.from_iterable([*tags, ""] for tags in predicted) if kind == "tags" else [*predicted, ""]
    return f"{file}.tsv", "\n".join(lines)


def from_hub(task, split, language) -> Parsed:
    """google/xtreme; MultiNLI for training XNLI, and SQuAD for training and development of XQuAD and MLQA."""
    kind, repository, hub_split = TASKS[task].kind, "google/xtreme", HUB_SPLITS[split]
    config = TASKS[task].hub.format(code=language, name=NAMES.get(language))
    if task in SQUAD and split != "test":
        config = "SQuAD"
    elif task == "xquad":
        hub_split = "validation"
    elif task == "xnli" and split == "train":
        repository, config = "nyu-mll/multi_nli", None
    from datasets import load_dataset

    with network(f"{repository} {config or ''}"):
        data = load_dataset(repository, config, split=hub_split)
        rows = list(data)
    prefix = NAMES[language].lower() if task == "tydiqa" else ""  # TyDiQA's languages are in one set
    for row in rows:
        if kind == "tags":
            names = data.features[f"{task}_tags"].feature.names
            yield Example("", tuple(row["tokens"]), [names[tag] for tag in row[f"{task}_tags"]])
        elif kind == "answer":
            if row["id"].startswith(prefix):
                answers = zip(row["answers"]["text"], row["answers"]["answer_start"])
                yield from answer_example(row["id"], row["question"], row["context"], answers)
        elif "premise" in row:  # MultiNLI
            label = dict(enumerate(NLI)).get(row["label"])
            yield Example("", (row["premise"], row["hypothesis"]), label)
        elif row.get("language", language) == language:
            label = row.get("gold_label", row.get("label"))
            yield Example("", (row["sentence1"], row["sentence2"]), label or None)
