"""Settings as the ranks used them, beside what was asked for. Pure.

    used, asked = settings_used(plan, starts, changes)       # {"num_workers": 2, ...}, {"num_workers": -1}

starts: each rank's last `start` event, which holds its settings as they turned out on its host (`auto` is a name by
then). changes: the `setting` events that followed it. Nothing in either is taken on trust. Where ranks
differ the value is a sentence: `0 on a, 2 on b`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.text import one_line

NAMED = 4
"""How many of the hosts with the same value are named."""
CHANGES = 100
"""So many `setting` events of a rank are read."""
Starts = Mapping[int, Mapping[str, Any]]
Changes = Mapping[int, Sequence[Mapping[str, Any]]]


def settings_used(plan: LaunchPlan, starts: Starts, changes: Changes) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings of the plan, and of those that turned out otherwise what the plan has."""
    used = {key: _used(key, value, plan, starts, changes) for key, value in plan.settings.items()}
    return used, {key: value for key, value in plan.settings.items() if used[key] != value}


def _used(key: str, asked: Any, plan: LaunchPlan, starts: Starts, changes: Changes) -> Any:
    hosts: dict[Any, list[str]] = {}
    for node in plan.nodes:
        for rank in node.rank_numbers:
            settings = starts.get(rank, {}).get("settings")
            value = settings.get(key) if isinstance(settings, Mapping) else None
            later = [change.get("value") for change in changes.get(rank, ()) if change.get("name") == key]
            value = later[-1] if later else value
            if isinstance(value, (str, int, float)) and not isinstance(asked, (dict, list)):
                value = one_line(value) if isinstance(value, str) else value
                hosts.setdefault(value, []).append(node.name)
    if len(hosts) < 2:
        return next(iter(hosts), asked)
    return ", ".join(f"{value} on {_names(list(dict.fromkeys(names)))}" for value, names in hosts.items())


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
