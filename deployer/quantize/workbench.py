"""What a format offers for INT8: a bench on which a model is quantized in several ways, tried, and written once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployer.quantize.config import Int8Method
from deployer.spec import Array, Arrays

Call = Callable[[Arrays], dict[str, Array]]


@dataclass(frozen=True)
class Trial:
    """A model quantized by `method`, all but `kept_float`.

    `call` answers as the artifact will (named arrays → named arrays, any legal sizes), in whatever way is quickest to
    make: a simulation, where writing the artifact takes long. `layers` are the names of what is quantized in it, in the
    model's order: module paths (`layer1.0.conv2`) where the format knows them. `notes` go into the report.
    """

    method: Int8Method
    kept_float: frozenset[str]
    layers: tuple[str, ...]
    call: Call
    notes: tuple[str, ...] = ()


class Workbench(Protocol):
    """Made once an export: it may keep what all trials share (the program, calibration statistics)."""

    def methods(self) -> Sequence[Int8Method]:
        """Candidates for this model on this machine, the most promising first. Never empty."""
        ...

    def attempt(self, method: Int8Method, kept_float: Collection[str] = ()) -> Trial:
        """Quantize all but the layers named in `kept_float`. Raises ExportError when the method does not go with the
        model (nothing to quantize in it)."""
        ...

    def write(self, trial: Trial) -> dict[str, Any]:
        """Write the artifact of a trial into the job's folder; returns the format's details, as its `export` does.

        Under `int8` they hold `layers` (how many weights' operators compute in int8 in what was really written, read
        back from it) and `exact_on` ("any" or a tuple of CPU features, one of which the CPU must have). Raises
        ExportError when what was written is not quantized.
        """
        ...
