"""The checks that `orch up` and `orch run` make by themselves: what costs no further question, in doctor's words. Pure.

judge(seen, AT_UP).findings         # of hosts that were just probed
judge(seen, AT_START).findings      # of what may have changed since, as the answers to `prepare` say it
judge(seen, GPUS_THERE).findings    # the same of GPUs, which a start asks about before: why some are gone,
judge(seen, GPUS_WELL).findings     # and how those are that it is to have

The rest takes other hosts, a second login or minutes of a host's time: `orch doctor`.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.doctor import gpus, system, together
from orchestrator.doctor.seen import Check, Judge
from orchestrator.doctor.table import CHECKS, always, blocks, both, on_each, warns
from orchestrator.hosts import checks

_ROWS = {check.id: check for check in CHECKS}


def _row(id: str, judge: Judge) -> Check:
    """A check of the table, as far as this judges it."""
    return replace(_ROWS[id], judge=judge, applies=always)


def _of_groups(judge: Judge) -> Judge:
    """Alone, or with other hosts, such a host is of use: `orch run` refuses only those together."""
    return lambda seen: (replace(sight, level="warn") for sight in judge(seen))


_LOGIN = (_row("P01", on_each(system.login, level="warn")), _row("P03", on_each(system.login_limits)))
_HARDWARE = (
    _row("P20", on_each(system.card)),
    _row("P25", on_each(warns(checks.space))),
    _row("P27", together.clocks),
    _row("P32", on_each(system.memory)),
    _row("P36", on_each(system.young)),
)
AT_START = (*_LOGIN, _row("P15", on_each(system.link_down)), *_HARDWARE)
GPUS_THERE = (_row("P06", on_each(blocks(checks.driver))), _row("P08", on_each(blocks(checks.gpus))))
GPUS_WELL = (_row("P10", on_each(gpus.health)), _row("P11", on_each(gpus.fabric)))
AT_UP = (
    *_LOGIN,
    _row("P04", both(on_each(blocks(checks.python, checks.torch)), on_each(warns(checks.packages), level="warn"))),
    _ROWS["P06"],
    _row("P07", on_each(gpus.kernels)),
    _ROWS["P08"],
    _row("P09", on_each(gpus.on_them)),
    *GPUS_WELL,
    _row("P15", both(_of_groups(together.bound_addresses), on_each(system.link_down, warns(checks.interface)))),
    _row("P24", on_each(blocks(checks.workdir))),
    _row("P35", _of_groups(together.work_folders)),
    *_HARDWARE,
)
