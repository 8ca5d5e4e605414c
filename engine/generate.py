"""What trained models write: samples of a language model, shown as they come, and translations by beam search."""

import math
from contextlib import nullcontext
from pathlib import Path

import torch

from analysis import measures
from engine import pretrained
from engine.config import run_name
from engine.device import Context, clear_errors, seed_all, show
from model import Translator, real_mask, rows_of


def write_sample(config, presets: dict, context: Context):
    """Prints how the run of a config (of its first seed) goes on from the prompt, token by token.

    Its experts have no capacity limit; the threshold is `eval_threshold`. Nothing is printed where there is no
    checkpoint, as where the weights of `--init_from` were evaluated alone.
    """
    folder = Path(config.out_dir, run_name(config, presets))
    if not (folder / "ckpt.pt").exists():
        return
    with clear_errors():
        model, tokenizer = pretrained.load(folder)
        model.config.eval_threshold = config.eval_threshold  # the routers read it there
        text = config.prompt.encode().decode()  # ValueError for half a character
        [prompt] = tokenizer.encode_batch([text])
    if model.sees_later:
        show("\nno sample: the experts choose among tokens that are not written yet")
        return
    shown = ""

    def show_new(ids):
        """What ids (1, T) say, but for what is shown already, and for a character whose last bytes are to come."""
        nonlocal shown
        text = tokenizer.decode(ids[ids != tokenizer.eot].tolist())
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        show(text[len(shown) :], end="")
        shown = text

    model = context.place(model)
    watches = [measures.RoutingStats(moe) for moe in model.moe_layers]
    ids = torch.tensor([[tokenizer.eot, *prompt]], device=context.device)
    seed_all(config.sample_seed)
    show("\nsample:")
    show_new(ids)
    with context.autocast():
        how = config.sample_tokens, config.sample_temperature, config.sample_top_k
        model.generate(ids, *how, end=tokenizer.eot, look=show_new)
    served = ", ".join(f"{watch.finish()['served']:.1f}" for watch in watches)
    show(f"\n({served} experts served per token)" if served else "")


@torch.no_grad()
def translate(model: Translator, source, real, tokenizer, beam=5, length_penalty=1.0, limit=False) -> list:
    """Translates by beam search: for each of B sources the ids of the best translation, without <s> and </s>.

    source (B, N) ends in </s>; real (S,): see `Translator.encode`. Of a source of n tokens before </s> the translation
    has at most 1.2 n + 10. Experts have no capacity limit, so that a translation depends on its source alone; with
    `limit` they have the evaluation's. Keys and values of what is written are kept, so that each step reads one token.
    """
    K, V, (B, N) = beam, model.vocab_size, source.shape
    eos, device = tokenizer.eos, source.device
    never = torch.tensor(tokenizer.unwritten, device=device)  # no text is made of these
    is_end = torch.arange(V, device=device) == eos
    length = source.new_full((B,), N)  # with </s>
    if real is not None:
        length = real_mask(source, real).sum(dim=1)
    longest = 6 * (length - 1) // 5 + 10
    sentences = searched = [Sentence(K, most) for most in longest.tolist()]
    newest = [tokenizer.bos] * K * B  # the last token of each beam
    was_training = model.training
    model.eval()
    limited = limit or model.sees_later  # of experts that choose their tokens, the limit is what chooses
    with nullcontext() if limited else model.no_limit():
        encoded, _ = model.encode(source, real)
        past = None
        while searched:  # b sentences that are not done
            ids = torch.tensor(newest, device=device)
            h, _, past = model.decode(ids.unsqueeze(1), encoded, past)
            log_probs = model.log_probabilities(h[:, -1])  # (b * K, V)
            log_probs[:, never] = -math.inf
            total = log_probs.unflatten(0, (-1, K))  # (b, K, V)
            before = [sentence.log_probs for sentence in searched]
            total += torch.tensor(before, device=device).unsqueeze(2)
            for number, sentence in enumerate(searched):
                if sentence.must_end:
                    total[number] = total[number].where(is_end, -math.inf)
            # Of the 2 K best continuations of a sentence at most K are ends, one of each beam, so K go on.
            best, place = total.flatten(1).topk(2 * K)
            best = zip(best.tolist(), (place // V).tolist(), (place % V).tolist())
            stay, rows = [], []  # which of the b sentences are not done, and which of the b * K beams go on
            for number, (sentence, candidates) in enumerate(zip(searched, best)):
                going_on = sentence.grow([*zip(*candidates)], eos, length_penalty)
                stay += [number] if going_on else []
                rows += [K * number + beam for beam in going_on]
            if len(stay) < len(searched):
                encoded = encoded.sentences(stay)
            past = rows_of(past, rows)
            searched = [searched[number] for number in stay]
            newest = [tokens[-1] for sentence in searched for tokens in sentence.beams]
    model.train(was_training)
    return [max(sentence.finished)[1] for sentence in sentences]


class Sentence:
    """One sentence in a beam search: its K beams, which are translations that go on, and those that are finished.

    The value of a finished one is its log probability over its length, with </s>, to the power of `length_penalty`. The
    sentence is done when K are finished, or when its beams are as long as they may be.
    """

    def __init__(self, K: int, longest: int):
        """longest: the tokens that a translation may have, without </s>."""
        self.longest = longest
        self.beams = [[]] * K  # the tokens of each
        self.log_probs = [0.0] + [-math.inf] * (K - 1)  # at first all beams are alike, and only one goes on
        self.finished = []  # pairs of a value and the tokens

    @property
    def must_end(self) -> bool:
        return len(self.beams[0]) == self.longest

    def grow(self, candidates: list[tuple], eos: int, length_penalty: float) -> list[int]:
        """Makes the next beams -> which beams they continue; [] where the sentence is done.

        candidates: log probability, beam and next token of the 2 K best continuations, the best first. Those of the K
        best that end are finished translations; the K best that do not end are the next beams.
        """
        before, K = self.beams, len(self.beams)
        length = 1 + len(before[0])  # with </s>
        for log_prob, beam, token in candidates[:K]:
            if token == eos and log_prob > -math.inf:
                value = log_prob / length**length_penalty
                self.finished.append((value, before[beam]))
        if self.must_end or len(self.finished) >= K:
            return []
        going_on = [one for one in candidates if one[2] != eos][:K]
        self.log_probs = [log_prob for log_prob, _, _ in going_on]
        self.beams = [[*before[beam], token] for _, beam, token in going_on]
        return [beam for _, beam, _ in going_on]
