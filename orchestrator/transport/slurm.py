"""A host that Slurm lends: each command is a step of the job that holds it, started on the login host.

    SlurmTransport(login, "a16-01", "12+1").run("nvidia-smi -L", timeout_s=20)

login: a connection to the login host, or `LocalTransport` there and within the job. Without a job, or after its end,
commands run on the login host itself: the work folder is on a disk that both share. Within the job they never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from orchestrator.errors import ConnectError
from orchestrator.transport import CommandResult, Transport, shell

QUEUE_S = 20.0
# Step-scoped variables of a step around this one would steer srun.
_EXPORTED = "HOME,USER,LOGNAME,SHELL,PATH,LANG,TZ"


class SlurmTransport:
    def __init__(self, login: Transport, host: str, allocation: str | None, *, is_inside: bool = False) -> None:
        """is_inside: this process belongs to that job."""
        self._login, self._host, self._allocation, self._is_inside = login, host, allocation, is_inside
        self.login_s, self.logins_tried = login.login_s, login.logins_tried
        self._is_held = allocation is not None and self._runs(allocation)

    @property
    def node(self) -> str:
        return self._login.node

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        ran = self._login.run(self._line(command), stdin=stdin, timeout_s=timeout_s)
        if ran.exit_code and self._is_held and b"srun: error" in ran.stderr:
            assert self._allocation  # noqa: S101 - for the type checker
            self._is_held = self._runs(self._allocation)
            if not self._is_held:  # the job has ended meanwhile
                return self._login.run(command, stdin=stdin, timeout_s=timeout_s)
        return ran

    def stream(self, command: str, *, stdin: bytes | Iterable[bytes] = b"") -> AbstractContextManager[Iterator[bytes]]:
        return self._login.stream(self._line(command), stdin=stdin)

    def close(self) -> None:
        self._login.close()

    def _runs(self, allocation: str) -> bool:
        """Whether the job holds its hosts now. Raises ConnectError if Slurm does not answer, or has stopped it."""
        if self._is_inside:
            return True
        job = allocation.partition("+")[0]
        asked = self._login.run(shell.join(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]), timeout_s=QUEUE_S)
        if asked.exit_code and b"Invalid job id" not in asked.stderr:
            said = asked.stderr.decode(errors="replace").strip().splitlines() or [f"exit {asked.exit_code}"]
            raise ConnectError(
                self.node, f"Slurm does not answer ({said[-1][:200]})", "the job goes on; try again later"
            )
        states = asked.stdout.split()
        if {b"SUSPENDED", b"STOPPED"} & {*states}:  # srun would wait; on the login host its processes seem lost
            raise ConnectError(self.node, f"Slurm has suspended job {job}", "it goes on when Slurm resumes it")
        return b"RUNNING" in states

    def _line(self, command: str) -> str:
        if not self._is_held:
            return command
        assert self._allocation  # noqa: S101 - for the type checker
        return "exec " + shell.join([*step(self._allocation, self._host), "sh", "-c", f"cd; {command}"])


def step(allocation: str, host: str, *more: str) -> list[str]:
    """The beginning of a command line: what follows runs on that host, with all GPUs that the job has there.

    --overlap: without it the step would wait for the job's other steps to end.
    """
    job, _, component = allocation.partition("+")
    return [
        *("srun", f"--jobid={job}", *([f"--het-group={component}"] if component else [])),
        *("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--quiet", "--mpi=none", "--unbuffered"),
        *(f"--export={_EXPORTED}", "--chdir=/", *more),
    ]
