"""Two servers compared: every count and error by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployer.cli import cli
from deployer.compare import compare, differences
from deployer.errors import GateError, SampleError, ServerError, UsageError
from tests.test_bench_http import Reply, Request, model_server, serving


def adds(offset: float, **more: Any) -> Callable[[int, Request], Reply]:
    """Answers y = x + offset, in JSON, with the label of the largest."""

    def behave(turn: int, request: Request) -> Reply:
        values = [value + offset for value in json.loads(request.body)["inputs"]["x"][0]]
        labels = {"y": str(values.index(max(values)))}
        return Reply(json.dumps({"outputs": {"y": [values]}, "labels": labels}).encode(), **more)

    return behave


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", x=np.array([[1.0, 2.0], [4.0, 3.0], [8.0, 9.0]], np.float32))
    return tmp_path / "x.npz"


def test_equal_servers_agree_to_the_last_bit(samples: Path) -> None:
    with serving(adds(0.5)) as one, serving(adds(0.5)) as other:
        report = compare(one.url, other.url, samples, max_abs_error=0, rounds=2)
        assert (one.posts, other.posts) == (7, 7)  # 6 and the one before
    assert report.passed
    assert (report.requests, report.answered, report.bit_equal) == (6, 6, 6)
    assert (report.labels_equal, report.labels_compared) == (6, 6)
    [output] = report.outputs.values()
    assert (output.compared, output.bit_equal, output.max_abs_error, output.max_rel_error) == (6, 6, 0, 0)
    assert (report.latency["a"].samples, report.latency["b"].samples) == (6, 6)
    assert report.p50_ratio == report.latency["b"].p50_ms / report.latency["a"].p50_ms  # type: ignore[operator]


def test_errors_are_the_largest_and_held_to_what_is_given(samples: Path) -> None:
    """B is off by 0.25: of 1 and 1.25 that is a fifth of the larger."""
    with serving(adds(0.0)) as one, serving(adds(0.25)) as other:
        reports = {
            limits: compare(one.url, other.url, samples, max_abs_error=limits[0], max_rel_error=limits[1])
            for limits in ((None, None), (0.25, None), (0.2, None), (None, 0.2), (None, 0.1), (0.2, 0.2))
        }
    for report in reports.values():
        [output] = report.outputs.values()
        assert (output.bit_equal, output.max_abs_error, output.max_rel_error) == (0, 0.25, 0.2)
        assert (report.bit_equal, report.labels_equal) == (0, 3)
    passed = {limits: report.passed for limits, report in reports.items()}
    assert passed == {
        (None, None): True, (0.25, None): True, (0.2, None): False, (None, 0.2): True, (None, 0.1): False,
        (0.2, 0.2): True,
    }  # fmt: skip
    assert reports[0.2, None].disagreements == 3
    assert reports[0.2, None].reasons[0] == "request 1: output 'y' differs by 0.25 (relative 0.2)"
    assert reports[None, 0.1].disagreements == 1  # 2.25 for 2 is 0.11, 4.25 for 4 is 0.06: the first request alone


def test_labels_are_counted_apart(samples: Path) -> None:
    with serving(adds(0.0)) as one, serving(lambda turn, request: swapped(request)) as other:
        report = compare(one.url, other.url, samples)
    assert (report.labels_equal, report.labels_compared, report.passed) == (0, 3, True)


def swapped(request: Request) -> Reply:
    values = json.loads(request.body)["inputs"]["x"][0][::-1]
    return Reply(json.dumps({"outputs": {"y": [values]}, "labels": {"y": str(values.index(max(values)))}}).encode())


def test_statuses_and_silence_that_differ_are_disagreement(samples: Path) -> None:
    def broken(turn: int, request: Request) -> Reply:
        return {2: Reply(b"{}", status=503), 3: Reply(drop="before")}.get(turn, adds(0.0)(turn, request))

    with serving(adds(0.0)) as one, serving(broken) as other:
        report = compare(one.url, other.url, samples)
    assert report.statuses == {"200/0": 1, "200/503": 1}
    assert (report.requests, report.answered, report.disagreements, report.passed) == (3, 1, 2, False)


def test_refused_alike_is_agreement(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"inputs": {"x": [[1, 2]]}}\n\n{"inputs": 3}\n')

    def behave(turn: int, request: Request) -> Reply:
        if json.loads(request.body)["inputs"] == 3:
            return Reply(b'{"error": {"message": "no"}}', status=400)
        return adds(0.0)(turn, request)

    with serving(behave) as one, serving(behave) as other:
        report = compare(one.url, other.url, tmp_path / "r.jsonl", max_abs_error=0)
    assert (report.requests, report.answered, report.statuses, report.passed) == (2, 1, {}, True)


def test_other_outputs_and_shapes_are_disagreement(samples: Path) -> None:
    others = {"the outputs z": b'{"outputs": {"z": [[1, 2]]}}', "the shape": b'{"outputs": {"y": [1, 2]}}'}
    for said, body in others.items():
        with serving(adds(0.0)) as one, serving(lambda turn, request, body=body: Reply(body)) as other:  # type: ignore[misc]
            report = compare(one.url, other.url, samples)
        assert report.disagreements == 3
        assert said.split()[-1] in report.reasons[0]


def test_a_bundles_tolerance(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    """Two formats of one model agree within the gate's tolerance; one that answers something else does not."""
    bundle = digits_bundles["onnx"]
    np.savez(tmp_path / "x.npz", image=np.random.default_rng(3).random((4, 1, 8, 8), np.float32))
    with model_server(bundle) as one, model_server(digits_bundles["torchscript"]) as other:
        report = compare(one.url, other.url, tmp_path / "x.npz", bundle=bundle)
        assert report.passed, report.reasons
        assert report.answered == 4
    with model_server(bundle) as one, model_server(bundle, lambda turn, array: array + 0.1) as other:
        report = compare(one.url, other.url, tmp_path / "x.npz", bundle=bundle)
    assert report.disagreements == 4
    assert "output 'logits'" in report.reasons[0]


def test_differences() -> None:
    a = np.array([1.0, np.nan, np.inf, np.nan, 0.0, -0.0, 2.0])
    b = np.array([1.0, np.nan, np.inf, 1.0, 0.0, 0.0, -2.0])
    errors, relative = differences(a, b)
    np.testing.assert_array_equal(errors, [0, 0, 0, np.inf, 0, 0, 4])
    np.testing.assert_array_equal(relative, [0, 0, 0, np.inf, 0, 0, 2])


def test_the_command_prints_and_ends_with_1_on_disagreement(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(adds(0.0)) as one, serving(adds(0.25)) as other:
        arguments = ["compare", one.url, other.url, "--requests", str(samples)]
        cli.main([*arguments, "--json"], standalone_mode=False)
        document = json.loads(capsys.readouterr().out)
        assert (document["passed"], document["outputs"]["y"]["max_abs_error"]) == (True, 0.25)
        cli.main(arguments, standalone_mode=False)
        assert "0 of 3 answers equal in every value, of 3 requests" in capsys.readouterr().out
        with pytest.raises(GateError, match=r"on 3 requests: request 1: output 'y' differs by 0\.25") as caught:
            cli.main([*arguments, "--max-abs-error", "0.1"], standalone_mode=False)
    assert caught.value.exit_code == 1


def test_what_cannot_be_compared_is_refused(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{')
    (tmp_path / "empty.jsonl").write_text("\n")
    with serving(adds(0.0)) as one:
        for path, said in ((tmp_path / "bad.jsonl", "line 2"), (tmp_path / "empty.jsonl", "no requests"),
                           (tmp_path / "absent.jsonl", "absent")):  # fmt: skip
            with pytest.raises(SampleError, match=said):
                compare(one.url, one.url, path)
        with pytest.raises(UsageError, match="--max-abs-error -1"):
            compare(one.url, one.url, samples, max_abs_error=-1)
        with pytest.raises(UsageError, match="--body xml is unknown"):
            compare(one.url, one.url, samples, body="xml")
        with pytest.raises(ServerError, match="does not answer"):
            compare(one.url, "http://127.0.0.1:9/predictions/m", samples)
    with serving(lambda turn, request: Reply(b"{}", status=404)) as gone, pytest.raises(ServerError, match="404"):
        compare(gone.url, gone.url, samples)
