"""A job on three hosts, records of it, and what its hosts may answer when asked for its state."""

from __future__ import annotations

from hypothesis import strategies as st

from orchestrator.jobs import JobRecord
from orchestrator.planning import LaunchPlan, NodePlan
from tests.support.plans import CODE

STATES = ("starting", "running", "succeeded", "failed", "cancelled", "lost")


def node(name, index):
    return NodePlan(
        name=name, node_rank=index, first_rank=index, ranks=1, address="127.0.0.1", interface="lo", device="cpu",
        gpu=None, python="python3", workdir="~/.orch", torchrun=(), command=("train.py",),
    )  # fmt: skip


PLAN = LaunchPlan(
    schema=1, job="j", exp="train.py", kind="script", cluster="lab", master="a", master_address="127.0.0.1",
    rendezvous_port=29500, world_size=3, created="2026-11-21T09:00:00+00:00", code=CODE,
    nodes=tuple(node(name, index) for index, name in enumerate("abc")),
)  # fmt: skip


def known(state="starting", **changes):
    fields = {"id": "j", "state": state, "exp": "train.py", "cluster": "lab", "nodes": ("a", "b", "c")}
    return JobRecord(**{**fields, "started": PLAN.created, **changes})


def alive(state="running", **more):
    return {"state": state, "alive": True, **more}


def over(state, **more):
    return {"state": state, "alive": False, **more}


GONE = over("running", left=0)

HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(STATES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
