"""Is the server of this container ready? Exit code 0 when it is; else 1 and the reason in one line.

    python healthcheck.py /state

Run by the image every few seconds, so it uses the standard library alone and imports nothing of deployer. It asks the
management API on the loopback: TorchServe's own `/ping` says "Healthy" while every worker is dead. No request goes
through the model, so a busy server stays healthy.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

_TIMEOUT_S = 4.0


def reason(state: Path) -> str:
    """Why the newest server whose folder lies in `state` is not ready, or nothing. Raises OSError, ValueError, KeyError
    for a server that does not answer as it should."""
    folders = sorted(state.glob("deployer-serve-*"), key=lambda folder: folder.stat().st_mtime)
    # The token is written last of all, once real samples have been answered rightly.
    if not folders or not (folders[-1] / "token").is_file():
        return "the server has not finished starting"
    key = json.loads((folders[-1] / "key_file.json").read_text())["management"]["key"]
    lines = (folders[-1] / "config.properties").read_text().splitlines()
    base = dict(line.split("=", 1) for line in lines)["management_address"]
    models = [entry["modelName"] for entry in _get(f"{base}/models?limit=1000", key)["models"]]
    for name in models:
        for version in _get(f"{base}/models/{name}/all", key):
            if not any(worker["status"] == "READY" for worker in version["workers"]):
                return f"{name} {version['modelVersion']} has no worker that is ready"
    return "" if models else "the server holds no model"


def _get(url: str, key: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - our own http URL
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy may see the key
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)


def main() -> None:
    try:
        found = reason(Path(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        found = f"the management API does not answer: {type(error).__name__}: {error}"
    if found:
        sys.exit(found)


if __name__ == "__main__":
    main()
