"""A launch plan and its notes as text (`run --dry-run`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from orchestrator.hosts.cluster import MASK
from orchestrator.planning.launch_plan import Faster, LaunchPlan, NodePlan
from orchestrator.transport import shell
from orchestrator.units import counted, format_bytes, format_percent, name_ranges, one_line, place, some
from orchestrator.views import console

FILES_SHOWN = 40
OWN_ENV = {"CUDA_VISIBLE_DEVICES"}
"""Variables that differ on each host."""


def print_plan(plan: LaunchPlan, files: Sequence[str] = ()) -> None:
    """files: shipped ones; the first FILES_SHOWN are listed."""
    rendezvous = place(plan.master_address, plan.rendezvous_port)
    console.put(f"job {plan.job} on cluster {plan.cluster}: {counted(plan.world_size, 'rank')}")
    console.put(f"master {plan.master}, rendezvous {rendezvous} (static)")
    if plan.hosts:
        least, most = plan.hosts.min_hosts, plan.hosts.max_hosts
        console.put(f"hosts {least} to {most} of {some(plan.hosts.candidates, 12)}")
    if plan.attempt:
        whose = "whatever the cause" if plan.attempt.any_cause else "if the hosts cause the failure"
        console.put(f"attempt {plan.attempt.words}, {whose}")
    if plan.checkpoints:
        master, *copies = plan.checkpoints
        console.put(f"checkpoints on {master}{''.join(f', copies on {one}' for one in copies)}")
    commit = f", {plan.code.commit.words}" if plan.code.commit else ""
    size = f"{counted(plan.code.files, 'file')}, {format_bytes(plan.code.size_bytes)}"
    console.put(f"ships {size}, from {plan.code.source} (sha256 {plan.code.sha256[:12]}){commit}")
    if plan.kind == "experiment":
        console.put("  orch's own trainer (`--json` names its files)")
    else:
        _print_files(files)
    for name, why in plan.code.unsent[:FILES_SHOWN]:
        console.put(f"  not shipped: {one_line(name)} ({why})")
    if more := plan.code.unsent[FILES_SHOWN:]:
        console.put(f"  and {len(more)} more that are not shipped (`--json` names a hundred)")
    for setting in plan.nccl:
        console.put(f"sets {setting.words}")
    groups = dict[tuple[str, ...], list[NodePlan]]()
    for node in plan.nodes:
        groups.setdefault(_details(plan, node, "N"), []).append(node)
    for nodes in groups.values():
        _print_nodes(plan, nodes)
    if plan.prediction:
        console.put(f"\n{plan.prediction.words}")
    warn_notes(plan)
    warn_faster(plan.faster)


def _print_files(files: Sequence[str]) -> None:
    for name in files[:FILES_SHOWN]:
        console.put(f"  {one_line(name)}")
    if len(files) > FILES_SHOWN:
        console.put(f"  and {len(files) - FILES_SHOWN} more (`--json` names all)")


def _print_nodes(plan: LaunchPlan, nodes: Sequence[NodePlan]) -> None:
    """nodes: differ only in name, address and numbers."""
    console.put("")
    for node in nodes:
        last = node.first_rank + node.ranks - 1
        ranks = f"rank {last}" if node.ranks == 1 else f"ranks {node.first_rank}..{last}"
        rest = f" node rank {node.node_rank}, {ranks} on {node.device}"
        console.out.print(Text.assemble(console.plain(node.name, "bold"), rest))
        console.put(f"  address    {node.address} on {node.interface or 'an unknown interface'}")
        for name in OWN_ENV & node.env.keys():
            console.put(f"  env        {name}={node.env[name]}")
    if len(nodes) > 1:
        console.put(f"each of these {len(nodes)} hosts")
    numbers = ",".join(str(node.node_rank) for node in nodes)
    for line in _details(plan, nodes[0], numbers if len(nodes) == 1 else f"[{numbers}]"):
        console.put(line)


def _details(plan: LaunchPlan, node: NodePlan, node_rank: str) -> tuple[str, ...]:
    """node_rank: the text that stands for it."""
    torchrun, command = plan.typed(node)
    words = shell.typed(torchrun).replace(f"--node-rank {node.node_rank} ", f"--node-rank {node_rank} ")
    values = (
        f"{name}={value if value == MASK else repr(value) if value.startswith('=') else shell.join([value])}"
        for name, value in node.env.items()
        if name not in OWN_ENV
    )
    return (
        *([f"  batch      {_batch_words(plan, node)}"] if node.shares else []),
        f"  workdir    {node.workdir}",
        *([f"  prepare    {node.prepare}"] if node.prepare else []),
        f"  env        {' '.join(values)}",
        f"  torchrun   {words}",
        f"  rank runs  {shell.typed(command)}",
    )


MOST_SPLIT = 6


def split_words(plan: LaunchPlan) -> str:
    """`73 on a2000, 183 on v100 (shares by speed)`."""
    by_size = dict[int, list[str]]()
    for node in plan.nodes:
        by_size.setdefault(sum(node.shares), []).append(node.name)
    if len(by_size) == 1:
        return f"{next(iter(by_size))} samples on each host (equal shares)"
    parts = [f"{samples} on {', '.join(name_ranges(names))}" for samples, names in by_size.items()]
    more = f" and {len(parts) - MOST_SPLIT} more" if len(parts) > MOST_SPLIT else ""
    return f"{'; '.join(parts[:MOST_SPLIT])}{more} (unequal shares)"


def _batch_words(plan: LaunchPlan, node: NodePlan) -> str:
    """With tensor, shares are of channels, and every rank gets the whole batch."""
    if plan.training and plan.training.strategy == "tensor":
        parts = (format_percent(share / sum(plan.shares)) for share in node.shares)
        return f"{sum(plan.shares)} samples a step on every rank, {' + '.join(parts)} of each layer's channels"
    return f"{' + '.join(map(str, node.shares))} samples a step"


def warn_notes(plan: LaunchPlan, shown: set[str] | None = None) -> None:
    """shown: notes already printed, which are skipped; the plan's notes are added."""
    shown = set() if shown is None else shown
    for note in plan.notes:
        if note not in shown:
            console.warn(note)
        shown.add(note)


def warn_faster(found: Iterable[Faster]) -> None:
    """Faster alternatives with their command lines."""
    for each in found:
        console.warn(each.words)
        console.err.print(Text.assemble("  ", ("try:", "bold"), " ", console.plain(each.command)))
