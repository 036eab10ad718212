"""The house: each module imports only from those before it in ORDER."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = [
    "errors",
    "userlines",
    "files",
    "signature",
    "references",
    "versions",
    "machine",
    "spec",
    "padding",
    "samples",
    "checkpoint",
    "training",
    "quantize",
    "formats",
    "bundle",
    "runtime",
    "validate",
    "int8",
    "export",
    "protocol",
    "description",
    "hooks",
    "meters",
    "tracing",
    "predictor",
    "package",
    "client",
    "split",
    "parity",
    "serve",
    "bench",
    "compare",
    "recipe",
    "inspection",
    "doctor",
    "cli",
]


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """(first part below `deployer`, line) of each import of deployer in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "deployer":
                names = [f"deployer.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("deployer."):
                yield name.split(".")[1], node.lineno


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "deployer").with_suffix("").parts[0]


PACKAGE_FILES = sorted(
    path for path in (ROOT / "deployer").rglob("*.py") if room_of(path) not in ("__init__", "__main__", "_data")
)


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_backwards(path: Path) -> None:
    room = room_of(path)
    assert room in ORDER, f"{room} has no place in ORDER; docs/decisions.md says how the order is kept"
    for imported, line in imported_rooms(path):
        assert imported in ORDER, f"{path}:{line} imports deployer.{imported}, which has no place in ORDER"
        assert ORDER.index(imported) <= ORDER.index(room), f"{path}:{line}: {room} imports {imported}, which is later"


def test_handlers_import_the_predictor_and_their_servers_protocol_alone() -> None:
    for path in (ROOT / "handlers").glob("*.py"):
        rooms = {room for room, _ in imported_rooms(path)}
        assert rooms <= {"predictor", "package"}, f"{path} imports {sorted(rooms)}"


def test_only_the_command_line_imports_training() -> None:
    for path in PACKAGE_FILES:
        if room_of(path) not in ("training", "cli"):
            assert "training" not in {room for room, _ in imported_rooms(path)}, f"{path} imports deployer.training"


def test_every_room_of_the_order_exists() -> None:
    rooms = {room_of(path) for path in PACKAGE_FILES}
    assert set(ORDER) == rooms
