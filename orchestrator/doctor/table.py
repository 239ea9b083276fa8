"""The table of all checks, and their evaluation: id, name, level, symptoms, function, and when each runs. Pure.

    judge(seen)                             all checks: `orch doctor`
    judge(seen, checks_at("up"))            after a probe
    judge(seen, checks_at("start"))         of facts in the answers to `prepare`
    judge(seen, checks_at("gpus_gone"))     before that, if GPUs of the job are missing
    judge(seen, checks_at("gpus_well"))     before that, the health of the others

Ids are stable, since users filter by them. Problems that `orch run` solves by itself only warn (P16, P29).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.doctor import host_checks, pairs, together
from orchestrator.doctor.observations import Applies, Check, Host, Judge, Level, Observations, RawFinding
from orchestrator.errors import AuthError, ConnectError, HostError, HostKeyError
from orchestrator.hosts import checks
from orchestrator.hosts.checks import Finding as ChecksFinding
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.units import counted

NO_GPU, ONE_HOST, NO_MESH, NO_HOST = "no GPU there", "one host alone", "pairs were not tried", "no host answered"


def _unreached(seen: Observations, *kinds: type[HostError]) -> Iterator[RawFinding]:
    for name, error in seen.unreached.items():
        if isinstance(error, kinds):
            yield RawFinding((name,), error.message.removeprefix(f"{name}: "), error.remedy, "block")


def _login(seen: Observations) -> Iterator[RawFinding]:
    yield from _unreached(seen, ConnectError, AuthError)
    yield from on_each(host_checks.login, level="warn")(seen)


def _host_keys(seen: Observations) -> Iterator[RawFinding]:
    return _unreached(seen, HostKeyError)


def _python(seen: Observations) -> Iterator[RawFinding]:
    for name, error in seen.unreached.items():
        if not isinstance(error, (ConnectError, AuthError, HostKeyError)):
            yield RawFinding((name,), error.message.removeprefix(f"{name}: "), error.remedy, "block")
    yield from _PYTHON_AT_UP(seen)


def on_each(*checks: Callable[[Host], Iterable[ChecksFinding]], level: Level | None = None) -> Judge:
    """Applies checks of single hosts to each host."""

    def judge(seen: Observations) -> Iterator[RawFinding]:
        for check in checks:
            for host in seen.hosts:
                for words, remedy in check(host):
                    yield RawFinding((host.name,), words, remedy, level)

    return judge


def blocks(*known: Callable[[Node, NodeFacts], ChecksFinding]) -> Callable[[Host], Iterable[ChecksFinding]]:
    """Adapts checks of `orch up` that refuse a host."""
    return lambda host: (found for check in known if (found := check(host.node, host.facts))[0])


def warns(check: Callable[[Node, NodeFacts], Iterable[ChecksFinding]]) -> Callable[[Host], Iterable[ChecksFinding]]:
    """Adapts a check of `orch up` that only warns."""
    return lambda host: check(host.node, host.facts)


def both(*judges: Judge) -> Judge:
    return lambda seen: (sight for judge in judges for sight in judge(seen))


# ---- where a check applies -----------------------------------------------------------------------------------------


def always(seen: Observations) -> str:
    return ""


def answered(seen: Observations) -> str:
    return "" if seen.hosts else NO_HOST


def has_gpus(seen: Observations) -> str:
    return "" if any(host.trains_on_gpus for host in seen.hosts) else NO_GPU


def has_several_gpus(seen: Observations) -> str:
    return "" if any(len(host.gpus) > 1 for host in seen.hosts) else "no host with several GPUs"


def has_rdma(seen: Observations) -> str:
    return "" if any(host.facts.rdma for host in seen.hosts) else "no InfiniBand there"


def has_nvswitch(seen: Observations) -> str:
    is_there = any(gpu.fabric for host in seen.hosts for gpu in host.health.gpus) or next(gpus_waiting(seen), None)
    return has_gpus(seen) or ("" if is_there else "no NVSwitch there")


def gpus_waiting(seen: Observations) -> Iterator[RawFinding]:
    return on_each(host_checks.fabric)(seen)


def are_several(seen: Observations) -> str:
    return "" if len(seen.hosts) > 1 else ONE_HOST


def tried_pairs(seen: Observations) -> str:
    return are_several(seen) or ("" if seen.mesh else NO_MESH)


def tried_collective(seen: Observations) -> str:
    return are_several(seen) or ("" if seen.collective else seen.why_no_collective)


def _locked(host: Host) -> Iterable[ChecksFinding]:
    return host_checks.locked_memory(host) if host.facts.rdma else ()


def _of_groups(judge: Judge) -> Judge:
    """Only warns: `orch run` refuses such hosts only in certain combinations."""
    return lambda seen: (replace(sight, level="warn") for sight in judge(seen))


def _check(
    id: str, name: str, level: Level, causes: str, judge: Judge, applies: Applies = answered, **when: Judge
) -> Check:
    """when: parts that need no further question, by the names of `checks_at`. Other checks need other hosts, a second
    login or minutes of a host's time.
    """
    return Check(id, name, level, causes, judge, applies, when)


_DRIVER, _GPUS = on_each(blocks(checks.driver)), on_each(blocks(checks.gpus))
_DRIVERS = both(_DRIVER, on_each(warns(checks.driver_warnings), level="warn"))
_NUMBER = both(_GPUS, on_each(host_checks.other_count, level="warn"))
_UNWELL, _LINK_DOWN = on_each(host_checks.health), on_each(host_checks.link_down)
_LIMITS, _LOGIN_NOW = on_each(host_checks.login_limits), on_each(host_checks.login, level="warn")
_CARD, _SPACE, _MEMORY, _YOUNG = map(
    on_each, (host_checks.card, warns(checks.space), host_checks.memory, host_checks.young)
)
_PYTHON_AT_UP = both(on_each(blocks(checks.python, checks.torch)), on_each(warns(checks.packages), level="warn"))
_INTERFACE_AT_UP = both(_of_groups(together.bound_addresses), on_each(host_checks.link_down, warns(checks.interface)))
_WORKDIR = on_each(blocks(checks.workdir))


CHECKS: tuple[Check, ...] = (
    _check(
        "P01",
        "login",
        "block",
        "a start that hangs at a prompt, or fails half-way",
        _login,
        always,
        up=_LOGIN_NOW,
        start=_LOGIN_NOW,
    ),
    _check("P02", "host key", "block", "another machine between you and the host", _host_keys, always),
    _check("P03", "login limits", "warn", "hosts that refuse logins at random", _LIMITS, up=_LIMITS, start=_LIMITS),
    _check("P04", "Python and torch", "block", "ranks that do not start", _python, always, up=_PYTHON_AT_UP),
    _check("P05", "versions", "block", "hangs after the start, garbled messages", together.versions, are_several),
    _check(
        "P06",
        "GPU driver",
        "block",
        "ranks that find no GPU, or train on the CPU unasked",
        _DRIVERS,
        up=_DRIVERS,
        gpus_gone=_DRIVER,
    ),
    _check(
        "P07",
        "GPUs compute",
        "block",
        "`no kernel image`, or CUDA errors at the first step",
        on_each(host_checks.kernels),
        has_gpus,
        up=on_each(host_checks.kernels),
    ),
    _check(
        "P08",
        "number of GPUs",
        "block",
        "a world that never fills",
        _NUMBER,
        has_gpus,
        up=_NUMBER,
        gpus_gone=_GPUS,
    ),
    _check(
        "P09",
        "GPUs in use",
        "warn",
        "out of memory at the start, half the speed",
        both(on_each(host_checks.in_use), on_each(host_checks.taken, level="block")),
        has_gpus,
        up=on_each(host_checks.on_them),
    ),
    _check(
        "P10",
        "GPU health",
        "warn",
        "wrong numbers or a slow host, hours later",
        _UNWELL,
        has_gpus,
        up=_UNWELL,
        gpus_well=_UNWELL,
    ),
    _check(
        "P11",
        "NVSwitch fabric",
        "block",
        "a freeze at NCCL's start, without a word",
        gpus_waiting,
        has_nvswitch,
        up=gpus_waiting,
        gpus_well=gpus_waiting,
    ),
    _check("P12", "training address", "block", "a master that cannot listen", pairs.listening, tried_pairs),
    _check(
        "P13",
        "connections to the master",
        "block",
        "`client socket has timed out` after minutes",
        pairs.to_master,
        tried_pairs,
    ),
    _check(
        "P14",
        "connections between hosts",
        "block",
        "a good start, and a first collective that hangs",
        pairs.to_others,
        tried_pairs,
    ),
    _check(
        "P15",
        "interface and route",
        "warn",
        "ranks that dial a container's or another network",
        both(together.routes, together.bound_addresses, on_each(host_checks.link_down, host_checks.interface)),
        are_several,
        up=_INTERFACE_AT_UP,
        start=_LINK_DOWN,
    ),
    _check(
        "P16", "own host name", "warn", "`connectFullMesh failed` with other launchers", on_each(host_checks.own_name)
    ),
    _check(
        "P17", "one machine twice", "warn", "two ranks on one GPU, a master that waits", together.machines, are_several
    ),
    _check("P18", "address family", "block", "hosts that cannot dial each other", together.families, are_several),
    _check(
        "P19",
        "large packets",
        "block",
        "small messages pass, the first gradient hangs",
        both(pairs.large_packets, together.packet_sizes),
        are_several,
    ),
    _check(
        "P20",
        "speed of links",
        "warn",
        "steps that take many times as long as on one host",
        both(_CARD, pairs.speeds, pairs.latencies),
        are_several,
        up=_CARD,
        start=_CARD,
    ),
    _check("P21", "InfiniBand", "warn", "`ibv_reg_mr: Cannot allocate memory`", on_each(_locked), has_rdma),
    _check(
        "P22", "GPU to GPU", "warn", "100 % GPU use and no progress", on_each(host_checks.peer_access), has_several_gpus
    ),
    _check(
        "P23",
        "an all-reduce",
        "block",
        "problems that no other check can see",
        pairs.collective,
        tried_collective,
    ),
    _check("P24", "work folder", "block", "a job that cannot be put there", _WORKDIR, up=_WORKDIR),
    _check(
        "P25", "space", "warn", "a checkpoint or a loader that fails for want of space", _SPACE, up=_SPACE, start=_SPACE
    ),
    _check("P26", "limits of a session", "warn", "`too many open files` in mid-run", on_each(host_checks.limits)),
    _check(
        "P27",
        "clock",
        "warn",
        "logs that merge out of order",
        together.clocks,
        up=together.clocks,
        start=together.clocks,
    ),
    _check(
        "P28", "variables", "warn", "ranks that choose other algorithms, and hang", together.environments, are_several
    ),
    _check("P29", "left-over variables", "warn", "a launcher that obeys another job's", on_each(host_checks.leftovers)),
    _check(
        "P30",
        "outliving the login",
        "block",
        "a job that ends when you log out",
        both(on_each(host_checks.outlives), on_each(host_checks.may_end_with_it, level="warn")),
    ),
    _check("P31", "running jobs", "warn", "two jobs on one GPU", together.running),
    _check(
        "P32",
        "memory and control groups",
        "warn",
        "a rank that is killed without a word (137)",
        on_each(host_checks.group_limits, host_checks.memory),
        up=_MEMORY,
        start=_MEMORY,
    ),
    _check("P33", "even split", "warn", "a last batch that waits for ever", together.shares, are_several),
    _check("P34", "data", "warn", "`Dataset not found` on some hosts", together.data, are_several),
    _check(
        "P35",
        "one work folder",
        "block",
        "hosts that write over each other's logs",
        together.work_folders,
        are_several,
        up=_of_groups(together.work_folders),
    ),
    _check(
        "P36",
        "reboots",
        "warn",
        "a host that leaves in mid-run",
        on_each(host_checks.reboot, host_checks.young),
        up=_YOUNG,
        start=_YOUNG,
    ),
)


def checks_at(moment: Literal["up", "start", "gpus_gone", "gpus_well"]) -> tuple[Check, ...]:
    return tuple(_part(check, check.when[moment]) for check in CHECKS if moment in check.when)


def _part(check: Check, judge: Judge) -> Check:
    return check if judge is check.judge else replace(check, judge=judge, applies=always)


# Evaluation.


@dataclass(frozen=True)
class Finding:
    """A problem. where: hosts, or start and end of a link."""

    id: str
    name: str
    level: Level
    where: tuple[str, ...]
    seen: str
    causes: str
    remedy: str
    is_way: bool = False

    @property
    def line(self) -> str:
        """All in one line."""
        return ": ".join(part for part in (", ".join(self.where), self.seen, self.remedy) if part)


@dataclass(frozen=True)
class Diagnosis:
    """findings: blocking ones first, else in the table's order. passed: ids. not_applicable: reasons by id."""

    seen: Observations
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_applicable: Mapping[str, str]

    @property
    def blocks(self) -> bool:
        return any(finding.level == "block" for finding in self.findings)

    @property
    def summary(self) -> str:
        blocking = sum(finding.level == "block" for finding in self.findings)
        which = f" ({blocking} {'blocks' if blocking == 1 else 'block'})" if blocking else ""
        kinds = len({finding.id for finding in self.findings})
        of_kinds = f" of {counted(kinds, 'kind')}" if kinds < len(self.findings) else ""
        found = f"{counted(len(self.findings), 'finding')}{of_kinds}{which}"
        counts = f"{counted(len(self.passed), 'check')} passed, {found}"
        reasons = dict[str, list[str]]()
        for id, why in self.not_applicable.items():
            reasons.setdefault(why, []).append(id)
        why_not = "; ".join(f"{why}: {', '.join(ids)}" for why, ids in reasons.items())
        return f"{counts}, {len(self.not_applicable)} not applicable" + (f" ({why_not})" if why_not else "")


def judge(seen: Observations, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    findings, passed, not_applicable = list[Finding](), list[str](), dict[str, str]()
    for check in checks:
        if why := check.applies(seen):
            not_applicable[check.id] = why
            continue
        found = [_finding(check, sight) for sight in check.judge(seen)]
        findings += found
        if not found:
            passed.append(check.id)
    findings.sort(key=lambda finding: finding.level != "block")
    return Diagnosis(seen, tuple(findings), tuple(passed), not_applicable)


def finding_of(id: str, sight: RawFinding) -> Finding:
    """A finding from elsewhere, under the name of its check."""
    return _finding(next(check for check in CHECKS if check.id == id), sight)


def _finding(check: Check, sight: RawFinding) -> Finding:
    return Finding(
        id=check.id,
        name=check.name,
        level=sight.level or check.level,
        where=sight.where,
        seen=sight.seen,
        causes=check.causes,
        remedy=sight.remedy,
        is_way=sight.is_way,
    )
