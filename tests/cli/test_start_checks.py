"""What `orch run` looks at by itself, on hosts behind real SSH servers with a stand-in for nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.gpu_rack import SMI, gpu_rack
from tests.support.sshd import needs_sshd

pytestmark = [needs_sshd, pytest.mark.timeout(300)]

HOT = "0, GPU-x, 00000000:3B:00.0, 0, No, No, No, 0x40, 1200, 1200, 250, 250, 16, 16, [N/A]"
BROKEN = "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"


def test_a_driver_that_broke_since_up_stops_a_start_and_a_hot_gpu_is_one_line_of_it(tmp_path: Path) -> None:
    with gpu_rack(tmp_path) as rack:
        person, go = rack.person("alice"), str(tmp_path)
        sick, smi = tmp_path / "bin-b" / "nvidia-smi", tmp_path / "bin-a" / "nvidia-smi"
        smi.write_text(SMI.format(uuid=rack.uuids["a"]).replace("in\n", f"in *fabric*) echo '{HOT}';;\n", 1))
        well = sick.read_text()
        sick.write_text(BROKEN)
        refused = person.types("run", "--json", "train.py", go, exit_code=3)
        found = json.loads(refused.stdout)
        assert {(one["id"], one["level"], *one["where"]) for one in found["findings"]} == {
            ("P06", "block", "b"),
            ("P10", "warn", "a"),
        }
        assert "b: its driver is broken" in found["error"] and "b: its driver is broken" in refused.stderr
        assert [*person.folder.glob("*/jobs/*")] == []
        sick.write_text(well)
        done = person.types("run", "--json", "--nodes", "a", "train.py", go)
        assert [one["id"] for one in json.loads(done.stdout)["findings"]] == ["P10"]
        assert [line for line in done.stderr.splitlines() if "a: GPU 0 is slowed by heat: look at its fans" in line]
