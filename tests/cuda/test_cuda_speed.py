"""What a step asks of CUDA, where that sets a GPU's speed; what a GPU is refused; what a profile finds to fit."""

from __future__ import annotations

import dataclasses
import os
import statistics

from tests.cuda.machine import Host, Job, problems

LENET = {"exp": "mnist_lenet", "data": "synthetic", "samples": 144, "steps": 9, "batch": 12, "eval_every": 0}
LENET |= {"strategy": "none"}
SKIPPED = 5
"""Steps: DDP cuts its buckets again, and graphs are recorded."""


def job(*, ranks=1, knobs=None, **settings):
    words = [word for name, value in {**LENET, **settings}.items() for word in (f"--{name}", str(value))]
    return Job(words, hosts=(Host(ranks),), knobs=knobs or {})


def played(machine, **asked):
    """Rank 0's end of a run that ended well."""
    done = machine.run(job(**asked))
    assert not (words := problems(done)), words
    return done[0]


def a_step_of(rank):
    """The median of each counter."""
    steps = rank.counts(SKIPPED)[:-1]  # the last one is recorded with nothing queued behind it
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def sent_by(rank):
    """Collectives of the whole run; ranks stay for the next one."""
    return rank.events[-1]["counts"]["collectives"] - rank.events[0]["counts"]["collectives"]


def replayed_by(rank):
    return rank.events[-1]["counts"]["graph_launches"] - rank.events[0]["counts"]["graph_launches"]


def settings_of(rank):
    return rank.rows("start")[0]["settings"]


def test_a_step_waits_for_the_one_before_and_for_nothing_else(machine):
    for amp in ("none", "fp16"):
        rank = played(machine, amp=amp)
        step = a_step_of(rank)
        waits = [step[name] for name in ("stream_waits", "device_waits", "event_waits", "copies_to_host")]
        assert waits == [0, 0, 1, 1], amp
        *_, last = rank.counts(SKIPPED)
        assert last["launches"] == 0, "the last step was queued before the one before it was recorded"
    assert a_step_of(played(machine, fused_sgd="off", amp="fp16"))["stream_waits"] > 0


def test_a_loaded_batch_is_copied_beside_the_step_before(machine):
    """The stream that computes waits for the copy's event; the host waits for neither."""
    rank = played(machine, loader="workers", num_workers=0)
    step = a_step_of(rank)
    assert (step["copies_to_device"], step["stream_orders"], step["stream_waits"]) == (2, 1, 0)
    assert max(rank.times("load_ms", SKIPPED)) < 0.1


def test_a_checkpoint_follows_the_records_of_all_steps_before_it(machine, tmp_path):
    rank = played(machine, checkpoint_every=3, checkpoint_dir=tmp_path)
    rows = [(row["event"], row["step"]) for row in rank.events if row["event"] in ("step", "checkpoint")]
    assert [step for event, step in rows if event == "step"] == list(range(9))
    assert [rows[rows.index(("checkpoint", step)) - 1] for step in (2, 5, 8)] == [("step", step) for step in (2, 5, 8)]


def test_a_graph_takes_the_place_of_a_launch_a_kernel(machine):
    plain, rank = a_step_of(played(machine, cuda_graph="off")), played(machine, cuda_graph="on")
    replayed = a_step_of(rank)
    assert "cuda_graph: 12 samples recorded in 1 pieces" in rank.output, rank.output
    assert (plain["graph_launches"], replayed["graph_launches"]) == (0, 2)
    assert replayed["launches"] < plain["launches"] / 2
    assert settings_of(rank)["cuda_graph"] == "on"


def test_graphs_leave_what_travels_as_it_is(machine):
    for way in ({"strategy": "ddp"}, {"strategy": "ddp", "fidelity": "local", "local_steps": 2}):
        plain, replayed = (played(machine, **way, cuda_graph=value, ranks=2) for value in ("off", "auto"))
        assert "recorded" in replayed.output
        assert sent_by(plain) == sent_by(replayed) > 0, way


def test_graphs_add_up_the_gradients_of_micro_batches(machine):
    for ranks, asked in ((1, {"strategy": "none"}), (2, {"strategy": "ddp"})):
        adding = a_step_of(played(machine, ranks=ranks, **asked, accumulate=2, cuda_graph="on"))
        assert adding["graph_launches"] == 4, asked
    capped = played(machine, speeds="host-0:0=1+1/4", cuda_graph="on")  # memory holds four samples: three passes
    assert a_step_of(capped)["graph_launches"] == 6


def test_without_room_for_a_recording_a_run_goes_on_with_plain_passes(machine):
    rank = played(machine, batch=2048, samples=20000, knobs={"FAKE_GIB": 0.3})
    assert "cuda_graph: off from now on, a recording and a plain pass take" in rank.output
    assert len(rank.rows("step")) == 9


def no_room_on_rank_1() -> None:
    from trainer.compute import graphs

    if os.environ["RANK"] == "1":
        graphs.lacking = lambda *_: "no room"


def test_a_rank_that_gives_its_graphs_up_says_so_whichever_it_is(machine):
    asked = job(strategy="ddp", ranks=2)
    prelude = f"{__name__}:{no_room_on_rank_1.__name__}"
    first, second = machine.run(dataclasses.replace(asked, prelude=prelude))
    assert not (words := problems([first, second])), words
    assert not first.rows("setting") and "off from now on" not in first.output
    (change,) = second.rows("setting")
    assert (change["name"], change["value"], change["why"]) == ("cuda_graph", "off", "no room")
    assert "rank 1: cuda_graph: off from now on, no room\n" in second.output
    assert (replayed_by(first) > 0, replayed_by(second)) == (True, 0)


def test_a_v100_has_neither_bf16_nor_tf32(machine):
    (refused,) = machine.run(job(amp="bf16", knobs={"FAKE_CC": 70}))
    assert refused.exit_code == 1
    assert "(compute capability 7.0) only emulates it, sample by sample; use amp=fp16" in refused.output
    v100 = settings_of(played(machine, amp="fp16", tf32="on", knobs={"FAKE_CC": 70}))
    assert (v100["tf32"], v100["channels_last"], v100["fused_sgd"]) == ("off", "on", "on")
    assert settings_of(played(machine))["tf32"] == "on"


def test_a_profile_finds_the_largest_batch_that_fits(machine):
    """Not only the largest power of two, also where it is cuDNN that finds no memory."""
    for knobs in ({"FAKE_GIB": 0.2}, {"FAKE_GIB": 0.25, "FAKE_WS_MIB": 64}):
        (found,) = played(machine, batch=8192, samples=20000, profile_s=60, knobs=knobs).rows("profile")
        assert found["cap"] is not None, knobs
        assert found["cap"] & (found["cap"] - 1), knobs
