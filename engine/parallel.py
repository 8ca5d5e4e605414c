"""A model as training calls it: compiled where that pays, and the same on all processes, whose gradients are averaged.

DDP stands on torch.distributed, and is the same code on NCCL and on gloo.
"""

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel


def wrap(model: nn.Module, config, context) -> nn.Module:
    """-> what to call in place of the model. --compile decides, or else whether products are in bfloat16 on a GPU."""
    if getattr(config, "recompute", False):  # fine-tuning has no such constant
        model.recompute_layers()
    device = context.device.type
    fast = device == "cuda" and context.dtype == torch.bfloat16
    forward = model
    if config.compile or (config.compile is None and fast):
        torch.compiler.reset()  # earlier models count, and after eight torch gives up
        forward = compiled(model)
    if context.world == 1:
        return forward
    buffers = [name for name, _ in forward.named_buffers()]  # Hash's table is the same everywhere
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, buffers)
    return DistributedDataParallel(forward, device_ids=[context.device] if device == "cuda" else None)


def compiled(model: nn.Module) -> nn.Module:
    """By torch.compile. Backward products have the types of the forward pass: autocast's would round a router's."""
    functorch_config.backward_pass_autocast = "off"
    functorch_config.ban_recompute_used_far_apart = False  # the backward pass masks spare rows anew: 3% less is moved
    return torch.compile(model)
