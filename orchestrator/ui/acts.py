"""What a person does on the page, by the names of its forms: each is what a command does.

acts.ACTS["release"](controller, cluster, {"node": "a2000"})        what came of it, in a sentence
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.consent import not_allowed
from orchestrator.hosts.file_again import keys_of_new_node, node_with_defaults
from orchestrator.planning.job_spec import FILE, PAGE_FIELDS, checked, from_text, key_of
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.request import parse_pairs
from orchestrator.starting.retries import Asked

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
    plan = controller.start(_asked(controller, cluster, form)).plan
    return "; ".join([f"started {plan.job}", *plan.notes, *(f"{one.words}: {one.command}" for one in plan.faster)])


def planned(controller: Controller, cluster: Cluster, form: Form) -> tuple[LaunchPlan, bytes]:
    """The plan that `run` would start, and the files to ship."""
    asked = _asked(controller, cluster, form)
    return controller.plan(asked), asked.job.blob


def _asked(controller: Controller, cluster: Cluster, form: Form) -> Asked:
    """An experiment, or a script of this machine with its arguments."""
    command = _words(form, "script")
    values = {name: _value(name, form.get(key_of(name), "")) for name in ("exp", "settings", "nodes", *PAGE_FIELDS)}
    program = {"script": command[0], "args": command[1:] or None} if command else {}
    return controller.read(checked({"cluster": cluster.name, **values, **program}, FILE))


def _value(name: str, text: str) -> Any:
    try:
        return from_text(name, text)
    except ValueError as error:
        raise UsageError(f"{key_of(name)}: {text}: {error}", "close each quote that is opened") from error


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
