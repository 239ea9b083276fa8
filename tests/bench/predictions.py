"""What `orch plan` predicts beside what happens, on racks made up at random.

    .venv/bin/python tests/bench/predictions.py [--clusters 30] [--seed 1] [--jitter 0.05] [--out FILE]
    .venv/bin/python tests/bench/predictions.py --clusters 3 --rows ddp,half+shares --profile-s 8

Each rack has two or three hosts of one rank each, with paces, fixed times and links drawn at random, a pace that
jitters by so much from step to step, and ResNet-152's real gradient. The rows run in turn inside one gang. `orch run
--dry-run` says twice what it predicts of the same settings, links as declared: once with speeds known exactly, which
are the very paces that the hosts keep, and once with speeds as `orch profile` measured them on these hosts. The first
checks the model of the wire and of each way to use it alone; the second is what a person has. At the end: errors of
each row and source, the worst of them named, and of how many pairs of rows of one rack the order was right. Rows in
which the CPU was the limit, not the pace, are left out and counted, and so are profiles that were not kept. Racks that
stand in the file already are not measured again. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from rack import Rack, rack, show_machine
from rows import Host, fastest, inventory, measure, predicted, with_shares

LOCAL = {"strategy": "ddp", "shares": "fastest", "fidelity": "local"}
ROWS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "shares": "equal"},
    "ddp+shares": {"strategy": "ddp", "shares": "fastest"},
    "half+shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "half"},
    "compressed+shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "compressed", "compress_after": 0},
    "local-waiting+shares": {**LOCAL, "local_steps": 4, "local_overlap": 0},
    "local-overlapped+shares": {**LOCAL, "local_steps": 8, "local_overlap": 2},
    "local-overlapped-half+shares": {**LOCAL, "local_steps": 8, "local_overlap": 2, "wire": "bf16"},
}
SOURCES = {"exact": "speeds known exactly", "profiled": "speeds from `orch profile`"}
"""Keys of a row in the file, and where its prediction had the hosts' speeds from."""
CLOSE = 0.03
"""Rows nearer to each other than this cannot be distinguished by a few steps."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jitter", type=float, default=0.05, help="of each step's time, at most, either way")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--profile-s", type=float, default=15.0, help="for each host")
    parser.add_argument("--out", type=Path, default=Path("runs/predictions.jsonl"))
    asked = parser.parse_args()
    show_machine()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    known = {one["seed"]: one for one in done}
    for seed in range(asked.seed, asked.seed + asked.clusters):
        if seed not in known:
            known[seed] = try_one(seed, asked)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(known[seed]) + "\n")
        show(known[seed])
    judge([known[seed] for seed in range(asked.seed, asked.seed + asked.clusters)])


def try_one(seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(seed)
    hosts = random_hosts(chance, asked.jitter)
    # Shorter steps than this, the two cores that stand in for all hosts cannot keep.
    batch = round(chance.uniform(0.25, 0.6) * sum(host.samples_per_s for host in hosts))
    shares, shares_setting = fastest(hosts, batch)
    chosen = with_shares({name: ROWS[name] for name in asked.rows.split(",")}, shares_setting)
    with rack(inventory(hosts)) as lab:
        measured = measure(lab, chosen, batch=batch, blocks=1, steps=3, warmup_blocks=0)
        figures = {
            name: {"measured": row.samples_per_s, "exact": predicted(lab, row), "late": row.late, "valid": row.valid}
            for name, row in measured.items()
        }
        if profile(lab, batch, asked.profile_s):
            for name, row in measured.items():
                figures[name]["profiled"] = predicted(lab, row)
    return {"seed": seed, "batch": batch, "shares": shares, "hosts": [asdict(host) for host in hosts], "rows": figures}


def profile(lab: Rack, batch: int, profile_s: float) -> bool:
    """Whether one was kept of every host: not where this machine had too little CPU."""
    settings = ("--set", f"batch={batch}", "--set", f"profile_s={profile_s}")
    done = lab.person.types("profile", "--exp", "resnet152_cifar", *settings, exit_code=None, timeout_s=600)
    return done.returncode == 0


def random_hosts(chance: random.Random, jitter: float) -> list[Host]:
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
            jitter=jitter,
        )
        for number in range(count)
    ]


def show(one: dict[str, Any]) -> None:
    hosts = ", ".join(
        f"{h['ranks']} x {h['samples_per_s']:.0f}/s + {h['fixed_ms']:.0f} ms on {h['bandwidth']}" for h in one["hosts"]
    )
    print(f"{one['seed']}: {hosts}; batch {one['batch']}, shares {','.join(map(str, one['shares']))}")
    for name, row in one["rows"].items():
        said = (f"{words} {row[key]:.0f} ({_error(row, key):+.1%})" for key, words in SOURCES.items() if key in row)
        late = "" if row["valid"] else f"; NOT VALID, {row['late']:.1%} late"
        print(f"   {name:29} {row['measured']:.0f} samples/s; {'; '.join(said)}{late}", flush=True)


def _error(row: Mapping[str, Any], source: str) -> float:
    return row[source] / row["measured"] - 1


def judge(found: Sequence[dict[str, Any]]) -> None:
    of_racks = [{name: row for name, row in one["rows"].items() if row["valid"]} for one in found]
    left_out = sum(len(one["rows"]) for one in found) - sum(map(len, of_racks))
    unkept = sum(not any("profiled" in row for row in one["rows"].values()) for one in found)
    print(f"{len(found)} racks, {sum(map(len, of_racks))} rows ({left_out} left out: the CPU was the limit); of "
          f"{unkept} racks no profile was kept")  # fmt: skip
    columns = dict[tuple[str, str], list[float]]()
    for rows in of_racks:
        for name, row in rows.items():
            for source in SOURCES:
                if source in row:
                    columns.setdefault((source, name), []).append(abs(_error(row, source)))
    for source, words in SOURCES.items():
        of_source = {name: errors for (key, name), errors in columns.items() if key == source}
        if of_source:
            print(f"{words}: {_spread([error for errors in of_source.values() for error in errors])}")
        for name, errors in of_source.items():
            print(f"   {name:29} {_spread(errors)}")
        judge_order([[row for row in rows.values() if source in row] for rows in of_racks], source)
    if columns:
        source, name = max(columns, key=lambda key: statistics.median(columns[key]))
        print(f"the worst column: {name}, {SOURCES[source]}, {_spread(columns[source, name])}")


def _spread(errors: Sequence[float]) -> str:
    ranked = sorted(errors)
    return (
        f"error of {len(ranked)} rows: median {statistics.median(ranked):.1%}, 95th percentile "
        f"{ranked[int(0.95 * len(ranked))]:.1%}, worst {ranked[-1]:.1%}"
    )


def judge_order(of_racks: Sequence[Sequence[Mapping[str, Any]]], source: str) -> None:
    pairs = [pair for rows in of_racks for pair in combinations(rows, 2)]
    clear = [pair for pair in pairs if abs(math.log(pair[0]["measured"] / pair[1]["measured"])) > CLOSE]
    for what, some in (("all pairs", pairs), (f"pairs more than {CLOSE:.0%} apart", clear)):
        right = sum((a["measured"] < b["measured"]) == (a[source] < b[source]) for a, b in some)
        if some:
            print(f"   order right in {right} of {len(some)} {what}, {right / len(some):.1%}")


if __name__ == "__main__":
    sys.exit(main())
