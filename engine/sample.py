"""What a trained language model writes, shown as it comes."""

from pathlib import Path

import torch

from analysis import measures
from engine import pretrained
from engine.config import run_name
from engine.device import Context, clear_errors, seed_all, show


def write_sample(config, presets: dict[str, dict], context: Context):
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
        [prompt] = tokenizer.encode_batch([config.prompt.encode().decode()])  # ValueError for half a character
    if model.sees_later:
        show("\nno sample: the experts choose among tokens that are not written yet")
        return
    shown = ""

    def show_new(ids):
        """What ids (1, T) say, but for what is shown already, and for a character whose last bytes are to come."""
        nonlocal shown
        text = tokenizer.decode([token for token in ids[0].tolist() if token != tokenizer.eot])
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
