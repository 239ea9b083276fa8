"""A launch plan as the forecast sees it: how fast its ranks are, what its links carry, and where all that comes from.

    view = inputs_of(plan, profiles, read_network(Path("runs"), plan))
    view.scene, view.basis                      what `advise` takes; a sentence for each figure that is not measured

A rank's speed is its profile's; else the pace that it was given; else an estimate from the catalogue. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import Scene
from orchestrator.forecast.asked import memory_words
from orchestrator.forecast.cluster_links import MeasuredLinks, wire_of
from orchestrator.forecast.gpus import ERROR, activation_bytes, estimate_speed
from orchestrator.forecast.layers import Block, Layer, gradient_bytes, is_known, layers_in, network_like, network_of
from orchestrator.forecast.step import HostSpeed, Workload
from orchestrator.hosts.cards import find_card
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.planning.measurement import BlockTimes
from orchestrator.planning.profiles import Profiles, profile_line
from trainer.shared.experiments import OWN
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed, Speeds, parse_speeds


@dataclass(frozen=True)
class ForecastInputs:
    """What a forecast starts from."""

    scene: Scene
    speeds_from: dict[str, str]
    """By host: profile, pace, by hand or catalogue."""
    basis: tuple[str, ...]
    """What the figures rest on, a sentence each."""

    @property
    def is_estimate(self) -> bool:
        return "catalogue" in self.speeds_from.values()


def inputs_of(
    plan: LaunchPlan,
    profiles: Profiles,
    network: MeasuredLinks | None = None,
    bandwidth_bps: float | None = None,
    *,
    may_cut: bool = False,
) -> ForecastInputs:
    """bandwidth_bps: of every host, in place of what is declared or measured. may_cut: the network may be cut, so that
    a host whose memory holds no sample of the whole may take part. Raises UsageError where a speed or a link is not
    known, and for what is no training of ours.
    """
    settings = plan.training
    if settings is None:
        raise UsageError(f"{plan.exp} trains nothing whose speed could be predicted", "choose another --exp")
    blocks = blocks_in(plan, settings, profiles)
    layers = layers_in(blocks)
    by_hand = parse_speeds(settings.speeds)
    known = {node.name: speeds_of(node, settings, by_hand, profiles, layers) for node in plan.nodes}
    for name, (speeds, _) in known.items():
        if any(speed.cap == 0 for speed in speeds) and not may_cut:
            remedy = "leave it out with --nodes, or cut the network with --set strategy=pipeline"
            raise UsageError(f"{name}: not one sample fits into its memory", remedy)
    hosts = tuple(_host(node, *known[node.name], profiles) for node in plan.nodes)
    speeds_from = {name: source for name, (_, source) in known.items()}
    wire, words = wire_of(plan, network, bandwidth_bps)
    scene = Scene(Workload(layers, settings.batch, blocks), hosts, wire)
    return ForecastInputs(scene, speeds_from, (*_speed_words(speeds_from), *_changed_words(plan, profiles), *words))


def _host(node: NodePlan, speeds: tuple[Speed, ...], source: str, profiles: Profiles) -> HostSpeed:
    memory_bytes = node.paced.get("memory_bytes") if node.paced else None
    return HostSpeed(node.name, speeds, blocks=_blocks(node, source, profiles), memory_bytes=memory_bytes)


def blocks_in(plan: LaunchPlan, settings: Settings, profiles: Profiles) -> tuple[Block, ...]:
    """Of the network that paced ranks stand in for, of one that is written down here, or of any as its profile saw it.
    Raises UsageError where none has.
    """
    like = next((node.paced["like"] for node in plan.nodes if node.paced and node.paced.get("like")), None)
    if like:
        return network_like(str(like))
    seen = next((profile.network for profile in profiles.values() if profile.network), None)
    if is_known(settings.model) or (seen is None and settings.model != OWN):
        return network_of(settings)
    if seen is None:
        raise UsageError(
            "the script's network is unknown: it has not been profiled, has too many layers, or not 32 bits",
            f"measure it: `{profile_line(settings)}`, with the same --set",
        )
    return tuple(Block(tuple(Layer(each.shapes, each.work) for each in block.layers), block.outputs) for block in seen)


# ---- how fast the ranks are -----------------------------------------------------------------------------------------


def speeds_of(
    node: NodePlan, settings: Settings, by_hand: Speeds, profiles: Profiles, layers: Sequence[Layer]
) -> tuple[tuple[Speed, ...], str]:
    """The speeds of the node's ranks, and where they come from. by_hand: the setting `speeds`."""
    ranks = [(node.name, local_rank) for local_rank in range(node.ranks)]
    if all(rank in by_hand for rank in ranks):
        return tuple(by_hand[rank] for rank in ranks), "by hand"
    if all(rank in profiles for rank in ranks):
        return tuple(profiles[rank].speed for rank in ranks), "profile"
    if node.paced:
        return (_pace(node.paced, layers),) * node.ranks, "pace"
    gpu = find_card(node.gpu or "") if node.device == "cuda" else None
    if gpu:
        return (estimate_speed(gpu, layers),) * node.ranks, "catalogue"
    what = f"its GPU, {node.gpu}," if node.device == "cuda" else "a CPU"
    raise UsageError(
        f"{node.name}: its speed is unknown: no profile, and {what} is not in the catalogue",
        f"measure it: `{profile_line(settings)}`, with the same --set",
    )


def _blocks(node: NodePlan, speed_from: str, profiles: Profiles) -> tuple[BlockTimes | None, ...]:
    if speed_from != "profile":
        return ()
    return tuple(profiles[node.name, local_rank].blocks for local_rank in range(node.ranks))


def _pace(paced: dict[str, Any], layers: Sequence[Layer]) -> Speed:
    memory, cap = paced.get("memory_bytes"), None
    if memory:
        cap = max(0, int((memory - 3 * gradient_bytes(layers)) // activation_bytes(layers)))
    return Speed(float(paced.get("fixed_ms") or 0.0), 1000 / float(paced["samples_per_s"]), cap)


def _speed_words(speeds_from: dict[str, str]) -> Iterator[str]:
    words = {
        "profile": "as profiled alone",
        "pace": "the pace that the inventory sets, which nobody has measured",
        "by hand": "the setting `speeds`",
        "catalogue": f"an estimate from the hardware catalogue ({ERROR}); `orch profile` measures",
    }
    for source, meaning in words.items():
        names = [name for name, found in speeds_from.items() if found == source]
        if names:
            yield f"speed of {', '.join(names)}: {meaning}"


def _changed_words(plan: LaunchPlan, profiles: Profiles) -> Iterator[str]:
    measured = [profile.created[:10] for profile in profiles.values() if profile.code not in (None, plan.code.sha256)]
    if measured:
        yield f"its files have changed since it was profiled on {min(measured)}: run `orch profile --again`"


def memory_notes(plan: LaunchPlan, view: ForecastInputs) -> tuple[str, ...]:
    return tuple(memory_words(view.scene, plan.shares, view.speeds_from, plan.training)) if plan.training else ()
