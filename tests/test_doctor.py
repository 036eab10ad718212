"""Mixtures of wheels that own the same folder, and their cure; nothing of them is imported."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deployer import doctor


def versions(monkeypatch: pytest.MonkeyPatch, installed: Mapping[str, str]) -> None:
    monkeypatch.setattr(doctor, "version_of", installed.get)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"torch-tensorrt": "2.13.0", "torch-tensorrt-rtx": "2.13.0"}, "both installed and overwrite each other"),
        ({"torch-tensorrt": "2.14.0"}, "torch-tensorrt 2.14.0 is made for torch 2.14, and torch 2.13 is installed"),
    ],
)
def test_torch_tensorrt_in_a_mixture_is_bad_and_has_a_cure(
    installed: Mapping[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions(monkeypatch, {"torch": "2.13.0+cu130", **installed})
    (finding,) = doctor._torch_tensorrt()
    assert finding.status == "bad"
    assert words in finding.found
    assert "pip uninstall -y torch-tensorrt torch-tensorrt-rtx" in finding.install
    assert "deployer[trt]" in finding.install
    assert not doctor.Diagnosis((finding,)).healthy


def test_torch_tensorrt_that_goes_with_torch_is_fine_and_none_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {"torch": "2.13.0", "torch-tensorrt": "2.13.0"})
    (finding,) = doctor._torch_tensorrt()
    assert (finding.status, finding.found) == ("ok", "torch-tensorrt 2.13.0")
    versions(monkeypatch, {"torch": "2.13.0"})
    assert list(doctor._torch_tensorrt()) == []


def test_both_wheels_of_onnx_runtime_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {"onnxruntime": "1.31.0", "onnxruntime-gpu": "1.31.0"})
    (finding,) = doctor._onnxruntime()
    assert finding.status == "bad"
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in finding.install


def test_each_builder_of_a_format_is_a_finding_of_its_own() -> None:
    found = {finding.subject: finding for finding in doctor._formats()}
    for subject, extra in (("format trt by onnx-rtx", "trt-rtx"), ("format trt by torch-trt", "trt")):
        assert found[subject].status == "ok" or f"deployer[{extra}]" in found[subject].install


def test_what_is_optional_around_serving_is_told_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.subject: finding.status for finding in doctor._extras()} == {
        "signatures": "ok", "bill of materials": "ok", "traces": "ok",
    }  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = [finding.install for finding in doctor._extras()]
    assert lines == [f"pip install 'deployer[{extra}]'" for extra in ("sign", "sbom", "otel")]
