"""Malformed requests of every kind among right ones: no exception, no 5xx, and neighbours answered as alone.

`scripts/fuzz` answers 100,000 of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deployer.predictor import Predictor, Request
from tests.hostile import FORMS, MODELS, Count, batches, judge, predictor_of, right_requests, wrong_requests

QUICK = settings(
    max_examples=40, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", MODELS)
def test_malformed_requests_hurt_nobody(name: str) -> None:
    predictor, count = predictor_of(name), Count()

    @seed(1)
    @QUICK
    @given(st.data())
    def one(data: st.DataObject) -> None:
        assert judge(predictor, data.draw(batches(MODELS[name][0])), count) == []

    one()
    assert count.wrong >= 80
    assert count.right >= 40
    assert count.shared >= 20
    assert {200, 400, 406} <= set(count.statuses)


def test_the_judge_sees_neighbours_that_get_anothers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot fail shows nothing: rows that go to the wrong request, a 500 and an exception are seen."""
    predictor, rows = predictor_of("lookup"), Predictor._rows
    pair = [(True, Request(b'{"ids": [%d, 1, 2]}' % value, "application/json")) for value in (3, 4)]
    assert judge(predictor, pair, Count()) == []

    def first_rows(self: Predictor, outputs: Any, which: Any) -> Any:
        return rows(self, outputs, slice(which.stop - which.start) if isinstance(which, slice) else which)

    monkeypatch.setattr(Predictor, "_rows", first_rows)
    assert any("together" in fault for fault in judge(predictor, pair, Count()))
    monkeypatch.setattr(Predictor, "_rows", lambda *_: 1 / 0)
    monkeypatch.setattr(Predictor, "_stacked", lambda *_: 1 / 0)
    assert any("500 for" in fault for fault in judge(predictor, pair, Count()))
    monkeypatch.setattr(Predictor, "_run_or_split", lambda *_: 1 / 0)
    assert any("out of answer" in fault for fault in judge(predictor, pair, Count()))


def test_what_is_drawn_is_of_every_kind() -> None:
    """Each form of body is among the right ones, and each kind of refusal comes of the others."""
    spec = MODELS["lookup"][0]
    predictor, types, refused = predictor_of("lookup"), Counter[str](), Counter[str]()

    @seed(4)
    @settings(QUICK, max_examples=1200)
    @given(right_requests(spec), wrong_requests(spec))
    def one(right: Request, wrong: Request) -> None:
        types[right.content_type] += 1
        [response] = predictor.answer([wrong])
        refused[f"{response.status} {kind_of(response.body)}" if response.status != 200 else "200"] += 1

    one()
    assert len(types) == len(FORMS) - 1  # "oip" goes as JSON
    kinds = {"400 json", "400 npy", "400 npz", "400 safetensors", "400 other", "406 other", "415 other"}
    assert kinds <= set(refused), refused


def kind_of(body: bytes) -> str:
    words: dict[str, Any] = {
        "npy": b".npy body cannot", "npz": b".npz body cannot", "safetensors": b".safetensors body cannot",
        "json": b"no valid JSON",
    }  # fmt: skip
    return next((name for name, word in words.items() if word in body), "other")
