"""Peak memory of the intake of a checkpoint, as a multiple of the file's size, for each kind of file.

scripts/bench intake --size-mb 1024

A checkpoint of layers of 64 MB in float32 is written once a kind. Each intake runs in a process of its own: everything
is imported first, the kernel's record of the largest resident set (VmHWM) is reset, `load_checkpoint` runs, with its
build of the model and its probe of the outputs, and then a second build as an export does it. What is printed is how
far the resident set rose above where it stood before, over the size of the file. Exit code 1 above 1.3.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from deployer.checkpoint import import_checkpoint, load_checkpoint
from deployer.spec import Dim, ModelSpec, TensorSpec

WIDTH = 4096
LAYER_BYTES = WIDTH * WIDTH * 4
BAR = 1.3

State = dict[str, torch.Tensor]


class Tower(nn.Module):
    """x (batch, WIDTH) → the same, through `layers` square layers without bias."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def write_distributed(state: State, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state}, checkpoint_id=path, no_dist=True)


def write_shards(state: State, path: Path) -> None:
    """As transformers shards: an index beside files."""
    path.mkdir()
    names = list(state)
    index = {name: f"model-{place % 4}.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: state[name] for name in names if index[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


KINDS: dict[str, tuple[str, Callable[[State, Path], None]]] = {
    "torch.save": ("w.pt", lambda state, path: torch.save({"model": state, "epoch": 3}, path)),
    "torch.save, before 1.6": ("old.pt", lambda s, p: torch.save(s, p, _use_new_zipfile_serialization=False)),
    "safetensors": ("w.safetensors", save_file),
    "safetensors, sharded": ("shards", write_shards),
    "torch.distributed": ("dcp", write_distributed),
}


def memory_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (largest since the reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure(path: Path, layers: int, output: Path | None) -> None:
    """In a process of its own: prints the rise of the resident set, in bytes, as JSON."""
    spec = ModelSpec(
        "tower", (TensorSpec("x", "float32", ("batch", WIDTH)),), dims={"batch": Dim(1, 2, 4)}, batch="batch"
    )
    samples = {"x": np.ones((2, WIDTH), np.float32)}
    with torch.no_grad():
        nn.Linear(8, 8)(torch.ones(2, 8))  # threads and kernels that every process pays for
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    checkpoint = load_checkpoint(path, model=f"{__file__}:Tower", args={"layers": layers}, spec=spec, samples=samples)
    if output is None:
        checkpoint.build()
    else:
        import_checkpoint(checkpoint, output)
    print(json.dumps(memory_bytes("VmHWM") - before))


def size_of(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def run(path: Path, layers: int, output: Path | None = None) -> float:
    """The rise over the size of the file."""
    command = [sys.executable, __file__, "--measure", path, "--layers", str(layers)]
    done = subprocess.run(
        [*command, *(["--output", output] if output else [])], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"error: the intake of '{path}' failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.splitlines()[-1]) / size_of(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench intake", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size-mb", type=int, default=1024, help="default: 1024")
    parser.add_argument("--folder", type=Path, help="where the files go; default: the folder for temporary files")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.layers, options.output)
        return
    layers = max(1, options.size_mb * 2**20 // LAYER_BYTES)
    state = {f"layers.{place}.weight": torch.rand(WIDTH, WIDTH) for place in range(layers)}
    worst = 0.0
    print("| kind | file MB | rise of resident memory / file |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind, (name, write) in KINDS.items():
            path = Path(folder) / name
            write(state, path)
            rows = {kind: run(path, layers)}
            if kind == "safetensors":
                rows[f"{kind}, imported"] = run(path, layers, Path(folder) / "imported")
            for label, ratio in rows.items():
                print(f"| {label} | {size_of(path) / 1e6:.0f} | {ratio:.2f} |", flush=True)
                worst = max(worst, ratio)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if worst > BAR:
        sys.exit(f"error: {worst:.2f} times the size of the file; at most {BAR} is allowed")


if __name__ == "__main__":
    main()
