"""What the hosts see of ranks that print nothing or never met, put together over a whole job.

    stall_of(plan, records, known)  # Stall(quiet_s=180, ranks=(...)); None while some rank prints
    is_due(stall)                   # whether somebody should ask why (`jobs/stall.py`)
    answered(record, verdict)       # the job's record with what came of it
    joined(plan, records)           # False: none of several ranks ever met another
    News(plan).of(record)           what to say to a person who follows the job

records: the supervisors' (`agent.json`), by host; nothing in them is taken on trust. A job that prints nothing may be
healthy: it evaluates, compiles, unpacks or saves. Nobody is warned of one that was asked and gets on.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.jobs.job_store import FINAL_STATES, Answer, JobRecord, Stall, StillRank, Verdict
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import format_duration

if TYPE_CHECKING:
    from orchestrator.jobs.live import Standstill


DOES = {
    "waits": "waiting, with no CPU use",
    "disk": "waiting in the kernel, for a disk perhaps",
    "stopped": "stopped by a signal",
    "busy": "using the CPU",
    "ended": "ended",
}
"""In the order in which messages list them."""
NAMED = 4
MOST_S, MOST_TIME_S = 1e9, 1e11
AGAIN = 2
"""Who looked healthy is asked again after so many times as long: after 1, 2, 4, 8 minutes, and so on."""


def stall_of(plan: LaunchPlan, records: Mapping[str, Any], known: Stall | None = None) -> Stall | None:
    """None unless every host says that its ranks are quiet, and some rank runs. known: the last one that was seen; if
    it is the same, what was answered still counts.
    """
    found, quiet_s, since = list[StillRank](), math.inf, list[float]()
    for node in plan.nodes:
        record = records.get(node.name)
        record = record if isinstance(record, Mapping) else {}
        does = [_does(record, rank) for rank in node.rank_numbers]
        if None in does:
            return None
        found += [StillRank(node=node.name, rank=n, does=d) for n, d in zip(node.rank_numbers, does, strict=True) if d]
        since.append(_seconds(record.get("quiet_since"), MOST_TIME_S))
        if set(does) != {"ended"}:
            quiet_s = min(quiet_s, _seconds(record.get("quiet_s"), MOST_S))
    if all(rank.does == "ended" for rank in found):
        return None
    stall = Stall(quiet_s=quiet_s, ranks=tuple(found), since=tuple(since))
    return stall.model_copy(update={"answer": known.answer}) if known and _is_same(stall, known) else stall


def _is_same(now: Stall, before: Stall) -> bool:
    """A host whose ranks have ended no longer says since when they were quiet."""
    return len(now.since) == len(before.since) and all(
        new in (0.0, old) for new, old in zip(now.since, before.since, strict=True)
    )


def is_due(stall: Stall | None) -> bool:
    """Whether somebody should ask why: once for each stall, and again, ever more seldom, while it looks healthy."""
    if stall is None or stall.answer is None:
        return stall is not None
    return not stall.answer.verdict.is_alarm and stall.quiet_s >= AGAIN * stall.answer.quiet_s


def asks_for_it(record: JobRecord) -> bool:
    """The same of a job that runs."""
    return record.state == "running" and is_due(record.stall)


def answered(record: JobRecord, verdict: Verdict) -> JobRecord:
    """With this verdict, if its stall still lasts."""
    if record.stall is None or record.state in FINAL_STATES:
        return record
    answer = Answer(verdict=verdict, quiet_s=record.stall.quiet_s)
    return record.model_copy(update={"stall": record.stall.model_copy(update={"answer": answer})})


def _seconds(value: Any, most: float) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= most else 0.0


def _does(record: Mapping[str, Any], rank: int) -> Any:
    """None where the rank prints, or nothing is known of it."""
    ranks = record.get("ranks")
    reported = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
    if not isinstance(reported, Mapping):
        return None
    if reported.get("does") in ("waits", "disk", "stopped", "busy"):
        return reported["does"]
    return "ended" if "exit_code" in reported or "signal" in reported else None


def joined(plan: LaunchPlan, records: Mapping[str, Any]) -> bool | None:
    """Whether any rank has met another; None where not every host has said so, or a rank has nobody to meet."""
    met = list[Any]()
    for node in plan.nodes:
        record = records.get(node.name)
        ranks = record.get("ranks") if isinstance(record, Mapping) else None
        for rank in node.rank_numbers:
            one = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
            met.append(one.get("met") if isinstance(one, Mapping) else None)
    if True in met:
        return True
    return False if plan.world_size > 1 and all(one is False for one in met) else None


def stall_words(stall: Stall) -> str:
    """`no output for 3m00s: waiting, with no CPU use: alpha (rank 0); using the CPU: beta (rank 1)`."""
    return f"no output for {format_duration(stall.quiet_s)}: {'; '.join(_groups(stall))}"


def verdict_words(verdict: Verdict) -> str:
    """`missed collective: rank 1 on v100 is idle, ...; it is at train.py:47 in step: time.sleep(1000)`."""
    line = f": {verdict.line}" if verdict.line else ""
    where = f"; it is at {verdict.place}{line}" if verdict.place else ""
    return f"{verdict.kind.replace('-', ' ')}: {verdict.reason}{where}"


def alarm_words(record: JobRecord) -> str:
    """What a person should know of a job that prints nothing; "" where it gets on."""
    stall = record.stall if record.state == "running" else None
    if stall and stall.answer:
        verdict = stall.answer.verdict
        remedy = f"; try: {verdict.remedy}" if verdict.remedy else ""
        return f"{verdict_words(verdict)}{remedy}" if verdict.is_alarm else ""
    return f"{stall_words(stall)}; `orch why {record.id}` names who holds it up" if stall and stall.waits else ""


def standstill(record: JobRecord) -> Standstill:
    """The same for who looks at it all the time: also why it prints nothing although it gets on."""
    from orchestrator.jobs.live import Standstill

    stall = record.stall if record.state == "running" else None
    if stall and stall.answer:
        return Standstill(verdict_words(stall.answer.verdict), stall.answer.verdict.is_alarm)
    return Standstill(stall_words(stall), True) if stall and stall.waits else Standstill()


def _groups(stall: Stall) -> Iterator[str]:
    for does, words in DOES.items():
        hosts: dict[str, list[str]] = {}
        for rank in stall.ranks:
            if rank.does == does:
                hosts.setdefault(rank.node, []).append(str(rank.rank))
        if hosts:
            named = [f"{node} (rank{'s' * (len(of) > 1)} {', '.join(of)})" for node, of in list(hosts.items())[:NAMED]]
            more = f" and {len(hosts) - NAMED} more hosts" if len(hosts) > NAMED else ""
            yield f"{words}: {', '.join(named)}{more}"


class News:
    """What a person who follows a job has not been shown yet."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._shown: object = None
        self._is_alone_shown = self._is_not_finite_shown = False

    def of(self, record: JobRecord) -> Iterator[str]:
        words, stall = alarm_words(record), record.stall
        told = stall and (stall.answer or stall.ranks) if words else None
        if told and told != self._shown:
            yield f"{words}; the job keeps running"
        self._shown = told
        if not self._is_alone_shown and (words := alone_words(self._plan, record)):
            self._is_alone_shown = True
            yield words
        if not self._is_not_finite_shown and record.not_finite:
            self._is_not_finite_shown = True
            yield (
                f"{record.not_finite.words}; the job keeps running"
                if record.state == "running"
                else record.not_finite.words
            )


def alone_words(plan: LaunchPlan, record: JobRecord) -> str:
    """ "" where some rank has met another, or nobody can know; our own trainer always joins."""
    if record.joined is not False or plan.kind == "experiment" or record.state not in ("running", "succeeded"):
        return ""
    return (
        f"the {plan.world_size} ranks joined no process group, each runs by itself: a script joins with "
        "torch.distributed.init_process_group"
    )


def last_words(plan: LaunchPlan, record: JobRecord) -> Iterator[str]:
    """For a report: how the ranks were found last, and whether they met."""
    if record.stall:
        answer = record.stall.answer
        if answer.verdict.is_alarm if answer else record.stall.waits:
            words = verdict_words(answer.verdict) if answer else stall_words(record.stall)
            yield f"How its ranks were seen last: {words}."
    if words := alone_words(plan, record):
        yield f"{words[0].upper()}{words[1:]}."


# Asks why a job prints nothing, beside whoever follows it: once for each stall, and never in the follower's way.
#
# asker = Asker(job.ask_why)
# asker.tell(record)              # with each record that comes: asks, where that is due
# if record := asker.answer():    # the job's record with what came of it, once
#     ...
# asker.is_at_work                # an answer is on its way


class Asker:
    """ask: takes seconds, gives the job's record; called in a thread that nobody waits for."""

    def __init__(self, ask: Callable[[], JobRecord]) -> None:
        self._ask = ask
        self._answers = queue.SimpleQueue[JobRecord | BaseException]()
        self.is_at_work = False

    def tell(self, record: JobRecord) -> None:
        if not self.is_at_work and asks_for_it(record):
            self.is_at_work = True
            threading.Thread(target=self._work, daemon=True, name=f"why-{record.id}").start()

    def answer(self) -> JobRecord | None:
        """None where none has come since the last one. Raises what went wrong."""
        try:
            found = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.is_at_work = False
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        try:
            self._answers.put(self._ask())
        except BaseException as error:  # a bug of ours: whoever follows has to raise it
            self._answers.put(error)


# What ranks printed and a disk did not take, as their hosts report it. Pure.
#
#     [*dropped_words(plan, records)]     ["a: the disk of its work folder was full or failed, 512 bytes of ..."]
#
# records: the supervisors' (`agent.json`), by host; nothing in them is taken on trust.


def dropped_words(plan: LaunchPlan, records: Mapping[str, Any]) -> Iterator[str]:
    """As each host's record says; where that is no longer readable, as the master's says, which heard of it before."""
    heard = _mapping(records.get(plan.master), "dropped")
    for node in plan.nodes:
        ranks = _mapping(records.get(node.name), "ranks")
        for rank in map(str, node.rank_numbers):
            sizes = [_mapping(ranks, rank).get("dropped_bytes"), _mapping(heard, node.name).get(rank)]
            size = max((size for size in sizes if isinstance(size, int)), default=0)
            if 0 < size < 1 << 63:
                lost = f"{size} bytes of what rank {rank} printed are lost"
                yield f"{node.name}: the disk of its work folder was full or failed, {lost}; the job went on"


def _mapping(record: Any, key: str) -> Mapping[str, Any]:
    """What a host says under this key; {} where that is no object."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}
