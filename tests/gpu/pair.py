"""Two ranks of the trainer that see each other as two hosts with a GPU each: `python -m tests.gpu.pair --exp ...`

On one GPU, too: both then compute there in turn. NCCL goes by sockets over `lo`, as between hosts: each rank names a
host of its own (NCCL_HOSTID), so that NCCL tries neither peer access nor shared memory between them, nor finds that
they share a GPU (it compares the bus ids of one host's ranks; from 2.30 on a setting allows it).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

RANKS = 2
_NETWORK = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def main(arguments: list[str]) -> int:
    """The exit code of the first rank that ended badly, which ends the other; 0 where none did."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [_start(rank, address, arguments) for rank in range(RANKS)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start(rank: int, address: dict[str, str], arguments: list[str]) -> subprocess.Popen[bytes]:
    who = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    who |= {"ORCH_NODE": f"host{rank}", "NCCL_HOSTID": f"host{rank}", "CUDA_VISIBLE_DEVICES": _gpu_of(rank)}
    own = {name: str(value) for name, value in who.items()}
    command = [sys.executable, "-m", "tests.gpu.rank", *arguments]
    return subprocess.Popen(command, env={**os.environ, **_NETWORK, **address, **own})


def _gpu_of(rank: int) -> str:
    """GPU_OF_RANKS, like `0,1`: which GPU each rank sees."""
    gpus = os.environ.get("GPU_OF_RANKS", "0").split(",")
    return gpus[rank % len(gpus)]


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = [code for code in codes if code]
        if bad:
            return bad[0] if bad[0] > 0 else 128 - bad[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
