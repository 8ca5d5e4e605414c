"""A model on several processes: whole on each (DDP), or its weights and Adam's state in pieces (--shard, FSDP2).

Both stand on torch.distributed, and are the same code on NCCL and on gloo. A split model is for training. To evaluate
it, and to save it in one file that any number of processes can read, `whole` puts it together again.
"""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


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
        norms = [whole_tensor(get_total_norm([p.grad for p in some])) for some in (pieces, routers)]
        norm = torch.hypot(*norms)
        for some in (pieces, routers):
            clip_grads_with_norm_(some, limit, norm)


def whole_tensor(x: Tensor) -> Tensor:
    """What lies on all processes in pieces, on each of them; it is itself where it is no such tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def cut(p: Tensor, x: Tensor) -> Tensor:
    """x, a whole, cut as the parameter p is."""
    if not isinstance(p, DTensor):
        return x
    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """The model itself if it is not split, or else a copy with all its weights: all processes must ask together."""
    if not isinstance(model, FSDPModule):
        return model
    kind = type(model).__mro__[2]  # fully_shard has put a class of its own before it
    first = next(model.parameters())
    copy = kind(model.config, model.vocab_size).to(first.device, first.dtype)
    parts = model.state_dict()
    for name, x in copy.state_dict().items():
        x.copy_(whole_tensor(parts[name]))
    return copy


def saved_piece(p: Tensor, name: str, x: Tensor) -> Tensor:
    """This process's piece of what was saved for a parameter. Raises ValueError where it is of another shape."""
    piece = cut(p, x)
    if piece.shape != p.shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}")
    return piece


@torch.no_grad()
def load_model(model: nn.Module, saved: dict[str, Tensor]):
    """From the state of `whole(model)`, on any number of processes. Raises ValueError where it is of another model."""
    state = model.state_dict(keep_vars=True)
    if state.keys() != saved.keys():
        raise ValueError(f"the checkpoint is of another model: {min(state.keys() ^ saved.keys())} is in one alone")
    for name, p in state.items():
        p.copy_(saved_piece(p, name, saved[name]))


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict:
    """Its state by the parameters' names, whole, on rank 0: it does not tell on how many processes it was."""
    names = {p: name for name, p in model.named_parameters()}
    state = {}
    for p, moments in optimizer.state.items():
        state[names[p]] = own = dict(moments)
        for key, x in moments.items():
            if isinstance(x, DTensor):
                x = x.full_tensor()
                own[key] = x.cpu() if dist.get_rank() == 0 else None
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def load_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict):
    """From what `optimizer_state` gave, on any number of processes. Raises ValueError where moments are missing."""
    names = {p: name for name, p in model.named_parameters()}
    state, groups = {}, optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        name = names[p]
        moments = saved["state"].get(name, {})
        if not moments.keys() >= {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"the optimizer's state of {name} is missing")
        state[i] = own = dict(moments)
        for key in own.keys() - {"step"}:
            own[key] = saved_piece(p, name, moments[key])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
