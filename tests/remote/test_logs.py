"""What the end of a rank's log says: the line to show, and whether it is cause or effect."""

import os

import pytest

from orchestrator.remote.logs import LINE_CHARS, TAIL_BYTES, advice, is_secondary, log_tail, telling_line
from tests.support.cost import growth
from trainer.ranks import BY_ANOTHER

NCCL = [
    "[rank0]: Traceback (most recent call last):",
    "[rank0]:   work = group.allreduce([tensor], opts)",
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited",
    "[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "[rank0]: Last error:",
    "[rank0]: socketPollConnect: Connect to 10.77.0.2<40123> returned 113",
]


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:49718",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: Connection was likely closed. Did the remote server shutdown or crash?",
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
        "RuntimeError: [gloo] Timed out waiting 1800000ms for recv operation to complete",
        "RuntimeError: Connection reset by peer",
        "OSError: [Errno 113] No route to host",
        "[E1122 ProcessGroupNCCL.cpp] Aborting process on rank 1 due to timeout - collective operation timed out",
        "error - timeout watchdog detected operation error",
    ],
)
def test_what_survivors_print_is_known_as_an_effect(line):
    assert is_secondary(["Traceback (most recent call last):", line])


def test_an_nccl_failure_is_an_effect_and_its_telling_line_says_more_than_last_error():
    assert is_secondary(NCCL)
    assert telling_line(NCCL) == NCCL[3]


@pytest.mark.parametrize(
    "line",
    [
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "NCCL Last Error: Mismatched NCCL version detected : rank 0 version 23007 rank 1 version 22903",
        "misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_what_happens_to_a_rank_itself_is_a_cause_though_its_back_end_goes_down_too(line):
    assert not is_secondary([line, "Aborting process on rank 0 due to error - nccl hit async error"])
    assert not is_secondary([line, "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"])


def test_an_ordinary_error_is_a_cause_even_after_talk_of_lost_connections():
    lines = ["retrying: Connection refused", "Traceback (most recent call last):", "ValueError: batch must be positive"]
    assert not is_secondary(lines)
    assert telling_line(lines) == lines[-1]


def test_a_log_without_an_error_shows_its_last_line(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * (1 << 17) + b"\n\xff one\n\n  two \n\n")
    assert telling_line(log_tail(log)) == "two"


def test_no_log_says_nothing(tmp_path):
    assert telling_line(log_tail(tmp_path / "none")) is None
    assert not is_secondary([])


_TOO_LARGE = "use a smaller batch, or `--set accumulate=4`"
KNOWN = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": _TOO_LARGE,
    "RuntimeError: GET was unable to find an engine to execute this computation": _TOO_LARGE,
    "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution": _TOO_LARGE,
    "OSError: [Errno 28] No space left on device": "a disk is full",
    "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)": "--shm-size",
    "Error while creating shared memory segment /dev/shm/nccl-KWf (size 5967872)": "NCCL_SHM_DISABLE=1",
    "Mismatched NCCL version detected : rank 0 version 23007 rank 1 version 22903": "one build of torch",
    "CUDA error: uncorrectable ECC error encountered": "nvidia-smi -q -d ECC",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable": "compute mode",
    "RuntimeError: Expected to have finished reduction in the prior iteration before.": "no gradient",
    "RuntimeError: Detected mismatch between collectives on ranks.": "which collective comes next",
    "CUDA error: no kernel image is available for execution on the device": "not built for this GPU",
    "Failed to initialize NVML: Driver/library version mismatch": "reboot",
    "RuntimeError: DataLoader worker is killed by signal: Bus error. It is possible that (shm) is low": "/dev/shm",
    "OSError: [Errno 24] Too many open files": "ulimit -n",
    "libgomp: Thread creation failed: Resource temporarily unavailable": "ulimit -u",
    "RuntimeError: can't start new thread": "ulimit -u",
    "NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory": "NCCL_IB_DISABLE=1",
    "ModuleNotFoundError: No module named 'timm'": "lacks a module",
    "FileNotFoundError: [Errno 2] No such file or directory: '/home/u/data/x.npy'": "$ORCH_DATA",
    "DistNetworkError: The client socket has timed out after 60000ms while trying to connect": "firewall",
    "DistNetworkError: port: 29500, useIpv6: false, code: -98, name: EADDRINUSE": "`ss -ltnp` there shows which",
}


@pytest.mark.parametrize(("line", "words"), KNOWN.items(), ids=[line[:30] for line in KNOWN])
def test_what_is_known_is_said_in_plain_words_with_a_next_step(line, words):
    assert words in advice(["Traceback (most recent call last):", f"[rank0]: {line}"])


def test_what_is_not_known_or_was_long_ago_gets_no_advice():
    assert advice([]) is None
    assert advice(["ValueError: the batch is odd"]) is None
    assert advice(["No space left on device", "Traceback (most recent call last):", "ValueError: odd"]) is None


# Each begins a pattern again and again that goes on for the rest of the line.
GREEDY = [
    "ibv_reg_mr ",
    "creating shared memory segment ",
    "collective ",
    "mismatch between ",
    "timed out after 1 seconds waiting for ",
    "connection ",
]


@pytest.mark.parametrize("word", GREEDY)
@pytest.mark.parametrize("lines", [1, 130], ids=["one line", "many lines"])
def test_a_log_of_long_lines_is_read_in_no_time(tmp_path, word, lines):
    """The supervisor's event loop waits for it, and its heartbeats with it."""
    log = tmp_path / "stderr.log"
    log.write_text(f"{word * (TAIL_BYTES // len(word) // lines)}\n" * lines)
    (harmless := tmp_path / "stdout.log").write_text(f"{'word ' * (TAIL_BYTES // 5 // lines)}\n" * lines)

    def read(path):
        tail = log_tail(path)
        assert (advice(tail), is_secondary(tail)) == (None, False)

    assert growth(lambda: read(harmless), lambda: read(log)) < 30  # 50 and more if lines are not cut
    tail = log_tail(log)
    assert telling_line(tail).startswith(word.strip())
    assert max(map(len, tail)) <= LINE_CHARS


def test_what_a_script_puts_in_the_place_of_its_log_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "stderr.log")
    assert log_tail(tmp_path / "stderr.log") == []


def test_a_rank_that_another_one_ended_names_it_and_is_no_cause() -> None:
    assert is_secondary([f"error: {BY_ANOTHER}: rank 1 on lb, update 8: the loss does not depend on w"])
