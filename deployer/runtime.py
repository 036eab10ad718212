"""Bundle → open Runner. Hashes and machine are checked before anything is deserialized, inputs before every run."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from deployer.bundle import Bundle, Manifest, read_bundle
from deployer.errors import BundleError, DeployerError, MachineError, first_line
from deployer.formats import Loaded, LoadJob, Target, get_format
from deployer.machine import architecture, cpu_features
from deployer.spec import Array, Arrays, ModelSpec


class Runner:
    """An open artifact: named arrays in, named arrays out. A context manager.

    Every call is held to the spec: unknown names, other dtypes, ranks and sizes outside the declared ranges raise
    RequestError and never reach the artifact (some formats answer them wrongly without a word).
    """

    def __init__(self, spec: ModelSpec, loaded: Loaded) -> None:
        self.spec = spec
        self.engine = loaded.engine
        self._call: Any = loaded.call

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        if self._call is None:
            raise BundleError("this runner is closed; open the bundle again")
        sizes = self.spec.check_inputs(arrays)
        # Compiled artifacts read memory as laid out when exported: other strides give wrong answers, no error.
        outputs: dict[str, Array] = self._call({name: np.ascontiguousarray(array) for name, array in arrays.items()})
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
    record.check_machine(to_run=True)
    needs = manifest.machine
    if record.native_code and needs.architecture != architecture():
        raise MachineError(
            f"the artifact is machine code for {needs.architecture}, this machine is {architecture()}; export it here"
        )
    if lacking := sorted(set(needs.cpu_features) - set(cpu_features())):
        raise MachineError(
            f"the artifact uses CPU features that this machine lacks ({', '.join(lacking)}); export it here"
        )


def open_artifact(
    folder: Path, spec: ModelSpec, target: Target, details: dict[str, Any], threads: int | None = None
) -> Runner:
    """Open an artifact that was just written, without a manifest. `threads` is the number of compute threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    job = LoadJob(folder, spec, target, details, threads)
    try:
        return Runner(spec, get_format(target.format).load(job))
    except DeployerError:
        raise
    except Exception as error:  # every engine has its own classes: ONNX Runtime's are no RuntimeError
        raise BundleError(f"'{folder}' cannot be opened as {target.format}: {first_line(error)}") from error


def open_bundle(path: str | Path | Bundle, *, threads: int | None = None) -> Runner:
    """Verify a bundle and open it. Raises BundleError, IntegrityError or MachineError."""
    bundle = path if isinstance(path, Bundle) else read_bundle(path)
    manifest = bundle.manifest
    preflight(manifest)
    return open_artifact(bundle.path, manifest.spec, manifest.target, manifest.details, threads)
