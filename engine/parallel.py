"""Wraps a model for training: torch.compile where it pays, and DDP over all processes."""

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel


def wrap(model: nn.Module, config, context) -> nn.Module:
    """Returns what to call in place of the model. By default, --compile is true for bfloat16 on a GPU."""
    if getattr(config, "recompute", False):  # fine-tuning has no such constant
        model.recompute_layers()
    device = context.device.type
    fast = device == "cuda" and context.dtype == torch.bfloat16
    forward = model
    if config.compile or (config.compile is None and fast):
        torch.compiler.reset()  # otherwise torch stops compiling after eight models
        forward = compiled(model)
    if context.world == 1:
        return forward
    buffers = [name for name, _ in forward.named_buffers()]  # the table of Hash routing is the same on all processes
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, buffers)
    gpu = [context.device] if device == "cuda" else None
    return DistributedDataParallel(forward, device_ids=gpu, gradient_as_bucket_view=True)


def compiled(model: nn.Module) -> nn.Module:
    """Calls torch.compile, with settings that suit these models."""
    functorch_config.backward_pass_autocast = "off"  # autocast would round the gradients of fp32 routers to bf16
    functorch_config.ban_recompute_used_far_apart = False  # recomputing the mask of spare rows moves 3% less memory
    # Otherwise dropout that is recomputed has generators of its own, which seed_all does not reset.
    functorch_config.graphsafe_rng_functionalization = False
    return torch.compile(model)
