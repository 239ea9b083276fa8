"""What `orch` answers if it is asked for what it cannot do: exit code and message, in 80 columns."""

from __future__ import annotations

from pathlib import Path

from tests.golden.conftest import Golden, Types, masked

EXP = "run --dry-run --exp mnist_lenet"
ASKED = """
up missing.yaml
up folder
up empty.yaml
up broken.yaml
up unknown.yaml
trust a --inventory unknown.yaml
status --cluster other
use other
clusters extra
node add
node remove a100
node release a100
node restore a100
node frobnicate v100
master a100
trust h100
run
run missing.py
run --exp resnet
run --exp mnist_lenet train.py
run -m
run missing.yaml
run unknown.yaml
run --dry-run --nodes h100 train.py
run --dry-run --nodes gpu[1- train.py
run --dry-run --nodes v10 train.py
run --dry-run --ndoes v100 train.py
run --dry-run trian.py
run --dry-run --folder missing train.py
run --dry-run --set epochs=1 train.py
run --dry-run --env 1A=2 train.py
run --dry-run --env NOT_SET_HERE train.py
run --dry-run --env-file missing.env train.py
run --dry-run --batch 0 train.py
run --dry-run --retries 0 train.py
run --dry-run --retry-wait 30s train.py
run --dry-run --rejoin train.py
run --dry-run --retry-on any train.py
run --dry-run --time-limit soon train.py
run --dry-run --grace -1s train.py
run --dry-run --hosts 3:1 train.py
run --dry-run --name ../x train.py
run --dry-run --keep ../out train.py
run --dry-run --save job.txt train.py
run --dry-run --resume none train.py
EXP --set epoch=1
EXP --set epochs=many
EXP --set epochs=-1
EXP --set epochs
EXP --set model=lenet5
EXP --set lr_schedule=cosin
EXP --set strategy=none
EXP --set strategy=dpp
EXP --set strategy=pipeline --set sync_bn=true
EXP --set fidelity=compressed --set strategy=allreduce
EXP --set amp=fp16 --set device=cpu
EXP --set shares=a2000:0=1
EXP --set shares=a2000:0=0,v100:0=0
EXP --set stages=a2000:0-9
EXP --set batch=1 --set strategy=pipeline
EXP --set accumulate=0 --set local_batch=5
EXP --set unused_parameters=maybe
plan --exp nothing
plan --exp mnist_lenet --nodes h100
logs
logs --job none
logs --job none --rank x
collect --job none
collect --job ../etc
report --job none
compare
compare one
pull none
cancel --job none
why none
jobs --limit -1
jobs --adopt
top none
profile --exp nothing
study nothing
sweep mnist_backends
sweep train.py
data push missing
exec --
exec --nodes h100 -- ls
init --from hostfile missing
init --from ansible missing
doctor missing.yaml
doctor --fix --json
setup --nodes h100
ssh h100
frobnicate
rnu --exp mnist_lenet
--frobnicate
"""
FILES = {
    "empty.yaml": "",
    "broken.yaml": "cluster: c\nnodes: [{name: a, host: h, port: 0x1F}, {name: a, host: g}]\n",
    "unknown.yaml": "cluster: c\nnodez: []\nnodes: [{name: a, host: h, prot: 22}]\n",
    "train.py": "print('trains')\n",
}


def test_answers_to_mistakes_are_what_they_were(orch: Types, golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shown = []
    for line in ASKED.strip().splitlines():
        words = line.replace("EXP", EXP)
        code, out, err = orch(*words.split())
        shown.append(f"$ orch {words}\n{out}{err.rstrip()}\nexit {code}\n")
    golden("errors.txt", masked("\n".join(shown), HERE=str(tmp_path)))
