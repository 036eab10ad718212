"""Training runs that end in a checkpoint folder which `deployer export` takes.

from deployer.training import Datasets, Task, fit

class Digits(Task):
    factory = "model.py:build"
    def datasets(self): return Datasets(train, validation)
    def loss(self, model, batch): ...

fit(Digits(), {"epochs": 20, "output": "runs/digits"})
"""

from __future__ import annotations

from deployer.training.config import TrainConfig, read_config
from deployer.training.loop import Outcome, fit
from deployer.training.task import Datasets, Figure, Task, load_task
from deployer.training.watching import Watcher

__all__ = ["Datasets", "Figure", "Outcome", "Task", "TrainConfig", "Watcher", "fit", "load_task", "read_config"]
