"""The type of an engine: what makes a package for one server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployer.bundle import Bundle
from deployer.errors import MachineError
from deployer.package.settings import Settings


@dataclass(frozen=True)
class HookFiles:
    """The user's hooks (`deployer.hooks`): the Python file, the files that it reads or imports beside itself, and what
    it needs installed, as pip's requirements."""

    main: Path
    extra: tuple[Path, ...] = ()
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """`package` writes the package of a gated bundle into a folder and returns its path, after having checked it under
    the server's own loader, with the user's hooks where there are any, and signed it where a private key is given.
    `modules` are the imports that it needs, `extra` installs them. The last argument of `package`, where there is one,
    is called with the finished package before it takes its name; what it raises keeps it from that."""

    name: str
    summary: str
    package: Callable[[Bundle, Settings, Path, HookFiles | None, Path | None, Callable[[Path], None] | None], Path]
    modules: tuple[str, ...]
    extra: str

    @property
    def install(self) -> str:
        return f"pip install 'deployer[{self.extra}]'"

    def missing_modules(self) -> list[str]:
        """The imports that this machine lacks; nothing is imported to find out."""
        return [module for module in self.modules if importlib.util.find_spec(module) is None]

    def check_machine(self) -> None:
        """Raises MachineError, with the line that installs what is missing."""
        if missing := self.missing_modules():
            raise MachineError(
                f"engine '{self.name}' needs {', '.join(missing)}, which this machine lacks", install=self.install
            )
