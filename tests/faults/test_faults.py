"""The seeded faults: the gate rejects every one and lets every healthy twin pass. The table is printed with `-s`."""

from __future__ import annotations

import pytest

from tests.faults.table import ROWS, Row

_VERDICTS: dict[str, tuple[list[str], list[str]]] = {}


def verdicts(row: Row) -> tuple[list[str], list[str]]:
    """Reasons of the gate against the fault and against its twin; each row is run once."""
    if row.fault not in _VERDICTS:
        _VERDICTS[row.fault] = row.broken(), row.healthy()
    return _VERDICTS[row.fault]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_the_fault_is_rejected_and_its_twin_is_not(row: Row) -> None:
    broken, healthy = verdicts(row)
    assert broken, f"the gate let '{row.fault}' pass"
    assert not healthy, f"false alarm on '{row.twin}': {healthy[0]}"
    assert all("\n" not in reason for reason in broken)


def test_at_least_forty_faults_and_as_many_twins() -> None:
    judged = [(row, *verdicts(row)) for row in ROWS]
    width = max(len(row.fault) for row in ROWS)
    print(f"\n{'fault':<{width}}  gate      twin accepted  reason")
    for row, broken, healthy in judged:
        verdict = "rejected" if broken else "PASSED"
        print(f"{row.fault:<{width}}  {verdict:<8}  {'yes' if not healthy else 'NO':<13}  {(broken or ['–'])[0][:110]}")
    rejected = sum(bool(broken) for _, broken, _ in judged)
    accepted = sum(not healthy for _, _, healthy in judged)
    print(f"{rejected} of {len(ROWS)} faults rejected, {accepted} of {len(ROWS)} twins accepted")
    assert len({row.fault for row in ROWS}) == len({row.twin for row in ROWS}) == len(ROWS) >= 40
    assert (rejected, accepted) == (len(ROWS), len(ROWS))
