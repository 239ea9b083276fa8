"""Many hosts on one: a lab whose only host answers at hundreds of addresses, and lets others fall silent.

    with crowd() as all_of_them:
        inventory = all_of_them.inventory(folder, silent=64, healthy=16)     # the silent ones come first

Every address is a host of its own to `orch`: an address, a login, a host key, a probe. A silent one takes a TCP SYN and
says nothing, as behind a dead switch. One sshd serves all, so its MaxStartups is raised here: the limit is one of each
server, and no server of a real cluster meets more than its own logins. One machine cannot start hundreds of programs at
once either, as many machines can: the hosts' Python has a `torch` that only names itself, and `quick` hosts answer a
probe with a copy of the answer that the real program gave there before.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.remote import probe
from tests.support.lab import Lab, lab

HEALTHY, SILENT = "10.78.1.{}", "10.78.2.{}"
INVENTORY = """
cluster: crowd
defaults: {device: cpu, bandwidth: 1Gbps}
nodes: [{name: all, host: 10.78.0.1, address: 10.78.0.1/16}]
"""
PYTHON, QUICK = "/home/lab/bin/python", "/home/lab/bin/quick"
HEARD, ANSWER = "/home/lab/heard", "/home/lab/answer"
RECORD = """
answer = gather(json.load(sys.stdin))
answer["clock"] = {"began": "WALL", "ended": "WALL"}
print(json.dumps(answer).replace('"WALL"', "WALL"))
"""
TORCH = """
__version__ = "2.9.0"
class version: cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
    get_arch_list = staticmethod(lambda: [])
"""
DISTRIBUTED = (
    "def is_available(): return True\ndef is_gloo_available(): return True\ndef is_nccl_available(): return False"
)
SETUP = f"""
set -e
cd /home/lab
mkdir -p bin stub/torch stub/torchvision
cat > stub/torch/__init__.py <<'END'{TORCH}END
echo '{DISTRIBUTED}' > stub/torch/distributed.py
echo '__version__ = "0.24.0"' > stub/torchvision/__init__.py
cat > {PYTHON} <<'END'
#!/bin/sh
export PYTHONPATH=/home/lab/stub
{sys._base_executable} "$@"
date +%s.%N >> {HEARD}
END
cat > {QUICK} <<'END'
#!/bin/bash
case "$*" in
*orch-probe*) ;;
*) exec {PYTHON} "$@" ;;
esac
marker=$(grep -aoE '"marker": "[0-9a-f]{{32}}"' | tail -n 1)
marker=${{marker:11:32}}
now=$EPOCHREALTIME
answer=$(<{ANSWER})
answer=${{answer//WALL/$now}}
echo "$marker$answer$marker"
echo $EPOCHREALTIME >> {HEARD}
END
chmod 755 {PYTHON} {QUICK}
touch {HEARD}
chown -R lab:lab bin stub {HEARD}
echo 'MaxStartups 1000:30:2000' >> /etc/ssh/sshd_config
kill -HUP $(pgrep -o sshd)
for all in {HEALTHY.format("0")}/24 {SILENT.format("0")}/24; do ip route add local $all dev lo; done
nft add table ip crowd
nft 'add chain ip crowd silent {{ type filter hook prerouting priority 0; }}'
nft 'add rule ip crowd silent ip daddr {SILENT.format("0")}/24 drop'
"""


@dataclass(frozen=True)
class Crowd:
    lab: Lab

    def inventory(self, folder: Path, *, silent: int, healthy: int, quick: bool = False) -> Path:
        """An inventory of so many silent hosts, s1 and on, and then so many healthy ones, h1 and on."""
        content = yaml.safe_load(self.lab.inventory.read_text())
        (only,) = content["nodes"]
        named = [(f"s{n}", SILENT.format(n)) for n in range(1, silent + 1)]
        named += [(f"h{n}", HEALTHY.format(n)) for n in range(1, healthy + 1)]
        python = QUICK if quick else PYTHON
        content["nodes"] = [
            {"name": name, "host": host, "host_key": only["host_key"], "python": python} for name, host in named
        ]
        path = folder / f"{silent}-{healthy}.yaml"
        path.write_text(yaml.safe_dump(content))
        if quick:
            self._record([host for _, host in named])
        return path

    def heard_at(self) -> list[float]:
        """When each program that `orch` ran on these hosts had ended, by this machine's clock; then forgets them."""
        words = self.lab.host_exec("all", ["cat", HEARD]).stdout.split()
        self.lab.host_exec("all", ["truncate", "-s", "0", HEARD], check=True)
        return sorted(float(word) for word in words)

    def _record(self, peers: list[str]) -> None:
        """What the probe answers there now, for `quick` hosts to give."""
        request = {"workdir": "~/.orch", "peers": peers, "torch": True, "limit_s": 60}
        program = Path(probe.__file__).read_text() + RECORD
        line = f'cd && {PYTHON} -c "$0" > {ANSWER}'
        self.lab.host_exec("all", ["sh", "-c", line, program], as_user=True, input=json.dumps(request), check=True)


@contextlib.contextmanager
def crowd(binds: Sequence[str] = ()) -> Iterator[Crowd]:
    """binds: folders that the hosts see, too."""
    with lab(INVENTORY, binds=[*binds]) as one:
        one.host_exec("all", ["sh", "-c", SETUP], check=True)
        yield Crowd(one)
