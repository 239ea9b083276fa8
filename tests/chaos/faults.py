"""What goes wrong, and what it should come to. One generator a kind: before its `yield` it changes the plan, after it
it strikes and returns what is expected (`rounds.Expected`).

Every choice comes from the round's own random numbers, so that a round is the same whenever its seed is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lab_net
from lab_net import Link

from orchestrator.doctor import look as doctor
from orchestrator.errors import HostError, OrchError
from orchestrator.hosts import Connections, Who, work_folders
from orchestrator.jobs import launch, snapshots_of
from orchestrator.paths import Home
from orchestrator.planning import RENDEZVOUS_PORT
from orchestrator.record import Owner
from orchestrator.transport import ConnectedHost, ask

from .rounds import US, Expected, Round, at_once
from .world import Process, remove, small_disk

Fault = Callable[[Round], Generator[bool, None, Expected]]
FAULTS: dict[str, Fault] = {}
TORCH_FREE = {"mixed_exits"}
"""Where ranks meet in collectives, one that is done ends all others before they come to their own end."""
STRANGERS = Path(__file__).parents[1] / "support" / "strangers.py"
LEASE = {"detected_s": 30.0, "gone_s": 15.0}
"""Promised for what only silence shows."""


def fault(kind: Fault) -> Fault:
    FAULTS[kind.__name__] = kind
    return kind


# ---- killed ---------------------------------------------------------------------------------------------------------


def rank_killed(r: Round) -> Expected:
    r.kill("rank")
    return Expected(node=r.victim, says="was killed by SIGKILL", exit_code=137)


@fault
def kill_rank(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return rank_killed(r)


@fault
def kill_wrapper(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.kill("wrapper")
    return Expected(node=r.victim, says="torchrun exited 1")


@fault
def kill_launcher(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.kill("launcher")
    return Expected(node=r.victim, says="torchrun was killed by SIGKILL", exit_code=137)


@fault
def kill_supervisor(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.kill("supervisor")
    return Expected(node=r.victim, says="supervisor", detected_s=30.0)


@fault
def kill_keeper(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.kill("keeper")
    return Expected(node=r.victim, says="supervisor")


@fault
def kill_keeper_and_supervisor(r: Round) -> Generator[bool, None, Expected]:
    yield True
    for process in [*r.processes("keeper", r.victim), *r.processes("supervisor", r.victim)]:
        process.signal(signal.SIGKILL)
    return Expected(node=r.victim, says="supervisor", detected_s=30.0)


@fault
def power_off(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.world.power_off(r.victim)

    def on() -> None:
        r.world.power_on(r.victim)
        r.cell.close()

    return Expected(
        node=r.victim, says="no word|gone", left_out=frozenset({r.victim}), heal=on, logs_whole=False, **LEASE
    )


@fault
def power_off_master(r: Round) -> Generator[bool, None, Expected]:
    """It stays away: who follows the job hears the cause from the others, and does not wait for it."""
    r.victim = r.master
    yield True
    follower = r.controller("stay")
    shown = r.folder / "stay.out"
    deadline = time.monotonic() + 30.0
    while "following" not in shown.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    r.world.power_off(r.master)
    followed_until = time.monotonic() + 75.0

    def on() -> None:
        try:
            follower.wait(followed_until - time.monotonic())
        finally:
            follower.kill()
            r.world.power_on(r.master)
            r.cell.close()
        request = json.loads(shown.read_text().splitlines()[-1])
        if (request["state"], request["exit_code"], request["first_failure"]["node"]) != ("failed", 1, r.master):
            raise RuntimeError(f"who followed the job was request {request}")

    return Expected(
        node=r.master, says="no word|gone", left_out=frozenset({r.master}), heal=on, logs_whole=False, **LEASE
    )


# ---- stopped --------------------------------------------------------------------------------------------------------


@fault
def freeze_rank(r: Round) -> Generator[bool, None, Expected]:
    yield True
    frozen = r.kill("rank", signum=signal.SIGSTOP)
    time.sleep(r.rng.uniform(0.5, 4.0))
    for process in frozen:
        process.signal(signal.SIGCONT)
    return Expected(state="succeeded", survives=True)


@fault
def freeze_supervisor_briefly(r: Round) -> Generator[bool, None, Expected]:
    yield True
    frozen = [*r.kill("supervisor", signum=signal.SIGSTOP), *r.kill("keeper", signum=signal.SIGSTOP)]
    time.sleep(r.rng.uniform(3.0, 9.0))
    for process in frozen:
        process.signal(signal.SIGCONT)
    return Expected(state="succeeded", survives=True)


@fault
def freeze_supervisor(r: Round) -> Generator[bool, None, Expected]:
    """The ranks of the frozen supervisor end, too: nobody else is there to do it."""
    yield True
    frozen = [*r.kill("supervisor", signum=signal.SIGSTOP), *r.kill("keeper", signum=signal.SIGSTOP)]

    def thaw() -> None:
        def ended(now: list[Process]) -> bool:
            return not [process for process in now if process.node == r.victim and process.role == "rank"]

        if r.world.wait(r.job, ended, 15.0) is None:
            raise RuntimeError("a rank outlived its frozen supervisor's lease")
        for process in frozen:
            process.signal(signal.SIGCONT)

    return Expected(node=r.victim, says="no word|stood still", left_out=frozenset({r.victim}), heal=thaw, **LEASE)


@fault
def freeze_host(r: Round) -> Generator[bool, None, Expected]:
    yield True
    frozen = r.kill(None, signum=signal.SIGSTOP)
    longer_s = r.rng.uniform(0.0, 8.0)

    def thaw() -> None:
        time.sleep(longer_s)
        for process in frozen:
            process.signal(signal.SIGCONT)

    return Expected(node=r.victim, says="no word|stood still", left_out=frozenset({r.victim}), heal=thaw, **LEASE)


@fault
def freeze_host_before_start(r: Round) -> Generator[bool, None, Expected]:
    """While its `prepare` runs: when it thaws, the word to start may lie there unread, and is no longer obeyed."""
    over = f"/tmp/{r.job}.over"
    r.prepare[r.victim] = f"until [ -e {over} ]; do sleep 0.05; done"
    yield False
    r.launch()

    def prepares(now: list[Process]) -> bool:
        return {"keeper", "supervisor", "other"} <= {process.role for process in now if process.node == r.victim}

    if r.world.wait(r.job, prepares, 10.0) is None:
        raise RuntimeError(f"no `prepare` was seen: {r.say_state()}")
    frozen = r.kill(None, signum=signal.SIGSTOP)
    subprocess.run(r.world.on_host(r.victim, "touch", over), check=True)  # however late we are: it has not begun

    def thaw() -> None:
        time.sleep(12.0)
        for process in frozen:
            process.signal(signal.SIGCONT)
        r.world.wait(r.job, lambda now: not now, 30.0)
        started = [p for p in r.world.sighting(r.job).ever if p.node == r.victim and p.role in ("launcher", "rank")]
        if started:
            raise RuntimeError(f"a host that had lost its lease started {started}")

    return Expected(node=r.victim, says="no word|stood still", left_out=frozenset({r.victim}), heal=thaw, **LEASE)


# ---- cut off --------------------------------------------------------------------------------------------------------


def _healed(r: Round) -> Callable[[], None]:
    def heal() -> None:
        r.world.heal(r.victim)
        r.cell.close()

    return heal


def _glitch(r: Round, cut: Callable[[], None]) -> Expected:
    cut()
    time.sleep(r.rng.uniform(3.0, 9.0))
    _healed(r)()
    time.sleep(r.rng.uniform(0.0, 12.0))  # what the glitch did may show late
    return Expected(state="succeeded", survives=True)


def _cut(r: Round, cut: Callable[[], None]) -> Expected:
    cut()
    return Expected(node=r.victim, says="no word", heal=_healed(r), **LEASE)


@fault
def glitch(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _glitch(r, lambda: r.world.link(r.victim, Link(up=False)))


@fault
def glitch_inwards(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _glitch(r, lambda: r.world.deaf(r.victim))


@fault
def glitch_outwards(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _glitch(r, lambda: r.world.mute(r.victim))


@fault
def packet_loss(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _glitch(r, lambda: r.world.link(r.victim, Link(loss=r.rng.uniform(0.05, 0.25))))


@fault
def cut(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _cut(r, lambda: r.world.link(r.victim, Link(up=False)))


@fault
def cut_inwards(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _cut(r, lambda: r.world.deaf(r.victim))


@fault
def cut_outwards(r: Round) -> Generator[bool, None, Expected]:
    yield True
    return _cut(r, lambda: r.world.mute(r.victim))


def _pair(r: Round) -> tuple[str, str, int | None]:
    """Two hosts, and the largest packet that still passes between them: with it, the hub hears every word."""
    first, second = sorted(r.rng.sample(r.cell.names, 2), key=r.cell.names.index)
    return first, second, 1400 if first == r.master else r.rng.choice((None, 1400))


@fault
def parted(r: Round) -> Generator[bool, None, Expected]:
    """Two hosts no longer reach each other, and the master hears both."""
    first, second, largest = _pair(r)
    r.victim = second
    yield True
    r.world.part(first, second, largest)
    says = f"{first} and {second} cannot reach|{second} and {first} cannot reach"
    return Expected(node=second, says=says, heal=lambda: r.world.heal(first), detected_s=70.0, gone_s=15.0)


@fault
def parted_briefly(r: Round) -> Generator[bool, None, Expected]:
    first, second, largest = _pair(r)
    yield True
    r.world.part(first, second, largest)
    time.sleep(r.rng.uniform(3.0, 15.0))
    r.world.heal(first)
    time.sleep(r.rng.uniform(0.0, 12.0))  # what it did may show late
    return Expected(state="succeeded", survives=True)


@fault
def sshd_restart(r: Round) -> Generator[bool, None, Expected]:
    """The daemon and every session of it: the job lives apart from them."""
    yield True
    for pid in lab_net.processes([r.world.ports[r.victim].namespace]):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                os.kill(pid, signal.SIGKILL)
    r.cell.close()
    time.sleep(2.5)  # process 1 of a lab host starts it again after a second
    return Expected(state="succeeded", survives=True)


@fault
def strangers_at_the_hub(r: Round) -> Generator[bool, None, Expected]:
    """They knock hundreds of times a second and have no token; with few descriptors, a rank that dies is the cause."""
    yield True
    for name in r.cell.names:
        few = ("prlimit", f"--pid={r.agent(name)['pid']}", "--nofile=256:256")
        subprocess.run(r.world.on_host(name, *few), check=True)
    place = (r.plan.master_address, str(r.agent(r.master)["hub_port"]))
    knocks = [sys.executable, "-c", STRANGERS.read_text(), *place, "600", "60"]
    crowd = r.afterwards.enter_context(
        subprocess.Popen(
            r.world.on_host(r.rng.choice(r.cell.names), *knocks), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    )
    assert crowd.stdin
    r.afterwards.callback(crowd.stdin.close)
    r.pause(3.0)
    return rank_killed(r)


# ---- the controller -------------------------------------------------------------------------------------------------


@fault
def controller_killed_launching(r: Round) -> Generator[bool, None, Expected]:
    """Half a gang may be there: a later launch is refused or completes, and a cancel ends all of it."""
    yield False
    controller = r.controller("launch")
    time.sleep(r.rng.uniform(0.3, 2.5))
    controller.kill()
    controller.wait()
    r.tell("controller killed")
    with contextlib.suppress(OrchError):
        r.launch()
    launch.cancel(r.plan, r.cell.connect(), fence=True)
    return Expected(state="cancelled|lost", logs_whole=False, detected_s=60.0)


@fault
def controller_killed_following(r: Round) -> Generator[bool, None, Expected]:
    yield True
    controller = r.controller("follow")
    time.sleep(r.rng.uniform(0.5, 2.5))
    controller.kill()
    controller.wait()
    return Expected(state="succeeded", survives=True)


@fault
def controller_killed_collecting(r: Round) -> Generator[bool, None, Expected]:
    yield True
    controller = r.controller("collect")
    time.sleep(r.rng.uniform(0.5, 2.5))
    controller.kill()
    controller.wait()
    return Expected(state="succeeded", survives=True)


@fault
def cancel(r: Round) -> Generator[bool, None, Expected]:
    """At a random moment from the word to go on."""
    yield False
    r.launch()
    r.pause(1.5)
    r.cancel()
    r.tell("cancelled")
    return Expected(state="cancelled")


@fault
def cancel_twice(r: Round) -> Generator[bool, None, Expected]:
    yield True
    at_once(r.cancel, r.cancel)
    r.pause(1.0)
    r.cancel()
    return Expected(state="cancelled")


# ---- who looks -------------------------------------------------------------------------------------------------------


@fault
def asked_why(r: Round) -> Generator[bool, None, Expected]:
    """By several at once, though it is well."""
    yield True
    hosts = r.cell.connect()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: snapshots_of(r.plan, hosts), range(4)))
    if silent := [look for one in found for look in one.values() if isinstance(look, HostError)]:
        raise RuntimeError(f"no answer to why: {silent[0]}")
    return Expected(state="succeeded", survives=True)


@fault
def asked_why_as_a_rank_dies(r: Round) -> Generator[bool, None, Expected]:
    yield True
    hosts = r.cell.connect()
    asking = threading.Thread(target=lambda: [snapshots_of(r.plan, hosts) for _ in range(3)])
    asking.start()
    r.afterwards.callback(asking.join)
    r.pause(3.0)
    return rank_killed(r)


@fault
def doctor_beside(r: Round) -> Generator[bool, None, Expected]:
    """Every host and every way between two of them is looked at while the job runs."""
    yield True
    with Connections(Home(r.folder / "doctor")) as connections:
        connections.open(r.cell.nodes)
        seen = doctor.look(connections, r.cell.nodes, data="~/data")
    if seen.unreached or not seen.mesh:
        raise RuntimeError(f"the doctor saw {seen.unreached}, {seen.mesh}")
    return Expected(state="succeeded", survives=True)


# ---- what ranks do --------------------------------------------------------------------------------------------------


@fault
def mixed_exits(r: Round) -> Generator[bool, None, Expected]:
    """One rank is done, one fails by itself, one only says that a connection broke."""
    done, true_one, echo = r.rng.sample(range(3), 3)
    code = r.rng.randint(2, 120)
    r.behaviour["exits"] = {
        str(done): (r.rng.uniform(0.0, 0.5), 0, ""),
        str(true_one): (0.8, code, "ValueError: the true one"),
        str(echo): (0.8 + r.rng.uniform(-0.1, 0.1), 1, "RuntimeError: Connection closed by peer"),
    }
    yield False
    r.launch()
    return Expected(node=r.cell.names[true_one], says=f"exited {code}", exit_code=code, detected_s=30.0)


@fault
def rank_dies_of_a_signal(r: Round) -> Generator[bool, None, Expected]:
    name = r.rng.choice(("SIGSEGV", "SIGABRT", "SIGKILL", "SIGBUS", "SIGFPE"))
    r.behaviour["exits"] = {str(r.cell.names.index(r.victim)): (0.5, name, "a last word")}
    yield False
    r.launch()
    return Expected(node=r.victim, says=f"was killed by {name}", exit_code=128 + signal.Signals[name], detected_s=30.0)


@fault
def daemons_of_ranks_that_are_done(r: Round) -> Generator[bool, None, Expected]:
    r.behaviour["daemons"] = True
    yield True
    return Expected(state="succeeded", survives=True)


@fault
def workers_that_ignore_all(r: Round) -> Generator[bool, None, Expected]:
    r.behaviour |= {"ignores": True, "daemons": True}
    yield True
    r.cancel()
    return Expected(state="cancelled")


@fault
def time_limit(r: Round) -> Generator[bool, None, Expected]:
    r.changes["time_limit_s"] = r.rng.uniform(0.2, 3.0)
    yield False
    r.launch()
    return Expected(says="time limit", detected_s=30.0)


# ---- the ground beneath ---------------------------------------------------------------------------------------------


@fault
def port_taken(r: Round) -> Generator[bool, None, Expected]:
    """A stranger on the master listens where the ranks are to meet: they meet elsewhere."""
    listen = (
        f"import socket, sys; s = socket.create_server(('', {RENDEZVOUS_PORT})); print(flush=True); sys.stdin.read()"
    )
    argv = r.world.on_host(r.master, sys.executable, "-c", listen)
    stranger = r.afterwards.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert stranger.stdin
    assert stranger.stdout
    r.afterwards.callback(stranger.stdin.close)
    stranger.stdout.readline()
    yield True
    return Expected(state="succeeded", survives=True)


@fault
def full_disk(r: Round) -> Generator[bool, None, Expected]:
    """On one host, for a while: the job goes on, and what could not be written is counted in its log."""
    folder = "/home/lab/small"
    place = r.afterwards.enter_context(small_disk(r.world, r.victim, folder, "96m"))
    r.workdir[r.victim] = f"{folder}/orch"
    r.behaviour["daemons"] = False
    yield True
    with contextlib.suppress(OSError), open(place / "ballast", "wb") as ballast:
        while True:
            ballast.write(b"\0" * (1 << 16))
            ballast.flush()
    time.sleep(r.rng.uniform(0.5, 3.0))
    (place / "ballast").unlink()
    return Expected(state="succeeded", survives=True, logs_whole=False)


@fault
def log_truncated(r: Round) -> Generator[bool, None, Expected]:
    yield True
    r.collect()
    log = r.on_disk(r.victim) / f"rank-{r.cell.names.index(r.victim)}" / "stdout.log"
    os.truncate(log, 0)
    r.pause(1.0)
    r.collect()
    return Expected(state="succeeded", survives=True, logs_whole=False)


@fault
def collected_over_and_over(r: Round) -> Generator[bool, None, Expected]:
    yield True
    for _ in range(3):
        r.collect()
        r.pause(0.4)
    return Expected(state="succeeded", survives=True)


@fault
def record_removed(r: Round) -> Generator[bool, None, Expected]:
    """agent.json: the supervisor writes it again with the next thing that it has to say."""
    yield True
    (r.on_disk(r.victim) / "agent.json").unlink()
    return Expected(state="succeeded", survives=True)


@fault
def order_removed(r: Round) -> Generator[bool, None, Expected]:
    """node.json: read when the job was prepared and when a rank starts, and not needed later."""
    yield True
    (r.on_disk(r.victim) / "node.json").unlink()
    return Expected(state="succeeded", survives=True)


@fault
def folder_removed(r: Round) -> Generator[bool, None, Expected]:
    yield True
    path = r.on_disk(r.victim)
    path.rename(path.with_name(f"{path.name}.moved"))

    def back() -> None:
        path.with_name(f"{path.name}.moved").rename(path)

    return Expected(node=r.victim, says="folder was removed", heal=back)


@fault
def stale_record(r: Round) -> Generator[bool, None, Expected]:
    """A job of long ago whose supervisor's pid is now a stranger's: neither a look nor a `reap` touches that."""
    yield True
    pid, start_time = r.world.bystanders[r.victim]
    inner = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1]
    boot_id = (r.world.root(r.victim) / "run/boot_id").read_text().strip()
    old = r.on_disk(r.victim).with_name(f"of-long-ago-{r.job}")
    old.mkdir()
    identity = f'"pid": {inner}, "start_time": {start_time - 1}, "boot_id": "{boot_id}"'
    (old / "agent.json").write_text(f'{{"state": "running", {identity}, "keeper": {{{identity}}}}}')
    (old / "node.json").write_text(json.dumps({"job": old.name, **US.request}))
    for path in (old, old / "agent.json", old / "node.json"):
        os.chown(path, 1000, 1000)
    host = r.cell.connect()[r.victim]
    for request in ({"action": "status"}, {"action": "cancel", "job": old.name}):
        ask.ask(host, "control", {"workdir": r.workdir[r.victim], **request}, timeout_s=30)
    work_folders.reap(host, US, end=True)
    remove(old)
    return Expected(state="succeeded", survives=True)


# ---- others on the same hosts ---------------------------------------------------------------------------------


@fault
def down_of_others(r: Round) -> Generator[bool, None, Expected]:
    """Another cluster of ours, a colleague's cluster of the same name, and a stranger clear and reap the hosts."""
    yield True
    colleague = Owner(id="d" * 32, name="dora@desk")
    others = [Who(US.owner, "another"), Who(colleague, US.cluster), Who(colleague, "another")]
    r.rng.shuffle(others)
    hosts = r.cell.connect().values()
    with ThreadPoolExecutor() as pool:
        list(pool.map(_clear, *zip(*((host, who) for host in hosts for who in others), strict=True)))
    return Expected(state="succeeded", survives=True)


def _clear(host: ConnectedHost, who: Who) -> None:
    work_folders.reap(host, who, end=True)
    cleared = work_folders.down(host, who)
    if cleared.ended or cleared.jobs or not cleared.left:
        raise RuntimeError(f"{host.node}: {who.cluster} of {who.owner.name} cleared {cleared}")
