"""Suggests the command that opens a host's firewall to the job's other hosts; a person runs it, we never do."""

from __future__ import annotations

import contextlib
import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import Path

LINES = {
    "ufw": "sudo ufw allow in on {interface} from {source}",
    "firewalld": "sudo firewall-cmd --zone=trusted --add-source={source}",
    "nft": "sudo nft insert rule inet filter input iifname {interface} {family} saddr {source} accept",
    "iptables": "sudo {program} -I INPUT -i {interface} -s {source} -j ACCEPT",
}
MAX_SPREAD = 256  # largest network to open, in addresses: more would admit too many other machines


def kind() -> str:
    """The tool that configures this host's firewall, as far as an ordinary user can see."""
    with contextlib.suppress(OSError):
        if "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text():
            return "ufw"
    if _has("firewall-cmd"):
        return "firewalld"
    return "nft" if Path("/etc/nftables.conf").exists() or not _has("iptables") else "iptables"


def opening(kind: str, interface: str, sources: Sequence[str]) -> str:
    """The command that admits these addresses, or only the first if they are far apart. kind: `kind()` of the host to
    open.
    """
    source = _network(sources)
    family, program = ("ip6", "ip6tables") if ":" in source else ("ip", "iptables")
    line = LINES.get(kind, LINES["iptables"])
    return line.format(interface=shlex.quote(interface), source=source, family=family, program=program)


def _network(addresses: Sequence[str]) -> str:
    first = ipaddress.ip_address(addresses[0])
    network = ipaddress.ip_network(first)
    while not all(ipaddress.ip_address(address) in network for address in addresses):
        if network.num_addresses >= MAX_SPREAD:
            return str(first)
        network = network.supernet()
    return str(first if network.num_addresses == 1 else network)


def _has(program: str) -> bool:
    return any(Path(folder, program).exists() for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"))
