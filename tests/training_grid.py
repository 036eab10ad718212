"""Run many configurations in one process group: `python -m tests.training_grid RUNS.json`, once a process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from deployer.errors import DeployerError
from deployer.training import fit
from tests.training_tasks import Rows, Tokens

TASKS = {"Rows": Rows, "Tokens": Tokens}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{path}.meeting", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    said = {}
    for name, (task, args, config) in json.loads(path.read_text()).items():
        try:
            fit(TASKS[task](**args), config)
        except DeployerError as error:
            said[name] = str(error)
    path.with_name(f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
