"""Which rows each process reads, when, and under which random state.

An epoch is a permutation of all rows that follows from seed and epoch alone. It is cut into micro-batches of
`batch_size` rows, the last one as short as it comes out, and each process takes every world-th row of each. So every
row is read exactly once an epoch by exactly one process, whatever the sizes, and the rows of a step do not depend on
the number of processes."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from deployer.machine import usable_cores
from deployer.training.config import DataConfig

log = logging.getLogger(__name__)

#: a row of an epoch as the loader's workers are asked for it: (index, epoch)
Row = tuple[int, int]


def mix(*numbers: int) -> int:
    """A seed of 63 bits that follows from all the numbers (splitmix64 over them: neighbours share no bits)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class Plan:
    """The rows of each micro-batch of an epoch: `rows` in all, `batch_size` of one micro-batch over all processes."""

    rows: int
    batch_size: int
    world: int
    seed: int
    shuffle: bool = True

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one epoch; the last may be short."""
        return -(-self.rows // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.rows, generator=generator).tolist()

    def joined(self, micro: int) -> int:
        """Rows of micro-batch `micro` over all processes."""
        return min(self.batch_size, self.rows - micro * self.batch_size)

    def share(self, micro: int, rank: int) -> int:
        """Rows of it that process `rank` owns; 0 where there are fewer rows than processes."""
        return len(range(rank, self.joined(micro), self.world))


class Share(Sampler[list[Row]]):
    """The rows of one process, a list a micro-batch, from micro-batch `start` of `epoch` on.

    A process that owns no row of a micro-batch reads all of its rows: it has to take part in what the processes do
    together, and its loss counts for nothing.
    """

    def __init__(self, plan: Plan, rank: int, epoch: int = 0, start: int = 0) -> None:
        self.plan, self.rank, self.epoch, self.start = plan, rank, epoch, start

    def __iter__(self) -> Iterator[list[Row]]:
        plan = self.plan
        order = plan.order(self.epoch)
        for micro in range(self.start, plan.micro_batches):
            joined = order[micro * plan.batch_size : (micro + 1) * plan.batch_size]
            yield [(index, self.epoch) for index in joined[self.rank :: plan.world] or joined]

    def __len__(self) -> int:
        return self.plan.micro_batches - self.start


class SeededItems(Dataset[Any]):
    """A dataset whose items are asked for as (index, epoch) and read under a random state that follows from them, which
    the reader's own state (torch, numpy, random) does not notice."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(cast("Sequence[Any]", self.dataset))

    def __getitem__(self, row: Row) -> Any:
        index, epoch = row
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = mix(self.seed, epoch, index)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        try:
            return self.dataset[index]
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])


class PlainItems(Dataset[Any]):
    """The same for a dataset that draws nothing; whole batches go through `__getitems__` where it has one."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast("Sequence[Any]", self.dataset))

    def __getitem__(self, row: Row) -> Any:
        return self.dataset[row[0]]

    def __getitems__(self, rows: list[Row]) -> Any:
        indices = [index for index, _ in rows]
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


@dataclass(frozen=True)
class LoaderSettings:
    """What a DataLoader is made with; `reason` says where `workers` comes from."""

    workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    reason: str

    def __str__(self) -> str:
        more = f", prefetch_factor {self.prefetch_factor}" if self.prefetch_factor is not None else ""
        return f"{self.workers} workers{more}, pin_memory {str(self.pin_memory).lower()} ({self.reason})"


def choose_loader(config: DataConfig, dataset: Dataset[Any], device: torch.device, local_world: int) -> LoaderSettings:
    """Settings from the configuration, and where that says auto from the machine.

    A dataset that lies in memory as tensors is read faster than a worker can send it; otherwise each process of this
    machine gets its share of the cores, one of them left to the training process, at most 8.
    """
    if config.workers != "auto":
        workers, reason = config.workers, "as configured"
    elif isinstance(dataset, TensorDataset):
        workers, reason = 0, "tensors in memory"
    else:
        share = usable_cores() // max(1, local_world)
        workers, reason = max(0, min(8, share - 1)), f"{share} cores a process"
    return LoaderSettings(
        workers=workers,
        prefetch_factor=(config.prefetch_factor or 2) if workers else None,
        pin_memory=device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory,
        persistent_workers=bool(workers) and config.persistent_workers is not False,
        reason=reason,
    )


class Feed:
    """The batches of one process. `epoch(number, start)` iterates from a micro-batch on; workers live across epochs.

    Workers, and the order of rows, draw from generators of the feed's own: the run's random state is not touched.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        rank: int,
        settings: LoaderSettings,
        *,
        seed_items: bool,
        collate: Callable[[Sequence[Any]], Any] | None,
    ) -> None:
        self.plan, self.rank, self.settings = plan, rank, settings
        draws = seed_items and not isinstance(dataset, TensorDataset)
        self._share = Share(plan, rank)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            SeededItems(dataset, plan.seed) if draws else PlainItems(dataset),
            batch_sampler=self._share,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=settings.pin_memory,
            persistent_workers=settings.persistent_workers,
            collate_fn=collate,
            generator=self._generator,
            worker_init_fn=_one_thread if settings.workers else None,
        )

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        self._share.epoch, self._share.start = number, start
        self._generator.manual_seed(mix(self.plan.seed, number, self.rank))
        return iter(self._loader)


def _one_thread(worker: int) -> None:
    """Cores are shared out among processes already; OpenMP in each worker would take them twice."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
