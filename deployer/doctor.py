"""What this machine can do: versions, providers that really load, GPU, Java, compiler; what is missing and its install
line. Nothing is assumed from a package being installed: what can be tried is tried.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator

import msgspec

from deployer.errors import MachineError, first_line
from deployer.formats import FORMATS
from deployer.machine import architecture, cpu_features, cpu_name, gpu_fault, usable_cores
from deployer.package import ENGINES
from deployer.package.sbom import INSTALL as SBOM_INSTALL
from deployer.serve.java import find_java, java_version
from deployer.signature import INSTALL as SIGN_INSTALL
from deployer.signature import MODULES as _SIGNATURES
from deployer.tracing import INSTALL as OTEL_INSTALL
from deployer.versions import version_of

SCHEMA_VERSION = 1


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor: `status` is ok, missing or bad; `install` is the line that mends it, if one does."""

    subject: str
    status: str
    found: str
    needed_for: str = ""
    install: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def healthy(self) -> bool:
        """Nothing contradicts itself; something optional may still be missing."""
        return all(finding.status != "bad" for finding in self.findings)


def examine() -> Diagnosis:
    """Look at this machine. Never raises for what it finds."""
    findings: list[Finding] = []
    for check in (
        _machine,
        _torch,
        _onnxruntime,
        _torch_tensorrt,
        _formats,
        _engines,
        _extras,
        _java,
        _compiler,
        _containers,
    ):
        findings.extend(_guarded(check))
    return Diagnosis(tuple(findings))


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A library that crashes while it is looked at is a finding."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - whatever an import raises is what the user has to know
        return [Finding(check.__name__.strip("_"), "bad", f"{type(error).__name__}: {first_line(error)}")]


def _machine() -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    features = set(cpu_features())
    told = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd") if name in features]
    yield Finding("cpu", "ok", f"{cpu_name()}, {architecture()}, {usable_cores()} usable cores, {', '.join(told)}")


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding("torch", "ok", str(torch.__version__), "everything")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("gpu", "ok", f"{names}, CUDA {torch.version.cuda}", "CUDA targets")
    else:
        yield Finding("gpu", "missing", gpu_fault(), "CUDA targets")


def _onnxruntime() -> Iterator[Finding]:
    wheels = [name for name in ("onnxruntime", "onnxruntime-gpu") if version_of(name)]
    if len(wheels) == 2:
        yield Finding(
            "onnxruntime",
            "bad",
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other",
            "format onnx",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'deployer[cpu]'   # or deployer[gpu]",
        )
        return
    if not wheels:
        return  # told by the formats
    import onnxruntime

    loads = [name for name in onnxruntime.get_available_providers() if _provider_loads(name)]
    listed = [name for name in onnxruntime.get_available_providers() if name not in loads]
    refused = f"; listed but not loading here: {', '.join(listed)}" if listed else ""
    yield Finding(wheels[0], "ok", f"{onnxruntime.__version__}, loads {', '.join(loads)}{refused}", "format onnx")


def _torch_tensorrt() -> Iterator[Finding]:
    """Two wheels own `torch_tensorrt/`, each made for one torch. Judged by versions: neither imports without a GPU."""
    wheels = {name: text for name in ("torch-tensorrt", "torch-tensorrt-rtx") if (text := version_of(name))}
    if not wheels:
        return  # told by the formats
    mend = "pip uninstall -y torch-tensorrt torch-tensorrt-rtx && pip install 'deployer[trt]'"
    torch_release, releases = _release(version_of("torch") or ""), {_release(text) for text in wheels.values()}
    if len(wheels) == 2:
        fault = "torch-tensorrt and torch-tensorrt-rtx are both installed and overwrite each other"
        yield Finding("torch-tensorrt", "bad", fault, "format trt by torch-trt", mend)
    elif releases != {torch_release}:
        name, text = next(iter(wheels.items()))
        fault = f"{name} {text} is made for torch {_release(text)}, and torch {torch_release} is installed"
        yield Finding("torch-tensorrt", "bad", fault, "format trt by torch-trt", mend)
    else:
        found = ", ".join(f"{name} {text}" for name, text in wheels.items())
        yield Finding("torch-tensorrt", "ok", found, "format trt by torch-trt")


def _release(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


def _provider_loads(provider: str) -> bool:
    """Open a session on a one-node model with this provider alone, and read back what was loaded.

    The list of available providers says what was compiled in, not what works on this machine.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if provider.startswith("CPU") else "1")
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    except Exception:  # noqa: BLE001 - a provider fails to load in as many ways as there are providers
        return False
    return provider in session.get_providers()


def _formats() -> Iterator[Finding]:
    for record in FORMATS.values():
        for builder in [builder.name for builder in record.builders] or [""]:
            subject = f"format {record.name}{f' by {builder}' if builder else ''}"
            if missing := record.missing_modules(builder=builder):
                install = record.install_line(builder)
                yield Finding(subject, "missing", f"lacks {', '.join(missing)}", record.summary, install)
                continue
            versions = ", ".join(f"{name} {text}" for name in record.tools if (text := version_of(name)))
            yield Finding(subject, "ok", versions, record.summary)


def _engines() -> Iterator[Finding]:
    for engine in ENGINES.values():
        subject = f"engine {engine.name}"
        if missing := engine.missing_modules():
            yield Finding(subject, "missing", f"lacks {', '.join(missing)}", engine.summary, engine.install)
        else:
            yield Finding(subject, "ok", version_of(engine.name) or "installed", engine.summary)


def _extras() -> Iterator[Finding]:
    """What stands around serving and is optional."""
    told = (
        ("signatures", _SIGNATURES, "model-signing", "--sign-key, --verify-key", SIGN_INSTALL),
        ("bill of materials", ("cyclonedx",), "cyclonedx-python-lib", "NAME.mar.cdx.json", SBOM_INSTALL),
        ("traces", ("opentelemetry",), "opentelemetry-sdk", "OpenTelemetry, by the OTEL_* variables", OTEL_INSTALL),
    )
    for subject, modules, distribution, needed_for, install in told:
        if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
            yield Finding(subject, "missing", f"lacks {', '.join(missing)}", needed_for, install)
        else:
            yield Finding(subject, "ok", f"{distribution} {version_of(distribution)}", needed_for)


def _java() -> Iterator[Finding]:
    try:
        home = find_java(os.environ)
    except MachineError as error:
        yield Finding("java", "missing", str(error).split(";")[0], "engine torchserve", error.install)
        return
    yield Finding("java", "ok", f"Java {java_version(home)} in {home}", "engine torchserve")


def _compiler() -> Iterator[Finding]:
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            yield Finding("compiler", "ok", first_line(Exception(done.stdout)), "format aoti, --compile")
            return
    yield Finding("compiler", "missing", "neither g++ nor clang++", "format aoti, --compile", "apt-get install g++")


def _containers() -> Iterator[Finding]:
    found = [name for name in ("docker", "podman", "buildah") if shutil.which(name) and _answers(name)]
    if found:
        yield Finding("containers", "ok", ", ".join(found), "deployer build")
    else:
        yield Finding(
            "containers",
            "missing",
            "no docker, podman or buildah that answers",
            "deployer build (the context is written all the same)",
            "apt-get install buildah",
        )


def _answers(tool: str) -> bool:
    """`docker` is often a client without an engine."""
    try:
        return subprocess.run([tool, "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
