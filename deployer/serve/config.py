"""The files that one instance of TorchServe is started with, safe and quiet, and what its logs say of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployer.machine import usable_cores
from deployer.meters import SERIES

LOOPBACK = "127.0.0.1"
METRICS_FILE = "metrics.yaml"
_JAVA_INT_MAX = 2**31 - 1
_CENTURY_MIN = 60 * 24 * 365 * 100  # TorchServe takes up to 5e14; a token that expires stops a healthy server


@dataclass(frozen=True)
class Ports:
    inference: int
    management: int
    metrics: int
    grpc_inference: int
    grpc_management: int


def config_properties(
    host: str,
    ports: Ports,
    archives: Sequence[str],
    max_request_bytes: int,
    max_response_bytes: int,
    *,
    allow_changes: bool = False,
) -> str:
    """config.properties: `host` is where inference listens; everything else is on the loopback.

    Closed: registering models over HTTP, fetching archives from anywhere, installing their requirements. With
    `allow_changes` who has the management token may register archives that lie in the instance's own folder. Bodies
    reach the handler as they came, since TorchServe's own decoding turns JSON floats and loses bad JSON.

    TorchServe answers what is over its limit with 413 and no word. It is given twice the limit of the largest model, so
    that the handler, which knows each model's own, says limit and size of what is over by less.
    """
    lines = {
        "inference_address": f"http://{host}:{ports.inference}",
        "management_address": f"http://{LOOPBACK}:{ports.management}",
        "metrics_address": f"http://{LOOPBACK}:{ports.metrics}",
        "grpc_inference_address": LOOPBACK,
        "grpc_management_address": LOOPBACK,
        "grpc_inference_port": ports.grpc_inference,
        "grpc_management_port": ports.grpc_management,
        # Threads that move bytes, of the server and to the workers: the cores are for the models.
        "number_of_netty_threads": max(1, usable_cores() // 4),
        "netty_client_threads": max(1, usable_cores() // 4),
        "load_models": ",".join(archives),
        "metrics_mode": "prometheus",
        "metrics_config": METRICS_FILE,
        "disable_system_metrics": "true",
        "enable_model_api": str(allow_changes).lower(),
        "enable_envvars_config": "false",
        "disable_token_authorization": "false",
        "token_expiration_min": _CENTURY_MIN,
        "allowed_urls": "(?!)",  # matches nothing; of a prefix that matches, /workflows copies before it refuses `..`
        "decode_input_request": "false",
        "install_py_dep_per_model": "false",
        "max_request_size": min(2 * max_request_bytes, _JAVA_INT_MAX),
        "max_response_size": max_response_bytes,
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def metrics_config(torchserves_own: str) -> str:
    """metrics.yaml: TorchServe's own and our series, as counters. It drops in silence what does not stand there.

    Its histograms have fixed bounds from 5 ms to 10 s and cost a line of output an observation; ours are counted in the
    worker, under the names that Prometheus gives a histogram's parts.
    """
    document: dict[str, Any] = yaml.safe_load(torchserves_own)
    document["model_metrics"]["counter"] = [
        {"name": name, "unit": unit, "dimensions": ["model_name", "model_version", *labels]}
        for name, (unit, labels) in SERIES.items()
    ]
    return yaml.safe_dump(document, sort_keys=False)


#: worker.log: a thread's name, a blank, one line of a worker's stdout or stderr. server.log: warnings of the frontend.
LOG4J = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="ERROR">
  <Appenders>
    <RollingFile name="server" fileName="logs/server.log" filePattern="logs/server.%i.log">
      <PatternLayout pattern="%d{ISO8601} %-5p %c{1} - %m%n%ex{1}"/>
      <Policies><SizeBasedTriggeringPolicy size="10 MB"/></Policies>
      <DefaultRolloverStrategy max="2"/>
    </RollingFile>
    <RollingFile name="worker" fileName="logs/worker.log" filePattern="logs/worker.%i.log">
      <PatternLayout pattern="%t %m%n"/>
      <Policies><SizeBasedTriggeringPolicy size="10 MB"/></Policies>
      <DefaultRolloverStrategy max="2"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="TELEMETRY_METRICS" level="off"/>
    <Logger name="io.netty" level="error"/>
    <Logger name="MODEL_LOG" level="info" additivity="false"><AppenderRef ref="worker"/></Logger>
    <Root level="warn"><AppenderRef ref="server"/></Root>
  </Loggers>
</Configuration>
"""

_LOGS = ("server.log", "console.log")  # of the frontend; the second before it has read its logging
_DEATH = "Backend worker process died."
_WORDLESS = "its process died without a word"


def worker_failure(logs: Path) -> str:
    """The error line of the first worker that died while loading, in that worker's own words, or nothing."""
    lines = _lines(logs / "worker.log")
    dead = next((line.split(" ", 1)[0] for line in lines if line.endswith(_DEATH)), None)
    if dead is None:  # a killed process says nothing; the frontend does
        return _WORDLESS if any("Load model failed: " in line for line in _lines(logs / "server.log")) else ""
    own = [line[len(dead) + 1 :] for line in lines if line.startswith(f"{dead} ")]
    errors = [
        line
        for line in own[own.index(_DEATH) + 1 :]
        if line.strip() and not line.startswith((" ", "Traceback", "During handling", "The above exception"))
    ]
    # TorchServe answers a failed import of the handler by trying a handler of its own: the first error is the cause.
    chosen = errors[:1] if errors and "ts.torch_handler" in errors[-1] else errors[-1:]
    return chosen[0].removeprefix("deployer.errors.") if chosen else _WORDLESS


def registration_failure(logs: Path) -> str:
    """Why the frontend could not load an archive, or nothing: it says so in its log and starts all the same."""
    lines = _lines(logs / "server.log")
    for index, line in enumerate(lines):
        if "Failed to load model: " in line:
            return " ".join(part.strip() for part in lines[index : index + 2])
    return ""


def port_taken(logs: Path) -> bool:
    """Whether the frontend found one of its ports in use. Of the management port it says so and lives on, deaf."""
    return any("Address already in use" in line for name in _LOGS for line in _lines(logs / name))


def last_words(logs: Path) -> str:
    """The last line that a server that ended has left, from its log or from its console."""
    for name in _LOGS:
        telling = [line.strip() for line in _lines(logs / name) if line.strip() and "WARNING: sun.reflect" not in line]
        if telling:
            return telling[-1][:300]
    return "it left no message"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
