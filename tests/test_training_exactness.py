"""What is computed is the same, however the work is cut: accumulation, checkpointing, DDP, FSDP2, resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deployer.errors import TrainingError, UsageError
from deployer.training import Outcome, fit
from deployer.training.data import Plan, Share
from tests.training_tasks import Block, Rows, Tokens

ROOT = Path(__file__).resolve().parent.parent
BASE: dict[str, Any] = {
    "epochs": 2, "batch_size": 10, "device": "cpu", "optimizer": {"name": "sgd", "lr": 0.1},
    "data": {"workers": 0}, "save": {"background": False},
}  # fmt: skip


def weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "checkpoint.safetensors")


def trained(task: Rows, output: Path, **changes: Any) -> tuple[Outcome, dict[str, Tensor]]:
    outcome = fit(task, {**BASE, "output": str(output), **changes})
    return outcome, weights(output)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=tolerance, atol=tolerance)


FSDP = {"strategy": "fsdp", "wrap": ["Block"]}
#: parallel settings that must all compute what one process does
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full": FSDP,
    "unwrapped": {"strategy": "fsdp"},
    "grad": {**FSDP, "shard": "grad"},
    "prefetch": {**FSDP, "prefetch": 2},
}
LOADS: dict[str, dict[str, Any]] = {"whole": {}, "accumulated": {"batch_size": 4, "accumulate": 3, "clip_norm": 0.5}}


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every configuration of two processes, run one after another by one pair of them."""
    folder = tmp_path_factory.mktemp("pair")
    runs: dict[str, Any] = {}
    for way, parallel in WAYS.items():
        for load, changes in LOADS.items():
            for task in ("Rows", "Tokens"):
                name = f"{way}-{load}-{task}"
                runs[name] = (task, {}, {**BASE, **changes, "parallel": parallel, "output": str(folder / name)})
    runs["nan"] = ("Rows", {"nan_row": 5}, {**BASE, "output": str(folder / "nan")})
    path = folder / "runs.json"
    path.write_text(json.dumps(runs))
    pair = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training_grid", str(path)], cwd=ROOT,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [process.wait(timeout=100) for process in pair] == [0, 0]
    finally:
        for process in pair:
            process.kill()
    return folder


@pytest.mark.parametrize("task", [Rows, Tokens])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_equal_one(two_processes: Path, tmp_path: Path, way: str, load: str, task: type[Rows]) -> None:
    alone = trained(task(), tmp_path, **LOADS[load])[1]
    if "clip_norm" in LOADS[load]:  # else nothing was clipped, and nothing compared
        lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert any(line["grad_norm"] > LOADS[load]["clip_norm"] for line in lines if line["kind"] == "step")
    assert_same(weights(two_processes / f"{way}-{load}-{task.__name__}"), alone, 1e-5)


def test_nan_on_one_process_stops_both(two_processes: Path) -> None:
    said = [json.loads((two_processes / f"said-{rank}.json").read_text()) for rank in range(2)]
    assert [list(one) for one in said] == [["nan"], ["nan"]]
    assert all("not finite on 1 of 2 processes" in one["nan"] for one in said)
    assert len(list((two_processes / "nan" / "replay").glob("*.pt"))) == 1


@pytest.mark.parametrize("task", [Rows, Tokens])
def test_accumulation_equals_one_large_batch(tmp_path: Path, task: type[Rows]) -> None:
    large = trained(task(), tmp_path / "large", batch_size=12)[1]
    small = trained(task(), tmp_path / "small", batch_size=4, accumulate=3)[1]
    assert_same(small, large, 1e-6)


@pytest.mark.parametrize("memory", [{}, {"checkpoint_every": 2}, {"checkpoint_keep": ["addmm"]}])
def test_checkpointing_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]) -> None:
    calls, forward = [0], Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        calls[0] += 1
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", counted)
    task = Rows(dropout=0.3, normalised=True)
    plain = trained(task, tmp_path / "plain")[1]
    once, calls[0] = calls[0], 0
    again = trained(task, tmp_path / "again", memory={"checkpoint": ["Block"], **memory})[1]
    assert_same(again, plain)
    assert calls[0] - once == 8 * (1 if "checkpoint_every" in memory else 2)  # 8 steps; blocks computed again


def test_resume_mid_epoch_changes_no_bit(tmp_path: Path) -> None:
    task = Rows(dropout=0.3, normalised=True)
    unbroken = trained(task, tmp_path / "unbroken")[1]
    fit(task, {**BASE, "output": str(tmp_path / "broken"), "max_steps": 3})
    outcome, resumed = trained(task, tmp_path / "broken", data={"workers": 1})
    assert outcome.resumed_from == 3
    assert_same(resumed, unbroken)


def test_damaged_save_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, unbroken = trained(Rows(), tmp_path)
    newest = sorted((tmp_path / "steps").glob("step-*"))[-1]
    (newest / "process-0.pt").write_bytes(b"cut")
    outcome, again = trained(Rows(), tmp_path)
    assert outcome.resumed_from == 4
    assert f"'{newest}' is passed over: process-0.pt differs" in caplog.text
    assert_same(again, unbroken)


def test_other_mathematics_are_refused(tmp_path: Path) -> None:
    trained(Rows(), tmp_path)
    with pytest.raises(UsageError, match="was trained otherwise: batch_size was 10 and is 5"):
        trained(Rows(), tmp_path, batch_size=5)


def test_nan_keeps_its_batch(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite on 1 of 1"):
        trained(Rows(nan_row=5), tmp_path)
    kept = torch.load(next((tmp_path / "replay").iterdir()))
    assert kept["batches"][0][0].isnan().any()


@given(rows=st.integers(1, 90), batch=st.integers(1, 40), world=st.integers(1, 6), epoch=st.integers(0, 3))
def test_every_row_once_an_epoch(rows: int, batch: int, world: int, epoch: int) -> None:
    plan = Plan(rows, batch, world, seed=1)
    read = []
    for rank in range(world):
        for micro, share in enumerate(Share(plan, rank, epoch)):
            read += [index for index, _ in share] if plan.share(micro, rank) else []
    assert sorted(read) == list(range(rows))
