"""The launch plan: a pure function from inventory, facts and election to one value. Running it happens in `job`.

    plan = build_plan(cluster, nodes, facts, election, request, job="mnist_lenet-20261121-0912-k3f", code=code)

`orch run --dry-run` prints this value; `orch run` executes it and nothing else.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from orchestrator.errors import UsageError
from orchestrator.hosts.election import Election
from orchestrator.hosts.facts import Gpu, NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.visible import cuda_environment, visible_gpus
from orchestrator.planning.elastic import check_elastic, elastic_notes
from orchestrator.planning.launch_plan import CodeFolder, LaunchPlan, NcclSetting, NodePlan, System
from orchestrator.planning.nccl import Carrier, choose_carrier
from orchestrator.planning.request import RunRequest
from trainer.shared.shares import equal_shares

RENDEZVOUS_PORT = 29500
MAX_NAMED = 5


def build_plan(
    cluster: str,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    election: Election,
    request: RunRequest,
    *,
    job: str,
    code: CodeFolder,
    created: str,
) -> LaunchPlan:
    """nodes: those that take part, all with facts. Raises UsageError where no training address can be found, or the
    nodes do not do for the elastic job that is wanted; UnlikeError where NCCL is not the same everywhere.
    """
    ordered, left_out = sorted(nodes, key=lambda node: node.name != election.master), []
    if request.elastic:
        check_elastic(request.elastic, len(ordered))
        ordered, left_out = ordered[: request.elastic.max_nodes], ordered[request.elastic.max_nodes :]
    master = ordered[0]
    addresses = {node.name: _address(node, facts[node.name], ordered) for node in ordered}
    devices = {node.name: _device(node, facts[node.name], request) for node in ordered}
    gpus = {node.name: _gpus(node, facts[node.name], devices[node.name]) for node in ordered}
    ranks = {node.name: _ranks(node, gpus[node.name], request) for node in ordered}
    carrier = choose_carrier(ordered, facts, devices, ranks, request)
    world_size = sum(ranks.values())
    shares = _shares(request, world_size)
    return LaunchPlan(
        schema=1,
        job=job,
        exp=request.name,
        kind=request.kind,
        cluster=cluster,
        settings=dict(request.settings),
        master=master.name,
        master_address=addresses[master.name],
        rendezvous_port=RENDEZVOUS_PORT,
        world_size=world_size,
        created=created,
        code=code,
        nodes=_node_plans(ordered, facts, request, addresses, devices, gpus, ranks, shares, carrier),
        share_gpus=request.share_gpus,
        grace_s=request.grace_s,
        time_limit_s=request.time_limit_s,
        elastic=request.elastic,
        backend=carrier.backend,
        nccl=carrier.settings,
        variables=tuple(request.env),
        notes=(
            *request.notes,
            *_public(ordered, facts, addresses),
            *code.notes,
            *_notes(ordered, shares),
            *carrier.notes,
            *(elastic_notes(request.elastic, request, [node.name for node in left_out]) if request.elastic else ()),
        ),
    )


def _node_plans(
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    request: RunRequest,
    addresses: Mapping[str, str],
    devices: Mapping[str, Literal["cuda", "cpu"]],
    gpus: Mapping[str, tuple[Gpu, ...]],
    ranks: Mapping[str, int],
    shares: tuple[int, ...],
    carrier: Carrier,
) -> tuple[NodePlan, ...]:
    """nodes: in node-rank order, the master first."""
    elastic, master_address = request.elastic is not None, addresses[nodes[0].name]
    planned, first_rank = [], 0
    # Two nodes of an inventory may be one machine (`transport: local`): they share its cores.
    on_machine = Counter[str]()
    for node in nodes:
        on_machine[facts[node.name].boot_id] += ranks[node.name]
    for_scripts = _for_scripts(devices.values()) if request.kind != "experiment" else {}
    for node_rank, node in enumerate(nodes):
        count = ranks[node.name]
        own_gpus = gpus[node.name][: node.gpus if _is_one_process(request) else count]
        planned.append(
            NodePlan(
                name=node.name,
                node_rank=node_rank,
                first_rank=first_rank,
                ranks=count,
                address=addresses[node.name],
                interface=_interface(node, facts[node.name], nodes, addresses),
                device=devices[node.name],
                gpu=_gpu_label(node, own_gpus or facts[node.name].gpus),
                gpu_uuids=tuple(gpu.uuid for gpu in own_gpus),
                bandwidth_bps=node.bandwidth_bps,
                paced=node.paced.model_dump(mode="json") if node.paced else None,
                python=node.python,
                activate=node.activate,
                workdir=node.workdir,
                env=for_scripts
                | _environment(node, facts, nodes, addresses, own_gpus, carrier.settings, on_machine)
                | dict(request.env),
                shares=shares[first_rank : first_rank + count],
                torchrun=torchrun_arguments(len(nodes), node_rank, count, master_address, elastic=elastic),
                command=_command(request, devices[node.name], carrier.backend),
                prepare=node.prepare,
                system=_system(facts[node.name]),
            )
        )
        first_rank += count
    return tuple(planned)


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


def torchrun_arguments(
    nodes: int, node_rank: int, ranks: int, master_address: str, *, elastic: bool = False
) -> tuple[str, ...]:
    """torchrun's arguments. Rendezvous is `static`: with `c10d` the node rank is ignored, workers open a second, random
    port, the hosts' wall clocks are compared, and what anybody lays into the store is unpickled.

    elastic: how many hosts there are, and which of them this is, is filled in on the host at each start.
    """
    options: dict[str, str | int] = {
        "--nnodes": "{nodes}" if elastic else nodes,
        "--node-rank": "{node_rank}" if elastic else node_rank,
        "--nproc-per-node": ranks,
        "--rdzv-backend": "static",
        "--master-addr": master_address,
        "--master-port": "{rendezvous_port}",
        "--max-restarts": 0,
    }
    # Else each run leaves a folder in the host's /tmp.
    options["--log-dir"] = "{job_dir}/torchrun"
    flags = tuple(str(part) for option in options.items() for part in option)
    # torchrun starts our wrapper, not the script: only the wrapper knows the rank's true exit code.
    return ("-m", "orch_remote.launch", *flags, "--no-python", "{python}", "-m", "orch_remote.rank", "{job_dir}")


def _command(request: RunRequest, device: str, backend: str) -> tuple[str, ...]:
    if request.kind != "experiment":
        return request.command
    found = {"device": device, "backend": backend}
    added = [f"--{key}={value}" for key, value in found.items() if key not in request.chosen]
    return (*request.command, *added)


def _shares(request: RunRequest, world_size: int) -> tuple[int, ...]:
    batch = request.settings.get("batch")
    return equal_shares(int(batch), world_size) if batch else ()


def _device(node: Node, facts: NodeFacts, request: RunRequest) -> Literal["cuda", "cpu"]:
    """The person's own word for this run, else the inventory's, else what was found."""
    if "device" in request.chosen and request.settings["device"] != "auto":
        return "cuda" if request.settings["device"] == "cuda" else "cpu"
    if node.device != "auto":
        return node.device
    return "cuda" if facts.gpus and not node.paced else "cpu"


def _gpus(node: Node, facts: NodeFacts, device: str) -> tuple[Gpu, ...]:
    """Those that the job may use there."""
    return visible_gpus(node.name, facts, node.env) if device == "cuda" else ()


def _ranks(node: Node, gpus: Sequence[Gpu], request: RunRequest) -> int:
    if _is_one_process(request):
        return node.ranks or 1
    return node.ranks or node.gpus or len(gpus) or 1


def _is_one_process(request: RunRequest) -> bool:
    """Whether one process is to use all GPUs of its host."""
    return request.settings.get("strategy") == "dp"


def _gpu_label(node: Node, gpus: Sequence[Gpu]) -> str | None:
    return node.gpu or (gpus[0].name if gpus else None)


def _address(node: Node, facts: NodeFacts, nodes: Sequence[Node]) -> str:
    """The training address: declared, else the source of this host's own route to one of the others."""
    if node.address:
        return node.address
    if way := facts.way_to(other.address or other.host for other in nodes if other is not node):
        return way.source
    if len(nodes) == 1 or node.transport == "local":
        return "127.0.0.1"
    raise UsageError(
        f"{node.name}: its training address is unknown (no route to the other hosts was found)",
        f"set `address:` for {node.name} in the inventory",
    )


def _interface(node: Node, facts: NodeFacts, nodes: Sequence[Node], addresses: Mapping[str, str]) -> str | None:
    """The interface that carries this host's route to the master; on the master, the one that has its address."""
    if node.interface:
        return node.interface
    for interface in facts.interfaces:
        if addresses[node.name] in (address.partition("/")[0] for address in interface.addresses):
            return interface.name
    way = facts.way_to(addresses[other.name] for other in nodes if other is not node)
    return way.interface if way else None


def _environment(
    node: Node,
    facts: Mapping[str, NodeFacts],
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    gpus: Sequence[Gpu],
    nccl: Sequence[NcclSetting],
    on_machine: Mapping[str, int],
) -> dict[str, str]:
    """Our own settings first: what the inventory's `env` says wins. gpus: its ranks'. on_machine: ranks by boot id."""
    own = facts[node.name]
    environment = {"OMP_NUM_THREADS": str(max(1, own.cores // on_machine[own.boot_id]))}
    interface = _interface(node, own, nodes, addresses)
    if interface:
        # NCCL takes names as prefixes unless they begin with "=" (NCCL manual, NCCL_SOCKET_IFNAME). Gloo opens one
        # connection a pair of ranks for each name, and spreads buckets over them: one alone leaves a slow link idle
        # between two buckets.
        environment |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": f"{interface},{interface}"}
    environment |= {setting.name: setting.value for setting in nccl}
    if node.paced:
        environment["ORCH_PACED"] = json.dumps(node.paced.model_dump(mode="json", exclude_defaults=True))
    # The GPUs that the inventory's `env` names are these, told by UUID.
    return {**environment, **node.env, **(cuda_environment(gpus, node.env) if gpus else {})}


def _for_scripts(devices: Collection[str]) -> dict[str, str]:
    """Without it Accelerate's ranks on CPUs join the process group, and then train each by itself (tried with 1.15)."""
    return {"ACCELERATE_USE_CPU": "true"} if set(devices) == {"cpu"} else {}


def _public(nodes: Sequence[Node], facts: Mapping[str, NodeFacts], addresses: Mapping[str, str]) -> tuple[str, ...]:
    """What torch and NCCL listen for is for anybody who can reach it, on any address of the host."""
    found = {node.name: _public_addresses(addresses[node.name], facts[node.name]) for node in nodes}
    named = [f"{name} ({', '.join(public)})" for name, public in found.items() if public]
    if not named:
        return ()
    more = f" and {len(named) - MAX_NAMED} more hosts" if len(named) > MAX_NAMED else ""
    words = "training traffic is neither encrypted nor authenticated, and public addresses lead to its ports"
    remedy = "let a firewall admit these hosts alone to each other"
    return (f"{words}: {', '.join(named[:MAX_NAMED])}{more}; {remedy}",)


def _public_addresses(training: str, facts: NodeFacts) -> list[str]:
    own = [address.partition("/")[0] for interface in facts.interfaces for address in interface.addresses]
    return [address for address in dict.fromkeys([training, *own]) if ipaddress.ip_address(address).is_global]


def _notes(nodes: Sequence[Node], shares: tuple[int, ...]) -> tuple[str, ...]:
    notes = []
    paced = [node.name for node in nodes if node.paced]
    if paced:
        notes.append(
            f"{', '.join(paced)}: paced, each rank keeps a declared speed and computes nothing: no loss, no accuracy"
        )
    if 0 in shares:
        notes.append("the global batch has fewer samples than there are ranks: some ranks get none")
    return tuple(notes)
