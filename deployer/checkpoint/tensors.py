"""Tensors that stay in their file until they are needed, and are then read piece by piece into their place.

Every format of weights ends in these: a name, a dtype, a shape, and pieces of a few megabytes. A model is filled
without a second copy of its weights in memory, and looking at a file reads no weights at all.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from deployer.errors import CheckpointError

#: bytes that are read at once
PIECE_BYTES = 8 << 20

Shape = tuple[int, ...]


class StoredTensor(Protocol):
    """`pieces` yields flat tensors of `dtype` that, joined, are the values in row-major order; each piece is valid
    until the next one is asked for."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Shape: ...
    def pieces(self) -> Iterator[Tensor]: ...


Stamp = tuple[int, int, int]


def stamp_of(file: int | Path) -> Stamp:
    """Size, time of change and inode: equal stamps, same content."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _refuse_state(self: object, state: object) -> NoReturn:
    raise ValueError("a file tries to change where its tensors are read from")


@dataclass(frozen=True)
class FileStorage:
    """`length_bytes` bytes of a file; `crc32` is their recorded checksum, 0 where there is none."""

    path: Path
    stamp: Stamp
    offset_bytes: int
    length_bytes: int
    crc32: int = 0

    __setstate__ = _refuse_state  # what a pickle may call on an object that it has been handed

    def blocks(self, start: int, length: int) -> Iterator[memoryview]:
        """`length` bytes from `start` on; each block is valid until the next. Raises CheckpointError where the file
        changed since it was opened, ends early, or differs from its checksum."""
        buffer = memoryview(bytearray(min(length, PIECE_BYTES)))
        checked = self.crc32 != 0 and (start, length) == (0, self.length_bytes)
        crc32 = 0
        with self.path.open("rb", buffering=0) as file:
            if stamp_of(file.fileno()) != self.stamp:
                raise CheckpointError(f"'{self.path}' changed since it was opened; load it again")
            file.seek(self.offset_bytes + start)
            while length:
                block = buffer[: min(length, PIECE_BYTES)]
                filled = 0
                while filled < len(block):
                    if not (read := file.readinto(block[filled:])):
                        raise corrupt(self.path, "it ends within a tensor")
                    filled += read
                crc32 = zlib.crc32(block, crc32) if checked else 0
                length -= len(block)
                yield block
        if checked and crc32 != self.crc32:
            raise corrupt(self.path, "a tensor differs from its recorded checksum")


@dataclass(frozen=True)
class FileTensor:
    """A view of a storage, `start` and `strides` in elements. Raises ValueError where it leaves the storage."""

    storage: FileStorage
    dtype: torch.dtype
    shape: Shape
    start: int = 0
    strides: Shape | None = None

    __setstate__ = _refuse_state

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self._strides(), self.start)
        if not all(type(number) is int and number >= 0 for number in numbers) or len(self._strides()) != len(
            self.shape
        ):
            raise ValueError(f"shape {self.shape}, strides {self.strides} and start {self.start} are no tensor's")
        if self._start_bytes() + self._span_bytes() > self.storage.length_bytes:
            raise ValueError(f"a tensor of shape {self.shape} does not fit into its {self.storage.length_bytes} bytes")

    def _strides(self) -> Shape:
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def _start_bytes(self) -> int:
        return self.start * self.dtype.itemsize

    def _span_bytes(self) -> int:
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self._strides(), strict=True))
        return (last + 1) * self.dtype.itemsize

    def _contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape)
        return all(
            size == 1 or stride == want for size, stride, want in zip(self.shape, self._strides(), wanted, strict=True)
        )

    def pieces(self) -> Iterator[Tensor]:
        blocks = self.storage.blocks(self._start_bytes(), self._span_bytes())
        if self._contiguous():
            for block in blocks:
                yield torch.frombuffer(block, dtype=torch.uint8).view(self.dtype)
            return
        # Strided (a transposed weight): the whole span is needed at once.
        flat = torch.empty(self._span_bytes() // self.dtype.itemsize, dtype=self.dtype)
        done = 0
        for block in blocks:
            part = torch.frombuffer(block, dtype=torch.uint8).view(self.dtype)
            flat[done : done + len(part)] = part
            done += len(part)
        if flat.numel():
            yield flat.as_strided(self.shape, self._strides()).flatten()


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor that is in memory already."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    def pieces(self) -> Iterator[Tensor]:
        if self.tensor.numel():
            flat = self.tensor.detach().cpu().contiguous().flatten()
            step = max(1, PIECE_BYTES // self.dtype.itemsize)
            yield from (flat[start : start + step] for start in range(0, len(flat), step))


@dataclass(frozen=True)
class JoinedTensor:
    """Boxes of one tensor, as sharded training writes them: (where each begins, its values)."""

    dtype: torch.dtype
    shape: Shape
    parts: Sequence[tuple[Shape, StoredTensor]]

    def __post_init__(self) -> None:
        for starts, part in self.parts:
            inside = len(starts) == len(part.shape) == len(self.shape) and all(
                0 <= start <= start + size <= whole
                for start, size, whole in zip(starts, part.shape, self.shape, strict=True)
            )
            if not inside or part.dtype != self.dtype:
                raise ValueError(f"a shard at {starts} of shape {part.shape} is none of a tensor of shape {self.shape}")
        if sum(math.prod(part.shape) for _, part in self.parts) != math.prod(self.shape):
            raise ValueError(f"the shards of a tensor of shape {self.shape} do not cover it once")

    def pieces(self) -> Iterator[Tensor]:
        rows = sorted(self.parts, key=lambda item: item[0])
        if all(not any(starts[1:]) and part.shape[1:] == self.shape[1:] for starts, part in rows):
            for _, part in rows:  # blocks of whole rows (FSDP): one after the other
                yield from part.pieces()
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        for starts, part in rows:
            box = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
            whole[box] = read_tensor(part)
        yield from MemoryTensor(whole).pieces()


def contiguous_strides(shape: Sequence[int]) -> Shape:
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def stored(value: Any) -> StoredTensor:
    """`value` as a StoredTensor: a torch.Tensor is wrapped, anything else is one already."""
    return MemoryTensor(value) if isinstance(value, Tensor) else value


def is_tensor(value: Any) -> bool:
    """A torch.Tensor or a tensor that is still in a file."""
    return isinstance(value, Tensor) or hasattr(value, "pieces")


def read_tensor(source: StoredTensor) -> Tensor:
    """All values, in new memory."""
    flat = torch.empty(math.prod(source.shape), dtype=source.dtype)
    done = 0
    for piece in source.pieces():
        flat[done : done + len(piece)] = piece
        done += len(piece)
    return flat.view(source.shape)


def equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(_bits(read_tensor(one)), _bits(read_tensor(other)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def corrupt(path: Path, reason: str) -> CheckpointError:
    """The one line for files that are not what they should be."""
    return CheckpointError(f"'{path}' ({path.stat().st_size} bytes) is truncated or corrupt: {reason}")
