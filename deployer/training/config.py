"""The configuration of a training run: a YAML file or keyword arguments, read strictly, checked as a whole.

An unknown key, an impossible combination or a size that cannot be is an error before anything is built. What two
settings mean together is decided here and nowhere else."""

from __future__ import annotations

import logging
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from deployer.errors import UsageError, nearest

log = logging.getLogger(__name__)

#: FSDP1's sharding strategies → the `shard` of FSDP2 that does the same
FSDP1_NAMES = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad", "HYBRID_SHARD": "hybrid", "NO_SHARD": "none"}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the configuration."""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW or SGD; a task's own `optimizer` method goes before it. `implementation` auto is torch's own choice."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    implementation: Literal["auto", "foreach", "fused", "single"] = "auto"


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """Learning rate over optimizer steps: linear warm-up, then constant, or down to `final_ratio` of the peak."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_ratio: float = 0.0


class ParallelConfig(Section, frozen=True, kw_only=True):
    """How processes share the work.

    `strategy` auto is none for one process and ddp for several. `wrap` names the classes of modules that FSDP shards
    one by one (each is gathered, used and freed by itself); `shard` is full (ZeRO-3), grad (ZeRO-2: parameters stay
    gathered between forward and backward), hybrid (sharded among `shard_size` processes, replicated across those
    groups), none. `prefetch` is how many blocks ahead are gathered.
    `cast_parameters`: FSDP gathers parameters in the run's precision and computes in it (MixedPrecisionPolicy), in
    place of autocast over fp32 parameters; auto does so where the model has no batch normalisation, whose statistics
    stay in fp32.
    """

    strategy: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    wrap: tuple[str, ...] = ()
    shard: str = "full"
    shard_size: int | None = None
    prefetch: int = 1
    cpu_offload: bool = False
    cast_parameters: bool | Literal["auto"] = "auto"
    unused_parameters: Literal["error", "find"] = "error"
    static_graph: bool = False
    sync_batchnorm: bool = False
    timeout_s: float = 600.0


class MemoryConfig(Section, frozen=True, kw_only=True):
    """Less memory for more time. `checkpoint` names the classes of modules whose activations are computed again in the
    backward pass, `checkpoint_every` takes every n-th of them, `checkpoint_keep` names operators whose results are kept
    (`mm`, `addmm`, `convolution`, `_scaled_dot_product_flash_attention`, …). `offload` keeps saved activations in
    main memory (CUDA). `budget` is the share of activations that torch.compile may keep."""

    checkpoint: tuple[str, ...] = ()
    checkpoint_every: int = 1
    checkpoint_keep: tuple[str, ...] = ()
    offload: bool = False
    budget: float | None = None


class CompileConfig(Section, frozen=True, kw_only=True):
    """torch.compile of the modules of the classes `blocks`, or of the whole model where none is named."""

    enabled: bool = False
    blocks: tuple[str, ...] = ()
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"


class DataConfig(Section, frozen=True, kw_only=True):
    """DataLoader settings; `workers` auto is chosen from the machine (`deployer train --tune-data` measures).

    `seed_items`: every item is read under a random state of its own, which follows from seed, epoch and index alone, so
    that augmentation is the same with any number of workers and processes, and after a resume.
    """

    workers: int | Literal["auto"] = "auto"
    prefetch_factor: int | None = None
    pin_memory: bool | Literal["auto"] = "auto"
    persistent_workers: bool | None = None
    seed_items: bool = True


class SaveConfig(Section, frozen=True, kw_only=True):
    """When the run is saved: every so many optimizer steps, at the end of every epoch where `every_steps` is None,
    and at the end. `keep` last ones stay, and the best by `best` (`accuracy:max`, `loss:min`; a validation
    figure)."""

    every_steps: int | None = None
    keep: int = 2
    best: str | None = "loss:min"
    background: bool = True


class ExportCheckConfig(Section, frozen=True, kw_only=True):
    """Formats that the untrained model must pass the gate in before step 0."""

    formats: tuple[str, ...] = ()
    timeout_s: float = 600.0


class QatConfig(Section, frozen=True, kw_only=True):
    """Quantization-aware training: the forward pass sees INT8 rounding from step `start_step` on."""

    enabled: bool = False
    start_step: int = 0


class TrainConfig(Section, frozen=True, kw_only=True):
    """A whole run.

    `batch_size` is the number of samples of one forward pass over all processes together, each taking its share;
    `accumulate` the number of those in one optimizer step. So a step sees `batch_size × accumulate` samples whatever
    the number of processes, and a run can go on with another number of them. Validation follows each epoch, and every
    `validate_every_steps` steps."""

    task: str = ""
    args: dict[str, Any] = {}
    output: str = "runs/train"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    epochs: int = 1
    max_steps: int | None = None
    validate_every_steps: int | None = None
    batch_size: int = 32
    accumulate: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool = False
    loss_scale: float | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    deterministic: bool = True
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    compile: CompileConfig = CompileConfig()
    data: DataConfig = DataConfig()
    save: SaveConfig = SaveConfig()
    export_check: ExportCheckConfig = ExportCheckConfig()
    qat: QatConfig = QatConfig()

    def mathematics(self) -> dict[str, Any]:
        """What a resumed run must share with the run before it: all that decides which numbers are computed, and
        nothing that only decides where, how fast or how long."""
        whole = msgspec.to_builtins(self)
        free = {
            *("task", "output", "device", "epochs", "max_steps", "validate_every_steps", "deterministic"),
            *("parallel", "memory", "compile", "data", "save", "export_check"),
        }
        return {key: value for key, value in whole.items() if key not in free} | {"seed_items": self.data.seed_items}


def read_config(path: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Parse a YAML file and lay `changes` (dotted keys → values) over it. A relative task file starts at the file's
    folder.

    Raises UsageError naming the file, the place and the nearest right key.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"no training configuration '{path}'; give a YAML file with at least `task: task.py:Name`"
        ) from error
    except IsADirectoryError as error:
        raise UsageError(f"'{path}' is a folder; give the YAML file of the run") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"'{path}' holds a {type(data).__name__}; a mapping of keys is expected")
    for key, value in (changes or {}).items():
        _put(data, key, value)
    config = make_config(data, str(path))
    if not config.task:
        raise UsageError(f"'{path}' names no task; add `task: task.py:Name`")
    source = config.task.rpartition(":")[0]
    if source.endswith(".py"):
        config = msgspec.structs.replace(config, task=f"{path.parent / config.task}")
    return config


def parse_changes(texts: typing.Iterable[str]) -> dict[str, Any]:
    """`optimizer.lr=0.1` as dotted keys and YAML values. Raises UsageError."""
    changes = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(f"'{text}' is no KEY=VALUE such as optimizer.lr=0.001")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"the value of '{text}' is not YAML: {error}") from error
    return changes


def make_config(data: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
    """A checked configuration of plain values. Raises UsageError."""
    _check_keys(data, TrainConfig, where)
    try:
        config = msgspec.convert(dict(data), TrainConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error
    return check_config(config)


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parts, last = dotted.split(".")
    for part in parts:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise UsageError(f"'{dotted}': '{part}' holds no keys")
    data[last] = value


def _check_keys(data: Mapping[str, Any], kind: type[Section], where: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in kind.__struct_fields__:
            raise UsageError(f"{where}: unknown key '{key}'{nearest(str(key), kind.__struct_fields__)}")
        inner = hints[key]
        if isinstance(inner, type) and not isinstance(inner, types.GenericAlias) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                raise UsageError(f"{where}: '{key}' holds {value!r}; a mapping of keys is expected")
            _check_keys(value, inner, f"{where}: {key}")


def check_config(config: TrainConfig) -> TrainConfig:
    """The configuration with names of FSDP1 translated. Raises UsageError on what cannot be, with what to change."""
    shard = config.parallel.shard
    if shard in FSDP1_NAMES:
        log.warning("parallel.shard %s is FSDP1's name; FSDP2 does that as '%s'", shard, FSDP1_NAMES[shard])
        config = msgspec.structs.replace(
            config, parallel=msgspec.structs.replace(config.parallel, shard=FSDP1_NAMES[shard])
        )
    for rule, message in _rules(config):
        if not rule:
            raise UsageError(message)
    return config


def _rules(config: TrainConfig) -> list[tuple[bool, str]]:
    """(what must hold, what is said where it does not)."""
    parallel, memory, data, save = config.parallel, config.memory, config.data, config.save
    fsdp = parallel.strategy == "fsdp"
    return [
        (config.epochs >= 1, f"epochs is {config.epochs}; at least 1 is expected"),
        (config.batch_size >= 1, f"batch_size is {config.batch_size}; at least 1 is expected"),
        (config.accumulate >= 1, f"accumulate is {config.accumulate}; at least 1 is expected"),
        (
            config.max_steps is None or config.max_steps >= 1,
            f"max_steps is {config.max_steps}; at least 1 is expected",
        ),
        (
            config.validate_every_steps is None or config.validate_every_steps >= 1,
            f"validate_every_steps is {config.validate_every_steps}; at least 1 is expected",
        ),
        (
            config.loss_scale is None or config.precision == "fp16",
            f"loss_scale belongs to precision fp16; {config.precision} has the range of fp32 and needs none: remove it",
        ),
        (
            config.loss_scale is None or config.loss_scale > 0,
            f"loss_scale is {config.loss_scale}; more than 0 is expected",
        ),
        (config.clip_norm is None or config.clip_norm > 0, f"clip_norm is {config.clip_norm}; more than 0 is expected"),
        (
            config.ema_decay is None or 0 < config.ema_decay < 1,
            f"ema_decay is {config.ema_decay}; a number between 0 and 1 such as 0.999 is expected",
        ),
        (config.optimizer.lr > 0, f"optimizer.lr is {config.optimizer.lr}; more than 0 is expected"),
        (
            config.schedule.warmup_steps >= 0,
            f"schedule.warmup_steps is {config.schedule.warmup_steps}; 0 or more is expected",
        ),
        (
            parallel.shard in FSDP1_NAMES.values(),
            f"parallel.shard is '{parallel.shard}'{nearest(parallel.shard, FSDP1_NAMES.values())}",
        ),
        (
            fsdp or not parallel.cpu_offload,
            "parallel.cpu_offload moves what FSDP shards; set parallel.strategy to fsdp",
        ),
        (fsdp or not parallel.wrap, "parallel.wrap names what FSDP shards; set parallel.strategy to fsdp"),
        (
            fsdp or parallel.shard == "full",
            f"parallel.shard {parallel.shard} is a way of FSDP; set parallel.strategy to fsdp",
        ),
        (
            parallel.shard_size is None or parallel.shard == "hybrid",
            "parallel.shard_size is the size of a group of shard hybrid; set parallel.shard to hybrid, or remove it",
        ),
        (
            parallel.shard != "hybrid" or parallel.shard_size is not None,
            "parallel.shard hybrid needs parallel.shard_size: how many processes share one copy of the model",
        ),
        (
            not (parallel.static_graph and parallel.unused_parameters == "find"),
            "parallel.static_graph finds unused parameters by itself; remove unused_parameters: find",
        ),
        (
            fsdp or parallel.cast_parameters == "auto",
            "parallel.cast_parameters is a way of FSDP; set parallel.strategy to fsdp, or remove it",
        ),
        (not fsdp or not parallel.static_graph, "parallel.static_graph is an option of ddp, not of fsdp"),
        (parallel.timeout_s > 0, f"parallel.timeout_s is {parallel.timeout_s}; more than 0 is expected"),
        (
            memory.checkpoint_every >= 1,
            f"memory.checkpoint_every is {memory.checkpoint_every}; at least 1 is expected",
        ),
        (
            bool(memory.checkpoint) or not (memory.checkpoint_keep or memory.checkpoint_every > 1),
            "memory.checkpoint_keep and checkpoint_every need memory.checkpoint: the classes of modules to checkpoint",
        ),
        (
            memory.budget is None or 0 <= memory.budget <= 1,
            f"memory.budget is {memory.budget}; a share between 0 and 1 is expected",
        ),
        (
            memory.budget is None or config.compile.enabled,
            "memory.budget is obeyed by torch.compile alone; set compile.enabled: true, or use memory.checkpoint",
        ),
        (
            not config.compile.blocks or config.compile.enabled,
            "compile.blocks is given and compile.enabled is false; set compile.enabled: true",
        ),
        (
            data.workers == "auto" or data.workers >= 0,
            f"data.workers is {data.workers}; 0 or more, or auto, is expected",
        ),
        (
            data.workers != 0 or (data.prefetch_factor is None and not data.persistent_workers),
            "data.prefetch_factor and persistent_workers need workers; set data.workers to 1 or more, or remove them",
        ),
        (
            save.every_steps is None or save.every_steps >= 1,
            f"save.every_steps is {save.every_steps}; at least 1 is expected",
        ),
        (save.keep >= 1, f"save.keep is {save.keep}; at least 1 is expected"),
        (
            save.best is None or save.best.rpartition(":")[2] in ("min", "max"),
            f"save.best is '{save.best}'; NAME:min or NAME:max of a validation figure is expected",
        ),
        (
            config.qat == QatConfig(),
            "qat: training under INT8 rounding is not built yet; remove it, and calibrate after training with "
            "deployer export --precision int8",
        ),
        (
            config.export_check == ExportCheckConfig(),
            "export_check: the check before training is not built yet; remove it, and export a checkpoint of "
            "a run with max_steps: 1",
        ),
    ]
