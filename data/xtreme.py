"""XTREME's seven tasks: their languages, and their examples, read from files or from the Hugging Face hub.

    pos, ner                  a tag for every word                   scored by F1 of runs of tags
    xquad, mlqa, tydiqa       the part of a text that answers        F1 of words, and exact match (em)
    xnli, pawsx               a label for two sentences              accuracy

The laboratory has one of each kind, tags, spans and pairs, in English and in ciphers of it: see data/cipher_tasks.py.
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
from data.files import named_split, read_lines, source_files, split_of, uncompressed_name


class Task(NamedTuple):
    kind: str  # tags, answer or label
    languages: str  # the benchmark's
    labels: tuple[str, ...] = ()  # the tags or labels
    folder: str = ""  # in XTREME's folder of all tasks
    hub: str = ""  # what the hub's google/xtreme calls it, by the code or the name of a language
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
NAMES = dict(pair.split(":") for pair in NAMES.split())  # code -> name, as the hub has it
CODES = [*NAMES, *"az gu jv ka lt ml ms my pa pl qu ro uk wo".split()]
LANGUAGES = dict(zip(CODES, CODES))  # what file names say -> code
LANGUAGES |= {name.lower(): code for code, name in NAMES.items()}


class Example(NamedTuple):
    id: str  # of a question, or "" where there is none
    texts: tuple[str, ...]  # the words of a sentence; a question and its text; one sentence or two
    gold: list | str | None  # a tag for each word; answers (text, its first character, or -1: not in the text); a label


Sets = dict[str, list[Example]]  # language -> its examples
Found = Iterator[Example | str]  # what is read from a file or from the hub: examples, and what is wrong, in words


class Examples(NamedTuple):
    """Of a task: English ones to train on and to choose a checkpoint by, and those to score, of every language."""

    train: list[Example]
    valid: list[Example]
    test: Sets  # `gold` is None where the benchmark keeps the labels
    labels: list[str]
    notes: list[str]  # what was wrong with files or single examples, a line each


def read_examples(task: str, source: str | None, most_train=None, most_test=None) -> Examples:
    """The examples of a task, at most so many to train on and so many of each language to score; None: all.

    source: a folder of the task's files, or of XTREME's folders of all tasks; None: the hub. The laboratory needs none.
    Where there is no development set, or the benchmark scores it, a tenth of the training examples takes its place.
    ValueError where English training examples or all test examples are missing.
    """
    scored, notes = TASKS[task].test, []
    found = laboratory(task) if task in LABORATORY else {}
    if not found:
        for split in dict.fromkeys(("train", scored, "valid")):
            found[split], more = read(task, split, source and Path(source))
            notes += more
    test, train = found.pop(scored), found["train"].get("en")
    for examples, what in ((train, "English training"), (test, scored)):
        if not examples:
            missing = f"{source or 'the hub'} holds no {what} examples of {task}"
            raise ValueError("; ".join([missing, *notes[:3]]))
    valid = found.get("valid", {}).get("en")
    if not valid:
        parts = {"train": [], "valid": []}
        for one in train:
            split = split_of(" ".join(one.texts), valid=0.1, test=0.0)
            parts[split].append(one)
        train, valid = parts.values()
    if not train or not valid:
        raise ValueError(f"too few English training examples of {task} to hold some out to choose by")
    test = {language: own[:most_test] for language, own in test.items()}
    return Examples(train[:most_train], valid[:most_test], test, list(TASKS[task].labels), notes)


def laboratory(task) -> dict[str, Sets]:
    """By split."""
    found = {}
    for split, made in cipher_tasks.read(task).items():
        found[split] = {}
        for language in languages_of(task, split):
            own = enumerate(cipher_tasks.in_language(one, language) for one in made)
            found[split][language] = [Example(str(number), *one) for number, one in own]
    return found


def read(task, split, source: Path | None) -> tuple[Sets, list[str]]:
    """The examples of a split, and what was wrong with them, a line each.

    source: a folder; None: the hub, which gives English alone but for the split that is scored. A file that cannot be
    used is left out, and named. So are examples without a label, but for test sets that have none at all.
    """
    examples, seen, notes = defaultdict(list), [], []
    if source:
        parts = files_of(task, split, source)
    else:
        languages = languages_of(task, split)
        parts = ((one, f"{task} from the hub, {split}, {one}", from_hub(task, split, one)) for one in languages)
    for language, where, part in parts:
        try:
            part = list(part)
        except ValueError as error:
            notes.append(f"{error}: left out")
            continue
        found = [one for one in part if isinstance(one, Example)]
        if task == "ner":  # every word of PAN-X begins with its language as it is published: `en:Anna`
            for number, one in enumerate(found):
                words = [word.removeprefix(f"{language}:") or word for word in one.texts]
                found[number] = one._replace(texts=tuple(words))
        if not found:
            notes.append(f"{where} holds no example: left out")
        elif (language, found) in seen:
            notes.append(f"{where} holds the examples of another file: they count once")
            continue
        seen.append((language, found))
        problems = [one for one in part if isinstance(one, str)]
        problems += ["an example without its label" for one in found if one.gold is None]
        notes += [f"{where}: {count:,} x {what}" for what, count in Counter(problems).most_common(5)]
        examples[language] += found
    for language, own in examples.items():
        known = [one for one in own if one.gold is not None]
        if known or split != TASKS[task].test:
            examples[language] = known
    return {language: own for language, own in sorted(examples.items()) if own}, notes


# ---------------------------------------------------------------------------------------------------------------------
# Files


def files_of(task, split, source: Path) -> Iterator[tuple[str, Path | str, Found]]:
    """(language, file, what it holds) of a split, by what names say: train-en.tsv, test-context-de-question-de.json.

    PAN-X as published, de/train, says the language by its folder. SQuAD's files say no language. A file whose name says
    no split belongs to the one that is scored. Files of another form are left out, and those of several languages or of
    none that the benchmark has.
    """
    own, is_squad = TASKS[task], task in SQUAD
    folders = {each.folder for each in TASKS.values() if each.folder}
    if any((source / folder).is_dir() for folder in folders):  # XTREME's folder of all tasks
        source /= "squad" if is_squad and split != "test" else own.folder
    endings, reader = FORMS[own.kind]
    for path in source_files(source):
        name = Path(uncompressed_name(path).lower())
        said = named_split(Path(name.stem)) or (own.test if name.suffix else None)
        if said != split or name.suffix not in endings:
            continue
        languages = set(map(LANGUAGES.get, re.split(r"[._-]", name.stem))) - {None}
        languages = languages or {LANGUAGES.get(path.parent.name, "en" if is_squad else None)}
        if len(languages) == 1 and languages.issubset(own.languages.split()):
            yield min(languages), path, reader(path, own.labels)


def languages_of(task, split) -> list[str]:
    """Those that are read of a source that has all: English alone where the split is not scored."""
    own = TASKS[task]
    return own.languages.split() if split == own.test else ["en"]


def read_tags(path: Path, labels: tuple) -> Found:
    """Sentences of `word TAB tag` lines or of words alone, or of CoNLL-U's ten columns, with a blank line between two.

    CoNLL-U's empty nodes and multiword tokens are left out, as are words whose line is broken and sentences whose words
    are all `_`, which a treebank may not show. An unknown tag stays, and no prediction equals it.
    """
    conllu = uncompressed_name(path).endswith(".conllu")
    columns, word_at, tag_at = (10, 1, 3) if conllu else (2, 0, 1)
    for is_blank, block in groupby(read_lines(path), key=str.isspace):
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


def read_answers(path: Path, labels: tuple) -> Found:
    """The questions of a file in SQuAD 1.1's JSON."""
    text = "".join(read_lines(path))
    try:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                context = str(paragraph["context"])
                for question in paragraph["qas"]:
                    answers = []
                    for one in question.get("answers") or ():
                        answers.append((str(one["text"]), int(one["answer_start"])))
                    asked = str(question["id"]), str(question["question"])
                    "".join([*asked, context]).encode()  # an error where JSON spells half a surrogate pair
                    yield from answered(*asked, context, answers)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not in SQuAD's format ({type(error).__name__}: {error})") from None


def answered(name, question, context, answers: Iterable) -> Found:
    """A question as an example.

    answers: (text, its first character); none, or empty ones, where the benchmark keeps them. One that is not in its
    place is taken where it is nearest, and has the place -1 where the text does not hold it.
    """
    found = []
    for text, start in answers:
        if text.strip():
            if start < 0 or not context.startswith(text, start):
                yield "an answer that is not in its place in the text"
                places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
                start = min(places, key=lambda place: abs(place - start), default=-1)
            found.append((text, start))
    yield Example(name, (question, context), found or None)


def read_labels(path: Path, labels: tuple) -> Found:
    """`sentence TAB sentence TAB label` lines; the label may be missing.

    A broken line is left out; an unknown label stays, and no prediction equals it.
    """
    for line in read_lines(path):
        cells = line.rstrip("\r\n").split("\t")
        if len(cells) == 2:
            cells.append("")
        if len(cells) != 3:
            yield "a line that is not two sentences and a label"
            continue
        *texts, label = cells
        label = "contradiction" if label == "contradictory" else label  # MultiNLI's word for it
        if label and label not in labels:
            yield f"the unknown label {label!r}"
        yield Example("", tuple(texts), label or None)


FORMS = {  # kind of task -> the endings of its files, and their reader
    "tags": ((".tsv", ".conllu", ""), read_tags),
    "answer": ((".json",), read_answers),
    "label": ((".tsv",), read_labels),
}


def submission(task, language, examples: list, predicted: list) -> tuple:
    """Name and content of the file in which XTREME's evaluate.py wants what was predicted for a test set.

    Tags stand a line each, a blank one between sentences, and labels a line each; answers are JSON, by their ids.
    """
    kind, file = TASKS[task].kind, f"{TASKS[task].folder or task}/test-{language}"
    if kind == "answer":
        return f"{file}.json", dict(zip([one.id for one in examples], predicted))
    lines = [*predicted, ""]
    if kind == "tags":
        lines = chain.from_iterable([*tags, ""] for tags in predicted)
    return f"{file}.tsv", "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The hub


def from_hub(task, split, language) -> Found:
    """From google/xtreme. To train on XNLI this is MultiNLI; to train on XQuAD and MLQA, and to choose, SQuAD."""
    kind, repository, their_split = TASKS[task].kind, "google/xtreme", HUB_SPLITS[split]
    config = TASKS[task].hub.format(code=language, name=NAMES.get(language))
    if task in SQUAD and split != "test":
        config = "SQuAD"
    elif task == "xquad":
        their_split = "validation"
    elif task == "xnli" and split == "train":
        repository, config = "nyu-mll/multi_nli", None
    with network(f"{repository} {config or ''}"):
        from datasets import load_dataset

        data = load_dataset(repository, config, split=their_split)
        rows = list(data)
    own_prefix = NAMES[language].lower() if task == "tydiqa" else ""  # TyDiQA's languages are in one set
    for row in rows:
        if kind == "tags":
            column = f"{task}_tags"
            names = data.features[column].feature.names
            tags = [names[tag] for tag in row[column]]
            yield Example("", tuple(row["tokens"]), tags)
        elif kind == "answer":
            if row["id"].startswith(own_prefix):
                answers = zip(row["answers"]["text"], row["answers"]["answer_start"])
                yield from answered(row["id"], row["question"], row["context"], answers)
        elif "premise" in row:  # MultiNLI
            label = dict(enumerate(NLI)).get(row["label"])
            yield Example("", (row["premise"], row["hypothesis"]), label)
        elif row.get("language", language) == language:
            label = row.get("gold_label", row.get("label"))
            yield Example("", (row["sentence1"], row["sentence2"]), label or None)
