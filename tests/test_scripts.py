"""What all training scripts have in common: a step, broken weights, and what a user can get wrong.

What they share is tested in test_run.py, what two processes do in test_parallel.py.
"""

import copy
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, Script, only_run, saved
from test_edits import commands, electra_corpora, encoders, mt_corpus, source

import finetune_xtreme
import train_electra
import train_lm
import train_mlm
import train_mt
from data.xtreme_rows import UNKNOWN
from engine.device import seed_all
from engine.run import Run
from model import SparseModel

__all__ = ["commands", "electra_corpora", "encoders", "mt_corpus", "source"]  # fixtures
MODULES = train_lm, train_mlm, train_electra, train_mt, finetune_xtreme
SCRIPTS = {module.__name__: Script(module) for module in MODULES}


@pytest.fixture
def options(commands, tmp_path) -> dict[str, dict]:
    """A command of each script."""
    return {name: given | {"out_dir": tmp_path / "out"} for name, given in commands.items()}


# The papers' constants: X-MoE's appendices A and B, XLM-E's tables 8 to 10, XMoE 4.2
PRE_TRAINING = dict(steps=125_000, batch_tokens=1 << 20, learning_rate=5e-4, warmup=10_000 / 125_000)
PRE_TRAINING |= dict(eps=1e-6, beta2=0.98, weight_decay=0.01, dropout=0.1, mask_share=0.15)
BASE = dict(n_layer=12, n_embd=768, ffn_size=3072, n_head=12)
XLM_E = PRE_TRAINING | dict(grad_clip=2.0, lambda_disc=50.0)
XMOE = dict(threshold=0.9, moe_every=2, capacity=1.0, n_layer=12)
PAPERS = [
    (train_mlm, "base", PRE_TRAINING | BASE | dict(experts=32, expert_layers=3, balance_coef=0.01)),
    (train_electra, "base", XLM_E | BASE | dict(generator_layers=4)),
    (train_electra, "large", XLM_E | dict(n_layer=24, n_embd=1024, ffn_size=4096, n_head=16, generator_layers=6)),
    (train_electra, "xl", XLM_E | dict(n_layer=48, n_embd=1536, ffn_size=6144, n_head=24, generator_layers=8)),
    (train_lm, "openwebtext-323M", XMOE | dict(steps=60_000, learning_rate=4.5e-4)),
    (train_lm, "wikitext103-556M", XMOE | dict(steps=4_000, learning_rate=4.5e-4)),
    (train_mt, "wmt23", XMOE | dict(decoder_layers=6)),
]


@pytest.mark.parametrize("module, preset, paper", PAPERS)
def test_presets_have_the_papers_constants(module, preset, paper):
    config = vars(module.Config(**module.PRESETS[preset]))
    assert {name: config[name] for name in paper} == paper


# ---------------------------------------------------------------------------------------------------------------------
# A step

EXACT = dict(dtype="float64", learning_rate=1e-3, balance_coef=0.5, grad_clip=0.25)
X_MOE = dict(router="hypersphere", dropout=0.1)
EXPERTS = dict(experts=4, expert_size=16, moe_after=(1,))
LINE = [0.5, 1.0, 1.0, 0.5]  # two steps up, two down
STEPS = {  # options, and the learning rates of four steps as shares of the peak
    "train_lm": (X_MOE | dict(warmup=0.25, min_learning_rate=1e-4), [1.0, 1.0, 0.775, 0.325]),
    "train_mlm": (X_MOE | dict(warmup=0.5, sampling_exponent=0.0), LINE),
    "train_electra": (X_MOE | dict(warmup=0.5, lambda_disc=7.0, **EXPERTS), LINE),
    "train_mt": (X_MOE | dict(warmup_steps=2), [0.5, 1.0, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
    "finetune_xtreme": (dict(warmup=0.5, task="pos", train_examples=16, epochs=2), LINE),
}
INPUTS = {  # batch -> inputs of the model, targets
    "train_lm": lambda batch: (batch[:1], batch[1].flatten()),
    "train_mlm": lambda batch: ((batch.ids, batch.masked, None, batch.nonpad), batch.targets),
    "train_electra": lambda batch: ((batch.ids, batch.masked, batch.targets, batch.nonpad), batch.targets),
    "train_mt": lambda batch: (batch[:-1], batch.labels),
    "finetune_xtreme": lambda batch: ((batch.ids, batch.nonpad, batch.words), batch.targets),
}


def parts(name: str, model, batch) -> list[tuple]:
    """-> (sum of a loss, number of terms) of one micro-batch. The last is the balance loss, with its weight."""
    inputs, targets = INPUTS[name](batch)
    predict = model.predict if name == "train_electra" else model
    logits, balance, *judged = predict(*inputs)
    smoothing = 0.1 if name == "train_mt" else 0.0
    loss = F.cross_entropy(logits.flatten(0, -2), targets, reduction="sum", label_smoothing=smoothing)
    found = [(loss, int((targets != UNKNOWN).sum()))]
    if judged:
        disc_logits, replaced = judged
        loss = F.binary_cross_entropy_with_logits(disc_logits, replaced.double(), reduction="sum")
        found.append((7.0 * loss, len(disc_logits)))
    count = found[-1][1]
    return [*found, (count * balance, count)]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_learning_rate_and_the_gradient_of_mean_losses(name, options, tmp_path, monkeypatch):
    """Checks the gradient before clipping and Adam, which would hide a wrong scale."""
    given, shares = STEPS[name]
    options = options[name] | EXACT | given
    runs, gradients, rates, shown = [], [], [], []
    if name == "finetune_xtreme":
        options["source"] = shutil.copytree(options["source"], tmp_path / "source")
        file = options["source"] / "udpos" / "train-en.tsv"
        file.write_text(re.sub(r"(\n\w+)\t\w+(\n\w+\t)", r"\1\tQ\2", file.read_text()))  # an unknown tag

    def keep(run, config, presets, context, *data, old=Run.__init__, **more):
        old(run, config, presets, context, *data, **more)
        run.data = data

    def resume(run, model, optimizer, *rest, old=Run.resume):
        old(run, model, optimizer, *rest)
        run.first = copy.deepcopy(model)
        runs.append(run)

    def clip(model, limit):
        assert limit == 0.25
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        rates.append([group["lr"] / group["times"] for group in runs[0].optimizer.param_groups])
        shown.append(runs[0].loss_sum.item())

    monkeypatch.setattr(Run, "__init__", keep)
    monkeypatch.setattr(Run, "resume", resume)
    monkeypatch.setattr(f"{name}.clip_gradients", clip)
    SCRIPTS[name].run(options, monkeypatch)
    for share, found in zip(shares, rates, strict=True):
        assert found == pytest.approx([1e-3 * share] * len(found))
    model, where = runs[0].first.train(), () if name == "finetune_xtreme" else ("train",)
    if getattr(runs[0].config, "frequency_bias", False):
        bias = getattr(model, "generator", model).bias.data
        torch.testing.assert_close(bias, runs[0].data[0].log_frequencies(), check_dtype=False)
    sums = []  # by micro-batch and corpus
    for micro in range(2):
        seed_all(0, 1, micro)
        sums.append([parts(name, model, data.batch(*where, 0, micro)) for data in runs[0].data])
    means, uneven = [], False
    for corpus in zip(*sums):
        for pieces in zip(*corpus):
            loss, counts = zip(*pieces)
            means.append(sum(loss) / sum(counts))
            uneven |= counts[0] != counts[1]
    assert uneven == (name != "train_lm")
    sum(means).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients[0], expected, rtol=1e-12, atol=1e-12)
    told = means if name == "train_electra" else means[:-1]  # the others show the loss without the balance loss
    assert shown[0] == pytest.approx(sum(told).item())
    if "router" in given:  # X-MoE 3.1: after each step the embeddings are back on their sphere
        weights = saved(options)["model"]
        norms = torch.cat([x.norm(dim=1) for key, x in weights.items() if key.endswith("router.experts")])
        torch.testing.assert_close(norms, torch.full_like(norms, 0.1))


# ---------------------------------------------------------------------------------------------------------------------
# What can go wrong

BROKEN = [("train_mlm", "ln_h.weight"), ("train_electra", "encoder.ln_e.weight"), ("train_mt", "ln_d.weight")]
BROKEN += [("train_electra", "generator.ln_h.weight"), ("finetune_xtreme", "encoder.ln_e.weight")]


@pytest.mark.parametrize("name, broken", BROKEN)
def test_weights_broken_by_the_last_update_are_not_saved(name, broken, options, monkeypatch, capsys):
    """Every training loss was finite: only the evaluation shows it. And broken weights translate nothing."""
    options, updates = options[name], []
    if name == "finetune_xtreme":
        options |= {"frozen": False, "train_examples": 16, "epochs": 2}

    def after_step(model, sum_over_processes):
        updates.append(1)
        if len(updates) == 4:
            model.get_parameter(broken).data.fill_(math.inf)
            monkeypatch.setattr(train_mt, "score_split", None)

    monkeypatch.setattr(SparseModel, "after_step", after_step)
    assert "not finite at step 4" in SCRIPTS[name].refused(options, monkeypatch, capsys)
    assert saved(options)["step"] == 3
    assert not (only_run(options["out_dir"]) / "result.json").exists()


BIAS = {"relative_bias": False, "rel_bias_lr": 2.0}
XLM = train_electra.XLM | {"generator_layers": 4}  # its default: nothing reads it
BAD = [  # script, options, error message
    ("train_mlm", BIAS, "--router hypersphere, --relative_bias False: leave"),
    ("train_mlm", {"init_from": ROOT / "tests"}, "is neither the folder of a run nor of a model"),
    ("train_electra", XLM | {"lambda_disc": 2.0}, "--lambda_disc is not read with --router dense, --objective mlm"),
    ("train_electra", {"objective": "mlm"}, "--generator_layers is not read"),
    ("train_electra", BIAS, "objective rtd, --relative_bias False: leave"),
    ("train_electra", {"pairs": "opus"}, "there is no opus"),
    ("train_mt", {"target": "fr"}, "pairs without the language 'fr'"),
    ("train_mt", {"table": 3, "moe_after": "1"}, "not with moe_after, nor with preset wmt10"),
    ("train_mt", {"model": "out/train_mt/multi30k"}, "--model is not read with --router threshold"),
    ("train_mt", {"table": 4, "decoder_moe": False}, "--decoder_moe is not read"),
    ("train_mt", {"experts": 4}, "--experts is not read with --router threshold"),
    ("train_mt", {"moe_after": "2", "split": 2}, "--split is not read with"),
    ("finetune_xtreme", {"model": "out/train_mlm/x"}, "out/train_mlm/x does not exist: train it first"),
    ("finetune_xtreme", {"source": "nowhere"}, "nowhere holds no English training examples of xnli"),
    ("finetune_xtreme", {"source": "LICENSE"}, "LICENSE holds no English training examples of xnli"),
    ("finetune_xtreme", {"table": "9"}, "table must be one of 1, 3, 5, 6, 7, xlme1, xlme2, xlme7, not 9"),
    ("finetune_xtreme", {"encoders": "small"}, "--encoders is not read with --task xnli"),
    ("finetune_xtreme", {"task": "tags"}, "--source is not read with --task tags"),
    ("finetune_xtreme", {"block_size": 7}, "block_size must be between 8"),
]


@pytest.mark.parametrize("name, given, message", BAD, ids=str)
def test_bad_input_is_one_clear_line(name, given, message, options, monkeypatch, capsys):
    assert message in SCRIPTS[name].refused(options[name] | given, monkeypatch, capsys)
    assert not [*options[name]["out_dir"].glob("*")]
