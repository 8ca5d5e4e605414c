"""XTREME's seven tasks: their languages, and their examples, read from files or from the Hugging Face hub.

    pos, ner                  a tag for every word                   scored by F1 of runs of tags
    xquad, mlqa, tydiqa       the part of a text that answers        F1 of words, and exact match (em)
    xnli, pawsx               a label for two sentences              accuracy
    apps                      a label for one                        accuracy

`apps` is a smoke test and no task of XTREME's: which of Django's applications a message belongs to, in all languages.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from data.corpora import catalog_files, messages, network
from data.files import SPLIT_NAMES, read_catalog, read_lines, source_files, split_of, uncompressed_name


class Task(NamedTuple):
    kind: str  # tags, answer or label
    labels: tuple[str, ...] = ()  # the tags or labels; those of apps are found in its training examples
    languages: str = ""  # the benchmark's
    test: str = "test"  # the split that the benchmark scores


UPOS = tuple("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split())
NER = tuple("B-LOC B-ORG B-PER I-LOC I-ORG I-PER O".split())
NLI = ("entailment", "neutral", "contradiction")  # in the hub's order
TASKS = {
    "pos": Task(
        "tags",
        UPOS,
        "af ar bg de el en es et eu fa fi fr he hi hu id it ja kk ko mr nl pt ru ta te th tl tr ur vi yo zh",
    ),
    "ner": Task(
        "tags",
        NER,
        "af ar bg bn de el en es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr ms my nl pt ru sw ta te th tl tr "
        "ur vi yo zh",
    ),
    "xquad": Task("answer", languages="ar de el en es hi ru th tr vi zh"),
    "mlqa": Task("answer", languages="ar de en es hi vi zh"),
    "tydiqa": Task("answer", languages="ar bn en fi id ko ru sw te", test="valid"),
    "xnli": Task("label", NLI, "ar bg de el en es fr hi ru sw th tr ur vi zh"),
    "pawsx": Task("label", ("0", "1"), "de en es fr ja ko zh"),
    "apps": Task("label"),
}
NAMES = """af Afrikaans ar Arabic bg Bulgarian bn Bengali de German el Greek en English es Spanish et Estonian eu Basque
    fa Persian fi Finnish fr French he Hebrew hi Hindi hu Hungarian id Indonesian it Italian ja Japanese kk Kazakh
    ko Korean mr Marathi nl Dutch pt Portuguese ru Russian sw Swahili ta Tamil te Telugu th Thai tl Tagalog tr Turkish
    ur Urdu vi Vietnamese yo Yoruba zh Chinese""".split()
NAMES = dict(zip(NAMES[::2], NAMES[1::2]))  # code -> name, as the hub has it
CODES = {*NAMES, *"az gu jv ka lt ml ms my pa pl qu ro uk wo".split()}
LANGUAGES = {code: code for code in CODES}  # what file names say -> code
LANGUAGES |= {name.lower(): code for code, name in NAMES.items()}
ENDINGS = {"tags": ("tsv", "conllu"), "answer": ("json",), "label": ("tsv", "jsonl")}
FOLDERS = {"pos": "udpos", "ner": "panx"}  # in XTREME's folder; those of other tasks have the task's name


class Example(NamedTuple):
    id: str
    texts: tuple[str, ...]  # the words of a sentence; a question and its text; one sentence or two
    gold: list | str  # a tag for each word; answers (text, its first character, or -1: not in the text); a label


Found = tuple[dict[str, list[Example]], list[str]]  # language -> examples, and what was wrong, a line each


class Examples(NamedTuple):
    """Of a task: English ones to train on and to choose a checkpoint by, and those to score, of every language."""

    train: list[Example]
    valid: list[Example]
    test: dict[str, list[Example]]  # language -> its examples
    labels: list[str]
    notes: list[str]  # what was wrong with files or single examples, a line each


def read_examples(
    task: str, source: str | None, train_source: str | None, most_train: int | None, most_test: int | None
) -> Examples:
    """The examples of a task, at most so many to train on and so many of each language to score.

    source: a folder of the task's files, or of XTREME's folders of all tasks; None: the hub.
    train_source: a file or folder to train on, where it is another.

    Where there is no development set, or the benchmark scores it, a tenth of the training examples takes its place.
    ValueError where English training examples or all test examples are missing.
    """
    scored = TASKS[task].test
    source, trains_on = find_sources(task, source, train_source)
    train, notes = read(task, "train", trains_on)
    test, test_notes = read(task, scored, source)
    notes += test_notes
    valid = {}
    if scored != "valid" and not (trains_on and trains_on.is_file()):
        valid, valid_notes = read(task, "valid", trains_on)
        notes += valid_notes
    if "en" not in train:
        raise ValueError(f"{trains_on} holds no English training examples of {task}")
    if not test:
        raise ValueError(f"{source} holds no {scored} examples of {task}")
    train, valid = train["en"], valid.get("en", [])
    if not valid:
        train, valid = hold_out(train)
    if not train or not valid:
        raise ValueError(f"too few English training examples of {task} to hold some out to choose by")
    labels = list(TASKS[task].labels)
    if task == "apps":
        labels = sorted({one.gold for one in train})
    test = {language: own[:most_test] for language, own in test.items()}
    return Examples(train[:most_train], valid[:most_test], test, labels, notes)


def find_sources(task: str, source: str | None, train_source: str | None) -> tuple:
    """Paths or None: where the examples to score are, and those to train on."""
    source = trains_on = source and Path(source)
    folder = FOLDERS.get(task, task)
    if source and (source / folder).is_dir():  # XTREME's folder of all tasks
        trains_on = source / ("squad" if task in ("xquad", "mlqa") else folder)
        source = source / folder
    if train_source:
        trains_on = Path(train_source)
    elif source and source.is_file():
        raise ValueError(f"{source} is one file, to score: what to train on is --train_source")
    return source, trains_on


def hold_out(examples: list[Example]) -> tuple[list, list]:
    """Nine tenths and one tenth, by a hash of the texts."""
    parts = {"train": [], "valid": []}
    for one in examples:
        split = split_of(" ".join(one.texts), valid=0.1, test=0.0)
        parts[split].append(one)
    return parts["train"], parts["valid"]


def read(task: str, split: str, source: Path | None) -> Found:
    """The examples of a split, and what was wrong with them.

    source: a folder of files whose names say split and language, as those of XTREME, UD, MLQA, XQuAD and TyDiQA do
    (SQuAD's do not, it is English); or one file, which is English where its name does not say; None: the hub, which
    gives English alone but for the split that is scored. A file that cannot be used is left out, and named.
    """
    if task == "apps":
        return applications(split), []
    if source is None:
        return read_hub(task, split)
    readers = {"tags": read_tags, "answer": read_answers, "label": read_labels}
    reader = readers[TASKS[task].kind]
    examples, notes = {}, []
    for language, path in files_of(task, split, source):
        problems = Counter()
        try:
            found = list(reader(path, TASKS[task].labels, problems))
        except ValueError as error:
            notes.append(f"{error}: left out")
            continue
        notes += in_lines(str(path), problems)
        if task == "ner":
            found = [without_prefix(one, language) for one in found]
        if found:
            examples.setdefault(language, []).extend(found)
        else:
            notes.append(f"{path} holds no example: left out")
    return dict(sorted(examples.items())), notes


def without_prefix(one: Example, language: str) -> Example:
    """A sentence of PAN-X as it is published, where every word begins with its language: `en:Anna`."""
    words = [word.removeprefix(f"{language}:") or word for word in one.texts]
    return one._replace(texts=tuple(words))


def in_lines(where: str, problems: Counter) -> list[str]:
    """A line for each of the five most frequent problems, and one for all others."""
    kinds = problems.most_common()
    lines = [f"{where}: {count:,} x {what}" for what, count in kinds[:5]]
    if kinds[5:]:
        lines.append(f"{where}: {sum(count for _, count in kinds[5:]):,} other problems")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Files


def files_of(task: str, split: str, source: Path) -> Iterator[tuple[str, Path]]:
    """(language, file) of a split. A file whose name says no split belongs to the one that is scored.

    A file given alone is trained on and scored, whatever its name. Of a folder, files of another form are left out, and
    those of several languages or of none that the benchmark has.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: it should hold the files of {task}")
    scored = TASKS[task].test
    endings = ENDINGS[TASKS[task].kind]
    for path in source_files(source):
        name = uncompressed_name(path).lower()
        *words, ending = re.split(r"[._-]", name)
        splits = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
        languages = {LANGUAGES[word] for word in words if word in LANGUAGES}
        if path == source:
            fits = split in ("train", scored)
        else:
            fits = split in (splits or {scored}) and ending in endings
        if path == source or task in ("xquad", "mlqa"):
            languages = languages or {"en"}
        if fits and (path == source or len(languages) == 1):
            yield min(languages), path


def read_tags(path: Path, labels: tuple[str, ...], problems: Counter) -> Iterator[Example]:
    """Sentences of `word TAB tag` lines, or of CoNLL-U's ten columns, with a blank line between two.

    CoNLL-U's empty nodes and multiword tokens are left out, as are words whose line is broken and sentences whose words
    are all `_`, which a treebank may not show. An unknown tag stays, and no prediction equals it.
    """
    conllu = uncompressed_name(path).endswith(".conllu")
    words, tags = [], []
    for number, line in enumerate(chain(read_lines(path), ["\n"])):
        cells = line.rstrip("\r\n").split("\t")
        if not line.strip():
            if set(words) == {"_"}:
                problems["a sentence without its words"] += 1
            elif words:
                yield Example(str(number), tuple(words), tags)
            words, tags = [], []
            continue
        if conllu and (line.startswith("#") or re.fullmatch(r"\d+[-.]\d+", cells[0])):
            continue
        if len(cells) != (10 if conllu else 2):
            problems[f"a line with {len(cells)} columns"] += 1
            continue
        word, tag = (cells[1], cells[3]) if conllu else cells
        if tag not in labels:
            problems[f"the unknown tag {tag!r}"] += 1
        words.append(word)
        tags.append(tag)


def read_answers(path: Path, labels: tuple[str, ...], problems: Counter) -> Iterator[Example]:
    """The questions of a file in SQuAD 1.1's JSON."""
    text = "".join(read_lines(path))
    try:
        for article in parse(text)["data"]:
            for paragraph in article["paragraphs"]:
                context = str(paragraph["context"])
                for question in paragraph["qas"]:
                    name, asked = str(question["id"]), str(question["question"])
                    answers = [(str(one["text"]), int(one["answer_start"])) for one in question["answers"]]
                    yield from answered(name, asked, context, answers, problems)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not in SQuAD's format ({type(error).__name__}: {error})") from None


def parse(text: str):
    """The value of a JSON text, ValueError for others. Half a surrogate pair, which has no UTF-8 form, becomes "?"."""
    try:
        value = json.loads(text)
        if re.search(r"\\ud[89a-f]", text, re.IGNORECASE):
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def answered(
    name: str, question: str, context: str, answers: Iterable[tuple[str, int]], problems: Counter
) -> Iterator[Example]:
    """The question as an example, or nothing where it has no answer: XTREME empties those of its test sets.

    answers: (text, its first character). One that is elsewhere in the text is taken from there, one that is nowhere has
    the place -1.
    """
    places = []
    for text, start in answers:
        if not text.strip():
            continue
        if start < 0 or context[start : start + len(text)] != text:
            start = context.find(text)
            problems["an answer that is " + ("elsewhere in its text" if start >= 0 else "not in its text")] += 1
        places.append((text, start))
    if places:
        yield Example(name, (question, context), places)
    else:
        problems["a question without an answer"] += 1


def read_labels(path: Path, labels: tuple[str, ...], problems: Counter) -> Iterator[Example]:
    """`sentence TAB sentence TAB label` lines, or JSON lines with XNLI's or PAWS-X's names for the three.

    A broken line is left out; an unknown label stays, and no prediction equals it.
    """
    as_json = uncompressed_name(path).endswith(".jsonl")
    for number, line in enumerate(read_lines(path)):
        try:
            cells = map(str, fields(parse(line))) if as_json else line.rstrip("\r\n").split("\t")
            one, two, label = cells
        except (ValueError, KeyError, TypeError):
            problems["a line that is not two sentences and a label"] += 1
            continue
        label = "contradiction" if label == "contradictory" else label  # MultiNLI's word for it
        if label not in labels:
            problems[f"the unknown label {label!r}"] += 1
        yield Example(str(number), (one, two), label)


def fields(row: dict) -> list:
    """Two sentences and their label, by PAWS-X's names or by XNLI's."""
    names = {"sentence1": "premise", "sentence2": "hypothesis", "label": "gold_label"}
    return [row[ours] if ours in row else row[other] for ours, other in names.items()]


# ---------------------------------------------------------------------------------------------------------------------
# The hub, and Django


def read_hub(task: str, split: str) -> Found:
    """As `read`, from the hub."""
    languages = ["en"]
    if split == TASKS[task].test:
        languages = TASKS[task].languages.split()
    examples, notes = {}, []
    for language in languages:
        problems = Counter()
        found = list(from_hub(task, split, language, problems))
        notes += in_lines(f"{task} from the hub, {split}, {language}", problems)
        if found:
            examples[language] = found
    return examples, notes


def from_hub(task: str, split: str, language: str, problems: Counter) -> Iterator[Example]:
    """From google/xtreme. To train on XNLI this is MultiNLI; to train on XQuAD and MLQA, and to choose, SQuAD."""
    repository, their_split = "google/xtreme", {"valid": "validation"}.get(split, split)
    config = {
        "pos": f"udpos.{NAMES.get(language)}",
        "ner": f"PAN-X.{language}",
        "xquad": f"XQuAD.{language}" if split == "test" else "SQuAD",
        "mlqa": f"MLQA.{language}.{language}" if split == "test" else "SQuAD",
        "tydiqa": "tydiqa",
        "xnli": "XNLI",
        "pawsx": f"PAWS-X.{language}",
    }[task]
    if task == "xquad" and split == "test":
        their_split = "validation"
    if task == "xnli" and split == "train":
        repository, config = "nyu-mll/multi_nli", None
    kind, labels = TASKS[task].kind, TASKS[task].labels
    tags = {"pos": "pos_tags", "ner": "ner_tags"}.get(task)  # the column of numbers of tags
    with network(f"{repository} {config or ''}", "datasets"):
        from datasets import load_dataset

        rows = load_dataset(repository, config, split=their_split)
        if tags:
            labels = rows.features[tags].feature.names
        rows = list(rows)
    for number, row in enumerate(rows):
        if kind == "tags":
            gold = [labels[tag] for tag in row[tags]]
            yield Example(str(number), tuple(row["tokens"]), gold)
        elif kind == "label" and row.get("language", language) == language:
            *texts, label = fields(row)
            gold = label if isinstance(label, str) else labels[label]
            yield Example(str(number), tuple(texts), gold)
        elif kind == "answer" and (task != "tydiqa" or row["id"].startswith(NAMES[language].lower())):
            answers = zip(row["answers"]["text"], row["answers"]["answer_start"])
            yield from answered(row["id"], row["question"], row["context"], answers, problems)


def applications(split: str) -> dict[str, list[Example]]:
    """Django's messages and the application that each stands in, by language.

    Split as the corpus `catalogs` is: nothing that is scored was seen in pre-training on that.
    """
    application_of = {}  # English text -> its application
    for path in sorted(catalog_files(None)):
        for _, english, _ in read_catalog(path):
            application_of.setdefault(english, path.parents[3].name)
    sizes = Counter(application_of.values())
    rows = messages()
    rows += {("en", english, english, own) for _, english, _, own in rows}  # English translates itself
    examples = {}
    for language, english, message, own in sorted(rows):
        if own == split:
            label = application_of[english]
            if sizes[label] < 20:
                label = "other"
            mine = examples.setdefault(language, [])
            mine.append(Example(str(len(mine)), (message,), label))
    return examples
