"""One import of torch for all of a host: torchrun and the ranks are forks of the process that made it.

    ORCH_PRELOAD=7,9:torch python train.py --lr 0.1     # 7: a socket to the supervisor, 9: what it prints itself

The supervisor (`preloading`) starts it while the job is being prepared, with the ranks' own command line and variables.
It stops in Python's start (`script_start`), before the script. At the start of the ranks it forks a server and becomes
torchrun; the server forks a process for each rank wrapper that asks (`forked`), which goes on to the script as Python
does. So the script's arguments, `__main__`, flags, command line and variables are its own. Between the two stands a
minder, the script's parent: it dies with the wrapper, takes the script's orphans, and reports how it ended.

torch is hidden from the script until its own import, so that nothing differs if it imports none, and step hooks are
installed as usual. If the import cannot be shared (`Imported.obstacle`), all start afresh, as with `--no-preload`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .forked import MOST_BYTES, PRELOAD, SOCKET, at_folder
from .processes import adopt_orphans, descendants, die_with_parent, end_all, reap_orphans

MOST_SAID = 1 << 16
HIDDEN = ("torch", "torchgen", "functorch")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/habana")
# Each rank's own, of torchrun or of `rank`; no library reads them when it is imported.
OWN = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|(GROUP|ROLE|MASTER|TORCHELASTIC|ORCH)_\w+|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING"
)
# In a script's text: variables that a library reads once, when it is loaded.
READ_AT_IMPORT = re.compile(
    rb"""["']((?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|VECLIB|NUMEXPR|ATEN|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO|LD|MALLOC)_[A-Z0-9_]+"""
    rb"""|TORCH_(?!NCCL_|HOME\b|EXTENSIONS_DIR\b|CUDA_ARCH_LIST\b)[A-Z0-9_]+)["']"""
)


def main() -> None:
    """Returns only in a rank's process, on its way to the script."""
    handles, _, names = os.environ.pop(PRELOAD).partition(":")
    line, output = (int(handle) for handle in handles.split(","))
    try:
        _serve_or_be_torchrun(Imported(names.split(","), output), socket.socket(fileno=line))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _serve_or_be_torchrun(imported: Imported, line: socket.socket) -> None:
    text, handles, _, _ = socket.recv_fds(line, MOST_BYTES, 2)
    if not text:  # the job does not start
        os._exit(0)
    line.close()
    order = json.loads(text)
    log, *store = handles
    _take(log, 1, 2)
    if imported.obstacle:
        _note(imported.obstacle)
        _run_afresh(order, store)
    place = os.path.join(order["folder"], SOCKET)
    listener = _listen(order["folder"])
    if (server := os.fork()) == 0:
        die_with_parent(signal.SIGKILL)
        for handle in store:
            os.close(handle)
        _take(os.open(os.devnull, os.O_WRONLY), 1, 2)  # each rank gets its own
        _serve(listener, imported)
        return
    listener.close()
    if len(os.listdir("/proc/self/task")) > 1:  # a library's threads that its handlers do not end for a fork
        os.unlink(place)
        os.kill(server, signal.SIGKILL)
        _note("its import starts threads")
    _be_torchrun(order, store)


def _note(obstacle: str) -> None:
    """In torchrun's log."""
    os.write(2, f"orch: ranks import torch by themselves: {obstacle}\n".encode())


def _run_afresh(order: Mapping[str, Any], store: Sequence[int]) -> NoReturn:
    environment = without_start(os.environ) | ({"ORCH_STORE": str(store[0])} if store else {})
    for handle in store:
        os.set_inheritable(handle, True)
    os.chdir(order["folder"])
    os.execve(sys.executable, [sys.executable, *order["argv"]], environment)


def _be_torchrun(order: Mapping[str, Any], store: Sequence[int]) -> NoReturn:
    show_as("orch_remote.launch (torchrun)")
    os.environ["PYTHONPATH"] = without_start(os.environ)["PYTHONPATH"]
    os.chdir(order["folder"])
    from .launch import run  # torch's, and so not at the top

    run(order["argv"][2:], socket.socket(fileno=store[0]) if store else None)


def without_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without the folder of `script_start`, which comes first."""
    return {**environment, "PYTHONPATH": environment["PYTHONPATH"].partition(os.pathsep)[2]}


def _listen(folder: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with at_folder(folder) as place:
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt's
            os.unlink(f"{place}/{SOCKET}")
        listener.bind(f"{place}/{SOCKET}")
    listener.listen(64)
    return listener


# ---- the import -----------------------------------------------------------------------------------------------------


@dataclass
class Imported:
    """The shared import. output: bytes printed by it. obstacle: why it cannot be shared, else ""."""

    names: Sequence[str]
    output_at: int
    obstacle: str = ""
    output: bytes = b""
    before: dict[str, str] = field(default_factory=lambda: {**os.environ})

    def __post_init__(self) -> None:
        os.set_blocking(1, False)  # of both outputs: with a full pipe the import fails, and nothing is shared
        folder = script_folder(sys.orig_argv[1:])
        self.obstacle = (folder is None and "the script's folder is unknown") or _sets_variables(os.getcwd())
        if folder is not None and not self.obstacle:
            self.obstacle = self._import(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        os.set_blocking(self.output_at, False)
        with contextlib.suppress(BlockingIOError):
            self.output = os.read(self.output_at, MOST_SAID)
        os.close(self.output_at)

    def _import(self, folder: str) -> str:
        gc.disable()  # which takes a tenth of an import's time
        sys.path[:0] = [folder] if folder else []
        try:
            for name in self.names:
                importlib.import_module(name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            del sys.path[: bool(folder)]
            gc.enable()
            gc.freeze()  # no fork looks through what was imported, which would copy all of it
        if not hasattr(sys.modules["torch"], "Tensor"):
            return "this torch is not complete"
        if threading.active_count() > 1:
            return f"its import starts threads ({threading.enumerate()[-1].name})"
        if device := next((path for path in _open_files() if path.startswith(DEVICES)), None):
            return f"its import opens {device}"
        return ""

    def differs(self, environment: Mapping[str, str]) -> str:
        """The first variable of a rank that another value had for the import."""
        names = environment.keys() | self.before.keys()
        found = {name for name in names if environment.get(name) not in (self.before.get(name), os.environ.get(name))}
        return min((name for name in found if not OWN.fullmatch(name)), default="")


def script_folder(words: Sequence[str]) -> str | None:
    """The first entry of `sys.path` for this command line; "" for none, None if unknown."""
    while words and words[0] == "-u":
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        return None
    if getattr(sys.flags, "safe_path", False):
        return ""
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))


def _sets_variables(folder: str) -> str:
    """A script may set a variable before it imports torch: too late for an import that has been."""
    for path in Path(folder).rglob("*.py"):
        if path.relative_to(folder).parts[0] == "trainer":
            continue
        with contextlib.suppress(OSError):
            if found := READ_AT_IMPORT.search(path.read_bytes()):
                return f"{path.relative_to(folder)} names {found[1].decode()}, which counts only before that"
    return ""


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


# ---- forks ----------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket, imported: Imported) -> None:
    show_as("orch_remote.preload")
    for signum in (signal.SIGINT, signal.SIGTERM):  # those are for scripts; torchrun's end is ours
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            _attend(connection, imported)
            return
        connection.close()


def _attend(connection: socket.socket, imported: Imported) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    text, handles, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
    if user != os.getuid() or not text:
        os._exit(1)
    request = json.loads(text)
    connection.send(imported.differs(request["env"]).encode() or b"ready")
    if connection.recv(8) != b"go":
        os._exit(0)
    adopt_orphans()
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    minder = os.getpid()
    if (script := os.fork()) == 0:
        for handle in (wake, woken):
            os.close(handle)
        connection.close()
        _become(minder, request, handles, imported)
        return
    for handle in handles:
        os.close(handle)
    _mind(script, connection, (wake, woken), f"orch_remote.preload rank {request['rank']}")


def _mind(script: int, connection: socket.socket, wakeup: tuple[int, int], title: str) -> NoReturn:
    # The script stays a zombie until the wrapper is done with it, so that its number is not reused.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup[1], warn_on_full_buffer=False)
    show_as(title)
    connection.send(f"{script} {os.getpid()}".encode())
    has_ended = False
    while True:
        if not has_ended and (found := os.waitid(os.P_PID, script, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            has_ended = True
            by_signal = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            with contextlib.suppress(OSError):
                connection.send(str(-found.si_status if by_signal else found.si_status).encode())
        ready, _, _ = select.select([wakeup[0], connection.fileno()], [], [])
        if wakeup[0] in ready:
            os.read(wakeup[0], 512)
            reap_orphans(script)
        if connection.fileno() in ready:  # the wrapper never writes again: it has ended
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(script, signal.SIGKILL)
    while left := descendants(os.getpid()):
        end_all(left, signal.SIGKILL)
        reap_orphans(script)
    os._exit(0)


def _become(minder: int, request: Mapping[str, Any], handles: Sequence[int], imported: Imported) -> None:
    """Makes this fork equal to a process that has just begun."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != minder:
        os._exit(1)
    os.setsid()
    show_as("")
    _take_signals(request["ignored"])
    for number, handle in zip((1, 2), handles, strict=True):
        _take(handle, number)
    made = {name: value for name, value in os.environ.items() if imported.before.get(name) != value}
    os.environ.clear()
    os.environ.update(request["env"])
    for name in request["of_parent"]:  # they begin with the number of the script's parent
        if name in os.environ:
            os.environ[name] = str(minder) + os.environ[name].lstrip("0123456789")
    os.chdir(request["folder"])
    if imported.output:
        os.write(2, imported.output)
    _draw_anew()
    importlib.invalidate_caches()
    if len(imported.names) == 1:
        Hidden.hide(made)


def _take_signals(ignored: Sequence[int]) -> None:
    """As after the wrapper's exec. Python itself ignores SIGPIPE and SIGXFSZ."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        usual: Any = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        wanted = signal.SIG_IGN if number in ignored else usual
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)


def _draw_anew() -> None:
    # `random` does so by itself. Otherwise the ranks of a host would draw the same numbers.
    sys.modules["torch"].default_generator.seed()
    if numbers := sys.modules.get("numpy.random.mtrand"):
        numbers.seed()
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


class Hidden:
    """Finds torch, which was imported before the fork: that takes no time. made: variables that its import set."""

    def __init__(self, modules: dict[str, ModuleType], made: Mapping[str, str]) -> None:
        self._modules, self._made = modules, made
        self._specs = {name: module.__spec__ for name, module in modules.items()}
        self._variables = {**os.environ}

    @staticmethod
    def hide(made: Mapping[str, str]) -> None:
        modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in HIDDEN}
        sys.meta_path.insert(0, Hidden(modules, made))
        for name in modules:
            del sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in HIDDEN or name not in self._modules:
            return None
        if name != "torch":
            importlib.import_module("torch")
        known = self._specs[name]
        return ModuleSpec(name, self, origin=known and known.origin, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]
        if module.__name__ == "torch":
            sys.modules.update(self._modules)
            for name, value in self._made.items():
                os.environ.setdefault(name, value)
            self._look_at_variables()

    def _look_at_variables(self) -> None:
        """A package may have set some since, unseen in the script's text."""
        changed = [name for name in os.environ if os.environ[name] != self._variables.get(name)]
        late = [name for name in changed if READ_AT_IMPORT.fullmatch(f"'{name}'".encode()) and name not in self._made]
        if "OMP_NUM_THREADS" in late and os.environ["OMP_NUM_THREADS"].isdecimal():
            self._modules["torch"].set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"])))
            late.remove("OMP_NUM_THREADS")
        if late:
            names = ", ".join(late)
            sys.stderr.write(f"orch: {names} was set after torch had been loaded; `orch run --no-preload` obeys it\n")


# ---- a process's own face -------------------------------------------------------------------------------------------


def _take(handle: int, *numbers: int) -> None:
    for number in numbers:
        os.dup2(handle, number)
    os.close(handle)


_own_line = b""  # the command line with which it began, while another is shown


def show_as(words: str) -> None:
    """Changes the command line in `ps`: this is no script, only its launcher. "" restores it."""
    global _own_line
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # proc(5): arg_start and arg_end, fields 48 and 49
        if 0 < begin < end:
            _own_line = _own_line or ctypes.string_at(begin, end - begin)
            shown = words.encode()[: end - begin - 1] if words else _own_line
            ctypes.memset(begin, 0, end - begin)
            ctypes.memmove(begin, shown, len(shown))
