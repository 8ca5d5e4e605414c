"""The playground: a page that shows what a model's routers do with a sentence, and lets you choose otherwise."""

import base64
import copy
import json
import math
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import pretrained
from engine.config import Texts, check
from engine.device import seed_all
from model import GPT, Encoder
from routers import NOT_CHOSEN, ExpertChoice, Switch, Threshold, TopK

PAGE = Path(__file__).with_name("play.html")
CHOOSERS = {"threshold": Threshold, "topk": TopK, "switch": Switch, "expert_choice": ExpertChoice}
SENTENCE = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."
SHOWN = 256  # tokens of a text, at most
MARKS = str.maketrans({" ": "·", "\u2581": "·", "\n": "⏎", "\t": "⇥"})


@dataclass
class Play:
    run: str = "out/train_lm/demo"  # folder of a run of train_lm.py, train_mlm.py or train_electra.py
    text: Texts = ()  # a sentence to begin with; give it again for more
    port: int = 8000  # on 127.0.0.1
    out: str | None = None  # a file such as play.html: writes the page there and serves nothing


def play(options: Play):
    """A page to play with: which experts your sentence's tokens ask for, which serve them, and how it could be.

    The trained router's probabilities are drawn, layer by layer, a row for each token, a column for each expert. The
    page chooses anew at once when you move the threshold, the capacity or K, or take another kind of router. It is
    served to this machine alone, until Ctrl-C; --out writes it as one file for any web host, with the sentences given.
    """
    check(options)
    player = Player(options.run)
    routes = [player.route(text) for text in options.text or [SENTENCE]]
    page = page_of(player.about() | {"live": not options.out, "routes": routes})
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(page, encoding="utf-8")
        return print(f"{options.out} is the page, {len(page) / 1e3:.0f} kB; texts in it: {len(routes)}")
    with listen(options.port) as server:
        server.player, server.page = player, page.encode()
        print(
            f"http://127.0.0.1:{options.port}/ shows {options.run}, on this machine alone; Ctrl-C ends it", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
            os._exit(0)  # a thread that answers may be inside torch, which aborts where Python ends in the usual way


def page_of(data: dict) -> str:
    """The page with its data inside. Whatever a text says, no `<` of it ends the element that the data stand in."""
    inside = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("{{DATA}}", inside)


# ---------------------------------------------------------------------------------------------------------------------
# What is asked of the model


class Player:
    """A trained model, and what the page asks of it. Raises ValueError or OSError for one without experts."""

    def __init__(self, run: str):
        self.run = run
        self.lock = threading.Lock()
        self.seen = []  # the routing of each MoE layer
        self.model, self.tokenizer = pretrained.load(run)
        if not isinstance(self.model, GPT | Encoder) or not self.model.moe_layers:
            raise ValueError(f"{run} is no language model or encoder with experts: give another --run")
        for moe in self.model.moe_layers:
            moe.watchers.append(self.watch)

    def watch(self, moe, h, routing, kept):
        self.seen.append(routing)

    def about(self) -> dict:
        """The run, where its sliders stand at first, and the choosers that can take its router's place."""
        model, constants = self.model, vars(self.model.config)
        first = model.moe_layers[0]
        router, gamma = first.router, first.eval_gamma
        if isinstance(model, Encoder):
            names = [f"behind layer {depth}" for depth in model.moe_after]
        else:
            names = [f"block {depth}" for depth, block in enumerate(model.blocks, 1) if block.sparse]
        t = constants.get("eval_threshold")
        own = {
            "chooser": "own",
            "t": constants.get("threshold", 0.5) if t is None else t,
            "K": router.max_choices if isinstance(router, TopK) else min(4, router.E),
            "gamma": gamma if gamma < router.E else None,  # None: no limit
        }
        others = [*CHOOSERS] if hasattr(router, "experts") else []  # a hash has no probabilities to choose by
        about = {"run": self.run, "router": constants["router"], "E": router.E}
        return about | {"names": names, "own": own, "choosers": ["own", *others]}

    def read(self, text: str) -> list[int]:
        """The tokens of a text as the model reads them, uncut: behind the end of another text, or between marks."""
        ids = self.tokenizer.encode_batch([text])[0]
        if not ids:
            raise ValueError("the text is empty: write one")
        if isinstance(self.model, Encoder):
            return [self.tokenizer.bos, *ids, self.tokenizer.eos]
        return [self.tokenizer.eot, *ids]

    def cut(self, ids: list[int]) -> Tensor:
        """(1, T) as many as the page shows, and the model can read."""
        return torch.tensor([ids[: min(SHOWN, self.model.config.block_size)]])

    def route(self, text: str) -> dict:
        """Tokens, their losses, and of each MoE layer the probabilities (S, E) and the run's own choices (S, E).

        The choices are ranks: an expert serves smaller ones first, and -1 is not chosen.
        """
        ids = self.read(text)
        shown = self.cut(ids)
        out, seen = self.forward(shown)
        layers = []
        for routing in seen:
            values, place = routing.priority.unique(return_inverse=True)
            rank = len(values) - 1 - place
            rank = torch.where(routing.priority > NOT_CHOSEN, rank, -1)
            layers.append({"probs": packed(routing.probs, "<f4"), "rank": packed(rank, "<i4")})
        tokens = [written(self.tokenizer, token) for token in shown[0].tolist()]
        found = {"text": text, "tokens": tokens, "of": len(ids), "layers": layers}
        return found | {"loss": self.losses(out, shown)}

    def loss(self, text: str, setting: dict) -> dict:
        """The loss of every token where they choose as the page says."""
        shown = self.cut(self.read(text))
        out, _ = self.forward(shown, SimpleNamespace(**setting))
        return {"loss": self.losses(out, shown)}

    @torch.no_grad()
    def forward(self, ids: Tensor, setting: SimpleNamespace | None = None) -> tuple[Tensor, list]:
        """ids (1, T) -> what the model gives, and the routing of each MoE layer."""
        with self.lock, routed(self.model, setting):
            self.seen.clear()
            seed_all(0)  # for a router that draws
            out, _ = self.model(ids)
            return out, [*self.seen]

    def losses(self, logits: Tensor, ids: Tensor) -> list | None:
        """Of each token, None for the first and for what is not finite. An encoder, loaded without a head, has none."""
        if isinstance(self.model, Encoder):
            return None
        losses = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
        return [None, *(round(x, 4) if math.isfinite(x) else None for x in losses.tolist())]


@contextmanager
def routed(model, setting: SimpleNamespace | None):
    """Inside the `with`, tokens choose as the page says: by the same probabilities, in another class of router."""
    before = [(moe.router, moe.eval_gamma) for moe in model.moe_layers]
    for moe in model.moe_layers if setting else ():
        moe.eval_gamma = math.inf if setting.gamma is None else setting.gamma
        if setting.chooser != "own":
            moe.router = copy.copy(moe.router)  # with the same parameters
            moe.router.__class__ = CHOOSERS[setting.chooser]
            moe.router.K = setting.K
            moe.router.config = SimpleNamespace(threshold=setting.t, eval_threshold=None)
    try:
        yield
    finally:
        for moe, (router, gamma) in zip(model.moe_layers, before):
            moe.router, moe.eval_gamma = router, gamma


def packed(x: Tensor, kind: str) -> str:
    """The numbers of a tensor in base64, as the page reads them."""
    return base64.b64encode(x.numpy().astype(kind).tobytes()).decode()


def written(tokenizer, token: int) -> str:
    """A token as it is shown: a space is ·, the end of a line ⏎; what is invisible or part of a character is spelt."""
    if tokenizer.kind == "xlmr" and token <= tokenizer.unk:
        return ("<s>", "<pad>", "</s>", "<unk>")[token]
    if tokenizer.kind == "gpt2":
        text = tokenizer.encoding.decode_single_token_bytes(token).decode(errors="backslashreplace")
    else:
        piece = token - 1 if tokenizer.kind == "xlmr" else token
        text = tokenizer.processor.id_to_piece(piece)
    text = text.translate(MARKS)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


# ---------------------------------------------------------------------------------------------------------------------
# The server


class Handler(BaseHTTPRequestHandler):
    """GET is the page; the page posts JSON to /route and /loss. Only the address that was printed is answered."""

    def do_GET(self):
        self.answer(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self):
        player = self.server.player
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = {"/route": player.route, "/loss": player.loss}[self.path]
            status, found = 200, answer(**json.loads(body))
        except (ValueError, TypeError, KeyError) as error:
            status, found = 400, {"error": str(error)}
        self.answer(status, json.dumps(found).encode(), "application/json")

    def answer(self, status: int, body: bytes, kind: str):
        host, _, _ = self.headers.get("Host", "").partition(":")
        if host not in ("127.0.0.1", "localhost"):  # a foreign page, whose name was made to lead here
            status, body = 403, b"{}"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A browser that goes away is no error; nor does one request end the others."""


def listen(port: int) -> Server:
    """A server on 127.0.0.1. Raises OSError where the port is taken."""
    try:
        return Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise OSError(f"port {port} on 127.0.0.1: {error.strerror}; --port takes another") from None
