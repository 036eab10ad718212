"""Which line of the user's model narrowed a dynamic axis: torch.export says that it happened, not where.

While a program is exported, every narrowing of a symbolic size passes through two methods of torch's ShapeEnv. They
are wrapped for that time and the innermost line of the user's code on the stack is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deployer.spec import ModelSpec
from deployer.userlines import UserLine, innermost_user_line, stack_depth

_SOURCE = re.compile(r"(\d+)\]\.size\(\)\[(\d+)\]$")  # of `L['tensors'][0].size()[1]`


@dataclass(frozen=True)
class Narrowing:
    """`source` is torch's name of the axis; `value` the only size left, None where a range was cut."""

    source: str
    value: int | None
    line: UserLine | None

    def dim(self, spec: ModelSpec) -> str | None:
        """The Dim of the spec that was narrowed."""
        found = _SOURCE.search(self.source)
        if found is None or int(found[1]) >= len(spec.inputs):
            return None
        size = spec.inputs[int(found[1])].shape[int(found[2])]
        return size if isinstance(size, str) else None


@dataclass
class Provenance:
    """Every narrowing that was seen, in order."""

    seen: list[Narrowing] = field(default_factory=list)

    def of(self, spec: ModelSpec, *, constant: bool) -> Narrowing | None:
        """The first narrowing of a Dim of the spec, to a constant or to a range, that has a line."""
        return next(
            (
                entry
                for entry in self.seen
                if (entry.value is not None) == constant and entry.line is not None and entry.dim(spec) is not None
            ),
            None,
        )


@contextmanager
def watched_axes() -> Iterator[Provenance]:
    """Records where symbolic sizes are narrowed while the block runs. Not for two threads at once."""
    provenance = Provenance()
    below = stack_depth()
    replace, refine = ShapeEnv._set_replacement, ShapeEnv._update_var_to_range

    def note(env: ShapeEnv, symbol: Any, value: int | None) -> None:
        sources = [source.name for source in env.var_to_sources.get(symbol, ())]
        names = [name() if callable(name) else str(name) for name in sources]
        provenance.seen += [Narrowing(name, value, innermost_user_line(below)) for name in names]

    def set_replacement(env: ShapeEnv, symbol: Any, target: Any, *rest: Any, **options: Any) -> Any:
        if getattr(target, "is_Integer", False):
            note(env, symbol, int(target))
        return replace(env, symbol, target, *rest, **options)

    def update_range(env: ShapeEnv, symbol: Any, *rest: Any, **options: Any) -> Any:
        note(env, symbol, None)
        return refine(env, symbol, *rest, **options)

    ShapeEnv._set_replacement = set_replacement  # type: ignore[assignment,method-assign]
    ShapeEnv._update_var_to_range = update_range  # type: ignore[assignment,method-assign]
    try:
        yield provenance
    finally:
        ShapeEnv._set_replacement = replace  # type: ignore[method-assign]
        ShapeEnv._update_var_to_range = refine  # type: ignore[method-assign]
