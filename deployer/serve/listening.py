"""Closing a listening socket of another process: TorchServe cannot stop taking connections and keep those it has.

`pidfd_getfd` (Linux 5.6) hands out a duplicate of another process's descriptor, and `shutdown` of a listening socket
acts on the socket itself: who connects from then on is refused by the kernel, and connections that exist go on.
"""

from __future__ import annotations

import ctypes
import os
import socket

_PIDFD_GETFD = 438  # the same number on every architecture


def stop_listening(pid: int, ports: set[int]) -> bool:
    """Close the listening sockets of process `pid` on `ports`; whether all of them were found and closed.

    False where the kernel or its rules do not allow it (containers without SYS_PTRACE).
    """
    closed = set()
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        for number in _sockets(pid):
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
            if descriptor < 0:
                continue
            with socket.socket(fileno=descriptor) as found:
                if _listens(found) and (port := found.getsockname()[1]) in ports:
                    found.shutdown(socket.SHUT_RDWR)
                    closed.add(port)
    except OSError:
        return False
    finally:
        os.close(process)
    return closed == ports


def _sockets(pid: int) -> list[int]:
    numbers = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                numbers.append(int(name))
        except OSError:
            continue  # closed since
    return numbers


def _listens(found: socket.socket) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
