"""What the network costs, collective by collective: latency, bus bandwidth, and the line through all sizes.

    .venv/bin/python tests/bench/collectives.py [RUNS] [INVENTORY] [KEY=VALUE]...

`orch run --exp collectives` on the lab (two hosts at 2.5 Gbps unless an inventory says otherwise); medians over the
runs, spread beside them. ruler.py gives what iperf3 reaches on the same links. Needs root.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rack import ROOT, rack, show_machine, spread


def main() -> None:
    words = [word for word in sys.argv[1:] if "=" not in word]
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    inventory = Path(words[1]) if len(words) > 1 else ROOT / "inventory" / "lab_a2000_v100.yaml"
    show_machine()
    with rack(inventory) as lab:
        summaries = [lab.run("collectives", **settings).summary for _ in range(int(words[0]) if words else 3)]
    for sentence in {sentence for summary in summaries for sentence in summary["missing"]}:
        print(f"  {sentence}")
    print(f"{inventory.stem}, {len(summaries)} runs of {spread([summary['total_s'] for summary in summaries])} s")
    heads = ("latency us, 1 KiB", 24), ("bus Gbps, 16 MiB", 20), ("64 MiB", 20), ("256 MiB", 20), ("alpha us", 24)
    print(" " * 15, *(f"{head:{width}}" for head, width in heads), "beta Gbps")
    for name in dict.fromkeys(each["operation"] for each in summaries[0]["collectives"]["operations"]):
        lines = [line for summary in summaries if (line := line_of(summary, name))]
        buses = [spread(found, 2) if (found := buses_of(summaries, name, size)) else "-" for size in (24, 26, 28)]
        ends = spread([line["latency_us"] for line in lines]), *buses, spread([line["alpha_us"] for line in lines])
        print(f"{name:15} {ends[0]:24} {ends[1]:20} {ends[2]:20} {ends[3]:20} {ends[4]:24} "
              f"{spread([line['beta_gbps'] for line in lines], 2)}, "
              f"off by at most {max(line['worst_error'] for line in lines):.0%}")  # fmt: skip


def line_of(summary: dict[str, Any], operation: str) -> dict[str, Any] | None:
    return next((line for line in summary["collectives"]["operations"] if line["operation"] == operation), None)


def buses_of(summaries: list[dict[str, Any]], operation: str, power: int) -> list[float]:
    """Of arrays of 2**power bytes, less what does not divide among the ranks."""
    times = [time for summary in summaries for time in summary["collectives"]["times"]]
    chosen = [time for time in times if time["operation"] == operation and 0.99 < time["bytes"] / 2**power <= 1]
    return [time["busbw_gbps"] for time in chosen if time["busbw_gbps"] is not None]


if __name__ == "__main__":
    main()
