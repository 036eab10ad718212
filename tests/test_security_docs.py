"""docs/security.md and docs/torchserve.md name a test or a file for each line; they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADS = ("| closed", "| trap", "| ---", "| advisory")
ROWS = [
    line
    for name in ("security.md", "torchserve.md")
    for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith((*HEADS, "| series", "| `deployer_", "| `ts_"))
]


@pytest.mark.parametrize("row", ROWS)
def test_what_holds_a_line_exists(row: str) -> None:
    holder = re.search(r"`([\w/.]+?)(?:::(\w+))?` \|$", row)
    assert holder, row
    file, name = holder.groups()
    if name is None:
        assert (ROOT / file).is_file()
    else:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
