"""What a person does on the page, by the names of its forms: each is what a command does.

acts.ACTS["release"](controller, cluster, {"node": "a2000"})        what came of it, in a sentence
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.consent import is_allowed, local_commands
from orchestrator.hosts.file_again import node_with_defaults
from orchestrator.hosts.inventory import Inventory
from orchestrator.hosts.inventory_file import node_from_keys
from orchestrator.hosts.yamlfile import resolve_scalar
from orchestrator.planning.request import Words, parse_pairs, read_wish

Form = Mapping[str, str]


def add(controller: Controller, cluster: Cluster, form: Form) -> str:
    """A host by the keys that the form has fields for, and more as KEY=VALUE words."""
    given = {
        key: form[key].strip() for key in ("name", "host", "gpu", "bandwidth", "note") if form.get(key, "").strip()
    }
    pairs = {**given, **parse_pairs(shlex.split(form.get("more", "")), "KEY=VALUE")}
    values = {key: resolve_scalar(value) for key, value in pairs.items()}
    if node_from_keys({"name": "any", "host": "any", **values}, "the form").prepare:
        raise UsageError("orch keeps no `prepare` of its own", "write the node into the inventory file")
    made, _ = node_with_defaults(cluster, values)
    commands = local_commands(Inventory(cluster=cluster.name, nodes=(made,), file=cluster.file))
    if commands and not is_allowed(controller.store.home, commands):
        raise UsageError(f"{made.name} would run commands on this machine", "add it by `orch node add`, which asks")
    found = controller.clusters.add_node(cluster, values, made)
    return "; ".join([f"{made.name} was added", *found.warnings])


def release(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.release_node(cluster, form["node"], restore=False)
    return f"{form['node']} is released: it gets no job until it is restored"


def restore(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.release_node(cluster, form["node"], restore=True)
    return f"{form['node']} takes part again"


def remove(controller: Controller, cluster: Cluster, form: Form) -> str:
    controller.clusters.remove_node(cluster, form["node"])
    return f"{form['node']} was taken out of the cluster; the inventory file stays as it is"


def master(controller: Controller, cluster: Cluster, form: Form) -> str:
    found = controller.clusters.pin_master(cluster, form["node"] or None)
    return f"master: {found.master_reason}"


def run(controller: Controller, cluster: Cluster, form: Form) -> str:
    """An experiment, or a script of this machine with its arguments."""
    command, exp = tuple(shlex.split(form.get("script", ""))), form.get("exp") or None
    words = Words(None if command else exp, tuple(shlex.split(form.get("settings", ""))), command=command)
    wish = read_wish(words)
    plan = controller.plan(cluster, wish.request, wish.code, cluster.names(form.get("nodes") or None))
    return f"started {controller.launch(plan, wish.blob).id}"


def cancel(controller: Controller, cluster: Cluster, form: Form) -> str:
    job = controller.jobs.find(form["job"])
    _, stayed = job.cancel()
    if stayed:
        raise OrchError(f"{job.id} may still be running: {'; '.join(stayed)}", "`orch reap` lists what is left")
    return f"{job.id} was ended on every host"


ACTS: dict[str, Callable[[Controller, Cluster, Form], str]] = {
    act.__name__: act for act in (add, release, restore, remove, master, run, cancel)
}
