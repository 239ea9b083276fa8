"""What a shell offers to complete: names that this machine remembers. Reads files alone and asks no host.

Used as click's `shell_complete`: each takes context, parameter and the word begun, gives the words that fit.
"""

from __future__ import annotations

import os
from contextlib import suppress

import click

from orchestrator.errors import UsageError
from orchestrator.paths import Home


def job_ids(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Newest first, by their ids; and `latest`."""
    return _fitting(["latest", *sorted(_jobs(), reverse=True)], begun)


def cluster_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    return _fitting(sorted(path.stem for path in Home.default().clusters.glob("*.json")), begun)


def node_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The nodes of the cluster chosen in this line, else of the current one; after a comma the next of several."""
    before, comma, last = begun.rpartition(",")
    return [before + comma + name for name in _fitting(_nodes(context), last)]


def node_ranges(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """`2:3` and the like: up to the number of nodes chosen in this line, else of all."""
    from orchestrator.hosts.node_names import names_in

    known = _nodes(context)
    with suppress(UsageError):
        known = names_in(context.params.get("nodes"), known, "the cluster") or known
    most = len(known)
    return _fitting([f"{least}:{most}" for least in range(1, most + 1)], begun)


def experiments(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from trainer.shared.config import EXPERIMENTS

    return _fitting(list(EXPERIMENTS), begun)


def torch_versions(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Newest first."""
    from orchestrator.hosts.wheels import RELEASES

    return _fitting(list(reversed(RELEASES)), begun)


def setting_pairs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """`KEY=`, then the values of a key that has a choice."""
    from trainer.shared.config import fields_of
    from trainer.shared.fields import declared
    from trainer.shared.shares import WORDS

    fields = fields_of(context.params.get("exp") or "")
    key, equals, value = begun.partition("=")
    if not equals:
        return [f"{name}=" for name in _fitting([name for name in fields if name != "exp"], key)]
    choices = declared(fields[key]).choices if key in fields else ()
    if key == "strategy":
        choices = (*choices, "auto")  # strategy=auto is orch's own
    if key == "shares":
        choices = WORDS
    return [f"{key}={choice}" for choice in _fitting(list(choices), value)]


def _nodes(context: click.Context) -> list[str]:
    import json

    home = Home.default()
    with suppress(OSError, ValueError, KeyError, TypeError):
        terminals = os.environ.get("ORCH_CLUSTER")  # `store` knows it too, and is slow to load
        cluster = context.params.get("cluster") or terminals or home.current_cluster.read_text().strip()
        return [node["name"] for node in json.loads(home.cluster(cluster).read_text())["nodes"]]
    return []


def _jobs() -> list[str]:
    return [path.parent.name for path in Home.default().jobs.glob("*/job.json")]


def _fitting(words: list[str], begun: str) -> list[str]:
    return [word for word in words if word.startswith(begun)]


def studies(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from orchestrator.studies import study_names

    return _fitting(study_names(), begun)
