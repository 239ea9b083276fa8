"""A supervisor whose disk takes longer than the job's lease, or that stands still itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning import JobSpec
from orchestrator.remote import agent
from orchestrator.remote.layout import JobFolder
from tests.support.local_job import gang
from tests.support.sshd import wait_for

SILENCE_S, SLOW_S = 4.0, 9
SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static void wait_for_disk(const char *name) {{
    if (access("{folder}/slow", F_OK) == 0) {{
        int (*make)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
        make(name, 0700);
        sleep({slow_s});
    }}
}}
int fsync(int file) {{
    wait_for_disk("{folder}/slow-fsync");
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}}
int stat(const char *path, struct stat *found) {{
    size_t length = strlen(path);
    if (length > 8 && strcmp(path + length - 8, "/control") == 0) wait_for_disk("{folder}/slow-stat");
    return ((int (*)(const char *, struct stat *))dlsym(RTLD_NEXT, "stat"))(path, found);
}}
int stat64(const char *path, struct stat64 *found) {{ return stat(path, (struct stat *)found); }}
"""
WAITS = "import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.02)\n"


def bears(**more: Any) -> dict[str, Any]:
    """Less than the command line allows, which is 20 s."""
    return {"asked": JobSpec(script="script.py", **more).model_copy(update={"silence_s": SILENCE_S})}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_disk_that_takes_longer_than_the_lease_ends_no_job(tmp_path: Path) -> None:
    library, go, slow = tmp_path / "slow.so", tmp_path / "go", tmp_path / "slow"
    text = SLOW.format(folder=tmp_path, slow_s=SLOW_S)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"], input=text, text=True, check=True)
    (tmp_path / "job").mkdir()
    with gang(tmp_path / "job", WAITS.format(go=str(go)), activate=f"export LD_PRELOAD={library}", **bears()) as job:
        job.launch()
        job.wait_running()
        slow.touch()
        mark = {"step": 1, "epoch": 1, "loss": "NaN", "of": 1}
        for node, rank in (("a", 0), ("b", 1)):  # a reason to write the record
            assert agent.tell(JobFolder(job.folder(node)), {"rank": rank, "event": "not finite", "mark": mark})
        wait_for((tmp_path / "slow-stat").exists, "a slow look at a file", 30)
        time.sleep(SLOW_S)  # a whole look, longer than both leases
        slow.unlink()
        assert all(
            record["ranks"][rank]["not_finite"] for rank, record in zip("01", job.agents().values(), strict=True)
        )
        go.touch()
        record = job.wait()
        assert (record.state, record.first_failure) == ("succeeded", None)


def test_a_supervisor_that_stood_still_is_the_cause_of_its_ranks_end(tmp_path: Path) -> None:
    with gang(tmp_path, WAITS.format(go="/none"), ranks=(2,), **bears()) as job:
        job.launch()
        found = job.wait_running()["a"]
        os.kill(found["pid"], signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            for rank in range(2):
                wait_for((job.folder("a") / f"rank-{rank}" / "exit.json").exists, "the rank's end", 60)
        finally:
            os.kill(found["pid"], signal.SIGCONT)
        assert SILENCE_S <= time.monotonic() - began_s < 4 * SILENCE_S
        first = job.wait().first_failure
        assert first and (first.kind, first.node, first.whose) == ("supervisor", "a", "hosts")
        assert first.reason.startswith("the supervisor stood still")
