"""Data model of an inventory, and its mistakes as messages. Pure.

`InventoryFile`, `Entry`, `Defaults` are the file as written: strict, the source of the JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core import ErrorDetails

from orchestrator.errors import Mistake, UsageError
from orchestrator.hosts import grammar
from orchestrator.units import parse_bandwidth, parse_bytes, parse_duration
from trainer.shared.gpu_work import GB_PER_S

if TYPE_CHECKING:
    from orchestrator.hosts.yamlfile import Document, KeyPath

# ------------------------------------------------------------------------------------------------ kinds of values


def _checked_only(parse: Callable[[str], Any]) -> Callable[[str], str]:

    def check(text: str) -> str:
        parse(text)
        return text

    return check


def _schema(**keywords: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **keywords})


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if size < 1:
        raise ValueError(f"{text!r} is not a memory size; write it like 16GiB")
    return size


def _patience(text: str) -> None:
    if not 1 <= parse_duration(text) <= MAX_CONNECT_S:
        raise ValueError(f"{text!r} is not from 1s to 10m")


MAX_CONNECT_S = 600
Name = Annotated[str, AfterValidator(grammar.name), _schema(pattern=f"^{grammar.NAME}$")]
NodeName = Annotated[
    str,
    AfterValidator(grammar.name),
    _schema(pattern=r"^[A-Za-z0-9\[][A-Za-z0-9._,\[\]-]*$", examples=["a2000", "gpu[01-16]"]),
]
User = Annotated[str, AfterValidator(grammar.user), _schema(pattern=f"^{grammar.USER}$")]
Interface = Annotated[str, AfterValidator(grammar.interface), _schema(pattern=f"^{grammar.INTERFACE}$")]
HostName = Annotated[str, AfterValidator(grammar.host), _schema(examples=["192.168.1.41"])]
Address = Annotated[
    str, AfterValidator(_checked_only(grammar.address)), _schema(examples=["192.168.1.41", "192.168.1.41/24"])
]
HostKey = Annotated[
    str,
    AfterValidator(grammar.host_key),
    _schema(pattern="^(ssh-|ecdsa-|SHA256:)", examples=["ssh-ed25519 AAAA...", "SHA256:..."]),
]
ProxyJump = Annotated[str, AfterValidator(grammar.proxy_jump), _schema(examples=["admin@gate.lab:2222"])]
Line = Annotated[str, AfterValidator(grammar.line), _schema(minLength=1)]
Script = Annotated[str, AfterValidator(grammar.script), _schema(minLength=1)]
FilePath = Annotated[str, AfterValidator(grammar.path), _schema(pattern="^~?/")]
Program = Annotated[str, AfterValidator(grammar.program), _schema(pattern="^(~?/|[A-Za-z0-9_])")]
WorkFolder = Annotated[str, AfterValidator(grammar.folder_of_ours), _schema(pattern="^~?/.")]
EnvName = Annotated[str, AfterValidator(grammar.env_name), _schema(pattern=f"^{grammar.ENV_NAME}$")]
EnvValue = Annotated[str, AfterValidator(grammar.env_value), WithJsonSchema({"type": ["string", "number", "boolean"]})]
"""Text as written: `1`, `1.10`, `false`."""
Bandwidth = Annotated[str, AfterValidator(_checked_only(parse_bandwidth)), _schema(examples=["2.5Gbps", "100Mbps"])]
SlurmWord = Annotated[str, AfterValidator(grammar.slurm_word), _schema(pattern=r"^[A-Za-z0-9_\[(][!-~]*$")]
Allocation = Annotated[str, Field(pattern=r"^[0-9]{1,12}(\+[0-9]{1,4})?$")]
"""Slurm's job, with `+` and the component of a heterogeneous job."""
Memory = Annotated[str, AfterValidator(_checked_only(_memory)), _schema(examples=["16GiB"])]
Patience = Annotated[str, AfterValidator(_checked_only(_patience)), _schema(examples=["30s", "2m"])]

# --------------------------------------------------------------------------------------------------------- models


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)


class Written(_Model):
    """Unknown keys are mistakes; no value is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Slowdown(_Model):
    at_step: int = Field(ge=0)
    factor: float = Field(gt=0)


class _Pace(_Model):
    samples_per_s: float = Field(gt=0)
    """Samples per second of one rank by itself: forward, backward and optimiser."""
    fixed_ms: float = Field(default=0.0, ge=0)
    """Time that each step takes, independent of its batch."""
    jitter: float = Field(default=0.0, ge=0, le=1)
    """Random share by which steps differ, 0 to 1."""
    gb_per_s: float = Field(default=GB_PER_S, gt=0)
    """Memory bandwidth of the simulated GPU, from its data sheet; sets the speed of copies, casts and
    compression of gradients."""
    like: Literal["mnist_lenet", "resnet152_cifar"] | None = None
    """Experiment whose network the host simulates, while the run trains its own smaller network; default: the run's
    network, without learning."""


class Paced(_Pace):
    memory_bytes: int | None = None
    slowdown: tuple[Slowdown, ...] = ()


class SlowdownEntry(Slowdown, Written):
    """From this step on, the host takes `factor` times as long."""


class PacedEntry(_Pace, Written):
    """Paced: its ranks run on the CPU at the given speed of a GPU that is not present."""

    memory: Memory | None = None
    """Memory of the simulated GPU, like 16GiB."""
    slowdown: list[SlowdownEntry] = Field(default_factory=list)
    """Changes of speed during a run."""


class SlurmType(_Model):
    gres: SlurmWord | None = None
    """GPUs of each host, as `sbatch --gres` takes them, like gpu:v100:1."""
    constraint: SlurmWord | None = None
    """Features that each host must have, as `sbatch --constraint` takes them."""
    partition: SlurmWord | None = None
    """Partition of these hosts; default: the engine's."""
    nodelist: SlurmWord | None = None
    """Only these hosts, like a16-[01-04]."""


class SlurmTypeEntry(SlurmType, Written):
    """Hosts of one type, by what Slurm declares of them."""


class SlurmEngine(_Model):
    login: Annotated[str, AfterValidator(grammar.login), _schema(examples=["me@login.hpc"])]
    """Login host, [user@]host[:port]; `localhost` is this machine. Keys for SSH are in `defaults`."""
    workdir: WorkFolder
    """Folder on a disk that the login host and all hosts share."""
    scratch: FilePath | None = None
    """Folder on each host's own disk, like /tmp; there each job gets a folder of its own, TMPDIR, until its end."""
    partition: SlurmWord | None = None
    """Partition, as `sbatch --partition` takes it; default: Slurm's."""
    account: SlurmWord | None = None
    """Account to charge."""
    qos: SlurmWord | None = None
    """Quality of service."""
    time: SlurmWord | None = None
    """Time limit of a job, like 12:00:00 or 2-00:00:00; default: the partition's."""
    options: list[Annotated[str, AfterValidator(grammar.sbatch_option), _schema(pattern="^--[a-z]")]] = Field(
        default_factory=list
    )
    """More options of sbatch, like --mail-type=END."""


class SlurmEntry(SlurmEngine, Written):
    """A Slurm cluster: `sbatch` on its login host gets the hosts."""


class EngineEntry(Written):
    """The lender of the hosts, if they are not reached by SSH."""

    slurm: SlurmEntry
    """A Slurm cluster."""


class _Shared(_Model):
    port: int | None = Field(default=None, ge=1, le=65535)
    """SSH port; default: from ~/.ssh/config, else 22."""
    user: User | None = None
    """Login name; default: from ~/.ssh/config, else yours. Training needs no root."""
    key_file: FilePath | None = None
    """Private key on this machine, or a public key whose private half an agent holds; default: the agent's keys and
    those in ~/.ssh/config."""
    python: Program = "python3"
    """Python 3.10 or newer with torch, a path or a name; default with `transport: local`: orch's own Python."""
    activate: Line | None = None
    """One line of POSIX shell to run before Python, like `. ~/venv/bin/activate`."""
    workdir: WorkFolder = "~/.orch"
    """Folder on the host for code, jobs and logs; created if absent."""
    gpu: Line | None = None
    """The GPU's label, like RTX A2000."""
    gpus: int | None = Field(default=None, ge=0, le=64)
    """Number of GPUs that the host must show."""
    ranks: int | None = Field(default=None, ge=1, le=256)
    """Processes to start; default: `gpus`, else the GPUs found, else 1."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: GPUs if there are any, else the CPU."""
    interface: Interface | None = None
    """Network interface for training; default: the one on the route to the other hosts."""
    image: Line | None = None
    """Label of the machine's image, like pytorch-2.0.1; checked against the torch found."""
    note: Line | None = None
    """A note for people, shown in the cluster's table."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """Environment of the ranks. A node's own variables are added to the variables of `defaults`."""
    prepare: Script | None = None
    """Shell to run on the host before a job's ranks start."""
    host_key: HostKey | None = None
    """The host's SSH key or its fingerprint, as printed by ssh-keygen; default: known_hosts."""
    proxy_jump: ProxyJump | None = None
    """Hosts to go through, [user@]host[:port][,...]; default: from ~/.ssh/config."""
    transport: Literal["ssh", "local", "slurm"] = "ssh"
    """How to reach the host; local: this machine, without SSH; slurm: by steps of `allocation`."""


class Defaults(_Shared, Written):
    """Values for all nodes that do not set their own."""

    bandwidth: Bandwidth | None = None
    """Speed of the host's link, like 2.5Gbps."""
    paced: PacedEntry | None = None
    """Simulates a GPU that is not present."""
    connect_timeout: Patience | None = None
    """Time limit of an SSH login, like 30s; default: 10s, or ConnectTimeout of ~/.ssh/config if that is longer."""

    @field_validator("key_file", "python", "workdir")
    @classmethod
    def _has_no_range(cls, text: str | None) -> str | None:
        """`Node` may have brackets, stored by an older orch."""
        return text and grammar.no_range(text)


class Entry(Defaults):
    """One host."""

    name: NodeName
    """The node's name, in commands, tables and folder names. gpu[01-16], with a range in `host`, stands for many."""
    host: HostName | None = None
    """Host for SSH: a host name, an IP address or an alias of ~/.ssh/config."""
    address: Address | None = None
    """Numeric training address; default: the host's own on the route to the other hosts."""
    id: Line | None = None
    """The machine's id in its owner's panel."""
    master: bool = False
    """True pins this node as the master; at most one node."""
    slurm: SlurmTypeEntry | None = None
    """With `engine: slurm`, the hosts that this entry stands for."""
    most: int | None = Field(default=None, ge=1, le=4096)
    """With `engine: slurm`, the number of these hosts in a job without --nodes; default: 1."""
    allocation: Allocation | None = None
    """Slurm's number of the job that holds this host; written by orch."""


class InventoryFile(Written):
    """A cluster of hosts that are reached by SSH."""

    cluster: Name
    """The cluster's name."""
    engine: EngineEntry | None = None
    """Lender of the hosts; then each of `nodes` is a type of host. Default: hosts are reached by SSH."""
    defaults: Defaults = Defaults()
    nodes: list[Entry] = Field(min_length=1)


class Node(_Shared):
    name: Name
    host: HostName
    address: Address | None = None
    address_prefix: int | None = None
    bandwidth_bps: float | None = Field(default=None, gt=0)
    id: Line | None = None
    master: bool = False
    slurm: SlurmType | None = None
    most: int | None = None
    kind: str | None = None
    """With an engine, the entry of the inventory that this host belongs to."""
    allocation: Allocation | None = None
    paced: Paced | None = None
    connect_timeout_s: float | None = Field(default=None, ge=1, le=MAX_CONNECT_S)
    line: int = Field(default=0, exclude=True)


class Inventory(_Model):
    cluster: str
    nodes: tuple[Node, ...]
    file: str
    defaults: dict[str, Any] = Field(default_factory=dict)
    entries: tuple[dict[str, Any], ...] = Field(default=(), repr=False)
    """The nodes as written; with an engine only."""
    engine: SlurmEngine | None = None
    """Then each node is a type of host."""
    warnings: tuple[str, ...] = ()

    def node(self, name: str) -> Node:
        """Raises UsageError naming the nearest known name."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = [node.name for node in self.nodes]
        raise UsageError(f"cluster {self.cluster} has no node {grammar.show(name)}", nearest(name, known))


_ALSO_CALLED = {
    "host": ("hostname", "ip", "ip_address", "ssh_host", "server"),
    "user": ("username", "login", "ssh_user"),
    "key_file": ("key", "identity", "identity_file", "identityfile", "private_key", "ssh_key"),
    "connect_timeout": ("timeout", "connecttimeout", "ssh_timeout", "login_timeout"),
    "proxy_jump": ("jump", "proxy", "bastion", "gateway", "jump_host"),
    "python": ("python_path", "interpreter", "venv", "conda"),
    "workdir": ("dir", "folder", "workspace", "work_dir", "home"),
    "gpus": ("slots", "num_gpus", "gpu_count", "ngpus"),
    "ranks": ("nproc", "nproc_per_node", "processes", "workers"),
    "bandwidth": ("speed", "link", "network"),
    "interface": ("nic", "iface", "ifname"),
    "note": ("comment", "description"),
    "env": ("environment", "envs", "variables"),
    "prepare": ("setup", "before", "pre"),
    "nodes": ("hosts", "machines", "servers", "workers"),
    "cluster": ("name",),
}


def nearest(word: str, known: list[str]) -> str:
    plain = word.lower().replace("-", "_")
    also = [key for key, names in _ALSO_CALLED.items() if key in known and plain in names]
    import difflib  # only for a mistake

    near = also or difflib.get_close_matches(plain, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"choose from {', '.join(sorted(known))}"


# Mistakes in an inventory as messages: place, problem, expected form. Pure.

_MODELS: dict[str, type[Written]] = {
    "": InventoryFile,
    "defaults": Defaults,
    "engine": EngineEntry,
    "engine.slurm": SlurmEntry,
    "nodes": Entry,
    "nodes.slurm": SlurmTypeEntry,
    "paced": PacedEntry,
    "slowdown": SlowdownEntry,
}


def mistake_of(details: ErrorDetails, document: Document) -> Mistake:
    path = details["loc"]
    if path[-1:] == ("[key]",) and path[-3:-2] == ("env",):  # pydantic's mark for the key itself, not its value
        line = document.line(path[:-1])
        name = str(path[-2]).partition("=")[0]  # the text after `=` may be a secret
        message = f"{grammar.show(name)} must be only a variable's name: {grammar.ENV_FORM}"
        return Mistake(document.file, line, f"{_where(path[:-2], document)}{message}")
    kind = details["type"]
    if kind == "missing":
        message = f"`{path[-1]}` is missing"
    elif kind == "extra_forbidden":
        message = _unknown_key(path)
    else:
        return Mistake(document.file, document.line(path), f"{_where(path, document)}{problem(details)}")
    return Mistake(document.file, document.line(path), f"{_where(path[:-1], document)}{message}")


def once(mistakes: Sequence[Mistake]) -> list[Mistake]:
    kept: dict[tuple[str, int, str], Mistake] = {}
    for mistake in mistakes:
        words = mistake.message.partition(": ")[2] if mistake.message.startswith("node ") else mistake.message
        kept.setdefault((mistake.file, mistake.line, words), mistake)
    return list(kept.values())


def _where(path: KeyPath, document: Document) -> str:
    words = []
    if "env" in path:  # the key may be `NAME=value`, and the value a secret
        path = tuple(part.partition("=")[0] if isinstance(part, str) else part for part in path)
    if path[:1] == ("nodes",) and len(path) > 1:
        node = document.values["nodes"][path[1]]
        name = node.get("name") if isinstance(node, dict) else None
        words.append(f"node {name if isinstance(name, str) and name.isprintable() else int(path[1]) + 1}")
        path = path[2:]
    elif path[:1] == ("defaults",):
        words.append("defaults")
        path = path[1:]
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if dotted:
        words.append(dotted if dotted.isprintable() and len(dotted) < 100 else grammar.show(dotted))
    return "".join(f"{word}: " for word in words)


def _unknown_key(path: KeyPath) -> str:
    key = str(path[-1])
    names = [part for part in path[:-1] if isinstance(part, str)]
    model = _MODELS.get(".".join(names)) or _MODELS[names[-1] if names else ""]
    if model is Defaults and key in Entry.model_fields:
        return f"`{key}` belongs to one node, not to `defaults`"
    return f"unknown key {grammar.show(key)}; {nearest(key, list(model.model_fields))}"


def problem(details: ErrorDetails) -> str:
    kind, found, limits = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        return str(limits["error"])
    if found is None:
        return "is empty; give a value or remove the key"
    if kind == "string_type" and details["loc"][-1] in ("bandwidth", "memory"):
        example = "2.5Gbps" if details["loc"][-1] == "bandwidth" else "16GiB"
        return f"must be written with its unit, like {example}, not {_found(found)}"
    if kind in _FORMS:
        shown = _kind(found) if "env" in details["loc"] else _found(found)
        return f"{_FORMS[kind].format(**limits)}, not {shown}{_quote_hint(kind, found)}"
    return str(details["msg"])


_FORMS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "dict_type": "must be a mapping like {{key: value}}",
    "model_type": "must be a mapping like {{key: value}}",
    "list_type": "must be a list, one item a line behind `- `",
    "too_short": "must hold at least one item",
}


def _kind(value: Any) -> str:
    """Type of an `env` value, which may be a secret."""
    return {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}.get(type(value), "a number")


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return grammar.show(value)


def _quote_hint(kind: str, found: Any) -> str:
    if kind == "string_type" and isinstance(found, (bool, int, float)):
        return "; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(found, str):
        return "; write it plainly, without quotes, unit or leading zero"
    return ""
