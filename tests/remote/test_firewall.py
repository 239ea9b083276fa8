"""The line that a person types to open a firewall."""

import ipaddress
import shlex

import pytest

from orchestrator.remote import firewall
from orchestrator.remote.firewall import opening

HOSTS = ["10.77.1.1", "10.77.1.2", "10.77.1.3"]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("ufw", "sudo ufw allow in on eth0 from 10.77.1.0/30"),
        ("firewalld", "sudo firewall-cmd --zone=trusted --add-source=10.77.1.0/30"),
        ("nft", "sudo nft insert rule inet filter input iifname eth0 ip saddr 10.77.1.0/30 accept"),
        ("iptables", "sudo iptables -I INPUT -i eth0 -s 10.77.1.0/30 -j ACCEPT"),
        ("of a host that lies", "sudo iptables -I INPUT -i eth0 -s 10.77.1.0/30 -j ACCEPT"),
    ],
)
def test_the_line_is_that_of_the_hosts_own_firewall(kind, line):
    assert opening(kind, "eth0", HOSTS) == line


@pytest.mark.parametrize(
    ("addresses", "source"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["10.0.0.7", "10.0.0.7"], "10.0.0.7"),
        (["10.0.0.1", "10.0.0.200"], "10.0.0.0/24"),
        (["10.0.0.1", "10.0.1.1"], "10.0.0.1"),
        (["10.0.0.1", "192.168.0.1"], "10.0.0.1"),
        (["10.0.0.1", "fd00::1"], "10.0.0.1"),
        (["fd00::1", "fd00::2"], "fd00::/126"),
    ],
)
def test_only_a_small_network_is_let_in_and_else_the_host_that_asks(addresses, source):
    assert shlex.split(opening("ufw", "eth0", addresses))[-1] == source
    assert ipaddress.ip_network(source).num_addresses <= firewall.MAX_SPREAD


def test_ip_version_6_has_words_of_its_own():
    assert "ip6 saddr" in opening("nft", "eth0", ["fd00::1"])
    assert "ip6tables" in opening("iptables", "eth0", ["fd00::1"])


def test_this_hosts_kind_is_one_of_them():
    assert firewall.kind() in firewall.LINES
