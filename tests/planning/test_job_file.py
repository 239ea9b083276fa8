"""A job file: what is read of it, its mistakes all at once, and that what is written is read back the same."""

from pathlib import Path

import pytest

from orchestrator.errors import InventoryError, UsageError
from orchestrator.planning import LOCAL_RANK, CodeFolder, HostChoice, JobSpec, job_text, read_job, spec_of, write_job
from tests.support.plans import a2000_v100
from trainer.shared import NAMED

WRONG = """\
scrpt: train.py
exp: mnist_lenett
settings: {lrr: 0.1, epochs: x}
grace: 3
time_limit: 5 minutes
batch: 0
max_restarts: 2
env:
  HF_TOKEN: hf_1
  RANK: 3
nodes: 3
share: 1
args: [1]
"""


def job_file(folder: Path, text: str) -> Path:
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def test_what_is_written_stays_as_it_is_written(tmp_path: Path) -> None:
    text = "script: train.py\nargs: [--lr, 0.10, no]\nsettings: {bucket_mib: 1e1}\nenv: {A: 1.10, HF_TOKEN: }\n"
    job = read_job(job_file(tmp_path, text))
    assert (job.args, job.settings) == (["--lr", "0.10", "no"], {"bucket_mib": "1e1"})
    assert job.env == {"A": "1.10", "HF_TOKEN": None}


def test_all_mistakes_are_named_at_once_with_their_lines_and_no_secret(tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as refused:
        read_job(job_file(tmp_path, WRONG))
    said = {(mistake.line, mistake.message.partition(";")[0]) for mistake in refused.value.mistakes}
    assert said == {
        (1, "unknown key 'scrpt'"),
        (2, f"exp: 'mnist_lenett' is not one of {', '.join(NAMED)}, collectives"),
        (3, "lrr: no such setting"),
        (3, "epochs: 'x' is not a whole number"),
        (4, "grace: must be written with its unit, like 3s, not 3"),
        (6, "`batch` belongs to a script or module of your own"),
        (5, "time_limit: '5 minutes' is not a time"),
        (6, "batch: must be at least 1, not 0"),
        (7, "`max_restarts` is no longer a key"),
        (9, "env.HF_TOKEN looks like a secret"),
        (10, "env.RANK cannot be given: torchrun sets it, for each rank another"),
        (11, "nodes: must be a list, one item a line behind `- `, not 3"),
        (12, "share: must be true or false, not 1"),
        (13, "`args` belongs to a script or module of your own"),
    }
    assert "did you mean `script`?" in str(refused.value) and "hf_1" not in str(refused.value)


def test_a_number_of_hosts_needs_no_quotes(tmp_path: Path) -> None:
    for text, expected in (("3", "3"), ("2:4", "2:4"), ("'2'", "2"), ("10:30", "10:30")):
        assert read_job(job_file(tmp_path, f"exp: mnist_lenet\nhosts: {text}\n")).hosts == expected
    for text, said in (("0", "'0' is not MIN:MAX or N"), ("true", "must be text"), ("1.5", "must be text")):
        with pytest.raises(UsageError, match=f"job.yaml:2: hosts: {said}"):
            read_job(job_file(tmp_path, f"exp: mnist_lenet\nhosts: {text}\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: [a]\n", "job.yaml: no script, module or experiment given; give one of `exp`, `script` and `module`"),
        ("exp: mnist_lenet\nmodule: a.b\n", "job.yaml:2: `exp` and `module` contradict each other; keep one"),
        ("exp: mnist_lenet\nresume: latest\n", "job.yaml:1: `resume` runs what the job ran"),
        ("exp: mnist_lenet\nelastic: '2:3'\n", "job.yaml:2: `elastic` is no longer a key; `retries: 3`"),
        (
            "exp: mnist_lenet\nbatch: 8\n",
            "job.yaml:2: `batch` belongs to a script or module of your own; `settings",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_job(job_file(tmp_path, text))
    assert said in str(refused.value)


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    words = ["", "null", "~", "no", "1_0", "0.10", "1e5", "a: b", "a, b", "{x}", "#c", "- x", "---", "<<", "=", "'"]
    words += [" two  words ", "a\nb", "a\r\n", "\x85", "\u2028", "é😀", "--lr", "-", "!x", "&x", "*x", "%x", "\t", "\\"]
    job = JobSpec(
        script="1e5",
        args=words,
        settings={f"s{number}": word for number, word in enumerate(words)},
        env={"A": "no", "EMPTY": "", "HF_TOKEN": None},
        nodes=["1", "gpu[01-16]"],
        batch=8,
        share=True,
        grace_s=5.0,
    )
    (tmp_path / "job.yaml").write_text(job_text(job))
    from orchestrator.hosts import read_yaml

    document = read_yaml(tmp_path / "job.yaml", verbatim=["settings", "env", "args"])
    assert document.mistakes == () and JobSpec.model_validate(document.values) == job


def test_it_holds_what_was_asked_alone_in_one_order_with_the_version_before_it() -> None:
    head, *lines = job_text(JobSpec(nodes=["v100"], args=["--lr", "0.1"], script="train.py")).splitlines()
    assert head.startswith("# A job of orch 0.")
    assert lines == ["script: train.py", "args: [--lr, 0.1]", "nodes: [v100]"]


def test_no_file_of_somebody_elses_is_written_over(tmp_path: Path) -> None:
    path = job_file(tmp_path, "cluster: rack\n")
    with pytest.raises(UsageError, match="already exists, and orch did not write it"):
        write_job(path, JobSpec(exp="mnist_lenet"))
    assert path.read_text() == "cluster: rack\n"
    path.unlink()
    assert not write_job(path, JobSpec(exp="mnist_lenet"))
    assert not write_job(path, JobSpec(exp="mnist_lenet"))  # the same again
    assert write_job(path, JobSpec(exp="collectives"))
    assert read_job(path).exp == "collectives"


def test_a_word_that_is_no_text_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        write_job(tmp_path / "job.yaml", JobSpec(script="train.py", args=["\udcff"]))
    assert not list(tmp_path.iterdir())


def test_a_plan_is_written_so_that_it_runs_again() -> None:
    code = CodeFolder(sha256="c0de" * 16, source="/home/me/my code", files=1, size_bytes=1)
    command = ("-u", "sub/train.py", LOCAL_RANK, "--name", "two words")
    found = a2000_v100()
    nodes = tuple(node.model_copy(update={"command": command}) for node in found.nodes)
    more = {"kind": "script", "code": code, "settings": {"batch": 96}, "nodes": nodes, "variables": ("HF_TOKEN",)}
    more |= {"measures_steps": False, "grace_s": 0.5}
    assert spec_of(found.model_copy(update=more)) == JobSpec(
        script="python",
        args=["-u", "/home/me/my code/sub/train.py", "--name", "two words"],
        folder="/home/me/my code",
        batch=96,
        pass_local_rank=True,
        no_metrics=True,
        cluster="a2000-v100",
        nodes=["v100", "a2000"],
        env={"HF_TOKEN": None},
        grace_s=0.5,
    )


def test_the_repeated_job_of_a_launchers_module_and_of_a_later_attempt_is_read_again(tmp_path: Path) -> None:
    found = a2000_v100()
    nodes = tuple(node.model_copy(update={"command": ("-m", "pkg.train")}) for node in found.nodes)
    asked = JobSpec(script="python", args=["-m", "pkg.train"], wait=True)
    choice = HostChoice(min_hosts=1, max_hosts=2, candidates=("v100", "a2000"))
    more = {"kind": "module", "nodes": nodes, "asked": asked, "hosts": choice, "settings": {}}
    plan = found.model_copy(update=more)
    write_job(tmp_path / "job.yaml", spec_of(plan))
    again = read_job(tmp_path / "job.yaml")
    assert (again.script, again.module, again.wait, again.hosts) == (None, "pkg.train", True, None)
