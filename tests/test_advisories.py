"""Known advisories: each answered, an unanswered one fails the lint, and what was not looked up is not called clean."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(*faults: dict[str, Any], name: str = "x", **more: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(faults), **more}


def test_an_unanswered_advisory_fails(audit: ModuleType) -> None:
    fault = {"id": "PYSEC-2027-1", "aliases": ["CVE-2027-0001"], "fix_versions": ["1.1"]}
    passed, line = audit.judge({"dependencies": [package(fault), package(name="y")]}, audit.read_answers())
    assert not passed
    assert "x 1.0 has CVE-2027-0001, fixed in 1.1" in line


def test_an_answered_one_passes_by_any_of_its_names(audit: ModuleType) -> None:
    fault = {"id": "PYSEC-2023-1", "aliases": ["CVE-2023-43654"], "fix_versions": []}
    passed, line = audit.judge({"dependencies": [package(fault, name="torchserve")]}, audit.read_answers())
    assert (passed, "1 packages, 1 advisories, all answered" in line) == (True, True)


def test_what_could_not_be_looked_up_is_said(audit: ModuleType) -> None:
    """pip-audit calls it "No known vulnerabilities found"."""
    missing = {"name": "z", "skip_reason": "Dependency not found on PyPI"}
    passed, line = audit.judge({"dependencies": [missing, missing]}, [])
    assert passed
    assert "skipped, the advisories of none of 2 packages can be read" in line
    assert "not looked up: z" in audit.judge({"dependencies": [missing, package()]}, [])[1]


def test_a_silent_network_skips_aloud(audit: ModuleType) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('no such host')"]
    assert audit.run(failing) == (True, "pip-audit: skipped, it ended with 1: no such host")
    assert "skipped, it did not answer" in audit.run(["/nonexistent/pip-audit"])[1]
    fault = {"id": "CVE-2027-0001", "aliases": [], "fix_versions": []}
    found = json.dumps({"dependencies": [package(fault)]})
    passed, _ = audit.run([sys.executable, "-c", f"print({found!r}); raise SystemExit(1)"])
    assert not passed


def test_an_answer_needs_all_its_parts(audit: ModuleType, tmp_path: Path) -> None:
    entries = yaml.safe_load((ROOT / "advisories.yaml").read_text())
    path = tmp_path / "advisories.yaml"
    path.write_text(yaml.safe_dump([{**entries[0], "answer": ""}]))
    with pytest.raises(SystemExit, match="needs answer"):
        audit.read_answers(path)
    path.write_text(yaml.safe_dump([entries[0], entries[0]]))
    with pytest.raises(SystemExit, match="stands twice"):
        audit.read_answers(path)


def test_lint_runs_it() -> None:
    assert "python scripts/audit.py" in (ROOT / "scripts/lint").read_text()


def test_the_answers_are_for_the_versions_that_are_installed(audit: ModuleType) -> None:
    """Another TorchServe or another netty needs another look at the list."""
    assert metadata.version("torchserve") == "0.12.0"
    jar = metadata.distribution("torchserve").locate_file("ts/frontend/model-server.jar")
    with zipfile.ZipFile(str(jar)) as archive:
        versions = archive.read("META-INF/io.netty.versions.properties").decode()
    assert re.findall(r"^netty-(?:common|codec-http)\.version=(.+)$", versions, re.MULTILINE) == ["4.1.53.Final"] * 2
    assert {entry["package"] for entry in audit.read_answers()} == {"torchserve", "netty"}


def test_the_script_with_the_open_bucket_is_not_installed() -> None:
    files = [Path(str(path.locate())) for path in metadata.files("torchserve") or ()]
    assert len(files) > 50
    assert not [path for path in files if path.suffix == ".sh" or "s3" in path.name]
    texts = [path.read_bytes() for path in files if path.suffix == ".py"]
    assert not any(b"benchmarkai-metrics-prod" in text for text in texts)
