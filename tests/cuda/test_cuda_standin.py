"""The stand-in itself: the time line, memory, and what it says of ranks that do not call the same."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.cuda.build import ROOT, CannotBuild
from tests.cuda.environment import environment
from tests.cuda.machine import Machine

TIME_LINE = """
import ctypes, torch
now = ctypes.CDLL(None).standin_now
now.restype = ctypes.c_double
x = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()

def marked(work):
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record(); work(); last.record()
    before = now()
    last.synchronize()
    return first.elapsed_time(last), 1000 * (now() - before)

def ten():
    for _ in range(10): x.add_(1)

on_gpu, waited = marked(ten)
assert abs(on_gpu - 10) < 0.2, on_gpu          # 10 kernels of 1 ms
assert 9 < waited < 10, waited                 # launched within 0.2 ms: the host runs ahead

side = torch.cuda.Stream()
def beside():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): ten()
    ten()
    torch.cuda.current_stream().wait_stream(side)
on_gpu, _ = marked(beside)
assert abs(on_gpu - 10) < 0.5, on_gpu          # both streams at once

def after():
    ten()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): ten()
    torch.cuda.current_stream().wait_stream(side)
on_gpu, _ = marked(after)
assert abs(on_gpu - 20) < 0.5, on_gpu          # one after the other

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): ten()
assert torch.cuda.memory_allocated() >= 4000
on_gpu, waited = marked(graph.replay)
assert abs(on_gpu - 10) < 0.2, on_gpu
assert torch.cuda.get_device_name() == "Stand-in GPU"
assert torch.tensor([1.5, 2.5]).cuda().cpu().tolist() == [1.5, 2.5]

def counted(name):
    names = ctypes.CDLL(None).standin_counter_names
    names.restype = ctypes.c_char_p
    values = (ctypes.c_long * 99)()
    ctypes.CDLL(None).standin_counts(values)
    return values[names().decode().split().index(name)]

ten()
there = torch.tensor([1.5, 2.5]).cuda().to("cpu", non_blocking=True)
copied = torch.cuda.Event()
copied.record()
assert not (there == there).any(), there       # read before the copy is over: nothing but NaN
copied.synchronize()
assert there.tolist() == [1.5, 2.5]
source = torch.tensor([1.5, 2.5]).pin_memory()
for overwritten in (0, 1):
    ten()
    source.to("cuda", non_blocking=True)
    if overwritten: source[0] = 7              # while the copy is under way
    torch.cuda.synchronize()
    assert counted("overwritten") == overwritten
try:
    torch.empty(1 << 31, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("fine")
"""


@pytest.fixture(scope="module")
def standin():
    def run(program: str, **knobs: object) -> subprocess.CompletedProcess[str]:
        try:
            words = environment(1, knobs)
        except CannotBuild as error:
            pytest.skip(f"no stand-in for CUDA: {error}")
        variables = {**os.environ, **words, "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)

    return run


def test_streams_events_graphs_and_memory_keep_one_time_line(standin):
    done = standin(TIME_LINE, FAKE_CLOCK="virtual", FAKE_KERNEL_US=1000, FAKE_LAUNCH_US=10, FAKE_GIB=1)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_its_server_ends_though_a_process_forked_from_ours_holds_its_pipe(machine):
    one = Machine()
    context = multiprocessing.get_context("fork")
    stays = context.Event()
    other = context.Process(target=stays.wait)
    other.start()
    try:
        one.close()
        assert one.server.returncode == 0 and other.is_alive()
    finally:
        stays.set()
        other.join()
