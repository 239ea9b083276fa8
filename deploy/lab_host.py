"""The inside of one host of the lab: started as process 1 of fresh namespaces, it builds the host's file system, enters
it, starts OpenSSH and reaps zombies until it is killed. Killing it is the host's power loss.

    nsenter --net=... unshare --mount --uts --ipc --pid --fork python -I deploy/lab_host.py host.json

A host's root is a fresh tmpfs, and what is not put into it below does not exist there: nobody on a host sees the
developer's home, and the Python that runs the lab can be reached by an ordinary user even when it lies below a folder
that only root may enter. It is a lab and not a jail: root on a host is the machine's root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "nix")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_ID = 1000
NOBODY = 65534
RESTART_S = 1.0


@dataclass(frozen=True)
class HostSpec:
    """What a host is made of. binds: (folder here, folder there), all read-only; disk: what survives a power loss."""

    name: str
    user: str
    port: int
    hosts: tuple[tuple[str, str], ...]
    """(address, name) of the other hosts."""
    machine_id: str
    python: str
    binds: tuple[tuple[str, str], ...]
    root: str
    disk: str
    host_key: str
    authorized_key: str

    @property
    def home(self) -> str:
        return home_of(self.user)

    @property
    def path(self) -> str:
        return search_path(self.python)


def home_of(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def search_path(python: str) -> str:
    """PATH on a host: its `python3` is the one that runs the lab."""
    folder = os.path.dirname(python)
    return SYSTEM_PATH if folder in SYSTEM_PATH.split(":") else f"{folder}:{SYSTEM_PATH}"


def main() -> None:
    spec = HostSpec(**json.loads(Path(sys.argv[1]).read_text()))
    _forget_our_starter()
    build(spec, Path(spec.root))
    enter(Path(spec.root))
    socket.sethostname(spec.name)
    serve()


def build(spec: HostSpec, root: Path) -> None:
    """Mounts the host's file system on `root`. The order matters: each step may lie on top of those before it."""
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root))
    _programs(root)
    _etc(spec, root)
    _kernel(root)
    _volatile(root)
    _disk(spec, root)
    # After /home, /root and /tmp: Python, or a folder that a person binds, may lie below any of them.
    for source, target in spec.binds:
        _bind_read_only(source, _way_to(root, target))
    # After /proc and /run, in which these two lie.
    boot_id = root / "run/boot_id"
    _write(boot_id, f"{uuid.uuid4()}\n", 0o444)
    _mount("--bind", str(boot_id), str(root / "proc/sys/kernel/random/boot_id"))


def enter(root: Path) -> None:
    """Makes `root` the root, and lets go of the machine's own."""
    os.chdir(root)
    os.mkdir("old")
    _run("pivot_root", ".", "old")
    os.chdir("/")
    _run("umount", "--lazy", "/old")
    os.rmdir("/old")


def serve() -> None:
    """What process 1 does: keeps sshd running, and takes leave of every orphan that ended."""
    sshd = _start_sshd()
    while True:
        pid, _ = os.wait()
        if pid == sshd:
            time.sleep(RESTART_S)
            sshd = _start_sshd()


def _start_sshd() -> int:
    program = shutil.which("sshd", path=SYSTEM_PATH) or "/usr/sbin/sshd"
    return os.posix_spawn(program, [program, "-D", "-e"], {"PATH": SYSTEM_PATH})


def _forget_our_starter() -> None:
    """Signals that our starter ignores (nohup), or Python does, would stay ignored in every process of the host."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)


def _programs(root: Path) -> None:
    """The machine's programs, read-only; /bin and its like are symbolic links on some systems and folders on others."""
    for name in SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir()
            _bind_read_only(str(source), root / name)


def _etc(spec: HostSpec, root: Path) -> None:
    """A copy, so that a host may have its own accounts and names and the machine's files are never touched."""
    etc = root / "etc"
    _run("cp", "-a", "/etc", str(etc))
    _accounts(spec.user, etc)
    others = [f"{address} {name}" for address, name in spec.hosts]
    names = ["127.0.0.1 localhost", f"127.0.1.1 {spec.name}", "::1 localhost", *others]  # its own as Debian writes it
    _write(etc / "hosts", "\n".join(names) + "\n")
    _write(etc / "hostname", f"{spec.name}\n")
    _write(etc / "machine-id", f"{spec.machine_id}\n", 0o444)
    _write(etc / "resolv.conf", "")  # so that an unknown name fails at once
    (etc / "profile.d").mkdir(exist_ok=True)
    _write(etc / "profile.d/zz-lab.sh", f"export PATH={shlex.quote(spec.path)}\n")  # login shells set their own
    shutil.rmtree(etc / "ssh", ignore_errors=True)  # with the machine's own host keys
    (etc / "ssh").mkdir()
    shutil.copy(spec.host_key, etc / "ssh/ssh_host_ed25519_key")
    _write(etc / "ssh/sshd_config", _sshd_config(spec))


def _sshd_config(spec: HostSpec) -> str:
    return f"""\
Port {spec.port}
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
SetEnv "PATH={spec.path}"
Subsystem sftp internal-sftp
"""


def _accounts(user: str, etc: Path) -> None:
    """The machine's system accounts, none of its people, and this host's one ordinary user."""
    users = [line.split(":") for line in (etc / "passwd").read_text().splitlines()]
    groups = [line.split(":") for line in (etc / "group").read_text().splitlines()]
    users = [row for row in users if _is_system(row, user)]
    groups = [[*row[:3], ""] for row in groups if _is_system(row, user)]
    if user != "root":
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        users.append([user, "x", str(USER_ID), str(USER_ID), "", home_of(user), shell])
        groups.append([user, "x", str(USER_ID), ""])
    _write(etc / "passwd", "".join(":".join(row) + "\n" for row in users))
    _write(etc / "group", "".join(":".join(row) + "\n" for row in groups))
    # `*` is no password; `!`, as many systems have it, would lock the account for sshd without PAM.
    _write(etc / "shadow", "".join(f"{row[0]}:*:19000:0:99999:7:::\n" for row in users), 0o600)


def _is_system(row: list[str], user: str) -> bool:
    """For a row of passwd or of group."""
    if len(row) < 4 or not row[2].isdigit():
        return False
    return row[0] == "root" or (row[0] != user and (int(row[2]) < USER_ID or int(row[2]) == NOBODY))


def _kernel(root: Path) -> None:
    """Mounts proc and sys again: they show the namespaces that they are mounted in; the devices are the machine's."""
    for name in ("proc", "sys", "dev"):
        (root / name).mkdir()
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("-t", "sysfs", "-o", "ro", "sysfs", str(root / "sys"))
    _mount("--rbind", "/dev", str(root / "dev"))
    _mount("-t", "devpts", "-o", "newinstance,mode=0620,ptmxmode=0666", "devpts", str(root / "dev/pts"))
    _mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "tmpfs", str(root / "dev/shm"))


def _volatile(root: Path) -> None:
    """What a power loss empties."""
    for name, mode in (("tmp", "1777"), ("run", "0755"), ("var", "0755")):
        (root / name).mkdir()
        _mount("-t", "tmpfs", "-o", f"mode={mode},nosuid,nodev", "tmpfs", str(root / name))
    for name in ("run/sshd", "run/lock", "var/empty", "var/lib", "var/log", "var/cache"):
        (root / name).mkdir()
    (root / "var/run").symlink_to("/run")
    (root / "var/tmp").mkdir()
    os.chmod(root / "var/tmp", 0o1777)


def _disk(spec: HostSpec, root: Path) -> None:
    """/home and /root, kept in a folder of the machine's disk."""
    for name, mode in (("home", 0o755), ("root", 0o700)):
        folder = Path(spec.disk, name)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
        (root / name).mkdir()
        _mount("--bind", str(folder), str(root / name))
    home = root / spec.home[1:]
    if not (home / ".ssh").exists():
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        _write(home / ".ssh/authorized_keys", spec.authorized_key, 0o600)
        if spec.user != "root":
            home.chmod(0o700)
            for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
                os.chown(path, USER_ID, USER_ID)


def _way_to(root: Path, target: str) -> Path:
    """The folder `target` of the host, made with all above it, each open to every user of the host."""
    place = root
    for part in Path(target).parts[1:]:
        place = place / part
        if not place.exists():
            place.mkdir(mode=0o755)
        elif place.stat().st_mode & 0o011 != 0o011:
            place.chmod(place.stat().st_mode | 0o011)
    return place


def _bind_read_only(source: str, target: Path) -> None:
    _mount("-o", "rbind,ro", source, str(target))


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a symbolic link by the file, and never writes through it."""
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _mount(*words: str) -> None:
    _run("mount", *words)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # its last line is what `lab.py up` shows
        sys.exit(str(error))
