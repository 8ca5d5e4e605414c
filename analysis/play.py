"""The playground: a page that shows how a model routes a sentence, and how it would under other settings."""

import base64
import copy
import json
import math
import os
import threading
import webbrowser
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.shared import corpus_of
from engine import pretrained
from engine.config import check
from engine.device import seed_all, setup
from engine.files import read_json, write
from model import GPT, Encoder
from routers import NOT_CHOSEN, Router, Switch, Threshold, TopK

PAGE = Path(__file__).with_name("play.html")
CHOOSERS = {"threshold": Threshold, "topk": TopK, "switch": Switch}
SENTENCE = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."
VALIDATION_TOKENS = 1 << 14  # read to count what each expert serves
LISTED = 14  # tokens shown per expert


@dataclass
class Play:
    run: str | None = None  # run folder of train_lm.py, train_mlm.py or train_electra.py; default: train_lm.py's demo
    text: str = SENTENCE  # initial text
    port: int = 8000  # on 127.0.0.1
    open: bool = True  # open the page in a browser
    out: str | None = None  # write the page to this file, such as play.html, for a fixed text, instead of serving it


def play(options: Play, demos: Callable):
    """An interactive page: which experts the tokens of your sentence request, and which experts serve them.

    It shows the trained router's probabilities in every sparse layer, with a row per token and a column per expert, and
    updates as you change the threshold, the capacity, K or the router. It is served to this machine only, until Ctrl-C;
    --out writes it to a file for any web host, with a fixed text.
    """
    check(options)
    player = Player(options.run or demos()[0])
    data = player.about | {"route": player.route(options.text)}
    if options.out:
        page = page_of(data | {"live": False, "served": player.served})
        write(Path(options.out), page)
        return print(f"Wrote {options.out}: {len(page) / 1e3:.0f} kB")
    page = page_of(data | {"live": True, "served": None})
    with listen(options.port) as server:
        server.player, server.page = player, page.encode()
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"{address} shows {player.run}, on this machine only; press Ctrl-C to stop", flush=True)
        if options.open:  # in a thread, as a terminal browser blocks until it is closed
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
            os._exit(0)  # a normal exit would abort if a request is still inside torch


def page_of(data: dict) -> str:
    """The page with its data embedded. `<` is escaped, so that no text can close the script element."""
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("{{DATA}}", embedded)


class Player:
    """Runs a trained model for the page. Raises ValueError or OSError if it cannot be loaded or has no experts."""

    def __init__(self, run: str):
        self.run = run
        self.model, self.tokenizer = pretrained.load(run)
        if not isinstance(self.model, GPT | Encoder) or not self.model.moe_layers:
            raise ValueError(f"{run} is not a language model or encoder with experts: pass another --run")
        self.decodes = isinstance(self.model, GPT)
        self.lock = threading.Lock()
        self.seen = []
        for moe in self.model.moe_layers:
            moe.watchers.append(lambda moe, h, routing, kept: self.seen.append((routing, kept)))

    @cached_property
    def about(self) -> dict:
        """The run, its routing settings at test, and the choosers that can replace its router."""
        model, constants = self.model, vars(self.model.config)
        moe = model.moe_layers[0]
        router, chooser = moe.router, chooser_of(moe.router)
        if self.decodes:
            names = [f"block {depth}" for depth, block in enumerate(model.blocks, 1) if block.sparse]
        else:
            names = [f"after layer {depth}" for depth in model.moe_after]
        choosers = ["trained"] * (chooser == "trained")
        if type(router).choose is not Router.choose:  # a router without `choose`, such as Hash, has none to replace
            choosers += CHOOSERS
        t = constants.get("eval_threshold")
        trained = {
            "chooser": chooser,
            "t": constants.get("threshold", 0.5) if t is None else t,
            "K": router.K if chooser == "topk" else min(4, router.E),
            "gamma": moe.eval_capacity_factor if moe.eval_capacity_factor < router.E else None,  # None: no limit
        }
        about = {"run": self.run, "router": constants["router"], "names": names, "E": router.E}
        return about | {"trained": trained, "choosers": choosers}

    def read(self, text: str) -> list[int]:
        """A text's ids, not truncated: after the end-of-text token for a decoder, in <s> and </s> for an encoder."""
        text = text.encode("utf-8", "replace").decode()
        (ids,) = self.tokenizer.encode_batch([text])
        if not ids:
            raise ValueError("the text is empty: pass some text")
        if self.decodes:
            return [self.tokenizer.eot, *ids]
        return [self.tokenizer.bos, *ids, self.tokenizer.eos]

    def route(self, text: str) -> dict:
        """Tokens, their losses, and for each MoE layer the probabilities (S, E) and the trained router's ranks (S, E).

        An expert serves smaller ranks first; -1 means not chosen.
        """
        ids = self.read(text)
        shown = ids[: self.model.config.block_size]
        seen, loss = self.forward(torch.tensor([shown]))
        layers = []
        for routing, _ in seen:
            values, index = routing.priority.unique(return_inverse=True)
            rank = torch.where(routing.priority > NOT_CHOSEN, len(values) - 1 - index, -1)
            layers.append({"probs": packed(routing.probs, "<f4"), "rank": packed(rank, "<i4")})
        tokens = [printable(self.tokenizer, token) for token in shown]
        return {"text": text, "tokens": tokens, "of": len(ids), "layers": layers, "loss": loss}

    def loss(self, text: str, setting: dict) -> dict:
        """The loss of every token under a setting from the page; its keys are those of `about["trained"]`."""
        ids = self.read(text)[: self.model.config.block_size]
        _, loss = self.forward(torch.tensor([ids]), setting=setting)
        return {"loss": loss}

    @torch.no_grad()
    def forward(self, ids: Tensor, nonpad: Tensor | None = None, setting=None) -> tuple[list, list | None]:
        """ids (B, T) -> [(routing, kept)] by MoE layer, and a decoder's losses of the first row's tokens."""
        inputs = (ids,) if self.decodes else (ids, nonpad)
        with self.lock, routed(self.model, setting):
            self.seen.clear()
            seed_all(0)  # for routers that sample
            out, _ = self.model(*inputs)
            seen = [*self.seen]
        if not self.decodes:
            return seen, None  # loaded without its head
        loss = F.cross_entropy(out[0, :-1].float(), ids[0, 1:], reduction="none").tolist()
        return seen, [None, *(round(x, 4) if math.isfinite(x) else None for x in loss)]

    @cached_property
    def served(self) -> dict:
        """For each layer and expert, the tokens of the validation text that it serves most often.

        layers: [token, times served by the expert, times it occurs]; note: what was counted, or why nothing was.
        """
        try:
            config = read_json(Path(self.run, "config.json"))
            data = corpus_of(self.model, self.run, config, setup("cpu", "float32"))
        except (ValueError, OSError, ImportError, KeyError) as error:
            return {"layers": None, "note": f"no validation text: {error}"}
        occurs = Counter()
        counts = [[Counter() for _ in range(moe.router.E)] for moe in self.model.moe_layers]
        if self.decodes:
            batches = ((ids, None) for ids, _ in data.eval_batches("valid", VALIDATION_TOKENS))
        else:
            unmasked = data.eval_batches("valid", 1, VALIDATION_TOKENS, masked=())
            batches = ((batch.ids, batch.nonpad) for _, _, batch in unmasked)
        for ids, nonpad in batches:
            seen, _ = self.forward(ids, nonpad)
            tokens = ids.flatten() if nonpad is None else ids.flatten()[nonpad]  # (S,)
            occurs.update(tokens.tolist())
            for experts, (_, kept) in zip(counts, seen):
                for count, mask in zip(experts, kept.t()):
                    count.update(tokens[mask].tolist())

        def most_served(count: Counter) -> list:
            return [[printable(self.tokenizer, token), n, occurs[token]] for token, n in count.most_common(LISTED)]

        layers = [list(map(most_served, experts)) for experts in counts]
        return {"layers": layers, "note": f"{occurs.total():,} tokens of the validation text"}


def chooser_of(router) -> str:
    """The page's name for a router; "trained" if the page cannot imitate it."""
    kind = type(router)
    if kind.forward is not Router.forward:
        return "trained"
    if router.scores(torch.zeros(1, router.config.n_embd)).shape[1] > router.E:  # null experts
        return "trained"
    choosers = {Threshold.choose: "threshold", TopK.choose: "switch" if router.K == 1 else "topk"}
    return choosers.get(kind.choose, "trained")


@contextmanager
def routed(model, setting: dict | None):
    """Context in which the model's routers choose by a setting from the page, with unchanged scores and gates."""
    before = [(moe.router, moe.eval_capacity_factor) for moe in model.moe_layers]
    try:
        for moe in model.moe_layers if setting else ():
            moe.eval_capacity_factor = math.inf if setting["gamma"] is None else setting["gamma"]
            if setting["chooser"] != "trained":
                moe.router = router = copy.copy(moe.router)  # shares the parameters
                kind = CHOOSERS[setting["chooser"]]
                router.choose = partial(choose_experts, router, kind)
                router.K = setting["K"] if kind is TopK else kind.K or router.E
                constants = vars(router.config) | {"threshold": setting["t"], "eval_threshold": None}
                router.config = SimpleNamespace(**constants)
        yield
    finally:
        for moe, (router, factor) in zip(model.moe_layers, before):
            moe.router, moe.eval_capacity_factor = router, factor


def choose_experts(router, kind: type, score: Tensor, probs: Tensor) -> Tensor:
    """Priorities by `choose` of another class; null experts, the columns after the first E, are not chosen."""
    priority = kind.choose(router, score[:, : router.E], probs[:, : router.E])
    return F.pad(priority, (0, probs.shape[1] - router.E), value=NOT_CHOSEN)


def packed(x: Tensor, kind: str) -> str:
    """A tensor's numbers in base64, for the page."""
    return base64.b64encode(x.numpy().astype(kind).tobytes()).decode()


def printable(tokenizer, token: int) -> str:
    """A token for display: a space is ·, a line break ⏎; invisible or partial characters are escaped."""
    if tokenizer.kind == "xlmr" and token <= tokenizer.unk:
        return ("<s>", "<pad>", "</s>", "<unk>")[token]
    if tokenizer.kind == "gpt2":
        text = tokenizer.encoding.decode_single_token_bytes(token)
    else:
        piece = token - 1 if tokenizer.kind == "xlmr" else token
        text = tokenizer.processor.id_to_piece(piece).encode()
        if tokenizer.processor.is_byte(piece):  # <0xE4>
            text = bytes([int(text[3:5], 16)])
    marks = {" ": "·", "\u2581": "·", "\n": "⏎", "\t": "⇥"}
    shown = ""
    for char in text.decode(errors="backslashreplace"):
        if char not in marks and not char.isprintable():
            char = repr(char)[1:-1]
        shown += marks.get(char, char)
    return shown


class Handler(BaseHTTPRequestHandler):
    """GET returns the page, which posts JSON to /route, /loss and /served. Other origins are refused."""

    timeout = 60

    def do_GET(self):
        if self.is_allowed():
            self.answer(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self):
        if not self.is_allowed():
            return
        player = self.server.player
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/served":
                response = player.served
            elif self.path == "/loss":
                response = player.loss(request["text"], request["setting"])
            else:
                response = player.route(request["text"])
        except Exception as error:  # a malformed request, or a router of the user's own
            return self.answer(400, {"error": f"{error}"})
        self.answer(200, response)

    def is_allowed(self) -> bool:
        """Whether host and origin are this server's; otherwise answers 403. It guards against DNS rebinding."""
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        origins = [None, *(f"http://{host}" for host in hosts)]
        allowed = self.headers.get("Host") in hosts and self.headers.get("Origin") in origins
        if not allowed:
            self.answer(403, {"error": "only this server's own page may send requests"})
        return allowed

    def answer(self, status: int, content: bytes | dict, kind: str = "application/json"):
        body = content if isinstance(content, bytes) else json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Ignores errors such as a closed connection."""


def listen(port: int) -> Server:
    """A server on 127.0.0.1; port 0: any free one. Raises OSError if the port is taken."""
    try:
        return Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise OSError(f"port {port} on 127.0.0.1: {error.strerror}: pass another --port") from None
