"""`deployer build`: a container build context, and the image where a builder works."""

from __future__ import annotations

from pathlib import Path

import click

from deployer.cli.console import emit_json, out, working


@click.command("build")
@click.argument("mars", metavar="MAR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("build/container"),
    show_default=True,
    help="Folder of the build context; an older context there is replaced.",
)
@click.option("-t", "--tag", metavar="NAME", help="Name of the image.  [default: MODEL:VERSION of the first MAR]")
@click.option(
    "--base-image", metavar="IMAGE", help="Image with this Python's version.  [default: python:X.Y-slim-bookworm]"
)
@click.option("--wheels", is_flag=True, help="Put the packages into the context too; the build then needs no network.")
@click.option("--no-hashes", is_flag=True, help="Pin versions alone and ask no index; the context says so.")
@click.option(
    "--builder",
    type=click.Choice(["docker", "podman", "buildah", "none"]),
    help="What builds the image; `none` leaves it at the context.  [default: the first that works]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    mars: tuple[Path, ...],
    output: Path,
    tag: str | None,
    base_image: str | None,
    wheels: bool,
    no_hashes: bool,
    builder: str | None,
    as_json: bool,
) -> None:
    """Write the build context of an image that serves MAR..., and build it with docker, podman or buildah.

    Versions are those of this environment; hashes are of the wheels that pip, as configured here, finds for them.
    Where no builder works, the context stays and the exit code is 4. The server in the image takes requests on
    every address of its container, with the token; docs/security.md says how a client gets it.
    """
    from deployer.package.container import build_context, build_image, check_tag, default_tag

    if tag is not None:
        check_tag(tag)
    with working("writing the build context"):
        context = build_context(mars, output, base_image=base_image, hashes=not no_hashes, wheels=wheels)
    tag = default_tag(mars) if tag is None else tag
    if not as_json:
        out.print(f"context  {context}", markup=False, soft_wrap=True)
    image = None
    if builder != "none":
        image, builder = tag, build_image(context, tag, builder=builder)
    if as_json:
        emit_json({"schema_version": 1, "context": str(context), "image": image, "builder": builder})
    elif image is not None:
        out.print(f"image    {image} (built by {builder})", markup=False, soft_wrap=True)
