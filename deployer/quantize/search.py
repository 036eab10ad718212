"""Which method, and which layers stay in float: chosen by what was measured, in a bounded number of attempts.

Every method of the bench is tried on the whole model. Kinds (static, dynamic, weight-only) come in the bench's order,
which is that of promise; within a kind the smallest error wins, and a kind with a method that passes comes before kinds
without. Where a kind passes nowhere, its best method is mended: the layers that do most damage go back to float.

Damage of a layer is the error of a model in which it alone is quantized. The other way, one layer returned to float
and all others quantized, hides it: where two layers each destroy the answer, returning one of them changes nothing, and
both would look harmless. It is measured as SQNR also where a metric decides, as a metric over some hundred samples
is the same for most single layers. Models of more than MAX_GROUPS layers are measured and returned in groups of
neighbours.

The worst are then returned together, 1, 2, 4, 8 … of them until the score passes, and the smallest number that passes
is found by bisection. What passes is what was scored, never what was inferred.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from deployer.errors import ExportError, GateError, first_line
from deployer.quantize.config import Int8Method
from deployer.quantize.score import DB_LIMIT, Score
from deployer.quantize.workbench import Trial, Workbench

log = logging.getLogger(__name__)

MAX_METHODS = 16
MAX_GROUPS = 48
#: attempts of one export, all methods and layers together
MAX_ATTEMPTS = 120


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: `layers` quantized, `kept_float` not; `error` where the method does not go with the model."""

    method: str
    layers: int
    kept_float: tuple[str, ...] = ()
    score: Score | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.score is None:
            return f"{self.method}: {self.error}"
        kept = f", {len(self.kept_float)} in float" if self.kept_float else ""
        return f"{self.method} ({self.layers} layers{kept}): {self.score}"


class Damage(msgspec.Struct, frozen=True):
    """What quantizing these layers alone does to the outputs."""

    layers: tuple[str, ...]
    sqnr_db: float


@dataclass(frozen=True)
class Found:
    """A trial that passes; `before` is its method on the whole model, `damage` the layers by harm, worst first."""

    trial: Trial
    score: Score
    before: Score
    damage: tuple[Damage, ...] = ()


@dataclass
class Search:
    """The candidates of one bench, by `candidates()`; what was tried on the way stays in `attempts`."""

    bench: Workbench
    score: Callable[[Trial], Score]
    #: the error of a trial alone, where `score` asks more of it; only the SQNR is read
    harm: Callable[[Trial], Score]
    #: asked of a trial that passes and would be taken: why it must not be after all, or ""
    confirm: Callable[[Trial], str] = lambda trial: ""
    max_attempts: int = MAX_ATTEMPTS
    attempts: list[Attempt] = field(default_factory=list)

    def candidates(self) -> Iterator[Found]:
        """Trials that pass, at most one of each kind of method, the one to take first.

        Ends without one where nothing passes; `failure()` says why. Raises ExportError where no method goes with the
        model.
        """
        failing = []
        for trial, score in self._best_of_each_kind():
            confirmed = self._confirmed(trial, score)
            if confirmed.passed:
                yield Found(trial, confirmed, confirmed)
            else:
                failing.append((trial, confirmed))
        # The nearest to passing first: of two kinds that fail it needs the fewest layers in float.
        for trial, score in sorted(failing, key=lambda entry: -entry[1].sqnr_db):
            if (found := self._mended(trial, score)) is not None:
                yield found

    def failure(self) -> GateError:
        """Why nothing passed, with the figures of the attempt that came nearest and what to do."""
        scored = [attempt for attempt in self.attempts if attempt.score is not None and not attempt.kept_float]
        nearest = max(scored, key=lambda attempt: attempt.score.sqnr_db if attempt.score else -DB_LIMIT)
        reason = nearest.score.reason if nearest.score else ""
        return GateError(
            f"no INT8 version of the model is accurate enough: {nearest.method} over {nearest.layers} layers fails "
            f"({reason}), and so does it with its worst layers in float ({len(self.attempts)} attempts of at most "
            f"{self.max_attempts}); give more calibration data of the kind that is served, allow more with --metric "
            "and --max-drop, or export in fp32",
            reason="accuracy_lost",
        )

    def _best_of_each_kind(self) -> list[tuple[Trial, Score]]:
        best: dict[type[Int8Method], tuple[Trial, Score]] = {}
        errors = []
        for method in list(self.bench.methods())[:MAX_METHODS]:
            try:
                trial, score = self._attempt(method, frozenset())
            except ExportError as error:
                self.attempts.append(Attempt(str(method), 0, error=str(error)))
                log.info("%s", self.attempts[-1])
                errors.append(error)
                continue
            log.info("%s", self.attempts[-1])
            kept = best.get(type(method))
            if kept is None or _rank(score) > _rank(kept[1]):
                best[type(method)] = trial, score
        if not best:
            raise errors[0] if errors else ExportError("the format offers no INT8 method for this model")
        return list(best.values())

    def _confirmed(self, trial: Trial, score: Score) -> Score:
        """The score, failed where `confirm` objects; the attempts say so too."""
        if not score.passed or not (reason := self.confirm(trial)):
            return score
        failed = msgspec.structs.replace(score, passed=False, reason=reason)
        self.attempts = [
            msgspec.structs.replace(attempt, score=failed) if attempt.score is score else attempt
            for attempt in self.attempts
        ]
        log.info("%s: %s", trial.method, reason)
        return failed

    def _attempt(self, method: Int8Method, kept_float: frozenset[str], *, alone: bool = False) -> tuple[Trial, Score]:
        trial = self.bench.attempt(method, kept_float)
        score = (self.harm if alone else self.score)(trial)
        self.attempts.append(Attempt(str(method), len(trial.layers), tuple(sorted(kept_float)), score))
        return trial, score

    # ---------------------------------------------------------------------------------------------------- sensitivity

    def _mended(self, whole: Trial, before: Score) -> Found | None:
        """The trial with the fewest of the worst layers in float that passes, or None."""
        left = self.max_attempts - len(self.attempts)
        groups = grouped(whole.layers, min(MAX_GROUPS, left // 2))  # half to measure with, half to return them with
        if len(groups) < 2:
            return None
        log.info("%s fails (%s); measuring the damage of %d layers", whole.method, before.reason, len(whole.layers))
        damage = tuple(sorted((self._damage(whole, group) for group in groups), key=lambda entry: entry.sqnr_db))
        passing: dict[int, tuple[Trial, Score]] = {}

        def passes(count: int) -> bool:
            kept = frozenset(name for entry in damage[:count] for name in entry.layers)
            try:
                trial, score = self._attempt(whole.method, kept)
            except ExportError as error:  # what is left holds nothing that the method quantizes
                self.attempts.append(Attempt(str(whole.method), 0, tuple(sorted(kept)), error=first_line(error)))
                return False
            log.info("%s", self.attempts[-1])
            score = self._confirmed(trial, score)
            if score.passed and trial.layers:
                passing[count] = trial, score
            return count in passing

        smallest = smallest_passing(len(damage) - 1, passes, lambda: len(self.attempts) < self.max_attempts)
        if smallest is None:
            return None
        return Found(*passing[smallest], before, damage)

    def _damage(self, whole: Trial, group: tuple[str, ...]) -> Damage:
        """Quantize `group` alone. What cannot be quantized alone does no damage alone."""
        others = frozenset(whole.layers) - frozenset(group)
        try:
            _, score = self._attempt(whole.method, others, alone=True)
        except ExportError as error:
            self.attempts.append(Attempt(str(whole.method), 0, tuple(sorted(others)), error=first_line(error)))
            return Damage(group, DB_LIMIT)
        log.info("%s alone: SQNR %.1f dB", _group_words(group), score.sqnr_db)
        return Damage(group, score.sqnr_db)


def _rank(score: Score) -> tuple[bool, float, float]:
    """Passing before failing, then the metric, then SQNR: a larger rank is a better score."""
    return score.passed, score.metric if score.metric is not None else 0.0, score.sqnr_db


def _group_words(group: Sequence[str]) -> str:
    return f"'{group[0]}'" + (f" and {len(group) - 1} neighbours" if len(group) > 1 else "")


def grouped(layers: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """`layers` in order as at most `most` groups of neighbours, sizes differing by one at most."""
    count = min(len(layers), most)
    edges = [len(layers) * part // count for part in range(count + 1)] if count else [0]
    return [tuple(layers[start:stop]) for start, stop in pairwise(edges)]


def smallest_passing(most: int, passes: Callable[[int], bool], allowed: Callable[[], bool]) -> int | None:
    """The smallest number in 1..most that `passes`, by doubling and then bisection; None where none does.

    Where passing is not monotone, a number that passes, and no smaller one that was asked does. `allowed` False ends
    the search with what was found.
    """
    failed, count = 0, 1
    while True:
        count = min(count, most)
        if count <= failed or not allowed():
            return None
        if passes(count):
            break
        failed, count = count, count * 2
    while count - failed > 1 and allowed():
        middle = (failed + count) // 2
        if passes(middle):
            count = middle
        else:
            failed = middle
    return count
