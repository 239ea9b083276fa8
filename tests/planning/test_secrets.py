"""What a person hands to hosts: arguments arrive unchanged, secrets arrive and are seen nowhere else."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import stat
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from orchestrator.cli import main
from orchestrator.errors import UsageError
from orchestrator.hosts import masked_env
from orchestrator.jobs import agents, cancel, node_request
from orchestrator.planning import JobSpec, parse_job
from orchestrator.transport import shell, ssh
from orchestrator.transport.ask import ask
from tests.support.command_lines import command_lines_of_all_processes
from tests.support.local_job import gang
from tests.support.quick_python import quick_python
from tests.support.sshd import needs_sshd, running_sshd, wait_for

# ---- arguments ------------------------------------------------------------------------------------------------

LETTERS = "aZ0 \t\n'\"\\$`!*?[]{}()<>|&;#~=%^-+,:/@\x01\x7fäß🙂\u202e"
WORDS = [
    "",
    "-n",
    "--",
    "-oProxyCommand=x",
    "$(exit 9)",
    "`exit 9`",
    "a b",
    "{rank}",
    "{job_dir}",
    "!!",
    "*",
    "~",
    "\\",
]


def command_lines(count: int) -> list[list[str]]:
    rng = random.Random(11)

    def word() -> str:
        return rng.choice(WORDS) if rng.random() < 0.2 else "".join(rng.choices(LETTERS, k=rng.randrange(12)))

    return [[word() for _ in range(rng.randrange(1, 6))] for _ in range(count)]


def one_text(lines: list[list[str]]) -> tuple[str, bytes]:
    """One shell text for many command lines, and what it has to print."""
    text = "\n".join(shell.join(["printf", "%s\\0", *argv]) for argv in lines)
    return text, "".join(f"{word}\0" for argv in lines for word in argv).encode()


@pytest.mark.parametrize("name", ["sh", "dash", "bash"])
def test_ten_thousand_random_command_lines_pass_each_shell_unchanged(name):
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    lines = command_lines(10_000)
    for start in range(0, len(lines), 1000):
        text, expected = one_text(lines[start : start + 1000])
        done = subprocess.run([name, "-s"], input=text.encode(), capture_output=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, expected)


@needs_sshd
def test_random_command_lines_pass_a_real_sshd_unchanged(tmp_path):
    """sshd gives the text to the user's login shell."""
    with running_sshd(tmp_path / "host") as server:
        transport = ssh.connect(server.target(), host_keys=server.host_keys())
        for start in range(0, 1000, 100):
            text, expected = one_text(command_lines(1000)[start : start + 100])
            assert transport.run(text, timeout_s=30).stdout == expected
        transport.close()


def test_ten_thousand_arguments_reach_a_users_script_unchanged(tmp_path):
    """The whole way of `orch run -- SCRIPT ARGS`: plan, request, node.json, launcher, rank wrapper."""
    words = [word for argv in command_lines(5_000) for word in argv][:10_000]
    script = "import json, sys; json.dump(sys.argv[1:], open('argv.json', 'w'))"
    with gang(tmp_path, script, ranks=(1,)) as made:
        node = made.plan.nodes[0].model_copy(update={"command": ("script.py", *words)})
        made.plan = made.plan.model_copy(update={"nodes": (node,)})
        made.launch()
        assert made.wait().state == "succeeded"
        assert json.loads((made.folder("a") / "src/argv.json").read_text()) == words


# ---- secrets --------------------------------------------------------------------------------------------------


class Typist:
    """Types `orch` commands in this process, and remembers all that was printed."""

    def __init__(self, capfd, monkeypatch, folder: Path):
        self.printed, self._capfd = "", capfd
        monkeypatch.chdir(folder)

    def types(self, *words: str, exit_code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(words), prog_name="orch")
        shown = self._capfd.readouterr()
        self.printed += shown.out + shown.err
        assert (end.value.code or 0) == exit_code, f"{words}: {shown.out}{shown.err}"
        return shown.out


def holding(folder: Path, canary: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]


SAYS_ITS_SECRET_IS_THERE = """
import os, pathlib, sys, time
assert len(os.environ["PLAIN_WORD"]) == len(os.environ["API_TOKEN"]) == 32
print("has them", flush=True)
while not pathlib.Path("end").exists():
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def typist(capfd, monkeypatch, tmp_path):
    return Typist(capfd, monkeypatch, tmp_path)


@contextmanager
def local_cluster(tmp_path, typist, env, **more):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "says.py").write_text(SAYS_ITS_SECRET_IS_THERE)
    node = {"name": "one", "transport": "local", "workdir": str(tmp_path / "work"), "device": "cpu"}
    node["python"] = quick_python(tmp_path / "quick")
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(yaml.safe_dump({"cluster": "sec", "defaults": {"env": env, **more}, "nodes": [node]}))
    try:
        yield inventory
    finally:
        typist.types("down", "--yes", "--discard")


def test_a_secret_of_the_inventory_is_nowhere_but_in_files_for_its_owner_alone(tmp_path, typist):
    pytest.importorskip("torch")
    canary, errand, way_in = (secrets.token_hex(16) for _ in range(3))
    env = {"PLAIN_WORD": canary, "API_TOKEN": canary, "OMP_NUM_THREADS": "1"}
    home, work, runs = Path(os.environ["ORCH_HOME"]), tmp_path / "work", tmp_path / "runs"
    more = {"prepare": f"true Bearer {errand}\nexport MORE={errand}\n", "activate": f"true Bearer {way_in}"}
    with local_cluster(tmp_path, typist, env, **more) as inventory:
        typist.types("up", "inventory.yaml", "--allow-local")
        assert canary not in typist.printed
        typist.printed = ""  # what a new file would have this machine run was shown, so that its person could allow it
        typist.types("status", "--json")
        assert "OMP_NUM_THREADS=1" in typist.types("run", "--dry-run", "--", "code/says.py")
        typist.types("run", "--dry-run", "--json", "--", "code/says.py")
        started = typist.types("run", "--detach", "--", "code/says.py").strip()
        folder = work / "jobs" / started
        wait_for(lambda: "has them" in typist.types("logs", "--job", "latest"), "the job to run", 60)
        shown = command_lines_of_all_processes()
        assert not {word for word in (canary, errand, way_in) if word.encode() in shown}
        on_host = holding(work, canary)
        assert folder / "node.json" in on_host  # so the search does find it
        assert holding(work, errand) == [folder / "node.json"]
        assert [path for path in on_host if stat.S_IMODE(path.stat().st_mode) != 0o600] == []
        # Every way to fail that repeats what it was given.
        inventory.write_text(inventory.read_text().replace("PLAIN_WORD", "OTHER_WORD"))
        typist.types("run", "--", "code/says.py", exit_code=2)
        inventory.write_text(inventory.read_text().replace(f"API_TOKEN: {canary}", f"API_TOKEN: [{canary}]"))
        typist.types("up", "inventory.yaml", exit_code=2)
        typist.types("run", "--", "code/says.py", exit_code=2)
        (folder / "src" / "end").touch()
        typist.types("logs", "-f", "--job", "latest", exit_code=1)  # as the script ends
        wait_for(lambda: json.loads(typist.types("jobs", "--json"))["jobs"][0]["state"] == "failed", "its end", 60)
        typist.types("jobs")
        typist.types("collect", "--job", "latest")
        typist.types("report", "--job", "latest", "--json")
        typist.types("reap")
        assert {"plan.json", "report.html", "summary.json"} <= {path.name for path in (runs / started).iterdir()}
        for word in (canary, errand):
            assert holding(home, word) == holding(runs, word) == holding(work, word) == []
        # Each command needs the way in: with the cluster it is remembered, and nowhere else.
        assert holding(home, way_in) == [home / "clusters" / "sec.json"]
        assert holding(runs, way_in) == holding(work, way_in) == []
        for path in (*home.rglob("*"), home, runs / started, *(runs / started).rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.is_symlink(), path
    assert not {word for word in (canary, errand, way_in, "Traceback") if word in typist.printed}
    assert "not collected" not in typist.printed  # `down` takes nothing that was not collected


def test_what_a_job_was_given_in_secret_lies_nowhere_on_its_host_once_it_is_over(tmp_path):
    """However it ended: by itself, cancelled, its supervisor killed, before it was kept to go, everything killed."""
    waits = "import time\nprint('ready', flush=True)\ntime.sleep(120)\n"
    canary = secrets.token_hex(16)
    ways = {"ends": "pass", "cancelled": waits, "supervisor-killed": waits, "undone": waits, "all-killed": waits}
    for way, script in ways.items():
        (tmp_path / way).mkdir()
        with gang(tmp_path / way, script, ranks=(1,), env={"MY_TOKEN": canary}) as made:
            node, token = made.plan.nodes[0], bytes(32).hex()
            work = Path(node.workdir)
            if way == "undone":
                request = {"action": "prepare", "workdir": node.workdir, "plan": {}, "blob_bytes": len(made.blob)}
                kept = node_request(made.plan, node, token)
                ask(made.hosts["a"], "prepare", {**request, "node": kept}, blob=made.blob, timeout_s=60)
            else:
                made.launch()
            assert canary in (made.folder("a") / "node.json").read_text()
            if way != "ends" and way != "undone":
                agent = made.wait_running()["a"]
            if way == "cancelled":
                cancel(made.plan, made.hosts)
            elif way == "undone":  # nobody ever says go: it gives up by itself, here a little sooner
                (made.folder("a") / "control").write_text('{"request": "cancel"}\n')
            elif way.endswith("killed"):
                for pid in (agent["keeper"]["pid"], agent["pid"])[way == "supervisor-killed" :]:
                    os.kill(pid, signal.SIGKILL)
            made.wait()
            agents(made.plan, made.hosts)  # `orch jobs` asks this: where all were killed, it is the first to know
            assert holding(work, canary) == [], way
            kept = json.loads((made.folder("a") / "node.json").read_text())
            assert (kept["env"], kept["token"], kept["cluster"]) == ({}, "", "test")
            if way == "undone":  # the undo that comes late still knows its own
                ask(made.hosts["a"], "control",
                    {"action": "undo", "workdir": node.workdir, "job": made.plan.job, "token": token, "fence": False},
                    timeout_s=60)  # fmt: skip
                assert not made.folder("a").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "canary"], ["--api_key=canary"], ["--password=canary"], ["--token", "canary"], ["api_key=canary"],
        ["--hf-token=canary"], ["hub.access_token=canary"], ["--wandb-api-key", "canary"], ["--client-secret=canary"],
        ["--aws-secret-access-key", "canary"], ["hf_" + "canary" * 6], ["x", "--extra=sk-" + "canary" * 8],
    ],
)  # fmt: skip
def test_an_argument_that_looks_like_a_secret_is_refused_and_not_repeated(words, tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"looks like a secret.*`env:` in the inventory") as refused:
        parse_job(JobSpec(script=str(tmp_path / "train.py"), args=list(words)))
    assert "canary" not in str(refused.value)


def test_an_argument_that_only_sounds_like_a_secret_passes(tmp_path):
    (tmp_path / "train.py").touch()
    words = ["--tokenizer=gpt2", "--max-tokens", "512", "--pad-token", "0", "--eos_token=</s>", "--token-dropout=0.1"]
    words += ["--password", "--secret-santa=1", "--key=value", "--api-key="]
    assert parse_job(JobSpec(script=str(tmp_path / "train.py"), args=list(words))).request.command[1:] == tuple(words)


def test_only_values_of_known_settings_are_shown():
    shown = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "1", "TORCH_LOGS": "+dynamo"}
    hidden = {"MY_VALUE": "x", "WANDB_API_KEY": "x", "ORCH_TOKEN": "x", "DATABASE_URL": "x", "omp_num": "x"}
    assert masked_env({**shown, **hidden}) == {**shown, **dict.fromkeys(hidden, "***")}
