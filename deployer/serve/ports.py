"""Ports on which a server can listen."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from deployer.errors import UsageError


def choose_ports(host: str, wanted: Sequence[tuple[str, int]]) -> list[int]:
    """A port for each (option, number), 0 standing for any free one; all different, all free on `host`.

    Raises UsageError that names the port and the option. All are held at once while choosing, so no two are the same.
    """
    numbers = []
    with ExitStack() as held:
        for option, number in sorted(wanted, key=lambda item: item[1] == 0):  # asked-for ports first
            if not 0 <= number <= 65534:  # TorchServe refuses 65535
                raise UsageError(f"{option} {number}: a port from 1 to 65534, or 0 for any free one, is expected")
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, number))
                listener.listen()
            except OSError as error:
                raise UsageError(
                    f"port {number} cannot be used ({error.strerror}); choose another with {option}, 0 for any free one"
                ) from error
            numbers.append((option, listener.getsockname()[1]))
    chosen = dict(numbers)
    return [chosen[option] for option, _ in wanted]
