"""Starting, watching and stopping servers: one file an engine.

with deployer.serve.Server(["model_store/digits.mar"]) as server: …
"""

from deployer.serve.torchserve import START_TIMEOUT_S, Endpoint, Server, serve_check

__all__ = ["START_TIMEOUT_S", "Endpoint", "Server", "serve_check"]
