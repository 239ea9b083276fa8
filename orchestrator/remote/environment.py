"""Creates, once, a virtual environment with torch in the work folder of a host whose own Python lacks it.

Request: {"workdir", "torch", "torchvision": None for the matching version, "requirements": to install, "any_torch":
accept another version of torch, "packages", "constraints": lines of the user's requirements, "env": variables for pip,
"limit_s", "owner", "cluster"}. "for_job": an environment on top of this Python whatever its torch, made once for these
packages; "keeps_torch": with the versions that are here. Progress (see `progress_stream`):

    {"waits": 1}                                   another setup is at work in this work folder
    {"phase": "asks python" | "makes venv" | "installs torch" | "adds packages" | "tries torch"}
    {"line": TEXT}                                 last line of the installer
    {"end": {"python", "torch", "torchvision", "state"}}          for a job: {"python", "state"}

state: `own` if this Python has a fitting torch, `kept` if the environment existed, `made`, `added` if only packages
were missing. Packages go into an environment of this cluster on top of the one with torch (or of this Python). The
marker file lists an environment's users and, once it is complete, its versions; without them it is made again. An
installer ends when the controller leaves or the time is up.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from ast import literal_eval
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from .agent import lives
from .answer import Refused
from .claim import claimed
from .layout import VENV_MARKER, WorkFolder, read_json, write_json
from .processes import die_with_parent
from .progress_stream import STDIN, ControllerLeft, ProgressStream, alone_at, gone, serve

TRY_S = 180.0
MAX_LINE = 300
# Prints {"torch", "torchvision"} as imported.
VERSIONS = """
import json, os, torch, torchvision
print("\\n" + json.dumps({"torch": str(torch.__version__), "torchvision": str(torchvision.__version__)}), flush=True)
os._exit(0)  # to take torch down takes as long as a quarter of its start
"""
PIP = ("-m", "pip", "--no-input", "--no-cache-dir", "--disable-pip-version-check")
INSTALL = ("install", "--progress-bar=off", "--retries=2")
# pip setting -> uv variable.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
_NO_WAY_OUT = re.compile(r"new ?connection|network is unreachable|name resolution|timed? ?out|retrying", re.IGNORECASE)


def main(request: dict[str, Any]) -> None:
    die_with_parent(0)  # loads what a child needs, before there are threads
    serve(request, set_up)


def set_up(request: dict[str, Any], progress: ProgressStream) -> dict[str, Any]:
    deadline = time.monotonic() + request["limit_s"]
    work = WorkFolder(request["workdir"])
    if request.get("for_job"):
        return for_job(work, request, progress, deadline)
    progress.send({"phase": "asks python"})
    own, _ = loaded_versions(sys.executable, progress, deadline)
    if own and not (request["any_torch"] or fits(own, request)):
        own = None
    if own and not request["packages"]:
        return {**own, "python": sys.executable, "state": "own"}
    with claimed(work):
        work.locks.mkdir(exist_ok=True)
        with alone_at(work.venv_lock, progress):
            python, found, state = (
                (sys.executable, own, "own") if own else with_torch(work, request, progress, deadline)
            )
            if request["packages"]:
                python, is_new = with_packages(work, python, found, request, progress, deadline)
                state = state if state == "made" else "added" if is_new else "kept"
    return {**found, "python": python, "state": state}


def for_job(work: WorkFolder, request: dict[str, Any], progress: ProgressStream, deadline: float) -> dict[str, Any]:
    asked = [sys.executable, request["keeps_torch"], request["packages"], request["constraints"]]
    venv = work.venv(f"0+{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]}")
    python = str(venv / "bin" / "python")
    with claimed(work):
        work.locks.mkdir(exist_ok=True)
        with alone_at(work.venv_lock, progress):
            marker = read_json(venv / VENV_MARKER)
            users = {"users": users_of(marker, request)}
            if marker.get("is_whole") and os.path.exists(python):
                if marker["users"] != users["users"]:
                    write_json(venv / VENV_MARKER, {**marker, **users})
                return {"python": python, "state": "kept"}
            make(venv, users, progress, deadline)
            see_packages(venv, sys.executable)
            progress.send({"phase": "adds packages"})
            pins = pins_of(own_versions()) if request["keeps_torch"] else []
            install_packages(venv, request, pins, progress, deadline)
            write_json(venv / VENV_MARKER, {**users, "is_whole": True})
    return {"python": python, "state": "made"}


def own_versions() -> dict[str, str]:
    """Versions of torch and torchvision for this Python, without importing them."""
    site.main()  # finds this Python's usual folders, which we started without
    found = {}
    for name in ("torch", "torchvision"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def pins_of(found: dict[str, str]) -> list[str]:
    return [f"{name}=={version.partition('+')[0]}" for name, version in found.items()]


def install_packages(
    venv: Path, request: dict[str, Any], pins: list[str], progress: ProgressStream, deadline: float
) -> None:
    files = {"-r": venv / "requirements.txt", "-c": venv / "constraints.txt"}
    files["-r"].write_text("\n".join(request["packages"]) + "\n")
    files["-c"].write_text("\n".join([*request["constraints"], *pins]) + "\n")
    words = [word for pair in files.items() for word in map(str, pair)]
    # uv does not see the packages of the Python below, and would install its torch again.
    if request.get("keeps_torch", True) or not by_uv(venv, words, request["env"], progress, deadline, brings=False):
        pip(venv, words, request["env"], progress, deadline)


def with_torch(
    work: WorkFolder, request: dict[str, Any], progress: ProgressStream, deadline: float
) -> tuple[str, dict[str, str], str]:
    """Returns the environment's Python, its versions, and `kept` or `made`."""
    venv = work.venv(torch_name(request))
    python, marker = str(venv / "bin" / "python"), read_json(venv / VENV_MARKER)
    users = users_of(marker, request)
    if "found" in marker:
        progress.send({"phase": "tries torch"})
        found, _ = loaded_versions(python, progress, deadline) if os.path.exists(python) else (None, "")
        if found and fits(found, request):
            write_json(venv / VENV_MARKER, {**marker, "users": users})
            return python, found, "kept"
        if rest := users[:-1]:
            whose = ", ".join(f"cluster {user['cluster']} of {user['owner']['name']}" for user in rest)
            raise Refused(
                f"{venv} does not load its torch, and {whose} uses it",
                "choose another --torch, or a `workdir:` of your own",
            )
        refuse_if_used(work)
    make(venv, {"users": users}, progress, deadline)
    install_torch(venv, request, progress, deadline)
    found = try_torch(venv, request, "choose another --torch for this host", progress, deadline)
    write_json(venv / VENV_MARKER, {"found": found, "users": users})
    return python, found, "made"


def torch_name(request: dict[str, Any]) -> str:
    torch, torchvision = request["torch"], request["torchvision"]
    return f"{torch}{'.' if '+' in torch else '+'}vision{torchvision}" if torchvision else str(torch)


def with_packages(
    work: WorkFolder,
    below: str,
    found: dict[str, str],
    request: dict[str, Any],
    progress: ProgressStream,
    deadline: float,
) -> tuple[str, bool]:
    """This cluster's environment on top of the Python `below`, with its requirements and an unchanged torch. Returns
    its Python, and whether anything was missing.
    """
    whose = "\n".join((below, request["owner"]["id"], request["cluster"]))
    venv = work.venv(f"{found['torch'].partition('+')[0]}+{hashlib.sha256(whose.encode()).hexdigest()[:12]}")
    python, marker = str(venv / "bin" / "python"), read_json(venv / VENV_MARKER)
    asked = {"found": found, "extra": {name: request[name] for name in ("packages", "constraints")}}
    if os.path.exists(python) and {name: marker.get(name) for name in asked} == asked:
        return python, False
    refuse_if_used(work)
    half = {"users": users_of(marker, request)}
    if marker.get("found") != found or not os.path.exists(python):
        make(venv, half, progress, deadline)
        see_packages(venv, below)
    write_json(venv / VENV_MARKER, {**half, "found": found})
    progress.send({"phase": "adds packages"})
    install_packages(venv, request, pins_of(found), progress, deadline)
    try_torch(venv, found, "look at what the requirements bring along", progress, deadline)
    write_json(venv / VENV_MARKER, {**half, **asked})
    return python, True


def see_packages(venv: Path, below: str) -> None:
    """Like --system-site-packages, also if `below` is a virtual environment itself."""
    if below == sys.executable:
        site.main()  # finds this Python's usual folders, which we started without
        found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()]
    else:
        found = [str(path) for path in Path(below).parents[1].glob("lib/python*/site-packages")]
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "own.pth").write_text("".join(f"{folder}\n" for folder in found))


def try_torch(
    venv: Path, wanted: dict[str, Any], remedy: str, progress: ProgressStream, deadline: float
) -> dict[str, str]:
    progress.send({"phase": "tries torch"})
    found, said = loaded_versions(str(venv / "bin" / "python"), progress, deadline)
    if not found or not fits(found, wanted):
        raise Refused(f"what was installed does not load ({said or found})", remedy)
    return found


def fits(found: dict[str, str], wanted: dict[str, Any]) -> bool:
    asked = {name: wanted[name] for name in found if wanted[name]}
    return all(version in (found[name], found[name].partition("+")[0]) for name, version in asked.items())


def users_of(marker: dict[str, Any], request: dict[str, Any]) -> list[dict[str, Any]]:
    """Users of an environment, each {"owner": {"id", "name"}, "cluster"}, including this one."""
    user = {"owner": request["owner"], "cluster": request["cluster"]}
    mine = (user["owner"]["id"], user["cluster"])
    rest = [known for known in marker.get("users", []) if (known["owner"]["id"], known["cluster"]) != mine]
    return [*rest, user]


def refuse_if_used(work: WorkFolder) -> None:
    running = [job.id for job in work.all_jobs() if lives(job.read_agent())]
    if running:
        raise Refused(
            f"{', '.join(running)} may use the environment that is to be changed", "wait for it, or cancel it"
        )


def make(venv: Path, marker: dict[str, Any], progress: ProgressStream, deadline: float) -> None:
    if not read_json(venv / VENV_MARKER) and venv.is_dir() and any(venv.iterdir()):
        raise Refused(f"{venv} is there, and `orch setup` did not make it", "move it away, or choose another --torch")
    progress.send({"phase": "makes venv"})
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    write_json(venv / VENV_MARKER, marker)
    code, said = run([sys.executable, "-m", "venv", str(venv)], {}, progress, deadline)
    if code:
        remedy = "install this Python's venv module there (`python3-venv` on Debian), or set another `python:`"
        raise Refused(f"{sys.executable} makes no virtual environment ({last_error(said)})", remedy)


# ---- installers -----------------------------------------------------------------------------------------------


def install_torch(venv: Path, request: dict[str, Any], progress: ProgressStream, deadline: float) -> None:
    progress.send({"phase": "installs torch"})
    if not by_uv(venv, request["requirements"], request["env"], progress, deadline):
        pip(venv, request["requirements"], request["env"], progress, deadline)


def by_uv(
    venv: Path,
    words: list[str],
    env: dict[str, str],
    progress: ProgressStream,
    deadline: float,
    *,
    brings: bool = True,
) -> bool:
    # uv is faster, if it is here or (brings) pip can install it. Otherwise, or if uv fails, pip has to do it: the
    # settings are meant for pip, and people know its messages.
    python, env = str(venv / "bin" / "python"), {"TMPDIR": str(temporary(venv)), **env}
    brought = temporary(venv) / "uv"
    places = f"{os.environ.get('PATH', '')}:{os.path.expanduser('~/.local/bin')}:{brought / 'bin'}"
    if brings and not shutil.which("uv", path=places):
        run([python, *PIP, *INSTALL, "--retries=0", f"--target={brought}", "uv"], env, progress, deadline, quiet=True)
    code = 1
    if uv := shutil.which("uv", path=places):
        settings, options = uv_settings(python, env)
        argv = [uv, "pip", "install", "--no-cache", "--no-progress", "--color=never", f"--python={python}", *options]
        code, _ = run([*argv, *words], {**settings, **env}, progress, deadline)
        shutil.rmtree(temporary(venv), ignore_errors=True)
    return code == 0


def uv_settings(python: str, env: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """pip's settings from its files and `env`, as variables and options of uv; variables, since URLs may hold
    passwords.
    """
    argv, environment = [python, *PIP, "config", "list"], {**os.environ, **env}
    try:
        listed = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TRY_S).stdout
    except subprocess.TimeoutExpired:
        raise Refused(f"pip did not list its settings in {TRY_S:g} s", "look at what this host is busy with") from None
    found = dict[str, str]()
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([a-z-]+)=('.*'|\".*\")$", listed, re.MULTILINE):
            found[name] = (", " if name == "find-links" else " ").join(literal_eval(value).split())
    settings = {variable: found[name] for name, variable in UV_NAMES.items() if found.get(name)}
    # Like pip: the best version of all indexes, not of the first.
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return settings, ["--no-index"] if found.get("no-index", "0") in ("1", "true", "yes", "on") else []


def pip(venv: Path, words: list[str], env: dict[str, str], progress: ProgressStream, deadline: float) -> None:
    argv = [str(venv / "bin" / "python"), *PIP, *INSTALL, *words]
    code, said = run(argv, {"TMPDIR": str(temporary(venv)), **env}, progress, deadline)
    shutil.rmtree(temporary(venv), ignore_errors=True)
    if code:
        raise Refused(f"pip: {last_error(said)}", remedy_for(said))


def temporary(venv: Path) -> Path:
    # A host's /tmp may be small.
    folder = venv / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


def last_error(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")


def remedy_for(said: list[str]) -> str:
    if any("No space left" in line for line in said):
        return "free space in its work folder, or set `workdir:` to a larger disk"
    if any(_NO_WAY_OUT.search(line) for line in said):
        return "it has no way to a package index: set PIP_INDEX_URL, PIP_FIND_LINKS or HTTPS_PROXY in its `env:`"
    if any("ResolutionImpossible" in line or "conflicting dependencies" in line for line in said):
        return "the requirements contradict each other, or the torch that is there; pip's own output shows which"
    version = "{}.{}".format(*sys.version_info)
    if any("No matching distribution" in line and "torch" not in line for line in said):
        return f"no package index that it uses has this for Python {version}: check the name, or set PIP_INDEX_URL"
    return f"choose a --torch that exists for Python {version} on this kind of machine, or set another `python:`"


def loaded_versions(python: str, progress: ProgressStream, deadline: float) -> tuple[dict[str, str] | None, str]:
    code, said = run([python, "-c", VERSIONS], {}, progress, min(deadline, time.monotonic() + TRY_S), quiet=True)
    try:
        return (dict(json.loads(said[-1])), "") if code == 0 else (None, said[-1] if said else f"exit code {code}")
    except (ValueError, IndexError):
        return None, "no answer"


# ---- one command ----------------------------------------------------------------------------------------------


def run(
    argv: list[str], env: dict[str, str], progress: ProgressStream, deadline: float, *, quiet: bool = False
) -> tuple[int, list[str]]:
    """Exit code and last lines. Kills it and its children when the controller leaves or the time is up."""
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
                progress.mention({"line": line})
        return child.wait(), said
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()


def lines_of(handle: int, deadline: float) -> Iterator[str]:
    """Lines until the output ends. Raises ControllerLeft when the controller leaves, Refused when time is up."""
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
    # Without the user name and password that a URL may carry.
    return re.sub(r"//[^/@\s]*@", "//", line.decode(errors="replace").strip())[-MAX_LINE:]
