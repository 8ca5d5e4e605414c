"""Figures and tables measured on finished runs. Nothing is trained here.

    python analyze.py activations    XMoE's figures 1 and 6: positive activations by number and size of experts
    python analyze.py gamma          XMoE's figure 4: perplexity with less compute at test
    python analyze.py experts        XMoE's figure 5: experts per token during training
    python analyze.py tokens         which tokens get many experts: rare ones, or those whose next token is uncertain
    python analyze.py threshold      XMoE's figure 7: perplexity by threshold, in training and at test
    python analyze.py speed          XMoE's figure 8: time per batch by FLOPs
    python analyze.py umap           X-MoE's figures 2a and 2b: tokens as a router sees them
    python analyze.py gradient       X-MoE's equations 4 to 6: the gradient through the gate, which collapses states
    python analyze.py collapse       X-MoE's figures 2c and 3a: collapse (RC) and fluctuation (RF) during training
    python analyze.py consistency    X-MoE's figure 3b: expert loads of fine-tuning runs that differ only in their seed
    python analyze.py curve          XLM-E's figure 1: scores by training FLOPs
    python analyze.py flops          XLM-E's tables 3 and 4: parameters and FLOPs of the paper's sizes
    python analyze.py retrieval      XLM-E's table 5 and figure 3: sentence retrieval by layer
    python analyze.py alignment      XLM-E's table 6 and figure 4: word alignment by layer
    python analyze.py compare A B    two runs, seed by seed: the difference with its 95% interval
    python analyze.py play           an interactive page: how a trained model routes your sentence

They read the runs of the demos and tables in out/, or the run folders that you pass. A figure is written to NAME.png in
--out, its numbers to NAME.json. `python analyze.py NAME --help` explains a figure, how to read it, and its options.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import finetune_xtreme
import train_electra
import train_lm
import train_mlm
import train_mt
from analysis import compare, play, x_moe, xlm_e, xmoe
from analysis.shared import EvalOptions, FigureOptions
from engine.config import parse
from engine.device import clear_errors


def demos(*scripts) -> list[str]:
    """The folders of the scripts' trained demos."""
    folders = [Path(script.Config.out_dir, script.Config.preset) for script in scripts]
    trained = [str(folder) for folder in folders if folder.exists()]
    if not trained:
        raise ValueError(f"{folders[0]} does not exist: run python {scripts[0].__name__}.py, or pass another run")
    return trained


SIZES = {preset: train_electra.Config(**constants) for preset, constants in train_electra.PRESETS.items()}
SCRIPTS = {script.__name__: script for script in (train_lm, train_mlm, train_mt, train_electra, finetune_xtreme)}
ANALYSES = {  # analysis -> its options, then what it needs from the training scripts
    xmoe.activations: (EvalOptions, train_lm.evaluate),
    xmoe.gamma: (EvalOptions, train_lm.evaluate),
    xmoe.experts: (FigureOptions,),
    xmoe.tokens: (EvalOptions,),
    xmoe.threshold: (EvalOptions, train_lm.evaluate),
    xmoe.speed: (EvalOptions, train_lm.evaluate),
    x_moe.umap: (x_moe.Umap,),
    x_moe.gradient: (EvalOptions,),
    x_moe.collapse: (FigureOptions,),
    x_moe.consistency: (FigureOptions,),
    xlm_e.curve: (FigureOptions,),
    xlm_e.flops: (xlm_e.Flops, SIZES),
    xlm_e.retrieval: (xlm_e.Encoders, partial(demos, train_electra, train_mlm)),
    xlm_e.alignment: (xlm_e.Encoders, partial(demos, train_electra, train_mlm)),
    compare.compare: (compare.Compare, SCRIPTS),
    play.play: (play.Play, partial(demos, train_lm)),
}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__)
    analyses = {analysis.__name__: analysis for analysis in ANALYSES}
    with clear_errors():
        if name not in analyses:
            raise ValueError(f"{name!r} is not an analysis: python analyze.py {' | '.join(analyses)}")
        analysis = analyses[name]
        Options, *needs = ANALYSES[analysis]
        if issubclass(Options, FigureOptions):
            importlib.import_module("matplotlib")  # whose absence would show only at the end
        analysis(parse(Options(), argv, analysis.__doc__), *needs)


if __name__ == "__main__":
    main()
