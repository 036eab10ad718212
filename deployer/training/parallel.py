"""Processes that train together: who they are, how the model is shared, what they add up.

DDP copies the model into every process, FSDP2 (`fully_shard`) cuts parameters, gradients and optimizer state among
them. Both average gradients over processes; what a process contributes is scaled by the loop so that the average is
the gradient of the joined batch."""

from __future__ import annotations

import datetime
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from deployer.errors import MachineError, UsageError
from deployer.training.config import ParallelConfig, TrainConfig
from deployer.training.task import modules_of_classes

log = logging.getLogger(__name__)

#: path of the file that the processes of one machine meet in; set by `deployer train`, with the restart's number added
MEETING_FILE = "DEPLOYER_TRAIN_MEETING_FILE"


@dataclass(frozen=True)
class World:
    """This process among all of them. `device` is where its part of the model lies."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def add_up(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in float64."""
        if self.size == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together)
        return cast("list[float]", together.tolist())

    def barrier(self) -> None:
        if self.size > 1:
            self.add_up([0.0])  # unlike dist.barrier, no guess at a device

    def from_first(self, value: Any) -> Any:
        """What process 0 has, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


@contextmanager
def open_world(config: TrainConfig) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone. Raises MachineError or UsageError."""
    device_type = config.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_available():
        raise MachineError("device is cuda and no CUDA device answers; set device to cpu or auto", reason="no_gpu")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"{local_size} processes on this machine, and {torch.cuda.device_count()} GPUs; start one process a GPU"
            )
        torch.cuda.set_device(local_rank)
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    world = World(rank, size, local_rank, local_size, device)
    strategy = choose_strategy(config.parallel, size)
    if size == 1 and strategy == "none":
        yield world
        return
    opened = not dist.is_initialized()
    if opened:
        _meet(world, config.parallel.timeout_s)
    try:
        yield world
    finally:
        if opened:
            dist.destroy_process_group()


def _meet(world: World, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if world.size == 1 and "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()  # type: ignore[attr-defined, name-defined]
    elif MEETING_FILE in os.environ:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.FileStore(f"{os.environ[MEETING_FILE]}.{restart}", world.size)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend, timeout=timeout)
        return
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def choose_strategy(config: ParallelConfig, size: int) -> str:
    """`none`, `ddp` or `fsdp`. Raises UsageError where it cannot be."""
    if config.strategy == "auto":
        return "ddp" if size > 1 else "none"
    if config.strategy == "none" and size > 1:
        raise UsageError(f"parallel.strategy is none, and {size} processes were started; set it to ddp, fsdp or auto")
    if config.strategy == "fsdp" and config.shard == "none":
        log.warning("parallel.shard none: every process holds the whole model; that is ddp, and is done by it")
        return "ddp" if size > 1 else "none"
    if config.strategy == "ddp" and size == 1:
        log.warning("parallel.strategy ddp with one process: nothing to share, the plain model trains")
        return "none"
    if config.strategy == "fsdp" and size == 1:
        log.warning("parallel.strategy fsdp with one process: nothing is sharded; start more to save memory")
    return config.strategy


class Shared:
    """The model as the processes share it. `module` is what the loss is computed with, `plain` what it is made of."""

    def __init__(
        self, module: nn.Module, plain: nn.Module, strategy: str, world: World, *, casts: bool = False
    ) -> None:
        self.module, self.plain, self.strategy, self.world = module, plain, strategy, world
        #: the model computes in the run's precision by itself, without autocast
        self.casts = casts

    @property
    def evaluated(self) -> nn.Module:
        """What validation calls: without DDP's wrapper, which would wait for the other processes."""
        return self.plain

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients travel with the last of a window alone."""
        context: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not last:
            context = self.module.no_sync()
        elif isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)
        with context:
            yield

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.plain.parameters() if parameter.grad is not None]

    def scale_gradients(self, factor: float) -> None:
        if factor != 1.0 and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, factor)

    def clip(self, max_norm: float | None) -> float | None:
        """Scale gradients to the norm `max_norm` where they exceed it; the norm before, over the whole model on however
        many processes it lies. None where no limit is set."""
        if max_norm is None:
            return None
        parameters = [parameter for parameter in self.plain.parameters() if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
        if isinstance(total, DTensor):
            total = total.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return float(total)

    def unused_parameters(self) -> list[str]:
        """Names of parameters that the backward pass did not reach."""
        return [
            name
            for name, parameter in self.plain.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]


def share_model(model: nn.Module, config: TrainConfig, world: World, dtype: torch.dtype | None) -> Shared:
    """Put `model` on the processes, in place. Every process begins with the weights of the first.

    `dtype` is what FSDP computes in (its MixedPrecisionPolicy; gradients are reduced in fp32). Raises UsageError.
    """
    strategy = choose_strategy(config.parallel, world.size)
    parallel = config.parallel
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    if parallel.sync_batchnorm and any(isinstance(module, _BatchNorm) for module in model.modules()):
        if world.device.type == "cpu":
            raise UsageError("parallel.sync_batchnorm works on CUDA alone; remove it, or use larger batches a process")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if strategy == "ddp":
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.local_rank] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # it would overwrite the statistics of all with those of process 0
            gradient_as_bucket_view=True,
            find_unused_parameters=parallel.unused_parameters == "find",
            static_graph=parallel.static_graph,
        )
        return Shared(wrapped, model, strategy, world)
    if strategy == "fsdp":
        casts = dtype is not None and _casts(model, parallel)
        _shard(model, parallel, world, dtype if casts else None)
        return Shared(model, model, strategy, world, casts=casts)
    return Shared(model, model, strategy, world)


def _casts(model: nn.Module, parallel: ParallelConfig) -> bool:
    """Whether FSDP's own precision policy is used. Raises UsageError."""
    normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
    if parallel.cast_parameters == "auto":
        if normalises:
            log.warning("parallel.cast_parameters: the model has batch normalisation, so that autocast is used instead")
        return not normalises
    if parallel.cast_parameters and normalises:
        raise UsageError(
            "parallel.cast_parameters would cast the weights of batch normalisation and not its statistics; "
            "set it to false: autocast knows how to treat it"
        )
    return parallel.cast_parameters


def _shard(model: nn.Module, parallel: ParallelConfig, world: World, dtype: torch.dtype | None) -> None:
    blocks = modules_of_classes(model, parallel.wrap, "parallel.wrap")
    if not blocks:
        log.warning(
            "parallel.wrap names no classes: the whole model is gathered at once; name its blocks to gather one by one"
        )
    on_cuda = world.device.type == "cuda"
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=on_cuda) if parallel.cpu_offload else OffloadPolicy()
    mesh, reshard = _mesh(parallel, world), parallel.shard != "grad"

    def policy(root: bool) -> MixedPrecisionPolicy:
        if dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32 if root else None)

    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy(False), offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy(True), offload_policy=offload)
    sharded = [cast(FSDPModule, block) for block in blocks]
    for position, shard in enumerate(sharded):
        if parallel.prefetch > 1:
            shard.set_modules_to_forward_prefetch(sharded[position + 1 : position + 1 + parallel.prefetch])
            shard.set_modules_to_backward_prefetch(sharded[max(0, position - parallel.prefetch) : position][::-1])


def _mesh(parallel: ParallelConfig, world: World) -> DeviceMesh:
    if parallel.shard != "hybrid":
        return init_device_mesh(world.device.type, (world.size,))
    group = cast(int, parallel.shard_size)
    if group < 1 or world.size % group:
        raise UsageError(
            f"parallel.shard_size is {group} and {world.size} processes were started; a divisor of their "
            f"number is expected"
        )
    return init_device_mesh(world.device.type, (world.size // group, group), mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def join_batch_statistics(model: nn.Module, world: World) -> None:
    """Give every process the running statistics of all rows: the mean of the means, and the variance within processes
    plus that between their means (law of total variance)."""
    if world.size == 1:
        return
    for norm in model.modules():
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None or norm.running_var is None:
            continue
        moments = torch.stack([norm.running_mean, norm.running_var + norm.running_mean.square()]).double()
        dist.all_reduce(moments)
        mean, square = moments / world.size
        norm.running_mean.copy_(mean)
        norm.running_var.copy_((square - mean.square()).clamp_(min=0))


def meeting_file(folder: Path | None = None) -> str:
    """A path for MEETING_FILE, in a new private folder."""
    return str(Path(tempfile.mkdtemp(prefix="deployer-train-", dir=folder)) / "meeting")
