"""A job goes on whatever its host's SSH server does; who follows it comes back, or stops where the key is another one.

The host is this machine behind a real sshd; the ranks are of a torch-free gang.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, HostKeyError, HostsError
from orchestrator.jobs import FilePiece, Notice, RunningJob
from orchestrator.jobs.follow import watch
from orchestrator.paths import Home
from orchestrator.store import Store
from orchestrator.transport import ConnectedHost, ssh
from tests.support.local_job import gang
from tests.support.sshd import Sshd, make_key, needs_sshd, running_sshd, wait_for

pytestmark = needs_sshd

COUNTS = """
import itertools, pathlib, time
for number in itertools.count():
    print(number, flush=True)
    if pathlib.Path("end").exists():
        break
    time.sleep(0.02)
"""


def host_behind(server: Sshd, made) -> ConnectedHost:
    transport = ssh.connect(server.target(node="a"), host_keys=server.host_keys(), timeout_s=5)
    node = made.plan.nodes[0]
    return ConnectedHost(transport, node.python, None, node.workdir)


def watched(server: Sshd, made, host: ConnectedHost):
    """What a follower gets, over as many connections as it takes."""

    def dial(name: str) -> ConnectedHost:
        host.transport.close()
        return host_behind(server, made)

    return watch(made.plan, {"a": host}, offsets={}, follow=True, reconnect=dial)


def rank_lives(made) -> bool:
    (rank,) = made.agents()["a"]["ranks"].values()
    return Path("/proc", str(rank["pid"])).is_dir()


@pytest.fixture
def behind_sshd(tmp_path):
    with running_sshd(tmp_path / "host") as server, gang(tmp_path, COUNTS, ranks=(1,)) as made:
        local, made.hosts = made.hosts, {"a": host_behind(server, made)}
        made.launch()  # through SSH, so that what runs is a child of the server that is to die
        made.hosts = local
        made.wait_running()
        yield server, made


def test_an_sshd_that_restarts_costs_the_job_nothing_and_its_follower_no_byte(behind_sshd):
    server, made = behind_sshd
    seen, broken = b"", []
    for _, item in watched(server, made, host_behind(server, made)):
        if isinstance(item, ConnectError):
            broken.append(item)
            assert rank_lives(made)
            server.start()
            (made.folder("a") / "src" / "end").touch()
        elif isinstance(item, FilePiece) and item.file == "rank-0/stdout.log":
            if not seen:
                server.stop()
            assert item.offset == len(seen)
            seen += item.data
    assert len(broken) >= 1
    numbers = [int(line) for line in seen.decode().split()]
    assert numbers == list(range(len(numbers)))
    assert seen == (made.folder("a") / "rank-0" / "stdout.log").read_bytes()
    assert made.wait().state == "succeeded"


def test_a_host_key_that_changes_in_mid_run_ends_the_following_and_not_the_job(behind_sshd):
    server, made = behind_sshd
    host = host_behind(server, made)
    known = ssh.HostKeys(server.folder / "recorded", [server.folder / "users_known_hosts"])
    server.host_keys = lambda: known  # what was known stays known
    items = []
    for _, item in watched(server, made, host):
        items.append(item)
        if isinstance(item, FilePiece) and not any(isinstance(one, ConnectError) for one in items):
            server.stop()
        if isinstance(item, ConnectError):
            make_key(server.folder / "host_ed25519")
            server.start()
    assert isinstance(items[-1], HostKeyError)
    assert server.fingerprint() in str(items[-1]) and "not the one we know" in str(items[-1])
    assert server.logins() == 2  # to launch and to follow; the stranger was shown nothing
    assert rank_lives(made)


def test_following_says_the_fingerprint_once_and_ends_in_that_error(behind_sshd, tmp_path):
    server, made = behind_sshd
    host, stranger = (
        host_behind(server, made),
        HostKeyError("a", "its host key SHA256:x is not the one we know", "compare"),
    )

    class Strangers:
        def reopen(self, name):
            raise stranger

    store = Store(Home(tmp_path / "home"))
    store.save_job(made.record(), made.plan)
    notices = []
    with pytest.raises(HostsError) as ended:
        for event in RunningJob(made.plan, store, Strangers(), {"a": host}).follow():
            if isinstance(event, Notice):
                notices.append(event.text)
            elif server.process:
                server.stop()
    assert ended.value.errors == (stranger,)
    assert [text for text in notices if "SHA256:x" in text] == [
        f"{stranger}; the job does not depend on this link and keeps running"
    ]
    assert store.job_record(made.plan.job).state in ("starting", "running") and rank_lives(made)


DIALS = """if True:
    import sys, threading
    from pathlib import Path
    from orchestrator.transport.ssh import HostKeys, Target, connect
    folder, port, user, key = sys.argv[1:]
    keys, outcomes = HostKeys(Path(folder, "recorded"), [Path(folder, "users_known_hosts")]), []
    def dial():
        try:
            connect(Target("v100", "127.0.0.1", int(port), user, key), host_keys=keys, timeout_s=60).close()
            outcomes.append("in")
        except Exception as error:
            outcomes.append(repr(error))
    threads = [threading.Thread(target=dial) for _ in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print("\\n".join(outcomes))
"""


def dial_from_three_controllers(server: Sshd, key: Path) -> list[str]:
    server.host_keys()
    words = [str(server.folder), str(server.port), server.target().user, str(key)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", DIALS, *words], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    return [line for process in running for line in process.communicate(timeout=120)[0].splitlines()]


def test_a_server_with_openssh_s_own_limit_takes_36_logins_of_three_controllers_at_once(tmp_path):
    """Its limit is 10 that have begun and not ended: beyond these it hangs up on 3 of 10, later on more."""
    with running_sshd(tmp_path / "host") as server:
        assert dial_from_three_controllers(server, server.key) == ["in"] * 36


def test_a_refused_login_is_tried_once_however_many_there_are(tmp_path):
    with running_sshd(tmp_path / "host", options=["MaxStartups 100"]) as server:
        outcomes = dial_from_three_controllers(server, make_key(tmp_path / "stranger"))
        assert len(outcomes) == 36 and all(outcome.startswith("AuthError") for outcome in outcomes)
        wait_for(lambda: server.log().count("Connection closed by authenticating") >= 36, "the server's log")
        assert server.log().count("Connection from") == 1 + 36  # the first looked whether it listens
