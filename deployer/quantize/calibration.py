"""Calibration data: real inputs that fix the ranges of activations, checked before anything is quantized."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from deployer.errors import DeployerError, RequestError, SampleError, first_line
from deployer.references import load_reference
from deployer.spec import Array, Arrays, Dim, ModelSpec, in_c_order

#: fewer samples than this are used, and said: their ranges are those of a few inputs
FEW_SAMPLES = 32
#: every HELD_OUT-th sample is kept from the observers, where FEW_SAMPLES are left to them
HELD_OUT = 5
#: a generator without an end must not run for ever
MAX_SAMPLES = 100_000

_LISTED = 5
_TAKES = "give a .npz, .npy, .safetensors or module:function"
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Calibration:
    """Legal inputs of one model, as several named sets of arrays that may differ in size (sentences of several
    lengths); `count` is the number of samples (rows along the batch axis; sets, for a model without one).

    `source` and `sha256` tell where they came from and what they were; `held_out` are every fifth of them, kept from
    the observers so that methods are compared on inputs that they did not see.
    """

    source: str
    sha256: str
    count: int
    batches: tuple[Arrays, ...]
    held_out: tuple[Arrays, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self.batches)


def read_calibration(source: str | Path, spec: ModelSpec, folder: Path | None = None) -> Calibration:
    """Calibration data from `.npz`, `.npy`, `.safetensors`, or from `module:function` / `path.py:function`.

    A function takes nothing and returns or yields named arrays: one mapping, or an iterable of mappings whose sizes may
    differ. Rows along the batch axis are samples; a model without a batch axis takes a leading axis of samples, or one
    sample a mapping. Sets beyond the largest batch are cut into legal ones. Relative paths start in `folder`.

    Raises SampleError naming the sample, what was expected and what arrived, for data that does not fit the spec, holds
    NaN or infinity, is empty, or is one value throughout.
    """
    return make_calibration(str(source), _read(source, folder), spec)


def make_calibration(source: str, sets: Iterator[Any], spec: ModelSpec) -> Calibration:
    """As `read_calibration`, of mappings at hand; `source` is the name that messages give them."""
    checked: list[dict[str, Array]] = []
    starts = [0]
    for entry in sets:
        for named in _samples_in(source, entry, spec, starts[-1]):
            checked.append(_fitting(source, named, spec, starts[-1]))
            starts.append(starts[-1] + rows_of(spec, checked[-1]))
            if starts[-1] > MAX_SAMPLES:
                raise SampleError(f"'{source}' holds more than {MAX_SAMPLES:,} samples; some hundreds are enough")
    count = starts[-1]
    if count == 0:
        raise SampleError(f"calibration data '{source}' holds no sample; at least 1 is needed, {FEW_SAMPLES} are asked")
    _refuse_special(source, checked, starts, spec)
    notes = [*_refuse_constant(source, checked, spec)]
    if count < FEW_SAMPLES:
        samples = "1 sample" if count == 1 else f"{count} samples"
        notes.append(f"calibration data '{source}' holds {samples}; ranges seen in fewer than {FEW_SAMPLES} are narrow")
    calibrating, held_out = _split(source, checked, starts, spec)
    if not held_out:
        notes.append(
            f"{count} samples are too few to keep some from the observers; methods are compared on all of them"
        )
    return Calibration(source, _sha256(checked), count, tuple(calibrating), tuple(held_out), tuple(notes))


# ------------------------------------------------------------------------------------------------------------- reading


def _read(source: str | Path, folder: Path | None) -> Iterator[Any]:
    """Mappings as they stand in the source; nothing in them is checked yet."""
    text = str(source)
    suffix = Path(text).suffix.lower()
    if not isinstance(source, Path) and ":" in text and suffix not in (".npz", ".npy", ".safetensors"):
        yield from _call(text, folder)
        return
    path = (folder or Path()) / text
    try:
        match suffix:
            case ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}
            case ".npy":
                arrays = {"": np.load(path, allow_pickle=False)}
            case ".safetensors":
                arrays = load_file(path)
            case _:
                raise SampleError(f"'{path}' is no calibration data; {_TAKES}")
    except FileNotFoundError as error:
        raise SampleError(f"no calibration file '{path}'; {_TAKES}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise SampleError(f"'{path}' cannot be read as calibration data: {first_line(error)}") from error
    if arrays:  # an archive without an array holds no sample; an array of the wrong name is another fault
        yield arrays


def _call(reference: str, folder: Path | None) -> Iterator[Any]:
    function = load_reference(reference, folder)
    try:
        value = function()
        if isinstance(value, Mapping):
            yield value
            return
        entries = iter(value)
    except DeployerError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(reference, error) from error
    while True:
        try:
            entry = next(entries)
        except StopIteration:
            return
        except DeployerError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(reference, error) from error
        yield entry


def _failed(reference: str, error: BaseException) -> SampleError:
    return SampleError(
        f"'{reference}' failed with {type(error).__name__}: {first_line(error)}; it must return or yield mappings of "
        "names to arrays"
    )


# ------------------------------------------------------------------------------------------------------------ checking


def _samples_in(source: str, entry: Any, spec: ModelSpec, start: int) -> Iterator[dict[str, Array]]:
    """The sets in one mapping: itself, or each entry of the leading axis of samples where the model has no batch."""
    if not isinstance(entry, Mapping):
        raise SampleError(
            f"calibration sample {start} of '{source}' is a {type(entry).__name__}; a mapping of names to arrays is "
            "expected"
        )
    named = {}
    for name, value in entry.items():
        try:
            named[str(name)] = np.asarray(value)
        except Exception as error:
            raise SampleError(
                f"calibration sample {start} of '{source}': '{name}' is no array: {first_line(error)}"
            ) from error
    if list(named) == [""] and len(spec.inputs) == 1:
        named = {spec.inputs[0].name: named[""]}
    ranks = {tensor.name: len(tensor.shape) for tensor in spec.inputs}
    stacked = named.keys() == ranks.keys() and all(array.ndim == ranks[name] + 1 for name, array in named.items())
    if spec.batch is not None or not stacked:
        yield named
        return
    lengths = {name: array.shape[0] for name, array in named.items()}
    if len(set(lengths.values())) > 1:
        raise SampleError(f"calibration data '{source}' has other numbers of samples for each input: {lengths}")
    for index in range(next(iter(lengths.values()))):
        yield {name: array[index] for name, array in named.items()}


def _fitting(source: str, named: dict[str, Array], spec: ModelSpec, start: int) -> dict[str, Array]:
    """One set held to the spec, its number of rows apart. Raises SampleError naming the sample."""
    open_spec = spec
    if spec.batch is not None:
        open_spec = msgspec.structs.replace(spec, dims=spec.dims | {spec.batch: Dim(1, 1, _NO_LIMIT)})
        arrays = [
            named[tensor.name].shape[tensor.shape.index(spec.batch)]
            for tensor in spec.inputs
            if tensor.name in named and spec.batch in tensor.shape and named[tensor.name].ndim == len(tensor.shape)
        ]
        if arrays and not any(arrays):
            return {}
    try:
        open_spec.check_inputs(named)
    except RequestError as error:
        index, told = _first_at_fault(named, open_spec, error)
        raise SampleError(f"calibration sample {start + index} of '{source}' does not fit the spec: {told}") from error
    return {tensor.name: in_c_order(named[tensor.name]) for tensor in spec.inputs}


def _first_at_fault(named: dict[str, Array], spec: ModelSpec, error: RequestError) -> tuple[int, RequestError]:
    """The first row of a set that does not fit, and its error: values out of range are some row's, shapes all rows'."""
    if spec.batch is None or error.field not in named or "holds" not in str(error):
        return 0, error
    for row in range(rows_of(spec, named)):
        try:
            spec.check_inputs(take_rows(spec, named, range(row, row + 1)))
        except RequestError as own:
            return row, own
    return 0, error


def _refuse_special(source: str, sets: list[dict[str, Array]], starts: list[int], spec: ModelSpec) -> None:
    """Samples that hold NaN or infinity, by index."""
    bad: dict[int, str] = {}
    for named, start in zip(sets, starts, strict=False):
        for tensor in spec.inputs:
            array = named.get(tensor.name)
            if array is None or array.dtype.kind != "f" or np.isfinite(array).all():
                continue
            axis = tensor.axis_of(spec.batch)
            rows = np.argwhere(~np.isfinite(array))[:, axis] if axis is not None else np.zeros(1, np.int64)
            for row in np.unique(rows).tolist():
                bad.setdefault(start + row, tensor.name)
    if bad:
        places = sorted(bad)
        more = f" and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
        names = ", ".join(map(str, places[:_LISTED])) + more
        raise SampleError(
            f"calibration data '{source}' holds NaN or infinity in input '{bad[places[0]]}' of sample {names}; remove "
            "or repair them: one such value is the range of every activation"
        )


def _refuse_constant(source: str, sets: list[dict[str, Array]], spec: ModelSpec) -> Iterator[str]:
    """Notes on single inputs that never vary; raises SampleError where none does."""
    constant: dict[str, Any] = {}
    for tensor in spec.inputs:
        low = min((named[tensor.name].min() for named in sets if named and named[tensor.name].size), default=None)
        high = max((named[tensor.name].max() for named in sets if named and named[tensor.name].size), default=None)
        if low is None or low == high:
            constant[tensor.name] = low
    if len(constant) == len(spec.inputs):
        told = ", ".join(f"'{name}' is {value} throughout" for name, value in constant.items())
        raise SampleError(
            f"calibration data '{source}' is one value: {told}; real inputs are needed, ranges of nothing quantize to "
            "nothing"
        )
    for name, value in constant.items():
        if spec.input(name).dtype.startswith("float"):
            yield f"calibration data '{source}': input '{name}' is {value} throughout, so its range says nothing"
    first = next(named for named in sets if named)
    rows = [
        take_rows(spec, named, range(row, row + 1)) for named in sets if named for row in range(rows_of(spec, named))
    ]
    head = take_rows(spec, first, range(1))
    if len(rows) > 1 and all(np.array_equal(row[name], head[name]) for row in rows for name in head):
        yield f"calibration data '{source}': all {len(rows)} samples are alike, which is one sample"


def _sha256(sets: list[dict[str, Array]]) -> str:
    """Of the data as it was read: names, dtypes, shapes and bytes, set after set."""
    digest = hashlib.sha256()
    for named in sets:
        for name, array in named.items():
            digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- cutting


def rows_of(spec: ModelSpec, arrays: Arrays) -> int:
    """Samples in a set: its size along the batch axis; 1 for a model without one."""
    if not arrays:
        return 0
    for tensor in spec.inputs:
        axis = tensor.axis_of(spec.batch)
        if axis is not None:
            return int(arrays[tensor.name].shape[axis])
    return 1


def take_rows(spec: ModelSpec, arrays: Arrays, rows: range | list[int]) -> dict[str, Array]:
    """These rows of every input that has the batch axis; the others as they are."""
    taken = {}
    for tensor in spec.inputs:
        axis = tensor.axis_of(spec.batch)
        array = arrays[tensor.name]
        taken[tensor.name] = array if axis is None else in_c_order(array.take(list(rows), axis=axis))
    return taken


def legal_cuts(rows: int, low: int, high: int) -> list[range]:
    """Ranges of `low` to `high` rows that cover all of `rows`, as few and as even as can be.

    Where no even cut is legal the last range begins earlier, so some rows stand in two. Raises ValueError for
    fewer rows than `low`.
    """
    if rows < low:
        raise ValueError(f"{rows} rows, {low} at least are needed")
    parts = -(-rows // high)
    if rows // parts < low:
        return [range(min(start, rows - high), min(start, rows - high) + high) for start in range(0, rows, high)]
    edges = [rows * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def cut(spec: ModelSpec, arrays: Arrays) -> list[dict[str, Array]]:
    """A set as legal batches. Raises ValueError for fewer rows than the smallest batch."""
    if spec.batch is None:
        return [dict(arrays)]
    dim = spec.dims[spec.batch]
    return [take_rows(spec, arrays, rows) for rows in legal_cuts(rows_of(spec, arrays), dim.min, dim.max)]


def _split(
    source: str, sets: list[dict[str, Array]], starts: list[int], spec: ModelSpec
) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """Batches for the observers, and every fifth sample apart (batch, where one row alone is not legal)."""
    count = starts[-1]
    enough = count - count // HELD_OUT >= FEW_SAMPLES
    by_rows = enough and (spec.batch is None or spec.dims[spec.batch].min == 1)
    calibrating: list[dict[str, Array]] = []
    held_out: list[dict[str, Array]] = []
    for named, start in zip(sets, starts, strict=False):
        if not named:
            continue
        kept = [row for row in range(rows_of(spec, named)) if by_rows and (start + row) % HELD_OUT == HELD_OUT - 1]
        used = sorted(set(range(rows_of(spec, named))) - set(kept))
        for rows, place in ((used, calibrating), (kept, held_out)):
            if not rows:
                continue
            try:
                place += cut(spec, take_rows(spec, named, rows))
            except ValueError as error:
                raise SampleError(
                    f"calibration sample {start} of '{source}' begins a set of {len(rows)} rows; the smallest "
                    f"'{spec.batch}' is {spec.dims[spec.batch or ''].min}"
                ) from error
    if enough and not by_rows and len(calibrating) >= HELD_OUT:
        held_out = calibrating[HELD_OUT - 1 :: HELD_OUT]
        calibrating = [batch for index, batch in enumerate(calibrating) if index % HELD_OUT != HELD_OUT - 1]
    return calibrating, held_out
