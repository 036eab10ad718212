"""TensorRT-RTX engines, built ahead of time from an ONNX file on any machine: no GPU and no driver is needed.

    facts = build_engine(Path("model.onnx"), Path("model.plan"), {"image": ((1, 3, 8, 8), (8, 3, 8, 8), (64, 3, 8, 8))})

The ONNX file says what is computed in which type: float32, float16, or INT8 where QuantizeLinear and DequantizeLinear
stand (symmetric, no quantized bias). What the engine really does with it is read back from the build's own listing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deployer.errors import BundleError, ExportError, MachineError, UsageError, first_line
from deployer.formats.record import Loaded, LoadJob
from deployer.spec import Array, Arrays, ModelSpec

log = logging.getLogger(__name__)

PLAN = "model.plan"

#: GPU generations that TensorRT-RTX 1.7 builds for
GPU_ARCHS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
#: the RTX 30, 40 and 50 series; sm75 (RTX 20) takes no float32 matrix products and is built on request alone
DEFAULT_GPU_ARCHS = ("sm86", "sm89", "sm120")

Profile = Mapping[str, Sequence[tuple[int, ...]]]

#: dtypes of a spec → as TensorRT's listing names them; the others it does not carry
_LISTED_DTYPES = {
    "bool": "Bool", "uint8": "UInt8", "int8": "Int8", "int32": "Int32", "int64": "Int64",
    "float16": "Half", "float32": "Float",
}  # fmt: skip
_PRECISIONS = {"Float": "FP32", "Half": "FP16", "Int8": "INT8", "BFloat16": "BF16", "BF16": "BF16"}
_MATRIX_OPERATORS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum")
_MATRIX_LAYERS = ("correlation", "gemm")
_ELEMENTWISE = "kgen"  # kernels generated for chains of other operators, tiny matrix products among them
_REASON_LIMIT_CHARS = 400

#: (what the library's reason says, what it means and what to do)
_HINTS = (
    (r"FP32 GEMM is not supported", "sm75 takes no float32 matrix products: leave it out, or use --precision fp16"),
    (r"has type Int32 but must have type", "an int32 bias is dequantized: quantize with QuantizeBias=False"),
    (
        r"Failed to convert ONNX date type",
        "TensorRT has no such dtype: use float32, float16, int32, int64, int8 or bool",
    ),
    (r"symmetric|zero.?point", "TensorRT takes symmetric quantization alone: quantize with ActivationSymmetric=True"),
    (r"No importer registered|[Uu]nsupported|Plugin not found", "TensorRT lacks this operator: use another format"),
)


def profile_of(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → its smallest, typical and largest shape, from the spec's Dims."""

    def shape(sizes: Sequence[int | str], which: str) -> tuple[int, ...]:
        return tuple(getattr(spec.dims[size], which) if isinstance(size, str) else size for size in sizes)

    return {
        tensor.name: tuple(shape(tensor.shape, which) for which in ("min", "typical", "max")) for tensor in spec.inputs
    }


def check_profile(profile: Profile) -> None:
    """Raises ExportError naming the input and axis whose sizes are not 1 ≤ min ≤ typical ≤ max.

    The library takes a smallest size of 0 without a word, and an engine for it is of no use.
    """
    for name, shapes in profile.items():
        if len({len(shape) for shape in shapes}) != 1 or len(shapes) != 3:
            raise ExportError(
                f"input '{name}' has the profile {list(shapes)}; a min, typical and max shape is expected"
            )
        for axis, sizes in enumerate(zip(*shapes, strict=True)):
            if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                low, typical, high = sizes
                raise ExportError(
                    f"axis {axis} of '{name}' has min={low}, typical={typical}, max={high}; "
                    "1 ≤ min ≤ typical ≤ max is expected"
                )


def build_engine(
    source: Path, plan: Path, profile: Profile, gpu_archs: Collection[str] = DEFAULT_GPU_ARCHS
) -> dict[str, Any]:
    """Build the ONNX file `source` into the engine `plan`, for each of the GPU generations.

    `profile` is the smallest, typical and largest shape of each input. Two builds of one file are byte-identical.
    Returns what the build's own listing says: `layers` ("INT8", "FP16", "FP32" → how many matrix and convolution
    layers compute in it), `matrix_operators` of the file (several may share a layer), how many of them are `dissolved`
    into elementwise kernels, `profile` and `io_dtypes`. Raises ExportError with the library's reason and
    what to do, UsageError for an unknown GPU generation.
    """
    import tensorrt_rtx as trt

    check_profile(profile)
    _check_archs(gpu_archs)
    _check_types(source)
    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(source)):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise _refusal("cannot read the ONNX file", [*errors, *logger.errors])
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = len(gpu_archs)
    for index, arch in enumerate(gpu_archs):
        config.set_compute_capability(getattr(trt.ComputeCapability, arch.upper()), index)
    _add_profile(builder, network, config, profile)
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise _refusal(f"cannot build an engine for {', '.join(gpu_archs)}", logger.errors)
    plan.write_bytes(bytes(data))
    return _read_listing(logger.listing, _matrix_nodes(source))


def _check_archs(gpu_archs: Collection[str]) -> None:
    if not gpu_archs:
        raise UsageError(f"no GPU generation given; valid: {', '.join(GPU_ARCHS)}")
    for arch in gpu_archs:
        if arch not in GPU_ARCHS:
            raise UsageError(f"--gpu-arch {arch} is unknown; valid: {', '.join(GPU_ARCHS)}")


def _check_types(source: Path) -> None:
    """bfloat16 is refused here: TensorRT-RTX takes some of it, and no CPU at hand could prove the answers."""
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    kinds = [(value.name, value.type.tensor_type.elem_type) for value in (*graph.input, *graph.output)]
    kinds += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
    for name, kind in kinds:
        if kind == onnx.TensorProto.BFLOAT16:
            raise ExportError(f"'{name}' is bfloat16; the ONNX file of an engine is float32, float16 or QDQ INT8")


def _add_profile(builder: Any, network: Any, config: Any, profile: Profile) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in inputs:
        if tensor.name not in profile:
            raise ExportError(f"the ONNX file has the input '{tensor.name}', which the profile lacks")
        if tensor.is_shape_tensor:
            raise ExportError(
                f"the values of input '{tensor.name}' decide on a shape, which an engine built ahead cannot take; "
                "give that number to the model when it is built"
            )
    if unknown := sorted(set(profile) - {tensor.name for tensor in inputs}):
        raise ExportError(f"the ONNX file has no input '{unknown[0]}'; it has {', '.join(t.name for t in inputs)}")
    shapes = builder.create_optimization_profile()
    for name, (smallest, typical, largest) in profile.items():
        shapes.set_shape(name, smallest, typical, largest)
    config.add_optimization_profile(shapes)  # what it refuses, the build refuses, with the reason in the logger


def _refusal(what: str, reasons: Iterable[str]) -> ExportError:
    """One line: the library's own words and, where they are known, what they mean."""
    told = []
    for reason in reasons:
        text = " ".join(line for line in reason.splitlines() if "checkMacros" not in line).strip()
        if text and text not in told and not text.startswith("ModelImporter"):
            told.append(text)
    reason = "; ".join(told)[:_REASON_LIMIT_CHARS] or "it gives no reason"
    hint = next((f" ({hint})" for pattern, hint in _HINTS if re.search(pattern, reason)), "")
    return ExportError(f"TensorRT-RTX {what}{hint}: {reason}")


def _make_logger(trt: Any) -> Any:
    """Keeps errors and the listing of layers; a class of the library's own, made where the library is loaded."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.listing = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
            elif message.startswith("Layers:"):
                self.listing = message
            log.debug("tensorrt_rtx: %s", first_line(Exception(message)))

    return Logger()


# ------------------------------------------------------------------------------------------------- reading the listing


def _matrix_nodes(source: Path) -> set[str]:
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    return {node.name for node in graph.node if node.op_type in _MATRIX_OPERATORS and node.name}


def _read_listing(listing: str, matrix_nodes: Collection[str]) -> dict[str, Any]:
    """What `build_engine` returns. Raises ExportError when the library lists no layers: nothing is assumed of them."""
    layers, _, rest = listing.partition("I/O Tensors:")
    if not rest:
        raise ExportError("TensorRT-RTX listed no layers; this deployer reads the listing of version 1.7")
    counts: dict[str, int] = {}
    placed: set[str] = set()
    for kind, inputs, line in _layer_lines(layers):
        made_of = set(re.findall(r"\[ONNX Layer: ([^\]]*)\]", line)) & set(matrix_nodes)
        if kind in _MATRIX_LAYERS or (kind != _ELEMENTWISE and made_of):
            dtype = re.search(r"Datatype: (\w+)", inputs)
            name = _PRECISIONS.get(dtype[1], dtype[1]) if dtype else "unknown"
            counts[name] = counts.get(name, 0) + 1
            placed |= made_of
    tensors = [line.strip() for line in rest.splitlines() if "IOMode:" in line]
    return {
        "layers": dict(sorted(counts.items())),
        "matrix_operators": len(matrix_nodes),
        "dissolved": len(set(matrix_nodes) - placed),
        "profile": dict(filter(None, map(_listed_shapes, tensors))),
        "io_dtypes": dict(map(_listed_dtype, tensors)),
    }


def _layer_lines(layers: str) -> Iterator[tuple[str, str, str]]:
    """(type, inputs, the whole line) of each layer of the listing."""
    for line in layers.splitlines():
        found = re.match(r"Name: .*?, LayerType: ([^,]*), Inputs: \[(.*?)\], Constants:", line)
        if found is not None:
            yield found[1], found[2], line


def _listed_shapes(line: str) -> tuple[str, list[list[int]]] | None:
    """(input, [min, typical, max shape]) of a line of the listing; None for an output."""
    shapes = [re.search(rf"{which}Shape: \[([\d,]*)\]", line) for which in ("Min", "Opt", "Max")]
    if not all(shapes):
        return None
    return _listed_dtype(line)[0], [[int(size) for size in found[1].split(",") if size] for found in shapes if found]


def _listed_dtype(line: str) -> tuple[str, str]:
    found = re.match(r"Name: (.*?), IOMode: \w+, DataType: (\w+)", line)
    if found is None:
        raise ExportError(f"TensorRT-RTX lists a tensor in a way that this deployer does not read: {line[:80]}")
    return found[1], found[2]


def check_listing(facts: Mapping[str, Any], spec: ModelSpec) -> None:
    """Hold what was built to the spec. Raises ExportError naming the tensor that came out otherwise."""
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor.name not in facts["io_dtypes"]:
            raise ExportError(f"the engine lost '{tensor.name}'; it has {', '.join(facts['io_dtypes'])}")
        listed = facts["io_dtypes"][tensor.name]
        if listed != _LISTED_DTYPES.get(tensor.dtype):
            raise ExportError(
                f"'{tensor.name}' is {tensor.dtype} and {listed} in the engine; TensorRT carries "
                f"{', '.join(_LISTED_DTYPES)}: let the model take or give one of them"
            )
    for name, shapes in profile_of(spec).items():
        wanted = [list(shape) for shape in shapes]
        if facts["profile"].get(name, wanted) != wanted:
            raise ExportError(f"the engine takes '{name}' in {facts['profile'][name]}, where {wanted} was asked for")


# ------------------------------------------------------------------------------------------------------------- running


def load(job: LoadJob) -> Loaded:
    """Deserialize the engine on the GPU at hand. Raises BundleError with the library's reason."""
    import tensorrt_rtx as trt
    import torch

    logger = _make_logger(trt)
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine((job.folder / PLAN).read_bytes())
    if engine is None:
        raise BundleError(f"TensorRT-RTX cannot load '{job.folder / PLAN}': {'; '.join(logger.errors) or 'no reason'}")
    context = engine.create_execution_context()
    if context is None:
        raise MachineError(f"TensorRT-RTX has no room for the engine: {'; '.join(logger.errors) or 'no reason'}")
    session = _Session(trt, (runtime, engine), context, job.spec)
    return Loaded(session, f"TensorRT-RTX {trt.__version__} on {torch.cuda.get_device_name()}")


class _Session:
    """An engine with a stream of its own; buffers are CUDA tensors of torch."""

    def __init__(self, trt: Any, alive: Any, context: Any, spec: ModelSpec) -> None:
        """`alive` is what must not be freed before the context."""
        import torch

        self._trt, self._alive, self._context = trt, alive, context
        self._names = [tensor.name for tensor in spec.outputs]
        self._dtypes = {tensor.name: getattr(torch, tensor.dtype) for tensor in spec.outputs}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        """Copy to the GPU, execute, wait, copy back. Raises RuntimeError naming what the engine refuses."""
        import torch

        with torch.cuda.stream(self._stream):
            held = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
            for name, tensor in held.items():
                if not self._context.set_input_shape(name, tuple(tensor.shape)):
                    raise RuntimeError(f"the engine refuses the shape {list(tensor.shape)} of '{name}'")
                self._context.set_tensor_address(name, tensor.data_ptr())
            outputs = {name: _Output(self._trt, self._dtypes[name]) for name in self._names}
            for name, output in outputs.items():
                self._context.set_output_allocator(name, output.allocator)
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise RuntimeError("the engine failed to execute")
            self._stream.synchronize()
            return {name: output.tensor().cpu().numpy() for name, output in outputs.items()}


class _Output:
    """Memory for one output, of the size that the engine asks for once it knows it."""

    def __init__(self, trt: Any, dtype: Any) -> None:
        import torch

        outer = self
        self._dtype = dtype
        self._shape: tuple[int, ...] = ()
        self._memory = torch.empty(1, dtype=torch.uint8, device="cuda")

        class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
            def reallocate_output_async(self, name: str, memory: Any, size: int, alignment: int, stream: Any) -> int:
                outer._memory = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")  # aligned to 512 bytes
                return int(outer._memory.data_ptr())

            def notify_shape(self, name: str, shape: Any) -> None:
                outer._shape = tuple(shape)

        self.allocator = Allocator()

    def tensor(self) -> Any:
        size_bytes = math.prod(self._shape) * self._dtype.itemsize
        return self._memory[:size_bytes].view(self._dtype).reshape(self._shape)
