"""The command line as a user types it: results on stdout, one-line errors on stderr, exit codes from the tree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def deployer(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployer", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )


def assert_one_line_error(done: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert done.returncode == exit_code, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith(("·", "note:"))]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0], errors[0]


def test_export_writes_a_bundle_and_one_json_document(digits_folder: Path, tmp_path: Path) -> None:
    done = deployer("export", digits_folder, "--format", "onnx", "-o", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert [(row["target"], row["passed"]) for row in document["targets"]] == [("onnx-fp32", True)]
    assert Path(document["targets"][0]["bundle"], "manifest.json").is_file()
    assert "Traceback" not in done.stderr


def test_the_chain_of_a_users_own_model(tmp_path: Path) -> None:
    """init → export (from deployer.yaml) → inspect → validate, for a model that does not describe itself."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(3, 2))\n"
    )
    np.savez(tmp_path / "s.npz", input=np.eye(3, dtype=np.float32))
    done = deployer("init", "net.py:build", "--samples", "s.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "input  input: float32[batch, 3]" in done.stdout
    done = deployer("export", "--format", "exported", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
    bundle = "build/net-exported-fp32"
    done = deployer("inspect", bundle, "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["kind"] == "bundle"
    assert facts["spec"]["name"] == "net"
    done = deployer("validate", bundle, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["exprot"], 2, ["did you mean 'export'"]),
        (["export", "--format", "onnx"], 2, ["model, spec, samples missing", "deployer init"]),
        (["export"], 2, ["--format"]),
        (["export", "absent.pt", "--format", "onnx", "--model", "m.py:f", "--samples", "s.npz"], 2, ["absent.pt"]),
        (["export", "x", "--format", "onxx"], 2, ["did you mean 'onnx'"]),
        (["export", "x", "--format", "torchscript", "--precision", "int8"], 2, ["not built yet"]),
        (["export", "x", "--format", "onnx", "--precision", "fp23"], 2, ["did you mean 'fp32'"]),
        (["export", "x", "--format", "onnx", "--args", "{bad"], 2, ["--args is not JSON"]),
        (["export", "--frmat", "onnx"], 2, ["--format"]),
        (["validate", "absent"], 2, ["no bundle folder 'absent'"]),
        (["inspect", "absent"], 2, ["nothing at 'absent'"]),
        (["init", "absent.py:build", "--samples", "s.npz"], 2, ["no file"]),
        (["package", "absent"], 2, ["no bundle folder 'absent'"]),
        (["serve", "absent.mar"], 2, ["absent.mar"]),
        (["bench", "absent"], 2, ["absent"]),
        (["bench", "absent", "--threads", "100000"], 2, ["--threads is 100000"]),
        (["predict", "http://127.0.0.1:9/x", "--input", "x.npy", "--timeout-s", "0"], 2, ["--timeout-s"]),
        (["predict", "http://127.0.0.1:9/predictions/x", "--input", "absent.npy"], 2, ["absent.npy"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_mistakes_are_one_line_with_the_right_exit_code(
    tmp_path: Path, arguments: list[str], exit_code: int, words: list[str]
) -> None:
    assert_one_line_error(deployer(*arguments, cwd=tmp_path), exit_code, *words)
    assert list(tmp_path.iterdir()) == []


def test_trt_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    """Held with and without the packages here: the import system is told that it has none."""
    hide = (
        "import importlib.util, sys\nreal = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorrt_rtx' else real(name, *rest)\n"
        "from deployer.cli import main\nsys.exit(main())\n"
    )
    command = [sys.executable, "-c", hide, "export", "--format", "trt", "--builder", "onnx-rtx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert_one_line_error(done, 4, "tensorrt_rtx", "pip install 'deployer[trt-rtx]'")


def test_a_damaged_bundle_is_refused_by_name(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(digits_bundles["onnx"], tmp_path / "copy"))
    data = bytearray((folder / "model.onnx").read_bytes())
    data[100] ^= 1
    (folder / "model.onnx").write_bytes(data)
    for verb in ("validate", "package", "inspect", "bench"):
        assert_one_line_error(deployer(verb, folder, cwd=tmp_path), 2, "model.onnx", "sha256")


def test_inspect_knows_every_kind_and_runs_nothing(
    digits_folder: Path, digits_bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    for path, kind in (
        (digits_folder, "checkpoint folder"),
        (digits_folder / "model.safetensors", "safetensors file"),
        (digits_bundles["torchscript"], "bundle"),
    ):
        done = deployer("inspect", path, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["kind"] == kind
    facts = json.loads(deployer("inspect", digits_folder, "--json").stdout)
    assert facts["parameters"] == sum(int(np.prod(tensor["shape"])) for tensor in facts["tensors"])
    evil = Path(tmp_path / "evil")
    evil.mkdir()
    record = json.loads((digits_folder / "checkpoint.json").read_text())
    (evil / "model.py").write_text("open('ran', 'w').close()\n")
    for name in ("model.safetensors", "samples.safetensors"):
        (evil / name).write_bytes((digits_folder / name).read_bytes())
    record["sha256"]["model.py"] = __import__("hashlib").sha256((evil / "model.py").read_bytes()).hexdigest()
    (evil / "checkpoint.json").write_text(json.dumps(record))
    assert deployer("inspect", evil, cwd=tmp_path).returncode == 0
    assert not (tmp_path / "ran").exists()


def test_doctor_reports_what_loads(tmp_path: Path) -> None:
    done = deployer("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "CPUExecutionProvider" in findings["onnxruntime"]["found"].split(";")[0]
    assert {"python", "torch", "gpu", "java", "compiler", "format onnx", "engine torchserve"} <= set(findings)
    assert all(finding["install"] or finding["status"] != "missing" or name in ("gpu", "format trt")
               for name, finding in findings.items())  # fmt: skip


def test_an_unwritable_output_is_one_line(digits_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = deployer("export", digits_folder, "--format", "torchscript", "-o", tmp_path / "file")
    assert_one_line_error(done, 2, "file")


def test_help_needs_no_torch() -> None:
    code = "import sys; from deployer.cli import cli; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = deployer("--debug", "inspect", "absent", cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
