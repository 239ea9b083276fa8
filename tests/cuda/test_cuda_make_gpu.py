"""`make gpu` on the stand-in: from the command to the file, with every figure marked as none."""

import json
import os
import subprocess
import sys
import tarfile

import pytest

from tests.cuda.build import ROOT, CannotBuild
from tests.cuda.environment import environment


def test_a_part_goes_from_the_command_to_the_file_to_send_back(tmp_path):
    try:
        preloaded = environment(knobs={"FAKE_CLOCK": "virtual", "FAKE_NAME": "NVIDIA H200"})
    except CannotBuild as error:
        pytest.skip(f"no stand-in for CUDA: {error}")
    command = [sys.executable, "-m", "tests.gpu", "--parts", "mnist", "--minutes", "60", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **preloaded}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "stand-in: virtual time, not a GPU" in ended.stdout
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2]: packed.extractfile(name).read().decode() for name in packed.getnames()}
    assert {"result.json", "mnist.log", "mnist-0.jsonl", "facts.log"} <= held.keys()
    result = json.loads(held["result.json"])
    assert result["stand_in"] and result["torch"]["gpus"][0]["name"] == "NVIDIA H200"
    assert {row["verdict"] for row in result["rows"]} == {"stand-in"}
    assert sum(json.loads(line)["event"] == "step" for line in held["mnist-0.jsonl"].splitlines()) == 160
