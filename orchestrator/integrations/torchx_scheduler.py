"""A scheduler of TorchX: `torchx run -s orch dist.ddp --script train.py`, then `status`, `log`, `list` and `cancel`.

TorchX finds it by an entry point of `pyproject.toml`; newer versions can also use `torchx_namespace`.
A replica of TorchX is a host. orch launches torchrun itself: of `bash -c "torchrun ... train.py --lr 0.1"`, which
`dist.ddp` makes, the script and its arguments remain.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import PurePath
from typing import Any, Final, get_args

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus, macros, runopts
from torchx.specs.finder import ComponentValidationException
from torchx.util.types import to_dict

from orchestrator.controller import opened
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.inventory import nearest
from orchestrator.jobs.job_store import JobRecord, QueuedError
from orchestrator.paths import Home
from orchestrator.planning.job_spec import OPTIONS, PYTHON, JobSpec, checked, from_text, words
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.launchers import Program, read_program
from orchestrator.starting.retries import Asked
from orchestrator.units import one_line
from orchestrator.views.job_table import failure_words

logger = logging.getLogger(__name__)

_ELSEWHERE: Final = ("exp", "settings", "env", "retries", "retry_on", "rejoin", "retry_wait_s")
"""Not options of `-cfg`: components name the script and its variables; retries need an `orch run` that stays."""
RUN_OPTIONS: Final = tuple(name for name in OPTIONS if name not in _ELSEWHERE)
"""Named as for `Cluster.run`."""
STATES: Final = {
    "queued": AppState.PENDING,
    "starting": AppState.PENDING,
    "running": AppState.RUNNING,
    "succeeded": AppState.SUCCEEDED,
    "failed": AppState.FAILED,
    "cancelled": AppState.CANCELLED,
    "lost": AppState.FAILED,
}
_MACROS: Final = (macros.img_root, macros.app_id, macros.replica_id, macros.rank0_env)
_JOB_ID: Final = "TORCHX_JOB_ID"
"""A variable with the job's id, which orch chooses at the start; it is left out."""
_SHELL_OPERATORS: Final = frozenset("();<>|&")


class CancelError(OrchError, SystemExit):
    """`torchx cancel` catches no error: as a SystemExit it ends with the message, without a traceback."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.code = str(self)


@dataclass(frozen=True)
class Request:
    asked: Asked
    role: Role

    def __str__(self) -> str:
        """The command line of `orch run`, without the values of variables, which may be secrets."""
        spec = self.asked.request.spec
        return shlex.join(["orch", "run", "--detach", *words(spec.updated(env={name: None for name in spec.env}))])


def create_scheduler(session_name: str, **_: object) -> OrchScheduler:
    return OrchScheduler("orch", session_name)


def create_ray(session_name: str, **params: Any) -> Any:
    """TorchX's own. Its module in 0.7 fails with a NameError without ray, which ends `torchx runopts` half way."""
    try:
        return import_module("torchx.schedulers.ray_scheduler").create_scheduler(session_name, **params)
    except NameError as error:
        raise ModuleNotFoundError("No module named 'ray'") from error


class OrchScheduler(Scheduler[Mapping[str, Any]]):
    def _run_opts(self) -> runopts:
        options = _RunOptions()
        for name in RUN_OPTIONS:
            kind = JobSpec.model_fields[name].annotation
            shown = bool if kind is bool else int if int in get_args(kind) else str
            options.add(name, type_=shown, help=OPTIONS[name].help)
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Request]:
        with _refused(), opened(Home.default()) as controller:
            asked = controller.read(job_spec(app, cfg))
        return AppDryRunInfo(Request(asked, app.roles[0]), str)

    def schedule(self, dryrun_info: AppDryRunInfo[Request]) -> str:
        request = dryrun_info.request

        def show(plan: LaunchPlan) -> None:
            for note in plan.notes:
                logger.info(note)

        with _refused(), opened(Home.default(), say=logger.info) as controller:
            if request.asked.cluster.engine:
                return controller.submissions.submit(request.asked).id
            job = controller.start(request.asked, show)
        request.role.num_replicas = len(job.plan.nodes)  # `torchx run --log` reads as many logs
        return job.id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Returns None, and logs why, if there is no such job or its record is damaged."""
        away: Mapping[str, OrchError] = {}
        try:
            with opened(Home.default()) as controller:
                record, away = controller.jobs.find(app_id).asked_after()
        except QueuedError as queued:
            record = queued.record
        except OrchError as error:
            logger.error(error)
            return None
        name, state = _role_name(record), STATES[record.state]
        why = [failure_words(record.first_failure)] if record.first_failure else []
        replicas = [ReplicaStatus(k, state, name, node) for k, node in enumerate(record.nodes)]
        return DescribeAppResponse(
            app_id=record.id,
            state=state,
            msg="\n".join([*why, *map(str, away.values())]) or NONE,
            roles=[Role(name=name, image="", num_replicas=len(replicas))],
            roles_statuses=[RoleStatus(name, replicas)],
        )

    def list(self, cfg: Mapping[str, Any] | None = None) -> list[ListAppResponse]:
        """Lists the jobs of all clusters, newest first."""
        with opened(Home.default()) as controller:
            found = controller.jobs.all()
        for error in found.problems.values():
            logger.warning(error)
        return [ListAppResponse(record.id, STATES[record.state]) for record in found.records]

    def _cancel_existing(self, app_id: str) -> None:
        left: Sequence[str] = ()
        try:
            with opened(Home.default()) as controller:
                try:
                    _, left = controller.jobs.find(app_id).cancel()
                except QueuedError as queued:
                    controller.jobs.slurm.cancel(queued.record)
        except OrchError as error:
            raise CancelError(str(error)) from error
        if left:
            raise CancelError("\n".join(left), "`orch reap` lists what is left on the hosts")

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterator[str]:
        """Yields what ranks of the k-th host print; `until` is ignored. An error is logged, and ends the lines."""
        wanted = (Stream.STDOUT, Stream.STDERR) if streams in (None, Stream.COMBINED) else (streams,)
        matches = re.compile(regex or "")
        try:
            with opened(Home.default()) as controller:
                job = controller.jobs.find(app_id)
                if k >= len(job.plan.nodes):
                    raise UsageError(f"{app_id} has {len(job.plan.nodes)} hosts, and no host {k}: they count from 0")
                node = job.plan.nodes[k].name
                for error in job.reach().values():
                    logger.error(error)
                since_wall = since.timestamp() if since else None
                last = {rank: None for rank in job.plan.node(node).rank_numbers} if since else None
                for event in job.follow(until_end=should_tail, last_lines=last, since_wall=since_wall):
                    for line in event if isinstance(event, tuple) else ():
                        if line.node == node and line.stream in wanted and matches.search(line.text):
                            yield f"{line.rank}: {line.text}\n"
        except OrchError as error:
            logger.error(error)


class _RunOptions(runopts):
    """Leaves all checks to orch: TorchX 0.7 drops unknown options silently, and prints tracebacks for wrong values."""

    def cfg_from_str(self, cfg_str: str) -> dict[str, Any]:
        try:
            return {**to_dict(cfg_str)}
        except ValueError:  # not KEY=VALUE
            return {cfg_str: True}

    def resolve(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        return {**cfg}


def _role_name(record: JobRecord) -> str:
    """The name that `dist.ddp` gives its role: `train` for `train.py` and for `package.train`."""
    return record.exp.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]


@contextmanager
def _refused() -> Iterator[None]:
    """Raises errors of orch as an error that `torchx run` prints without a traceback."""
    try:
        yield
    except OrchError as error:
        raise ComponentValidationException(str(error)) from error


# ---- from a component to a job ---------------------------------------------------------------------------------------


def job_spec(app: AppDef, cfg: Mapping[str, Any]) -> JobSpec:
    """Raises UsageError for what orch cannot run in this way."""
    if len(app.roles) != 1:
        names = ", ".join(role.name for role in app.roles)
        raise UsageError(
            f"{app.name} has {len(app.roles)} roles ({names}), and orch starts one script on all hosts",
            "choose a component with one role, like dist.ddp",
        )
    (role,) = app.roles
    program = _program(role)
    env = {name: value for name, value in role.env.items() if name != _JOB_ID}
    _refuse_macros((program.name, *program.arguments, *env.values()))
    unused = [name for name in ("max_retries", "mounts") if getattr(role, name)]
    for note in (*program.notes, *(f"{name} of the role is not used" for name in unused)):
        logger.info(note)
    options = {name: _value(name, value) for name, value in cfg.items() if value is not None}
    if role.num_replicas > 1:  # one is the default of dist.ddp, and means all hosts here
        options.setdefault("hosts", f"{role.min_replicas or role.num_replicas}:{role.num_replicas}")
    return checked({"name": app.name, "env": env, **options, **_command(program)}, PYTHON)


def _program(role: Role) -> Program:
    typed = [role.entrypoint, *role.args]
    if PurePath(role.entrypoint).name in ("bash", "sh") and len(typed) == 3 and typed[1] == "-c":
        typed = _shell_words(typed[2])
    return read_program(typed)


def _shell_words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        found = [*lexer] or [""]
        needs = [word for word in found if word and _SHELL_OPERATORS.issuperset(word)]
    except ValueError as error:
        needs = [str(error)]
    if needs:
        remedy = "name a script that does all of it: dist.ddp --script train.py"
        raise UsageError(f"{one_line(line)}: orch runs no shell, as this line needs ({needs[0]})", remedy)
    return found


def _refuse_macros(texts: tuple[str, ...]) -> None:
    for macro in _MACROS:
        if any(macro in text for text in texts):
            raise UsageError(
                f"{macro} in the words or variables of a role: orch gives the same ones to all hosts",
                "let the script read RANK, LOCAL_RANK or ORCH_NODE",
            )


def _value(name: str, value: Any) -> Any:
    if name not in RUN_OPTIONS:
        raise UsageError(f"{name}: no such option of -cfg; {nearest(name, [*RUN_OPTIONS])}", "`torchx runopts orch`")
    if not isinstance(value, str):
        return value
    if JobSpec.model_fields[name].annotation is bool:
        return {"true": True, "false": False}.get(value.lower(), value)
    return from_text(name, value)


def _command(program: Program) -> dict[str, Any]:
    if program.is_module:
        return {"module": program.name, "args": [*program.arguments]}
    typed = [*(("python", *program.flags) if program.flags else ()), program.name, *program.arguments]
    return {"script": typed[0], "args": typed[1:]}
