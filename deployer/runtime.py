"""Bundle → open Runner. Hashes and machine are checked before anything is deserialized, inputs before every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from deployer.bundle import Bundle, Manifest, read_bundle
from deployer.errors import BundleError, DeployerError, MachineError, first_line
from deployer.formats import Loaded, LoadJob, Target, get_format
from deployer.machine import architecture, cpu_features, cpu_name, gpu_fault
from deployer.spec import Array, Arrays, ModelSpec, in_c_order


class Runner:
    """An open artifact: named arrays in, named arrays out. A context manager.

    Every call is held to the spec: unknown names, other dtypes, ranks and sizes outside the declared ranges raise
    RequestError and never reach the artifact (some formats answer them wrongly without a word).
    """

    def __init__(self, spec: ModelSpec, loaded: Loaded, *, executed: bool = True) -> None:
        self.spec = spec
        self.engine = loaded.engine
        #: False where a stand-in runs and the artifact does not
        self.executed = executed
        self._call: Any = loaded.call

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        if self._call is None:
            raise BundleError("this runner is closed; open the bundle again")
        sizes = self.spec.check_inputs(arrays)
        # Compiled artifacts read memory as laid out when exported: other strides give wrong answers, no error.
        outputs: dict[str, Array] = self._call({name: in_c_order(array) for name, array in arrays.items()})
        self.spec.check_outputs(outputs, sizes)
        return outputs

    def close(self) -> None:
        self._call = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def preflight(manifest: Manifest) -> None:
    """Can this machine run the artifact? Raises MachineError that names what is missing."""
    record = get_format(manifest.target.format)
    if fault := device_fault(manifest.target, manifest.details):
        raise MachineError(f"{manifest.target.slug} cannot be executed on this machine: {fault}", reason="no_gpu")
    record.check_machine(to_run=True, builder=manifest.details.get("builder"))
    needs = manifest.machine
    if record.native_code and needs.architecture != architecture():
        raise MachineError(
            f"the artifact is machine code for {needs.architecture}, this machine is {architecture()}; export it here",
            reason="wrong_cpu",
        )
    if lacking := sorted(set(needs.cpu_features) - set(cpu_features())):
        raise MachineError(
            f"the artifact uses CPU features that this machine lacks ({', '.join(lacking)}); export it here",
            reason="wrong_cpu",
        )
    if fault := int8_fault(manifest.target, manifest.details):
        raise MachineError(fault, reason="wrong_cpu")


def int8_fault(target: Target, details: dict[str, Any]) -> str:
    """Why INT8 products come out wrong on this CPU; "" where they do not. `int8.exact_on` in the details is "any" or
    the CPU features of which one is needed."""
    exact_on = details.get("int8", {}).get("exact_on", "any")
    if target.device != "cpu" or exact_on == "any" or not set(exact_on).isdisjoint(cpu_features()):
        return ""
    return (
        f"this CPU ({cpu_name()}) has none of {', '.join(exact_on)}, one of which the INT8 artifact needs, or its sums "
        "overflow in silence; export it on this machine, where weights get 7 bits"
    )


def device_fault(target: Target, details: dict[str, Any]) -> str:
    """Why no device of this machine executes an artifact; "" where one does. `gpu_archs` in the details are the GPU
    generations that it was built for."""
    return "" if target.device == "cpu" else gpu_fault(details.get("gpu_archs", ()))


def open_artifact(
    folder: Path, spec: ModelSpec, target: Target, details: dict[str, Any], threads: int | None = None
) -> Runner:
    """Open an artifact that was just written, without a manifest. `threads` is the number of compute threads."""
    return Runner(spec, _load(get_format(target.format).load, LoadJob(folder, spec, target, details, threads)))


def open_for_gate(
    folder: Path, spec: ModelSpec, target: Target, details: dict[str, Any], threads: int | None = None
) -> Runner:
    """As `open_artifact`; where this machine cannot execute the artifact and the format has a stand-in (the ONNX file
    that an engine was built from), that is opened instead, and `engine` and `executed` of the Runner say so."""
    record = get_format(target.format)
    fault = device_fault(target, details)
    if not fault or record.stand_in is None:
        return open_artifact(folder, spec, target, details, threads)
    loaded = _load(record.stand_in, LoadJob(folder, spec, target, details, threads))
    engine = f"{loaded.engine}; {record.artifact} was built, not executed: {fault}"
    return Runner(spec, replace(loaded, engine=engine), executed=False)


def _load(load: Callable[[LoadJob], Loaded], job: LoadJob) -> Loaded:
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        return load(job)
    except DeployerError:
        raise
    except Exception as error:  # every engine has its own classes: ONNX Runtime's are no RuntimeError
        lacking = "NOT_IMPLEMENTED" in str(error)  # ONNX Runtime's word for an operator that it has no kernel for
        raise BundleError(
            f"'{job.folder}' cannot be opened as {job.target.format}: {first_line(error)}",
            reason="unsupported_operator" if lacking else "unloadable_artifact",
        ) from error


def open_bundle(path: str | Path | Bundle, *, threads: int | None = None) -> Runner:
    """Verify a bundle and open it. Raises BundleError, IntegrityError or MachineError."""
    bundle = path if isinstance(path, Bundle) else read_bundle(path)
    manifest = bundle.manifest
    preflight(manifest)
    return open_artifact(bundle.path, manifest.spec, manifest.target, manifest.details, threads)


def open_bundle_for_gate(bundle: Bundle, *, threads: int | None = None) -> Runner:
    """`open_bundle`, or the stand-in where this machine cannot execute the artifact and there is one."""
    manifest = bundle.manifest
    if get_format(manifest.target.format).stand_in is None or not device_fault(manifest.target, manifest.details):
        return open_bundle(bundle, threads=threads)
    return open_for_gate(bundle.path, manifest.spec, manifest.target, manifest.details, threads)
