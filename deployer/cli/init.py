"""`deployer init`: a commented deployer.yaml, probed from the model."""

from __future__ import annotations

from pathlib import Path

import click

from deployer.cli.console import out, parse_json_object, working
from deployer.cli.intake import intake_options


@click.command("init")
@click.argument("model")
@click.option(
    "--samples", required=True, help="Real inputs to probe with: .npz, .npy, .safetensors or module:function."
)
@click.option("--checkpoint", help="Weights: a file or folder of any kind in docs/checkpoints.md.")
@intake_options
@click.option("--args", "args_json", metavar="JSON", help="Arguments of the factory, as a JSON object.")
@click.option("--name", help="Name of the model.  [default: the file's or function's]")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("deployer.yaml"), show_default=True)
@click.option("--force", is_flag=True, help="Overwrite an existing recipe.")
def command(
    model: str,
    samples: str,
    checkpoint: str | None,
    weights: str | None,
    allow_globals: tuple[str, ...],
    trust_pickle: bool,
    args_json: str | None,
    name: str | None,
    output: Path,
    force: bool,
) -> None:
    """Write a commented recipe for MODEL (path.py:factory or package.module:factory).

    The model is run on the samples at several sizes to see which axes are dynamic and what it answers.
    """
    from deployer.recipe import write_recipe

    with working(f"probing {model}"):
        spec, notes = write_recipe(
            output,
            model=model,
            samples=samples,
            args=parse_json_object(args_json, "--args") or {},
            checkpoint=checkpoint,
            name=name,
            overwrite=force,
            weights=weights,
            allow_globals=allow_globals,
            trust_pickle=trust_pickle,
        )
    for kind, tensors in (("input ", spec.inputs), ("output", spec.outputs)):
        for tensor in tensors:
            out.print(f"{kind} {tensor}", markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"wrote {output}; next: deployer export", markup=False)
