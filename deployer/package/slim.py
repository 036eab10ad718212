"""Remove from an image's environment what serving never reads, and say what is left.

    python slim.py /opt/venv/lib/python3.11/site-packages      # while the image is built
    python slim.py --sizes /opt/venv/lib/python3.11/site-packages

Runs inside the build, so it uses the standard library alone and imports nothing of deployer. What it removes is
headers, CMake files, test programs and test suites: nothing that Python imports at run time. `scripts/container-check`
serves every CPU format from what remains.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

#: below site-packages
UNREAD = (
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/test_*",
    "torch/bin/*Test",
    "torch/bin/protoc*",
    "torch/bin/*.pt",
    "torch/bin/*.ptl",
    "torch/bin/upgrader_models",
    "torch/lib/lib*_test.so",
    "numpy/**/tests",
    "sympy/**/tests",
    "networkx/**/tests",
)
_SHOWN = 12


def unread(packages: Path) -> Iterator[Path]:
    """What UNREAD finds below `packages`, no path inside another."""
    found = sorted({path for pattern in UNREAD for path in packages.glob(pattern)})
    kept: list[Path] = []
    for path in found:
        if not any(parent in kept for parent in path.parents):
            kept.append(path)
            yield path


def size_bytes(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(below.lstat().st_size for below in path.rglob("*") if below.is_symlink() or below.is_file())


def main() -> None:
    packages = Path(sys.argv[-1])
    if not (packages / "torch").is_dir():
        sys.exit(f"'{packages}' holds no torch; the site-packages of the image's environment is expected")
    if "--sizes" not in sys.argv:
        total = 0
        for path in list(unread(packages)):
            total += size_bytes(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        print(f"removed {total / 1e6:.0f} MB that serving does not read")
    sizes = sorted(((size_bytes(path), path.name) for path in packages.iterdir()), reverse=True)
    for size, name in sizes[:_SHOWN]:
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(size for size, _ in sizes) / 1e6:8.1f} MB  in all")


if __name__ == "__main__":
    main()
