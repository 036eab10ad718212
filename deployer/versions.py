"""Versions of what is installed, read from package metadata: nothing is imported."""

from __future__ import annotations

import platform
from importlib import metadata


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def tool_versions(*distributions: str) -> dict[str, str]:
    """Python's version and that of each distribution that is installed."""
    found = {name: version_of(name) for name in ("deployer", *distributions)}
    return {
        "python": platform.python_version(),
        **{name: text for name, text in found.items() if text is not None},
    }
