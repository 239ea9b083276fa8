"""What a person does on the page, by the names of its forms: each is what a command does.

acts.ACTS["release"](controller, cluster, {"node": "a2000"})        what came of it, in a sentence
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.consent import not_allowed
from orchestrator.hosts.file_again import keys_of_new_node, node_with_defaults
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import Wish, Words, parse_pairs, read_wish, refuse_unless_one

Form = Mapping[str, str]


def add(controller: Controller, cluster: Cluster, form: Form) -> str:
    """A host by the keys that the form has fields for, and more as KEY=VALUE words."""
    given = {key: form[key].strip() for key in ("host", "gpu", "bandwidth", "note") if form.get(key, "").strip()}
    pairs = {**given, **parse_pairs(_words(form, "more"), "KEY=VALUE")}
    keys = keys_of_new_node(form.get("name", "").strip(), pairs)
    new, _ = node_with_defaults(cluster, keys)
    if not_allowed(controller.store.home, [new]):
        raise UsageError(f"{new.name} would run commands on this machine", "add it by `orch node add`, which asks")
    found = controller.clusters.add_node(cluster, keys, new)
    return "; ".join([f"{new.name} was added", *found.warnings])


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
    wish, only = _wished(cluster, form)
    plan = controller.start(cluster, wish, only).plan
    return "; ".join([f"started {plan.job}", *plan.notes, *(f"{one.words}: {one.command}" for one in plan.faster)])


def planned(controller: Controller, cluster: Cluster, form: Form) -> tuple[LaunchPlan, bytes]:
    """What `run` would start, and the files to ship."""
    wish, only = _wished(cluster, form)
    return controller.choice.plan(cluster, wish.request, wish.code, only), wish.blob


def _wished(cluster: Cluster, form: Form) -> tuple[Wish, list[str]]:
    """An experiment, or a script of this machine with its arguments; and on which nodes."""
    command, exp = _words(form, "script"), form.get("exp") or None
    refuse_unless_one(exp, command, "choose an experiment, or give a script")
    words = Words(exp, _words(form, "settings"), command=command)
    return read_wish(words), cluster.names(form.get("nodes") or None)


def cancel(controller: Controller, cluster: Cluster, form: Form) -> str:
    if waited := controller.queue.cancel(form["job"]):
        return f"{waited} is out of the queue; nothing of it has run"
    job = controller.jobs.find(form["job"])
    _, stayed = job.cancel()
    if stayed:
        raise OrchError(f"{job.id} may still be running: {'; '.join(stayed)}", "`orch reap` lists what is left")
    return f"{job.id} was ended on every host"


def _words(form: Form, field: str) -> tuple[str, ...]:
    """As a shell would cut what was typed there. Raises UsageError."""
    try:
        return tuple(shlex.split(form.get(field, "")))
    except ValueError as error:
        raise UsageError(f"{field}: {form[field]}: {error}", "close each quote that is opened") from error


ACTS: dict[str, Callable[[Controller, Cluster, Form], str]] = {
    act.__name__: act for act in (add, release, restore, remove, master, run, cancel)
}
NEEDED: dict[str, str] = {**dict.fromkeys(("release", "restore", "remove", "master"), "node"), "cancel": "job"}
"""The field without which a form is none."""
