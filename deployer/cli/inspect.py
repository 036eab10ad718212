"""`deployer inspect`: what a checkpoint, bundle or .mar holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from deployer.cli.console import emit_json, make_table, out

if TYPE_CHECKING:
    from deployer.inspection import Inspection

_SHOWN_TENSORS = 40


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--all", "show_all", is_flag=True, help=f"List every tensor, not the first {_SHOWN_TENSORS}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, show_all: bool, as_json: bool) -> None:
    """Show what PATH holds: a checkpoint folder, a weights file, a bundle or a .mar. No code in it is executed."""
    from deployer.inspection import inspect

    found = inspect(path)
    if as_json:
        emit_json({**msgspec.to_builtins(found), "parameters": found.parameters})
        return
    _print_facts(found)
    if found.tensors:
        _print_tensors(found, None if show_all else _SHOWN_TENSORS)


def _print_facts(found: Inspection) -> None:
    table = make_table(found.kind, found.path)
    table.add_row("size", f"{found.size_bytes:,} bytes")
    for key, value in found.facts.items():
        table.add_row(key, "–" if value is None else str(value))
    if found.spec is not None:
        table.add_row("name and version", f"{found.spec.name} {found.spec.version}")
        for kind, tensors in (("input", found.spec.inputs), ("output", found.spec.outputs)):
            for tensor in tensors:
                table.add_row(kind, str(tensor).replace("[", r"\["))
        for name, dim in found.spec.dims.items():
            batch = ", the batch" if name == found.spec.batch else ""
            table.add_row("axis", f"{name}: {dim.min} to {dim.max}, typical {dim.typical}{batch}")
    for name, digest in found.sha256.items():
        table.add_row("sha256", f"{digest}  {name}")
    if found.tool_versions:
        table.add_row("made with", ", ".join(f"{name} {version}" for name, version in found.tool_versions.items()))
    out.print(table)


def _print_tensors(found: Inspection, limit: int | None) -> None:
    table = make_table("tensor", "dtype", "shape", "elements", numbers=("elements",))
    for tensor in found.tensors[:limit]:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(tensor.name, tensor.dtype, shape, f"{tensor.elements:,}")
    out.print(table)
    if limit is not None and len(found.tensors) > limit:
        out.print(f"… and {len(found.tensors) - limit} more (--all lists them)", markup=False)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in found.tensors}))
    out.print(f"{len(found.tensors)} tensors, {found.parameters:,} elements, {dtypes}", markup=False)
