"""`deployer inspect`: what a checkpoint, bundle or .mar holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from deployer.cli.console import emit_json, make_table, out, parse_json_object
from deployer.cli.intake import intake_options
from deployer.errors import BundleError, UsageError

if TYPE_CHECKING:
    from deployer.checkpoint.coverage import Coverage
    from deployer.inspection import Inspection

_SHOWN_TENSORS = 40


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--all", "show_all", is_flag=True, help=f"List every tensor, not the first {_SHOWN_TENSORS}.")
@click.option("--model", help="path.py:factory: build it and see how the keys of the weights meet its own.")
@click.option("--args", "args_json", metavar="JSON", help="Arguments of the factory, as a JSON object.")
@click.option("--openapi", is_flag=True, help="Print the OpenAPI document of a .mar, as its server publishes it.")
@intake_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    path: Path,
    show_all: bool,
    model: str | None,
    args_json: str | None,
    openapi: bool,
    weights: str | None,
    allow_globals: tuple[str, ...],
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Show what PATH holds: a checkpoint of any kind, an exported program, a bundle or a .mar.

    No code in it is executed. With --model, ends with exit code 2 when keys are missing or too many.
    """
    if openapi:
        out.print(_openapi(path), end="", markup=False, soft_wrap=True)
        return
    from deployer.checkpoint.weights import require_fit
    from deployer.inspection import inspect

    found = inspect(
        path, model=model, args=parse_json_object(args_json, "--args"), weights=weights,
        allow_globals=allow_globals, trust_pickle=trust_pickle,
    )  # fmt: skip
    if as_json:
        document = {**msgspec.to_builtins(found), "parameters": found.parameters}
        emit_json(document | ({"fits": found.coverage.fits} if found.coverage else {}))
    else:
        _print_facts(found)
        if found.tensors:
            _print_tensors(found, None if show_all else _SHOWN_TENSORS)
        if found.coverage is not None:
            _print_coverage(found.coverage, None if show_all else _SHOWN_TENSORS)
    if found.coverage is not None:
        require_fit(found.coverage, found.model, f"'{path}'")


def _openapi(path: Path) -> str:
    from deployer.package.torchserve import OPENAPI_FILE, read_mar

    if path.suffix != ".mar":
        raise UsageError(f"--openapi is for a .mar, which knows its routes, not for '{path}'")
    mar = read_mar(path)
    if OPENAPI_FILE not in mar.entries:
        raise BundleError(f"'{path}' holds no {OPENAPI_FILE}; package the bundle again")
    return mar.read(OPENAPI_FILE).decode()


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
    if len(found.weight_sets) > 1:
        for row in found.weight_sets:
            kind = "averaged" if row.averaged else "trained"
            table.add_row("weights", f"{row.place}: {row.tensors} tensors, {kind}; --weights {row.place}")
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


def _print_coverage(coverage: Coverage, limit: int | None) -> None:
    """What became of every key that was not simply loaded under its own name."""
    table = make_table("key", "became", "why")
    rows = [(key, coverage.renamed.get(key, "loaded"), rule) for key, rule in coverage.rules.items()]
    rows += [(key, "tied", f"stored once, as {kept}") for key, kept in coverage.tied.items()]
    rows += [(key, "kept as built", why) for key, why in coverage.defaulted.items()]
    rows += [(key, "not needed", why) for key, why in coverage.skipped.items()]
    rows += [(key, "[red]missing[/]", "the model has it, the file does not") for key in coverage.missing]
    rows += [
        (key, "[red]unexpected[/]", f"nearest: {coverage.suggestions[key]}" if key in coverage.suggestions else "")
        for key in coverage.unexpected
    ]
    for row in rows[:limit]:
        table.add_row(*row)
    if rows:
        out.print(table)
    if limit is not None and len(rows) > limit:
        out.print(f"… and {len(rows) - limit} more (--all lists them)", markup=False)
    casts = "".join(f", {count} cast {pair}" for pair, count in coverage.casts.items())
    out.print(
        f"{coverage.loaded} keys loaded, {len(coverage.renamed)} of them renamed{casts}; "
        f"{len(coverage.missing)} missing, {len(coverage.unexpected)} unexpected",
        markup=False,
    )
