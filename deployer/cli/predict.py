"""`deployer predict`: one request to a served model."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployer.cli.console import emit_json, out
from deployer.errors import UsageError

if TYPE_CHECKING:
    from deployer.client import Answer


@click.command("predict")
@click.argument("url")
@click.option(
    "--input", "input_path", required=True, type=click.Path(path_type=Path), help=".npy, .json, .npz or .safetensors."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DEPLOYER_TOKEN_FILE",
    show_envvar=True,
    help="File that holds the bearer token.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Save the outputs: .npy or .npz (bit by bit), .json."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds until it must be answered.",
)
@click.option(
    "--retry-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds for which a server that is overloaded (503) is asked again, when it says.",
)
@click.option(
    "--split",
    metavar="VERSION=W,…",
    help="Send it to a version drawn with these weights, e.g. 1.0=90,2.0=10; URL names none.",
)
@click.option("--seed", type=int, help="What --split draws from.  [default: chance]")
@click.option(
    "--body", metavar="FORM", help="json, npy, npz, safetensors, oip or oip-binary.  [default: as the file is]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    url: str,
    input_path: Path,
    token_file: Path | None,
    output: Path | None,
    timeout_s: float,
    retry_s: float,
    split: str | None,
    seed: int | None,
    body: str | None,
    as_json: bool,
) -> None:
    """Send one request to the model at URL; print its answer, or save it.

    A .npy file is the sole input; .npz and .safetensors hold inputs by name; a .json file is sent as it is. With --body
    oip or oip-binary the request is one of the Open Inference Protocol.
    """
    from deployer.client import predict, read_token
    from deployer.protocol import JSON, NPY, NPZ
    from deployer.split import Split, check_versions

    suffix = output.suffix.lower() if output is not None else ""
    if output is not None and suffix not in (".npy", ".npz", ".json"):
        raise UsageError(f"-o {output}: a name that ends in .npy, .npz or .json is expected")
    token = read_token(token_file) if token_file is not None else None
    if split is not None:
        chosen = Split.parse(split)
        urls = chosen.route(url)
        check_versions(urls, token)
        url = urls[chosen.draw(random.Random(seed))]  # noqa: S311 - it splits traffic
    accept = {".npy": NPY, ".npz": NPZ}.get(suffix, JSON)
    answer = predict(url, input_path, token=token, accept=accept, timeout_s=timeout_s, body=body, retry_s=retry_s)
    if output is not None:
        _save(answer, output)
    if as_json:
        emit_json({"schema_version": 1, "saved": str(output) if output else None, **_plain(answer)})
    elif output is not None:
        out.print(f"saved {output}", markup=False, soft_wrap=True)
    else:
        _print(answer)


def _plain(answer: Answer) -> dict[str, object]:
    return {
        "model": answer.model,
        "version": answer.version,
        "outputs": {name: array.tolist() for name, array in answer.outputs.items()},
        "labels": answer.labels or {},
    }


def _save(answer: Answer, output: Path) -> None:
    import msgspec
    import numpy as np

    from deployer.files import write_atomic
    from deployer.protocol import npy_bytes

    match output.suffix.lower():
        case ".npy":
            data = npy_bytes(next(iter(answer.outputs.values())))
        case ".npz":
            buffer = io.BytesIO()
            np.savez(buffer, **answer.outputs)  # type: ignore[arg-type]
            data = buffer.getvalue()
        case _:
            data = msgspec.json.encode(_plain(answer))
    write_atomic(output, data)


def _print(answer: Answer) -> None:
    import numpy as np

    for name, array in answer.outputs.items():
        label = (answer.labels or {}).get(name)
        out.print(f"{name} {list(array.shape)}" + (f": {label}" if label is not None else ""), markup=False)
        out.print(np.array2string(array, precision=6, threshold=200, max_line_width=100), markup=False, soft_wrap=True)
