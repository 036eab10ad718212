"""Real checkpoints, made by the examples' own commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torch import nn

from deployer.checkpoint import Checkpoint, load_checkpoint
from tests.zoo.entry import ENTRIES, Entry

ROOT = Path(__file__).resolve().parent.parent.parent


def _made_by(script: str, name: str, workspace: Path) -> Checkpoint:
    folder = workspace / name
    if not (folder / "checkpoint.json").is_file():
        subprocess.run([sys.executable, ROOT / script, folder], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return load_checkpoint(folder)


def _never() -> nn.Module:
    raise ValueError("a real checkpoint has no random builder; read it with Entry.checkpoint")


for _name, _script in (("digits", "examples/digits/train.py"), ("minilm", "examples/minilm/make_checkpoint.py")):
    ENTRIES[_name] = Entry(
        _name, "real checkpoint", _never, (), read=lambda folder, s=_script, n=_name: _made_by(s, n, folder)
    )
