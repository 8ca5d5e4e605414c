"""XTREME's seven tasks: from their own files, or Hugging Face's hub, to examples, to rows of tokens, and to scores.

    pos, ner                  a tag for every word                      F1 of seqeval
    xquad, mlqa, tydiqa       the part of a text that answers           F1 and exact match (em) of SQuAD, MLQA its own
    xnli, pawsx               a label for two sentences                 accuracy
    apps                      a label for one                           accuracy

`apps` is a smoke test and no task of XTREME's: which of Django's applications a message belongs to, in all languages.
"""

import hashlib
import json
import math
import re
import string
import sys
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median, mode
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batches import pad_rows, tensors
from data.corpora import catalog_files, messages, network
from data.files import SPLIT_NAMES, read_catalog, read_lines, source_files, split_of, uncompressed_name
from data.tokenizers import XLMR


class Task(NamedTuple):
    kind: str  # tags, answer or label
    labels: tuple[str, ...] = ()  # tags or labels; of apps those of its training examples
    languages: str = ""  # the benchmark's
    test: str = "test"  # the split that it scores


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
NAMES = dict(zip(NAMES[::2], NAMES[1::2]))  # as the hub has them
CODES = {*NAMES, *"az gu jv ka lt ml ms my pa pl qu ro uk wo".split()}
LANGUAGES = {code: code for code in CODES} | {name.lower(): code for code, name in NAMES.items()}  # in names of files
ENDINGS = {"tags": ("tsv", "conllu"), "answer": ("json",), "label": ("tsv", "jsonl")}

FOLDERS = {"pos": "udpos", "ner": "panx"}  # of XTREME's files, where a task's has another name than the task


class Example(NamedTuple):
    id: str
    texts: tuple[str, ...]  # the words of a sentence; a question and its text; one sentence or two
    gold: list | str  # a tag for each word; answers (text, first character; -1: not in the text); a label


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def read(task: str, split: str, source: Path | None) -> tuple[dict[str, list[Example]], list[str]]:
    """-> the examples of every language in a split (from the hub: of what is not scored, English alone), and what was
    wrong with them, a line each.

    source: a folder of files whose names say split and language, as XTREME's, UD's, MLQA's, XQuAD's and TyDiQA's do (as
    SQuAD's does not, it is English), or one file, which is English where its name does not say; None: the hub. A file
    that cannot be used is left out, and named.
    """
    if task == "apps":
        return applications(split), []
    examples, notes = {}, []
    if source is None:
        for language in TASKS[task].languages.split() if split == TASKS[task].test else ["en"]:
            problems = Counter()
            own = list(from_hub(task, split, language, problems))
            notes += in_lines(f"{task} from the hub, {split}, {language}", problems)
            if own:
                examples[language] = own
        return examples, notes
    reader = {"tags": read_tags, "answer": read_answers, "label": read_labels}[TASKS[task].kind]
    for language, path in files_of(task, split, source):
        problems = Counter()
        try:
            found = list(reader(path, TASKS[task].labels, problems))
        except ValueError as error:
            notes.append(f"{error}: left out")
            continue
        notes += in_lines(str(path), problems)
        if found:
            examples.setdefault(language, []).extend(found)
        else:
            notes.append(f"{path} holds no example: left out")
    return dict(sorted(examples.items())), notes


def in_lines(where: str, problems: Counter) -> list[str]:
    """The five most frequent, and how many others there are."""
    kinds = problems.most_common()
    lines = [f"{where}: {count:,} x {what}" for what, count in kinds[:5]]
    if kinds[5:]:
        lines.append(f"{where}: {sum(count for _, count in kinds[5:]):,} other problems")
    return lines


def files_of(task: str, split: str, source: Path) -> Iterator[tuple[str, Path]]:
    """(language, file) of a split. Without a split in its name a file is of the one that is scored.

    One file alone is trained on and scored, whatever its name. In a folder, XTREME's too, there are others: of several
    languages, of none that we know, or rows for other tokenizers.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: it should hold the files of {task}")
    for path in source_files(source):
        *words, ending = re.split(r"[._-]", uncompressed_name(path).lower())
        splits = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES} or {TASKS[task].test}
        languages = {LANGUAGES[word] for word in words if word in LANGUAGES}
        if task in ("xquad", "mlqa") or path == source:
            languages = languages or {"en"}
        if path == source:
            fits = split in ("train", TASKS[task].test)
        else:
            fits = split in splits and ending in ENDINGS[TASKS[task].kind] and len(languages) == 1
        if fits:
            yield min(languages), path


def read_tags(path: Path, labels: tuple[str, ...], problems: Counter) -> Iterator[Example]:
    """`word TAB tag` lines, or CoNLL-U's ten columns; a blank line between sentences.

    Of CoNLL-U no empty nodes, and no multiword tokens (XTREME's own files have these in place of their parts).
    A word whose line is broken is left out, a tag that is unknown stays and is never right. `_` stands for words that a
    treebank may not show.
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
    """SQuAD 1.1's JSON."""
    text = "".join(read_lines(path))
    try:
        for article in parse(text)["data"]:
            for paragraph in article["paragraphs"]:
                context = str(paragraph["context"])
                for question in paragraph["qas"]:
                    answers = [(str(one["text"]), int(one["answer_start"])) for one in question["answers"]]
                    yield from answered(str(question["id"]), str(question["question"]), context, answers, problems)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not in SQuAD's format ({type(error).__name__}: {error})") from None


def parse(text: str):
    """What JSON says, with "?" for lone surrogates: they have no UTF-8 form. ValueError where it is no JSON."""
    try:
        value = json.loads(text)
        if re.search(r"\\ud[89a-f]", text, re.IGNORECASE):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def answered(
    name: str, question: str, context: str, answers: Iterable[tuple[str, int]], problems: Counter
) -> Iterator[Example]:
    """A question with its answers (text, where it begins); none where it has none: XTREME empties those that it tests.

    An answer that is not where it should be is looked for in the whole text; its place is -1 where it is nowhere.
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

    A broken line is left out, a label that is unknown stays and is never right.
    """
    as_json = uncompressed_name(path).endswith(".jsonl")
    for number, line in enumerate(read_lines(path)):
        try:
            cells = map(str, fields(parse(line))) if as_json else line.rstrip("\r\n").split("\t")
            one, two, label = cells
        except (ValueError, KeyError, TypeError):
            problems["a line that is not two sentences and a label"] += 1
            continue
        label = "contradiction" if label == "contradictory" else label  # MultiNLI's word
        if label not in labels:
            problems[f"the unknown label {label!r}"] += 1
        yield Example(str(number), (one, two), label)


def fields(row: dict) -> list:
    """Two sentences and their label, whatever they are called."""
    names = ("sentence1", "premise"), ("sentence2", "hypothesis"), ("label", "gold_label")
    return [row[ours] if ours in row else row[other] for ours, other in names]


def from_hub(task: str, split: str, language: str, problems: Counter) -> Iterator[Example]:
    """google/xtreme; to train on XNLI it is MultiNLI, to train on XQuAD and MLQA, and to choose, SQuAD."""
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
    with network(f"{repository} {config or ''}", "datasets"):
        from datasets import load_dataset

        rows = load_dataset(repository, config, split=their_split)
        kind, tags = TASKS[task].kind, {"pos": "pos_tags", "ner": "ner_tags"}.get(task)
        names = rows.features[tags].feature.names if tags else TASKS[task].labels
        rows = list(rows)
    for number, row in enumerate(rows):
        if kind == "tags":
            yield Example(str(number), tuple(row["tokens"]), [names[tag] for tag in row[tags]])
        elif kind == "answer" and (task != "tydiqa" or row["id"].startswith(NAMES[language].lower())):
            answers = zip(row["answers"]["text"], row["answers"]["answer_start"])
            yield from answered(row["id"], row["question"], row["context"], answers, problems)
        elif kind == "label" and row.get("language", language) == language:
            one, two, label = fields(row)
            yield Example(str(number), (one, two), label if isinstance(label, str) else names[label])


def applications(split: str) -> dict[str, list[Example]]:
    """Django's messages and the application that each stands in, by language.

    Split as `catalogs` is, so that nothing that is tested was seen in pre-training.
    """
    found = {}  # English -> its application
    for path in sorted(catalog_files(None)):
        for _, english, _ in read_catalog(path):
            found.setdefault(english, path.parents[3].name)
    sizes = Counter(found.values())
    examples = {}
    rows = messages()
    rows += {("en", english, english, own) for _, english, _, own in rows}  # English translates itself
    for language, english, message, own in sorted(rows):
        label = found[english] if sizes[found[english]] >= 20 else "other"
        if own == split:
            mine = examples.setdefault(language, [])
            mine.append(Example(str(len(mine)), (message,), label))
    return examples


class Examples(NamedTuple):
    """Of a task: to train on, to choose a checkpoint by, both English, and to score, of every language."""

    train: list[Example]
    valid: list[Example]
    test: dict[str, list[Example]]
    labels: list[str]
    notes: list[str]  # what was wrong with single ones


def read_examples(
    task: str, source: str | None, train_source: str | None, most_train: int | None, most_test: int | None
) -> Examples:
    """From a folder of the task's files, or of XTREME's folders of all tasks; None: the hub. train_source: others to
    train on. ValueError where English training or all test examples are missing.

    Where there is no development set, or the benchmark scores that, a tenth of the training examples is held out to
    choose by.
    """
    scored, folder = TASKS[task].test, FOLDERS.get(task, task)
    source = trains_on = source and Path(source)
    if source and (source / folder).is_dir():
        trains_on = source / ("squad" if task in ("xquad", "mlqa") else folder)
        source = source / folder
    if train_source:
        trains_on = Path(train_source)
    elif source and source.is_file():
        raise ValueError(f"{source} is one file, to score: what to train on is --train_source")
    train, notes = read(task, "train", trains_on)
    test, more = read(task, scored, source)
    valid = {}
    if scored != "valid" and not (trains_on and trains_on.is_file()):
        valid, others = read(task, "valid", trains_on)
        more += others
    if "en" not in train:
        raise ValueError(f"{trains_on} holds no English training examples of {task}")
    if not test:
        raise ValueError(f"{source} holds no {scored} examples of {task}")
    train, valid = train["en"], valid.get("en", [])
    if not valid:
        splits = [split_of(" ".join(one.texts), valid=0.1, test=0.0) for one in train]
        valid = [one for one, split in zip(train, splits) if split == "valid"]
        train = [one for one, split in zip(train, splits) if split == "train"]
    if not train or not valid:
        raise ValueError(f"too few English training examples of {task} to hold some out to choose by")
    test = {language: own[:most_test] for language, own in test.items()}
    labels = sorted({one.gold for one in train}) if task == "apps" else list(TASKS[task].labels)
    return Examples(train[:most_train], valid[:most_test], test, labels, notes + more)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of tokens


class Row(NamedTuple):
    """A sequence for the encoder: an example, or a part of a long one."""

    example: int  # its number
    ids: list[int]
    marks: list[tuple]  # (place in ids, what begins there): the number of a word, or (begin, end) in the text
    targets: list[int]  # tags of the marks; or first and last place of the answer, 0 if it is not here; or a label


UNKNOWN = -100  # the target that `cross_entropy` passes over


def rows_of(kind: str, examples: list[Example], tokenizer: XLMR, T: int, stride: int, labels: list[str]) -> list[Row]:
    """All examples as rows of at most T tokens."""
    number_of = {label: number for number, label in enumerate(labels)}
    rows = []
    for number, example in enumerate(examples):
        if kind == "tags":
            rows += tag_rows(number, example, tokenizer, T, number_of)
        elif kind == "answer":
            rows += answer_rows(number, example, tokenizer, T, stride)
        else:
            rows.append(label_row(number, example, tokenizer, T, number_of))
    return rows


def tag_rows(number: int, example: Example, tokenizer: XLMR, T: int, number_of: dict[str, int]) -> Iterator[Row]:
    """`<s> words </s>`, the first piece of each word with a mark. Where a word no longer fits, a new row begins.

    A word of characters that the tokenizer drops is `<unk>`.
    """
    row = Row(number, [tokenizer.bos], [], [])
    for word, pieces in enumerate(tokenizer.encode_batch(list(example.texts))):
        pieces = (pieces or [tokenizer.unk])[: T - 2]
        if len(row.ids) + len(pieces) >= T:
            yield row._replace(ids=[*row.ids, tokenizer.eos])
            row = Row(number, [tokenizer.bos], [], [])
        row.marks.append((len(row.ids), word))
        row.targets.append(number_of.get(example.gold[word], UNKNOWN))
        row.ids.extend(pieces)
    yield row._replace(ids=[*row.ids, tokenizer.eos])


def answer_rows(number: int, example: Example, tokenizer: XLMR, T: int, stride: int) -> Iterator[Row]:
    """`<s> question </s> </s> part of the text </s>`: a part every `stride` tokens, marks on all of its tokens.

    The question has at most half the row. Trained is the first of several answers, and nothing where it is not in the
    text at all.
    """
    question = tokenizer.encode_batch([example.texts[0]])[0][: T // 2 - 2]
    head = [tokenizer.bos, *question, tokenizer.eos, tokenizer.eos]
    room = T - len(head) - 1
    stride = min(stride, room)
    ids, spans = tokenizer.encode_offsets(example.texts[1])
    answer = answer_places(example.gold, spans)
    for start in range(0, max(1, len(ids) - room + stride), stride):
        part = range(start, min(start + room, len(ids)))
        ahead = len(head) - start  # of a token's place in the row
        marks = [(ahead + token, without_stop(example.texts[1], *spans[token])) for token in part]
        targets = [0, 0] if answer else [UNKNOWN, UNKNOWN]
        if answer and answer[0] in part and answer[-1] in part:
            targets = [ahead + answer[0], ahead + answer[-1]]
        yield Row(number, [*head, *ids[start : part.stop], tokenizer.eos], marks, targets)


def answer_places(gold: list[tuple[str, int]], spans: list[tuple[int, int]]) -> list[int]:
    """Which tokens, that stand at these characters, hold the first answer; none where it is not in the text."""
    if not gold or gold[0][1] < 0:
        return []
    text, begin = gold[0]
    return [token for token, (first, last) in enumerate(spans) if last > begin and first < begin + len(text)]


STOPS = "،؛。，、；"


def without_stop(text: str, begin: int, end: int) -> tuple[int, int]:
    """A piece without the stop at its end, which is part of no answer, though the tokenizer may join both: `”，`."""
    kept = text[begin:end].rstrip(STOPS)
    return begin, begin + len(kept) if kept.strip() else end


def label_row(number: int, example: Example, tokenizer: XLMR, T: int, number_of: dict[str, int]) -> Row:
    """`<s> one </s> </s> two </s>`. Where that is too long, the longer sentence loses its end."""
    texts = tokenizer.encode_batch(list(example.texts))
    while sum(map(len, texts)) + 2 * len(texts) > T:
        max(texts, key=len).pop()
    ids = [tokenizer.bos]
    for text in texts:
        ids += [*text, tokenizer.eos, tokenizer.eos]
    return Row(number, ids[:-1], [], [number_of.get(example.gold, UNKNOWN)])


class Batch(NamedTuple):
    """B rows of T tokens; flat positions count through all B * T."""

    ids: Tensor  # (B, T)
    real: Tensor | None  # (S,) flat positions of what is not padding; None: all of them
    words: Tensor  # (M,) flat positions of the marks: of words their first pieces
    targets: Tensor  # (M,) tags, (2 B,) first and last places of answers, or (B,) labels


def batch_of(rows: list[Row], pad: int) -> Batch:
    """Rows as wide as the longest of them."""
    lengths = np.array([len(row.ids) for row in rows])
    ids, real = pad_rows(np.concatenate([row.ids for row in rows]), lengths, pad)
    words = [number * ids.shape[1] + place for number, row in enumerate(rows) for place, _ in row.marks]
    targets = np.concatenate([row.targets for row in rows]).astype(np.int64)
    return Batch(*tensors(ids, real, np.array(words, dtype=np.int64), targets))


class TaskData:
    """The training rows of a task in batches: a micro-batch is a function of (seed, step, micro) and of nothing else.

    An epoch is every row once, in an order of its own; its last step is filled up with its first rows. `start` is what
    else a run depends on, for the checksum.
    """

    def __init__(self, rows: list[Row], tokenizer: XLMR, batch_size: int, micro_size: int, seed: int, start: str):
        self.rows, self.tokenizer, self.seed = rows, tokenizer, seed
        self.micro_size, self.micros_per_step = micro_size, batch_size // micro_size
        self.steps_per_epoch = -(-len(rows) // batch_size)
        self.checksum = hashlib.sha256(repr((rows, start)).encode()).hexdigest()
        self._order = lru_cache(maxsize=1)(self._order_epoch)

    def _order_epoch(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        return np.resize(order, self.steps_per_epoch * self.micros_per_step * self.micro_size)

    def batch(self, step: int, micro: int) -> Batch:
        """micro_size rows, for training; steps are counted through all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = (place * self.micros_per_step + micro) * self.micro_size
        chosen = self._order(epoch)[first : first + self.micro_size]
        return batch_of([self.rows[number] for number in chosen], self.tokenizer.pad)


# ---------------------------------------------------------------------------------------------------------------------
# From rows back to examples


def row_predictions(kind: str, labels: list[str], rows: list[Row], logits: Tensor, longest: int) -> list[list]:
    """Of each row, in a list: the tags of its words, its label, or its best answer as (score, begin, end)."""
    if kind == "answer":
        return [[best_answer(row, *own, longest)] for row, own in zip(rows, logits.unflatten(0, (-1, 2)))]
    best = iter(logits.argmax(dim=1).tolist())
    return [[labels[next(best)] for _ in row.targets] for row in rows]


def best_answer(row: Row, begins: Tensor, ends: Tensor, longest: int) -> tuple[float, int, int]:
    """Score, begin and end in the text, of at most `longest` tokens; begins, ends (T,): logits."""
    if not row.marks:
        return -math.inf, 0, 0
    first, last = row.marks[0][0], row.marks[-1][0] + 1
    score = begins[first:last, None] + ends[first:last]  # (N, N): from a token of the text to another
    allowed = torch.ones_like(score, dtype=torch.bool).triu().tril(longest - 1)  # ends not before it begins, and soon
    score = score.masked_fill(~allowed, -math.inf)
    begin, end = divmod(int(score.argmax()), len(score))
    return float(score[begin, end]), row.marks[begin][1][0], row.marks[end][1][1]


def by_example(kind: str, examples: list[Example], rows: list[Row], found: Mapping[int, list]) -> list:
    """What was found in the rows of each example, put together."""
    parts = [[] for _ in examples]
    for number, row in enumerate(rows):
        parts[row.example] += found[number]
    if kind == "tags":
        return parts
    best = [max(part) for part in parts]  # of labels the only one
    if kind == "label":
        return best
    return [one.texts[1][begin:end].strip() for one, (_, begin, end) in zip(examples, best)]


def guess(kind: str, train: list[Example], examples: list[Example]) -> list:
    """What needs no model: the most frequent tag or label; the first words of a text, as many as answers have.

    Words end at white space, so in Chinese, Japanese and Thai the guess is often a whole sentence or more.
    """
    if kind == "answer":
        words = median(len(text.split()) for one in train for text, _ in one.gold)
        return [" ".join(one.texts[1].split()[: round(words)]) for one in examples]
    most = mode(tag for one in train for tag in (one.gold if kind == "tags" else [one.gold]))
    return [[most] * len(one.gold) if kind == "tags" else most for one in examples]


def tags_by_word(train: list[Example]) -> Callable[[list[Example]], list[list[str]]]:
    """What counting finds: each word's most frequent tag, and for words that training has not the most frequent."""
    counts = defaultdict(Counter)
    for one in train:
        for word, tag in zip(one.texts, one.gold):
            counts[word.lower()][tag] += 1
    most = sum(counts.values(), Counter()).most_common(1)[0][0]
    tags = {word: own.most_common(1)[0][0] for word, own in counts.items()}
    return lambda examples: [[tags.get(word.lower(), most) for word in one.texts] for one in examples]


def labels_by_word(train: list[Example]) -> Callable[[list[Example]], list[str]]:
    """What counting finds: the likeliest label by naive Bayes over the words that its texts share with training."""
    labels, counts = Counter(one.gold for one in train), defaultdict(Counter)  # word -> label -> examples
    for one in train:
        for word in words_by_text(one):
            counts[word][one.gold] += 1

    def likelihood(label: str, words: list) -> float:
        of_words = sum(math.log((counts[word][label] + 1) / (labels[label] + 2)) for word in words)
        return math.log(labels[label]) + of_words

    def likeliest(one: Example) -> str:
        known = [word for word in words_by_text(one) if word in counts]
        return max(labels, key=partial(likelihood, words=known))

    return lambda examples: [likeliest(one) for one in examples]


def words_by_text(one: Example) -> set[tuple[int, str]]:
    """Every word once, with the number of its text: premise and hypothesis say different things by the same word."""
    return {(number, word) for number, text in enumerate(one.texts) for word in re.findall(r"\w+", text.lower())}


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def scores(task: str, language: str, gold: list, predicted: list) -> dict[str, float]:
    """The benchmark's, in percent. gold: of each example, as in `Example`; predicted: tags, an answer or a label."""
    kind = TASKS[task].kind
    if kind == "tags":
        return {"f1": 100 * tag_f1(gold, predicted)}
    if kind == "label":
        return {"accuracy": 100 * fmean(one == two for one, two in zip(gold, predicted))}
    normal = partial(mlqa_words, language=language) if task == "mlqa" else squad_words
    f1, em = [], []
    for answers, ours in zip(gold, predicted):
        words = normal(ours)
        right = [normal(text) for text, _ in answers]
        f1.append(max((word_f1(words, one) for one in right), default=0.0))
        em.append(float(words in right))
    return {"f1": 100 * fmean(f1), "em": 100 * fmean(em)}


def tag_f1(gold: list[list[str]], predicted: list[list[str]]) -> float:
    """Of entities; of bare tags, such as UPOS, a run of the same one counts as one, and each SYM and SCONJ by itself.

    So seqeval 0.0.12, of XTREME's days, read them. 1.2.2 takes off a tag's first letter, and SCONJ for CCONJ is right.
    """
    gold, predicted = ([[whole(tag) for tag in tags] for tags in each] for each in (gold, predicted))
    try:
        from seqeval.metrics import f1_score
    except ImportError as error:
        raise ImportError("F1 of tags needs seqeval: pip install seqeval") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of tags that are no B- and no I-, and of classes that nothing is in
        return float(f1_score(gold, predicted))  # numpy's own is no number that a checkpoint may hold


def whole(tag: str) -> str:
    return tag if tag == "O" or "-" in tag else f"{tag[:1]}-{tag}"


def word_f1(one: list[str], two: list[str]) -> float:
    """Of two bags of words; 0 where they share none, as in SQuAD's script."""
    shared = (Counter(one) & Counter(two)).total()
    return 2 * shared / (len(one) + len(two)) if shared else 0.0


def squad_words(text: str) -> list[str]:
    """SQuAD 1.1: lower case, without ASCII punctuation, then without English articles."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "ar": r"\sال^|ال",  # as in MLQA's script: nothing stands before a beginning, so it is ال anywhere
}


def mlqa_words(text: str, language: str) -> list[str]:
    """MLQA: as SQuAD's, with Unicode's punctuation, the language's articles, and every Chinese character a word."""
    text = "".join(char for char in text.lower() if char not in punctuation())
    if language in ARTICLES:
        text = re.sub(ARTICLES[language], " ", text)
    if language == "zh":
        text = re.sub(r"([\u4e00-\u9fa5])", r" \1 ", text)
    return text.split()


@cache
def punctuation() -> set[str]:
    every = map(chr, range(sys.maxunicode + 1))
    return {char for char in every if unicodedata.category(char).startswith("P")} | set(string.punctuation)
