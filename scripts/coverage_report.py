"""docs/coverage.md from the outcomes of all cells."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Outcomes = Mapping[tuple[str, str], Mapping[str, Any]]

_ROOT = Path(__file__).resolve().parent.parent
_LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy")
_HEAD = """# Coverage

What becomes of every model of the zoo (`tests/zoo`) in every format. Written by `scripts/coverage`; do not edit.

A cell **passed** when the artifact was exported with the dynamic axes of its spec, passed the numeric gate, and then
answered what the eager model answers on four inputs that the gate never saw, at random sizes. It was **refused** when
the export ended with one line and a class of reason, and left no artifact. Anything else (a traceback, a crash, a
time-out, an artifact that passed the gate and answers wrongly) is a **fault**. Each cell ran in a process of its own
under a time limit."""


def write_report(path: Path, outcomes: Outcomes, formats: Sequence[str]) -> None:
    """Write the whole document; `outcomes` holds every cell by model and format."""
    from tests.zoo import ENTRIES

    meant = [name for name, entry in ENTRIES.items() if not entry.refused]
    to_refuse = [name for name, entry in ENTRIES.items() if entry.refused]
    parts = [
        _HEAD,
        _made_by(),
        "## Totals\n\n" + totals(meant, outcomes, formats),
        "## Models\n\n" + table({name: ENTRIES[name].family for name in meant}, outcomes, formats),
        "## Refused or at fault\n\n" + refused(meant, outcomes, formats),
        "## Models that must be refused\n\nKept apart from the totals. A format that takes such a model rightly (a "
        "script keeps a branch, strict tracing follows numpy) may pass it.\n\n"
        + table({name: ENTRIES[name].refused for name in to_refuse}, outcomes, formats)
        + "\n\n"
        + refused(to_refuse, outcomes, formats),
        "## Passed in another way than the plain one\n\nEach is recorded in the manifest's `details`, and announced "
        "while exporting.\n\n" + other_ways([*meant, *to_refuse], outcomes, formats),
    ]
    path.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n", encoding="utf-8")


def _made_by() -> str:
    from deployer.versions import tool_versions

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = ", ".join(f"{name} {version}" for name, version in tool_versions(*_LIBRARIES).items())
    date = datetime.now(UTC).date().isoformat()
    return f"Command: `scripts/coverage`. Date: {date}, at commit `{commit}`. Versions: {versions}. CPU only."


def totals(models: Sequence[str], outcomes: Outcomes, formats: Sequence[str]) -> str:
    """Passed, refused and faults, by format and together."""
    rows = []
    for label, chosen in [(f"`{name}`", [name]) for name in formats] + [("all", list(formats))]:
        cells = [outcomes[model, name] for model in models for name in chosen]
        status = Counter(cell.get("status") for cell in cells)
        ran = len(cells) - status[None]
        faults = ran - status["passed"] - status["refused"]
        share = f"{100 * status['passed'] / max(ran, 1):.1f} %"
        rows.append([label, str(ran), str(status["passed"]), share, str(status["refused"]), str(faults)])
    missing = sum(not outcomes[model, name] for model in models for name in formats)
    head = f"{len(models)} models that are meant to pass, {len(formats)} formats"
    head += f"; {missing} cells have not been run yet.\n\n" if missing else ".\n\n"
    return head + markdown(["format", "cells", "passed", "share", "refused", "faults"], rows)


def table(models: Mapping[str, str], outcomes: Outcomes, formats: Sequence[str]) -> str:
    """Model × format; `models` maps each name to what its second column says."""
    rows = [
        [f"`{name}`", kind.replace("_", " "), *(_word(outcomes[name, format_name]) for format_name in formats)]
        for name, kind in models.items()
    ]
    return markdown(["model", "kind", *(f"`{name}`" for name in formats)], rows)


def _word(outcome: Mapping[str, Any]) -> str:
    if outcome.get("status") in ("passed", None):
        return str(outcome.get("status") or "not run")
    word = "refused" if outcome.get("status") == "refused" else "**fault**"
    return f"{word}: {str(outcome.get('reason', '')).replace('_', ' ')}"


def refused(models: Sequence[str], outcomes: Outcomes, formats: Sequence[str]) -> str:
    """One row for each message: the formats that ended with it, its class of reason, the advice."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for model, name in ((model, name) for model in models for name in formats):
        outcome = outcomes[model, name]
        if outcome.get("status") not in ("passed", None):
            key = (model, str(outcome.get("reason", "")), _plain(outcome))
            rows.setdefault(key, []).append(name)
    if not rows:
        return "None."
    lines = [
        [f"`{model}`", ", ".join(names), f"`{reason}`", message, _advice(outcomes, model, names)]
        for (model, reason, message), names in rows.items()
    ]
    return markdown(["model", "formats", "reason", "message", "advice"], lines)


def _plain(outcome: Mapping[str, Any], limit: int = 320) -> str:
    """The message without what differs between runs: the folder of the rejected bundle."""
    message = str(outcome.get("message", "")).split("; see '")[0]
    return escaped(message if len(message) <= limit else message[: limit - 1] + "…")


def _advice(outcomes: Outcomes, model: str, names: Sequence[str]) -> str:
    return escaped(str(outcomes[model, names[0]].get("advice", "")))


def other_ways(models: Sequence[str], outcomes: Outcomes, formats: Sequence[str]) -> str:
    """How cells passed that plain tracing does not: mode, rewritten functions, decomposed operators, scripts."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, model in ((name, model) for name in formats for model in models):
        outcome = outcomes[model, name]
        if outcome.get("status") == "passed" and (way := _way(outcome.get("details", {}))):
            rows.setdefault((name, way), []).append(f"`{model}`")
    lines = [[f"`{name}`", way, str(len(found)), ", ".join(found)] for (name, way), found in rows.items()]
    return markdown(["format", "way", "cells", "models"], lines) if lines else "None."


def _way(details: Mapping[str, Any]) -> str:
    ways = ["scripted"] if details.get("method") == "script" else []
    if "tracing" in details:
        names = f" ({', '.join(details['rewritten'])})" if "rewritten" in details else ""
        ways.append(f"traced {details['tracing']}{names}")
    if "decomposed" in details:
        ways.append("decomposed " + ", ".join(name.split(".")[1] for name in details["decomposed"]))
    return "; ".join(ways)


def escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])
