"""Hosts that cannot take part: one line that names host and remedy, the right exit code, nothing left behind."""

from __future__ import annotations

import json

import pytest
import yaml

from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.lab import lab
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

INVENTORY = """
cluster: refusals
defaults: {device: cpu}
nodes:
  - {name: alpha, host: 10.77.2.1}
  - {name: beta, host: 10.77.2.2}
"""
# A second ordinary user, whom the same key lets in; and a job of the first one's.
OTHER_LOGIN = """
set -e
grep -q ^other: /etc/passwd || {{
    echo 'other:x:1001:1001::/home/other:/bin/bash' >> /etc/passwd
    echo 'other:x:1001:' >> /etc/group
    echo 'other:*:19000:0:99999:7:::' >> /etc/shadow
}}
install -d -m 700 -o other -g other /home/other /home/other/.ssh
install -m 600 -o other -g other /home/lab/.ssh/authorized_keys /home/other/.ssh/
chmod {mode} /home/lab
install -d -m {mode} -o lab -g lab /home/lab/.orch /home/lab/.orch/jobs /home/lab/.orch/jobs/theirs
echo '{{"job": "theirs", "cluster": "refusals"}}' > /home/lab/.orch/jobs/theirs/node.json
touch /home/lab/.orch/.orch-work
chown -R lab:lab /home/lab/.orch
"""


@pytest.fixture(scope="module")
def pair():
    with lab(INVENTORY, quick=True) as standing:
        yield standing


@pytest.fixture
def person(pair, tmp_path):
    return Person(pair, tmp_path / "home", tmp_path)


def changed(person: Person, **keys: object):
    """The lab's inventory with only `alpha`, and these keys of it changed (None takes one out)."""
    content = yaml.safe_load(person.lab.inventory.read_text())
    node = {**content["nodes"][0], **keys}
    content["nodes"] = [{key: value for key, value in node.items() if value is not None}]
    path = person.folder / "changed.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def refused(person: Person, inventory: str, *words: str) -> str:
    """`orch up` says exactly one error with one remedy and exits 3; the host keeps nothing of ours."""
    done = person.types("up", inventory, *words, exit_code=3)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: alpha: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("  try: ") == 1
    left = person.lab.host_exec("alpha", ["find", "/home/lab", "-name", "*orch*"]).stdout
    assert left == ""
    return done.stderr


def test_an_unreachable_host(person):
    assert "10.77.2.9" in refused(person, changed(person, host="10.77.2.9", host_key=None))


def test_a_refused_key_names_user_and_key_and_the_line_to_try(person):
    key = person.folder / "other_key"
    person.lab.controller_exec(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    said = refused(person, changed(person, key_file=str(key)))
    assert "lab@10.77.2.1" in said
    assert str(key) in said
    assert "ssh -" in said


def test_an_unknown_host_key_shows_its_fingerprint_and_orch_trust_records_it(person):
    inventory = changed(person, host_key=None)
    said = refused(person, inventory)
    assert "SHA256:" in said
    assert "orch trust alpha" in said
    shown = person.types("trust", "alpha", "--yes").stderr
    assert shown.split("SHA256:")[1][:43] == said.split("SHA256:")[1][:43]
    person.types("up", inventory)


def test_a_changed_host_key_is_refused_and_no_option_passes_it_by(person):
    inventory = changed(person, host_key=None)
    person.types("up", inventory, "--accept-new-host-keys")
    known = person.home / "known_hosts"
    stranger = person.folder / "stranger"
    person.lab.controller_exec(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    name = known.read_text().split()[0]
    known.write_text(f"{name} {' '.join((stranger.with_suffix('.pub')).read_text().split()[:2])}\n")
    before = known.read_text()
    for words in ((), ("--accept-new-host-keys",)):
        said = refused(person, inventory, *words)
        assert said.count("SHA256:") == 2
        assert "changed" in said
        assert known.read_text() == before


def test_a_missing_python(person):
    said = refused(person, changed(person, python="/opt/none/bin/python"))
    assert "/opt/none/bin/python" in said
    assert "`python:`" in said


def test_a_python_without_torch(person):
    said = refused(person, changed(person, python="/usr/bin/python3"))
    assert "no torch" in said
    assert "`python:`" in said


def test_an_unwritable_work_folder(person):
    said = refused(person, changed(person, workdir="/usr/orch"))
    assert "/usr/orch" in said
    assert "`workdir:`" in said


def test_a_typo_in_the_inventory_names_file_line_and_the_right_key(person):
    path = person.folder / "typo.yaml"
    path.write_text("cluster: c\nnodes:\n  - name: a\n    host: 10.0.0.1\n    bandwith: 2.5Gbps\n    port: 70000\n")
    done = person.types("up", str(path), exit_code=2)
    assert f"{path}:5:" in done.stderr
    assert "bandwidth" in done.stderr
    assert f"{path}:6:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dead_host_is_remembered_and_runs_refuse_until_it_is_left_out(person):
    content = yaml.safe_load(person.lab.inventory.read_text())
    content["nodes"][1]["host"] = "10.77.2.9"
    path = person.folder / "dead.yaml"
    path.write_text(yaml.safe_dump(content))
    person.types("up", str(path), exit_code=3)
    assert [node["status"] for node in person.asks("status")["cluster"]["nodes"]] == ["master", "no answer"]
    said = person.types("run", "--exp", "mnist_lenet", "--dry-run", exit_code=3).stderr
    assert "beta" in said
    assert "orch node release beta" in said
    person.types("run", "--exp", "mnist_lenet", "--dry-run", "--nodes", "alpha")
    person.types("node", "release", "beta")
    person.types("run", "--exp", "mnist_lenet", "--dry-run")


def test_a_host_that_went_off_since_then_is_named_with_how_to_do_without_it(person):
    person.types("up", str(person.lab.inventory))
    (person.folder / "none.py").write_text("print('nothing')\n")
    person.lab.power("beta", "off")
    said = person.types("run", "--", "none.py", exit_code=3).stderr
    assert "beta: 10.77.2.2:22: no SSH login" in said
    assert "or leave it out: `--nodes`, `orch node release beta`, `--hosts MIN:MAX`" in said
    person.types("run", "--nodes", "alpha", "--", "none.py")
    found = person.asks("run", "--hosts", "1:2", "--", "none.py")
    (left,) = found["hosts"]["left_out"]
    assert (found["nodes"], left["node"]) == (["alpha"], "beta") and "10.77.2.2:22: no SSH login" in left["reason"]
    person.lab.power("beta", "on")
    person.types("down", "--yes")


def test_down_removes_what_we_put_there(person):
    person.types("up", str(person.lab.inventory))
    (person.folder / "none.py").write_text("print('nothing')\n")
    person.types("run", "--folder", str(person.folder), "--", "none.py")
    assert person.lab.host_exec("beta", ["find", "/home/lab/.orch", "-name", "jobs"]).stdout
    assert "jobs not collected: 1 (none-" in person.types("down", "--yes").stderr
    assert Store(Home(person.home)).uncollected(person.lab.cluster) == []
    for node in ("alpha", "beta"):
        assert person.lab.host_exec(node, ["find", "/home/lab", "-name", "*orch*"]).stdout == ""


# What another login finds in the work folder of the first: nothing that it may look at, or nothing that it may change.
@pytest.mark.parametrize("mode", ["0700", "0755"])
def test_a_work_folder_of_another_login_is_left_alone_and_that_is_said(person, mode):
    lab_ = person.lab
    made = lab_.host_exec("alpha", ["sh", "-s"], input=OTHER_LOGIN.format(mode=mode))
    assert made.returncode == 0, made.stderr
    listing = ["find", "/home/lab/.orch", "-printf", "%p %s %i %m %C@\\n"]
    before = lab_.host_exec("alpha", listing).stdout
    try:
        theirs = changed(person, user="other", workdir="/home/lab/.orch")
        said = [person.types("up", theirs, exit_code=3), person.types("down", "--yes", exit_code=3)]
        # Nobody is there to say yes, or there is nothing to ask about.
        asked = person.types("down", exit_code={"0700": 3, "0755": 2}[mode])
        if mode == "0700":
            assert "not asked what its jobs wrote: alpha:" in asked.stderr
        said += [asked, person.types("reap", "--yes", exit_code={"0700": 3, "0755": 0}[mode])]
        assert [done.stdout + done.stderr for done in said if "Traceback" in done.stdout + done.stderr] == []
        words = {
            "0700": "or set `workdir:` in the inventory",
            "0755": "belongs to lab\n  try: set `workdir:` to a folder of",
        }
        assert words[mode] in said[1].stderr
        assert lab_.host_exec("alpha", listing).stdout == before
    finally:
        lab_.host_exec("alpha", ["sh", "-c", "rm -r /home/lab/.orch /home/other; chmod 700 /home/lab"])


def test_an_address_that_gloo_would_take_and_every_host_has_is_reported_and_refused(person):
    (person.folder / "none.py").write_text("print('nothing')\n")
    own = {"alpha": "10.77.2.1/24", "beta": "10.77.2.2/24"}
    try:
        for node, address in own.items():
            script = (
                f"ip addr del {address} dev eth0; ip addr add 192.168.77.1/24 dev eth0; ip addr add {address} dev eth0"
            )
            assert person.lab.host_exec(node, ["sh", "-c", script]).returncode == 0
        said = person.types("up", str(person.lab.inventory)).stderr
        words = "eth0 has several addresses, and Gloo takes the first, 192.168.77.1, which other hosts have, too"
        assert f"2 hosts (alpha, beta): {words}" in said or f"alpha: {words}" in said
        refused = person.types("run", "--", "none.py", exit_code=2).stderr
        assert words in refused and "the first address of eth0 there" in refused
    finally:
        for node in own:
            person.lab.host_exec(node, ["ip", "addr", "del", "192.168.77.1/24", "dev", "eth0"])
    person.types("up", str(person.lab.inventory))
    person.types("run", "--", "none.py")
    person.types("down", "--yes")


SHARED = """
cluster: shared
defaults: {device: cpu, workdir: /srv/orch}
nodes: [{name: s1, host: 10.77.12.1}, {name: s2, host: 10.77.12.2}, {name: s3, host: 10.77.12.3}]
"""


def test_hosts_with_one_work_folder_are_named_before_a_job_is(tmp_path):
    """Two mount one folder; the third has another one, of the same path."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir(mode=0o777)
    with lab(SHARED, quick=True, binds=[f"{tmp_path}:/srv/disks"]) as hosts:
        for node, disk in (("s1", "one"), ("s2", "one"), ("s3", "other")):
            mount = (
                f"mkdir -p /srv/orch && mount --bind /srv/disks/{disk} /srv/orch && mount -o remount,bind,rw /srv/orch"
            )
            own = "chown lab: /srv/orch && chmod 700 /srv/orch"
            assert hosts.host_exec(node, ["sh", "-c", f"{mount} && {own}"]).returncode == 0
        someone = Person(hosts, tmp_path / "home", tmp_path)
        (someone.folder / "none.py").write_text("print('nothing')\n")
        said = someone.types("up", str(hosts.inventory)).stderr
        words = "they have one work folder, /srv/orch"
        assert f"s1, s2: {words}" in said and 'defaults: {workdir: "~/.orch-{name}"}' in said, said
        found = json.loads(someone.types("doctor", "--json", exit_code=1).stdout)["findings"]
        assert [tuple(one["where"]) for one in found if words in one["seen"]] == [("s1", "s2")]
        refused = someone.types("run", "--nodes", "s1,s2", "none.py", exit_code=3).stderr
        assert "its work folder is also that of s" in refused
        someone.types("run", "--nodes", "s2,s3", "none.py")
        left = hosts.host_exec("s1", ["sh", "-c", "ls -a /srv/orch | grep probe"]).stdout
        assert left == ""
        someone.types("down", "--yes")
