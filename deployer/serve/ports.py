"""Ports on which a server can listen."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from deployer.errors import UsageError

_FIRST, _LAST = 10_000, 65_534  # TorchServe refuses 65535
_EPHEMERAL = (32_768, 60_999)  # Linux's default
_TRIES = 1000


def choose_ports(host: str, wanted: Sequence[tuple[str, int]]) -> list[int]:
    """A port for each (option, number), 0 standing for any free one; all different, all free on `host`.

    Raises UsageError that names the port and the option. All are held at once while choosing, so no two are the same.
    A free one lies outside the range from which the kernel takes ports for outgoing connections: between our looking
    and the server's listening any connection of this machine could take such a port, even one of ours that waits for
    the server (it would be connected to itself).
    """
    numbers = []
    with ExitStack() as held:
        for option, number in sorted(wanted, key=lambda item: item[1] == 0):  # asked-for ports first
            if not 0 <= number <= _LAST:
                raise UsageError(f"{option} {number}: a port from 1 to {_LAST}, or 0 for any free one, is expected")
            if number == 0:
                numbers.append((option, _hold_any(host, held)))
                continue
            try:
                _hold(host, number, held)
            except OSError as error:
                raise UsageError(
                    f"port {number} cannot be used ({error.strerror}); choose another with {option}, 0 for any free one"
                ) from error
            numbers.append((option, number))
    chosen = dict(numbers)
    return [chosen[option] for option, _ in wanted]


def _hold(host: str, number: int, held: ExitStack) -> None:
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, number))
    listener.listen()


def _hold_any(host: str, held: ExitStack) -> int:
    low, high = ephemeral_range()
    candidates = [number for number in range(_FIRST, _LAST + 1) if not low <= number <= high]
    if not candidates:  # a machine that hands out every port
        candidates = list(range(_FIRST, _LAST + 1))
    for number in random.sample(candidates, min(_TRIES, len(candidates))):
        try:
            _hold(host, number, held)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"no port can be used on {host}: {error.strerror}") from error
            continue
        return number
    raise UsageError(f"no free port found on {host} in {_TRIES} tries; give one with --port")


def ephemeral_range() -> tuple[int, int]:
    """The first and the last port that the kernel gives to outgoing connections."""
    with suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    return _EPHEMERAL
