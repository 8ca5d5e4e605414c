"""The page of results: up to date, whole, and clear where a file is missing or damaged."""

import dataclasses
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest

import runs
import train_lm
from data import corpora
from data.batches import PairData, Prepared
from data.tokenizers import load_tokenizer
from results import multilingual, render, wikipedia

DENSE = "demo-router=dense.json"


@pytest.fixture
def committed(tmp_path):
    """A copy of results/ to break."""
    return shutil.copytree(render.RESULTS, tmp_path / "results")


@pytest.fixture
def folder(committed):
    """The same with two results alone, which nobody measured: of XMoE table 1, the dense row and Switch's."""
    for file in committed.glob("train_*/*.json"):
        file.unlink()
    base, scores = train_lm.Config(), {"ppl": 50.0, "bpb": 2.0, "layers": []}
    for _, change in train_lm.table1(base).rows[:2]:
        config = dataclasses.replace(base, **change)
        result = {"test": scores, "test_no_limit": scores, "parameters": {"total": 2e6}}
        result["config"] = runs.identity(config)
        (committed / "train_lm" / render.file_name(config, train_lm.PRESETS)).write_text(json.dumps(result))
    assert (committed / "train_lm" / DENSE).exists()
    return committed


def row(page: str, title: str, label: str) -> str:
    """The row of a table that begins with `label`, from the section with that title."""
    section = page[page.index(f"## {title}") :]
    return next(line for line in section.splitlines() if line.startswith(f"| {label} "))


def test_the_committed_page_is_up_to_date():
    render.main(check=True)


def test_check_says_where_the_page_is_old(folder, capsys):
    (folder / "README.md").write_text("an old page")
    with pytest.raises(SystemExit) as stop:
        render.main(check=True, folder=folder)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "not up to date: python -m results.render" in error
    assert (folder / "README.md").read_text() == "an old page"
    render.main(folder=folder)
    render.main(check=True, folder=folder)


def test_a_row_shows_what_its_file_says(folder):
    file = folder / "train_lm" / DENSE
    result = json.loads(file.read_text())
    result["test"]["ppl"] = 123.456
    file.write_text(json.dumps(result))
    assert "| 123.46 " in row(render.page(folder), "XMoE table 1", "dense")


def test_an_analysis_shows_its_command_and_table(folder, capsys):
    file = folder / "analyses" / "gamma.json"
    command, table = "python analyze.py gamma X", [["experts", "limit"], ["dense", 0.5]]
    file.write_text(json.dumps({"command": command, "table": table}))
    page = render.page(folder)
    assert f"`{command}`\n\n| experts | limit |" in page and "\n| dense   | 0.5   |\n" in page
    for damaged in ("{}", json.dumps({"table": table}), json.dumps({"command": command, "table": None})):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"gamma\.json is not what analyze.py leaves today"):
            render.page(folder)


def test_several_seeds_are_a_mean_and_a_deviation(folder):
    result = json.loads((folder / "train_lm" / DENSE).read_text())
    for seed, (name, ppl) in enumerate({"": 10.0, "-seed=1": 12.0, "-seed=2": 14.0}.items()):
        result["test"]["ppl"] = ppl
        result["config"]["seed"] = seed
        (folder / "train_lm" / f"demo-router=dense{name}.json").write_text(json.dumps(result))
    assert "| 12.00 ± 2.00 " in row(render.page(folder), "XMoE table 1", "dense")


def test_a_missing_file_gives_an_empty_row(folder):
    (folder / "train_lm" / DENSE).unlink()
    cells = row(render.page(folder), "XMoE table 1", "dense").split("|")[1:-1]
    assert [cell.strip() for cell in cells[:4]] == ["dense", "1 x 512", "22.61", "22.24"]
    assert len(cells) > 4 and not any(cell.strip() for cell in cells[4:])


@pytest.mark.parametrize("text", ['{"test": {', "[]", '{"name": "demo"}'])
def test_a_damaged_result_is_one_clear_line(folder, capsys, text):
    (folder / "train_lm" / DENSE).write_text(text)
    with pytest.raises(SystemExit) as stop:
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert error.startswith("error: ") and error.count("\n") == 1 and DENSE in error


def test_a_result_of_other_constants_is_one_clear_line(folder, capsys):
    file = folder / "train_lm" / DENSE
    result = json.loads(file.read_text())
    result["config"]["learning_rate"] = 0.5
    file.write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"{DENSE} has learning_rate 0.5, its row in the tables 0.003" in error


def test_a_missing_note_is_one_clear_line(folder, capsys):
    (folder / "notes" / "train_lm-1.md").unlink()
    with pytest.raises(SystemExit):
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "train_lm-1.md" in error


def test_every_committed_note_is_on_the_page(folder):
    page = render.page(folder)
    for file in (render.RESULTS / "notes").glob("*.md"):
        assert file.read_text().strip() in page, f"{file.name} belongs to no table"


def test_links_to_sections_lead_to_one():
    """As GitHub names them: lower case, no punctuation, and a number behind the second of a name."""
    page = (render.RESULTS / "README.md").read_text()
    names = Counter()
    for title in re.findall(r"^#+ (.*)$", page, re.M):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        names[name] += 1
        names[f"{name}-{names[name] - 1}"] += names[name] > 1
    found = re.findall(r"\]\(#(.*?)\)", page)
    found += re.findall(r"\]\(results/README\.md#(.*?)\)", (render.RESULTS.parent / "README.md").read_text())
    assert len(found) > 5 and [link for link in found if not names[link]] == []


def test_every_committed_result_is_read(committed):
    """One whose run has another name today would be left out without a word."""
    for file in committed.glob("*/*.json"):
        text = file.read_text()
        file.write_text("{")
        with pytest.raises(ValueError, match=re.escape(file.name)):
            render.page(committed)
        file.write_text(text)


# ---------------------------------------------------------------------------------------------------------------------
# The real text


SCORED = {  # one sentence of each kind of set
    "udpos/train-en.tsv": "".join(f"Dogs\tNOUN\n{n}\tNUM\n\n" for n in range(40)),
    "udpos/test-en.tsv": "A\tDET\nscored\tADJ\nsentence\tNOUN\n\n",
    "panx/train-en.tsv": "".join(f"Dogs\tO\n{n}\tO\n\n" for n in range(40)),
    "panx/test-de.tsv": "Berlin\tB-LOC\nist\tO\n\n",
    "xnli/train-en.tsv": "".join(f"one\t{n}\tneutral\n" for n in range(40)),
    "xnli/test-de.tsv": "Ein Satz.\tScored hypothesis\tneutral\n",
    "pawsx/train-en.tsv": "".join(f"one\t{n}\t1\n" for n in range(40)),
    "pawsx/test-de.tsv": "Erstens\tZweitens, getestet\t1\n",
}
ANSWERED = []
for n in range(40):
    question = {"id": str(n), "question": f"Who is {n}?", "answers": [{"text": "Last", "answer_start": 23}]}
    ANSWERED.append({"paragraphs": [{"context": "First. Tested context. Last", "qas": [question]}]})
for name in ("squad/train-en", "xquad/xquad.en", "mlqa/test-en", "tydiqa/goldp.en.train", "tydiqa/goldp.en.dev"):
    SCORED[f"{name}.json"] = json.dumps({"data": ANSWERED})
DOWNLOADS = {
    "tatoeba/tatoeba.deu-eng.deu": "Eins zum Finden\n",
    "tatoeba/tatoeba.deu-eng.eng": "One to be found\n",
    "wordalign/de-en.src-tgt": "ausgerichtete Wörter ||| aligned words\n",
    "wordalign/de-en.gold": "1-1 2-2\n",
    "ntrex/DOCUMENT_IDS.tsv": "a\na\nb\n",
    "ntrex/newstest2019-src.eng.txt": "News one\nNews two\nAligned\n",
    "ntrex/newstest2019-ref.deu.txt": "Nachricht eins\nausgerichtete Wörter\nNeues\n",
    "udhr/udhr.jsonl": json.dumps({"lang": "de", "text": "Alle Menschen\nTested context."}) + "\n",
    "enwiki-2021/train.txt": "= A =\nAn article. Ａ scored   sentence\n\n= B =\nAnother article\n",
    "enwiki-2021/valid.txt": "Held out\n",
    "multi30k/test_2016_flickr.de": "Ein Bild\n",
}
for source, languages in {"multi30k": ("de", "fr", "cs"), "tatoeba-en-de": ("de",), "tatoeba-en-zh": ("zh",)}.items():
    for side in (*languages, "en"):
        scored_line = {"de": "Eins zum Finden", "en": "Something else"}.get(side, "...")
        rows = [f"{source} {side} {number}" for number in range(300)]
        DOWNLOADS[f"{source}/train.{side}"] = "\n".join([*rows, scored_line, f"{source} held out {side}"]) + "\n"
        DOWNLOADS[f"{source}/valid.{side}"] = f"{source} held out {side}\n"


def test_no_scored_sentence_is_in_the_real_text(tmp_path, monkeypatch, capsys):
    for base, files in (("tested", SCORED), ("downloads", DOWNLOADS)):
        for name, text in files.items():
            (tmp_path / base / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / base / name).write_text(text)
    messages = [("train", f"Nachricht {number}", f"Message {number}") for number in range(50)]
    messages += [("train", "Zweitens, getestet", "Second"), ("train", "Drittens", "Scored hypothesis")]
    messages += [("valid", "Viertens", "Fourth"), ("test", "Fünftens", "Fifth")]
    texts = {"de": [(split, one) for split, one, _ in messages], "en": [(split, two) for split, _, two in messages]}
    monkeypatch.setattr(corpora, "catalogs", lambda: texts)
    monkeypatch.setattr(corpora, "catalogs_pairs", lambda: {"de-en": messages})
    monkeypatch.setattr(multilingual, "NTREX", {"deu": "de"})
    killed = tmp_path / "out" / "multilingual.source" / "pairs" / "cs-en.train.cs"  # an earlier call was
    killed.parent.mkdir(parents=True)
    killed.write_text("scored   sentence\n")
    multilingual.main(tmp_path / "downloads", tmp_path / "tested", tmp_path / "out", "en,de,fr,cs,zh_Hans", 320)
    said = capsys.readouterr().out
    assert "Wikipedia: 1 texts or pairs left out, with a sentence that is scored" in said
    written = ""
    for file in (tmp_path / "out" / "multilingual.source").rglob("*.*"):
        if file.suffix != ".model":
            written += file.read_text()
    for scored in (
        "scored   sentence",
        "Zweitens, getestet",
        "Scored hypothesis",
        "Tested context",
        "Eins zum Finden",
        "ausgerichtete",
    ):
        assert scored not in written
    for kept in ("Another article", "Nachricht 7", "tatoeba-en-de en 17", "Viertens", "Neues"):
        assert kept in written
    for split in ("train", "valid"):
        rows = (tmp_path / "out" / "multilingual.source" / "pairs" / f"de-en.{split}.de").read_text().splitlines()
        assert ("tatoeba-en-de held out de" in rows) == (split == "valid")
    corpus = Prepared(tmp_path / "out" / "multilingual", block_size=8, micro_tokens=8)
    pairs = PairData(tmp_path / "out" / "multilingual-pairs", 16, 64, 64, 0)
    assert corpus.tokenizer.sha256 == pairs.tokenizer.sha256 and {"cs-en", "de-en", "fr-en"} <= {*pairs.languages}


def test_the_wikipedia_of_the_results_is_split_by_article(tmp_path, capsys):
    articles = [f"= {number} =\nThe article number {number}, about nothing.\nAnd more." for number in range(300)]
    (tmp_path / "train.txt").write_text("\n\n".join(articles) + "\n")
    (tmp_path / "valid.txt").write_text("= A =\nOne\n\n= B =\nTwo\n\n= C =\nThree\n\n= D =\nFour\n\n= E =\nFive\n")
    killed = tmp_path / "prepared.source" / "text" / "more.train.txt"  # an earlier call was
    killed.parent.mkdir(parents=True)
    killed.write_text("Half of\n")
    wikipedia.main(tmp_path, tmp_path / "prepared", pieces=300)
    counts = runs.read_json(tmp_path / "prepared" / "meta.json")["splits"]
    assert {split: own["documents"] for split, own in counts.items()} == {"train": 300, "valid": 3, "test": 2}
    tokenizer = load_tokenizer(tmp_path / "prepared")
    test = np.fromfile(tmp_path / "prepared" / "test.bin", dtype="uint16")
    assert tokenizer.vocab_size == 300 and tokenizer.decode(test[: test.tolist().index(1)].tolist()) == "= B =\nTwo"
    assert "-> " in capsys.readouterr().out
