"""The docs are held to the code: tables are as generated, blocks run, every command is documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deployer.cli import VERBS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_generated_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_is_documented(verb: str) -> None:
    assert f"deployer {verb}" in README
    assert f"## deployer {verb}" in (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def test_commands_in_the_docs_exist() -> None:
    for page in PAGES:
        for verb in re.findall(r"^\s*(?:\$ )?deployer (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert verb in VERBS, f"{page.name}: deployer {verb}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_python_of_the_readme_runs(digits_folder: Path, tmp_path: Path) -> None:
    """The block that shows the Python interface, on the real checkpoint."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "examples/digits").mkdir(parents=True)
    (tmp_path / "examples/digits/checkpoint").symlink_to(digits_folder)
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
