"""How a run ends that cannot go on as it was: bad configurations, fp16 overflow, a process killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from deployer.errors import UsageError
from deployer.training import fit
from deployer.training.config import make_config
from deployer.training.launch import launch
from tests.training_tasks import Rows


class Killed(Rows):
    """Process 1 ends itself with SIGKILL in its sixth forward pass, once: `mark` says that it has, and has a line for
    each of its passes."""

    def __init__(self, mark: str) -> None:
        super().__init__(dropout=0.1)
        self.mark, self.calls = Path(mark), 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and os.environ["RANK"] == "1":
            self.calls += 1
            before = self.mark.read_text() if self.mark.exists() else ""
            self.mark.write_text(f"{before}{self.calls}\n")
            if self.calls == 6 and before == "1\n2\n3\n4\n5\n":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def written(folder: Path, mark: Path) -> Path:
    config = {
        "task": f"{__name__}:Killed", "args": {"mark": str(mark)}, "output": str(folder / "run"),
        "epochs": 2, "batch_size": 10, "device": "cpu", "data": {"workers": 0}, "parallel": {"timeout_s": 30},
        "save": {"every_steps": 2, "background": False},
    }  # fmt: skip
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_killed_process_is_named_and_its_run_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    assert launch([str(written(killed, killed / "passes"))], 2, max_restarts=1) is None
    assert "process 1: it was ended by SIGKILL" in caplog.text
    # 8 steps, a save every 2: killed in the sixth, it goes on with the fifth
    assert (killed / "passes").read_text().split() == ["1", "2", "3", "4", "5", "6", "1", "2", "3", "4"]

    path = written(unbroken, unbroken / "passes")
    (unbroken / "passes").write_text("0\n")
    assert launch([str(path)], 2) is None
    ends = [load_file(folder / "run/checkpoint.safetensors") for folder in (killed, unbroken)]
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


def test_fp16_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    fit(Rows(), {"output": str(tmp_path), "precision": "fp16", "loss_scale": 2.0**40, "max_steps": 1, "device": "cpu"})
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    step = next(line for line in log if "skipped" in line)
    assert step["skipped"] is True
    assert step["loss_scale"] == 2.0**39


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"epoch": 1}, "epochs"),
        ({"loss_scale": 2.0}, "precision fp16"),
        ({"accumulate": 0}, "at least 1"),
        ({"parallel": {"wrap": ["Block"]}}, "strategy to fsdp"),
        ({"parallel": {"strategy": "fsdp", "shard": "hybrid"}}, "shard_size"),
        ({"memory": {"budget": 0.5}}, "compile.enabled"),
        ({"data": {"workers": -1}}, "0 or more"),
        ({"save": {"best": "loss"}}, "NAME:min"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make_config(config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
