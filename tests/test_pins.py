"""Hashes of an image's packages: asked of a real pip, from folders, real indexes and none."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployer.errors import MachineError, UsageError
from deployer.package.pins import WHEELS_FOLDER, Wheel, download_wheels, find_wheels, requirements_text

PINS = {"tiny-one": "1.0", "tiny-two": "2.5"}


def make_wheel(folder: Path, name: str, version: str, *, code: str = "") -> Path:
    """A wheel that pip installs: one module, METADATA, WHEEL and a true RECORD."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": code or f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def shelf(tmp_path: Path) -> dict[str, Path]:
    return {name: make_wheel(tmp_path / "shelf", name, version) for name, version in PINS.items()}


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's pip: each test says where packages come from."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def offline(shelf: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an index, whose wheels lie in a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf["tiny-one"].parent))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """(folder, URL) of a web server for a simple index."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    folder = tmp_path / "index"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def publish(index: Path, shelf: dict[str, Path], algorithm: str) -> None:
    for name, wheel in shelf.items():
        page = index / name / "index.html"
        page.parent.mkdir()
        digest = hashlib.new(algorithm, wheel.read_bytes()).hexdigest()
        page.write_text(f'<a href="/files/{wheel.name}#{algorithm}={digest}">{wheel.name}</a>')
        (index / "files").mkdir(exist_ok=True)
        (index / "files" / wheel.name).write_bytes(wheel.read_bytes())


def install(requirements: Path, target: Path) -> subprocess.CompletedProcess[str]:
    words = ["install", "--no-deps", "--only-binary", ":all:", "--target", str(target), "-r", str(requirements)]
    return subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("offline")
def test_wheels_of_a_folder_are_hashed(shelf: dict[str, Path]) -> None:
    found = find_wheels(PINS)
    assert found == {name: Wheel(path.name, sha256_of(path), local=True) for name, path in shelf.items()}
    text = requirements_text(PINS, found)
    assert "# Hashes of files that lay on that machine, which the index must hold too: tiny-one, tiny-two" in text
    assert f"tiny-one==1.0 --hash=sha256:{sha256_of(shelf['tiny-one'])}" in text.splitlines()
    assert "--require-hashes" in text.splitlines()


def test_hashes_of_an_index_are_taken(
    shelf: dict[str, Path], index: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index[0], shelf, "sha256")
    monkeypatch.setenv("PIP_INDEX_URL", index[1])
    found = find_wheels(PINS)
    assert found == {name: Wheel(path.name, sha256_of(path), local=False) for name, path in shelf.items()}
    assert "machine, which" not in requirements_text(PINS, found)


def test_an_index_with_weaker_hashes_is_refused(
    shelf: dict[str, Path], index: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index[0], shelf, "md5")
    monkeypatch.setenv("PIP_INDEX_URL", index[1])
    with pytest.raises(MachineError, match=r"gives md5 of tiny_one-1\.0-py3-none-any\.whl, not its sha256.*--wheels"):
        find_wheels(PINS)
    assert download_wheels(PINS, tmp_path / "wheels")["tiny-two"].sha256 == sha256_of(shelf["tiny-two"])


@pytest.mark.usefixtures("offline")
def test_a_context_with_wheels_needs_no_index_and_takes_no_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tmp_path / "context"
    found = download_wheels(PINS, context / WHEELS_FOLDER)
    (context / "requirements.txt").write_text(requirements_text(PINS, found, included=True))
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody answers there
    monkeypatch.chdir("/")  # the folder is found from the file, not from where pip runs
    done = install(context / "requirements.txt", tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed" / "tiny_two.py").read_text() == "version = '2.5'\n"
    make_wheel(context / WHEELS_FOLDER, "tiny-two", "2.5", code="import os  # not what was tried\n")
    done = install(context / "requirements.txt", tmp_path / "changed")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "changed" / "tiny_two.py").exists()


@pytest.mark.usefixtures("offline")
def test_a_version_that_is_nowhere_is_one_line() -> None:
    with pytest.raises(MachineError, match=r"were not found as wheels, pip says: .*tiny-one==9\.9; name an index"):
        find_wheels({"tiny-one": "9.9"})


@pytest.mark.usefixtures("offline")
def test_another_build_of_the_same_version_is_refused(shelf: dict[str, Path], tmp_path: Path) -> None:
    make_wheel(shelf["tiny-one"].parent, "tiny-one", "1.0+cpu")
    for find in (find_wheels, lambda pins: download_wheels(pins, tmp_path / "wheels")):
        with pytest.raises(MachineError, match=r"pip takes tiny-one 1\.0\+cpu where this environment has 1\.0; name"):
            find(PINS)
    assert find_wheels({**PINS, "tiny-one": "1.0+cpu"})["tiny-one"].file == "tiny_one-1.0+cpu-py3-none-any.whl"


def test_no_index_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(MachineError, match=r"\(an index could not be reached\).*--no-hashes") as caught:
        find_wheels(PINS)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("offline")
def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(MachineError, match=r"asked of pip, which this environment lacks.*python -m ensurepip"):
        find_wheels(PINS)


@pytest.mark.usefixtures("offline")
def test_asking_pip_leaves_this_process_its_distutils() -> None:
    """torch's compiler imports setuptools, which refuses to work once the module pip has been looked for."""
    script = f"from deployer.package.pins import find_wheels; find_wheels({PINS!r}); import setuptools"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_hashes_it_says_so_at_its_head() -> None:
    text = requirements_text(PINS, None)
    assert "WITHOUT HASHES, as --no-hashes asked" in text.splitlines()[1]
    assert "--require-hashes" not in text
    with pytest.raises(UsageError, match="do not go together"):
        requirements_text(PINS, None, included=True)


def test_builds_of_pytorchs_own_pages_are_looked_for_there() -> None:
    pins = {"tiny-one": "1.0", "torch": "2.13.0+cpu"}
    wheels = {name: Wheel(f"{name}.whl", "00", local=False) for name in pins}
    page = "--find-links https://download.pytorch.org/whl/cpu/torch/"
    assert page in requirements_text(pins, wheels).splitlines()
    assert page not in requirements_text(pins, wheels, included=True)
