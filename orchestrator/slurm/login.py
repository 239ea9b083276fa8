"""Commands on Slurm's login host, over one connection to it.

    login = SlurmLogin(transport, "/scratch/me/orch")
    login.job("12").words                       # PENDING (Resources), expected start 2026-11-28T21:00:00

Slurm may have forgotten a job and may keep no accounts: then a job's phase is `unknown`, and its hosts' last records
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import ConnectError, HostError, UsageError
from orchestrator.slurm.answers import ACCOUNT, Broken, DeclaredHost, SlurmJob, read_account, read_hosts, read_job
from orchestrator.transport import CommandResult, Transport, shell
from orchestrator.units import one_line

ASK_S, SEND_S = 30.0, 300.0
PROGRAMS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
NEEDED = ("click", "jinja2", "pathspec", "pydantic", "rich", "yaml")
"""Modules of orch's controller; connections by SSH need more."""
_PACKAGES = {"yaml": "pyyaml"}
_NAMED = 'case $1 in "~/"*) d=$HOME/${1#??};; *) d=$1;; esac; '
_FOLDER = _NAMED + 'cd "$d" || exit 9; '
"""Ends the script if the folder is missing: what follows would act in the user's home."""


@dataclass(frozen=True)
class LoginFacts:
    """accounts: whether sacct lists ended jobs. missing: commands of Slurm and Python modules."""

    accounts: bool
    missing: tuple[str, ...]


class SlurmLogin:
    """folder: the shared work folder. All methods raise HostError."""

    def __init__(self, transport: Transport, folder: str) -> None:
        self._transport, self._folder = transport, folder

    def facts(self, python: str, activate: str | None) -> LoginFacts:
        """Also makes the work folder. Raises HostError with the shell's last line if that fails."""
        names = " ".join(PROGRAMS)
        imports = f"import importlib.util as u; print('modules', *[n for n in {NEEDED!r} if u.find_spec(n) is None])"
        script = (
            f"for p in {names}; do command -v $p >/dev/null || echo missing $p; done; "
            "sacct -nX -S now >/dev/null 2>&1 && echo accounts; umask 077; "
            f'{_NAMED}mkdir -p "$d" && '
            '{ [ -n "$(ls -A "$d")" ] || touch "$d/.orch-work"; } || exit 9; '
            f"{activate or ':'}; exec {shell.typed([python])} -c {shell.join([imports])}"
        )
        asked = self._sh(script, self._folder)
        if asked.exit_code:
            raise HostError(
                self._transport.node, f"the login host: {_last(asked)}", "check `login:`, `workdir:` and `python:`"
            )
        words = [line.split() for line in asked.stdout.decode(errors="replace").splitlines() if line.strip()]
        by_name: dict[str, list[str]] = {}
        for name, *rest in words:
            by_name.setdefault(name, []).extend(rest)
        modules = [_PACKAGES.get(name, name) for name in by_name.get("modules", ()) if name in NEEDED]
        return LoginFacts(
            "accounts" in by_name,
            (*(name for name in by_name.get("missing", ()) if name in PROGRAMS), *modules),
        )

    def hosts(self) -> tuple[list[DeclaredHost], list[str]]:
        """See `answers.read_hosts`."""
        asked = self._done(["scontrol", "show", "nodes", "-o"])
        return read_hosts(asked.stdout.decode(errors="replace"))

    def expanded(self, hosts: str) -> list[str]:
        """`a[16,2000],v100` as names: only Slurm itself reads its lists of hosts."""
        return self._done(["scontrol", "show", "hostnames", hosts]).stdout.decode(errors="replace").split()

    def job(self, job: str) -> SlurmJob:
        asked = self._sh(
            'if out=$(scontrol show job -o "$1" 2>&1); then echo "$out"; else case $out in *"Invalid job id"*) '
            f'sacct -nXPj "$1" -o {ACCOUNT} 2>/dev/null | head -1;; *) echo "$out" >&2; exit 9;; esac; fi',
            job,
        )
        if asked.exit_code == 9:
            raise ConnectError(
                self._transport.node, f"Slurm does not answer ({_last(asked)})", "the job goes on; try again"
            )
        text = asked.stdout.decode(errors="replace")
        try:
            return read_job(text, job)
        except Broken:
            return read_account(text if "|" in text else "", job)

    def submit(self, name: str, files: bytes, *, at: str) -> str:
        """Slurm's number of the job. name: a new folder below `submitted`. files: a tar with `job.sh` and `code.tar`,
        unpacked there. at: a folder that has to be there, from that one. Raises UsageError with sbatch's own words.
        """
        script = 'umask 077; mkdir -p submitted && mkdir "submitted/$2" && cd "submitted/$2" && tar -xf - && '
        script += 'mkdir src && tar -xf code.tar -C src && ls -d "$3" >/dev/null && { sbatch --parsable job.sh >number'
        script += ' && cat number || { cd ..; rm -rf "$2"; exit 1; }; }'
        asked = self._inside(script, name, at, stdin=files, timeout_s=SEND_S)
        job = asked.stdout.decode(errors="replace").strip().rpartition("\n")[2].partition(";")[0]
        if asked.exit_code or not job.isdecimal():
            words = _last(asked).removeprefix("sbatch: error: ")
            raise UsageError(
                f"Slurm refuses this job: {words}", "change --nodes, or `engine:` and `slurm:` in the inventory"
            )
        return job

    def unpack(self, name: str, files: bytes) -> None:
        """files: a tar, unpacked into a folder of this name, unless it is there."""
        script = 'umask 077; [ -d "$2" ] || { mkdir ".$2.$$" && tar -xf - -C ".$2.$$" && mv -T ".$2.$$" "$2"; }'
        asked = self._inside(script, name, stdin=files, timeout_s=SEND_S)
        if asked.exit_code:
            raise HostError(self._transport.node, f"the work folder {self._folder}: {_last(asked)}", "check `workdir:`")

    def has(self, name: str) -> bool:
        return self._inside('[ -d "$2" ]', name).exit_code == 0

    def text_of(self, name: str, file: str) -> str:
        """A file of a submission; "" without one. Lists the folder first: NFS remembers for a minute that a file is
        not there. Raises HostError also if it cannot be read.
        """
        script = 'f="submitted/$2/$3"; ls submitted "${f%/*}" >/dev/null 2>&1; LC_ALL=C cat "$f"'
        asked = self._inside(script, name, file)
        if asked.exit_code and b"No such file" not in asked.stderr:
            raise HostError(self._transport.node, f"{self._folder}: {_last(asked)}", "try again later")
        return asked.stdout.decode(errors="replace")

    def drop(self, name: str) -> None:
        self._inside('rm -rf "submitted/$2"', name)

    def submissions(self) -> list[tuple[str, str]]:
        """All folders with `started`, or `number` and `queued.json` if nothing of it has started."""
        script = 'cd submitted 2>/dev/null || exit 0; for n in *; do printf "\\036%s\\n" "$n"; ls "$n" >/dev/null; '
        script += (
            'cat "$n/started" 2>/dev/null || { [ -s "$n/number" ] && cat "$n/number" "$n/queued.json"; }; done; true'
        )
        asked = self._inside(script)
        if asked.exit_code:
            raise HostError(self._transport.node, f"the work folder {self._folder}: {_last(asked)}", "check `workdir:`")
        found = asked.stdout.decode(errors="replace").split("\x1e")[1:]
        return [(name, lines) for name, _, lines in (text.partition("\n") for text in found) if name.isprintable()]

    def last_error(self, name: str) -> str:
        """The batch step's last error, else its last line; "" without any."""
        asked = self._inside('tail -n 20 "submitted/$2/slurm.log" 2>/dev/null', name)
        lines = [one_line(line, 300) for line in asked.stdout.decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")

    def cancel(self, job: str) -> None:
        self._done(["scancel", job])

    def remove(self, names: Sequence[str]) -> None:
        """These submissions; after the last one also orch's code, and the folder if orch made it and it holds nothing
        else. A folder that is gone is no error, unless its disk is gone, too.
        """
        script = _NAMED + '[ -e "$d" ] || ! cd "$(dirname "$d")" || exit 0; cd "$d" || exit 9; shift; '
        script += 'for n; do rm -rf "submitted/$n"; done; rmdir nodes; rmdir submitted || exit 0; '
        script += "rm -rf controller-????????????????; [ -e .orch-work ] || exit 0; rm -rf venv locks; "
        script += '[ "$(ls -A)" = .orch-work ] || exit 0; rm .orch-work && cd / && rmdir "$d"; true'
        self._there(self._sh(script, self._folder, *names))

    def _inside(self, script: str, *args: str, stdin: bytes = b"", timeout_s: float = ASK_S) -> CommandResult:
        """args: `$2` and so on."""
        return self._there(self._sh(_FOLDER + script, self._folder, *args, stdin=stdin, timeout_s=timeout_s))

    def _there(self, asked: CommandResult) -> CommandResult:
        """Raises HostError if the script has not found the work folder."""
        if asked.exit_code == 9:
            remedy = "is its disk mounted on the login host? `orch up FILE` makes a folder that is not there"
            raise HostError(self._transport.node, f"the work folder {self._folder} is missing: {_last(asked)}", remedy)
        return asked

    def _done(self, argv: Sequence[str]) -> CommandResult:
        asked = self._transport.run(shell.join(argv), timeout_s=ASK_S)
        if asked.exit_code:
            raise HostError(self._transport.node, f"{argv[0]} failed: {_last(asked)}", "try it on the login host")
        return asked

    def _sh(self, script: str, *args: str, stdin: bytes = b"", timeout_s: float = ASK_S) -> CommandResult:
        return self._transport.run(shell.join(["sh", "-c", script, "sh", *args]), stdin=stdin, timeout_s=timeout_s)


def _last(asked: CommandResult) -> str:
    lines = (asked.stderr or asked.stdout).decode(errors="replace").strip().splitlines()
    return one_line(lines[-1] if lines else f"exit {asked.exit_code}", 300)
