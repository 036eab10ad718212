"""Export, gate and measure every GPU path on the GPU at hand; one table at the end, and the tests marked `gpu`.

    scripts/gpu-check [-o FOLDER]

Exit codes: 0 all that could be tried passed, 1 something failed, 4 there is no CUDA GPU. A path whose packages are
missing is a row that says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from deployer import load_checkpoint
from deployer.bench.inprocess import bench_bundle
from deployer.checkpoint import Checkpoint
from deployer.errors import DeployerError, MachineError
from deployer.export import export
from deployer.formats import Target
from deployer.int8 import Int8
from deployer.machine import gpu_arch, gpu_fault
from deployer.quantize.calibration import read_calibration
from deployer.validate import Reference, make_reference

ROOT = Path(__file__).resolve().parent.parent
TARGETS = [
    Target("onnx", device="cuda"),
    Target("onnx", device="tensorrt"),
    *(
        Target("trt", precision, "cuda", builder=builder)
        for builder in ("onnx-rtx", "torch-trt")
        for precision in ("fp32", "fp16")
    ),
    Target("trt", "int8", "cuda", builder="onnx-rtx"),
]
BATCHES = (1, 8, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/gpu-check"))
    output = parser.parse_args().output
    if fault := gpu_fault():
        print(f"error: no GPU path can be executed: {fault}; docs/gpu.md says what is needed", file=sys.stderr)
        return MachineError.exit_code
    print(f"{torch.cuda.get_device_name()}, {gpu_arch()}, CUDA {torch.version.cuda}, torch {torch.__version__}\n")
    print("| model | target | result | " + " | ".join(f"batch {size}, ms" for size in BATCHES) + " | engine |")
    print("| --- | --- | --- | " + "---: | " * len(BATCHES) + "--- |")
    failed = 0
    for folder in checkpoints(output):
        checkpoint = load_checkpoint(folder)
        reference = make_reference(checkpoint)
        for target in TARGETS:
            passed, row = check(checkpoint, reference, target, output)
            failed += not passed
            print(row, flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], cwd=ROOT, check=False)
    return 1 if failed or tests.returncode else 0


def checkpoints(output: Path) -> list[Path]:
    """The two examples as checkpoint folders, made where they are not there yet."""
    folders = [ROOT / "examples/digits/checkpoint", output / "minilm-checkpoint"]
    if not folders[0].is_dir():
        subprocess.run([sys.executable, ROOT / "examples/digits/train.py", folders[0]], check=True)
    if not folders[1].is_dir():
        subprocess.run([sys.executable, ROOT / "examples/minilm/make_checkpoint.py", folders[1]], check=True)
    return folders


def check(checkpoint: Checkpoint, reference: Reference, target: Target, output: Path) -> tuple[bool, str]:
    """(nothing failed, a row of the table) of one target: exported, executed in the gate, measured."""
    empty = " | ".join("–" for _ in BATCHES)
    try:
        int8 = None
        if target.precision == "int8":  # kept though it may be slow: the table is to show it
            source = ROOT / "examples" / checkpoint.spec.name / "score.py"
            int8 = Int8(read_calibration(f"{source}:calibration", checkpoint.spec), keep_slow=True)
        bundle, report = export(checkpoint, target, output, reference=reference, int8=int8)
        if not bundle.manifest.executed:
            return False, f"| {checkpoint.spec.name} | {target.slug} | not executed | {empty} | {report.engine} |"
        rows = {row.batch_size: row for row in bench_bundle(bundle.path, batch_sizes=BATCHES).rows}
    except MachineError as error:
        return True, f"| {checkpoint.spec.name} | {target.slug} | lacking: {error} | {empty} | |"
    except DeployerError as error:
        return False, f"| {checkpoint.spec.name} | {target.slug} | failed: {error} | {empty} | |"
    times = " | ".join(f"{rows[size].latency.p50_ms:.3f}" for size in BATCHES)
    return True, f"| {checkpoint.spec.name} | {target.slug} | passed | {times} | {report.engine} |"


if __name__ == "__main__":
    sys.exit(main())
