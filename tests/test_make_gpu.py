"""`make gpu` where there is no GPU: what it says, how it judges and packs, and that a failure costs a row."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.gpu import __main__ as program
from tests.gpu import child, expected, parcel, table
from tests.gpu.facts import Facts
from tests.gpu.parts import Bench, Part, all_parts, alone, collectives, cut, suite, two
from tests.gpu.parts import overlap as overlap_part
from tests.gpu.row import Range, Row, failed, figure, number
from tests.gpu.runs import WARM_UP, Done, Runs

ROOT = Path(__file__).resolve().parents[1]
GPU = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 141 << 30}
FOUND = {"why_unusable": "", "stand_in": False, "gpus": [GPU], "torch": "2.15.0", "cuda": "13.2", "nccl": [2, 30, 7]}


@pytest.fixture
def bench(tmp_path):
    return Bench(Facts(FOUND, []), Runs(tmp_path, gpus=1), None)


def result(stand_in=False):
    return {"stand_in": stand_in, "took_s": {}, "rows": []}


def played(play, bench, **asked):
    found = result(**asked)
    program._play(Part("some", "a part", 60, play), bench, found)
    return found["rows"]


# ---- the whole program ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no NVIDIA GPU" in ended.stderr and "docs/gpu.md" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_its_tests_are_skipped_before_anything_imports_torch():
    script = "import sys, pytest; code = pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/gpu']); "
    script += "print('torch' in sys.modules, int(code))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "False 5", ended.stdout  # 5: no tests were collected
    assert "no NVIDIA GPU" in ended.stdout


def test_it_needs_the_standard_library_alone_beside_what_it_starts():
    command = [sys.executable, "-S", "-m", "tests.gpu", "--help"]  # -S: no packages
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "collectives" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "alone,some"], "no such part: some; there are tests, alone"),
        (["--mnist", "/nowhere"], "holds no MNIST/raw"),
        (["--minutes", "0"], "is not a number of minutes"),
    ],
)
def test_wrong_usage_is_answered_at_once(capsys, arguments, message):
    with pytest.raises(SystemExit) as left:
        program.main(arguments)
    assert left.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_mistake_of_a_part_is_a_row(bench):
    def play(bench):
        yield figure("first", 1.0, "ms")
        raise KeyError("second")

    rows = played(play, bench)
    assert [row["verdict"] for row in rows] == ["", "failed"]
    assert rows[1]["note"] == "KeyError: 'second'"
    assert "KeyError" in (bench.folder / "some-traceback.log").read_text()


def test_a_part_whose_time_is_over_begins_nothing_more(bench):
    def play(bench):
        bench.runs.deadline_s = time.monotonic()
        yield figure("first", 1.0, "ms")
        raise AssertionError("went on")

    assert [row["verdict"] for row in played(play, bench)] == ["", "skipped"]


def test_figures_of_the_stand_in_are_not_judged(bench):
    rows = [figure("ms", 99.0, "ms", Range(1, 2, "a guess")), failed("other", "why")]
    assert [row["verdict"] for row in played(lambda _: iter(rows), bench, stand_in=True)] == ["stand-in", "failed"]
    assert [row["verdict"] for row in played(lambda _: iter(rows), bench)] == ["above", "failed"]


def test_an_interrupted_run_writes_its_file(tmp_path, monkeypatch, capsys):
    def play(bench):
        yield figure("first", 1.0, "ms")
        raise KeyboardInterrupt

    parts = (Part("some", "a part", 60, play), Part("more", "never played", 60, lambda _: iter(())))
    monkeypatch.setattr(program, "_chosen", lambda _: parts)
    monkeypatch.setattr(program.machine, "find_facts", lambda _: Facts({**FOUND, "cores": 2}, []))
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main(["--out", str(tmp_path)]) == 130
    (archive,) = tmp_path.glob("*.tar.gz")
    assert str(archive) in capsys.readouterr().out
    with tarfile.open(archive) as packed:
        (name,) = [name for name in packed.getnames() if name.endswith("result.json")]
        document = json.load(packed.extractfile(name))
    assert document["interrupted"] and [row["what"] for row in document["rows"]] == ["first"]


# ---- running programs -----------------------------------------------------------------------------------------------


def run(tmp_path, script, limit_s=60.0):
    return child.run([sys.executable, "-c", script], tmp_path / "log", limit_s)


def test_a_programs_end_and_its_cause(tmp_path):
    assert run(tmp_path, "print('fine')").succeeded
    assert run(tmp_path, "import sys; print('error: no room'); sys.exit(3)").cause == "no room"
    assert run(tmp_path, "def f():\n    raise ValueError('raised')\nf()").cause == "ValueError: raised"
    assert run(tmp_path, "import os; os._exit(4)").cause == "exit code 4, without a word"
    script = "import sys; print('last words\\nframe #3: _start + 0x21\\ninterrupted by SIGTERM'); sys.exit(143)"
    assert run(tmp_path, script).cause == "ended by SIGTERM; last: last words"
    assert run(tmp_path, "import os; print('step 3', flush=True); os.abort()").cause == "ended by SIGABRT; last: step 3"


def test_a_program_out_of_time_is_ended(tmp_path):
    ended = child.run(["sleep", "1000"], tmp_path / "log", limit_s=0.1)
    assert (ended.exit_code, ended.cause) == (None, "not done within 0 s, without a word")


def test_what_a_program_started_ends_with_it():
    started = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with started:
        assert int(started.stdout.readline())
        child._end(started)
        # the pipe ends when the last that holds it has ended, the sleeper too
        assert started.stdout.read() == ""
    assert started.returncode == -signal.SIGTERM


# ---- judging --------------------------------------------------------------------------------------------------------


def test_a_range_says_where_a_figure_lies():
    assert [Range(1, 2, "").verdict(value) for value in (0.5, 1, 2, 3)] == [
        "below",
        "as expected",
        "as expected",
        "above",
    ]
    assert [str(Range(*bounds, "")) for bounds in ((1, 2), (None, 2), (1, None), (None, None))] == [
        "1 to 2", "at most 2", "at least 1", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.012"), (7.994, "7.99"), (40.46, "40.5"), (1489.4, "1,489"), (100.0, "100")]
)
def test_numbers_keep_three_digits(value, text):
    assert number(value) == text


def test_what_is_expected_of_a_card_comes_from_the_catalogue():
    range_ = expected.step_ms("NVIDIA H200", 256)
    assert range_.low < 37.7 < range_.high
    assert expected.step_ms("Fake 9000", 256) is None
    assert expected.comm_ms().low < 1489 < expected.comm_ms().high


def test_kernels_beside_an_all_reduce(tmp_path):
    events = [
        {"cat": "kernel", "name": "conv", "ts": 0, "dur": 100},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 50, "dur": 100},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 75, "dur": 100},
        {"cat": "kernel", "name": "conv", "ts": 100, "dur": 100},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 5},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert overlap_part.share_beside(overlap_part.of_trace(trace)) == pytest.approx(125 / 200)


def test_launches_are_kernels_and_graphs_that_the_host_asked_for(tmp_path):
    names = ("cudaLaunchKernel", "cudaGraphLaunch", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaEventRecord")
    events = [{"cat": "cuda_runtime", "name": name} for name in names]
    events += [{"cat": "cuda_driver", "name": "cuLaunchKernel"}, {"cat": "kernel", "name": "cutlass_Launch"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert cut.launches_of(tmp_path / "trace.json") == 4


def test_kernels_of_nsys_are_one_process_and_no_copies():
    head = "Start (ns),Duration (ns),CorrId,Ctx,Strm,Name\n"
    rows = "1000,2000,1,1,7,conv\n2000,1000,2,1,9,ncclDevKernel_AllReduce\n1500,9,3,2,7,other process\n"
    kernels = overlap_part.of_nsys(f"Processing...\n{head}{rows}5000,10,4,1,7,[CUDA memcpy HtoD]\n")
    assert [kernel.name for kernel in kernels] == ["conv", "ncclDevKernel_AllReduce"]
    assert overlap_part.share_beside(kernels) == 0.5


def test_tests_that_fail_are_rows(tmp_path):
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite><testcase name="test_a"/>'
        '<testcase name="test_b"><failure message="assert 1 == 2&#10;x"/></testcase>'
        '<testcase name="test_c"><skipped message="no"/></testcase></testsuite></testsuites>'
    )
    rows = list(suite.rows_of(file))
    assert [(row.what, row.measured, row.verdict) for row in rows] == [
        ("tests marked gpu", "1 of 2 pass", "differs"), ("b", "", "failed"), ("1 test", "", "skipped"),
    ]  # fmt: skip
    assert rows[1].note == "assert 1 == 2"


def ran(tmp_path, *records, exit_code=0, output=""):
    log = tmp_path / "log"
    log.write_text(output)
    return Done(child.Ended(exit_code, log, 60), (tuple(records),))


def steps(compute_ms, comm_ms):
    """After the warm-up, whose steps say nothing."""
    warm_up = [{"event": "step", "compute_ms": 9e9, "comm_ms": 0.0}] * WARM_UP
    return [*warm_up, *([{"event": "step", "compute_ms": compute_ms, "comm_ms": comm_ms}] * 3)]


@pytest.mark.parametrize(("compute_ms", "verdict"), [(60.0, "as expected"), (1500.0, "above")])
def test_a_wire_inside_of_compute_is_seen(tmp_path, compute_ms, verdict):
    found = {"allreduce_flat": ran(tmp_path, *steps(55.0, 1490.0)), "ddp": ran(tmp_path, *steps(compute_ms, 1490.0))}
    (row,) = two.wire_in_compute(found)
    assert row.verdict == verdict
    assert list(two.wire_in_compute({"ddp": found["ddp"]})) == []


def test_sizes_alone_are_held_against_the_catalogue_and_16_bits_against_32():
    full = {size: 40.0 + size / 40 for size in alone.SIZES}
    rows = list(alone.rows_of("NVIDIA H200", "fp32", full, {}))
    assert [row.verdict for row in rows] == ["as expected"] * len(alone.SIZES)
    assert rows[0].note == "1,538 samples/s"
    half = {size: 0.9 * full[size] for size in (64, 128, 256, 512, 1024)}
    verdicts = {row.what: row.verdict for row in alone.rows_of("NVIDIA H200", "bf16", half, full)}
    assert verdicts["  as a part of fp32, batch 256"] == "as expected"
    assert verdicts["ResNet-152 bf16, batch 2048"] == "skipped"


def of_ranks(tmp_path, *losses_of_ranks):
    records = [tuple({"event": "step", "loss": loss} for loss in losses) for losses in losses_of_ranks]
    return Done(child.Ended(0, tmp_path / "log", 60), tuple(records))


def test_losses_of_two_stages_are_held_against_those_of_one_process(tmp_path):
    alone = of_ranks(tmp_path, [4.0, 2.0])
    assert cut.losses_off(alone, of_ranks(tmp_path, [0.0, 0.0], [4.0, 2.0])) == [0, 0]
    assert cut.losses_off(alone, of_ranks(tmp_path, [0.0, 0.0], [4.0, 2.5])) == [0, 0.25]
    with pytest.raises(ValueError, match="shorter"):
        cut.losses_off(alone, of_ranks(tmp_path, [4.0]))
    row = cut._compared(alone, of_ranks(tmp_path, [4.0, 2.5]), 1, is_stand_in=False)
    assert (row.value, row.verdict) == (0, "as expected")
    assert row.note == "as a part of a step's; 0.0e+00 in the first 1, 2.5e-01 in 2 steps"


def test_all_parts_together_take_no_longer_than_is_said():
    assert sum(part.budget_s for part in all_parts()) <= 60 * program.MINUTES


def collective(operation, time_ms, error=None):
    figures = {"bytes": 1 << 20, "time_ms": time_ms, "busbw_gbps": time_ms and 1.2}
    return {"event": "collective", "operation": operation, **figures, "error": error}


def test_a_collective_that_is_refused_is_named(tmp_path):
    events = [collective("all_reduce", 7.0), collective("send_recv", None, "no such thing")]
    first, second = collectives.rows_of("gloo", ran(tmp_path, *events), why_not="")
    assert (first.verdict, first.measured, first.note) == ("differs", "1 of 2", "send_recv: no such thing")
    assert second.verdict == "as expected"
    (row,) = collectives.rows_of("gloo", ran(tmp_path, *events, exit_code=1, output="error: lost\n"), why_not="")
    assert (row.verdict, row.note) == ("failed", "lost (after all_reduce)")


def test_lines_fit_a_terminal():
    rows = [
        figure(
            "ResNet-152 bf16, batch 2048, and then some more words",
            12345.6,
            "samples",
            Range(10000, 20000, ""),
            "n " * 90,
        ),
        figure("  as a part", 0.5, "", Range(0.8, 1.5, "")),
        failed("tests", "x" * 200),
    ]
    lines = "\n".join([table.head(), *map(table.lines_of, rows)]).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  as a part ") and line.endswith("below") for line in lines)
    assert table.summary(rows) == "3 rows: 1 as expected, 1 below, 1 failed"


# ---- the file to send back ------------------------------------------------------------------------------------------


def test_what_is_sent_back_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(parcel.socket, "gethostname", lambda: "fox7.example.org")
    monkeypatch.setattr(parcel, "_user", lambda: "reineke")
    monkeypatch.setattr(parcel.Path, "home", lambda: Path("/home/reineke"))
    parcel._masks.cache_clear()
    folder = tmp_path / "gpu-1"
    folder.mkdir()
    log = "fox7:12 NCCL INFO NET/Socket: eth0:192.168.1.41<0> fe80::1:2:3:4 127.0.0.1 GPU-8a6e4f10-aaaa 12:30:45\n"
    (folder / "a.log").write_text(f"{log}/home/reineke/x of reineke in {ROOT}/tests, reinekes\n")
    (folder / "a-0.jsonl").write_text('{"event": "start", "host": "fox7.example.org", "t": 1.5}\n{"event": "st')
    parcel.write_result(folder, {"rows": [{"note": "on fox7"}]})
    with tarfile.open(parcel.pack(folder)) as packed:
        held = {name: packed.extractfile(name).read().decode() for name in packed.getnames()}
    parcel._masks.cache_clear()
    assert held["gpu-1/a.log"] == (
        "HOST:12 NCCL INFO NET/Socket: eth0:ADDRESS<0> ADDRESS 127.0.0.1 GPU-UUID 12:30:45\n"
        "~/x of USER in ./tests, reinekes\n"
    )
    assert held["gpu-1/a-0.jsonl"] == '{"event": "start", "host": "HOST", "t": 1.5}\n'
    assert json.loads(held["gpu-1/result.json"]) == {"rows": [{"note": "on HOST"}]}


def test_a_row_is_read_back_from_the_result():
    row = figure("what", 1.0, "ms", Range(0, 2, "somebody"))
    assert Row(**json.loads(json.dumps(row.__dict__))) == row
