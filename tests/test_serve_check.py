"""`deployer package` tries what it made in a real server before anybody sees it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from deployer.bundle import read_bundle
from deployer.cli import cli
from deployer.errors import GateError
from deployer.package import package
from deployer.serve import serve_check
from tests.test_serve_torchserve import with_handler

FORMS = ["json", "npy", "npz", "safetensors", "oip", "oip-binary", "json, answered in npz"]


def test_a_package_is_served_before_it_takes_its_name(
    digits_bundles: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["package", str(digits_bundles["onnx"]), "--workers", "1", "-o", str(tmp_path), "--json"]
    cli.main(arguments, standalone_mode=False)
    served = json.loads(capsys.readouterr().out)["served"]
    assert (served["checked"], served["forms"]) == (True, FORMS)
    assert served["requests"] == served["right"] > 2 * len(FORMS)
    assert served["wrong_requests"] == served["refused"] > 0
    before = (tmp_path / "digits.mar").read_bytes()
    cli.main([*arguments, "--no-serve-check"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["served"] == {
        "checked": False, "said": "not tried in a real server: --no-serve-check",
    }  # fmt: skip
    assert (tmp_path / "digits.mar").stat().st_size == len(before)


def test_a_package_that_a_real_server_answers_wrongly_never_appears(
    digits_bundles: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's check is passed over, so that the server alone can see that every answer is zeros."""
    module = importlib.import_module("deployer.package.torchserve")
    monkeypatch.setattr(module, "check_archive", lambda *_: None)
    zeros = (
        "class H:\n    def initialize(self, context):\n        pass\n    def handle(self, data, context):\n"
        '        return [b\'{"outputs": {"logits": [0,0,0,0,0,0,0,0,0,0]}}\'] * len(data)\n'
    )
    seen: list[Path] = []

    def check(archive: Path) -> None:
        seen.append(archive)
        assert not (tmp_path / "store" / "digits.mar").exists()
        serve_check(with_handler(archive, tmp_path / "zeros.mar", zeros))

    with pytest.raises(GateError, match="output 'logits' of a sample differs"):
        package(read_bundle(digits_bundles["onnx"]), output=tmp_path / "store", workers=2, check=check)
    assert len(seen) == 1
    assert list((tmp_path / "store").iterdir()) == []
