"""INT8 beside fp32 and eager: digits, ResNet-18 and MiniLM in onnx and aoti, accuracy and speed in one run.

scripts/bench int8 --models resnet18,minilm --formats onnx --rounds 12

Every artifact is made by `deployer export --precision int8` (with --keep-slow, so that slow ones are shown too), from
real calibration data: held-out digits, crops of the two photographs in scikit-learn, sentences. Fidelity is that of the
written artifact against the eager model on held-out data; ratios are made as `scripts/bench formats` makes them.
ResNet-18 has random weights, since no package brings trained ones; its batch norms have the photographs' statistics.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_formats import measure, open_all, print_environment, print_table
from torch import Tensor, nn

from deployer.bundle import Bundle
from deployer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from deployer.errors import DeployerError
from deployer.export import export_all
from deployer.formats import Target
from deployer.int8 import Int8
from deployer.machine import usable_cores
from deployer.quantize.calibration import read_calibration
from deployer.quantize.score import load_metric
from deployer.runtime import open_bundle
from deployer.samples import sized_inputs
from deployer.spec import Arrays, Dim, ModelSpec, TensorSpec

CHECKPOINTS = {name: Path("build/bench") / f"{name}-checkpoint" for name in ("resnet18", "minilm")}
CHECKPOINTS["digits"] = Path("examples/digits/checkpoint")
SIZE = 224
CROPS, HELD_OUT = 48, 16


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut (He et al. 2015, basic block)."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(leaving)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(leaving)
        self.shortcut = nn.Sequential()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(
                nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """image (batch, 3, 224, 224) float32 → logits (batch, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 64, 128, 256, 512)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1))
                for stage, (before, after) in enumerate(pairwise(widths))
            )
        )
        self.classify = nn.Linear(512, 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.stages(self.stem(image)).mean((2, 3)))


def resnet18() -> ResNet18:
    return ResNet18()


def crops(first: int, count: int) -> np.ndarray:
    """Seeded crops of two photographs, (count, 3, 224, 224), channels normalised."""
    from sklearn.datasets import load_sample_images

    photographs = [photograph.astype(np.float32) / 255 for photograph in load_sample_images().images]
    made = []
    for index in range(first, first + count):
        rng = np.random.default_rng(index)
        photograph = photographs[index % len(photographs)]
        top, left = (int(rng.integers(0, edge - SIZE)) for edge in photograph.shape[:2])
        made.append(photograph[top : top + SIZE, left : left + SIZE].transpose(2, 0, 1))
    return ((np.stack(made) - 0.45) / 0.225).astype(np.float32)


def resnet_calibration() -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, CROPS, 8):
        yield {"image": crops(start, 8)}


def write_resnet(folder: Path) -> None:
    torch.manual_seed(0)
    model = resnet18()
    model.train()
    with torch.no_grad():
        for start in range(0, 32, 16):
            model(torch.tensor(crops(10_000 + start, 16)))
    spec = ModelSpec(
        "resnet18", (TensorSpec("image", "float32", ("batch", 3, SIZE, SIZE)),), (),
        {"batch": Dim(1, 8, 16)}, "batch",
    )  # fmt: skip
    save_checkpoint(
        folder,
        model.eval(),
        factory=f"{Path(__file__).resolve()}:resnet18",
        spec=spec,
        samples={"image": crops(20_000, 8)},
    )


def held_out(name: str) -> list[Arrays]:
    if name == "resnet18":
        return [{"image": crops(30_000 + start, 8)} for start in range(0, HELD_OUT, 8)]
    sys.path.insert(0, "examples/minilm")
    from score import sentences, tokenize

    chosen = sentences()[200:328]
    return [tokenize(chosen[start : start + 16]) for start in range(0, len(chosen), 16)]


CALIBRATIONS = {
    "digits": "examples/digits/score.py:calibration",
    "resnet18": f"{__file__}:resnet_calibration",
    "minilm": "examples/minilm/score.py:calibration",
}


def checkpoint_of(name: str) -> Checkpoint:
    folder = CHECKPOINTS[name]
    if not (folder / "checkpoint.json").is_file():
        scripts = {"digits": "examples/digits/train.py", "minilm": "examples/minilm/make_checkpoint.py"}
        if name == "resnet18":
            write_resnet(folder)
        else:
            subprocess.run([sys.executable, scripts[name], str(folder)], check=True, stdout=sys.stderr)
    return load_checkpoint(folder)


def fidelity(checkpoint: Checkpoint, bundle: Bundle, name: str) -> str:
    """Cosine of rows on held-out data, smallest and mean; for MiniLM the rank correlation of similarities as well; for
    digits the accuracy."""
    from deployer.checkpoint.eager import run_eager

    model = checkpoint.build()
    with open_bundle(bundle) as runner:
        if name == "digits":
            metric = load_metric("examples/digits/score.py:accuracy")
            before = metric.measure(lambda arrays: run_eager(model, checkpoint.spec, arrays), checkpoint.spec)
            return f"accuracy {metric.measure(runner, checkpoint.spec):.4f} (eager {before:.4f})"
        pairs = [
            (next(iter(runner(arrays).values())), next(iter(run_eager(model, checkpoint.spec, arrays).values())))
            for arrays in held_out(name)
        ]
    got, expected = (np.concatenate([pair[side] for pair in pairs]).astype(np.float64) for side in (0, 1))
    cosines = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    told = f"cosine {cosines.min():.4f} (mean {cosines.mean():.4f})"
    if name == "minilm":
        places = np.triu_indices(len(got), 1)
        ranks = [np.argsort(np.argsort((side @ side.T)[places])) for side in (got, expected)]
        told += f", rank correlation of similarities {np.corrcoef(*ranks)[0, 1]:.4f}"
    return told


def bundles_of(checkpoint: Checkpoint, name: str, formats: list[str]) -> list[Bundle]:
    int8 = Int8(read_calibration(CALIBRATIONS[name], checkpoint.spec), keep_slow=True)
    bundles = []
    for precision, options in (("fp32", {}), ("int8", {"int8": int8})):
        targets = [Target(form, precision=precision) for form in formats]
        arguments: dict[str, Any] = options
        for outcome in export_all(checkpoint, targets, f"build/bench/{name}", reuse=True, **arguments):
            if outcome.bundle is None:
                print(f"{name} {outcome.target.slug}: {outcome.error}", file=sys.stderr)
            else:
                bundles.append(outcome.bundle)
    return bundles


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench int8", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default="digits,resnet18,minilm")
    parser.add_argument("--formats", default="onnx,aoti")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    for name in options.models.split(","):
        checkpoint = checkpoint_of(name)
        bundles = bundles_of(checkpoint, name, options.formats.split(","))
        by_batch = {}
        typical = {dim: entry.typical for dim, entry in checkpoint.spec.dims.items()}
        with ExitStack() as stack:
            runners = open_all(checkpoint, bundles, options.threads, stack)
            for size in sizes:
                inputs = sized_inputs(checkpoint.spec, checkpoint.samples, typical | {str(checkpoint.spec.batch): size})
                print(f"measuring {name} at batch {size}", file=sys.stderr)
                by_batch[size] = measure(runners, inputs, options.rounds)
        print(f"\n## {name}\n")
        print_table(by_batch, options.rounds)
        for bundle in bundles:
            found = bundle.manifest.details.get("int8")
            if found is not None:
                told = fidelity(checkpoint, bundle, name)
                kept = f", {len(found['kept_float'])} layers kept in float" if found["kept_float"] else ""
                layers = f"{found['layers']} layers in INT8{kept}, exact on {found['exact_on']}"
                print(f"\n{bundle.manifest.target.slug}: {told}; {found['method']}, {layers}")
        print_environment(bundles, options.threads)


if __name__ == "__main__":
    try:
        main()
    except DeployerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
