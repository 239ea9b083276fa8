"""`--env` and `--env-file`: what they are read as, what is refused, and that no value is shown."""

import json
from dataclasses import replace

import pytest

from orchestrator.errors import UsageError
from orchestrator.hosts import Node
from orchestrator.planning import CodeFolder, read_variables, refuse_secret_words, run_line
from orchestrator.views import dry_run
from tests.support.plans import RESNET, host, plan

OWN = {"HF_TOKEN": "hf_here", "HOME": "/root"}
FILE = """\
\ufeff# settings
export LR=0.1   # not 0.2

PATTERN='as ${it} # stands'
LINES="one\\ntwo \\"three\\" \\$"
KEY="-----BEGIN
-----END"  # two lines
EMPTY=
URL=https://a/b#c
 SPACED = two words \r
HF_TOKEN
"""
READ = {
    "LR": "0.1",
    "PATTERN": "as ${it} # stands",
    "LINES": 'one\ntwo "three" $',
    "KEY": "-----BEGIN\n-----END",
    "EMPTY": "",
    "URL": "https://a/b#c",
    "SPACED": "two words",
    "HF_TOKEN": "hf_here",
}


def write(folder, text, name=".env"):
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_a_file_is_read_as_other_tools_read_it(tmp_path):
    assert read_variables({}, [write(tmp_path, FILE)], OWN) == READ


def test_a_later_file_wins_over_an_earlier_one_and_the_command_line_over_both(tmp_path):
    files = [write(tmp_path, "A=1\nB=1\nC=1\n"), write(tmp_path, "B=2\nC=2\n", "b.env")]
    assert read_variables({"C": "a=b", "HF_TOKEN": None, "E": ""}, files, OWN) == {
        "A": "1",
        "B": "2",
        "C": "a=b",
        "HF_TOKEN": "hf_here",
        "E": "",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1\nB='s3cret\n", "{file}:2: a quote that never ends, or words behind it"),
        ("A='s3cret' s3cret\n", "{file}:1: a quote that never ends, or words behind it"),
        ("\n\n= s3cret\n", "{file}:3: expected NAME=value, only NAME, or a # comment"),
        ("A: s3cret\n", "{file}:1: expected NAME=value, only NAME, or a # comment"),
        ("A=s3cret${B}\n", "{file}:1: A: `${{...}}` is not expanded; write the value out, or use single quotes"),
        ("1A=s3cret\n", "{file}:1: '1A' must be a variable's name: "),
        ("NOT_HERE\n", "{file}:1: 'NOT_HERE' is given without a value"),
        ("LONG=" + "x" * 200_000, "{file}:1: 'LONG' is longer than the 127 KiB"),
        ("A='a\nb'\nRANK=1\n", "{file}:3: 'RANK' cannot be given: torchrun sets it, for each rank another"),
    ],
)
def test_a_mistake_of_a_file_is_named_with_its_line_and_without_values(text, words, tmp_path):
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        read_variables({}, [file], OWN)
    assert str(raised.value).startswith(words.format(file=file))
    assert "s3cret" not in str(raised.value)


def test_all_mistakes_come_at_once(tmp_path):
    file = write(tmp_path, "A=${B}\n?\nORCH_SHARE=1\n")
    with pytest.raises(UsageError) as raised:
        read_variables({"NCCL_SOCKET_IFNAME": "eth0", "B": None, "CUDA_VISIBLE_DEVICES": "0"}, [file], OWN)
    places = [line.partition(" ")[0] for line in str(raised.value).splitlines()]
    assert places == [*(f"{file}:{line}:" for line in (1, 2, 3)), "--env:", "--env:", "--env:"]


@pytest.mark.parametrize("content", [b"A=\xff", b"A=1\0", b"A=1\n" * 300_000, None])
def test_what_is_no_file_of_variables_is_refused(content, tmp_path):
    file = tmp_path / "x.env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.env"):
        read_variables({}, [file], {})


@pytest.mark.parametrize("item", ["WANDB_API_KEY=abc", "MY_TOKEN=abc", "DB_PASSWORD=abc", "X=hf_" + "a" * 34])
def test_a_secret_does_not_stand_on_the_command_line(item):
    with pytest.raises(UsageError, match="every user of this machine can read a command line") as raised:
        refuse_secret_words([item])
    assert item.partition("=")[2] not in str(raised.value)
    name = item.partition("=")[0]
    refuse_secret_words([name, "TOKENIZERS_PARALLELISM=false"])
    assert read_variables({name: None}, [], {name: "abc"}) == {name: "abc"}


def planned(given, **of_node):
    nodes = [Node(name=f"n{n}", host=f"192.168.1.{n}", **of_node) for n in (41, 42)]
    found = {f"n{n}": host(n) for n in (41, 42)}
    return plan(nodes, found, replace(RESNET, env=given))


def test_it_wins_over_the_inventory_on_every_host_and_is_kept_and_printed_without_values(capsys):
    made = planned({"A": "job", "MINE": "s3cret", "NCCL_DEBUG": "INFO"}, env={"A": "file", "B": "file"})
    for node in made.nodes:
        assert node.env.items() >= {"A": "job", "B": "file", "MINE": "s3cret", "NCCL_DEBUG": "INFO"}.items()
        assert node.env["NCCL_SOCKET_IFNAME"] == "=eno1"
    dry_run.print_plan(made.masked())
    shown = capsys.readouterr().out
    assert " --env A --env MINE --env NCCL_DEBUG " in run_line(made.masked())
    assert "MINE=***" in shown and "NCCL_DEBUG=INFO" in shown
    assert "s3cret" not in shown + json.dumps(made.masked().model_dump(mode="json"))


def test_a_dry_run_can_be_copied(capsys):
    made = planned({})
    words = ("t.py", "two words", "$(exit 9)", "--local_rank={LOCAL_RANK}", "{rank}")
    nodes = tuple(node.model_copy(update={"command": words, "python": "~/my env/python"}) for node in made.nodes)
    code = CodeFolder(sha256="c0", source="/x", files=1, size_bytes=1)
    dry_run.print_plan(made.model_copy(update={"nodes": nodes, "code": code}))
    shown = capsys.readouterr().out
    assert "rank runs  ~/'my env/python' t.py 'two words' '$(exit 9)' --local_rank=0 '{rank}'\n" in shown
    assert "--master-port 29500" in shown and "--log-dir ~/.orch/jobs/j-1/torchrun " in shown
    assert "{rendezvous_port}" not in shown and "{python}" not in shown and "{job_dir}" not in shown
    assert "ships 1 file, 1B" in shown and " rank 0 on cuda" in shown
