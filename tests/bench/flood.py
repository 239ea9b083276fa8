"""A job that prints 1 GB a minute, alone and followed: its speed, and what following costs.

    python tests/bench/flood.py [ROUNDS]

Each round runs the job alone and with what `orch logs -f` does attached, in turns, on this machine: a step writes 40 kB
to each of its two streams and computes a little. It prints steps a second, what a step takes, the follower's largest
memory and how much it printed. Then how long a line takes from its bytes to the output.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.floods import FLOODS, figures_of, follower_of
from tests.support.local_job import Gang, gang

LINES = """
import sys, time
from orchestrator.views import following
from orchestrator.jobs.frames import FilePiece
from orchestrator.jobs.lines import Splitter

data = b"".join(b"step %d loss 0.123456 lr 0.1 samples/s 333.2 and some other words\\n" % i for i in range(400_000))
splitter, began = Splitter(), time.perf_counter()
pieces = [FilePiece("rank-0/stdout.log", 0, at, data[at : at + (1 << 18)]) for at in range(0, len(data), 1 << 18)]
following.print_events(tuple(splitter.split("a", piece)) for piece in pieces)
print((time.perf_counter() - began) / 0.4, file=sys.stderr)
"""


def flood(folder: Path, watch: Callable[[Gang], None]) -> dict[str, float]:
    """What the job reports of its steps."""
    folder.mkdir()
    with gang(folder, FLOODS, ranks=(1,)) as job:
        job.launch()
        watch(job)
        return figures_of(job)


def follow(job: Gang) -> None:
    """Follows it to its end, and says what that cost."""
    printed = 0
    with follower_of(job) as following:
        while data := following.stdout.read(1 << 20):
            printed += len(data)
        print(f"  follower: {following.stderr.read().split()[-1].decode()} MiB, printed {printed / 1e6:.0f} MB")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for how, watch in (("alone", lambda job: None), ("followed", follow)):
                figures = flood(Path(folder, f"{how}-{number}"), watch)
                print(f"{how:9} {figures['steps_per_s']:.1f} steps/s, {figures['work_ms']:.2f} ms of work a step")
    done = subprocess.run([sys.executable, "-c", LINES], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    print(f"400,000 lines            {float(done.stderr):.2f} us a line")


if __name__ == "__main__":
    main()
