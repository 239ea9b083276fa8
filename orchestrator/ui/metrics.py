"""What runs, as OpenMetrics: `metrics_of(jobs)` is what a Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator.jobs.gauge import HostNow, JobNow

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OF_HOST = {
    "samples_per_second": ("samples_per_s", "Samples that the host takes a second"),
    "loss": ("loss", "Mean training loss over the newest steps of the host"),
    "wait_ratio": ("wait_share", "Part of its time in which the host waits for slower ones"),
    "sync_ratio": ("sync_share", "Part of its time in which only the network holds the host up"),
    "step": ("step", "Steps that the host has done"),
}
OF_GPU = {
    "utilisation_ratio": ("utilisation", 0.01, "How busy the GPU is"),
    "memory_bytes": ("memory_bytes", 1.0, "Memory in use on the GPU"),
    "temperature_celsius": ("celsius", 1.0, "Temperature of the GPU"),
    "power_watts": ("watts", 1.0, "Power that the GPU draws"),
}


LABELS = ("job", "cluster", "node")


class JobsCollector(Collector):
    def __init__(self, jobs: Sequence[JobNow]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        heard = GaugeMetricFamily("orch_host_heard", "Whether the host of the job answers", labels=LABELS)
        for labels, host in self._hosts():
            heard.add_metric(labels, 0.0 if host.silent else 1.0)
        yield heard
        for name, (field, words) in OF_HOST.items():
            family = GaugeMetricFamily(f"orch_host_{name}", words, labels=LABELS)
            for labels, host in self._hosts():
                _add(family, labels, getattr(host.row, field) if host.row else None)
            yield family
        for name, (field, factor, words) in OF_GPU.items():
            family = GaugeMetricFamily(f"orch_gpu_{name}", words, labels=[*LABELS, "gpu"])
            for labels, host in self._hosts():
                for gpu in host.gpus:
                    _add(family, [*labels, str(gpu.index)], getattr(gpu, field), factor)
            yield family

    def _hosts(self) -> Iterator[tuple[list[str], HostNow]]:
        """Each host of each job, behind its labels."""
        for job in self._jobs:
            for host in job.hosts:
                yield [job.record.id, job.record.cluster, host.node], host


def _add(family: GaugeMetricFamily, labels: Sequence[str], value: float | None, factor: float = 1.0) -> None:
    if value is not None:
        family.add_metric(labels, factor * value)


def metrics_of(jobs: Sequence[JobNow]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobsCollector(jobs))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text
