"""What `orch plan` foresees beside what happens, on racks made up at random.

    .venv/bin/python tests/bench/predictions.py [--clusters 30] [--seed 1] [--out runs/predictions.jsonl]

Each rack has two or three hosts of one rank each, with paces, fixed times and links drawn at random, and ResNet-152's
real gradient. The rows run in turn inside one gang, and `orch run --dry-run` says what it foresees of the same
settings, from the hosts' paces and the declared links alone. At the end: errors over all rows, and of how many pairs of
rows of one rack the order was right. Rows in which the CPU was the limit, not the pace, are left out and
counted. Racks that stand in the file already are not measured again. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from rack import rack, show_machine
from rows import Host, fastest, foreseen, inventory, measure, with_shares

ROWS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp+shares": {"strategy": "ddp", "shares": "fastest"},
    "half+shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "half"},
    "local+shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "local", "local_steps": 4, "local_overlap": 0},
}
CLOSE = 0.03
"""Rows nearer to each other than this cannot be told apart by a few steps."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/predictions.jsonl"))
    asked = parser.parse_args()
    show_machine()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    known = {one["seed"]: one for one in done}
    for seed in range(asked.seed, asked.seed + asked.clusters):
        if seed not in known:
            known[seed] = try_one(seed)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(known[seed]) + "\n")
        show(known[seed])
    judge([known[seed] for seed in range(asked.seed, asked.seed + asked.clusters)])


def try_one(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    hosts = random_hosts(chance)
    # Shorter steps than this, the two cores that stand in for all hosts cannot keep.
    batch = round(chance.uniform(0.25, 0.6) * sum(host.samples_per_s for host in hosts))
    shares, told_shares = fastest(hosts, batch)
    with rack(inventory(hosts)) as lab:
        measured = measure(lab, with_shares(ROWS, told_shares), batch=batch, blocks=1, steps=3, warmup_blocks=0)
        told = {
            name: {"measured": row.samples_per_s, "foreseen": foreseen(lab, row), "late": row.late, "valid": row.valid}
            for name, row in measured.items()
        }
    return {"seed": seed, "batch": batch, "shares": shares, "hosts": [asdict(host) for host in hosts], "rows": told}


def random_hosts(chance: random.Random) -> list[Host]:
    """Two cores carry about 4 Gbps in all."""
    count = chance.choice([2, 2, 2, 2, 3])
    links = ["1Gbps", "1.3Gbps"] if count == 3 else ["1.5Gbps", "2Gbps", "2.5Gbps"]
    return [
        Host(
            name=f"n{number}",
            ranks=1,
            samples_per_s=round(math.exp(chance.uniform(math.log(150), math.log(900)))),
            bandwidth=chance.choice(links),
            fixed_ms=round(chance.uniform(0, 20), 1),
        )
        for number in range(count)
    ]


def show(one: dict[str, Any]) -> None:
    hosts = ", ".join(
        f"{h['ranks']} x {h['samples_per_s']:.0f}/s + {h['fixed_ms']:.0f} ms on {h['bandwidth']}" for h in one["hosts"]
    )
    print(f"{one['seed']}: {hosts}; batch {one['batch']}, shares {','.join(map(str, one['shares']))}")
    words = (
        f"{name} {row['measured']:.0f}, plan {row['foreseen']:.0f} ({row['foreseen'] / row['measured'] - 1:+.1%})"
        + ("" if row["valid"] else f" NOT VALID {row['late']:.1%} late")
        for name, row in one["rows"].items()
    )
    print(f"   {';  '.join(words)}", flush=True)


def judge(found: Sequence[dict[str, Any]]) -> None:
    of_racks = [[row for row in one["rows"].values() if row["valid"]] for one in found]
    left_out = sum(len(one["rows"]) for one in found) - sum(map(len, of_racks))
    errors = sorted(abs(row["foreseen"] / row["measured"] - 1) for rows in of_racks for row in rows)
    print(f"{len(found)} racks, {len(errors)} rows ({left_out} left out: the CPU was the limit)")
    print(f"error: median {statistics.median(errors):.1%}, 95th percentile {errors[int(0.95 * len(errors))]:.1%}, "
          f"worst {errors[-1]:.1%}")  # fmt: skip
    pairs = [pair for rows in of_racks for pair in combinations(rows, 2)]
    clear = [pair for pair in pairs if abs(math.log(pair[0]["measured"] / pair[1]["measured"])) > CLOSE]
    for what, some in (("all pairs", pairs), (f"pairs more than {CLOSE:.0%} apart", clear)):
        right = sum((a["measured"] < b["measured"]) == (a["foreseen"] < b["foreseen"]) for a, b in some)
        print(f"order right in {right} of {len(some)} {what}, {right / len(some):.1%}")


if __name__ == "__main__":
    sys.exit(main())
