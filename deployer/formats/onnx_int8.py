"""INT8 for ONNX Runtime: the workbench of format `onnx`.

The float32 file is made once and run once over the calibration data; every attempt then rewrites the graph in memory
(`int8_graph`) and opens a session. Convolutions are quantized with fixed ranges alone (with ranges taken at run time
ONNX Runtime is three times slower than in float), linear and recurrent layers row by row at run time first.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deployer.errors import ExportError, first_line
from deployer.formats import onnx as float_onnx
from deployer.formats.int8_graph import Int8Graph, Layer, check_known, smoothing
from deployer.formats.record import ExportJob, LoadJob, Target
from deployer.machine import INT8_IN_32_BITS, sums_int8_in_32_bits
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import OBSERVERS, DynamicInt8, Int8Method, StaticInt8, WeightOnlyInt8
from deployer.quantize.observers import Spread, limits
from deployer.quantize.workbench import Trial
from deployer.spec import Array, Arrays

log = logging.getLogger(__name__)

NO_SCALES: Mapping[str, Array] = {}

_ROWS_AT_ONCE = 8  # with every value kept, memory grows with the rows
_SINGLE_FILE_LIMIT_BYTES = 1_500_000_000  # protobuf stops at 2 GiB
SMOOTH_DYNAMIC, SMOOTH_STATIC = 0.5, 0.6  # best on MiniLM among 0.4, 0.5, … 0.8
#: operators of ONNX Runtime that multiply weights in INT8
_INTEGER_OPERATORS = (
    "QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
)  # fmt: skip

#: the kinds of layers that each method quantizes
_KINDS: dict[type, tuple[str, ...]] = {
    StaticInt8: ("conv", "linear"),
    DynamicInt8: ("linear", "lstm"),
    WeightOnlyInt8: ("conv", "linear", "embedding"),
}


class OnnxWorkbench:
    """See `quantize.workbench.Workbench`."""

    #: of the session that a trial answers with
    session_options: Mapping[str, Any] = {}

    def __init__(self, job: ExportJob, calibration: Calibration) -> None:
        import onnx

        self.job, self._calibration = job, calibration
        with tempfile.TemporaryDirectory() as folder:
            self.details: dict[str, Any] = float_onnx.export(replace(job, folder=Path(folder), target=Target("onnx")))
            self.graph = Int8Graph(onnx.load(Path(folder) / float_onnx.ARTIFACT))
        if not self.graph.layers:
            raise ExportError("nothing in the model is quantized: it has no convolution, linear or recurrent layer")
        self._seen: dict[str, Spread] | None = None
        self._counted = False

    # ------------------------------------------------------------------------------------------------------ calibration

    def _spreads(self, observer: str) -> dict[str, Spread]:
        """Statistics of every value that may be rounded; histograms when an observer asks for them."""
        if self._seen is None:
            self._seen = {name: Spread(axis) for name, axis in self.graph.watched().items()}
            self._observe(self._seen, Spread.see)
        if observer != "min-max" and not self._counted:
            self._counted = True
            self._observe(self._seen, Spread.count)
        return self._seen

    def _observe(
        self,
        spreads: Mapping[str, Spread],
        take: Callable[[Spread, Array], None],
        scales: Mapping[str, Array] = NO_SCALES,
    ) -> None:
        """Run the calibration data through the float model; `scales` divide the channels of a value first."""
        names = list(spreads)
        session = self._session(self.graph.with_outputs(names))
        for arrays in self._calibration:
            for rows in self._in_rows(arrays):
                for name, value in zip(names, session.run(names, dict(rows)), strict=True):
                    if value.size and value.dtype == np.float32:
                        if not np.isfinite(value).all():
                            raise ExportError(
                                f"'{name}' is NaN or infinite on the calibration data, and no range holds that"
                            )
                        take(spreads[name], value / scales[name] if name in scales else value)

    def _in_rows(self, arrays: Arrays) -> Iterator[Arrays]:
        """A few rows at a time, where there is a batch axis."""
        spec = self.job.spec
        axes = {tensor.name: tensor.shape.index(spec.batch) for tensor in spec.inputs if spec.batch in tensor.shape}
        if not axes:
            yield arrays
            return
        name, axis = next(iter(axes.items()))
        least, total = spec.dims[str(spec.batch)].min, arrays[name].shape[axis]
        for start in range(0, total, _ROWS_AT_ONCE):
            stop = start + _ROWS_AT_ONCE
            places = range(max(0, min(start, min(stop, total) - least)), min(stop, total))
            yield {key: array.take(places, axis=axes[key]) if key in axes else array for key, array in arrays.items()}

    # --------------------------------------------------------------------------------------------------------- attempts

    def methods(self) -> Sequence[Int8Method]:
        reduced = not sums_int8_in_32_bits()
        kinds = {layer.kind for layer in self.graph.layers}
        by_ranges: list[Int8Method] = []
        if "conv" in kinds:
            by_ranges += [StaticInt8(observer, reduced) for observer in OBSERVERS]
            by_ranges += [StaticInt8("min-max", reduced, correct_bias=True)]
        elif self._outer_linear():
            by_ranges += [StaticInt8(observer, reduced, smooth=SMOOTH_STATIC) for observer in ("min-max", "mse")]
        by_rows: list[Int8Method] = []
        if "linear" in kinds:
            by_rows += [DynamicInt8(reduced, SMOOTH_DYNAMIC)]
        if kinds & {"linear", "lstm"}:
            by_rows += [DynamicInt8(reduced)]
        if "conv" not in kinds or "lstm" in kinds:
            return [*by_rows, *by_ranges, WeightOnlyInt8()]
        # Of a convolutional network the last layer alone would be quantized row by row: exact, and of no use.
        return (
            [*by_ranges, WeightOnlyInt8()] if self.mostly_convolutions() else [*by_rows, *by_ranges, WeightOnlyInt8()]
        )

    def _outer_linear(self) -> list[Layer]:
        return [layer for layer in self.graph.layers if layer.kind == "linear" and not layer.inner]

    def mostly_convolutions(self) -> bool:
        """Whether more than half of the multiplications, counted on the calibration data, are those of convolutions."""
        spreads = self._spreads("min-max")
        convs = sum(spreads[layer.input].vectors * layer.work for layer in self.graph.layers if layer.kind == "conv")
        return bool(convs > sum(spreads[layer.input].vectors * layer.work for layer in self._outer_linear()))

    def attempt(self, method: Int8Method, kept_float: Collection[str] = ()) -> Trial:
        check_known(self.graph.layers, kept_float)
        model, layers, notes = self.quantized(method, frozenset(kept_float))
        try:
            loaded = float_onnx.open_model(_source(model), LoadJob(self.job.folder, self.job.spec, Target("onnx"), {}))
        except Exception as error:  # ONNX Runtime's classes are its own
            raise ExportError(f"{method}: ONNX Runtime refuses the graph: {first_line(error)}") from error
        return Trial(method, frozenset(kept_float), layers, loaded.call, notes)

    def quantized(self, method: Int8Method, kept_float: frozenset[str]) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        """(the model, names of its INT8 layers in order, notes). Raises ExportError where the method finds no layer."""
        kinds = _KINDS[type(method)]
        layers = [layer for layer in self.graph.layers if layer.kind in kinds and layer.name not in kept_float]
        notes: list[str] = []
        if isinstance(method, StaticInt8):
            layers = [layer for layer in layers if not layer.inner]
            layers, idle = self._used(layers)
            notes += [f"kept in float, since calibration data never reach them: {', '.join(idle)}"] if idle else []
        if not layers:
            raise ExportError(f"{method}: the model has no layer that this quantizes")
        if isinstance(method, WeightOnlyInt8):
            model = self.graph.weight_only(layers)
        elif isinstance(method, DynamicInt8):
            scales = self._scales(layers, method.smooth)
            model = self.graph.dynamic(layers, reduce_range=method.reduce_range, scales=scales)
            if any(layer.kind == "lstm" for layer in layers):
                notes.append(
                    "recurrent layers round a whole batch with one range: a row's answer depends on the others"
                )
        else:
            model = self._static(layers, method)
        return model, tuple(dict.fromkeys(layer.name for layer in layers)), tuple(notes)

    def _used(self, layers: Collection[Layer]) -> tuple[list[Layer], list[str]]:
        """Layers whose inputs were more than zeros on the calibration data, and the names of the others."""
        spreads = self._spreads("min-max")
        idle = [layer.name for layer in layers if spreads[layer.input].low == spreads[layer.input].high]
        return [layer for layer in layers if layer.name not in idle], idle

    def _static(self, layers: list[Layer], method: StaticInt8) -> Any:
        if method.equalize:
            raise ExportError(f"{method}: equalisation is not built for this format")
        spreads = self._spreads(method.observer)
        ranges = {name: limits(spread, method.observer, symmetric=method.symmetric) for name, spread in spreads.items()}
        smooth = self._smooth(self._scales(layers, method.smooth), method)
        means = {name: spread.mean for name, spread in spreads.items()} if method.correct_bias else None
        return self.graph.static(
            layers,
            ranges,
            reduce_range=method.reduce_range,
            symmetric=method.symmetric,
            smooth=smooth,
            means=means,
        )

    def _scales(self, layers: Collection[Layer], alpha: float | None) -> dict[str, Array]:
        if alpha is None:
            return {}
        return smoothing(self.graph, layers, self._spreads("min-max"), alpha)

    def _smooth(self, scales: Mapping[str, Array], method: StaticInt8) -> dict[str, tuple[Array, tuple[float, float]]]:
        """Each scale with the range of what is rounded after its channels were divided."""
        if not scales:
            return {}
        spreads = {name: Spread(-1) for name in scales}
        for take in (Spread.see, Spread.count)[: 1 if method.observer == "min-max" else 2]:
            self._observe(spreads, take, scales)
        return {
            name: (scales[name], limits(spread, method.observer, symmetric=method.symmetric))
            for name, spread in spreads.items()
        }

    # ---------------------------------------------------------------------------------------------------------- writing

    def write(self, trial: Trial) -> dict[str, Any]:
        path = self.write_file(trial)
        layers = self._integer_layers(path)
        if not layers and not isinstance(trial.method, WeightOnlyInt8):
            raise ExportError(f"{trial.method}: ONNX Runtime computes no layer of the written file in INT8")
        exact = isinstance(trial.method, WeightOnlyInt8) or trial.method.reduce_range
        return {
            **self.details,
            "int8": {
                "layers": sum(layers.values()),
                "operators": layers,
                "exact_on": "any" if exact else INT8_IN_32_BITS,
            },
        }

    def write_file(self, trial: Trial) -> Path:
        """The ONNX file of a trial in the job's folder, held to the spec. Raises ExportError."""
        import onnx

        model, _, _ = self.quantized(trial.method, trial.kept_float)
        path = self.job.folder / float_onnx.ARTIFACT
        onnx.save(model, path, save_as_external_data=_large(model), location=path.name + ".data")
        float_onnx.check_axes(path, self.job.spec)
        return path

    def _integer_layers(self, path: Path) -> dict[str, int]:
        """Operator → how many of it multiply weights in INT8 once ONNX Runtime has optimised the file."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            optimized = Path(folder) / "optimized.onnx"
            self._session(str(path), optimized)
            graph = onnx.load(optimized, load_external_data=False).graph
        return dict(Counter(name for name in _operators(graph) if name in _INTEGER_OPERATORS))

    def _session(self, model: Any, optimized: Path | None = None) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        try:
            return onnxruntime.InferenceSession(
                model if isinstance(model, str) else _source(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its classes are its own
            raise ExportError(f"ONNX Runtime refuses the graph: {first_line(error)}") from error


def _large(model: Any) -> bool:
    return bool(model.ByteSize() > _SINGLE_FILE_LIMIT_BYTES)


def _source(model: Any) -> bytes:
    if _large(model):
        raise ExportError(
            f"the model has {model.ByteSize() / 1e9:.1f} GB of weights; INT8 of ONNX is built for up to 1.5 GB"
        )
    return bytes(model.SerializeToString())


def _operators(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _operators(attribute.g)
