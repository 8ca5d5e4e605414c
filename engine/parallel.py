"""Experts on several processes (--expert_parallel), and weights and their state in pieces (--shard).

Both stand on torch.distributed, and are the same code on NCCL and on gloo. The processes form a mesh of W / N x N: the
N of a row, neighbours on a node, share the experts of one model out, E / N each; those of a column hold the same ones.
Every process routes its own micro-batch over all E experts, under that micro-batch's capacity, exactly as one process
alone would; only then its rows travel to the experts, and the experts' answers back.

A split model is for training. To evaluate it, and to save it in one file that any number of processes can read, `whole`
puts it together again.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def wrap(model: nn.Module, config, context) -> nn.Module:
    """Cuts a model as the config says -> what to call in training, its gradients averaged over all processes.

    To be called before the model gets an optimizer. Raises ValueError where the experts cannot be shared out.
    """
    N, device = getattr(config, "expert_parallel", 1), context.device.type
    if context.world > 1 and N > 1:
        share_experts(model, make_mesh(device, N), config.micro_tokens)
    if context.world > 1 and getattr(config, "shard", False):
        shard_weights(model, make_mesh(device, 1)["replica"], context)
    forward = torch.compile(model) if config.compile else model
    if context.world == 1 or isinstance(model, FSDPModule):
        return forward
    others = [name for name, p in forward.named_parameters() if hasattr(p, "sum_over")]
    others += [name for name, _ in forward.named_buffers()]  # Hash's table is the same everywhere
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, others)
    devices = [context.device] if device == "cuda" else None
    if devices and not config.compile:  # single layers alone are compiled, which must not be cut to overlap with DDP
        torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(forward, device_ids=devices)


def share_experts(model: nn.Module, mesh: DeviceMesh, micro_tokens: int):
    """Each process of a row of the mesh keeps its part of every layer's experts; those of `sum_over` keep the same."""
    N = mesh["expert"].size()
    for moe in model.moe_layers:
        E = moe.router.E
        if E % N:
            raise ValueError(f"expert_parallel = {N} does not divide the number of experts, {E}")
        R = moe.most_rows(micro_tokens, E // N)
        moe.exchange = Exchange(mesh["expert"], R)
        for p in [*moe.experts.parameters(), *moe.norms.parameters()]:
            p.device_mesh, p.placements = mesh["expert"], [Shard(0)]  # as a DTensor has them
            p.sum_over = mesh["replica"].get_group()
            p.data = cut(p, p.data).clone()


def shard_weights(model: nn.Module, mesh: DeviceMesh, context):
    """FSDP2. Routers stay whole: they are small, and the hypersphere's temperature is a scalar.

    Where products are in bf16 on CUDA, the weights of blocks are gathered in bf16 and their gradients summed in fp32.
    Embeddings travel in fp32, since what they give is the residual stream.
    """
    half = context.device.type == "cuda" and context.dtype == torch.bfloat16
    coarse = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for moe in model.moe_layers:
        for p in moe.router.parameters():
            p.sum_over = dist.group.WORLD
    alone = {p for p in model.parameters() if hasattr(p, "sum_over")}
    for module in [*model.parts, model]:
        policy = coarse if half and module is not model else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=alone)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nobody works in place on what a module returns


@functools.cache
def make_mesh(device: str, N: int) -> DeviceMesh:
    sizes = dist.get_world_size() // N, N
    return init_device_mesh(device, sizes, mesh_dim_names=("replica", "expert"))


class Exchange:
    """Takes rows to the processes that have their experts, and what the experts make of them back.

    All processes send each other R rows, the most that a micro-batch can have for the experts of one process
    (`MoE.most_rows`), so that nobody has to ask how many there are. What is not filled is 0, and no expert works on it.
    Without a capacity limit, as in X-MoE's layers, R is every token, N times what travels at need: where the wire is
    slow, give --capacity_factor. Exchanging counts first would spare it, but each layer would wait for the host, and so
    for the slowest process.
    """

    def __init__(self, mesh: DeviceMesh, R: int):
        self.mesh, self.R = mesh, R

    def __call__(self, work, x: Tensor, rows) -> Tensor:
        """x (rows, D), each for its expert -> work(x, rows), (rows, D), done where the experts are.

        rows: model.Rows, of all E experts here and of a process's own there.
        """
        N, R = self.mesh.size(), self.R
        wanted = rows.counts.view(N, -1)  # (N, E / N) of each process: the rows for its experts
        slot = self.slots(rows, wanted)  # (rows,)
        sent = self.to_all(in_slots(x, slot, N * R))  # (N * R, D), R from each process
        theirs = self.to_all(wanted.flatten()).view(N, -1)  # of each process: the rows for the experts here
        mine = self.received(theirs, rows)
        y = work(sent.index_select(0, mine.token), mine)
        y = self.to_all(in_slots(y, mine.token, N * R))
        return y.index_select(0, slot.clamp(max=N * R - 1))  # a spare row has gate 0, whatever it reads

    def to_all(self, x: Tensor) -> Tensor:
        """The n-th of N equal parts of x goes to the n-th process; -> what they sent here, in their order."""
        return all_to_all_single_autograd(x, None, None, self.mesh.get_group())

    def slots(self, rows, wanted: Tensor) -> Tensor:
        """Where each row is in the buffer of N * R: with its process, in the order of experts. Spare ones: after it.

        wanted: (N, E / N) rows of each process's experts.
        """
        (N, own), R = wanted.shape, self.R
        total = wanted.sum(dim=1)
        first = total.cumsum(0) - total  # the first row of each process
        process = rows.expert // own
        row = torch.arange(len(process), device=process.device)
        slot = process * R + row - first[process]
        if rows.used is None:
            return slot
        return slot.where(rows.used.squeeze(1), N * R)

    def received(self, counts: Tensor, rows):
        """counts (N, E / N), rows that each process sent for each expert here -> those rows, expert by expert.

        `token` is the place in the N * R rows that came. All of them are listed, so that nobody asks how many there
        are; those that are empty come last.
        """
        (N, own), R = counts.shape, self.R
        place = torch.arange(N * R, device=counts.device)
        lane = (place % R).view(N, R)
        expert = torch.searchsorted(counts.cumsum(dim=1), lane, right=True).flatten()  # (N * R,); E / N: empty
        order = expert.argsort(stable=True)
        return rows._replace(
            token=order,
            expert=expert[order].clamp(max=own - 1),
            gate=torch.ones_like(order).unsqueeze(1),
            counts=counts.sum(dim=0),
            used=(place < counts.sum()).unsqueeze(1),
        )


def in_slots(x: Tensor, slot: Tensor, size: int) -> Tensor:
    """(size, D) with x (rows, D) in its slots and 0 elsewhere; what has the slot `size` is left out."""
    empty = x.new_zeros(size + 1, x.shape[1])
    return empty.index_copy(0, slot, x)[:-1]


def clip_grad_norm_(model: nn.Module, limit: float):
    """torch's, over all pieces of a model, when a step's last backward pass is done; limit 0 does not clip.

    First come the gradients that neither DDP nor FSDP sees to: an expert's has come together from its own row of the
    mesh in the exchange, and here the other rows are added.
    """
    waiting = []
    parameters = [p for p in model.parameters() if p.grad is not None]
    for p in parameters:
        if hasattr(p, "sum_over"):
            p.grad /= dist.get_world_size()
            waiting.append(dist.all_reduce(p.grad, group=p.sum_over, async_op=True))
    for handle in waiting:
        handle.wait()
    if not limit:
        return
    if not any(map(mesh_of, parameters)):
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    squares = {}  # mesh over which pieces lie (None: everybody has the whole) -> of the gradients that are here
    for p in parameters:
        square = local(p.grad).square().sum()
        squares[mesh_of(p)] = squares.get(mesh_of(p), 0.0) + square
    for mesh, square in squares.items():
        if mesh is not None:
            dist.all_reduce(square, group=mesh.get_group())
    norm = sum(squares.values()).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        local(p.grad).mul_(scale)


def mesh_of(p: Tensor) -> DeviceMesh | None:
    """The processes over which a parameter lies in pieces; None: here is all of it."""
    return getattr(p, "device_mesh", None)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def put_together(p: Tensor, x: Tensor) -> Tensor:
    """x, which is cut as the parameter p is (itself, or a moment of Adam), as a whole, on every process."""
    if mesh_of(p) is None:
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, p.device_mesh, p.placements)
    return x.full_tensor()


def cut(p: Tensor, x: Tensor) -> Tensor:
    """The opposite: this process's piece of a whole x."""
    if mesh_of(p) is None:
        return x
    x = distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
    return x if isinstance(p, DTensor) else x.to_local()


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """The model itself if it is not split, or else a copy with all its weights: all processes must ask together."""
    if not any(map(mesh_of, model.parameters())):
        return model
    kind = type(model)
    if isinstance(model, FSDPModule):  # fully_shard has put a class of its own before it
        kind = kind.__mro__[2]
    first = next(model.parameters())
    copy = kind(model.config, model.vocab_size).to(first.device, first.dtype)
    parts = model.state_dict(keep_vars=True)
    for name, x in copy.state_dict().items():
        p = parts[name]
        x.copy_(put_together(p, p.detach()))
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
            if mesh_of(p) is not None and x.dim() > 0:  # Adam's count of steps is whole everywhere
                x = put_together(p, x)
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
