"""Every rule of security has a test that fails without it: the table RULES says which, here and in the other files.

Threat model: hosts are trusted to run our user's code, not to write on the controller; the network between them is not
trusted for SSH, and must be trusted for the training traffic (torch and NCCL know neither login nor encryption).
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import HostError, OrchError, ProbeError, UsageError
from orchestrator.hosts import Cleared, Cluster, Who, work_folders
from orchestrator.hosts.facts import Interface
from orchestrator.jobs import RunningJob, read_frames
from orchestrator.jobs import launch as control
from orchestrator.jobs.collect import collect
from orchestrator.jobs.launch import launch
from orchestrator.paths import Home, RunFolder
from orchestrator.record import Owner
from orchestrator.remote.processes import MARK
from orchestrator.store import Store
from orchestrator.transport import CommandResult, ConnectedHost, LocalTransport, for_each
from tests.support import fuzz
from tests.support.local_job import gang
from tests.support.plans import pair, plan

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play a second user")

RULES = {
    "host keys: known or refused, a changed one whatever the options": """
        transport/test_ssh: test_an_unknown_host_is_refused_before_any_login
        transport/test_ssh: test_a_changed_key_is_refused_whatever_is_asked_for
        transport/test_ssh: test_a_host_whose_key_changed_while_we_were_connected_is_refused_when_it_returns
        transport/test_ssh_faults: test_a_host_key_that_changes_in_mid_run_ends_the_following_and_not_the_job
        lab/test_refusals: test_a_changed_host_key_is_refused_and_no_option_passes_it_by
        transport/test_hostkeys: test_a_revoked_key_is_refused_even_where_it_is_known_or_pinned""",
    "SSH algorithms: a floor, and the server's offer in the refusal": """
        transport/test_ssh: test_nothing_weak_is_offered
        transport/test_ssh: test_a_server_with_only_weak_algorithms_is_refused""",
    "private keys: refused where others may read them, never written; the agent is not forwarded": """
        transport/test_ssh: test_a_key_that_others_may_read_is_refused
        transport/test_ssh: test_the_agent_is_never_forwarded""",
    "from host to controller: an answer is data of a known form and size": """
        hosts/test_facts: test_whatever_a_host_answers_it_is_facts_or_a_probe_error
        transport/test_ask: test_an_answer_that_is_none_is_refused_and_names_the_host
        transport/test_ssh: test_output_has_a_limit
        test_security: test_whatever_a_host_answers_to_a_request_it_is_an_error_of_ours
        test_security: test_fuzzing_finds_nothing""",
    "pulling logs: names are ours, links and special files stay where they are": """
        jobs/test_frames: test_a_name_that_is_not_this_jobs_ends_the_stream
        jobs/test_frames: test_an_endless_line_is_refused_before_it_fills_the_memory
        jobs/test_collect: test_a_link_in_place_of_a_log_is_not_followed
        test_security: test_of_ten_thousand_hostile_names_none_is_let_through
        test_security: test_what_is_no_plain_file_of_the_job_is_never_read""",
    "archives: none from hosts, and none with links to hosts": """
        test_security: test_no_module_unpickles_evaluates_or_unpacks""",
    "shell: an argument arrives as it was given": """
        transport/test_shell: test_a_real_shell_hands_on_exactly_the_arguments_given
        planning/test_secrets: test_ten_thousand_random_command_lines_pass_each_shell_unchanged
        planning/test_secrets: test_random_command_lines_pass_a_real_sshd_unchanged
        planning/test_secrets: test_ten_thousand_arguments_reach_a_users_script_unchanged""",
    "secrets: neither in arguments, nor state, nor output, nor errors; in files for the owner alone": """
        planning/test_secrets: test_a_secret_of_the_inventory_is_nowhere_but_in_files_for_its_owner_alone
        planning/test_secrets: test_an_argument_that_looks_like_a_secret_is_refused_and_not_repeated
        planning/test_secrets: test_only_values_of_known_settings_are_shown
        planning/test_build: test_secrets_of_the_inventory_are_not_in_what_is_printed_or_kept""",
    "terminal: nothing that a host prints or names steers it": """
        jobs/test_lines: test_nothing_that_a_terminal_obeys_is_left
        transport/test_ask: test_a_refusal_is_the_hosts_own_words_made_printable
        test_security: test_fuzzing_finds_nothing""",
    "pickle, eval, yaml.load: nowhere": """
        test_layers: test_nothing_unpickles_or_evaluates
        test_security: test_no_module_unpickles_evaluates_or_unpacks""",
    "YAML: plain values alone, within limits": """
        hosts/test_yamlfile: test_a_mistake_gives_one_clear_line
        hosts/test_yamlfile: test_an_alias_bomb_costs_nothing""",
    "configuration: never from the folder one stands in": """
        test_security: test_nothing_of_the_folder_one_stands_in_is_opened
        test_security: test_a_matplotlibrc_at_hand_has_no_say
        hosts/test_inventory: test_a_file_that_every_user_can_change_is_a_warning""",
    "ports: none on the controller, the hub's on the training address alone": """
        test_security: test_the_controller_listens_nowhere_and_the_hub_on_the_training_address_alone
        remote/test_hub: test_a_stranger_without_the_token_hears_no_order_and_is_no_member""",
    "listeners of `orch doctor`: a token, the training address alone, gone with the connection or in time": """
        remote/test_mesh: test_a_stranger_without_the_token_is_hung_up_on_and_sends_nothing_that_counts
        remote/test_mesh: test_it_listens_on_its_training_address_alone
        remote/test_mesh: test_it_listens_no_longer_than_its_limit_whatever_its_controller_does
        remote/test_mesh: test_it_listens_no_more_when_its_connection_ends
        hosts/test_examine: test_whatever_a_host_answers_it_is_health_or_a_probe_error""",
    "training ports: a public address is warned of": """
        test_security: test_a_public_training_address_is_warned_of""",
    "state and run folders: for the owner alone, and never somebody else's": """
        test_store: test_home_is_for_its_owner_alone_even_where_it_was_not
        planning/test_secrets: test_a_secret_of_the_inventory_is_nowhere_but_in_files_for_its_owner_alone
        test_security: test_a_planted_state_folder_or_link_is_refused
        test_security: test_a_planted_run_folder_is_refused
        test_security: test_a_planted_folder_on_a_host_is_refused""",
    "signals: only to processes of the job": """
        test_security: test_a_stranger_with_the_same_command_line_is_spared
        remote/test_processes: test_a_reused_pid_is_another_process_and_is_not_signalled""",
    "privilege: a login as root only where somebody wrote it": """
        transport/test_ssh: test_a_login_as_root_is_never_a_default""",
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_names_tests_that_exist(rule):
    for line in RULES[rule].split("\n"):
        if line.strip():
            file, name = line.strip().split(": ")
            assert f"def {name}(" in (ROOT / f"tests/{file}.py").read_text(), line


# ---- what hosts answer ----------------------------------------------------------------------------------------


class Answering:
    """A host that answers every request with this JSON."""

    def __init__(self, answer):
        self.node, self._answer = "a", answer

    def run(self, command, *, stdin=b"", timeout_s):
        marker = re.search(rb'"marker": "([0-9a-f]{32})"', stdin)[1]
        return CommandResult(0, marker + json.dumps(self._answer).encode() + marker, b"")

    def close(self):
        pass


class Reaching:
    """Connections that reach one host, this one."""

    def __init__(self, host):
        self.host = host

    def open(self, nodes):
        return {node.name: self.host for node in nodes}

    def each(self, nodes, action, *, deadline_s):
        return for_each({node.name: self.host for node in nodes}, action, deadline_s=deadline_s)


ODD = [
    {}, {"found": 5}, {"found": [7]}, {"found": [{"job": "x", "processes": 3}]}, {"found": {"job": "x"}},
    {"removed": 5}, {"removed": None}, {"jobs": []}, {"jobs": {"fuzz": 5}}, {"jobs": {"fuzz": "ab"}}, {"pid": 1},
    {"hub_port": None}, {"hub_port": "\x1b[2J"}, {"hub_port": [1]}, {"hub_port": float("inf")}, {"error": {"a": 1}},
    {"error": "\x1b]0;x\x07" * 500, "remedy": ["x"]}, {"need_code": "yes"},
    {"jobs": {"fuzz": {"state": [], "alive": 1}}},
    {"jobs": {"fuzz": {"state": "failed", "first_failure": {"node": "\x1b[2J", "reason": "x" * 9999}}}},
]  # fmt: skip


@pytest.mark.parametrize("answer", ODD, ids=lambda answer: json.dumps(answer)[:40])
def test_whatever_a_host_answers_to_a_request_it_is_an_error_of_ours(answer, tmp_path):
    host = ConnectedHost(Answering(answer), "python3", None, "~/.orch")
    one = fuzz.PLAN.model_copy(update={"nodes": fuzz.PLAN.nodes[:1]})
    cluster = Cluster(name="c", file="f", nodes=[{"name": "a", "host": "h"}])
    store = Store(Home(tmp_path / "home"))
    store.save_cluster(cluster)
    store.save_job(fuzz.RECORD.model_copy(update={"nodes": ("a",)}), one)
    controller = Controller(store, Reaching(host))
    said = []
    with pytest.raises(OrchError) as refused:
        launch(one, {"a": host}, b"")
    said += [str(error) for error in getattr(refused.value, "errors", [refused.value])]
    found = [*controller.clusters.reap(cluster, end=True).values(), *controller.clusters.down(cluster).values()]
    found += [*control.agents(one, {"a": host}).values()]
    record = controller.jobs.find("fuzz").refresh()
    said += [str(error) for error in found if isinstance(error, HostError)]
    assert all(text.isprintable() and len(text) < 800 for text in said)
    accepted = [answer for answer in found if not isinstance(answer, (HostError, dict))]
    shown = [replace(answer, jobs={}) if isinstance(answer, Cleared) else answer for answer in accepted]
    words = [word for one in shown for word in fuzz.strings(asdict(one))]
    if record.first_failure:
        words += [record.first_failure.node, record.first_failure.reason]
    assert all(word.isprintable() and len(word) <= 500 for word in words)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_fuzzing_finds_nothing(target):
    """A moment of it; `python tests/support/fuzz.py all --minutes 10` goes on for longer."""
    count = fuzz.fuzz(target, seed=0, seconds=2.0)
    assert count.crashes == {} and count.cases > 0  # how many fit into the time is the machine's load


# ---- files of a host ------------------------------------------------------------------------------------------


def test_of_ten_thousand_hostile_names_none_is_let_through():
    rng, known = random.Random(7), {"rank-0/stdout.log", "rank-0/stderr.log", "rank-0/metrics.jsonl"}
    parts = ["..", ".", "/", "//", "\\", "rank-0", "rank-1", "rank-00", "stdout.log", "stderr.log", "metrics.jsonl"]
    parts += ["etc", "passwd", "C:", "\0", "\n", " ", "\u202e", "a" * 300, "STDOUT.LOG", ".ssh", "%2e", "~"]
    known |= {"torchrun.log", "supervisor.log", "prepare.log", "gpu.jsonl"}
    refused = 0
    for _ in range(10_000):
        name = (
            "/".join(rng.choice(parts) for _ in range(rng.randrange(1, 5))) if rng.random() < 0.8 else rng.choice(parts)
        )
        stream = json.dumps({"file": name, "offset": 0, "size": 1, "inode": 1}).encode() + b"\nx"
        try:
            assert {frame.file for frame in read_frames("a", [stream], frozenset({0}))} <= known
        except ProbeError as error:
            assert str(error).isprintable()
            refused += 1
    assert refused > 9_000


def test_what_is_no_plain_file_of_the_job_is_never_read(tmp_path):
    secret = tmp_path / "elsewhere" / "stdout.log"
    secret.parent.mkdir()
    secret.write_text("canary")
    with gang(tmp_path, "", ranks=(3,)) as made:
        folder = made.folder("a")
        for rank in range(2):
            (folder / f"rank-{rank}").mkdir(parents=True)
        (folder / "rank-0/stdout.log").symlink_to(secret)
        (folder / "rank-1/stdout.log").symlink_to("/dev/zero")
        (folder / "rank-2").symlink_to(secret.parent)
        os.mkfifo(folder / "rank-0/stderr.log")
        (folder / "rank-1/stderr.log").mkdir()
        (folder / "torchrun.log").write_text("plain\n")
        began, run = time.monotonic(), RunFolder(tmp_path / "run")
        run.root.mkdir()
        collected = collect(made.plan, made.hosts, run)
        assert time.monotonic() - began < 20
    files = [path for path in run.root.rglob("*") if path.is_file() or path.is_symlink()]
    assert collected.new_bytes == len("plain\n")
    assert not [path for path in files if b"canary" in path.read_bytes()]
    assert not [path for path in run.root.rglob("*") if path.is_symlink()]


# ---- code, configuration, ports -------------------------------------------------------------------------------


def test_no_module_unpickles_evaluates_or_unpacks():
    """torch.load only for weights, tar archives only ours and only on the way to a host."""
    forbidden = {
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
        "pickle.load",
        "pickle.loads",
    }
    for path in [*ROOT.glob("orchestrator/**/*.py"), *ROOT.glob("trainer/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert name not in forbidden and not name.endswith("extractall"), (path, name)
            assert words.get("shell") != "True" and words.get("allow_pickle") != "True", (path, name)
            if name == "torch.load":
                assert words.get("weights_only") == "True", path
            if name == "tarfile.open" and "mode" not in words and len(node.args) < 2:
                assert path.name == "prepare.py", path


PLANTED = """
    orch.yaml config.yaml fabric.yaml fabfile.py invoke.yaml tasks.py .env known_hosts ssh_config config yaml.py
    paramiko.py rich.py sitecustomize.py matplotlibrc duckdbrc
"""
WATCHED = """
import os, sys
sys.path = [entry for entry in sys.path if entry]  # as the `orch` program has it
here = os.getcwd()
opened = set()
def look(event, words):
    if event == "open" and isinstance(words[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(words[0]))
        # An editable installation asks every folder of sys.path for a name that no file has.
        if os.path.dirname(path) == here and os.path.exists(path):
            opened.add(os.path.basename(path))
sys.addaudithook(look)
from orchestrator.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, sorted(opened))
"""


def test_nothing_of_the_folder_one_stands_in_is_opened(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name in PLANTED.split():
        (here / name).write_text("raise SystemExit(99)  # {{{ \0")
    (here / "mine.yaml").write_text("cluster: c\nnodes: [{name: a, host: 127.0.0.1, port: 1, user: me}]")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", WATCHED, "up", "mine.yaml", "--json"]
    done = subprocess.run(argv, cwd=here, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "3 ['mine.yaml']", done.stdout + done.stderr


def test_a_matplotlibrc_at_hand_has_no_say(tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 77\ntext.usetex: True\n")
    code = "import matplotlib; from orchestrator.views.charts import _plain_settings as plain\n"
    code += "with plain(): print(matplotlib.rcParams['font.size'], matplotlib.rcParams['text.usetex'])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "10.0 False\n", done.stderr


def listening(port: int | None = None) -> dict[str, str]:
    """Inode -> local address of the TCP sockets of this machine that listen (on `port`)."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == "0A" and port in (None, int(number, 16)):
                found[fields[9]] = address
    return found


def our_sockets() -> set[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}


def test_the_controller_listens_nowhere_and_the_hub_on_the_training_address_alone(tmp_path):
    before = our_sockets() & listening().keys()
    with gang(tmp_path, "import time; time.sleep(60)") as made:
        made.launch()
        agents = made.wait_running()  # while it follows, too
        assert our_sockets() & listening().keys() == before
        assert set(listening(agents["a"]["hub_port"]).values()) == {"0100007F"}  # 127.0.0.1, the address of node a


def test_a_public_training_address_is_warned_of():
    nodes, found = pair()
    assert not [note for note in plan(nodes, found).notes if "public" in note]
    nodes = [
        node.model_copy(update={"address": address})
        for node, address in zip(nodes, ("8.8.8.8", "10.0.0.2"), strict=True)
    ]
    (note,) = [note for note in plan(nodes, found).notes if "public" in note]
    assert "n41 (8.8.8.8)" in note and "n42" not in note and "neither encrypted nor authenticated" in note


def test_a_public_address_beside_a_private_training_address_is_warned_of():
    nodes, found = pair()
    second = Interface(name="wan0", addresses=("9.9.9.9/24", "fe80::1/64"), mtu=1500, up=True)
    found["n42"] = found["n42"].model_copy(update={"interfaces": (*found["n42"].interfaces, second)})
    (note,) = [note for note in plan(nodes, found).notes if "public" in note]
    assert "n42 (9.9.9.9)" in note and "n41" not in note and "firewall" in note


# ---- folders --------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("kind", ["folder", "link to a folder of ours"])
def test_a_planted_state_folder_or_link_is_refused(kind, tmp_path):
    ours, planted = tmp_path / "ours", tmp_path / "planted"
    ours.mkdir()
    planted.mkdir() if kind == "folder" else planted.symlink_to(ours)
    os.chown(planted, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UsageError, match=rf"{planted} (is a link that )?belongs to another user"):
        Store(Home(planted)).save_cluster(Cluster(name="c", file="f", nodes=()))
    assert list(ours.iterdir()) == []


@as_root
def test_a_planted_run_folder_is_refused(tmp_path):
    store = Store(Home(tmp_path / "home"))
    (tmp_path / "out").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "out" / "fuzz").symlink_to(tmp_path / "target")
    os.chown(tmp_path / "out" / "fuzz", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"out/fuzz is a link that belongs to another user"):
        Controller(store, Reaching(None)).collect(RunningJob(fuzz.PLAN, store, Reaching(None)), tmp_path / "out")
    assert list((tmp_path / "target").iterdir()) == []


@as_root
@pytest.mark.parametrize("name", ["", "jobs", "code", "locks"])
def test_a_planted_folder_on_a_host_is_refused(name, tmp_path):
    with gang(tmp_path, "", ranks=(1,)) as made:
        place = Path(made.plan.nodes[0].workdir, name)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if name:
            (place.parent / ".orch-work").touch(0o600)
        (tmp_path / "target").mkdir()
        place.symlink_to(tmp_path / "target")
        os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(OrchError) as refused:
            made.launch()
        assert f"{str(place).rstrip('/')} belongs to nobody" in str(refused.value.errors[0])
        assert list((tmp_path / "target").iterdir()) == []
        place.unlink()


# ---- signals --------------------------------------------------------------------------------------------------


def test_a_stranger_with_the_same_command_line_is_spared(tmp_path):
    folder = tmp_path / "work" / "jobs" / "gone-1"
    folder.mkdir(parents=True)
    ada = Who(Owner(id="a" * 32, name="ada@desk"), "rack")
    (folder / "node.json").write_text(json.dumps({"job": "gone-1", **ada.request}))
    argv = [sys.executable, "-c", "import time; time.sleep(60)", str(folder)]
    left = subprocess.Popen(argv, env={**os.environ, MARK: str(folder)}, start_new_session=True)
    strangers = [
        subprocess.Popen(argv, start_new_session=True),
        subprocess.Popen(argv, env={**os.environ, MARK: f"{folder}-2"}, start_new_session=True),
    ]
    try:
        host = ConnectedHost(LocalTransport("here"), sys.executable, None, str(tmp_path / "work"))
        assert [found.there.job for found in work_folders.reap(host, ada, end=True).found] == ["gone-1"]
        assert left.wait(10) == -9
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for process in (left, *strangers):
            process.kill()
            process.wait()
