"""Write the generated parts of README.md and docs/ anew: tables that come from the code, help that comes from the CLI.

    python scripts/docs.py            write
    python scripts/docs.py --check    exit 1 and name the file when one is stale

A generated part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
import yaml

from deployer.cli import VERBS, cli
from deployer.formats import COMPILE_MODES, FORMATS, PRECISIONS
from deployer.package import ENGINES
from deployer.validate import TOLERANCES

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    ROOT / "README.md",
    ROOT / "docs/formats.md",
    ROOT / "docs/gate.md",
    ROOT / "docs/cli.md",
    ROOT / "docs/security.md",
)


def formats_table() -> str:
    """Formats × precisions × engines."""
    header = ["format", "artifact", *PRECISIONS, *ENGINES, "what it is"]
    rows = []
    for record in FORMATS.values():
        precisions = ["yes" if precision in record.precisions else "not yet" for precision in PRECISIONS]
        engines = ["yes" if record.precisions else "not yet" for _ in ENGINES]
        rows.append([f"`{record.name}`", f"`{record.artifact}`", *precisions, *engines, record.summary])
    return markdown(header, rows)


def needs_table() -> str:
    """What each format needs and takes."""
    header = ["format", "`--compile`", "devices", "needs", "machine code"]
    rows = []
    for record in FORMATS.values():
        modes = ", ".join(mode for mode in COMPILE_MODES if mode in record.compile_modes) or "–"
        makers = [(builder.name, builder) for builder in record.builders] or [("", record)]
        needs = "; ".join(
            f"{f'{name}: ' if name else ''}{', '.join(maker.modules)}: `{record.install_line(name)}`"
            for name, maker in makers
            if maker.modules
        )
        code = "yes: loads on CPUs with the same features only" if record.native_code else "no"
        rows.append([f"`{record.name}`", modes, ", ".join(record.devices), needs or "torch", code])
    return markdown(header, rows)


def tolerances_table() -> str:
    """What the gate allows, by precision."""
    rows = [[name, f"{entry.rtol:g}", f"{entry.atol_scale:g}"] for name, entry in TOLERANCES.items()]
    return markdown(["precision", "rtol", "atol_scale"], rows)


def verbs_table() -> str:
    return markdown(["command", "does"], [[f"`deployer {verb}`", text] for verb, text in VERBS.items()])


def cli_help() -> str:
    """`--help` of every verb."""
    parts = []
    context = click.Context(cli, info_name="deployer", max_content_width=110, terminal_width=110)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        if command is None:
            sys.exit(f"VERBS names '{verb}', which has no module")
        child = click.Context(command, info_name=verb, parent=context, max_content_width=110, terminal_width=110)
        parts.append(f"## deployer {verb}\n\n```text\n{command.get_help(child)}\n```")
    return "\n\n".join(parts)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def advisories_table() -> str:
    """Known advisories and their answers."""
    entries = yaml.safe_load((ROOT / "advisories.yaml").read_text(encoding="utf-8"))
    rows = [
        [
            ", ".join(entry["ids"]), f"{entry['package']}: {entry['what']}", str(entry["fixed"]), entry["answer"],
            f"`{entry['held_by']}`",
        ]
        for entry in entries
    ]  # fmt: skip
    return markdown(["advisory", "what", "fixed in", "here", "held by"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "formats": formats_table,
    "needs": needs_table,
    "verbs": verbs_table,
    "cli": cli_help,
    "tolerances": tolerances_table,
    "advisories": advisories_table,
}


def regenerate(text: str) -> str:
    """`text` with every generated part written anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if pattern.search(text):
            part = make()
            text = pattern.sub(lambda match, part=part: match[1] + part + "\n" + match[2], text)
    return text


def main() -> None:
    stale = []
    for path in FILES:
        old = path.read_text(encoding="utf-8")
        new = regenerate(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(stale)}; run python scripts/docs.py")


if __name__ == "__main__":
    main()
