"""The controller on systems without Linux's own modules and functions: hidden here, since these tests run on Linux."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDE = """
import os, select, signal, socket, sys, time
def hide(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
hide(os, *(name for name in dir(os) if name.startswith(("sched_", "pidfd", "memfd", "eventfd", "posix_f", "SCHED_"))))
hide(os, "O_PATH", "O_TMPFILE", "getrandom", "copy_file_range", "splice", "setns", "unshare", "getresuid", "P_PIDFD")
hide(select, "epoll", *(name for name in dir(select) if name.startswith("EPOLL")))
hide(signal, "SIGPWR", "SIGPOLL", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "pidfd_send_signal", "sigtimedwait")
hide(socket, "TCP_USER_TIMEOUT", "SO_BINDTODEVICE", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_VSOCK")
hide(socket, "AF_PACKET", "AF_NETLINK", "TCP_KEEPIDLE", "TCP_QUICKACK")
hide(time, "CLOCK_BOOTTIME", "CLOCK_TAI")
import resource
hide(resource, "prlimit")
sys.modules.update(dict.fromkeys(("grp", "spwd", "nis", "ossaudiodev")))
sys.platform = "darwin"
sys.addaudithook(lambda event, found: refuse(*found) if event == "open" else None)
def refuse(path, *_):
    if str(path).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise OSError(2, "hidden by this test", path)
"""
IMPORT_ALL = """
import importlib, pkgutil, orchestrator
left_out = ("orchestrator.remote", "orchestrator.integrations", "orchestrator.ui", "orchestrator.exports")
names = [found.name for found in pkgutil.walk_packages(orchestrator.__path__, "orchestrator.") if found.name]
names = [name for name in names if not name.startswith(left_out) and not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
MAIN = "import sys; sys.argv[:1] = ['orch']; from orchestrator.cli import main; main()"


def python(text: str, folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORCH_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-c", HIDE + text, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_modules_of_the_controller_are_imported(tmp_path: Path) -> None:
    assert int(python(IMPORT_ALL, tmp_path)) > 150


def test_commands_that_need_no_host(tmp_path: Path) -> None:
    assert "to fill in" in python(MAIN, tmp_path, "init", "lab.yaml")
    words = ["--exp", "resnet152_cifar", "--nodes", "2xA2000,2xV100", "--bandwidth", "2.5Gbps"]
    assert "samples/s" in python(MAIN, tmp_path, "plan", *words)
    assert python(MAIN, tmp_path, "jobs").startswith("job ")
