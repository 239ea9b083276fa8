"""What hosts get: the programs that travel to them, and what a job leaves in its work folder."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.transport import PACKAGE, needed, shipped_sources
from tests.golden.conftest import IS_WRITTEN, KEPT, Golden, masked
from tests.support.local_job import gang

SCRIPT = "import os, pathlib\npathlib.Path('out').mkdir(exist_ok=True)\nprint('trains', flush=True)\n"
GROWS = 1.15
"""How much a program may grow before somebody has to look: each start sends it to every host."""


def test_no_program_grows_unseen(golden: Golden) -> None:
    """By the bytes of its text; one that is no module's only import any more is counted as well."""
    sources = shipped_sources()
    imported = {module for text in sources.values() for module in re.findall(r"^ *from \.(\w+) import", text, re.M)}
    programs = sorted(
        name.removeprefix(f"{PACKAGE}.") for name in sources if name.removeprefix(f"{PACKAGE}.") not in imported
    )
    sizes = {
        one: sum(len(text.encode()) for text in needed(one, sources).values()) for one in programs if one != PACKAGE
    }
    kept = {one: int(size) for size, one in map(str.split, (KEPT / "programs.txt").read_text().splitlines())}
    gone = kept.keys() - sizes.keys()
    grown = {one: size for one, size in sizes.items() if size > GROWS * kept.get(one, 0)}
    if IS_WRITTEN and (gone or grown):
        golden("programs.txt", "".join(f"{size} {one}\n" for one, size in sizes.items()))
        return
    assert gone == set()
    assert grown == {}


def test_a_job_leaves_the_files_that_it_left(golden: Golden, tmp_path: Path) -> None:
    with gang(tmp_path, SCRIPT) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        folder = job.folder("a").parents[1]
        paths = [
            path
            for path in folder.rglob("*")
            if "orch_remote" not in path.parts[:-1] and "start" not in path.parts[:-1]
        ]
        listed = [f"{path.relative_to(folder)}{'/' * path.is_dir()} {path.lstat().st_mode & 0o777:o}" for path in paths]
    listing = "\n".join(sorted(listed)) + "\n"
    golden("work_folder.txt", masked(listing, JOB=job.plan.job))
