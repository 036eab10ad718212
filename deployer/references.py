"""`path.py:name` and `pkg.mod:name`: the two ways in which a user names Python code.

Importing runs code. Only a reference that the user typed, or a file inside a folder that the user named,
ever reaches `load_reference`; a reference read from a checkpoint file alone does not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from deployer.errors import ModelError, first_line, nearest
from deployer.files import sha256_of


def split_reference(reference: str) -> tuple[str, str]:
    """`"model.py:build"` → `("model.py", "build")`. Raises ModelError when it has not that form."""
    source, separator, name = reference.rpartition(":")
    if not separator or not source or not name.isidentifier():
        raise ModelError(f"'{reference}' is no code reference; write path.py:function or package.module:function")
    return source, name


def is_file_reference(reference: str) -> bool:
    return split_reference(reference)[0].endswith(".py")


def load_reference(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import what `reference` names; a relative `path.py` is looked up in `folder` (default: the working folder).

    Raises ModelError, naming the reference, when the file, module or name is absent or fails to import.
    """
    source, name = split_reference(reference)
    try:
        module = _import_file((folder or Path()) / source) if source.endswith(".py") else _import_module(source)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"importing '{source}' for '{reference}' failed with {type(error).__name__}: {first_line(error)}"
        ) from error
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ModelError(f"'{source}' has no '{name}'{nearest(name, public)}")
    target = getattr(module, name)
    if not callable(target):
        raise ModelError(f"'{reference}' is a {type(target).__name__}; a function or class is expected")
    return target  # type: ignore[no-any-return]


def load_module(path: Path) -> ModuleType:
    """Import a Python file. Raises ModelError naming it."""
    try:
        return _import_file(path)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing '{path}' failed with {type(error).__name__}: {first_line(error)}") from error


def source_sha256(reference: str, folder: Path | None = None) -> str:
    """Hex sha256 of the Python file that `reference` lives in; "" for code without a file."""
    source, _ = split_reference(reference)
    if source.endswith(".py"):
        path: str | None = str((folder or Path()) / source)
    else:
        path = getattr(_import_module(source), "__file__", None)
    return sha256_of(Path(path)) if path and Path(path).is_file() else ""


def _import_module(source: str) -> ModuleType:
    cwd = str(Path.cwd())
    if cwd not in sys.path:  # as `python -m` does: packages beside the user's recipe can be named
        sys.path.insert(0, cwd)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"no module '{error.name}' for '{source}'; install it, or name a file as path.py:function"
        ) from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ModelError(f"no file '{path}'; give the path of a Python file")
    # The name carries the content's hash: an edited file is imported anew, two `model.py` never mix.
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"'{path}' cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # the file's own siblings are importable, as when it runs as a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module
