"""Makes a virtual environment with a torch in the work folder of a host whose own Python lacks it, once.

Request: {"workdir", "torch", "torchvision": None for the one that matches, "requirements": what to install,
"any_torch": whether a torch of another version will do, "packages", "constraints": lines of a person's requirements,
"env": variables for pip, "limit_s", "owner", "cluster": who will use it}. It reports (see `talk`):

    {"waits": 1}                                   another setup is at work in this work folder
    {"phase": "asks python" | "makes venv" | "installs torch" | "adds packages" | "tries torch"}
    {"line": TEXT}                                 what the installer printed last
    {"end": {"python", "torch", "torchvision", "state"}}

state: `own` if this Python has a fitting torch, `kept` if the environment was here, `made`, `added` if only packages
were missing. Packages lie in an environment of this cluster above the one with torch (or above this Python), and see
all that it has. The marker file says who uses an environment, and what it holds once it is whole: without that it is
half made, and made again. An installer lives no longer than the controller's interest in it, and not beyond the limit
of time.
"""

from __future__ import annotations

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
PIP = ("-m", "pip", "--no-input", "--no-cache-dir", "--disable-pip-version-check")
INSTALL = ("install", "--progress-bar=off", "--retries=2")
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""pip's settings, by uv's variable for each."""
_NO_WAY_OUT = re.compile(r"new ?connection|network is unreachable|name resolution|timed? ?out|retrying", re.IGNORECASE)


def main(request: dict[str, Any]) -> None:
    die_with_parent(0)  # changes nothing, and loads what a child needs of it: later there are threads
    serve(request, set_up)


def set_up(request: dict[str, Any], talk: Talk) -> dict[str, Any]:
    deadline = time.monotonic() + request["limit_s"]
    work = WorkFolder(request["workdir"])
    talk.say({"phase": "asks python"})
    own, _ = ask_versions(sys.executable, talk, deadline)
    if own and not (request["any_torch"] or fits(own, request)):
        own = None
    if own and not request["packages"]:
        return {**own, "python": sys.executable, "state": "own"}
    with claimed(work):
        work.locks.mkdir(exist_ok=True)
        with alone_at(work.venv_lock, talk):
            python, found, state = (sys.executable, own, "own") if own else with_torch(work, request, talk, deadline)
            if request["packages"]:
                python, is_new = with_packages(work, python, found, request, talk, deadline)
                state = state if state == "made" else "added" if is_new else "kept"
    return {**found, "python": python, "state": state}


def with_torch(
    work: WorkFolder, request: dict[str, Any], talk: Talk, deadline: float
) -> tuple[str, dict[str, str], str]:
    """An environment with the torch that is asked for: its Python, its versions, and `kept` or `made`."""
    venv = work.venv(torch_name(request))
    python, marker = str(venv / "bin" / "python"), read_json(venv / VENV_MARKER)
    users = users_of(marker, request)
    if "found" in marker:
        talk.say({"phase": "tries torch"})
        found, _ = ask_versions(python, talk, deadline) if os.path.exists(python) else (None, "")
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
    make(venv, {"users": users}, talk, deadline)
    install_torch(venv, request, talk, deadline)
    found = try_torch(venv, request, "choose another --torch for this host", talk, deadline)
    write_json(venv / VENV_MARKER, {"found": found, "users": users})
    return python, found, "made"


def torch_name(request: dict[str, Any]) -> str:
    """A torchvision other than the matching one makes it another environment."""
    torch, torchvision = request["torch"], request["torchvision"]
    return f"{torch}{'.' if '+' in torch else '+'}vision{torchvision}" if torchvision else str(torch)


def with_packages(
    work: WorkFolder, below: str, found: dict[str, str], request: dict[str, Any], talk: Talk, deadline: float
) -> tuple[str, bool]:
    """This cluster's environment above the Python `below`, with what its requirements ask for and torch as it is: its
    Python, and whether anything was missing.
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
        make(venv, half, talk, deadline)
        see_packages(venv, below)
    write_json(venv / VENV_MARKER, {**half, "found": found})
    talk.say({"phase": "adds packages"})
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in found.items()]
    files = {"-r": venv / "requirements.txt", "-c": venv / "constraints.txt"}
    files["-r"].write_text("\n".join(request["packages"]) + "\n")
    files["-c"].write_text("\n".join([*request["constraints"], *pins]) + "\n")
    pip(venv, [word for pair in files.items() for word in map(str, pair)], request["env"], talk, deadline)
    try_torch(venv, found, "look at what the requirements bring along", talk, deadline)
    write_json(venv / VENV_MARKER, {**half, **asked})
    return python, True


def see_packages(venv: Path, below: str) -> None:
    """As --system-site-packages, also if the Python below is a virtual environment itself."""
    if below == sys.executable:
        site.main()  # the folders that this Python would look through, had we not started it without them
        found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()]
    else:
        found = [str(path) for path in Path(below).parents[1].glob("lib/python*/site-packages")]
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "own.pth").write_text("".join(f"{folder}\n" for folder in found))


def try_torch(venv: Path, wanted: dict[str, Any], remedy: str, talk: Talk, deadline: float) -> dict[str, str]:
    """The versions that load. Raises Refused if they do not, or are others."""
    talk.say({"phase": "tries torch"})
    found, said = ask_versions(str(venv / "bin" / "python"), talk, deadline)
    if not found or not fits(found, wanted):
        raise Refused(f"what was installed does not load ({said or found})", remedy)
    return found


def fits(found: dict[str, str], wanted: dict[str, Any]) -> bool:
    """Whether these are the versions asked for; of any build (`+cu121`) if none is named."""
    asked = {name: wanted[name] for name in found if wanted[name]}
    return all(version in (found[name], found[name].partition("+")[0]) for name, version in asked.items())


def users_of(marker: dict[str, Any], request: dict[str, Any]) -> list[dict[str, Any]]:
    """Who uses an environment, each {"owner": {"id", "name"}, "cluster"}: those of before, and this one."""
    user = {"owner": request["owner"], "cluster": request["cluster"]}
    mine = (user["owner"]["id"], user["cluster"])
    rest = [known for known in marker.get("users", []) if (known["owner"]["id"], known["cluster"]) != mine]
    return [*rest, user]


def refuse_if_used(work: WorkFolder) -> None:
    """By a job that runs."""
    running = [job.id for job in work.all_jobs() if lives(job.read_agent())]
    if running:
        raise Refused(
            f"{', '.join(running)} may use the environment that is to be changed", "wait for it, or cancel it"
        )


def make(venv: Path, marker: dict[str, Any], talk: Talk, deadline: float) -> None:
    """An empty environment in place of what is left of an earlier one. Raises Refused with Python's own message."""
    if not read_json(venv / VENV_MARKER) and venv.is_dir() and any(venv.iterdir()):
        raise Refused(f"{venv} is there, and `orch setup` did not make it", "move it away, or choose another --torch")
    talk.say({"phase": "makes venv"})
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    write_json(venv / VENV_MARKER, marker)
    code, said = run([sys.executable, "-m", "venv", str(venv)], {}, talk, deadline)
    if code:
        remedy = "install this Python's venv module there (`python3-venv` on Debian), or set another `python:`"
        raise Refused(f"{sys.executable} makes no virtual environment ({last_error(said)})", remedy)


# ---- installers -----------------------------------------------------------------------------------------------


def install_torch(venv: Path, request: dict[str, Any], talk: Talk, deadline: float) -> None:
    """By uv if it is here or pip can bring it: it loads and unpacks torch's libraries side by side. Else by pip, which
    is asked as well if uv fails: the settings are meant for pip, and people know its messages.
    """
    talk.say({"phase": "installs torch"})
    python, env = str(venv / "bin" / "python"), {"TMPDIR": str(temporary(venv)), **request["env"]}
    brought = temporary(venv) / "uv"
    places = f"{os.environ.get('PATH', '')}:{os.path.expanduser('~/.local/bin')}:{brought / 'bin'}"
    if not shutil.which("uv", path=places):
        run([python, *PIP, *INSTALL, "--retries=0", f"--target={brought}", "uv"], env, talk, deadline, quiet=True)
    if uv := shutil.which("uv", path=places):
        settings, options = uv_settings(python, env)
        argv = [uv, "pip", "install", "--no-cache", "--no-progress", "--color=never", f"--python={python}", *options]
        code, _ = run([*argv, *request["requirements"]], {**settings, **env}, talk, deadline)
        shutil.rmtree(temporary(venv), ignore_errors=True)
        if code == 0:
            return
    pip(venv, request["requirements"], request["env"], talk, deadline)


def uv_settings(python: str, env: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """pip's settings, of its files and of `env`, as variables and options of uv: an address may hold a password."""
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
    # As pip has it: the best version of all indexes, not that of the first.
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return settings, ["--no-index"] if found.get("no-index", "0") in ("1", "true", "yes", "on") else []


def pip(venv: Path, words: list[str], env: dict[str, str], talk: Talk, deadline: float) -> None:
    """Installs. Raises Refused with pip's own message if it fails."""
    argv = [str(venv / "bin" / "python"), *PIP, *INSTALL, *words]
    code, said = run(argv, {"TMPDIR": str(temporary(venv)), **env}, talk, deadline)
    shutil.rmtree(temporary(venv), ignore_errors=True)
    if code:
        raise Refused(f"pip: {last_error(said)}", remedy_for(said))


def temporary(venv: Path) -> Path:
    """For what is unpacked on the way: a host's /tmp may be small."""
    folder = venv / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


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
