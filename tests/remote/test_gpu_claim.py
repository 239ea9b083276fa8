"""One job on a GPU, from whatever work folder: real sockets, real jobs."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import uuid

import pytest

from orchestrator.errors import HostsError
from orchestrator.remote import gpu_claim
from orchestrator.remote.answer import Refused
from orchestrator.remote.keeper import claim_gpus
from orchestrator.remote.layout import WorkFolder
from orchestrator.remote.occupants import user_name
from tests.support.local_job import gang

NOBODY = 65534
WAITS = "import time; time.sleep(600)"


@pytest.fixture
def gpu():
    return f"GPU-{uuid.uuid4()}"


def claimed_by_a_child(gpu: str, uid: int) -> int:
    """A process of this user that holds the GPU until it is ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(uid)
        gpu_claim.claim(gpu, "first", share=False)
        os.write(write, b".")
        signal.pause()
    assert os.read(read, 1) == b"."
    os.close(read)
    os.close(write)
    return child


@pytest.mark.parametrize("uid", [os.getuid(), *([NOBODY] if os.getuid() == 0 else [])])
def test_a_gpu_is_free_again_when_its_holder_is_gone_whoever_that_was(gpu, uid):
    holder = claimed_by_a_child(gpu, uid)
    try:
        with pytest.raises(Refused, match=f"GPU {gpu} is in use by {user_name(uid)}'s job"):
            gpu_claim.claim(gpu, "second", share=False)
        gpu_claim.claim(gpu, "second", share=True)
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
    gpu_claim.claim(gpu, "second", share=False)


@pytest.mark.skipif(os.getuid() != 0, reason="acts as another user")
def test_a_name_of_another_login_at_which_nobody_listens_is_no_claim(gpu):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
            taken.bind(f"\0orch-{gpu}")
            os.write(write, b".")
            signal.pause()
    try:
        assert os.read(read, 1) == b"."
        gpu_claim.claim(gpu, "first", share=False)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_what_may_be_another_gpu_elsewhere_is_not_claimed():
    for name in ("0", "GPU-1", "MIG-GPU-1/3/0"):
        gpu_claim.claim(name, "first", share=False)
        gpu_claim.claim(name, "second", share=False)


def test_a_job_of_another_work_folder_is_refused_with_the_holder_named(tmp_path, gpu):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with gang(tmp_path / "one", WAITS, ranks=(1,)) as first, gang(tmp_path / "two", WAITS, ranks=(1,)) as second:
        for job in (first, second):
            nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
            job.plan = job.plan.model_copy(update={"nodes": nodes})
        first.launch()
        with pytest.raises(HostsError, match=f"GPU {gpu} is in use by {getpass.getuser()}'s job test-one"):
            second.launch()
        second.plan = second.plan.model_copy(update={"share_gpus": True})
        second.launch()


def test_a_holder_has_its_name_however_often_it_was_looked_for(tmp_path, gpu):
    with gang(tmp_path, WAITS, ranks=(1,)) as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        for _ in range(5000):
            found = gpu_claim.holder_of(gpu)
            assert found and found.pid
        assert found.job == job.plan.job


def test_a_refused_job_is_not_taken_for_the_holder_later(tmp_path, gpu):
    holder = claimed_by_a_child(gpu, os.getuid())
    try:
        with pytest.raises(Refused):
            claim_gpus(WorkFolder(tmp_path), "second", [gpu], share=False)
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
    (lock,) = (tmp_path / "locks").iterdir()
    assert lock.read_text() == ""


def test_two_nodes_of_a_job_may_be_one_machine(tmp_path, gpu):
    with gang(tmp_path, "print('ran')") as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        assert job.wait().state == "succeeded"
