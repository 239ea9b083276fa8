"""Interprets the command after `orch run`, such as `torchrun --nproc-per-node 2 train.py`. Pure.

    read_program(("torchrun", "--nnodes", "2", "train.py", "--lr", "0.1"))
    # Program(name="train.py", arguments=("--lr", "0.1"), notes=("left out: torchrun --nnodes 2; ...",))

orch replaces the launcher, so the launcher's words are left out and reported. A program of the hosts, like `bash
run.sh`, keeps all its words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from orchestrator.errors import UsageError


@dataclass(frozen=True)
class Program:
    name: str
    """Path of a script from here, or name of a module or of a program of the hosts."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_hosts: bool = False
    """Each host's own program of this name runs, in the shipped folder."""
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Words that were left out, and why."""


@dataclass(frozen=True)
class _Launcher:
    valued: frozenset[str]
    """Options with a value that orch sets itself."""
    flags: frozenset[str]
    """Flags that orch sets itself."""
    variables: Mapping[str, str]
    """Options passed to the script as environment variables."""
    note: str


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_RANKS = "orch starts one rank a GPU (`ranks:` in the inventory) on each host (--nodes A,B)"
_TORCHRUN = _Launcher(
    # torch.distributed.run.get_args_parser of torch 2.0 to 2.9, and what torch.distributed.launch adds.
    valued=_set(
        "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts"
        " --monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee"
        " --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters"
        " --node-rank --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle"
        " --shutdown-timeout"
    ),
    flags=_set("--standalone --run-path --virtual-local-rank --use-env"),
    variables={},
    note=_RANKS,
)
_ACCELERATE = _Launcher(
    # accelerate.commands.launch.launch_command_parser of accelerate 1.x.
    valued=_set(
        "--config-file --num-processes --num-machines --machine-rank --main-process-ip --main-process-port --gpu-ids"
        " --rdzv-backend --rdzv-conf --max-restarts --monitor-interval --num-cpu-threads-per-process --role --log-dir"
        " -t --tee"
    ),
    flags=_set("--multi-gpu --same-network -q --quiet --enable-cpu-affinity"),
    variables={
        "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
        "--gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "--cpu": "ACCELERATE_USE_CPU",
        "--use-cpu": "ACCELERATE_USE_CPU",
        "--debug": "ACCELERATE_DEBUG_MODE",
    },
    note=f"{_RANKS}; accelerate's configuration file is not read",
)
_TRUE = frozenset({"ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_MODE"})
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Launchers for `python -m`."""
_STARTERS = _set("deepspeed colossalai mpirun mpiexec horovodrun srun sbatch ray nohup sudo ssh docker podman exec")
"""Programs typed before a script whose processes orch can neither place nor end."""
_HOSTS_OWN = _set(
    "sh bash dash zsh ksh fish env time nice numactl taskset timeout uv uvx poetry pipenv pdm rye hatch conda mamba"
    " micromamba make node Rscript julia perl ruby java"
)
_PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?|pypy3?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON_FLAGS = re.compile(r"-[bBdEIOPqsSuvx]+")


def read_program(words: Sequence[str], *, is_module: bool = False) -> Program:
    """words: a script or module with arguments, or a launcher's command. Raises UsageError with the right command."""
    first, *rest = words
    if is_module:
        return _module(first, rest)
    name = first if first.startswith(("./", "../")) else PurePath(first).name
    if _PYTHON.fullmatch(name):
        return _python(first, rest)
    if name == "torchrun":
        return _launched(_TORCHRUN, ["torchrun"], rest)
    if name == "accelerate":
        return _accelerate(rest)
    if _ASSIGNMENT.fullmatch(first):
        key = first.partition("=")[0]
        raise UsageError(
            f"{key}=... sets a variable, and orch runs no shell", f"orch run --env {key}=... {_tail(rest)}"
        )
    if name in _STARTERS:
        raise UsageError(f"{name} starts processes that orch could not place or end", _type_instead(rest))
    return Program(first, tuple(rest), is_hosts=name in _HOSTS_OWN)


def is_bare(name: str) -> bool:
    """Without a folder and a suffix, like `nvidia-smi`: unless a file has this name, it is a program of the hosts."""
    return "/" not in name and not PurePath(name).suffix


def _module(name: str, arguments: Sequence[str]) -> Program:
    if name.endswith(".py") or "/" in name:
        raise UsageError(f"-m takes the name of a module, not {name}", f"orch run {_tail((name, *arguments))}")
    return Program(name, tuple(arguments), is_module=True)


def _python(typed: str, words: Sequence[str]) -> Program:
    flags, rest = list[str](), list(words)
    note = f"left out: {typed}; each host's own Python starts the script (`python:` in the inventory)"
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option.startswith(("-W", "-X")):
            flags.append(option if option[2:] or not rest else option + rest.pop(0))
        elif option == "-m" and rest:
            module, *arguments = rest
            if module in _MODULES:
                launcher = _ACCELERATE if module.startswith("accelerate") else _TORCHRUN
                return _launched(launcher, [typed, "-m", module], arguments)
            return Program(module, tuple(arguments), is_module=True, flags=tuple(flags), notes=(note,))
        elif _PYTHON_FLAGS.fullmatch(option):
            flags.append(option)
        else:
            raise UsageError(f"{typed} {option} runs no script", "put the code into a file: orch run -- train.py ARGS")
    if not rest:
        raise UsageError(f"{typed} alone runs no script", _type_instead(()))
    return Program(rest[0], tuple(rest[1:]), flags=tuple(flags), notes=(note,))


def _accelerate(words: Sequence[str]) -> Program:
    if list(words[:1]) != ["launch"]:
        raise UsageError(f"accelerate {' '.join(words[:1])} starts no script", _type_instead(words[1:]))
    return _launched(_ACCELERATE, ["accelerate", "launch"], words[1:])


def _launched(launcher: _Launcher, typed: Sequence[str], words: Sequence[str]) -> Program:
    rest, left, is_module, variables = list(words), [*typed], False, list[str]()
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option, equals, value = rest.pop(0).partition("=")
        spelled = f"--{option[2:].replace('_', '-')}" if option.startswith("--") else option
        variable = launcher.variables.get(spelled)
        if spelled in launcher.valued or (variable and variable not in _TRUE):
            value = value if equals else rest.pop(0) if rest else ""
            if variable:
                variables.append(f"{variable}={value}")
            else:
                left += [f"{option}={value}"] if equals else [option, value]
        elif variable:
            variables.append(f"{variable}=true")
        elif spelled in ("-m", "--module"):
            is_module = True
        elif spelled in launcher.flags:
            left.append(option)
        else:
            raise UsageError(f"{' '.join(typed)} {option}: orch cannot do this in its place", _type_instead(rest))
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest:
        raise UsageError(f"{' '.join(typed)} names no script", _type_instead(()))
    if variables:
        pairs = " ".join(f"--env {shlex.quote(pair)}" for pair in variables)
        raise UsageError(
            f"{' '.join(typed)} passes these options to the script as variables, and orch needs to set those itself",
            f"orch run {pairs} {'-m ' * is_module}{_tail(rest)}",
        )
    again = "; `orch run --retries N` starts the job again" if _goes_on(left) else ""
    return Program(
        rest[0], tuple(rest[1:]), is_module, notes=(f"left out: {shlex.join(left)}; {launcher.note}{again}",)
    )


def _goes_on(left: Sequence[str]) -> bool:
    """Whether the launcher was to continue after failures or with fewer hosts."""
    words = [part for word in left for part in word.split("=", 1)]
    pairs = dict(pairwise(words))
    restarts = pairs.get("--max-restarts", pairs.get("--max_restarts", "0"))
    return ":" in pairs.get("--nnodes", "") or restarts != "0"


def _type_instead(words: Sequence[str]) -> str:
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return f"orch run {_tail(words[index:])}"
    if programs := [index for index, word in enumerate(words) if word.endswith((".sh", ".bash"))]:
        return f"orch run {_tail(words[programs[0] :])}"
    return "name the script or program: orch run -- train.py ARGS"


def _tail(words: Sequence[str]) -> str:
    return shlex.join(("--", *words)) if words else "-- SCRIPT ARGS"
