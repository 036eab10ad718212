"""The exact versions and hashes of the packages that an image installs.

Versions are those of this environment, where the models were tried. Hashes are of the wheels that pip chooses here for
those versions, from the indexes and folders that pip is configured with; pip is asked, so that its configuration holds.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from deployer.errors import MachineError, UsageError

WHEELS_FOLDER = "wheels"

_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--retries", "2")
_UNREACHABLE = ("Failed to resolve", "NewConnectionError", "connection broken", "Could not fetch URL", "ProxyError")


@dataclass(frozen=True)
class Wheel:
    """The one file that a package is installed from."""

    file: str
    sha256: str
    #: read from a folder of this machine, so that another machine's index may hold other bytes of that name
    local: bool


def locked_versions(roots: Iterable[str]) -> dict[str, str]:
    """name → version of `roots` and of everything that they require, as installed in this environment.

    Markers are evaluated here; extras count where a requirement names them. Raises MachineError when one is missing.
    """
    pins: dict[str, str] = {}
    done: set[tuple[str, str]] = set()
    queue = [(canonicalize_name(root), "") for root in roots]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise MachineError(
                f"the image needs {name}, whose version is read from this environment, where it is missing",
                install="pip install 'deployer[cpu,serve]'",
            ) from error
        pins[name] = distribution.version
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    return dict(sorted(pins.items()))


def find_wheels(pins: Mapping[str, str]) -> dict[str, Wheel]:
    """name → the wheel that pip would install here for each pin, with its hash; little is downloaded.

    Raises MachineError when one is nowhere, no index answers, or there is no pip.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip("install", "--dry-run", "--ignore-installed", "--report", str(report), pins=pins)
        items = json.loads(report.read_text())["install"]
    wheels: dict[str, Wheel] = {}
    for item in items:
        source = item["download_info"]
        url = urlsplit(source["url"])
        name, file = canonicalize_name(item["metadata"]["name"]), Path(unquote(url.path)).name
        sha256 = source["archive_info"]["hashes"].get("sha256")
        if sha256 is None:
            raise MachineError(
                f"the index gives {' and '.join(source['archive_info']['hashes'])} of {file}, not its sha256; name an "
                "index that does (PIP_INDEX_URL), or have the wheels themselves put into the context (--wheels)"
            )
        wheels[name] = Wheel(file, sha256, local=url.scheme == "file")
    return _checked(pins, wheels)


def download_wheels(pins: Mapping[str, str], folder: Path) -> dict[str, Wheel]:
    """As `find_wheels`, and the wheels themselves in `folder`, from where pip installs them without any index."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--dest", str(folder), pins=pins)
    wheels: dict[str, Wheel] = {}
    for path in sorted(folder.glob("*.whl")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        wheels[parse_wheel_filename(path.name)[0]] = Wheel(path.name, digest, local=False)
    return _checked(pins, wheels)


def _checked(pins: Mapping[str, str], wheels: dict[str, Wheel]) -> dict[str, Wheel]:
    """`wheels`, if they are all of the pins and of their very versions: to pip, 2.13.0+cpu is a kind of 2.13.0."""
    if absent := sorted(pins.keys() - wheels.keys()):
        raise MachineError(f"pip names no wheel of {', '.join(absent)}; update it: python -m pip install --upgrade pip")
    for name, version in pins.items():
        if (found := parse_wheel_filename(wheels[name].file)[1]) != Version(version):
            raise MachineError(
                f"pip takes {name} {found} where this environment has {version}; name an index or a folder that offers "
                "that one alone (PIP_INDEX_URL, PIP_FIND_LINKS)"
            )
    return wheels


def _pip(*words: str, pins: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(_sources(pins) + _lines(pins)) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, *_PIP_OPTIONS, "-r", str(listed)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    if done.returncode == 0:
        return
    # Not asked beforehand: looking for the module pip makes setuptools withdraw its distutils from this very process.
    if "No module named pip" in done.stderr:
        raise MachineError(
            "the hashes of the image's packages are asked of pip, which this environment lacks; --no-hashes does "
            "without them",
            install="python -m ensurepip",
        )
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    said = errors[-1] if errors else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    cause = " (an index could not be reached)" if any(words in done.stderr for words in _UNREACHABLE) else ""
    raise MachineError(
        f"the image's packages were not found as wheels{cause}, pip says: {said.rstrip('.')}; name an index or a "
        "folder that has them (PIP_INDEX_URL, PIP_FIND_LINKS), or add --no-hashes to pin versions alone"
    )


def requirements_text(pins: Mapping[str, str], wheels: Mapping[str, Wheel] | None, *, included: bool = False) -> str:
    """The requirements.txt of a context: hashed where `wheels` are known, else it says at its head that it is not.

    `included`: the wheels lie beside it in WHEELS_FOLDER, and no index is asked.
    """
    if included and wheels is None:
        raise UsageError("--wheels and --no-hashes do not go together: wheels at hand are always hashed")
    head = [f"# Read by `deployer build` under Python {platform.python_version()} on {platform.machine()}."]
    if wheels is None:
        head += ["# WITHOUT HASHES, as --no-hashes asked: whatever the index gives under these names is installed."]
        return "\n".join([*head, *_sources(pins), *_lines(pins)]) + "\n"
    head += [
        "# Each hash is of the one wheel that pip chose there: the base image needs the same Python version and",
        "# machine, and a glibc that takes the same wheel.",
    ]
    if included:
        options = ["--no-index", f"--find-links {WHEELS_FOLDER}"]
    else:
        if local := [name for name in pins if wheels[name].local]:
            head += ["# Hashes of files that lay on that machine, which the index must hold too: " + ", ".join(local)]
        options = _sources(pins)
    lines = [f"{line} --hash=sha256:{wheels[name].sha256}" for name, line in zip(pins, _lines(pins), strict=True)]
    return "\n".join([*head, "--require-hashes", *options, *lines]) + "\n"


def _lines(pins: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in pins.items()]


def _sources(pins: Mapping[str, str]) -> list[str]:
    """A version such as 2.13.0+cpu is on PyTorch's own pages alone; the page of that one package is read, not the
    index."""
    return [
        f"--find-links https://download.pytorch.org/whl/{version.partition('+')[2]}/{name}/"
        for name, version in pins.items()
        if "+" in version
    ]
