"""Bundles are whole or absent, and what is in them is what was written."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from deployer.bundle import read_bundle
from deployer.errors import BundleError, IntegrityError, MachineError
from deployer.files import atomic_file, publish_folder, staged_folder
from deployer.machine import cpu_features
from deployer.runtime import open_bundle

BUNDLE_FILES = (
    "manifest.json",
    "manifest.json.sha256",
    "model.onnx",
    "references.safetensors",
    "samples.safetensors",
    "validation.json",
)


@pytest.fixture
def onnx_copy(digits_bundles: Mapping[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_bundles["onnx"], tmp_path / "copy"))


def test_a_bundle_holds_these_files(onnx_copy: Path) -> None:
    assert sorted(path.name for path in onnx_copy.iterdir()) == sorted(BUNDLE_FILES)
    manifest = json.loads((onnx_copy / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert set(manifest["sha256"]) == set(BUNDLE_FILES) - {"manifest.json", "manifest.json.sha256"}
    assert {"torch", "onnx", "onnxruntime", "python", "deployer"} <= set(manifest["tool_versions"])


@pytest.mark.parametrize("name", BUNDLE_FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_one_flipped_byte_is_refused_naming_the_file(onnx_copy: Path, name: str, place: float) -> None:
    data = bytearray((onnx_copy / name).read_bytes())
    data[int(place * len(data))] ^= 0x01
    (onnx_copy / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        open_bundle(onnx_copy)


@pytest.mark.parametrize("name", [name for name in BUNDLE_FILES if name != "manifest.json"])
def test_a_missing_file_is_named(onnx_copy: Path, name: str) -> None:
    (onnx_copy / name).unlink()
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        open_bundle(onnx_copy)


def test_files_that_do_not_belong_are_refused(onnx_copy: Path) -> None:
    (onnx_copy / "model.onnx.data").write_bytes(b"weights of another model")
    with pytest.raises(IntegrityError, match=r"model\.onnx\.data.*not listed"):
        open_bundle(onnx_copy)
    (onnx_copy / "model.onnx.data").unlink()
    (onnx_copy / "link").symlink_to("/etc/hostname")
    with pytest.raises(IntegrityError, match="symbolic link"):
        open_bundle(onnx_copy)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle folder"):
        read_bundle(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        read_bundle(tmp_path)


def rewrite_manifest(folder: Path, **machine: object) -> None:
    from deployer.files import sha256_of

    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["machine"].update(machine)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "manifest.json.sha256").write_text(f"{sha256_of(folder / 'manifest.json')}  manifest.json\n")


def test_machine_code_for_another_cpu_is_refused_before_it_is_loaded(digits_aoti: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(digits_aoti, tmp_path / "copy"))
    assert set(read_bundle(folder).manifest.machine.cpu_features) == set(cpu_features())
    rewrite_manifest(folder, cpu_features=[*cpu_features(), "avx1024"])
    with pytest.raises(MachineError, match="avx1024"):
        open_bundle(folder)
    rewrite_manifest(folder, cpu_features=[], architecture="s390x")
    with pytest.raises(MachineError, match="s390x"):
        open_bundle(folder)


def test_publishing_replaces_in_one_step_and_leaves_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "thing"
    for text in ("old", "new"):
        with staged_folder(final) as staging:
            (staging / "file").write_text(text)
            publish_folder(staging, final)
        assert (final / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_the_dead_are_removed_and_the_living_are_left_alone(tmp_path: Path) -> None:
    dead = tmp_path / ".thing.partial-dead"
    dead.mkdir()
    with staged_folder(tmp_path / "thing") as first:
        assert not dead.exists()
        with staged_folder(tmp_path / "thing") as second:
            assert first.exists()
            assert second.exists()
            assert first != second


def visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.exists() else []


def test_kill_at_ten_random_moments_leaves_no_half_written_bundle(digits_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "build"
    command = [sys.executable, "-m", "deployer", "export", str(digits_folder), "-o", str(output)]
    command += ["--format", "torchscript", "--format", "exported", "--format", "onnx"]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole_s = time.monotonic() - started
    moments = random.Random(7)
    for _ in range(10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(moments.uniform(0.3, 1.0) * whole_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for path in visible(output):
            assert read_bundle(path).manifest.passed  # every hash of every file is checked
        if moments.random() < 0.3:
            shutil.rmtree(output, ignore_errors=True)  # kills during a first export too, not only during replacements
    subprocess.run(command, check=True, capture_output=True)
    assert [path.name for path in visible(output)] == [
        "digits-exported-fp32",
        "digits-onnx-fp32",
        "digits-torchscript-fp32",
    ]
    assert visible(output) == sorted(output.iterdir())  # the leftovers of the killed are gone
