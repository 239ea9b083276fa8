"""The documents of `--json`. Pure except for the time of day. Programs read them: never rename a key or round a
figure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConnectError, HostError
from orchestrator.units import format_bandwidth
from orchestrator.views.console import local_minute

if TYPE_CHECKING:  # `orch jobs` should not load the other documents' modules
    from orchestrator.doctor.observations import Observations, Pair
    from orchestrator.doctor.table import Diagnosis, Finding
    from orchestrator.forecast.advice import Advice, Choice, WhatIf
    from orchestrator.forecast.pipeline.choice import PipelineChoice
    from orchestrator.hosts.cluster import Cluster, Current, ListedCluster
    from orchestrator.hosts.facts import NodeFacts
    from orchestrator.jobs.job_store import JobRecord, Verdict
    from orchestrator.jobs.live_stats import HostNow, JobNow
    from orchestrator.jobs.pull import Output, OutputListing, Pulled
    from orchestrator.jobs.queue_place import Rival
    from orchestrator.jobs.stall import HostSnapshot
    from orchestrator.paths import RunFolder
    from orchestrator.planning.launch_plan import LaunchPlan
    from orchestrator.planning.profiles import RankProfile
    from orchestrator.studies.ledger import Outcome
    from orchestrator.studies.study import Study
    from orchestrator.views.plan_rows import Outlook

MOST_LISTED = 100
"""Longer lists of hosts and shares are left out of a plan."""
MAX_TIME_S = 253402300799.0
"""The year 9999, the last that a date can have."""


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For a finding about a connection, `where` is its start and end."""
    return [asdict(finding) for finding in findings]


NODE_COLUMNS = (
    *("name", "address", "id", "note", "gpu", "bandwidth", "image", "torch", "venv"),
    *("status", "probed", "added"),
)
"""Keys of a node in `cluster_json` that tables of nodes show if any node has a value."""
DROPPED_FIRST = ("added", "venv", "note", "image", "id", "bandwidth")
"""Columns that a narrow screen drops, in this order."""


def cluster_json(
    cluster: Cluster,
    silent: Mapping[str, HostError] | None = None,
    on_gpus: Mapping[str, NodeFacts] | None = None,
) -> dict[str, Any]:
    """`orch up --json` and `orch status --json`. silent: see `print_status`. on_gpus: current facts of nodes that
    answered; None: facts of the last probe.
    """
    rows = []
    for node in cluster.nodes:
        facts = cluster.facts.get(node.name)
        found = facts.gpus if facts and node.device != "cpu" else ()
        gpu = node.gpu or next((gpu.name for gpu in found), None)
        count = node.gpus or len(found)
        rows.append(
            {
                "name": node.name,
                "address": node.address or node.host,
                "id": node.id,
                "note": node.note,
                "gpu": f"{count}x {gpu}" if gpu and count > 1 else gpu or ("CPU" if facts else None),
                "bandwidth": format_bandwidth(node.bandwidth_bps) if node.bandwidth_bps else None,
                "image": node.image,
                "torch": facts.torch.version if facts and facts.torch else None,
                "venv": cluster.venvs[node.name].torch if node.name in cluster.venvs else None,
                "occupants": _occupants((cluster.facts if on_gpus is None else on_gpus).get(node.name)),
                "status": node_status(cluster, node.name, silent or {}),
                "answers": None if silent is None else node.name not in silent,
                "probed": cluster.probed.get(node.name),
                "added": local_minute(cluster.added.get(node.name)),
            }
        )
    return {
        "schema": 1,
        "cluster": cluster.name,
        "file": cluster.file,
        "master": cluster.master,
        "master_reason": cluster.master_reason,
        "nodes": rows,
        "problems": {name: problem.model_dump() for name, problem in cluster.problems.items()},
    }


def _occupants(facts: NodeFacts | None) -> list[dict[str, Any]] | None:
    """Processes on the node's GPUs; None if unknown."""
    if facts is None:
        return None
    return [{"gpu": gpu.index, **occupant.model_dump()} for gpu in facts.gpus for occupant in gpu.occupants]


def node_status(cluster: Cluster, name: str, silent: Mapping[str, HostError]) -> str:
    if name in silent:
        return "no answer" if isinstance(silent[name], ConnectError) else "unusable"
    if name in cluster.released:
        return "released"
    if name in cluster.problems:
        return "unusable"
    if name == cluster.master:
        return "master"
    return "connected" if name in cluster.facts else "not probed"


def clusters_json(current: Current | None, clusters: Sequence[ListedCluster]) -> dict[str, Any]:
    rows = [asdict(cluster) for cluster in clusters]
    return {"schema": 1, "current": asdict(current) if current else None, "clusters": rows}


def jobs_json(
    jobs: Sequence[JobRecord], unheard: Mapping[str, Mapping[str, HostError]] | None = None
) -> dict[str, Any]:
    """unheard: by job, hosts without an answer."""
    when = ("started", "ended", "exit_code", "first_failure", "stall", "joined", "not_finite")
    keys = ("id", "name", "note", "state", "waits_for", "exp", "cluster", "nodes", "hosts", "attempt", *when)
    rows = [{key: job.model_dump(mode="json")[key] for key in keys} for job in jobs]
    return {"schema": 1, "jobs": [{**row, "unheard": list((unheard or {}).get(row["id"], ()))} for row in rows]}


def waiting_json(waiting: Mapping[str, Sequence[Rival]]) -> list[dict[str, Any]]:
    """user: the login on the host."""
    return [
        {"id": run.job, "state": "waiting", "cluster": cluster, "nodes": list(run.nodes), "user": run.user or None}
        | {"place": place, "waited_s": None if run.since_s is None else round(run.since_s, 1)}
        for cluster, runs in waiting.items()
        for place, run in enumerate(runs, 1)
    ]


def status_json(
    cluster: dict[str, Any], jobs: Sequence[JobRecord], unheard: Mapping[str, Mapping[str, HostError]]
) -> dict[str, Any]:
    """cluster: from `cluster_json`."""
    return {"schema": 1, "cluster": cluster, "jobs": jobs_json(jobs, unheard)["jobs"]}


def job_json(job: JobRecord) -> dict[str, Any]:
    """For `run` and `cancel`."""
    return {**jobs_json([job])["jobs"][0], "schema": 1}


def top_json(job: JobNow) -> dict[str, Any]:
    """A line of `orch top --json`."""
    return {
        "schema": 1,
        "wall": round(time.time(), 3),
        "job": job.record.id,
        "cluster": job.record.cluster,
        "state": job.record.state,
        "elapsed_s": job.progress.elapsed_s,
        "left_s": job.progress.left_s,
        "step": job.step,
        "steps": job.steps,
        "samples_per_s": job.samples_per_s,
        "loss": job.loss,
        "slowest": job.held_up_by[0] if job.held_up_by else None,
        "slow_words": job.slow_words,
        "hosts": [_host_document(host) for host in job.hosts],
    }


def _host_document(host: HostNow) -> dict[str, Any]:
    row = host.row
    names = ("step", "samples_per_s", "loss", "wait_share", "sync_share", "step_ms", "parts_ms")
    readings = (
        "rank",
        "index",
        "utilisation",
        "memory_bytes",
        "celsius",
        "watts",
        "limit_watts",
        "sm_mhz",
        "slowed_by",
    )
    return {
        "node": host.node,
        **{name: getattr(row, name) if row else None for name in names},
        "gpus": [{name: getattr(gpu, name) for name in readings} for gpu in host.gpus],
        "silent": host.silent or None,
    }


def nodes_json(
    answers: Mapping[str, Any], failed: Mapping[str, Exception], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Answers and errors by host. more: common fields."""
    nodes = {name: {"error": str(failed[name])} if name in failed else asdict(answers[name]) for name in answers}
    return {"schema": 1, **(more or {}), "nodes": nodes}


def pulled_json(
    job: str,
    run: RunFolder,
    outputs: Mapping[str, OutputListing],
    errors: Mapping[str, HostError],
    chosen: Mapping[str, Sequence[Output]],
    found: Mapping[str, Pulled | HostError],
) -> dict[str, Any]:
    from orchestrator.jobs.pull import is_here

    nodes: dict[str, Any] = {node: {"error": str(error)} for node, error in errors.items()}
    for node, files in chosen.items():
        rows = [
            {"name": file.name, "size": file.size, "changed": changed(file), "here": is_here(run, node, file)}
            for file in files
        ]
        document: dict[str, Any] = {
            "folder": str(run.files(node)),
            "files": rows,
            "skipped": dict(outputs[node].skipped),
        }
        pulled = found.get(node)
        if isinstance(pulled, HostError):
            document |= {"error": str(pulled)}
        elif pulled:
            document |= {"new_files": pulled.files, "new_bytes": pulled.bytes, "left": dict(pulled.left)}
        nodes[node] = document
    return {"schema": 1, "job": job, "nodes": nodes}


def changed(file: Output) -> str:
    """ISO 8601."""
    return datetime.fromtimestamp(min(file.mtime_ns / 1e9, MAX_TIME_S), timezone.utc).isoformat(timespec="seconds")


def plan_json(found: Outlook) -> dict[str, Any]:
    """`orch plan --json`."""
    from orchestrator.forecast.layers import gradient_bytes

    advice, scene = found.advice, found.scene
    return {
        "schema": 1,
        "cluster": found.cluster,
        "exp": found.exp,
        "batch": scene.job.batch,
        "gradient_bytes": gradient_bytes(scene.job.layers),
        "fidelity": advice.fidelity,
        "sum_of_parts_samples_per_s": advice.sum_of_parts,
        "hosts": _host_list(found),
        "best": {fidelity: _choice(choice, advice) for fidelity, choice in advice.best.items()},
        "ways": [_choice(choice, advice) for choice in advice.choices],
        "without": [_what_if(change, advice) for change in advice.without],
        "what_if": [_what_if(change, advice) for change in advice.what_if],
        "pipeline": _pipeline(found.pipeline, advice) if found.pipeline else None,
        "pipelines": {fidelity: _pipeline(cut, advice) for fidelity, cut in found.pipelines.items()},
        "in_half": asdict(found.in_half) if found.in_half else None,
        "failures": asdict(found.failures) if found.failures else None,
        "faster": [each.model_dump() for each in found.faster],
        "command": found.command or None,
        "basis": list(found.basis),
    }


def _host_list(found: Outlook) -> list[dict[str, Any]] | None:
    scene = found.scene
    if len(scene.hosts) > MOST_LISTED:
        return None
    return [
        {
            "name": host.name,
            "ranks": [asdict(speed) for speed in host.speeds],
            "speed_from": found.speeds_from.get(host.name, "catalogue"),
            "solo_samples_per_s": found.advice.alone[host.name],
            "link_bps": site.up_bps if site.up_bps < float("inf") else None,
        }
        for host, site in zip(scene.hosts, scene.wire.sites, strict=True)
    ]


def _choice(choice: Choice, advice: Advice) -> dict[str, Any]:
    forecast = choice.forecast
    few = len(forecast.shares) <= MOST_LISTED
    return {
        "way": asdict(forecast.way),
        "policy": choice.policy,
        "shares": list(forecast.shares) if few else None,
        "local_steps": list(forecast.local_steps) if few and forecast.local_steps else None,
        "step_ms": forecast.step_ms,
        "samples_per_s": forecast.samples_per_s,
        "of_sum": forecast.samples_per_s / advice.sum_of_parts,
        "sync_ms": forecast.sync_ms,
        "binds": forecast.limited_by,
        "wire_bytes": forecast.wire_bytes,
        "ranks": [asdict(rank) for rank in forecast.ranks] if few else None,
    }


def _pipeline(cut: PipelineChoice, advice: Advice) -> dict[str, Any]:
    return {
        "settings": dict(cut.settings),
        "step_ms": 1000 * cut.timed.seconds,
        "samples_per_s": cut.samples_per_s,
        "of_sum": cut.samples_per_s / advice.sum_of_parts,
        "limited_by": cut.limited_by,
        "parts_ms": {part: 1000 * seconds for part, seconds in cut.timed.parts_s.items()},
        "stages": [[asdict(stage) for stage in stages] for stages in cut.timed.stages],
    }


def _what_if(change: WhatIf, advice: Advice) -> dict[str, Any]:
    hosts = list(change.hosts) if len(change.hosts) <= MOST_LISTED else len(change.hosts)
    return {"change": change.change, "hosts": hosts, "choice": _choice(change.choice, advice)}


def doctor_json(cluster: str, found: Diagnosis) -> dict[str, Any]:
    mesh = found.seen.mesh
    return {
        "schema": 1,
        "cluster": cluster,
        "hosts": [host.name for host in found.seen.hosts],
        "unreached": {name: str(error) for name, error in found.seen.unreached.items()},
        "findings": findings_json(found.findings),
        "passed": list(found.passed),
        "not_applicable": dict(found.not_applicable),
        "pairs": [_way(pair, found.seen) for pair in mesh.pairs] if mesh else [],
    }


def _way(pair: Pair, seen: Observations) -> dict[str, Any]:
    from orchestrator.doctor.pairs import declared_bps

    return {**asdict(pair), "declared_bits_per_s": declared_bps(seen.host(pair.start), seen.host(pair.end))}


def dry_run_json(plan: LaunchPlan, files: Sequence[str]) -> dict[str, Any]:
    """plan: masked. files: shipped ones."""
    return plan.model_dump(mode="json", by_alias=True) | {"files": list(files)}


def profile_json(exp: str, batch: int, known: Sequence[RankProfile]) -> dict[str, Any]:
    """batch: samples, split over the ranks by measured speed."""
    from orchestrator.planning.profiles import measured_shares

    shares = measured_shares(batch, known)
    ranks = [
        {
            "node": each.rank[0],
            "local_rank": each.rank[1],
            "share": shares.get(each.rank),
            "samples_per_s": each.profile.samples_per_s(batch),
            "fresh": each.fresh,
            **each.profile.model_dump(mode="json", by_alias=True, exclude={"schema_", "node"}),
            "measured_on": each.profile.node,
        }
        for each in known
    ]
    return {"schema": 1, "exp": exp, "batch": batch, "ranks": ranks}


def study_json(name: str, study: Study, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    from orchestrator.studies.ledger import within_noise

    rows = [
        {
            "name": outcome.row.name,
            **dict(zip(study.columns, outcome.row.cells, strict=True)),
            "measured": _measured(study, outcomes, outcome) if outcome.done else None,
            "published": dict(zip(study.published, study.published_of(outcome.row), strict=True)),
            "why_not": outcome.why_not or None,
        }
        for outcome in outcomes
    ]
    noise = [[row.name for row in group] for group in within_noise(study, outcomes)]
    return {"schema": 1, "study": name, "source": study.source, "rows": rows, "within_noise": noise}


def _measured(study: Study, outcomes: Sequence[Outcome], outcome: Outcome) -> dict[str, Any]:
    """figures: medians; least, most: their ranges."""
    from orchestrator.studies.ledger import speed_up

    assert outcome.done  # noqa: S101 - for the type checker
    spreads = {name: outcome.done.spread(name) for name in study.figures}
    if study.has_speed_ups:
        spreads["speed_up"] = speed_up(study, outcomes, outcome)
    parts = {"figures": "median", "least": "least", "most": "most"}
    ranges = {
        key: {name: spread and getattr(spread, part) for name, spread in spreads.items()} for key, part in parts.items()
    }
    return {**outcome.done.model_dump(mode="json"), **ranges, "valid": outcome.done.valid}


def why_json(job: str, verdict: Verdict, outcomes: Mapping[str, HostSnapshot | HostError]) -> dict[str, Any]:
    from orchestrator.jobs.diagnosis import activities_of

    ranks = [
        {"node": rank.node, "at": rank.at, "moves": rank.moves, "place": rank.place}
        | rank.snapshot.model_dump(mode="json")
        for rank in activities_of(outcomes)
    ]
    silent = {name: found.message for name, found in outcomes.items() if isinstance(found, HostError)}
    return {"schema": 1, "job": job, "verdict": asdict(verdict), "silent": silent, "ranks": ranks}
