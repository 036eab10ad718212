"""Ending what was started: a process, its children, and theirs, by their own ids."""

from __future__ import annotations

import os
import subprocess

import psutil

_KILL_WAIT_S = 10.0


def session_members(leader_pid: int) -> list[psutil.Process]:
    """Every living process of the session that `leader_pid` founded: children, and those whose parent died."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader_pid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members


def end_session(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the leader, `grace_s` to end in good order, then SIGKILL to whatever is left of its session.

    `leader` was started with `start_new_session=True`. An interrupt while waiting shortens the grace; nothing is left
    behind either way.
    """
    try:
        leader.terminate()
        leader.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        members = session_members(leader.pid)
        for process in members:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(members, timeout=_KILL_WAIT_S)
        leader.wait(_KILL_WAIT_S)
