"""In a Python that has just begun: has its program run by a process in which torch is imported already
(`warm_server.py`), and stays in its place. Signals go on to that process; its end is ours, and ours is its end.

A program that stops this one (SIGSTOP) does not stop that process.
"""

import contextlib
import json
import os
import signal
import socket
import sys

NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_warm(server):
    """Comes back where the program is none that needs torch. server: the path of the socket."""
    unbuffered = sys.orig_argv[1:2] == ["-u"]
    words = sys.orig_argv[1 + unbuffered :]
    if not words or (words[0].startswith("-") and words[0] != "-m") or words[:2] == ["-m", "orch_remote.rank"]:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connect(connection, server)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # it may be heard of before its number is known here
        ask(connection, words, unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        program = int(connection.recv(32) or end_as(-signal.SIGKILL))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: pass_on(program, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_as(int(connection.recv(32) or -signal.SIGKILL))


def connect(connection, server):
    """By way of its folder: the path of a socket may have 107 bytes, and that of a test's folder has more."""
    folder, name = os.path.split(server)
    handle = os.open(folder, os.O_RDONLY)
    connection.connect(f"/proc/self/fd/{handle}/{name}")
    os.close(handle)


def ask(connection, words, unbuffered):
    """Everything that makes us this process; our descriptors are closed, so that they end where the program does."""
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    ours = [int(name) for name in os.listdir("/proc/self/fd") if int(name) not in (connection.fileno(), *namespaces)]
    handles = [number for number in ours if inherited(number)]
    os.umask(umask := os.umask(0))
    place = {"env": dict(os.environ), "cwd": os.getcwd(), "umask": umask, "unbuffered": unbuffered}
    program = {"words": words, "path": sys.path, "executable": sys.executable, "finders": finders()}
    text = json.dumps({**program, **place, "handles": handles, "namespaces": NAMESPACES}).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    socket.send_fds(connection, [text], [*namespaces, *handles])
    for number in (*namespaces, *handles):
        os.close(number)


def finders():
    """What a `sitecustomize` before ours has put up to see modules imported: files and names of classes."""
    found = [type(one) for one in sys.meta_path if not isinstance(one, type)]
    return [(one.find_spec.__globals__["__file__"], one.__name__) for one in found]


def inherited(number):
    try:
        return os.get_inheritable(number)
    except OSError:  # that of the listing itself
        return False


def pass_on(program, number):
    with contextlib.suppress(ProcessLookupError):  # its end is on its way to us
        os.kill(program, number)


def end_as(code):
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
