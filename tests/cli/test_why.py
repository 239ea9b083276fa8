"""`orch why` as a person types it, over real SSH servers: the verdict first, hosts that are silent, `--json`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import needs_sshd

SCRIPT = "import time\ndef waits():\n    time.sleep(600)\nprint('up', flush=True)\nwaits()\n"


@needs_sshd
def test_a_person_asks_why_a_job_stands_still(tmp_path: Path) -> None:
    with ssh_rack(tmp_path) as rack:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "train.py").write_text(SCRIPT)
        job = rack.types("run", "--nodes", "a2000,v100", "--detach", "--", "code/train.py").stdout.strip()
        while rack.types("logs", job).stdout.count("up") < 2:
            pass
        told = json.loads(rack.types("why", job, "--json").stdout)
        assert (told["schema"], told["job"], told["silent"]) == (1, job, {})
        assert [(rank["rank"], rank["place"]) for rank in told["ranks"]] == [
            (0, "train.py:3 in waits"),
            (1, "train.py:3 in waits"),
        ]
        shown = rack.types("why", job, "--stacks").stdout
        assert shown.splitlines()[0].startswith(f"{told['verdict']['kind'].replace('-', ' ')}: ")
        assert "main thread\n    train.py:3 in waits: time.sleep(600)\n    train.py:5: waits()\n" in shown
        rack.servers["v100"].freeze()
        silent = rack.types("why")
        assert silent.stdout.startswith("half dead link: v100") and "error: v100" in silent.stderr
        rack.servers["a2000"].freeze()
        nobody = rack.types("why", "--json", exit_code=3)
        assert nobody.stdout == "" and nobody.stderr.count("error:") >= 1
        for name in ("a2000", "v100"):
            rack.servers[name].stop()
            rack.servers[name].start()
        rack.types("cancel", "--job", job)
        ended = rack.types("why", job)
        assert "has ended already (cancelled)" in ended.stderr
        assert ended.stdout.startswith("no stall: its ranks have ended")
