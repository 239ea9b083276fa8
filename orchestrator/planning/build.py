"""Defines Draft (a job with hosts, GPUs and batch split decided), and turns it into a launch plan. Pure."""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orchestrator.hosts.cards import find_card
from orchestrator.hosts.facts import NodeFacts, cuda_environment
from orchestrator.hosts.inventory import Paced
from orchestrator.planning.launch_plan import CodeFolder, LaunchPlan, NodePlan, System
from orchestrator.planning.nccl import Carrier
from orchestrator.planning.placement import Placement, PlannedNode
from orchestrator.planning.profiles import Profiles, Split
from orchestrator.planning.request import RunRequest, started_by
from trainer.shared.experiments import OWN
from trainer.shared.settings import Settings

RENDEZVOUS_PORT = 29500
MAX_NAMED = 5


def build_plan(draft: Draft) -> LaunchPlan:
    request, master = draft.request, draft.placement.nodes[0]
    _check_amp(draft)
    return LaunchPlan(
        schema=1,
        job=draft.job,
        name=request.spec.name,
        note=request.spec.note,
        exp=request.name,
        kind=request.kind,
        cluster=draft.cluster,
        asked=request.spec.updated(env=dict.fromkeys(request.spec.env)) if request.spec.env else request.spec,
        settings=_document(request, draft.decided),
        master=master.node.name,
        master_address=master.address,
        rendezvous_port=RENDEZVOUS_PORT,
        world_size=sum(placed.ranks for placed in draft.placement.nodes),
        created=draft.created,
        code=draft.code,
        nodes=_node_plans(draft),
        share_gpus=request.spec.share,
        grace_s=request.spec.grace_s,
        time_limit_s=request.spec.time_limit_s,
        measures_steps=not request.spec.no_metrics,
        attempt=request.attempt,
        detached=request.detached,
        notify=request.notify,
        resumes=request.resumes,
        requirements=request.requirements,
        keep=tuple(request.spec.keep),
        backend=draft.carrier.backend,
        checkpoints=_keep_checkpoints(draft),
        nccl=draft.carrier.settings,
        variables=tuple(request.env),
        notes=_notes(draft),
    )


def _check_amp(draft: Draft) -> None:
    """Raises UsageError for a GPU without this arithmetic."""
    for placed in draft.placement.nodes if draft.training else ():
        name = placed.node.gpu or _trained_on(placed)
        card = find_card(name) if name and placed.device == "cuda" and not placed.node.paced else None
        if card and draft.training:
            card.check_amp(draft.training.amp)


def _document(request: RunRequest, decided: Collection[str]) -> dict[str, Any]:
    """The settings for the plan. decided: names of settings that the plan decided."""
    if request.settings and request.kind == "experiment":
        return asdict(request.settings)
    if request.settings:  # a script decides all other settings itself
        return {name: getattr(request.settings, name) for name in ("exp", *request.chosen, *decided)}
    return {} if request.batch is None else {"batch": request.batch}


def _keep_checkpoints(draft: Draft) -> tuple[str, ...]:
    settings, placement = draft.request.training, draft.placement
    if settings is None or not settings.checkpoint_every:
        return ()
    return tuple(filter(None, (placement.nodes[0].node.name, placement.second)))


def _node_plans(draft: Draft) -> tuple[NodePlan, ...]:
    nodes = draft.placement.nodes
    # Two nodes of an inventory may be one machine (`transport: local`): they share its cores.
    on_machine = Counter[str]()
    for placed in nodes:
        on_machine[placed.facts.boot_id] += placed.ranks
    of_split = draft.split.settings
    return tuple(_node_plan(draft, placed, on_machine[placed.facts.boot_id], of_split) for placed in nodes)


def _node_plan(draft: Draft, placed: PlannedNode, ranks_on_machine: int, of_split: Mapping[str, str]) -> NodePlan:
    """of_split: settings for all ranks from the split of the batch."""
    node, request, nodes = placed.node, draft.request, draft.placement.nodes
    command = trainer_arguments(draft, placed.device, of_split) if request.trains else request.command
    wrappers = 1 if request.starter else placed.ranks
    link = placed.facts.training_interface(placed.interface, placed.address)
    return NodePlan(
        name=node.name,
        node_rank=placed.node_rank,
        first_rank=placed.first_rank,
        ranks=placed.ranks,
        address=placed.address,
        interface=placed.interface,
        device=placed.device,
        gpu=node.gpu or _trained_on(placed),
        gpu_uuids=tuple(gpu.uuid for gpu in placed.gpus),
        bandwidth_bps=node.bandwidth_bps,
        interface_bps=link.speed_bps if link and not node.bandwidth_bps else None,
        paced=_pace_of(node.paced) if node.paced else None,
        python=node.python,
        activate=node.activate,
        workdir=node.workdir,
        env=_environment(draft, placed, ranks_on_machine, of_split),
        shares=_own_shares(draft.split, placed),
        solo_samples_per_s=_alone(draft.split, placed),
        torchrun=torchrun_arguments(len(nodes), placed.node_rank, wrappers, nodes[0].address),
        command=started_by(request.starter, command, placed.ranks) if request.starter else command,
        starts_ranks=request.starter is not None,
        prepare=node.prepare,
        system=_system(placed.facts),
        kind=node.kind,
    )


def _trained_on(placed: PlannedNode) -> str | None:
    return next((gpu.name for gpu in placed.gpus or placed.facts.gpus), None) if placed.device == "cuda" else None


def _own_shares(split: Split, placed: PlannedNode) -> tuple[int, ...]:
    ranks = ((placed.node.name, i) for i in range(placed.ranks))
    return tuple(split.shares[rank] for rank in ranks) if split.shares else ()


def _alone(split: Split, placed: PlannedNode) -> float | None:
    """samples/s of the host by itself; None if one of its ranks has no profile."""
    ranks = [(placed.node.name, i) for i in range(placed.ranks)]
    return sum(split.alone[rank] for rank in ranks) if all(rank in split.alone for rank in ranks) else None


def _system(facts: NodeFacts) -> System:
    return System(
        os=facts.os,
        kernel=facts.kernel,
        machine=facts.machine,
        cores=facts.cores,
        memory_bytes=facts.memory_bytes,
        python=facts.python_version,
        driver=facts.gpus[0].driver if facts.gpus else None,
        cuda=facts.torch.cuda if facts.torch else None,
    )


def _environment(
    draft: Draft, placed: PlannedNode, ranks_on_machine: int, of_split: Mapping[str, str]
) -> dict[str, str]:
    """Precedence, lowest first: orch's own variables, the inventory's `env`, the job's.

    ranks_on_machine: they share its cores.
    """
    node, request = placed.node, draft.request
    environment = _for_scripts(draft) if request.kind != "experiment" else {}
    if not request.spec.no_metrics and request.kind != "experiment":
        environment["ORCH_STEP_METRICS"] = "on"
    environment["OMP_NUM_THREADS"] = str(max(1, placed.facts.cores // ranks_on_machine))
    if placed.interface:
        # NCCL takes names as prefixes unless they begin with "=" (NCCL manual, NCCL_SOCKET_IFNAME). Gloo opens one
        # connection per pair of ranks for each name, and spreads buckets over them: a single connection leaves a slow
        # link idle between two buckets.
        environment["NCCL_SOCKET_IFNAME"] = f"={placed.interface}"
        environment["GLOO_SOCKET_IFNAME"] = f"{placed.interface},{placed.interface}"
    environment |= {setting.name: setting.value for setting in draft.carrier.settings}
    if request.settings and not request.trains:
        environment["ORCH_SETTINGS"] = json.dumps(trainer_settings(draft, placed.device, of_split))
    if len(keepers := _keep_checkpoints(draft)) > 1:
        environment["ORCH_CHECKPOINT_COPY"] = keepers[1]
    if node.paced:
        environment["ORCH_PACED"] = json.dumps(node.paced.model_dump(mode="json", exclude_defaults=True))
    # The same GPUs as in the inventory's `env`, by UUID.
    of_gpus = cuda_environment(placed.gpus, node.env) if placed.gpus else {}
    return {**environment, **node.env, **of_gpus, **request.env}


def _for_scripts(draft: Draft) -> dict[str, str]:
    """Without it, Accelerate's CPU ranks join the process group but train separately (tried with 1.15)."""
    return {"ACCELERATE_USE_CPU": "true"} if {placed.device for placed in draft.placement.nodes} == {"cpu"} else {}


# ---- what a person should know --------------------------------------------------------------------------------------


def _notes(draft: Draft) -> tuple[str, ...]:
    request, nodes = draft.request, draft.placement.nodes
    return (
        *request.notes,
        *_public(nodes),
        *draft.code.notes,
        *_paced(nodes),
        *_too_few_samples(draft),
        *draft.carrier.notes,
        *_retried(request, len(nodes)),
        *draft.notes,
    )


def _retried(request: RunRequest, hosts: int) -> tuple[str, ...]:
    if request.attempt is None:
        return ()
    keeps = request.training and request.training.checkpoint_every
    notes = []
    if request.kind == "experiment" and not keeps:
        notes.append("retried without checkpoints: each attempt begins at step 0; set checkpoint_every, like 500")
    if request.detached and hosts > 1:
        notes.append("retried without a controller: each attempt needs all these hosts, and ends if one stays away")
    return tuple(notes)


def _public(nodes: Iterable[PlannedNode]) -> tuple[str, ...]:
    """Anybody who reaches the ports of torch and NCCL, on any address of the host, can use them."""
    found = {placed.node.name: _public_addresses(placed.address, placed.facts) for placed in nodes}
    named = [f"{name} ({', '.join(public)})" for name, public in found.items() if public]
    if not named:
        return ()
    more = f" and {len(named) - MAX_NAMED} more hosts" if len(named) > MAX_NAMED else ""
    words = "training traffic is neither encrypted nor authenticated, and public addresses lead to its ports"
    remedy = "let a firewall admit only these hosts to each other"
    return (f"{words}: {', '.join(named[:MAX_NAMED])}{more}; {remedy}",)


def _public_addresses(training: str, facts: NodeFacts) -> list[str]:
    own = [address.partition("/")[0] for interface in facts.interfaces for address in interface.addresses]
    return [address for address in dict.fromkeys([training, *own]) if ipaddress.ip_address(address).is_global]


def _pace_of(paced: Paced) -> dict[str, Any]:
    document = paced.model_dump(mode="json")
    return document if paced.like else {name: value for name, value in document.items() if name != "like"}


def _paced(nodes: Iterable[PlannedNode]) -> Iterator[str]:
    paced = {placed.node.name: placed.node.paced.like for placed in nodes if placed.node.paced}
    if blank := ", ".join(name for name, like in paced.items() if not like):
        yield f"{blank}: paced, each rank keeps a declared speed and computes nothing: no loss, no accuracy"
    if learning := {name: like for name, like in paced.items() if like}:
        like = next(iter(learning.values()))  # of all: `place` refuses several
        yield f"{', '.join(learning)}: paced like {like}, each rank learns within its time, and sends its bytes"


def _too_few_samples(draft: Draft) -> tuple[str, ...]:
    batch = draft.request.global_batch
    if not batch or batch >= len(draft.placement.ranks):
        return ()
    return ("the global batch has fewer samples than there are ranks: some ranks get none",)


# Command lines in a plan: the trainer's and torchrun's. Pure.


def trainer_arguments(draft: Draft, device: str, of_split: Mapping[str, str]) -> tuple[str, ...]:
    settings = trainer_settings(draft, device, of_split)
    return (*draft.request.command, *(f"--{name}={value}" for name, value in settings.items()))


def trainer_settings(draft: Draft, device: str, of_split: Mapping[str, str]) -> dict[str, str]:
    """The user's settings, unchanged, overridden by the decisions of host and plan.

    of_split: settings from the split of the batch.
    """
    request = draft.request
    of_host = {"device": device, "backend": draft.carrier.backend}
    decided = {name: str(getattr(request.settings, name)) for name in draft.decided}
    ours = {**{name: value for name, value in of_host.items() if name not in request.chosen}, **of_split, **decided}
    theirs = {name: text for name, text in request.chosen.items() if name not in ours}
    return {**theirs, **ours}


def torchrun_arguments(nodes: int, node_rank: int, ranks: int, master_address: str) -> tuple[str, ...]:
    """Rendezvous is `static`: `c10d` ignores the node rank, opens a second, random port, compares the hosts' wall
    clocks, and unpickles whatever the store holds.
    """
    options: dict[str, str | int] = {
        "--nnodes": nodes,
        "--node-rank": node_rank,
        "--nproc-per-node": ranks,
        "--rdzv-backend": "static",
        "--master-addr": master_address,
        "--master-port": "{rendezvous_port}",
        "--max-restarts": 0,
    }
    # The default would leave a folder per run in the host's /tmp.
    options["--log-dir"] = "{job_dir}/torchrun"
    flags = tuple(str(part) for option in options.items() for part in option)
    # torchrun starts our wrapper, not the script: only the wrapper sees the rank's true exit code.
    return ("-m", "orch_remote.launch", *flags, "--no-python", "{python}", "-m", "orch_remote.rank", "{job_dir}")


# The draft: a plan whose settings are still being decided. Pure.
#
# draft = Draft("lab", job, created, code, request, place(...), carrier)
# draft = draft.with_split(split)                                     shares
# draft = draft.settled({"strategy": "ddp"}, "strategy=auto: ...")    further decisions
# plan = build_plan(draft)


@dataclass(frozen=True)
class Draft:
    cluster: str
    job: str
    created: str
    code: CodeFolder
    request: RunRequest
    placement: Placement
    carrier: Carrier
    split: Split = field(default_factory=Split)
    decided: tuple[str, ...] = ()
    """Settings that the plan decided, in order of decision."""
    notes: tuple[str, ...] = ()

    @property
    def training(self) -> Settings | None:
        return self.request.training

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(self.split.shares.values())

    def with_split(self, split: Split) -> Draft:
        """Sets the shares, and the setting `shares` to the policy used."""
        drawn = replace(self, split=split, notes=(*self.notes, *split.notes))
        return drawn._changed({"shares": split.policy}) if split.policy else drawn

    def with_own_batch(self, profiles: Profiles) -> Draft:
        """Takes the batch of an unchanged script from its profile, if the script sets it by itself."""
        settings, seen = self.training, {(profile.batch, profile.code) for profile in profiles.values()}
        if settings is None or settings.model != OWN or self.request.batch or settings.profile_s or len(seen) != 1:
            return self
        batch, code = seen.pop()
        if batch is None or code != self.code.sha256:
            return self
        drawn = self.settled({"batch": batch}, f"batch={batch}, as reported by the script's profile")
        return replace(drawn, request=replace(drawn.request, batch=batch))

    def settled(self, values: Mapping[str, Any], note: str) -> Draft:
        """Decides these settings. Raises SettingsError if they conflict with others."""
        drawn = replace(self, decided=(*self.decided, *values), notes=(*self.notes, note))
        return drawn._changed(values)

    def _changed(self, values: Mapping[str, Any]) -> Draft:
        if self.training is None:
            return self
        settings = replace(self.training, **values)
        return replace(self, request=replace(self.request, settings=settings))
