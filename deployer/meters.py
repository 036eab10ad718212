"""What a worker counts while it answers: seconds by stage, requests by run, errors by status. No server is known here.

Counts only grow, and are plain additions: the thread that answers needs no lock, and another may read at any time.
Histograms have the form of Prometheus: for each bound the number of observations at or below it, their sum and count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

#: `decode` a request's body; `wait` from a batch's arrival in the worker until a request's run begins; `infer` the run;
#: `encode` the answer's body. One observation a request, whatever shares its run.
STAGES = ("decode", "wait", "infer", "encode")
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)

_STAGE = "deployer_stage_seconds"
_RUN = "deployer_run_requests"
_ERRORS = "deployer_errors"

#: name of a series → (unit, names of its labels)
SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{_STAGE}_bucket": ("count", ("stage", "le")),
    f"{_STAGE}_sum": ("seconds", ("stage",)),
    f"{_STAGE}_count": ("count", ("stage",)),
    f"{_RUN}_bucket": ("count", ("le",)),
    f"{_RUN}_sum": ("count", ()),
    f"{_RUN}_count": ("count", ()),
    f"{_ERRORS}_total": ("count", ("status",)),
}

#: (name of a series, values of its labels) → value
Readings = Mapping[tuple[str, tuple[str, ...]], float]


class Histogram:
    """Observations by bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self, name: str, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, tuple[str, ...]], float]]:
        counts, total = list(self._counts), 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            total += count
            yield (f"{name}_bucket", (*labels, f"{bound:g}" if bound != float("inf") else "+Inf")), total
        yield (f"{name}_sum", labels), self._sum
        yield (f"{name}_count", labels), total


class Meters:
    """All that one worker counts."""

    def __init__(self) -> None:
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}
        self.runs = Histogram(REQUESTS)
        self.errors: dict[int, int] = {}

    def error(self, status: int) -> None:
        self.errors[status] = self.errors.get(status, 0) + 1

    def read(self) -> Readings:
        """Every series with its value since the start."""
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for stage, histogram in self.stages.items():
            found.update(histogram.read(_STAGE, (stage,)))
        found.update(self.runs.read(_RUN))
        found.update({(f"{_ERRORS}_total", (str(status),)): count for status, count in list(self.errors.items())})
        return found


def growth(before: Readings, now: Readings) -> dict[tuple[str, tuple[str, ...]], float]:
    """By how much each series grew, and zeros for those that are new. Nothing where no series grew or is new."""
    grown = {key: value - before.get(key, 0) for key, value in now.items()}
    return {key: value for key, value in grown.items() if value or key not in before}
