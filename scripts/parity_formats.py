"""Both examples in every format that a CPU runs: exported, packaged, served by TorchServe, and held to their bundles.

    scripts/parity
    scripts/parity --examples digits --targets onnx,onnx-int8

A row is what `deployer verify` finds: answers over HTTP in every form of body, alone, together and among wrong
requests, equal to the eager model's within the gate's tolerances; and how many of them equal the artifact's own bit by
bit. Ends with 1 where one is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from deployer.checkpoint import load_checkpoint
from deployer.errors import DeployerError
from deployer.export import export_all
from deployer.formats import Target
from deployer.int8 import Int8
from deployer.machine import cpu_name
from deployer.package import package
from deployer.parity import ParityReport, verify
from deployer.quantize.calibration import read_calibration
from deployer.serve.torchserve import Server

FOLDER = Path("build/parity")
EXAMPLES = {
    "digits": ("examples/digits/train.py", Path("examples/digits/checkpoint")),
    "minilm": ("examples/minilm/make_checkpoint.py", Path("examples/minilm/checkpoint")),
}
TARGETS = {
    "torchscript": Target("torchscript"),
    "exported": Target("exported"),
    "exported-default": Target("exported", compile="default"),
    "aoti": Target("aoti"),
    "aoti-max-autotune": Target("aoti", compile="max-autotune"),
    "onnx": Target("onnx"),
    "onnx-int8": Target("onnx", precision="int8"),
    "aoti-int8": Target("aoti", precision="int8"),
    "exported-int8": Target("exported", precision="int8"),
}


def served(example: str, target: Target) -> ParityReport:
    """What `deployer verify` finds of one target of one example."""
    script, folder = EXAMPLES[example]
    if not folder.is_dir():
        subprocess.run([sys.executable, script, str(folder)], check=True, stdout=sys.stderr)
    checkpoint = load_checkpoint(folder)
    options: dict[str, Any] = {}
    if target.precision == "int8":
        calibration = read_calibration(f"examples/{example}/score.py:calibration", checkpoint.spec)
        options["int8"] = Int8(calibration, keep_slow=True)
    [outcome] = export_all(checkpoint, [target], FOLDER, reuse=True, **options)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.bundle is not None  # noqa: S101 - an outcome has one of the two
    archive = package(outcome.bundle, output=FOLDER / "store", workers=1)
    with Server([archive], port=0, management_port=0, metrics_port=0) as server:
        return verify(server.endpoints[0].url, outcome.bundle, token=server.token)


def row(report: ParityReport) -> str:
    told = f"{report.right} of {report.sent} | {len(report.forms)} | {report.refused} of {report.wrong}"
    reasons = f": {report.reasons[0]}" if report.reasons else ""
    return f"{told} | {report.bit_equal} of {report.bit_compared}{reasons}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/parity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--targets", default=",".join(TARGETS))
    options = parser.parse_args()
    failed = False
    print(
        "| example | target | answers as eager | forms of body | wrong requests refused | bit-equal to the artifact |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for example in options.examples.split(","):
        for name in options.targets.split(","):
            try:
                report = served(example, TARGETS[name])
            except DeployerError as error:
                failed = True
                print(f"| {example} | {name} | {type(error).__name__}: {error} | | | |", flush=True)
                continue
            failed |= not report.passed
            print(f"| {example} | {name} | {row(report)} |", flush=True)
    print(f"\n{cpu_name()}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
