"""TorchServe as `deployer` packages it beside mosec, Triton, LitServe, FastAPI and BentoML: one artifact, one load.

scripts/bench serving --rounds 5 --duration-s 4

Every server runs one worker of one thread on the same ONNX file, gathers up to 16 requests for 2 ms, and answers the
same 12 KB of float32; its answer is checked before it is measured. All of them run at the same time and are loaded by
`wrk` (Debian's) one after the other, in rounds that start with another server each; what is told are the ratios of a
round, their median, smallest and largest. Bodies are binary where a server takes them: .npy for deployer, raw bytes for
mosec and FastAPI, the Open Inference Protocol's binary tensors for Triton, base64 in JSON for LitServe and BentoML.
deployer checks every request against the model's spec and asks for a token; no other server here does.

The servers beside ours live in an environment of their own (`build/bench/serving/venv`), made on first use.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from deployer.bundle import Bundle
from deployer.checkpoint import load_checkpoint, save_checkpoint
from deployer.errors import DeployerError
from deployer.export import export_all
from deployer.formats import Target, get_format
from deployer.machine import cpu_name, usable_cores
from deployer.package import package
from deployer.protocol import JSON, NPY, encode_request, parse_npy
from deployer.runtime import open_bundle
from deployer.serve.torchserve import Server
from deployer.spec import Arrays, Dim, ModelSpec, TensorSpec

FOLDER = Path("build/bench/serving")
SERVERS = Path("scripts/serving")
OURS = "deployer"
MAX_BATCH, DELAY_MS, THREADS = 16, 2, 1
SHAPES = {"mlp": (3072,), "resnet20": (3, 32, 32)}
START_TIMEOUT_S = 90.0


class Mlp(nn.Module):
    """x (batch, 3072) float32 → logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    """Two 3 × 3 convolutions around a shortcut without parameters (He et al. 2015, option A)."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.stride = 1 if entering == leaving else 2
        self.widen = leaving - entering
        self.conv1 = nn.Conv2d(entering, leaving, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(leaving)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(leaving)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return torch.relu(out + shortcut)


class ResNet20(nn.Module):
    """x (batch, 3, 32, 32) float32 → logits (batch, 10); 0.27 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(Block(*pair) for pair in pairwise(widths)))
        self.classify = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.blocks(self.stem(x)).mean((2, 3)))


def mlp() -> Mlp:
    return Mlp()


def resnet20() -> ResNet20:
    return ResNet20()


@dataclass
class Contender:
    """A running server and how it is asked; `wrk` gets exactly this request."""

    name: str
    body_kind: str
    url: str
    body: bytes
    headers: dict[str, str]
    read: object  # httpx.Response → float32 (10,)
    figures: dict[int, list[dict[str, float]]] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------ the model


def bundle_of(name: str) -> Bundle:
    """A gated ONNX bundle of a network with seeded random weights; made once."""
    checkpoint = FOLDER / f"{name}-checkpoint"
    shape = SHAPES[name]
    if not (checkpoint / "checkpoint.json").is_file():
        torch.manual_seed(0)
        spec = ModelSpec(
            name,
            (TensorSpec("x", "float32", ("batch", *shape)),),
            (TensorSpec("logits", "float32", ("batch", 10)),),
            {"batch": Dim(1, MAX_BATCH, 64)},
            "batch",
        )
        samples = {"x": np.random.default_rng(0).standard_normal((16, *shape)).astype(np.float32)}
        model = {"mlp": mlp, "resnet20": resnet20}[name]().eval()
        factory = f"{Path(__file__).resolve()}:{name}"
        save_checkpoint(checkpoint, model, factory=factory, spec=spec, samples=samples)
    [outcome] = export_all(load_checkpoint(checkpoint), [Target("onnx")], FOLDER, reuse=True)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.bundle is not None  # noqa: S101 - an outcome has one of the two
    return outcome.bundle


# ---------------------------------------------------------------------------------------------------- the servers


def environment_of_servers() -> Path:
    """The Python of the environment that the other servers live in."""
    python = FOLDER / "venv" / "bin" / "python"
    done = FOLDER / "venv" / ".complete"
    requirements = SERVERS / "requirements.txt"
    if not done.is_file() or done.read_bytes() != requirements.read_bytes():
        print(f"installing the other servers into {FOLDER / 'venv'}; once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(requirements)], check=True)
        shutil.copyfile(requirements, done)
    return python.absolute()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(name: str, command: Sequence[str], environment: dict[str, str], port: int) -> Iterator[None]:
    """A server until the block ends; it counts as started when its port answers anything over HTTP."""
    log = FOLDER / f"{name}.log"
    with log.open("wb") as out:
        started = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if started.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"error: {name} did not start; its words are in {log}")
            try:
                httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
                break
            except httpx.HTTPError:
                time.sleep(0.3)
        yield
    finally:
        for signal_number in (15, 9):
            if started.poll() is None:
                os.killpg(started.pid, signal_number)
                try:
                    started.wait(10)
                except subprocess.TimeoutExpired:
                    continue


def triton_repository(name: str) -> Path:
    """A model repository with the Python backend, as its documentation describes one."""
    repository = FOLDER / "triton"
    shutil.rmtree(repository, ignore_errors=True)
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copyfile(SERVERS / "triton_model.py", version / "model.py")
    shutil.copyfile(SERVERS / "session.py", version / "session.py")
    sizes = ", ".join(str(size) for size in SHAPES[name])
    (repository / name / "config.pbtxt").write_text(
        f"""name: "{name}"
backend: "python"
max_batch_size: {MAX_BATCH}
input [{{ name: "x" data_type: TYPE_FP32 dims: [{sizes}] }}]
output [{{ name: "logits" data_type: TYPE_FP32 dims: [10] }}]
dynamic_batching {{ max_queue_delay_microseconds: {DELAY_MS * 1000} }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
    )
    return repository


def triton_command(python: Path, name: str, port: int, environment: dict[str, str]) -> list[str]:
    site = Path(
        subprocess.run(
            [str(python), "-c", "import pytriton, pathlib; print(pathlib.Path(pytriton.__file__).parent.parent)"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
    )  # fmt: skip
    home = site / "pytriton" / "tritonserver"
    backends = FOLDER / "triton-backends"
    if not backends.is_dir():
        shutil.copytree(home / "backends", backends)
        stub = home / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy2(stub / "triton_python_backend_stub", backends / "python")
    environment["LD_LIBRARY_PATH"] = str(site / "nvidia_pytriton.libs")
    environment["PYTHONPATH"] = os.pathsep.join([str((FOLDER / "triton" / name / "1").absolute()), str(site)])
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    return [
        str(home / "bin" / "tritonserver"),
        *("--model-repository", str(triton_repository(name).absolute())),
        *("--backend-directory", str(backends.absolute())),
        *("--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"),
        *("--log-warning=true", "--log-info=false"),
    ]


def other_servers(bundle: Bundle, name: str, chosen: Sequence[str], stack: ExitStack) -> list[Contender]:
    python = environment_of_servers()
    row = bundle.samples()[0]["x"][0]
    text = base64.b64encode(row.tobytes()).decode()
    contenders = []
    for server in chosen:
        port = free_port()
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {
            "BENCH_MODEL": str((bundle.path / get_format("onnx").artifact).absolute()),
            "BENCH_MAX_BATCH": str(MAX_BATCH), "BENCH_DELAY_MS": str(DELAY_MS), "BENCH_THREADS": str(THREADS),
            "BENCH_SHAPE": ",".join(str(size) for size in SHAPES[name]), "BENCH_PORT": str(port),
            "OMP_NUM_THREADS": str(THREADS), "OPENBLAS_NUM_THREADS": str(THREADS), "DO_NOT_TRACK": "1",
            "BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str((FOLDER / "bentoml").absolute()),
        }  # fmt: skip
        script = str((SERVERS / f"{server}_server.py").absolute())
        url, kind, body, headers = f"http://127.0.0.1:{port}/predict", "raw bytes", row.tobytes(), {}
        command = [str(python), script]
        if server == "mosec":
            url = f"http://127.0.0.1:{port}/inference"
            command += ["--address", "127.0.0.1", "--port", str(port)]
        elif server == "triton":
            url = f"http://127.0.0.1:{port}/v2/models/{name}/infer"
            encoded = encode_request({"x": row[np.newaxis]}, "oip-binary")
            document = {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, *row.shape],
                            "parameters": {"binary_data_size": row.nbytes}}],
                "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
            }  # fmt: skip
            head = json.dumps(document).encode()
            kind, body = "OIP binary", head + row.tobytes()
            headers = {"Content-Type": encoded.content_type, "Inference-Header-Content-Length": str(len(head))}
            command = triton_command(python, name, port, environment)
        elif server in ("litserve", "bentoml"):
            kind, headers = "base64 in JSON", {"Content-Type": "application/json"}
            body = json.dumps({"data": [text] if server == "bentoml" else text}).encode()  # BentoML's clients batch
            if server == "bentoml":
                command = [str(python), "-m", "bentoml", "serve", "bentoml_service:Model", "--host", "127.0.0.1",
                           "--port", str(port), "--working-dir", str(SERVERS.absolute())]  # fmt: skip
        stack.enter_context(process(server, command, environment, port))
        contenders.append(Contender(server, kind, url, body, headers, READERS[server]))
    return contenders


def from_bytes(answer: httpx.Response) -> np.ndarray:
    return np.frombuffer(answer.content, np.float32)


def from_triton(answer: httpx.Response) -> np.ndarray:
    return np.frombuffer(answer.content[int(answer.headers["inference-header-content-length"]) :], np.float32)


def from_base64(answer: httpx.Response) -> np.ndarray:
    document = answer.json()
    return np.frombuffer(base64.b64decode(document["data"] if isinstance(document, dict) else document[0]), np.float32)


READERS = {
    "mosec": from_bytes, "fastapi": from_bytes, "triton": from_triton, "litserve": from_base64, "bentoml": from_base64,
}  # fmt: skip


def our_server(bundle: Bundle, stack: ExitStack) -> list[Contender]:
    archive = package(
        bundle, output=FOLDER / "store", batch_size=MAX_BATCH, max_batch_delay_ms=DELAY_MS, workers=1,
        intra_op_threads=THREADS,
    )  # fmt: skip
    server = stack.enter_context(Server([archive], port=0, management_port=0, metrics_port=0))
    url = server.endpoints[0].url
    row = {"x": bundle.samples()[0]["x"][0]}
    token = {"Authorization": f"Bearer {server.token}"}
    made = []
    for label, kind, body in ((OURS, ".npy", NPY), (f"{OURS}, JSON", "JSON", JSON)):
        encoded = encode_request(row, body)
        headers = {**token, "Content-Type": encoded.content_type, "Accept": body}
        made.append(Contender(label, kind, url, encoded.body, headers, from_npy if body == NPY else from_json))
    return made


def from_npy(answer: httpx.Response) -> np.ndarray:
    return parse_npy(answer.content)


def from_json(answer: httpx.Response) -> np.ndarray:
    return np.array(answer.json()["outputs"]["logits"], np.float32)


# ------------------------------------------------------------------------------------------------- measuring


def check_answer(contender: Contender, expected: np.ndarray) -> None:
    """It answers what the artifact answers, or nothing is measured."""
    answer = httpx.post(contender.url, content=contender.body, headers=contender.headers, timeout=30)
    if answer.status_code != 200:
        sys.exit(f"error: {contender.name} answered {answer.status_code}: {answer.text[:300]}")
    got = contender.read(answer).reshape(-1)  # type: ignore[operator]
    if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-4, atol=1e-4):
        sys.exit(f"error: {contender.name} answers wrongly: {got[:4]}, and {expected[:4]} is right")


def load(contender: Contender, connections: int, duration_s: float) -> dict[str, float]:
    body = FOLDER / "body"
    body.write_bytes(contender.body)
    headers = "".join(f"{name}: {value}\n" for name, value in contender.headers.items())
    done = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(duration_s))}s", "--timeout", "30s",
         "-s", str(SERVERS / "request.lua"), contender.url],
        env=os.environ | {"BENCH_BODY": str(body), "BENCH_HEADERS": headers},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURES ")), None)
    if line is None:
        sys.exit(f"error: wrk failed against {contender.name}: {done.stderr.strip() or done.stdout.strip()}")
    figures = msgspec.json.decode(line.removeprefix("FIGURES "), type=dict[str, float])
    if figures["failed"]:
        sys.exit(f"error: {contender.name} failed {figures['failed']:.0f} of {figures['requests']:.0f} requests")
    return figures | {"rate": figures["requests"] / figures["duration_s"]}


def in_process(bundle: Bundle) -> tuple[float, float]:
    """(median latency of one row in ms, items per second at MAX_BATCH), behind the same Runner that the worker has."""
    with open_bundle(bundle, threads=THREADS) as run:
        rows: Arrays = bundle.samples()[0]
        latencies_ms = {size: timed(run, {"x": rows["x"][:size]}) for size in (1, MAX_BATCH)}
    return latencies_ms[1], MAX_BATCH / latencies_ms[MAX_BATCH] * 1000


def timed(run: object, inputs: Arrays) -> float:
    latencies_ms = []
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        started = time.perf_counter()
        run(inputs)  # type: ignore[operator]
        latencies_ms.append((time.perf_counter() - started) * 1000)
    return statistics.median(latencies_ms[3:])


def measure(contenders: Sequence[Contender], bundle: Bundle, options: argparse.Namespace) -> list[tuple[float, float]]:
    alone = []
    for contender in contenders:  # Java compiles what it runs often, BentoML learns how long its batches take
        load(contender, max(options.concurrency), options.warm_up_s)
    for turn in range(options.rounds):
        alone.append(in_process(bundle))
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            for connections in options.concurrency:
                load(contender, connections, 1)  # caches, connections and governors are not what is measured
                figures = load(contender, connections, options.duration_s)
                contender.figures.setdefault(connections, []).append(figures)
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    return alone


# ------------------------------------------------------------------------------------------------------- telling


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def tell(
    name: str, contenders: Sequence[Contender], alone: Sequence[tuple[float, float]], sizes: Sequence[int]
) -> None:
    print(f"\n## {name}\n")
    limit = statistics.median(rate for _, rate in alone)
    print(f"In process, one thread: {statistics.median(one for one, _ in alone):.2f} ms for one row, ", end="")
    print(f"{limit:.0f} rows/s at batch {MAX_BATCH}.\n")
    print("Requests/s (median), and its ratio to deployer's in the same round (smallest-largest):\n")
    print("| server | body | " + " | ".join(f"c={size} | ratio" for size in sizes) + " |")
    print("| --- | --- |" + " ---: | ---: |" * len(sizes))
    ours = contenders[0]
    for contender in contenders:
        cells = []
        for size in sizes:
            own = [figures["rate"] for figures in contender.figures[size]]
            ratios = [mine / base["rate"] for mine, base in zip(own, ours.figures[size], strict=True)]
            cells += [f"{statistics.median(own):.0f}", spread(ratios) if contender is not ours else "1"]
        print(f"| {contender.name} | {contender.body_kind} | " + " | ".join(cells) + " |")
    print(
        "\nLatency in ms, p50 / p99 (medians over rounds), and what the server adds to the in-process median at c=1:\n"
    )
    print("| server | " + " | ".join(f"c={size}" for size in sizes) + " | added at c=1 |")
    print("| --- |" + " ---: |" * (len(sizes) + 1))
    for contender in contenders:
        cells = [
            " / ".join(
                f"{statistics.median(figures[key] for figures in contender.figures[size]):.1f}"
                for key in ("p50_ms", "p99_ms")
            )
            for size in sizes
        ]
        added = "-"
        if 1 in contender.figures:
            pairs = zip(contender.figures[1], alone, strict=True)
            added = spread([figures["p50_ms"] - one for figures, (one, _) in pairs])
        print(f"| {contender.name} | " + " | ".join([*cells, added]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench serving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default="mlp,resnet20")
    parser.add_argument("--servers", default="mosec,triton,litserve,fastapi,bentoml")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration-s", type=float, default=4.0)
    parser.add_argument("--warm-up-s", type=float, default=12.0, help="load on each server before the first round")
    options = parser.parse_args()
    options.concurrency = [int(size) for size in options.concurrency.split(",")]
    if shutil.which("wrk") is None:
        sys.exit("error: wrk is not installed; `apt-get install wrk`")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        bundle = bundle_of(name)
        with open_bundle(bundle, threads=THREADS) as run:
            expected = run({"x": bundle.samples()[0]["x"][:1]})["logits"][0]
        with ExitStack() as stack:
            servers = [server for server in options.servers.split(",") if server]
            contenders = [*our_server(bundle, stack), *other_servers(bundle, name, servers, stack)]
            for contender in contenders:
                check_answer(contender, expected)
            alone = measure(contenders, bundle, options)
        tell(name, contenders, alone, options.concurrency)
    print(
        f"\n{cpu_name()}, {usable_cores()} usable cores, load average {os.getloadavg()[0]:.1f}; one worker of {THREADS}"
    )
    print(f"thread, batches of {MAX_BATCH} within {DELAY_MS} ms, {options.rounds} rounds of {options.duration_s:g} s")


if __name__ == "__main__":
    try:
        main()
    except DeployerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
