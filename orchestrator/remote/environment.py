"""Makes a virtual environment with a torch in the work folder of a host whose own Python lacks it, once.

Request: {"workdir", "torch", "torchvision", "requirements": what pip is to install, "any_torch": whether a torch of
another version will do, "packages", "constraints": lines of a person's requirements, "env": variables for pip,
"limit_s", "owner", "cluster": who will use it}. It
reports (see `talk`):

    {"waits": 1}                                   another setup is at work in this work folder
    {"phase": "asks python" | "makes venv" | "pip installs" | "tries torch"}
    {"line": TEXT}                                 what pip said last
    {"end": {"python", "torch", "torchvision", "state"}}

state: `own` where this Python has a fitting torch by itself, `kept` where the environment was here, `made`, `added`
where it was here and packages came into it. Where packages are asked for and this Python has a fitting torch, the
environment lies above it and sees all that it has. Its marker file says who uses it, and what it holds once it is
whole: one that says nothing of that is half made, and made again. pip lives no longer than the controller's interest in
it, and not beyond the limit of time.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .agent import lives
from .answer import Refused
from .claim import claimed
from .layout import VENV_MARKER, WorkFolder, read_json, write_json
from .processes import die_with_parent
from .talk import STDIN, ControllerLeft, Talk, alone_at, gone, serve

TRY_S = 180.0
MAX_LINE = 300
# Prints {"torch", "torchvision"}: what really loads.
VERSIONS = """
import json, os, torch, torchvision
print("\\n" + json.dumps({"torch": str(torch.__version__), "torchvision": str(torchvision.__version__)}), flush=True)
os._exit(0)  # to take torch down takes as long as a quarter of its start
"""
_NO_WAY_OUT = re.compile(r"new ?connection|network is unreachable|name resolution|timed? ?out|retrying", re.IGNORECASE)


def main(request: dict[str, Any]) -> None:
    die_with_parent(0)  # changes nothing, and loads what a child needs of it: later there are threads
    serve(request, set_up)


def set_up(request: dict[str, Any], talk: Talk) -> dict[str, Any]:
    deadline = time.monotonic() + request["limit_s"]
    work = WorkFolder(request["workdir"])
    wanted = {name: request[name] for name in ("torch", "torchvision")}
    talk.say({"phase": "asks python"})
    found, _ = ask_versions(sys.executable, talk, deadline)
    own = found if found and (request["any_torch"] or fits(found, wanted)) else None
    if own and not request["packages"]:
        return {**own, "python": sys.executable, "state": "own"}
    with claimed(work):
        work.locks.mkdir(exist_ok=True)
        with alone_at(work.venv_lock, talk):
            # A version with a local part of our own: an environment above the host's own torch.
            venv = work.venv(f"{own['torch'].partition('+')[0]}+own" if own else request["torch"])
            state = base(work, venv, own, request, talk, deadline)
            if request["packages"] and add(work, venv, request, talk, deadline) and state == "kept":
                state = "added"
            found = read_json(venv / VENV_MARKER)["found"]
    return {**found, "python": str(venv / "bin" / "python"), "state": state}


def user_of(request: dict[str, Any]) -> dict[str, Any]:
    return {"owner": request["owner"], "cluster": request["cluster"]}


def base(
    work: WorkFolder, venv: Path, own: dict[str, str] | None, request: dict[str, Any], talk: Talk, deadline: float
) -> str:
    """An environment with torch: `kept` where it is there, whole and of the same recipe, else `made`. own: the versions
    of this Python, whose packages it is to have.
    """
    python = venv / "bin" / "python"
    recipe = [sys.executable, own["torch"]] if own else list(request["requirements"])
    marker, user = read_json(venv / VENV_MARKER), user_of(request)
    users = [*others(marker, user), user]
    if "found" in marker and marker.get("requirements") == recipe and python.exists():
        write_json(venv / VENV_MARKER, {**marker, "users": users})
        return "kept"
    refuse_to_replace(work, venv, marker, users[:-1])
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    write_json(venv / VENV_MARKER, {"users": users})
    make(venv, talk, deadline)
    if own:
        see_own_packages(venv)
    else:
        pip(venv, request["requirements"], request["env"], talk, deadline)
    wanted = own or {name: request[name] for name in ("torch", "torchvision")}
    found = try_torch(venv, wanted, "choose another --torch for this host", talk, deadline)
    write_json(venv / VENV_MARKER, {"requirements": recipe, "found": found, "users": users})
    return "made"


def see_own_packages(venv: Path) -> None:
    """As --system-site-packages, also where this Python is a virtual environment itself."""
    site.main()  # the folders that this Python would look through, had we not started it without them
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()]
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "own.pth").write_text("".join(f"{folder}\n" for folder in folders))


def add(work: WorkFolder, venv: Path, request: dict[str, Any], talk: Talk, deadline: float) -> bool:
    """Installs what a person's requirements ask for, torch as it is; False where that was done before."""
    marker = read_json(venv / VENV_MARKER)
    asked = {name: request[name] for name in ("packages", "constraints")}
    if marker.get("extra") == asked:
        return False
    if rest := others(marker, user_of(request)):
        whose = ", ".join(f"cluster {one['cluster']} of {one['owner']['name']}" for one in rest)
        raise Refused(f"{venv} is also used by {whose}, whose packages would change", "set a `workdir:` of your own")
    refuse_if_used(work)
    found = marker["found"]
    write_json(venv / VENV_MARKER, {name: value for name, value in marker.items() if name != "extra"})
    talk.say({"phase": "adds packages"})
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in found.items()]
    files = {"-r": venv / "requirements.txt", "-c": venv / "constraints.txt"}
    files["-r"].write_text("\n".join(asked["packages"]) + "\n")
    files["-c"].write_text("\n".join([*asked["constraints"], *pins]) + "\n")
    pip(venv, [word for pair in files.items() for word in map(str, pair)], request["env"], talk, deadline)
    try_torch(venv, found, "look at what the requirements bring along", talk, deadline)
    write_json(venv / VENV_MARKER, {**marker, "extra": asked})
    return True


def try_torch(venv: Path, wanted: dict[str, str], remedy: str, talk: Talk, deadline: float) -> dict[str, str]:
    """The versions that load. Raises Refused where they do not, or are others."""
    talk.say({"phase": "tries torch"})
    found, said = ask_versions(str(venv / "bin" / "python"), talk, deadline)
    if not found or not fits(found, wanted):
        raise Refused(f"what pip installed does not load ({said or found})", remedy)
    return found


def fits(found: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether these are the versions asked for; of any build (`+cu121`) where none is named."""
    return all(version in (found[name], found[name].partition("+")[0]) for name, version in wanted.items())


def others(marker: dict[str, Any], user: dict[str, Any]) -> list[dict[str, Any]]:
    """Who uses an environment, less this one: each {"owner": {"id", "name"}, "cluster"}."""
    mine = (user["owner"]["id"], user["cluster"])
    return [known for known in marker.get("users", []) if (known["owner"]["id"], known["cluster"]) != mine]


def refuse_to_replace(work: WorkFolder, venv: Path, marker: dict[str, Any], rest: list[dict[str, Any]]) -> None:
    """Where what lies there is not ours, or somebody else needs it. rest: its other users."""
    if not marker and venv.is_dir() and any(venv.iterdir()):
        raise Refused(f"{venv} is there, and `orch setup` did not make it", "move it away, or choose another --torch")
    if "found" in marker and rest:
        whose = ", ".join(f"cluster {user['cluster']} of {user['owner']['name']}" for user in rest)
        raise Refused(
            f"{venv} holds other versions, which {whose} uses",
            "choose another --torch, the same --torchvision, or a `workdir:` of your own",
        )
    if "found" in marker:
        refuse_if_used(work)


def refuse_if_used(work: WorkFolder) -> None:
    """By a job that runs."""
    running = [job.id for job in work.all_jobs() if lives(job.read_agent())]
    if running:
        raise Refused(
            f"{', '.join(running)} may use the environment that is to be changed", "wait for it, or cancel it"
        )


def make(venv: Path, talk: Talk, deadline: float) -> None:
    """Raises Refused in Python's own words where it fails."""
    talk.say({"phase": "makes venv"})
    code, said = run([sys.executable, "-m", "venv", str(venv)], {}, talk, deadline)
    if code:
        remedy = "install this Python's venv module there (`python3-venv` on Debian), or set another `python:`"
        raise Refused(f"{sys.executable} makes no virtual environment ({last_error(said)})", remedy)


def pip(venv: Path, words: list[str], env: dict[str, str], talk: Talk, deadline: float) -> None:
    """Installs. Raises Refused with pip's own words where it fails."""
    talk.say({"phase": "pip installs"})
    temporary = venv / "tmp"  # a host's /tmp may be small
    temporary.mkdir(exist_ok=True)
    options = ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
    argv = [str(venv / "bin" / "python"), "-m", "pip", "install", *options, *words]
    code, said = run(argv, {"TMPDIR": str(temporary), **env}, talk, deadline)
    shutil.rmtree(temporary, ignore_errors=True)
    if code:
        raise Refused(f"pip: {last_error(said)}", remedy_for(said))


def last_error(said: list[str]) -> str:
    return next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no word")


def remedy_for(said: list[str]) -> str:
    if any("No space left" in line for line in said):
        return "free space in its work folder, or set `workdir:` to a larger disk"
    if any(_NO_WAY_OUT.search(line) for line in said):
        return "it has no way to a package index: set PIP_INDEX_URL, PIP_FIND_LINKS or HTTPS_PROXY in its `env:`"
    if any("ResolutionImpossible" in line or "conflicting dependencies" in line for line in said):
        return "the requirements contradict each other, or the torch that is there; pip's own output says which"
    version = "{}.{}".format(*sys.version_info)
    return f"choose a --torch that exists for Python {version} on this kind of machine, or set another `python:`"


def ask_versions(python: str, talk: Talk, deadline: float) -> tuple[dict[str, str] | None, str]:
    """What this Python loads; else None and why."""
    code, said = run([python, "-c", VERSIONS], {}, talk, min(deadline, time.monotonic() + TRY_S), quiet=True)
    try:
        return (dict(json.loads(said[-1])), "") if code == 0 else (None, said[-1] if said else f"exit code {code}")
    except (ValueError, IndexError):
        return None, "no word"


# ---- one command ----------------------------------------------------------------------------------------------


def run(
    argv: list[str], env: dict[str, str], talk: Talk, deadline: float, *, quiet: bool = False
) -> tuple[int, list[str]]:
    """Its exit code and last lines. Ends it, and all it started, when the controller leaves or the time is up."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8", **env},
        cwd="/",
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
    )
    assert child.stdout
    said: list[str] = []
    try:
        for line in lines_of(child.stdout.fileno(), deadline):
            said = [*said[-49:], line]
            if not quiet:
                talk.mention({"line": line})
        return child.wait(), said
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()


def lines_of(handle: int, deadline: float) -> Iterator[str]:
    """Lines, as they come, until the output ends. Raises Left when the controller has left, Refused when time is up."""
    rest = b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([handle, STDIN], [], [], 1.0)
        if STDIN in ready and gone(0):
            raise ControllerLeft
        if handle not in ready:
            continue
        data = os.read(handle, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        yield from (shown for line in [*lines, *([] if data else [rest])] if (shown := plain(line)))
        if not data:
            return
        rest = rest[-MAX_LINE:]
    raise Refused("it took too long, and was ended", "look at this host's network and disk, then run it again")


def plain(line: bytes) -> str:
    """Without the name and password that an index's address may carry."""
    return re.sub(r"//[^/@\s]*@", "//", line.decode(errors="replace").strip())[-MAX_LINE:]
