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
        [prompt] = tokenizer.encode_batch([config.prompt])
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
    has at most 1.2 n + 10. A finished one is worth its log probability over its length, with </s>, to the power of
    `length_penalty`; a sentence is done when K are finished, or when its beams are as long as they may be. Experts have
    no capacity limit, so that a translation depends on its source alone; with `limit` they have the evaluation's. Keys
    and values of what is written are kept, so that each step reads one token.
    """
    K, V, (B, N) = beam, model.vocab_size, source.shape
    device = source.device
    never = torch.tensor(tokenizer.unwritten, device=device)  # no text is made of these
    is_end = torch.arange(V, device=device) == tokenizer.eos
    length = source.new_full((B,), N)  # with </s>
    if real is not None:
        length = real_mask(source, real).sum(dim=1)
    longest = 6 * (length - 1) // 5 + 10
    written = source.new_full((B, K, 1), tokenizer.bos)  # the tokens of each beam
    score = torch.zeros(B, K, device=device)
    score[:, 1:] = -math.inf  # at first all beams are alike, and only one goes on
    finished = [[] for _ in range(B)]  # of each sentence pairs of a value and the ids
    searched = list(range(B))  # the b sentences that are not done
    was_training = model.training
    model.eval()
    limited = limit or model.sees_later  # of experts that choose their tokens, the limit is what chooses
    with nullcontext() if limited else model.no_limit():
        encoded, _ = model.encode(source, real)
        past = None
        while searched:
            t = written.shape[2]  # tokens, with </s>, of a translation that ends now
            h, _, past = model.decode(written[:, :, -1:].flatten(0, 1), encoded, past)
            log_probs = model.log_probabilities(h[:, -1])  # (b * K, V)
            log_probs[:, never] = -math.inf
            total = log_probs.unflatten(0, (-1, K))  # (b, K, V)
            total += score.unsqueeze(2)
            must_end = (longest < t).tolist()
            for i, last in enumerate(must_end):
                if last:
                    total[i] = total[i].where(is_end, -math.inf)
            best, place = total.flatten(1).topk(2 * K)  # (b, 2 K), the best first
            before, token = place // V, place % V
            ends = token == tokenizer.eos
            ended = ends & (best > -math.inf)
            for i, j in ended[:, :K].nonzero().tolist():
                value = float(best[i, j]) / t**length_penalty
                ids = written[i, before[i, j], 1:].tolist()
                finished[searched[i]].append((value, ids))
            # Of the 2 K best continuations of a sentence at most K are ends, one of each beam, so K go on.
            going_on = ends.int().argsort(dim=1, stable=True)[:, :K]
            score = best.gather(1, going_on)
            before = before.gather(1, going_on)
            token = token.gather(1, going_on)
            written = written.take_along_dim(before.unsqueeze(2), dim=1)
            written = torch.cat([written, token.unsqueeze(2)], dim=2)
            full = [len(finished[own]) >= K for own in searched]
            stay = [i for i in range(len(searched)) if not (must_end[i] or full[i])]
            rows = before + K * torch.arange(len(searched), device=device).unsqueeze(1)
            past = rows_of(past, rows[stay].flatten())
            if len(stay) < len(searched):
                encoded = encoded.sentences(stay)
                written, score = written[stay], score[stay]
                longest = longest[stay]
                searched = [searched[i] for i in stay]
    model.train(was_training)
    return [max(pairs)[1] for pairs in finished]
