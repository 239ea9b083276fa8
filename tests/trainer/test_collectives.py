"""Collectives over real Gloo: right values, agreed times, a budget that holds, refusals reported and not raised."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.free_port import free_port
from tests.support.quick_python import quick_python

pytest.importorskip("torch")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainer.measure import PATTERN, collectives, iterations_for, repeats
from trainer.ranks import RankInfo, read_rank_info
from trainer.shared import (
    BUS_FACTORS,
    EVENT_FIELDS,
    CollectiveSettings,
    MetricsWriter,
    Pace,
    SettingsError,
    TrainError,
    bus_factor,
    parse_settings,
)

ROOT = Path(__file__).parents[2]
TORCHRUN = ["--standalone", "--nproc-per-node", "2", "-m", "trainer"]
SMALL = {"max_bytes": "65536", "factor": "8", "iterations": "4", "budget_s": "30", "device": "cpu"}


def settings_for(**pairs: str) -> CollectiveSettings:
    return parse_settings("collectives", {**SMALL, **pairs})


def records(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == event]


def measured_in(path: Path) -> list[dict[str, Any]]:
    return records(path, "collective")


def rank_of_three(rank: int, ports: list[int], folder: str) -> None:
    """A paced host among the three: its network is its own. Then something is refused, and a value is wrong."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pace = Pace(samples_per_s=333) if rank == 1 else None

    def measure(name: str, **pairs: str) -> None:
        port = os.environ["MASTER_PORT"] = str(ports.pop(0))
        metrics = MetricsWriter(Path(folder, f"{name}-{rank}.jsonl"))
        info = RankInfo(rank, rank, 3, 3, "host", f"node{rank}", None, f"127.0.0.1:{port}", pace)
        collectives.measure(settings_for(**pairs), info, metrics)

    measure("all", dtype="bfloat16")

    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such thing\nin this back end")

    reduce_scatter, dist.reduce_scatter_tensor = dist.reduce_scatter_tensor, refuses
    measure("refused", operations="reduce_scatter,scatter")
    dist.reduce_scatter_tensor = reduce_scatter
    measure("short", operations="broadcast", budget_s="0.000001")

    broadcast = dist.broadcast

    def wrong(values: Any, *arguments: Any, **options: Any) -> None:
        broadcast(values, *arguments, **options)
        values[-1] += float(rank == 2)

    dist.broadcast = wrong
    with pytest.raises(TrainError, match="node2: broadcast: rank 2 received wrong values"):
        measure("wrong", operations="broadcast", dtype="float32")
    dist.broadcast = broadcast
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    arguments = ([free_port() for _ in range(4)], str(folder))
    mp.start_processes(rank_of_three, arguments, nprocs=3, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("two")
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    python = {"PYTHON_EXEC": quick_python(folder / "quick", torchrun=True)}
    env = {**os.environ, "ORCH_METRICS": f"{folder}/{{rank}}.jsonl", "OMP_NUM_THREADS": "1", **python}
    command = [*TORCHRUN, "--exp", "collectives", *words, "--min_bytes", "128"]
    return forks.run(forks.TORCHRUN, command, cwd=ROOT, env=env), folder


def test_every_operation_is_measured_and_reported_under_torchrun(two: Any) -> None:
    result, folder = two
    assert result.returncode == 0, result.stderr
    found = measured_in(folder / "0.jsonl")
    assert [line["operation"] for line in found] == [*BUS_FACTORS] * 4
    assert [line["step"] for line in found] == list(range(36))
    assert sorted({line["bytes"] for line in found}) == [128, 1024, 8192, 65536]
    for line in found:
        assert set(line) == {"event", *EVENT_FIELDS["collective"]}
        assert line["error"] is None
        assert 3 <= line["iterations"] <= 4
        assert line["algbw_gbps"] == pytest.approx(8e-6 * line["bytes"] / line["time_ms"], rel=1e-3)
        assert line["busbw_gbps"] == pytest.approx(line["algbw_gbps"] * bus_factor(line["operation"], 2))
    lines = result.stdout.splitlines()
    assert len(lines) == 36 + 9  # both ranks are on one host: no path between hosts
    assert "36/36  all_to_all" in lines[35]
    assert " us + bytes at " in lines[36]


def test_the_other_ranks_write_where_they_begin_and_end(two: Any) -> None:
    _, folder = two
    (start,) = records(folder / "1.jsonl", "start")
    assert (start["model"], start["batch_per_rank"], start["steps"], start["paced"]) == (None, None, 36, False)
    assert start["settings"]["operations"] == "all"
    (end,) = records(folder / "1.jsonl", "end")
    assert (end["status"], end["valid"]) == ("succeeded", None)
    assert measured_in(folder / "1.jsonl") == []


def test_three_ranks_measure_16_bit_elements_that_parts_of_equal_length_hold(three: Path) -> None:
    found = measured_in(three / "all-0.jsonl")
    assert {line["error"] for line in found} == {None}
    assert {line["bytes"] for line in found} == {1020, 8190, 65532}
    (start,) = records(three / "all-1.jsonl", "start")
    assert start["paced"] is False


def test_what_a_back_end_cannot_do_is_recorded_and_the_rest_goes_on(three: Path) -> None:
    found = measured_in(three / "refused-0.jsonl")
    refused = [line for line in found if line["operation"] == "reduce_scatter"]
    assert [line["error"] for line in refused] == [f"torch {torch.__version__}, gloo: no such thing"] * 3
    assert {(line["iterations"], line["time_ms"], line["busbw_gbps"]) for line in refused} == {(0, None, None)}
    assert all(line["time_ms"] > 0 for line in found if line["operation"] == "scatter")


def test_every_path_from_one_host_to_another_is_measured(three: Path) -> None:
    found = records(three / "all-0.jsonl", "link")
    assert [(line["source"], line["target"]) for line in found] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for line in found:
        assert line["gbps"] == pytest.approx(8e-6 * line["bytes"] / line["time_ms"], rel=1e-3)
    assert records(three / "all-1.jsonl", "link") == records(three / "short-0.jsonl", "link") == []


def test_without_time_only_the_smallest_size_is_measured_and_the_rest_said(three: Path) -> None:
    first, *rest = measured_in(three / "short-0.jsonl")
    assert first["iterations"] == 3
    assert len(rest) == 2
    for line in rest:
        assert line["error"].startswith("left out: it would take some ")
        assert line["time_ms"] is None


def test_a_wrong_value_ends_the_run_on_every_rank(three: Path) -> None:
    """Each rank asserts the words that it raised."""
    assert measured_in(three / "wrong-0.jsonl") == []


def test_one_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="a single rank has no other rank"):
        collectives.measure(settings_for(), read_rank_info({}), MetricsWriter(None))


def test_a_part_of_a_buffer_is_known_by_where_it_begins() -> None:
    pattern = torch.arange(PATTERN)
    whole = pattern.repeat(3)
    assert repeats(whole, pattern)
    assert repeats(whole[5000:9500], pattern, 5000)
    assert not repeats(whole[5000:9500], pattern, 5001)
    for index in (0, PATTERN, 2 * PATTERN + 7):
        broken = whole.clone()
        broken[index] += 1
        assert not repeats(broken[: 2 * PATTERN + 8], pattern)


def test_a_slot_is_filled_between_few_and_many_repeats() -> None:
    assert iterations_for(first_s=0.01, slot_s=0.2, most=50) == 20
    assert iterations_for(first_s=1e-9, slot_s=0.2, most=50) == 50
    assert iterations_for(first_s=9.0, slot_s=0.2, most=50) == 3
    assert iterations_for(first_s=9.0, slot_s=0.2, most=1) == 1


def test_settings_choose_operations_and_sizes() -> None:
    settings = settings_for(
        operations="broadcast, all_reduce,broadcast", min_bytes="1000", max_bytes="8000", factor="2"
    )
    assert settings.chosen_operations == ("broadcast", "all_reduce")
    assert settings.sizes == (1000, 2000, 4000, 8000)
    assert parse_settings("collectives", {}).sizes == tuple(2**power for power in range(10, 29, 2))
    assert parse_settings("collectives", {}).chosen_operations == tuple(BUS_FACTORS)


def test_mistakes_in_settings_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        settings_for(operations="all_reduse", max_bytes="100", min_bytes="200", lr="1", batch="3")
    text = "\n".join(caught.value.mistakes)
    assert len(caught.value.mistakes) == 4
    assert "did you mean all_reduce?" in text
    assert "max_bytes: 100 is less than min_bytes, 200" in text
    assert "lr: no such setting" in text
