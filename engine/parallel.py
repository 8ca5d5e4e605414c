"""A model on several processes: whole on each (DDP), or its weights and Adam's state in pieces (--shard, FSDP2).

Both stand on torch.distributed, and are the same code on NCCL and on gloo. A split model is for training. To evaluate
it, and to save it in one file that any number of processes can read, `whole` puts it together again.
"""

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

WHOLE = StateDictOptions(full_state_dict=True)  # states have whole tensors, whatever lies in pieces


def wrap(model: nn.Module, config, context) -> nn.Module:
    """Cuts a model as the config says -> what to call in training, its gradients averaged over all processes.

    To be called before the model gets an optimizer.
    """
    device = context.device.type
    if context.world > 1 and getattr(config, "shard", False):
        shard_weights(model, context)
    fast = device == "cuda" and context.dtype == torch.bfloat16
    forward = compiled(model) if config.compile or (config.compile is None and fast) else model
    if context.world == 1 or isinstance(model, FSDPModule):
        return forward
    buffers = [name for name, _ in forward.named_buffers()]  # Hash's table is the same everywhere
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, buffers)
    return DistributedDataParallel(forward, device_ids=[context.device] if device == "cuda" else None)


def compiled(model: nn.Module) -> nn.Module:
    """By torch.compile. Backward products have the types of the forward pass: autocast's would round a router's."""
    torch.compiler.reset()  # models of before count, and of more than eight torch gives up
    functorch_config.backward_pass_autocast = "off"
    functorch_config.ban_recompute_used_far_apart = False  # the backward pass masks spare rows anew: 3% less is moved
    return torch.compile(model)


def shard_weights(model: nn.Module, context):
    """FSDP2. Routers stay whole: they are small, and the hypersphere's temperature is a scalar.

    Where products are in bf16 on CUDA, the weights of blocks are gathered in bf16 and their gradients summed in fp32.
    Embeddings travel in fp32, since what they give is the residual stream.
    """
    mesh = init_device_mesh(context.device.type, (context.world,))
    half = context.device.type == "cuda" and context.dtype == torch.bfloat16
    coarse = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    routers = {p for moe in model.moe_layers for p in moe.router.parameters()}
    for module in [*model.parts, model]:
        policy = coarse if half and module is not model else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=routers)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nobody works in place on what a module returns


def clip_grad_norm_(model: nn.Module, limit: float):
    """torch's, when a step's last backward pass is done; limit 0 does not clip. Of a split model, over all pieces."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not isinstance(model, FSDPModule):
        if limit:
            nn.utils.clip_grad_norm_(parameters, limit)
        return
    pieces = [p for p in parameters if isinstance(p, DTensor)]
    routers = [p for p in parameters if not isinstance(p, DTensor)]
    for p in routers:  # to whose gradients FSDP does not see
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
    if limit:
        of_pieces, of_routers = (get_total_norm([p.grad for p in some]) for some in (pieces, routers))
        norm = torch.hypot(of_pieces.full_tensor(), of_routers)
        for some in (pieces, routers):
            clip_grads_with_norm_(some, limit, norm)


def whole(model: nn.Module) -> nn.Module:
    """The model itself if it is not split, or else a copy with all its weights: all processes must ask together."""
    if not isinstance(model, FSDPModule):
        return model
    kind = type(model).__mro__[2]  # fully_shard has put a class of its own before it
    first = next(model.parameters())
    copy = kind(model.config, model.vocab_size).to(first.device, first.dtype)
    copy.load_state_dict(get_model_state_dict(model, options=WHOLE))
    return copy


def load_model(model: nn.Module, saved: dict[str, Tensor]):
    """From the state of `whole(model)`, on any number of processes. Raises ValueError where it is of another model."""
    ours, theirs = ({name: tuple(x.shape) for name, x in state.items()} for state in (model.state_dict(), saved))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise ValueError(f"of another model: {name} has the shape {theirs.get(name)}, not {ours.get(name)}")
    set_model_state_dict(model, dict(saved), options=WHOLE)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict:
    """Its state by the parameters' names, whole, on rank 0: it does not tell on how many processes it was."""
    return get_optimizer_state_dict(model, optimizer, options=replace(WHOLE, cpu_offload=isinstance(model, FSDPModule)))


def load_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict):
    """From what `optimizer_state` gave, on any number of processes. Raises RuntimeError where moments are missing."""
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]  # as the config has them now
    set_optimizer_state_dict(model, optimizer, {"state": saved["state"], "param_groups": groups}, options=WHOLE)
