"""`analyze.py play`: the page's choices against routers.py, its numbers against the model's, and how it serves."""

import base64
import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import ROOT, Script, constants, save_run
from test_analyze import refused, run
from test_flops import SMALL
from test_train_electra import corpora as electra_corpora

import train_lm
from analysis import play
from data.batches import MaskedData
from data.tokenizers import XLMR, SentencePiece, load_tokenizer, train_sentencepiece
from engine import pretrained
from model import GPT, MaskedLM, MoE, Translator, within_capacity
from routers import NOT_CHOSEN

__all__ = ["electra_corpora"]  # a fixture
NODE = shutil.which("node")
TEXT = "the cat & the <script> sat\n\ton the mat שלום 中文 $x$"
HOSTILE = "</script><script>alert(1)</script><!-- \u202e\u2066 \u2028 \x00 \ud800 {{DATA}} & \\u003c"
SIZE = SMALL | dict(n_layer=4, n_embd=16, ffn_size=32, block_size=64, router_std=0.03)
SIZE |= dict(data="nowhere", seed=0, batch_tokens=64, micro_tokens=64, sampling_exponent=0.7, mask_share=0.15)
DECODERS = {
    "threshold": dict(router="threshold", eval_threshold=0.7, capacity=1.0),
    "topk": dict(router="topk", split=4, capacity=0.25),
    "switch": dict(router="switch", capacity=0.25),
    "hash": dict(router="hash", capacity=0.05),
    "base": dict(router="base", capacity=0.25),
}
ENCODERS = {
    "hypersphere": dict(router="hypersphere", experts=8, moe_after=(1, 3)),
    "top-2": dict(router="topk", experts=8, top_k=2, relative_bias=True, moe_after=(2,), capacity_factor=0.5),
}


@pytest.fixture(scope="session")
def tokenizers() -> dict:
    text = ["the cat sat on the mat <script> <b> & שלום x y z", "the 中 the cat sat " * 3]
    text.append("a quick brown fox jumps over")
    return {kind: train_sentencepiece(text, 296, kind) for kind in (SentencePiece, XLMR)}


@pytest.fixture
def made(tokenizers, tmp_path):
    """A run's folder with a random model: `made(GPT, router=...)`, or `made(MaskedLM, ...)`."""

    def make(kind, **constants):
        torch.manual_seed(0)
        tokenizer = tokenizers[SentencePiece if kind is GPT else XLMR]
        model = kind(SimpleNamespace(**SIZE | constants), tokenizer.vocab_size)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)  # far from the start, where all tokens are nearly alike
        return save_run(tmp_path / f"run-{kind.__name__}", model, tokenizer)

    return make


def make_any(made, name: str):
    return made(GPT, **DECODERS[name]) if name in DECODERS else made(MaskedLM, **ENCODERS[name])


def unpacked(text: str, kind: str, E: int) -> torch.Tensor:
    """(S, E)"""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), kind).reshape(-1, E).copy())


def data_of(page: str) -> dict:
    (inside,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(inside)


# ---------------------------------------------------------------------------------------------------------------------
# The page's choices


def in_the_page(expression: str, cases: list) -> list:
    """What a function of the page's own script finds for each case."""
    (code,) = re.findall(r'<script id="choose">(.*?)</script>', play.PAGE.read_text(), re.S)
    code += f"""
    const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
    console.log(JSON.stringify(cases.map({expression})));
    """
    done = subprocess.run([NODE, "-e", code], input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# [asked, kept], two strings of 0 and 1, S * E long
CHOSEN = """({ chooser, probs, S, E, t, K, gamma, own }) => {
  const p = Float32Array.from(probs);
  const rank = own ? Int32Array.from(own) : ranks(chooser, p, inOrder(p, S, E), S, E, t, K);
  const kept = serve(rank, own ? new Float32Array(S * E) : p, S, E, capacity(S, E, gamma));
  return [Array.from(rank, (r) => (r >= 0 ? 1 : 0)).join(""), Array.from(kept).join("")];
}"""


def digits(mask) -> str:
    return "".join("01"[x] for x in mask.flatten().int().tolist())


def random_probabilities(S: int, E: int, ties: bool, seed: int) -> torch.Tensor:
    """(S, E); ties: of a token's experts, of an expert's tokens, and of sums of probabilities with round thresholds."""
    rng = torch.Generator().manual_seed(seed)
    if ties:
        p = torch.randint(1, 4, (S, E), generator=rng) ** 2
        p = p[torch.randint(max(1, S // 2), (S,), generator=rng)].float()  # tokens that are quite alike
        return p / p.sum(dim=1, keepdim=True)
    sharp = 1 + 3 * torch.rand(S, 1, generator=rng)
    return (sharp * torch.randn(S, E, generator=rng)).softmax(dim=1)


@pytest.mark.skipif(not NODE, reason="there is no node")
def test_the_page_chooses_as_the_routers_do():
    cases, expected, cut = [], [], 0
    sizes = (1, 3), (5, 1), (7, 4), (33, 8), (64, 32), (100, 10)
    for seed, (S, E) in enumerate(sizes):
        for ties in (False, True):
            probs = random_probabilities(S, E, ties, seed)
            sums = probs.sort(dim=1, descending=True).values.cumsum(dim=1).flatten()
            edges = [float(sums[i]) for i in torch.randint(len(sums), (6,))]  # sums that reach t exactly, if no more
            settings = [("threshold", t, 1) for t in (0.0, 0.3, 0.5, 0.9, 0.999999, 1.0, *edges)]
            settings += [("topk", 0.5, K) for K in {1, min(2, E), E // 2 or 1, E}]
            settings.append(("switch", 0.5, 1))
            for chooser, t, K in settings:
                config = constants(threshold=min(t, 1.0), eval_threshold=None)
                router = play.CHOOSERS[chooser](config, E, K)
                moe = MoE(router, None, math.inf, math.inf).eval()
                priority = router.choose(probs, probs)
                for gamma in (None, 0.25, 1.0, 1.1, 2.5, 6.0, float(E)):
                    moe.eval_capacity_factor = math.inf if gamma is None else gamma
                    kept = within_capacity(priority, moe.capacity(S))
                    expected.append([digits(priority > NOT_CHOSEN), digits(kept)])
                    cut += expected[-1][0] != expected[-1][1]
                    setting = dict(chooser=chooser, t=min(t, 1.0), K=K, gamma=gamma)
                    cases.append(setting | dict(probs=probs.flatten().tolist(), S=S, E=E))
    assert cut > 300, "the limits cut nothing"
    for case, found, right in zip(cases, in_the_page(CHOSEN, cases), expected, strict=True):
        assert found == right, {name: case[name] for name in ("chooser", "t", "K", "gamma", "S", "E")}


@pytest.mark.skipif(not NODE, reason="there is no node")
def test_every_stop_of_the_capacity_changes_something():
    cases = [[S, E, own] for S in (2, 22, 64, 500) for E in (1, 8, 32) for own in (0.3, 4.0, None)]
    found = in_the_page("([S, E, own]) => [stops(S, E, own), capacity(S, E, own)]", cases)
    for (S, E, own), (stops, C) in zip(cases, found):
        places = [place for place, _ in stops]
        assert places == sorted({*places}) and places[-1] == S and [C, own] in stops
        assert all(place == reference.capacity(S, E, E if gamma is None else gamma) for place, gamma in stops)


@pytest.mark.skipif(not NODE, reason="there is no node")
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_the_page_shows_what_the_run_does(name, made):
    """Chosen by the page from what the server says, and by the model itself."""
    folder = make_any(made, name)
    player = play.Player(str(folder))
    about, found = player.about, player.route(TEXT)
    other = {"hash": "own", "base": "own", "hypersphere": "switch", "top-2": "topk"}
    assert about["own"]["chooser"] == other.get(name, name)
    assert ("topk" in about["choosers"]) == (name != "hash")
    names = {"hypersphere": ["after layer 1", "after layer 3"], "top-2": ["after layer 2"]}
    assert about["names"] == names.get(name, ["block 2", "block 4"])
    S, E, cases = len(found["tokens"]), about["E"], []
    for layer in found["layers"]:
        case = about["own"] | {"S": S, "E": E, "probs": unpacked(layer["probs"], "<f4", E).flatten().tolist()}
        own = unpacked(layer["rank"], "<i4", E).flatten().tolist()
        cases += [case | {"own": own}] + [case] * (about["own"]["chooser"] != "own")
    model, tokenizer = pretrained.load(folder)
    ids, right = tokenizer.encode_batch([TEXT])[0], []
    ids = [0, *ids, 2] if tokenizer.kind == "xlmr" else [tokenizer.eot, *ids]
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: right.append([digits(routing.wanted), digits(kept)]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    assert in_the_page(CHOSEN, cases) == [layer for layer in right for _ in range(len(cases) // len(right))]
    assert any(asked != kept for asked, kept in right) == (name != "hypersphere"), "the case shows nothing"


# ---------------------------------------------------------------------------------------------------------------------
# What the model is asked


def test_the_loss_is_the_model_s_under_the_setting(made):
    folder = made(GPT, **DECODERS["threshold"])
    player = play.Player(str(folder))
    own = player.about["own"]
    trained = player.route(TEXT)["loss"]
    assert own == {"chooser": "threshold", "t": 0.7, "K": 4, "gamma": 2.0}
    assert player.loss(TEXT, own)["loss"] == trained and trained[0] is None

    def expected(**changes) -> list:
        model, tokenizer = pretrained.load(folder, **changes)
        ids = torch.tensor([[tokenizer.eot, *tokenizer.encode_batch([TEXT])[0]]])
        with torch.no_grad():
            return F.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:], reduction="none").tolist()

    assert trained[1:] == pytest.approx(expected(), abs=1e-4)
    inf = math.inf
    for change, constants_ in (
        (dict(t=0.2), dict(eval_threshold=0.2)),
        (dict(gamma=None), dict(eval_capacity=inf)),
        (dict(gamma=1.0), dict(eval_capacity=0.5)),
        (dict(chooser="topk", K=2), dict(router="topk", split=2)),
        (dict(chooser="switch", gamma=None), dict(router="switch", split=2, eval_capacity=inf)),
    ):
        found = player.loss(TEXT, own | change)["loss"]
        assert found[1:] == pytest.approx(expected(**constants_), abs=2e-4), change
        assert found != trained
    assert player.route(TEXT)["loss"] == trained  # all is as it was
    encoder = play.Player(str(made(MaskedLM, **ENCODERS["top-2"])))
    assert encoder.route(TEXT)["loss"] is None and encoder.loss(TEXT, encoder.about["own"]) == {"loss": None}


def test_every_token_can_be_read(tokenizers):
    def pieces(kind, text: str) -> list[str]:
        return [play.written(tokenizers[kind], token) for token in tokenizers[kind].encode_batch([text])[0]]

    shown = pieces(SentencePiece, "the cat\n\tש中é\x00\u200f$")
    assert "".join(shown) == "the·cat⏎⇥ש中\\xc3\\xa9\\x00\\xe2\\x80\\x8f$"
    assert "⏎" in shown and "\\xc3" in shown
    assert "".join(pieces(XLMR, "cat 中")) == "·cat·中"
    assert [play.written(tokenizers[XLMR], token) for token in (0, 2, 3)] == ["<s>", "</s>", "<unk>"]
    bytes_of = [b" cat", b"\n", "é".encode()[:1]].__getitem__
    gpt2 = SimpleNamespace(kind="gpt2", encoding=SimpleNamespace(decode_single_token_bytes=bytes_of))
    assert [play.written(gpt2, token) for token in range(3)] == ["·cat", "⏎", "\\xc3"]


def test_what_an_expert_serves_most_is_counted(options, tmp_path, monkeypatch):
    """On a run as train_lm.py leaves it, against the routing of the same windows."""
    Script(train_lm).run(options | {"out_dir": tmp_path / "out", "steps": 2, "threshold": 0.9}, monkeypatch)
    (folder,) = (tmp_path / "out").iterdir()
    found = play.Player(str(folder)).served
    model, tokenizer = pretrained.load(folder)
    data = train_lm.TokenData.open(options["data"], model.config, play.setup("cpu", "float32"))
    keeps, [moe] = [], model.moe_layers
    moe.watchers.append(lambda moe, h, routing, kept: keeps.append(kept))
    batches = [ids for ids, _ in data.eval_batches("valid", play.VALIDATION_TOKENS)]
    with torch.no_grad():
        for ids in batches:
            model(ids)
    tokens, kept = torch.cat([ids.flatten() for ids in batches]), torch.cat(keeps)  # (S,), (S, E)
    occurs = Counter(tokens.tolist())
    assert found["note"] == f"{len(tokens):,} tokens of the validation text"
    for own, top in zip(kept.t(), found["layers"][0], strict=True):
        count = Counter(tokens[own].tolist())
        assert [n for _, n, _ in top] == sorted(count.values(), reverse=True)[: play.LISTED] and top
        every = {(play.written(tokenizer, token), n, occurs[token]) for token, n in count.items()}
        assert set(map(tuple, top)) <= every
    (folder / "config.json").write_text('{"data_checksum": "of another text"}')
    assert "no validation text: " in play.Player(str(folder)).served["note"]


def test_what_the_experts_of_an_encoder_serve(made, tokenizers, electra_corpora, monkeypatch):
    """Each token goes to one expert, without a limit: together they serve the validation text, nothing masked."""
    folder = electra_corpora["data"]
    monkeypatch.setitem(tokenizers, XLMR, load_tokenizer(folder, kind="xlmr"))
    run = made(MaskedLM, **ENCODERS["hypersphere"], data=str(folder))
    data = MaskedData(folder, block_size=64, micro_tokens=64)
    (run / "config.json").write_text(json.dumps({"data_checksum": f"{data.checksum}+that of pairs"}))
    monkeypatch.setattr(play, "LISTED", 1000)
    found = play.Player(str(run)).served
    rows = data.eval_rows("valid", play.VALIDATION_TOKENS)
    occurs = Counter(data.tokens["valid"].tolist()) + Counter({XLMR.bos: len(rows.lengths)})
    assert found["note"] == f"{occurs.total():,} tokens of the validation text" and len(found["layers"]) == 2
    right = Counter()
    for token, n in occurs.items():
        right[play.written(tokenizers[XLMR], token)] += n
    for experts in found["layers"]:
        served = Counter()
        for top in experts:
            served.update({token: n for token, n, _ in top})
        assert served == right and sum(bool(top) for top in experts) > 2


# ---------------------------------------------------------------------------------------------------------------------
# The page as a file


def test_a_page_is_written_with_its_sentences(made, tmp_path, monkeypatch, capsys):
    folder, file = made(GPT, **DECODERS["threshold"]), tmp_path / "pages" / "play.html"
    run(monkeypatch, "play", "--run", folder, "--text", TEXT, "--text", HOSTILE, "--text", "none", "--out", file)
    assert re.search(rf"{file} is the page, \d+ kB; texts in it: 3", capsys.readouterr().out)
    page, player = file.read_text(), play.Player(str(folder))
    data = data_of(page)
    assert [found["text"] for found in data["routes"]] == [TEXT, HOSTILE, "none"]
    assert data["routes"] == json.loads(json.dumps([player.route(text) for text in (TEXT, HOSTILE, "none")]))
    assert not data["live"] and "no validation text" in data["served"]["note"]
    # The page has the elements that it has without the sentences, and nothing of the text is one of them.
    plain = play.PAGE.read_text()
    for mark in ("<script", "</script", "<!--"):
        assert page.count(mark) == plain.count(mark)
    assert page.replace(page[page.index('id="data">') + 10 : page.index("</script>")], "{{DATA}}") == plain
    elsewhere = r"https?:|//cdn|@import|<link(?! rel=\"icon\")|src=|innerHTML|outerHTML|insertAdj|eval\("
    assert not re.search(elsewhere, plain) and plain.count("{{DATA}}") == 1
    for slider in re.findall(r'<input id="(\w+)" type="range"', plain):
        assert f'<label for="{slider}">' in plain  # its name for who does not see it


@pytest.mark.parametrize("name", ["topk", "top-2"])
def test_a_long_text_is_cut_to_what_the_model_reads(made, name):
    found = play.Player(str(make_any(made, name))).route("x y " * 2500)
    assert len(found["tokens"]) == 64 and found["of"] > 2500
    assert (found["loss"] is None) == (name in ENCODERS)


def test_runs_that_will_not_do(made, tmp_path, monkeypatch, capsys):
    def told(*line) -> str:
        return refused(monkeypatch, capsys, "play", "--open", "false", "--run", *line)

    assert "does not exist: train it first" in told(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/train_lm/another").mkdir(parents=True)
    (tmp_path / "out/train_lm/another/config.json").write_text("{}")
    assert "name a run: there are out/train_lm/another" in refused(monkeypatch, capsys, "play")
    for kind in (GPT, MaskedLM, Translator):
        folder = made(kind, router="dense" if kind is not Translator else "topk")
        assert f"{folder} is no language model or encoder with experts" in told(folder)
    folder = made(GPT, **DECODERS["topk"])
    assert "the text is empty" in told(folder, "--text", "")
    assert "port must lie from 1 to 65535, not 70000" in told(folder, "--port", "70000")
    (tmp_path / "file").write_text("in the way")
    assert "file" in told(folder, "--out", tmp_path / "file" / "play.html")
    with play.listen(None) as taken:
        assert f"port {taken.server_port} on 127.0.0.1" in told(folder, "--port", taken.server_port)


# ---------------------------------------------------------------------------------------------------------------------
# The server


@pytest.fixture
def server(made):
    with play.listen(None) as server:
        server.player = play.Player(str(made(GPT, **DECODERS["threshold"])))
        server.page = play.page_of(server.player.about | {"live": True, "routes": [], "served": None}).encode()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def asked(server, method: str, path: str, body=None, **headers) -> tuple:
    """-> status, what was answered, headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if "json" in answer.headers["Content-Type"] else text, answer.headers


def test_the_server_answers_its_own_page(server):
    status, page, headers = asked(server, "GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and data_of(page)["live"]
    assert "default-src 'none'" in page
    origin = f"http://127.0.0.1:{server.server_port}"
    status, found, _ = asked(server, "POST", "/route", json.dumps({"text": HOSTILE}), Origin=origin)
    assert status == 200 and found == json.loads(json.dumps(server.player.route(HOSTILE)))
    setting = server.player.about["own"] | {"chooser": "topk", "K": 2}
    status, found, _ = asked(server, "POST", "/loss", json.dumps({"text": TEXT, "setting": setting}))
    assert status == 200 and found == server.player.loss(TEXT, setting)
    status, found, _ = asked(server, "POST", "/served", "{}")
    assert status == 200 and "no validation text" in found["note"]
    assert server.server_address[0] == "127.0.0.1"


def test_the_server_refuses_what_is_not_its_page(server):
    port, body = server.server_port, json.dumps({"text": TEXT})
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "", "0.0.0.0"):
        for method, path in (("GET", "/"), ("POST", "/route"), ("GET", "/nothing")):
            assert asked(server, method, path, body, Host=host)[0] == 403, host
    assert asked(server, "GET", "/", Host=f"localhost:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1"):
        assert asked(server, "POST", "/route", body, Origin=origin)[0] == 403, origin
        assert asked(server, "GET", "/", Origin=origin)[0] == 403
    assert asked(server, "DELETE", "/", body)[0] == 501
    assert asked(server, "POST", "/route", Content_Length="x")[0] == 400
    assert asked(server, "POST", "/route", json.dumps({"text": "x " * 500_000}))[0] == 200  # a megabyte


def test_what_is_not_understood_is_one_line(server):
    own = server.player.about["own"]
    bad = ["", "{", "null", "{}", '{"text": 3}', '{"text": ""}', '{"text": null}', "\xff"]
    for body in bad:
        status, found, _ = asked(server, "POST", "/route", body.encode("latin-1"))
        assert status == 400 and "\n" not in found["error"], body
    for change in ({"chooser": "hash"}, {"t": "x"}, {"chooser": "topk", "K": "x"}, {"gamma": math.nan}):
        body = json.dumps({"text": TEXT, "setting": own | change})
        status, found, _ = asked(server, "POST", "/loss", body)
        assert status == 400 and "error" in found, change
    assert asked(server, "POST", "/loss", json.dumps({"text": TEXT, "setting": own}))[0] == 200  # it lives


def test_ctrl_c_ends_the_page(made):
    """While it answers, too."""
    folder = made(GPT, **DECODERS["switch"])
    command = [sys.executable, str(ROOT / "analyze.py"), "play", "--run", str(folder), "--open", "false"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        said = process.stdout.readline()
        server = SimpleNamespace(server_port=int(re.search(r"http://127\.0\.0\.1:(\d+)/", said)[1]))
        assert asked(server, "GET", "/")[0] == 200

        def ask_on():
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    asked(server, "POST", "/route", json.dumps({"text": TEXT}))

        others = [threading.Thread(target=ask_on) for _ in range(3)]
        for other in others:
            other.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
        for other in others:
            other.join()
    assert process.returncode == 0 and not error and not out.strip()
