"""Files that are whole or absent: hashing, atomic writes, folders that replace each other in one step."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[str]:
    """Names of every file below `folder`, relative, with `/`, sorted. Links are refused: they leave the folder."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise OSError(errno.EINVAL, "symbolic link inside a folder that must be self-contained", str(path))
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return names


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on a clean exit it is fsynced and takes the name in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes 0600, which a server under another user cannot read
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a kill leaves the old file or the new one."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Yields an empty folder `.NAME.partial-*` beside `final`, removed on exit unless it was published.

    The writer holds a lock on its folder for as long as it lives, so leftovers of killed writers are told from the
    folders of living ones and removed here.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".{final.name}.partial-*"):
        with suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=parent))
    with _locked(staging):
        staging.chmod(0o755)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = lock_folder(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """Take the folder's advisory lock; closing the descriptor returned gives it back, as the kernel does when the
    holder dies in whatever way. Raises OSError at once when another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def publish_folder(staging: Path, final: Path) -> None:
    """Give `staging` the name `final`: after a kill at any moment the old folder or the new one is there, whole."""
    for name in files_below(staging):
        fsync(staging / name)
    for folder in [staging, *(path for path in staging.rglob("*") if path.is_dir())]:
        fsync(folder)
    if final.exists():
        _exchange(staging, final)  # `staging` now holds the old folder; its owner removes it
    else:
        staging.rename(final)
    fsync(final.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one system call (renameat2 with RENAME_EXCHANGE, Linux 3.15)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) != 0:
        code = ctypes.get_errno()
        raise OSError(
            code,
            f"{os.strerror(code)}: this file system cannot swap folders; remove the old one first",
            str(other),
        )
