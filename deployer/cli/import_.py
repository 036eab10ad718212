"""`deployer import`: a self-describing folder of any kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from deployer.cli.console import out, parse_json_object, working
from deployer.cli.intake import intake_options


@click.command("import")
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--model", help="path.py:factory or package.module:factory.")
@click.option("--args", "args_json", metavar="JSON", help="Arguments of the factory, as a JSON object.")
@click.option("--samples", help="Real inputs: .npz, .npy, .safetensors or module:function.")
@intake_options
@click.option("--name", help="Name of the model, where neither recipe nor checkpoint gives one.")
@click.option(
    "--recipe", type=click.Path(path_type=Path), help="Recipe file.  [default: deployer.yaml where it stands]"
)
def command(
    source: Path | None,
    output: Path,
    model: str | None,
    args_json: str | None,
    samples: str | None,
    weights: str | None,
    allow_globals: tuple[str, ...],
    trust_pickle: bool,
    name: str | None,
    recipe: Path | None,
) -> None:
    """Write SOURCE (weights of any kind) as a checkpoint folder that `deployer export` needs no other word for.

    The folder holds the weights as safetensors, the model's source, real samples, the spec, and where they came from.
    It appears whole or not at all.
    """
    from deployer.checkpoint import import_checkpoint
    from deployer.recipe import find_recipe, load_described

    args = parse_json_object(args_json, "--args")
    found, folder = find_recipe(recipe)
    with working("reading the checkpoint"):
        loaded = load_described(
            found, folder, source, model=model, args=args, samples=samples, name=name,
            weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle,
        )  # fmt: skip
    with working(f"writing {output}"):
        written = import_checkpoint(loaded, output)
    for kind, tensors in (("input ", loaded.spec.inputs), ("output", loaded.spec.outputs)):
        for tensor in tensors:
            out.print(f"{kind} {tensor}", markup=False)
    out.print(f"wrote {written}; next: deployer export {written} --format onnx", markup=False)
