"""The way into a lab that stands: what to write before a command so that it runs in its controller's network or on one
of its hosts.

    subprocess.run([*controller(cluster), "orch", "status"])
    subprocess.run([*on_host(lab, lab.host("a2000"), as_user=True), "ps", "aux"])
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import lab_host
import lab_net
from lab_plan import Lab, LabHost

from orchestrator.errors import HostError


def controller(cluster: str) -> list[str]:
    """As who we are; only the network is another."""
    return lab_net.enter(lab_net.controller_namespace(cluster))


def on_host(lab: Lab, host: LabHost, *, as_user: bool) -> list[str]:
    """As its root, or as its ordinary user, at home. Raises HostError where its power is off."""
    pid = init_of(host)
    if pid is None:
        raise HostError(host.name, "its power is off", f"deploy/lab.py power {host.name} on")
    user = host.user if as_user else "root"
    enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--"]
    environment = [f"HOME={lab_host.home_of(user)}", f"USER={user}", f"LOGNAME={user}"]
    environment += [f"PATH={lab_host.search_path(lab.python)}", f"TERM={os.environ.get('TERM', 'dumb')}"]
    number = 0 if user == "root" else lab_host.USER_ID
    drop = ["setpriv", f"--reuid={number}", f"--regid={number}", "--init-groups", "--"]
    return [*enter, "env", "-i", *environment, *drop, "sh", "-c", 'cd && exec "$@"', "sh"]


def init_of(host: LabHost) -> int | None:
    """Process 1 of the host, as this machine numbers it; None while its power is off."""
    if not (lab_net.NETNS / host.port.namespace).exists():
        return None
    depth = len(_numbers("self")) + 1
    for pid in lab_net.processes([host.port.namespace]):
        numbers = _numbers(str(pid))
        if len(numbers) == depth and numbers[-1] == "1":
            return pid
    return None


def _numbers(pid: str) -> list[str]:
    """A process's number in each of the process namespaces that it is in, the outermost first."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []
