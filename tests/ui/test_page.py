"""`orch ui` in a real browser, with hosts behind real SSH servers: who may see it, and what one can do there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from orchestrator.errors import ConnectError, UsageError
from orchestrator.paths import Home, RunFolder
from orchestrator.planning import JobSpec
from orchestrator.ui import Watched, application, kept_token, pages
from orchestrator.ui.app import LocalSite, Stale
from tests.support.command_lines import command_lines_of_all_processes
from tests.support.free_port import free_port
from tests.support.served_page import TRAINS, address_of
from tests.support.ssh_rack import Rack, ssh_rack
from tests.support.sshd import wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    folder = tmp_path_factory.mktemp("ui")
    (folder / "mine").mkdir()
    (folder / "mine" / "trains.py").write_text(TRAINS)
    with ssh_rack(folder) as made:
        yield made


@contextlib.contextmanager
def served(rack: Rack, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, and the process."""
    words = [sys.executable, "-m", "orchestrator.cli", "ui", "--out", str(rack.folder / "runs"), *options]
    environment = {**rack.environment, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    with address_of(process) as url:
        yield url, process


@pytest.fixture(scope="module")
def address(rack: Rack) -> Iterator[str]:
    with served(rack) as (url, _):
        yield url


def get(url: str, **headers: str) -> tuple[int, Any, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


# ---- who may see it -------------------------------------------------------------------------------------------


def paths() -> list[str]:
    app = application(Home(Path("/nowhere")), Path("runs"), Watched(Home(Path("/nowhere"))))
    return [str(route.path).replace("{job}", "latest").replace("{act}", "release") for route in app.routes]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", paths())
def test_nobody_sees_anything_without_the_token(address: str, path: str) -> None:
    origin, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/(\S{43})/", address).groups()  # type: ignore[union-attr]
    for begin in ("", "/" + token[:-1], "/" + token + "A", "/%2e%2e/" + token, "/x/../" + token):
        status, headers, text = get(origin + begin + path)
        assert (status, text) == (403, "forbidden\n"), begin
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_another_name_of_this_machine_is_refused_so_that_no_page_elsewhere_comes_here_by_one(address: str) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"):
        assert get(address, Host=host)[0] == 403
    port = address.split(":")[2].partition("/")[0]
    assert get(address, Host=f"localhost:{port}")[0] == 200


def test_the_token_stands_in_no_command_line_and_the_page_on_no_other_interface(rack: Rack) -> None:
    with served(rack) as (url, process):
        token = url.split("/")[3].encode()
        lines = command_lines_of_all_processes()
        assert b"orchestrator.cli\0ui" in lines and token not in lines
        port = f":{int(url.split(':')[2].partition('/')[0]):04X}"
        tables = [Path(f"/proc/{process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        listening = [line.split()[1] for table in tables for line in table.splitlines()[1:] if line.split()[3] == "0A"]
        assert [place for place in listening if place.endswith(port)] == [f"0100007F{port}"]


# What another user of this machine can try: every file and process that it may read, then the door without a key.
STRANGER = """
import os, sys, urllib.error, urllib.request
port, home, pid = sys.argv[1:]
seen = []
for top in (home, f"/proc/{pid}"):
    for folder, _, files in os.walk(top, followlinks=False):
        for name in files:
            try:
                with open(os.path.join(folder, name), "rb", buffering=0) as file:
                    seen.append(file.read(1 << 20) or b"")
            except OSError:
                pass
sys.stdout.buffer.write(b"\\n".join(seen) + b"\\nSEEN\\n")
for path in ("/", "/metrics", "/status"):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30)
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_machine_finds_no_key_and_no_way_in_without_one(rack: Rack) -> None:
    with served(rack, "--port", str(free_port())) as (url, process):
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/(\S{43})/", url).groups()  # type: ignore[union-attr]
        words = [shutil.which("python3", path="/usr/bin"), "-c", STRANGER, port, str(rack.folder), str(process.pid)]
        nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/"}
        looked = subprocess.run(words, **nobody, env={}, capture_output=True, timeout=120, check=True)
        found, _, codes = looked.stdout.partition(b"SEEN\n")
        assert codes.split() == [b"403"] * 3
        assert b"orchestrator.cli" in found, "it could not even read the command line"
        assert token.encode() not in found
        key = rack.folder / "home" / "metrics-token"
        assert key.read_bytes() not in found and key.stat().st_mode & 0o777 == 0o600


def test_a_prometheus_has_an_address_that_stays_and_opens_nothing_else(rack: Rack) -> None:
    port = str(free_port())
    kept = f"http://127.0.0.1:{port}/{kept_token(Home(rack.folder / 'home'))}/"
    addresses = []
    for _ in range(2):
        with served(rack, "--port", port) as (url, _):
            addresses.append(url)
            assert get(f"{kept}metrics")[0] == 200
            others = ("", "events", "status", "jobs/latest", "metrics/", "../", "%2e%2e/metrics/..")
            assert [get(kept + path)[0] for path in others] == [403] * len(others)
    assert len({kept, *addresses}) == 3  # the page's own is new each time


@pytest.mark.parametrize("broken", [b"", b"short", b"../" * 14 + b"x", b"\xff" * 43, b"a" * 44])
def test_a_key_that_was_written_by_hand_is_replaced(tmp_path: Path, broken: bytes) -> None:
    home = Home(tmp_path)
    home.metrics_token.write_bytes(broken)
    home.metrics_token.chmod(0o600)
    token = kept_token(home)
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token) and kept_token(home) == token


def test_a_key_that_others_may_know_is_replaced(tmp_path: Path) -> None:
    home = Home(tmp_path)
    token = kept_token(home)
    home.metrics_token.chmod(0o640)
    assert kept_token(home) != token
    (tmp_path / "theirs").write_text("a" * 43)
    home.metrics_token.unlink()
    home.metrics_token.symlink_to(tmp_path / "theirs")
    assert kept_token(home) != "a" * 43


def test_every_answer_keeps_to_itself(address: str) -> None:
    _, headers, text = get(address)
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.findall(r"(?:href|src|action)=\"(?:https?:)?//", text)


def test_a_mistake_is_said_in_words_and_a_form_that_there_is_not_is_none(address: str) -> None:
    status, _, text = get(f"{address}jobs/nothing")
    assert status == 404 and "no job" in text and "Traceback" not in text
    status, _, text = get(f"{address}compare")
    assert status == 400 and "0 jobs chosen" in text and 'href="./"' in text
    status, _, text = get(f"{address}jobs/nothing/at/all")
    assert status == 404 and "there is no such page" in text and 'href="../../../"' in text
    for act in ("down", "release"):
        request = urllib.request.Request(f"{address}do/{act}", data=b"x=1", method="POST")
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=60)
        assert error.value.code == 404
        error.value.close()


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "starlette").mkdir()
    (tmp_path / "starlette" / "__init__.py").write_text("raise ModuleNotFoundError(name='starlette')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "ORCH_HOME": str(tmp_path / "home")}
    words = [sys.executable, "-m", "orchestrator.cli", "ui"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        "error: orch ui needs the package starlette\n  try: pip install 'orch[ui]'\n",
    )


def test_who_asks_for_what_was_collected_before_gets_what_was_not_collected_yet_all_the_same(tmp_path: Path) -> None:
    runs = {"a": RunFolder(tmp_path / "a"), "b": RunFolder(tmp_path / "b")}
    (tmp_path / "a").mkdir()
    runs["a"].summary.touch(), runs["a"].report.touch()
    store = SimpleNamespace(run_folders=lambda job: [runs["a"].root] if job == "a" else [])
    jobs = SimpleNamespace(find=lambda job: SimpleNamespace(id=job))

    def collect(job: Any, out: Path) -> Any:
        if job.id == "a":
            raise ConnectError("v100", "no answer")
        return SimpleNamespace(run=runs["b"], errors={})

    controller = SimpleNamespace(store=store, jobs=jobs, collect=collect)
    site = LocalSite(Home(tmp_path), tmp_path, Watched(Home(tmp_path)))
    asked = [SimpleNamespace(query_params=dict(words)) for words in ((), (("kept", "1"),))]
    with pytest.raises(Stale, match="a: v100: no answer"):
        site._collected(controller, "a", asked[0])  # type: ignore[arg-type]
    assert [site._collected(controller, job, asked[1]) for job in "ab"] == [*runs.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"script": 'train.py "a'}, "script: train.py"),
        ({"script": "train.py", "settings": 'a="1'}, "No closing quotation"),
        ({"script": "train.py", "exp": "mnist_lenet"}, "`exp` and `script` contradict each other"),
        ({}, "no script, module or experiment given"),
    ],
)
def test_a_form_that_cannot_be_read_is_answered_in_words(address: str, form: dict[str, str], said: str) -> None:
    request = urllib.request.Request(f"{address}do/run", data=urllib.parse.urlencode(form).encode(), method="POST")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    with error.value as answer:
        assert (answer.code, said in answer.read().decode()) == (400, True)


def asked_by(form: dict[str, str]) -> JobSpec:
    return pages.job_of(SimpleNamespace(name="rack"), form)  # type: ignore[arg-type]


def test_the_form_has_the_fields_of_a_job() -> None:
    form = {"script": "train.py --lr 0.1", "nodes": "a,b", "settings": "seed=1", "batch": "8", "share": "1"}
    form |= {"env": "A='two words' B", "time_limit": "30m", "note": "a wide net", "hosts": " "}
    assert asked_by(form) == JobSpec(
        script="train.py",
        args=["--lr", "0.1"],
        nodes=["a", "b"],
        settings={"seed": "1"},
        batch=8,
        share=True,
        env={"A": "two words", "B": None},
        time_limit_s=1800.0,
        note="a wide net",
        cluster="rack",
    )
    with pytest.raises(UsageError, match="`batch`: must be a whole number"):
        asked_by({"script": "x", "batch": "many"})


# ---- what it tells ---------------------------------------------------------------------------------------------


def test_what_runs_is_told_to_a_prometheus_and_a_host_that_is_away_blinds_nobody(rack: Rack, address: str) -> None:
    rack.types("run", "--detach", "--nodes", "a2000,v100", "--", "mine/trains.py")
    try:
        until_s = time.monotonic() + 60
        found: dict[str, float] = {}
        while len(found) < 2 and time.monotonic() < until_s:
            status, headers, text = get(f"{address}metrics")
            families = {family.name: family for family in text_string_to_metric_families(text)}
            found = {sample.labels["node"]: sample.value for sample in families["orch_host_samples_per_second"].samples}
        assert status == 200 and headers["content-type"].startswith("application/openmetrics-text")
        assert found == {"a2000": 100.0, "v100": 100.0}
        assert {sample.value for sample in families["orch_host_heard"].samples} == {1.0}
        rack.servers["v100"].stop()
        (job,) = map(json.loads, rack.types("top", "--once", "--json", "--every", "30s").stdout.splitlines())
        hosts = {host["node"]: host for host in job["hosts"]}
        assert hosts["a2000"]["samples_per_s"] == 100.0 and hosts["a2000"]["silent"] is None
        assert "v100: nothing listens" in hosts["v100"]["silent"] and hosts["v100"]["step"] is None
        assert "no answer from v100" in rack.types("top", "--once", "--every", "30s").stdout
        rack.servers["v100"].start()
    finally:
        rack.types("cancel", "--yes")


def test_a_job_whose_plan_is_damaged_is_named_and_hides_no_other(rack: Rack, address: str) -> None:
    words = ("run", "--detach", "--json", "--nodes")
    ids = [json.loads(rack.types(*words, node, "--", "mine/trains.py").stdout)["id"] for node in ("a2000", "v100")]
    plan = rack.folder / "home" / "jobs" / ids[0] / "plan.json"
    kept = plan.read_bytes()
    try:
        plan.write_text("{")
        status, _, text = get(f"{address}metrics")
        told = {sample.labels["job"] for family in text_string_to_metric_families(text) for sample in family.samples}
        assert (status, told) == (200, {ids[1]})
        assert f"{ids[0]}/plan.json is damaged" in get(address)[2]
    finally:
        plan.write_bytes(kept)
        for job in ids:
            rack.types("cancel", job, "--yes")


def test_many_who_looked_at_the_log_of_a_quiet_job_leave_nothing_behind(
    rack: Rack,
) -> None:
    (rack.folder / "mine" / "sleeps.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    job = json.loads(rack.types("run", "--detach", "--json", "--nodes", "a2000", "--", "mine/sleeps.py").stdout)["id"]
    try:
        with served(rack) as (url, process):
            get(url)
            threads = Path(f"/proc/{process.pid}/task")
            before = len(list(threads.iterdir()))
            for _ in range(12):
                with urllib.request.urlopen(f"{url}jobs/{job}/log", timeout=60) as answer:
                    assert b"begun" in answer.readline()
            wait_for(lambda: len(list(threads.iterdir())) <= before + 10, "the threads' end", 60)
            assert get(url)[0] == 200
            with urllib.request.urlopen(f"{url}jobs/{job}/log", timeout=60) as answer:
                assert b"begun" in answer.readline()
                process.send_signal(signal.SIGINT)
                assert process.wait(10) == 0
    finally:
        rack.types("cancel", "--yes")


# ---- a crowd of strangers -------------------------------------------------------------------------------------

CROWD = """
import contextlib, resource, select, socket, sys
port, count, says = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held, poll, made = {}, select.epoll(), 0
def knock():
    one = socket.socket()
    one.settimeout(1)
    with contextlib.suppress(OSError):
        one.connect(("127.0.0.1", port))
        one.sendall(says)
        held[one.fileno()] = one
        poll.register(one, select.EPOLLIN | select.EPOLLHUP)
while True:
    while len(held) < count:
        knock()
        made += 1
        if made == count:
            print("all knocked", flush=True)
    for number, _ in poll.poll(0.05):
        held.pop(number).close()
"""
"""So many connections that say this, made anew whenever one is ended."""


@contextlib.contextmanager
def crowd(url: str, says: str) -> Iterator[None]:
    port = str(urllib.parse.urlsplit(url).port)
    words = [sys.executable, "-c", CROWD, port, "1500", says]
    other = {"user": 65534} if os.geteuid() == 0 else {}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/", **other) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == b"all knocked\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("says", ["", "GET / HTTP/1.1\r\nHost: 127", "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_crowd_of_strangers_keeps_its_owner_from_nothing(rack: Rack, tmp_path: Path, says: str) -> None:
    words = [sys.executable, "-m", "orchestrator.cli", "ui", "--out", str(rack.folder / "runs")]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *words],
            cwd=ROOT,
            env={**rack.environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            get(url)
            before_kib = _resident_kib(process.pid)
            with crowd(url, says):
                for _ in range(8):
                    began = time.monotonic()
                    assert get(url)[0] == 200
                    assert time.monotonic() < began + 60
                    time.sleep(0.5)
                assert len(os.listdir(f"/proc/{process.pid}/fd")) < 600
                assert _resident_kib(process.pid) < before_kib + 64 * 1024
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        finally:
            process.kill()
    assert (tmp_path / "log").stat().st_size < 4096, (tmp_path / "log").read_text()[:2000]


def _resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])
