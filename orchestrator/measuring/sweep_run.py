"""Runs a sweep: a thread per slot starts and follows its jobs, one after the other; the main thread collects them.

    run = SweepRun(home, store, record, slots, jobs, estimates, say)
    for now in run.course(controller, out):     once a second, until every trial is over
        now.record.trials, now.live

Each trial's job is recorded before it starts. A job whose host gives no answer for LOST_S goes to another slot, and is
ended once its host is back. Leaving ends only this process's part: the jobs run on, and `SweepRun` of the same record
takes them up again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.controller import Controller, opened
from orchestrator.errors import HostError, HostsError, OrchError
from orchestrator.jobs.follow import since_s
from orchestrator.jobs.job_store import FINAL_STATES, JobRecord
from orchestrator.jobs.live_stats import Gauge, JobNow
from orchestrator.jobs.retry_policy import judge
from orchestrator.jobs.running import RunningJob
from orchestrator.measuring.sweep_slots import Slot
from orchestrator.paths import Home
from orchestrator.planning.request import ParsedJob
from orchestrator.sweeps.estimates import Estimates, Observed
from orchestrator.sweeps.median_rule import is_bad
from orchestrator.sweeps.packing import Placed, pack
from orchestrator.sweeps.sweep_record import SweepRecord, SweepStore, Trial
from orchestrator.transport.fanout import errors

LOST_S = 20.0
"""After this time without an answer of a host, its job is given to another."""
FIRST_S, AGAIN_S = 2.0, 30.0
"""Before a look at a host that could not run a job; doubles with each refusal in a row."""
PLAN_S = 5.0
"""Between two plans while a slot is idle and jobs wait."""
OVERDUE = 0.25
"""A job that takes longer than predicted is assumed to take this part of its time so far in addition."""
MOST_LOST = 3
"""Attempts of one trial that hosts may cost."""
COLLECTS = 3


@dataclass(frozen=True)
class SweepNow:
    record: SweepRecord
    live: Mapping[int, JobNow]
    """By running trial."""
    away: Mapping[str, str]
    """Slots that cannot run a job now, and why."""
    planned: tuple[Placed, ...]
    """The waiting trials, from now on."""


@dataclass
class _Running:
    """A trial's job under way. history: steps, and the loss at each."""

    slot: str
    began_s: float
    now: JobNow | None = None
    first_step_s: float | None = None
    last_step_s: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list)
    is_to_stop: bool = False

    def sees(self, now: JobNow) -> None:
        before, self.now = (self.now.step if self.now else None), now
        if now.step is not None and now.step != before:
            self.last_step_s = time.monotonic()
            self.first_step_s = self.first_step_s or self.last_step_s
            if now.loss is not None:
                self.history.append((now.step, now.loss))


class SweepRun:
    """say: prints a line; called from any thread."""

    def __init__(
        self,
        home: Home,
        store: SweepStore,
        record: SweepRecord,
        slots: Sequence[Slot],
        jobs: Mapping[str, ParsedJob],
        estimates: Estimates,
        say: Callable[[str], None],
    ) -> None:
        self._home, self._store, self._record = home, store, record
        self._slots, self._jobs, self._estimates, self._say = slots, jobs, estimates, say
        self._changed = threading.Condition()
        self._leaving = False
        self._bug: BaseException | None = None
        self._running: dict[int, _Running] = {}
        self._histories: dict[str, list[tuple[int, float]]] = {}
        self._planned: tuple[Placed, ...] = ()
        self._planned_s = 0.0
        self._away: dict[str, str] = {}
        self._left: dict[str, list[str]] = {slot.name: [] for slot in slots}
        """Jobs to end on a slot's hosts once they answer again."""
        self._found: dict[str, Trial] = {}
        """By slot: a job of an earlier controller, to be followed first."""
        self._collects: dict[int, int] = {}
        self._refusals: dict[str, int] = {}
        """By slot: starts since the last that succeeded."""

    @property
    def left(self) -> tuple[str, ...]:
        """Jobs that may still run on hosts that give no answer."""
        return tuple(job for jobs in self._left.values() for job in jobs)

    # ---- the main thread ------------------------------------------------------------------------------------------

    def course(self, controller: Controller, out: Path) -> Generator[SweepNow, None, None]:
        self._take_up(controller)
        self._plan_anew()
        threads = [threading.Thread(target=self._work, args=(slot,), name=f"sweep-{slot.name}") for slot in self._slots]
        try:
            for thread in threads:
                thread.start()
            while not (self._record.is_over and not self._uncollected()):
                yield self._now()
                self._collect_one(controller, out)
                self._stop_bad()
                with self._changed:
                    self._changed.wait(1.0)
                if self._bug:
                    raise self._bug
            yield self._now()
        finally:
            with self._changed:
                self._leaving = True
                self._changed.notify_all()
            for thread in threads:  # a start is finished or undone before this process ends
                if thread.ident:
                    thread.join()

    def _now(self) -> SweepNow:
        with self._changed:
            live = {number: each.now for number, each in self._running.items() if each.now}
            return SweepNow(self._record, live, dict(self._away), self._planned)

    def _take_up(self, controller: Controller) -> None:
        """Jobs that an earlier controller of this sweep has left."""
        controller.jobs.settle_half_starts()
        slots = {slot.name: slot for slot in self._slots}
        for trial in self._record.trials:
            if trial.state != "running" or trial.job is None:
                continue
            try:
                job = controller.jobs.of(controller.store.plan(trial.job))
                record = job.refresh()
            except OrchError:  # the controller ended before it began this job
                self._change(trial, state="waiting", job=None, slot=None)
                continue
            if record.state == "cancelled" and record.ended is None:  # a half-done start, undone
                self._change(trial, state="waiting", job=None, slot=None, lost=(*trial.lost, trial.job))
            elif record.state in FINAL_STATES:
                self._ended(trial, record, None)
            elif trial.slot in slots and slots[trial.slot].nodes == tuple(node.name for node in job.plan.nodes):
                self._found[trial.slot] = trial
            else:
                job.cancel()
                self._change(trial, state="waiting", job=None, slot=None, lost=(*trial.lost, trial.job))

    def _uncollected(self) -> list[Trial]:
        return [
            trial
            for trial in self._record.trials
            if trial.state in ("succeeded", "stopped")
            and not trial.is_collected
            and self._collects.get(trial.number, 0) < COLLECTS
        ]

    def _collect_one(self, controller: Controller, out: Path) -> None:
        for trial in self._uncollected()[:1]:
            assert trial.job  # noqa: S101 - it has ended
            self._collects[trial.number] = self._collects.get(trial.number, 0) + 1
            try:
                report = controller.collect(controller.jobs.find(trial.job), out)
            except OrchError as error:
                if self._collects[trial.number] == COLLECTS:
                    self._say(f"{trial.job} is not collected: {error}")
                continue
            summary = report.summary
            known = {"samples_per_s": summary.samples_per_s, "accuracy": summary.accuracy, "loss": summary.loss}
            found = {name: value for name, value in known.items() if value is not None}
            self._change(trial, is_collected=True, **found)

    def _stop_bad(self) -> None:
        if self._record.sweep.stop != "median":
            return
        with self._changed:
            histories = {**self._histories, **{str(number): each.history for number, each in self._running.items()}}
            for number, each in self._running.items():
                each.is_to_stop |= is_bad(str(number), histories)

    # ---- a thread per slot ----------------------------------------------------------------------------------------

    def _work(self, slot: Slot) -> None:
        try:
            with opened(self._home, say=self._say) as controller:
                controller.shows_setup = lambda progress: self._say(f"{progress.node}: {progress.phase}")
                if trial := self._found.get(slot.name):
                    self._run_one(controller, slot, trial)
                while trial := self._next(slot):
                    self._run_one(controller, slot, trial)
        except BaseException as error:  # for the main thread to raise
            with self._changed:
                self._bug = self._bug or error
                self._changed.notify_all()

    def _next(self, slot: Slot) -> Trial | None:
        """Waits until a trial is planned for this slot; None at the end."""
        with self._changed:
            while not self._leaving and not self._record.is_over:
                mine = next((each for each in self._planned if each.slot == slot.name), None)
                if mine:
                    trial = self._trial(int(mine.job))
                    self._planned = tuple(each for each in self._planned if each is not mine)
                    job = trial.next_job(self._record.id)
                    trial = self._change(trial, state="running", slot=slot.name, job=job, began=time.time())
                    self._running[trial.number] = _Running(slot.name, time.monotonic())
                    return trial
                if any(trial.state == "waiting" for trial in self._record.trials) and self._is_plan_old():
                    self._plan_anew()
                self._changed.wait(1.0)
        return None

    def _is_plan_old(self) -> bool:
        return time.monotonic() > self._planned_s + PLAN_S

    def _run_one(self, controller: Controller, slot: Slot, trial: Trial) -> None:
        with self._changed:
            running = self._running.setdefault(trial.number, _Running(slot.name, time.monotonic()))
        try:
            job = self._job(controller, slot, trial)
            is_lost = self._follow(job, running)
            if self._leaving and job.record.state not in FINAL_STATES:
                return
        except (HostError, HostsError) as error:
            self._without(controller, slot, trial, str(error))
            return
        except OrchError as error:
            self._change(trial, state="failed", why=error.message)
            return
        finally:
            with self._changed:
                self._running.pop(trial.number, None)
        if is_lost:
            self._left[slot.name].append(job.id)
            self._without(controller, slot, trial, "gives no answer", lost=(*trial.lost, job.id))
        else:
            self._ended(trial, job.record, running)

    def _job(self, controller: Controller, slot: Slot, trial: Trial) -> RunningJob:
        """The trial's job: an earlier controller's, or a new one."""
        assert trial.job  # noqa: S101 - it is recorded before
        if self._found.pop(slot.name, None):
            return controller.jobs.of(controller.store.plan(trial.job))
        asked = self._jobs[trial.key]
        request = replace(asked.request, job=trial.job)
        plan = controller.choice.plan(slot.cluster, request, asked.code, slot.nodes)
        for note in plan.notes:
            self._say(note)
        job = controller.launch(plan, asked.blob)
        self._refusals.pop(slot.name, None)
        return job

    def _follow(self, job: RunningJob, running: _Running) -> bool:
        """Until its end, or ours. Returns whether its hosts give no answer."""
        silent_since: float | None = None
        for gauge in job.gauged(Gauge(job.plan, job.record)):
            now_s = time.monotonic()
            now = gauge.now(since_s(gauge.record.started), now_s)
            with self._changed:
                running.sees(now)
            is_silent = any(host.silent for host in now.hosts) and now.record.state not in FINAL_STATES
            silent_since = (silent_since or now_s) if is_silent else None
            if self._leaving or (silent_since and now_s > silent_since + LOST_S):
                return not self._leaving
            if running.is_to_stop:
                job.cancel()
                break
        return job.record.state not in FINAL_STATES

    def _ended(self, trial: Trial, record: JobRecord, running: _Running | None) -> None:
        judged = judge(record)
        if judged and judged.whose == "hosts" and len(trial.lost) + 1 < MOST_LOST:
            self._say(f"{record.id} is started again: {judged.why}")
            self._change(trial, state="waiting", job=None, slot=None, lost=(*trial.lost, record.id))
            return
        if record.state == "cancelled":
            stopped = running is not None and running.is_to_stop
            why = "worse than the median of the others" if stopped else "cancelled by a person"
            self._change(trial, state="stopped" if stopped else "cancelled", why=why, **_figures(trial, running))
            return
        state = "succeeded" if record.state == "succeeded" else "failed"
        if running and state == "succeeded" and trial.slot:
            trained = (running.first_step_s, running.last_step_s)
            trained_s = trained[1] - trained[0] if trained[0] and trained[1] and trained[1] > trained[0] else None
            took_s = time.time() - (trial.began or time.time())
            with self._changed:
                self._estimates.learn(Observed(trial.key, trial.slot, took_s, trained_s))
                self._histories[trial.key] = running.history
        self._change(trial, state=state, why=judged.why if judged else "", **_figures(trial, running))

    def _without(self, controller: Controller, slot: Slot, trial: Trial, why: str, **update: object) -> None:
        """Gives the trial back, and waits until the slot's hosts answer again."""
        with self._changed:
            self._away[slot.name] = why
            self._change(trial, state="waiting", job=None, slot=None, **update)
        self._say(f"{slot.name} is left out for now: {why}")
        wait_s = min(AGAIN_S, FIRST_S * 2 ** self._refusals.get(slot.name, 0))
        self._refusals[slot.name] = self._refusals.get(slot.name, 0) + 1
        while self._rests(wait_s):
            wait_s, nodes = AGAIN_S, [node for node in slot.cluster.nodes if node.name in slot.nodes]
            if not errors(controller.connections.open(nodes)):
                with suppress(OrchError):
                    for job in self._left[slot.name]:
                        controller.jobs.of(controller.store.plan(job)).cancel()
                    self._left[slot.name].clear()
                    break
        with self._changed:
            del self._away[slot.name]
            self._plan_anew()

    def _rests(self, wait_s: float) -> bool:
        """False at the end of the sweep."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while not self._leaving and not self._record.is_over:
                if (left_s := until_s - time.monotonic()) <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    # ---- under the lock -------------------------------------------------------------------------------------------

    def _trial(self, number: int) -> Trial:
        return next(trial for trial in self._record.trials if trial.number == number)

    def _change(self, trial: Trial, **update: object) -> Trial:
        with self._changed:
            changed = self._trial(trial.number).model_copy(update=update)
            self._record = self._record.with_trial(changed)
            self._store.save(self._record)
            if changed.is_over or changed.state == "waiting":
                self._plan_anew()
            self._changed.notify_all()
        return changed

    def _plan_anew(self) -> None:
        with self._changed:
            waiting = [trial.key for trial in self._record.trials if trial.state == "waiting"]
            ready = {slot.name: self._ready_s(slot.name) for slot in self._slots if slot.name not in self._away}
            self._planned = pack(waiting, ready, self._estimates.takes_s) if waiting else ()
            self._planned_s = time.monotonic()
            self._changed.notify_all()

    def _ready_s(self, slot: str) -> float:
        for number, running in self._running.items():
            if running.slot == slot:
                so_far_s = time.monotonic() - running.began_s
                left_s = running.now.progress.left_s if running.now else None
                expected_s = self._estimates.takes_s(str(number), slot) - so_far_s
                return max(OVERDUE * so_far_s, expected_s) if left_s is None else left_s
        return 0.0


def _figures(trial: Trial, running: _Running | None) -> dict[str, object]:
    now = running.now if running else None
    seen = {"step": now.step, "samples_per_s": now.samples_per_s, "loss": now.loss} if now else {}
    return {"seconds": time.time() - trial.began if trial.began and running else None, **seen}
