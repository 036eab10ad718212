"""Which line of the user's own code it was: on the stack now, or on the way of an error. For messages that help."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent) + "/"
_PYTHON = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class UserLine:
    """A line of code that is neither torch's nor deployer's; printed as `model.py:12: return x.view(4, 3)`."""

    file: str
    line: int

    def __str__(self) -> str:
        code = " ".join(linecache.getline(self.file, self.line).split())
        place = f"{Path(self.file).name}:{self.line}"
        return f"{place}: {code}" if code else place


def stack_depth() -> int:
    """The number of frames on this thread's stack, the caller's included."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def innermost_user_line(below: int = 0) -> UserLine | None:
    """The line of the user's code that this thread executes, the outermost `below` frames left out; or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(stack_depth() - 1 - below):
        if frame is None:
            break
        if is_user_code(frame.f_code.co_filename):
            return UserLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def failing_user_line(error: BaseException) -> UserLine | None:
    """The innermost line of the user's code that the error passed through; or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_code(frame.filename):
            return UserLine(frame.filename, frame.lineno or 0)
    return None


def is_user_code(filename: str) -> bool:
    """False for torch, deployer, Python's own library and generated code; other installed packages may hold models."""
    if filename.startswith((_torch_folder(), _OWN, "<")):
        return False
    return "site-packages" in filename or not filename.startswith(_PYTHON)


@cache
def _torch_folder() -> str:
    """Found without importing torch, which is slow."""
    found = importlib.util.find_spec("torch")
    return str(Path(found.origin).parent) + "/" if found is not None and found.origin else "\0"
