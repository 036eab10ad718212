"""What a user writes: a Task says which model, which data and which loss. All else is the configuration's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from deployer.errors import ModelError, UsageError, first_line
from deployer.references import is_file_reference, load_reference, split_reference
from deployer.spec import Arrays, ModelSpec
from deployer.userlines import failing_user_line

#: what `loss` and each of `metrics` return: the mean over the rows of the batch, or (sum, count): over tokens, say
Figure = Tensor | float | tuple[Tensor | float, Tensor | float]


class Datasets(NamedTuple):
    """Map-style datasets: `len()` and `[index]`."""

    train: Dataset[Any]
    validation: Dataset[Any] | None = None


class Task:
    """Derive from it, in a file of your own, and name it in the configuration: `task: task.py:Digits`.

    `factory` is the reference (`model.py:build`, beside the task's file, or `package.module:build`) that builds the
    model from `factory_args`; with `spec` and `samples` the finished run is a checkpoint folder that `deployer
    export` takes without another word. Without them the run ends in its weights alone."""

    factory: str = ""
    factory_args: Mapping[str, Any] = {}
    spec: ModelSpec | None = None
    #: puts the items of a batch together; None is torch's own way
    collate: Callable[[Sequence[Any]], Any] | None = None

    def build_model(self) -> nn.Module:
        """The model with its weights as training begins with them. Random numbers come from the run's seed."""
        if not self.factory:
            raise UsageError(
                f"{type(self).__name__} has no `factory` and no `build_model`; give one of them, e.g. "
                "factory = 'model.py:build'"
            )
        model = load_reference(self.factory)(**self.factory_args)
        if not isinstance(model, nn.Module):
            raise ModelError(f"'{self.factory}' returned a {type(model).__name__}; a torch.nn.Module is expected")
        return model

    def datasets(self) -> Datasets:
        """The data for training and, where there is some, for validation."""
        raise UsageError(f"{type(self).__name__} has no `datasets`; return Datasets(train, validation)")

    def loss(self, model: nn.Module, batch: Any) -> Figure:
        """The mean loss over the rows of `batch`, or (sum of losses, count) where it is a mean over something else than
        rows: unmasked tokens, say. Accumulation and several processes are exact with either."""
        raise UsageError(f"{type(self).__name__} has no `loss`; return the mean over the batch, or (sum, count)")

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Figure]:
        """Figures of validation, in the same two forms."""
        return {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer of your own over `model.parameters()`; None takes the configuration's."""
        return None

    def scheduler(
        self, optimizer: torch.optim.Optimizer, total_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """A learning rate schedule of your own, stepped once an optimizer step; None takes the configuration's."""
        return None

    def samples(self) -> Arrays:
        """Real inputs by name, which the checkpoint folder carries: held-out ones, some dozens."""
        return {}


def load_task(reference: str, args: Mapping[str, Any]) -> Task:
    """Import and make the task that the user named; a relative `factory` file starts at the task's file.

    Raises ModelError or UsageError.
    """
    made = call_user(load_reference(reference), f"'{reference}'", **args)
    if not isinstance(made, Task):
        raise UsageError(
            f"'{reference}' made a {type(made).__name__}; a class derived from deployer.training.Task is expected"
        )
    if made.factory and is_file_reference(reference) and is_file_reference(made.factory):
        folder = Path(split_reference(reference)[0]).parent
        source, name = split_reference(made.factory)
        made.factory = f"{folder / source}:{name}"
    return made


def call_user(function: Callable[..., Any], what: str, /, *args: Any, **named: Any) -> Any:
    """Call the user's code. Raises ModelError naming the line of it that failed."""
    try:
        return function(*args, **named)
    except (UsageError, ModelError):
        raise
    except Exception as error:
        line = failing_user_line(error)
        where = f" ({line})" if line is not None else ""
        raise ModelError(f"{what} failed with {type(error).__name__}: {first_line(error)}{where}") from error


def task_datasets(task: Task) -> Datasets:
    """The task's datasets, checked. Raises UsageError on ones without a length or rows."""
    made = call_user(task.datasets, f"{type(task).__name__}.datasets")
    found = Datasets(*made) if isinstance(made, tuple) else Datasets(made)
    for name, dataset in found._asdict().items():
        if dataset is None:
            continue
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
        ):
            raise UsageError(
                f"the {name} dataset is a {type(dataset).__name__} without `len()` and `[index]`; an exact "
                f"epoch and an "
                "exact resume need both"
            )
        if len(dataset) == 0:
            raise UsageError(f"the {name} dataset is empty; at least one row is expected")
    return found


def as_sum_and_count(figure: Any, rows: int, what: str) -> tuple[Tensor, Tensor | float]:
    """A Figure as (sum, count). Raises ModelError where it is neither form."""
    if isinstance(figure, tuple) and len(figure) == 2:
        total, count = figure
        return torch.as_tensor(total), count
    value = torch.as_tensor(figure)
    if value.numel() != 1:
        raise ModelError(
            f"{what} returned a tensor of shape {list(value.shape)}; the mean over the batch or (sum, "
            f"count) is expected"
        )
    return value.reshape(()) * rows, float(rows)


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on `device`; containers keep their kind."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def modules_of_classes(model: nn.Module, names: Iterable[str], what: str) -> list[nn.Module]:
    """The modules of `model` whose class has one of the names, outermost first. Raises UsageError naming the
    nearest."""
    from deployer.errors import nearest

    wanted = set(names)
    present = {type(module).__name__ for module in model.modules()}
    for name in sorted(wanted - present):
        raise UsageError(f"{what} names '{name}', of which the model has no module{nearest(name, present)}")
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if type(module).__name__ in wanted and id(module) not in inside:
            found.append(module)
            inside.update(id(part) for part in module.modules())
    return found
