"""Saved states of a run: each a folder that is whole or absent, hashed, written beside the training.

    OUTPUT/steps/step-00000120/
        shards/           torch.distributed.checkpoint: model, optimizer, averaged weights, cut for any number of
        processes process-0.pt …    each process's random states, scheduler, loss scaler position.json     step,
        epoch, micro-batch, the configuration's mathematics, the figures of validation manifest.json     sha256 of
        every file

The folder gets its name when all processes have written and everything is on the disk; `OUTPUT` is shared by all
machines."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from deployer.errors import CheckpointError, UsageError, first_line, nearest
from deployer.files import files_below, lock_folder, publish_folder, sha256_of
from deployer.training.config import SaveConfig
from deployer.training.parallel import World
from deployer.training.state import Position, RunState

log = logging.getLogger(__name__)

STEPS, SHARDS, POSITION, MANIFEST = "steps", "shards", "position.json", "manifest.json"


class SavedPosition(msgspec.Struct, frozen=True):
    """What `position.json` holds. `figures` are those of validation at this very step, or empty."""

    step: int
    epoch: int
    micro: int
    world: int
    mathematics: dict[str, Any]
    figures: dict[str, float] = {}
    schema_version: int = 1


@dataclass
class _Pending:
    staging: Path
    final: Path
    future: Future[Any] | None


class Saver:
    """Saves, prunes and finds. Every process calls the same methods in the same order."""

    def __init__(self, output: Path, config: SaveConfig, world: World, mathematics: dict[str, Any]) -> None:
        self.folder = output / STEPS
        self.config, self.world, self.mathematics = config, world, mathematics
        self._pending: _Pending | None = None
        self._lock: int | None = None
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        fault = ""
        if world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock_folder(self.folder)
            except OSError:
                fault = f"another run is writing in '{output}'; wait for it, or give another output"
            else:
                for leftover in self.folder.glob(".step-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
        if fault := world.from_first(fault):
            raise UsageError(fault)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- writing -------------------------------------------------------------------------------------------------

    def begin(self, state: RunState, figures: dict[str, float]) -> None:
        """Save this step; with `background` the training goes on while shards are written from a copy in memory."""
        self.finish()
        position, name = state.position, f"step-{state.position.step:08d}"
        staging, final = self.folder / f".{name}", self.folder / name
        if self.world.from_first(final.exists()):
            return
        if self.world.first:
            staging.mkdir()
            saved = SavedPosition(
                position.step, position.epoch, position.micro, self.world.size, self.mathematics, figures
            )
            (staging / POSITION).write_bytes(msgspec.json.encode(saved))
        self.world.barrier()
        torch.save(state.own(), staging / f"process-{self.world.rank}.pt")
        shards = state.shards()
        future: Future[Any] | None = None
        if self.config.background:
            future = async_save(shards, checkpoint_id=staging / SHARDS, process_group=self._group)  # type: ignore[assignment]
        else:
            save(shards, checkpoint_id=staging / SHARDS, process_group=self._group)
        self._pending = _Pending(staging, final, future)
        if future is None:
            self.finish()

    @property
    def written(self) -> bool:
        """Whether this process has written its part of a save that still waits for its name."""
        return self._pending is not None and (self._pending.future is None or self._pending.future.done())

    @property
    def pending(self) -> bool:
        return self._pending is not None

    def finish(self) -> None:
        """Wait until every process has written, then give the folder its name and remove those no longer kept."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.future is not None:
            pending.future.result()
        self.world.barrier()
        if self.world.first:
            hashes = {name: sha256_of(pending.staging / name) for name in files_below(pending.staging)}
            (pending.staging / MANIFEST).write_bytes(msgspec.json.encode(hashes))
            publish_folder(pending.staging, pending.final)
            self._prune()
        self.world.barrier()

    def _prune(self) -> None:
        saves = self._saves()
        kept = set(saves[-self.config.keep :])
        if (best := self.best()) is not None:
            kept.add(best)
        for path in saves:
            if path not in kept:
                doomed = path.with_name(f".{path.name}.removed")
                path.rename(doomed)  # a kill while files go leaves nothing that looks whole
                shutil.rmtree(doomed)

    # --- finding -------------------------------------------------------------------------------------------------

    def _saves(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def best(self) -> Path | None:
        """The save with the best figure of validation; None where none has it. Call it on process 0."""
        if self.config.best is None:
            return None
        name, _, direction = self.config.best.rpartition(":")
        figures = {path: read_position(path).figures for path in self._saves()}
        rated = [(values[name], path) for path, values in figures.items() if name in values]
        if not rated:
            known = {key for values in figures.values() for key in values}
            if known:
                raise UsageError(f"save.best names '{name}', which validation does not report{nearest(name, known)}")
            return None
        return (min if direction == "min" else max)(rated, key=lambda pair: pair[0])[1]

    def find(self) -> SavedPosition | None:
        """The last save that is whole, on all processes; broken ones are named and passed over.

        Raises UsageError where its mathematics differ from this run's.
        """
        found, fault = None, ""
        if self.world.first:
            for path in reversed(self._saves()):
                if damage := damage_of(path):
                    log.warning("'%s' is passed over: %s; going back to the save before it", path, damage)
                    continue
                found = read_position(path)
                fault = self._differences(found, path)
                break
            if found is None and self._saves():
                fault = f"no save in '{self.folder}' is whole; remove the folder to begin anew"
        found, fault = self.world.from_first((found, fault))
        if fault:
            raise UsageError(fault)
        return cast("SavedPosition | None", found)

    def _differences(self, found: SavedPosition, path: Path) -> str:
        ours = msgspec.json.decode(msgspec.json.encode(self.mathematics))
        differing = [key for key in ours if found.mathematics.get(key) != ours[key]]
        if not differing:
            return ""
        shown = "; ".join(f"{key} was {found.mathematics.get(key)} and is {ours[key]}" for key in differing)
        return f"'{path}' was trained otherwise: {shown}; set it back, or give another output to begin anew"

    def load(self, state: RunState, found: SavedPosition, seed: int) -> None:
        """Bring `state` to the save. Raises CheckpointError where it does not fit the model."""
        path = self.folder / f"step-{found.step:08d}"
        shards = state.shards()
        try:
            load_shards(shards, checkpoint_id=path / SHARDS, process_group=self._group)
        except CheckpointException as error:  # not an Exception: it derives from BaseException
            causes = list(error.failures.values())
            cause = first_line(causes[0][0]) if causes else first_line(error)
            raise CheckpointError(
                f"'{path}' does not fit the model: {cause}; build the model as it was, or give another output"
            ) from None
        except Exception as error:
            raise CheckpointError(
                f"'{path}' does not fit the model: {first_line(error)}; build the model as it was, or give "
                f"another output"
            ) from error
        state.take_shards(shards)
        state.position = Position(found.step, found.epoch, found.micro)
        same = found.world == self.world.size
        own = path / f"process-{self.world.rank if same else 0}.pt"
        state.take_own(torch.load(own, weights_only=True), same_process=same, seed=seed, rank=self.world.rank)
        if not same and self.world.first:
            log.warning(
                "resumed with %d processes after %d: the same rows in the same steps, other random numbers in dropout",
                self.world.size, found.world,
            )  # fmt: skip


def read_position(path: Path) -> SavedPosition:
    return msgspec.json.decode((path / POSITION).read_bytes(), type=SavedPosition)


def damage_of(path: Path) -> str:
    """What is wrong with a save; "" where every file has its recorded hash."""
    try:
        hashes = msgspec.json.decode((path / MANIFEST).read_bytes(), type=dict[str, str])
        for name, expected in hashes.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if sha256_of(path / name) != expected:
                return f"{name} differs from its recorded sha256"
        read_position(path)
    except (OSError, msgspec.DecodeError) as error:
        return first_line(error)
    return ""
