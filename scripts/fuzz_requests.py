"""Answer malformed requests of every kind of body, in batches with right ones, and print what came of them.

    scripts/fuzz                          until 100,000 are refused; ends with 1 at the first fault
    scripts/fuzz --requests 5000 --seed 7

A fault is an exception out of `Predictor.answer`, a status of 500 or more, a right request that is not answered with
200, or an answer in a batch that differs by a bit from that to the same request alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.hostile import MODELS, Count, batches, judge, predictor_of  # noqa: E402

EXAMPLES_A_ROUND = 400  # hypothesis keeps what it has seen: many short rounds stay quick
SHOWN = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="refused ones at least  [default: 100000]")
    parser.add_argument("--seed", type=int, default=0, help="of the first round  [default: 0]")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # a refused request warns of nothing that is not counted below
    count, started_s, turn = Count(), time.monotonic(), 0
    predictors = {name: predictor_of(name) for name in MODELS}
    while count.wrong < options.requests and not count.faults:
        name = list(MODELS)[turn % len(MODELS)]
        run_round(options.seed + turn, name, predictors[name], count)
        turn += 1
        print(f"\r{count.wrong} refused", end="", file=sys.stderr, flush=True)
    statuses = ", ".join(f"{status}: {number}" for status, number in sorted(count.statuses.items()))
    print(
        f"\r{count.wrong} malformed requests refused, {count.harmless} changed ones legal all the same, "
        f"{count.right} right ones among them, in {time.monotonic() - started_s:.0f} s"
    )
    print(f"statuses {statuses}; {count.shared} shared a run; {len(count.faults)} faults")
    for fault in count.faults[:SHOWN]:
        print(fault[:2000], file=sys.stderr)
    sys.exit(1 if count.faults else 0)


def run_round(number: int, name: str, predictor: object, count: Count) -> None:
    @seed(number)
    @settings(
        max_examples=EXAMPLES_A_ROUND, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def one(data: st.DataObject) -> None:
        judge(predictor, data.draw(batches(MODELS[name][0])), count)  # type: ignore[arg-type]

    one()


if __name__ == "__main__":
    main()
