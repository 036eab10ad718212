"""Session fixtures: what is expensive is made once, by the real commands of the examples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.export import export
from deployer.formats import Target
from deployer.spec import Array
from deployer.validate import Reference, make_reference

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """With several processes each has a temporary folder of its own: tests look at what is left in it. A short name,
    since sockets have one."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        own = tempfile.mkdtemp(prefix="dt-", dir="/tmp")
        os.environ["TMPDIR"] = tempfile.tempdir = own
        config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder that examples/digits/train.py writes (accuracy ≥ 97 % or the script fails)."""
    folder = tmp_path_factory.mktemp("digits") / "checkpoint"
    subprocess.run([sys.executable, ROOT / "examples/digits/train.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def digits_checkpoint(digits_folder: Path) -> Checkpoint:
    return load_checkpoint(digits_folder)


@pytest.fixture(scope="session")
def digits_images(digits_checkpoint: Checkpoint) -> Array:
    """Held-out images, float32 (32, 1, 8, 8)."""
    return np.asarray(digits_checkpoint.samples["image"])


@pytest.fixture(scope="session")
def digits_reference(digits_checkpoint: Checkpoint) -> Reference:
    return make_reference(digits_checkpoint)


@pytest.fixture(scope="session")
def digits_bundles(
    digits_checkpoint: Checkpoint, digits_reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    """Gated bundles of the formats that export in seconds."""
    output = tmp_path_factory.mktemp("bundles")
    return {
        name: export(digits_checkpoint, Target(name), output, reference=digits_reference)[0].path
        for name in ("torchscript", "exported", "onnx")
    }


@pytest.fixture(scope="session")
def digits_aoti(
    digits_checkpoint: Checkpoint, digits_reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The max-autotune artifact, compiled ahead of time."""
    target = Target("aoti", compile="max-autotune")
    output = tmp_path_factory.mktemp("aoti")
    return export(digits_checkpoint, target, output, reference=digits_reference)[0].path
