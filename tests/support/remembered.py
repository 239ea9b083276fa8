"""A cluster and a job as they are remembered."""

from orchestrator.hosts import Cluster, Node
from orchestrator.jobs import JobRecord


def cluster(name="lab", **changes):
    nodes = (Node(name="a", host="10.0.0.1"), Node(name="b", host="10.0.0.2", bandwidth_bps=2.5e9))
    return Cluster(**{"name": name, "file": "/home/me/lab.yaml", "nodes": nodes, **changes})


def job(name, started="2026-11-21T09:00:00+00:00", **changes):
    fields = {"id": name, "state": "running", "exp": "mnist_lenet", "cluster": "lab", "nodes": ("a", "b")}
    return JobRecord(**{**fields, "started": started, **changes})
