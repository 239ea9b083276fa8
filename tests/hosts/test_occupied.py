"""Who is on a GPU, by made-up facts: what is said of it, and when a job is refused."""

import pytest

from orchestrator.doctor import needed_bytes
from orchestrator.errors import ConnectError
from orchestrator.hosts import Occupant, judge, warnings, without_jobs
from orchestrator.planning import RunRequest
from tests.support.plans import pair, plan
from tests.support.probed_hosts import GIB, OTHER, facts, gpu
from trainer.shared import settings_from

ALICE = "alice's python3 train.py (pid 4711, 12.0GiB)"
USED = {"memory_used_bytes": 12 * GIB, "occupants": (OTHER,)}


def judged(needed=GIB, share=False, uuids=("GPU-1",), found=None, **changes):
    return judge("v100", found or facts(gpus=(gpu(**changes),)), uuids, needed, share=share)


def test_a_job_that_fits_beside_somebody_starts_and_its_person_knows_of_them():
    seen = judged(needed=3 * GIB, **USED)
    assert seen.refusal is None
    assert seen.lines == (f"v100: GPU 0 (Tesla V100-PCIE-16GB) is in use by {ALICE}",)


def test_a_job_that_does_not_fit_beside_somebody_is_refused_with_a_way_out():
    seen = judged(needed=5 * GIB, **USED)
    assert seen.refusal.message == (
        "v100: 4.0GiB of 16.0GiB are free on GPU 0 (Tesla V100-PCIE-16GB), and the job needs about 5.0GiB; "
        f"on it: {ALICE}"
    )
    assert "--nodes" in seen.refusal.remedy
    assert "--share" in seen.refusal.remedy


def test_whoever_shares_is_warned_and_not_refused():
    seen = judged(needed=5 * GIB, share=True, **USED)
    assert (seen.refusal, len(seen.lines)) == (None, 1)


@pytest.mark.parametrize("share", [False, True])
def test_a_gpu_for_one_process_takes_no_second(share):
    seen = judged(share=share, compute_mode="Exclusive_Process", **USED)
    assert f"is in use by {ALICE}, and it is in exclusive compute mode" in seen.refusal.message
    assert "`nvidia-smi -c DEFAULT`" in seen.refusal.remedy
    assert judged(compute_mode="Exclusive_Process").refusal is None


def test_where_nobody_is_no_need_is_too_great():
    """Whether a job fits into an empty GPU is decided elsewhere, where it is planned."""
    assert judged(needed=99 * GIB).refusal is None
    assert judged(needed=99 * GIB, memory_used_bytes=600 << 20).refusal is None
    # What needs all of it is split into parts that fit, and it has as good as all.
    assert judged(needed=99 * GIB, memory_used_bytes=GIB // 2, occupants=(OTHER,)).refusal is None


def test_memory_that_nobody_owns_up_to_is_in_use_all_the_same():
    """In a container nvidia-smi does not name the processes outside."""
    seen = judged(needed=5 * GIB, memory_used_bytes=12 * GIB)
    assert "programs that nvidia-smi does not name there (12.0GiB of its memory)" in seen.refusal.message
    assert "does not name" in judged(memory_used_bytes=12 * GIB).lines[0]


def test_memory_shared_with_the_host_is_not_judged():
    seen = judged(needed=5 * GIB, memory_bytes=0, memory_used_bytes=0, occupants=(OTHER,))
    assert (seen.refusal, len(seen.lines)) == (None, 1)


def test_a_gpu_that_is_gone_is_named():
    seen = judged(uuids=("GPU-1", "GPU-9"))
    assert seen.refusal.message == "v100: its GPU GPU-9 is no longer there"
    assert seen.refusal.remedy == "`orch up` again"


def test_of_gpus_that_the_job_does_not_get_nothing_is_said():
    found = facts(gpus=(gpu(), gpu(index=1, uuid="GPU-2", **USED)))
    assert judged(found=found) == judged()
    assert len(judged(found=found, uuids=("GPU-1", "GPU-2")).lines) == 1


def test_a_look_that_fails_keeps_nobody_from_starting():
    late = judged(found=ConnectError("v100", "no answer within 60 s"))
    assert (late.refusal, late.lines) == (None, ("v100: no answer within 60 s; who else uses its GPUs is unknown",))
    slow = judged(found=facts(gpus=(), gpu_error="no answer in 30 s"))
    assert slow.lines == ("v100: nvidia-smi: no answer in 30 s; who else uses its GPUs is unknown",)


def test_the_largest_of_many_come_first_and_the_rest_are_counted():
    crowd = [Occupant(pid=n, memory_bytes=n << 20, user="bob", command="python3") for n in range(1, 7)]
    (line,) = warnings(facts(gpus=(gpu(occupants=tuple(crowd)),)))
    assert "by bob's python3 (pid 6, 6.0MiB), bob's python3 (pid 5, 5.0MiB)," in line
    assert line.endswith(" and 3 more")


@pytest.mark.parametrize(
    ("occupant", "words"),
    [
        (Occupant(pid=7), "a program (pid 7)"),
        (Occupant(pid=7, user="me", command="python3", job="j-1"), "me's job j-1 (pid 7)"),
        (Occupant(pid=7, command="python3"), "python3 (pid 7)"),
    ],
)
def test_what_is_not_known_of_a_process_is_left_out(occupant, words):
    (line,) = warnings(facts(gpus=(gpu(occupants=(occupant,)),)))
    assert line.endswith(f" is in use by {words}")


def test_where_a_clusters_own_jobs_are_listed_only_others_are_named():
    mine = Occupant(pid=7, memory_bytes=12 * GIB, job="j-1")
    alone, both, hidden = (
        gpu(index=number, uuid=f"GPU-{number}", memory_used_bytes=12 * GIB, occupants=occupants)
        for number, occupants in enumerate([(mine,), (mine, OTHER), ()])
    )
    left = without_jobs(facts(gpus=(alone, both, hidden)), ["j-1"])
    assert [line.partition(" (")[0] for line in warnings(left)] == ["GPU 1", "GPU 2"]
    assert "j-1" not in str(list(warnings(left)))


def needed(**changes):
    settings = settings_from("resnet152_cifar", changes)
    request = RunRequest("experiment", "resnet152_cifar", (), settings=settings)
    nodes, found = pair()
    made = plan(nodes, found, request)
    return needed_bytes(made, made.nodes[0])


def test_what_a_job_needs_follows_what_a_rank_does_at_once():
    alone = needed(profile_s=15.0)
    assert GIB < alone < 2 * GIB  # CUDA, and three times 233 MB of weights
    sample = (needed() - alone) / 128
    assert needed(batch=128) == pytest.approx(alone + 64 * sample)
    assert needed(accumulate=4) == pytest.approx(alone + 32 * sample)
    assert needed(fidelity="local", local_batch=8) == pytest.approx(alone + 8 * sample)
    assert needed(amp="fp16") == pytest.approx(alone + 64 * sample)


def test_of_a_script_only_what_cuda_takes_is_known():
    nodes, found = pair()
    made = plan(nodes, found)
    assert needed_bytes(made, made.nodes[0]) == GIB
