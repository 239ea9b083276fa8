"""A Slurm cluster that keeps accounts, and forgets jobs soon after their end."""

import shutil

import pytest

from tests.slurm.conftest import V100, Person
from tests.slurm.test_jobs import SCRIPT
from tests.support.slurm_lab import PATH, slurm_lab

MISSING = [name for name in ("slurmdbd", "mariadbd") if not shutil.which(name, path=PATH)]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get install slurmdbd mariadb-server")
def test_accounts_complete_what_slurm_has_forgotten(tmp_path):
    """S11: the same states, from sacct, for jobs that ended while nobody looked; an account and a QOS that refuse."""
    with slurm_lab(NODES="v100:v100:1:1:2500mbit", ACCOUNTS="1", FORGET="2") as lab:
        person = Person(lab, tmp_path)
        (person.folder / "train.py").write_text(SCRIPT)
        person.up(V100, account="none")
        assert "Invalid account" in person("run", "train.py", "2", code=2)
        assert [*(lab.work / tmp_path.name / "submitted").iterdir()] == []

        person.up(V100, account="lab", qos="short", time="10")
        person("run", "--detach", "train.py", "2")
        person.until(lambda: "the QOS does not allow that time" in person("jobs"))
        person.up(V100, account="lab", time="10")
        lab.exec("sbatch", "--chdir=/tmp", "--account=lab", "--gres=gpu:1", "--wrap=sleep 99")
        person("run", "--detach", "train.py", "2")
        person.until(lambda: "(Resources)" in person("jobs"))
        lab.exec("scancel", f"--user={lab.user}")
        person.until(lambda: "JobId=" not in lab.exec("scontrol", "show", "job", "-o"))
        assert [job["state"] for job in person.jobs()] == ["cancelled", "cancelled"]
        assert "keeps no accounts" not in person.up(V100, account="lab", time="10")
        assert "step 1 1" in person("run", "train.py", "2")
        assert person.state() == "succeeded"
