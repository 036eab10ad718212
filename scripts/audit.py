"""Known advisories of everything that is installed, by pip-audit, held to the answers in advisories.yaml.

    python scripts/audit.py

Ends with 1 at an advisory that has no answer. Where the advisories cannot be read (no network, a mirror without them)
it says so and ends with 0: pip-audit itself would say "No known vulnerabilities found".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = ROOT / "advisories.yaml"
KEYS = {"ids", "package", "what", "fixed", "answer", "held_by"}
TIMEOUT_S = 120


def read_answers(path: Path = ANSWERS) -> list[dict[str, Any]]:
    """The entries of advisories.yaml. Exits when one lacks a key or stands twice."""
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    seen: set[str] = set()
    for entry in entries:
        if set(entry) != KEYS or not all(entry.values()):
            sys.exit(f"{path.name}: {entry.get('ids')} needs {', '.join(sorted(KEYS))}, none of them empty")
        if twice := seen & set(entry["ids"]):
            sys.exit(f"{path.name}: {min(twice)} stands twice")
        seen |= set(entry["ids"])
    return entries


def judge(report: dict[str, Any], answers: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether a report of `pip-audit --format json` passes, and the line that says why."""
    packages = report["dependencies"]
    read = [package for package in packages if "skip_reason" not in package]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if not read:
        return True, f"pip-audit: skipped, the advisories of none of {len(packages)} packages can be read from here"
    answered = {name for entry in answers for name in entry["ids"]}
    found = [
        (package["name"], package["version"], {fault["id"], *fault.get("aliases", ())}, fault.get("fix_versions", []))
        for package in read
        for fault in package["vulns"]
    ]
    fresh = [
        f"{name} {version} has {min(ids)}, {f'fixed in {fixes[0]}' if fixes else 'not fixed'}"
        for name, version, ids, fixes in found
        if not ids & answered
    ]
    if fresh:
        return False, f"pip-audit: {'; '.join(fresh)}: raise the version, or answer it in {ANSWERS.name}"
    left_out = f"; not looked up: {', '.join(skipped)}" if skipped else ""
    return True, f"pip-audit: {len(read)} packages, {len(found)} advisories, all answered{left_out}"


def run(command: list[str]) -> tuple[bool, str]:
    """pip-audit's verdict; `command` is how it is called."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return True, f"pip-audit: skipped, it did not answer: {' '.join(str(error).split())[:200]}"
    try:
        report = json.loads(done.stdout)
    except ValueError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return True, f"pip-audit: skipped, it ended with {done.returncode}: {(lines or ['without a word'])[-1][:200]}"
    return judge(report, read_answers())


def main() -> None:
    read_answers()
    passed, line = run(
        [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    )
    print(line, file=sys.stdout if passed else sys.stderr)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
