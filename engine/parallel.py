"""Wraps a model for training: torch.compile where it pays, and DDP over all processes."""

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel


def wrap(model: nn.Module, config, context) -> nn.Module:
    """Returns what to call in place of the model."""
    if getattr(config, "recompute", False):  # fine-tuning has no such constant
        model.recompute_layers()
    forward = model
    if compiles(config, context):
        torch.compiler.reset()  # otherwise torch stops compiling after eight models
        forward = Compiled(model)
    if context.world == 1:
        return forward
    buffers = [name for name, _ in forward.named_buffers()]  # the table of Hash routing is the same on all processes
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, buffers)
    gpu = [context.device] if context.device.type == "cuda" else None
    return DistributedDataParallel(forward, device_ids=gpu, gradient_as_bucket_view=True)


def compiles(config, context) -> bool:
    """Whether to compile the model: `--compile`, or by default in bfloat16 on a GPU."""
    fast = context.device.type == "cuda" and context.dtype == torch.bfloat16
    return fast if config.compile is None else config.compile


class Compiled(nn.Module):
    """A model under torch.compile, with settings that suit these models."""

    def __init__(self, model: nn.Module):
        super().__init__()
        functorch_config.backward_pass_autocast = "off"  # autocast would round the gradients of fp32 routers to bf16
        functorch_config.ban_recompute_used_far_apart = False  # recomputing the mask of spare rows moves 3% less memory
        # Otherwise, dropout that is recomputed has generators of its own, which seed_all does not reach.
        functorch_config.graphsafe_rng_functionalization = False
        self.compiled = torch.compile(model)

    def forward(self, *inputs):
        for x in inputs:
            if x is not None and x.dim() == 1:  # flat indices and targets: their number varies
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return self.compiled(*inputs)
