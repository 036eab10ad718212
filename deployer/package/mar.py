"""Reading a .mar (a zip archive) that somebody else may have made: every entry is checked before one is written.

Refused, by name: entries that climb out of the folder, links, encrypted, doubled and unlisted entries, and archives
that expand beyond a limit. No code in the archive runs here.
"""

from __future__ import annotations

import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import yaml

from deployer.errors import BundleError, first_line

MANIFEST = "MAR-INF/MANIFEST.json"
BUNDLE_FOLDER = "bundle"
HOOKS_FOLDER = "hooks"
HOOKS_MAIN = "main.py"
HOOKS_REQUIREMENTS = "requirements.txt"

_ENTRY_LIMIT = 10_000
_EXPANDED_LIMIT_BYTES = 16 * 2**30
#: A mature archive of weights hardly shrinks; more than this, beyond a small size, is a bomb.
_RATIO_LIMIT = 100
_RATIO_FREE_BYTES = 16 * 2**20
_TEXT_LIMIT_BYTES = 2**20
_COPY_BYTES = 2**20
#: a local file header (APPNOTE.TXT, 4.3.7), without name and extra field
_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ZIP64 = 0xFFFFFFFF
_URL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_READ_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Mar:
    """A checked archive. `entries` is the expanded size in bytes of every file, by name."""

    path: Path
    entries: dict[str, int]
    manifest: dict[str, Any]
    model_config: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.manifest["model"]["modelName"])

    @property
    def version(self) -> str:
        return str(self.manifest["model"].get("modelVersion", "1.0"))

    @property
    def handler(self) -> str:
        return str(self.manifest["model"].get("handler", ""))

    def read(self, name: str) -> bytes:
        """One file. Raises KeyError when the archive has none of that name, BundleError when it is corrupt."""
        if name not in self.entries:
            raise KeyError(f"'{self.path}' holds no '{name}'")
        with _open(self.path) as archive:
            try:
                return archive.read(name)
            except _READ_ERRORS as error:
                raise BundleError(f"'{self.path}': entry '{name}' is corrupt: {first_line(error)}") from error

    def extract(self, folder: Path, *, below: str = "") -> None:
        """Write the files (those under `below` alone, where given) into `folder`, which must exist."""
        with _open(self.path) as archive:
            for name in self.entries:
                if not below or name.startswith(f"{below}/"):
                    target = folder / (name.removeprefix(f"{below}/") if below else name)
                    _copy_entry(archive, name, target, self.path)


def read_mar(path: str | Path, *, limit_bytes: int = _EXPANDED_LIMIT_BYTES) -> Mar:
    """List an archive and read its manifest and model config. Raises BundleError that names the archive and entry."""
    path = Path(path)
    if not path.is_file():
        raise BundleError(f"no archive '{path}'; `deployer package` makes one")
    with _open(path) as archive:
        entries = _checked_entries(archive, path, limit_bytes)
        manifest = _document(archive, path, entries, MANIFEST)
        model = manifest.get("model")
        if not isinstance(model, dict) or not isinstance(model.get("modelName"), str):
            raise BundleError(f"'{path}': {MANIFEST} names no model")
        for key in ("modelName", "modelVersion"):
            if not _URL_NAME.fullmatch(str(model.get(key, "1.0"))):
                raise BundleError(f"'{path}': {MANIFEST} has the {key} '{model[key]}', no name for a file and a URL")
        config_file = model.get("configFile")
        config = _document(archive, path, entries, str(config_file)) if config_file else {}
    return Mar(path, entries, manifest, config)


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise BundleError(
            f"'{path}' ({path.stat().st_size} bytes) is no .mar archive, truncated or corrupt: {first_line(error)}"
        ) from error


def _checked_entries(archive: zipfile.ZipFile, path: Path, limit_bytes: int) -> dict[str, int]:
    infos = archive.infolist()
    if len(infos) > _ENTRY_LIMIT:
        raise BundleError(f"'{path}' has {len(infos)} entries; at most {_ENTRY_LIMIT} are read")
    entries: dict[str, int] = {}
    total = 0
    for info in infos:
        if reason := _fault(info, entries):
            raise BundleError(f"'{path}': entry '{info.orig_filename}' {reason}; the archive is refused")
        total += info.file_size
        if total > limit_bytes:
            raise BundleError(
                f"'{path}': with entry '{info.filename}' it expands to {total} bytes; at most {limit_bytes} are read"
            )
        if not info.is_dir():
            entries[info.filename] = info.file_size
    _check_layout(archive, infos, path)
    return entries


def _check_layout(archive: zipfile.ZipFile, infos: Sequence[zipfile.ZipInfo], path: Path) -> None:
    """Entries lie one after the other, as the directory lists them, with nothing before, between and after.

    Python reads a zip by the directory at its end, Java's stream (TorchServe's) from its start: what lies in between
    unlisted would be unpacked unseen.
    """
    position = 0
    with path.open("rb") as file:
        for info in sorted(infos, key=lambda info: info.header_offset):
            file.seek(position)
            header = file.read(_HEADER.size)
            if info.header_offset != position or len(header) < _HEADER.size or header[:4] != b"PK\3\4":
                raise BundleError(
                    f"'{path}': entry '{info.orig_filename}' does not begin where the one before it ends, at "
                    f"{position}; the archive is refused"
                )
            _, _, flags, method, _, _, _, size, _, name_length, extra_length = _HEADER.unpack(header)
            name = file.read(name_length).decode("utf-8" if flags & 0x800 else "cp437", "replace")
            own = (name, flags, method, info.compress_size if size == _ZIP64 else size)
            if own != (info.orig_filename, info.flag_bits, info.compress_type, info.compress_size) or flags & 0x8:
                raise BundleError(
                    f"'{path}': entry '{info.orig_filename}' has another head ('{name}') than the directory says; "
                    "the archive is refused"
                )
            position += _HEADER.size + name_length + extra_length + info.compress_size
    if position != archive.start_dir:
        raise BundleError(
            f"'{path}': {archive.start_dir - position} bytes stand between its entries and its directory, unlisted; "
            "the archive is refused"
        )


def _fault(info: zipfile.ZipInfo, entries: dict[str, int]) -> str:
    """What is wrong with one entry, or nothing. zipfile cuts a name at NUL, so the original name is looked at."""
    name = info.orig_filename
    parts = PurePosixPath(name).parts
    kind = stat.S_IFMT(info.external_attr >> 16)
    if "\\" in name or "\0" in name or ":" in name:
        return "has a backslash, colon or NUL in its name"
    if name.startswith("/") or ".." in parts or not parts:
        return "points outside the archive"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a special file"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.filename in entries:
        return "is there twice"
    if info.file_size > max(_RATIO_FREE_BYTES, _RATIO_LIMIT * info.compress_size):
        return f"expands from {info.compress_size} to {info.file_size} bytes, beyond the limit of {_RATIO_LIMIT} times"
    return ""


def _document(archive: zipfile.ZipFile, path: Path, entries: dict[str, int], name: str) -> dict[str, Any]:
    """A small JSON or YAML file of the archive (YAML by its safe loader: no objects)."""
    if name not in entries:
        raise BundleError(f"'{path}' lacks '{name}'; it is no model archive")
    if entries[name] > _TEXT_LIMIT_BYTES:
        raise BundleError(f"'{path}': '{name}' has {entries[name]} bytes; at most {_TEXT_LIMIT_BYTES} are read")
    try:
        data = archive.read(name)
        value = msgspec.json.decode(data) if name.endswith(".json") else yaml.safe_load(data)
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError, UnicodeDecodeError, *_READ_ERRORS) as error:
        raise BundleError(f"'{path}': '{name}' cannot be read: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise BundleError(f"'{path}': '{name}' holds a {type(value).__name__}; a mapping is expected")
    return value


def _copy_entry(archive: zipfile.ZipFile, name: str, target: Path, path: Path) -> None:
    """Copy one entry. zipfile stops at the size that the entry declares and checks its CRC."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, target.open("xb") as sink:
            while block := source.read(_COPY_BYTES):
                sink.write(block)
    except _READ_ERRORS as error:
        raise BundleError(f"'{path}': entry '{name}' cannot be unpacked: {first_line(error)}") from error
