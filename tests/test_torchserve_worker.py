"""What a worker reckons about its queue and its time, by arithmetic; with a real server in tests/test_operations.py."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from deployer.package.torchserve_worker import Busy, Limits, Overload
from deployer.serve.management import is_idle, wait_until_idle
from tests.test_package_torchserve import OWN_KEYS


def overload(run_s: float, waiting: int, workers: int = 1, max_queue_wait_s: float = 10.0) -> Overload:
    made = Overload(Limits(4, workers, 120, max_queue_wait_s))
    made.ran(run_s)
    made.saw(waiting)
    return made


@pytest.mark.parametrize(
    ("run_s", "waiting", "workers", "wait_s"),
    [(2.0, 0, 1, 0.0), (2.0, 1, 1, 2.0), (2.0, 4, 1, 2.0), (2.0, 5, 1, 4.0), (2.0, 40, 1, 20.0), (2.0, 40, 2, 10.0)],
)
def test_a_wait_is_runs_times_their_time_shared_by_workers(
    run_s: float, waiting: int, workers: int, wait_s: float
) -> None:
    assert overload(run_s, waiting, workers).wait_s == wait_s


def test_only_what_does_not_fit_is_refused() -> None:
    """40 wait, 2 s for 4 of them: 20 s of work. Refused in fours, the 20 that fit into 10 s are left."""
    queue = overload(2.0, 40)
    refusals = []
    while retry_s := queue.refuse(4):
        refusals.append(retry_s)
    assert refusals == [10, 8, 6, 4, 2]
    assert queue.wait_s == 10.0


def test_other_workers_are_taken_to_refuse_as_many() -> None:
    queue = overload(2.0, 80, workers=2)
    assert [queue.refuse(4) for _ in range(6)] == [10, 8, 6, 4, 2, 0]


def test_nothing_is_refused_before_a_run_was_timed_or_without_a_limit() -> None:
    fresh = Overload(Limits(4, 1, 120, 10))
    fresh.saw(1000)
    assert fresh.refuse(4) == 0
    assert overload(100.0, 1000, max_queue_wait_s=float("inf")).refuse(4) == 0


def test_the_mean_of_runs_follows_the_newest() -> None:
    queue = Overload(Limits(1, 1, 120, 10))
    queue.saw(1)
    for seconds, mean in ((1.0, 1.0), (2.0, 1.2), (1.2, 1.2)):
        queue.ran(seconds)
        assert queue.wait_s == pytest.approx(mean)


def described(pending: int) -> dict[str, object]:
    return {"modelName": "m", "modelVersion": "1.0", "jobQueueStatus": {"pendingRequests": pending}}


def test_idle_is_an_empty_queue_and_no_lock_and_no_run_of_late(tmp_path: Path) -> None:
    path = tmp_path / "m-1.0"
    assert is_idle(described(0), tmp_path)  # no worker has come so far
    worker = Busy(path)
    assert not is_idle(described(1), tmp_path)
    worker.begin()
    assert not is_idle(described(0), tmp_path)
    worker.end()
    assert is_idle(described(0), tmp_path)
    assert not is_idle(described(0), tmp_path, quiet_s=60)
    os.utime(path, (0, 0))
    assert is_idle(described(0), tmp_path, quiet_s=60)
    with path.open("r+") as other:  # nobody's lock is kept by having looked
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_idle_must_hold_without_a_break() -> None:
    seen = iter([True, False, *[True] * 1000])
    turns: list[bool] = []

    def idle() -> bool:
        turns.append(next(seen))
        return turns[-1]

    assert wait_until_idle(idle, settle_s=0.2, limit_s=30)
    assert len(turns) > 4
    assert not wait_until_idle(lambda: False, settle_s=0.0, limit_s=0.2)


def test_the_keys_that_tests_name_are_those_of_the_archive() -> None:
    from deployer.package import torchserve

    assert sorted(OWN_KEYS) == sorted(torchserve._OWN_KEYS)
