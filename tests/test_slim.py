"""What is removed from an image's packages, and that serving reads none of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deployer.package import slim

PACKAGES = Path(torch.__file__).parent.parent
SCRIPT = Path(slim.__file__)

KEPT = ("torch/__init__.py", "torch/bin/torch_shm_manager", "torch/lib/libtorch.so", "numpy/testing/a.py", "tests/a.py")
GONE = ("torch/include/a.h", "torch/bin/test_api", "torch/bin/protoc-3", "torch/lib/libx_test.so", "sympy/a/tests/b.py")


def test_it_removes_its_list_and_nothing_else(tmp_path: Path) -> None:
    for name in (*KEPT, *GONE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * 1000)
    done = subprocess.run([sys.executable, "-S", SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    assert [name for name in (*KEPT, *GONE) if (tmp_path / name).exists()] == list(KEPT)
    assert done.stdout.splitlines()[-1].split() == ["0.0", "MB", "in", "all"]


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sympy" / "tests").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-S", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, "holds no torch" in done.stderr) == (1, True)
    assert (tmp_path / "sympy" / "tests").is_dir()


@pytest.mark.parametrize("pattern", slim.UNREAD)
def test_every_pattern_finds_something(pattern: str) -> None:
    assert any(PACKAGES.glob(pattern)), "stale: the package no longer has it"


def test_serving_reads_nothing_of_it(digits_bundles: Mapping[str, Path], digits_aoti: Path) -> None:
    """Every CPU format is run; neither a loaded module nor a mapped library lies in what is removed."""
    script = """
import json, sys
import deployer.cli.serve, deployer.predictor, deployer.serve
import ts.model_service_worker, ts.torch_handler.base_handler
import deployer
for folder in sys.argv[1:]:
    with deployer.open_bundle(folder) as run:
        import numpy as np
        assert run({"image": np.zeros((2, 1, 8, 8), np.float32)})["logits"].shape == (2, 10)
loaded = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(json.dumps(sorted(loaded | mapped)))
"""
    bundles = [*digits_bundles.values(), digits_aoti]
    done = subprocess.run([sys.executable, "-c", script, *bundles], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = [Path(name) for name in json.loads(done.stdout.splitlines()[-1])]
    assert any(path.name == "libtorch_cpu.so" for path in read)
    removed = set(slim.unread(PACKAGES))
    assert removed
    assert [path for path in read if removed & {path, *path.parents}] == []
