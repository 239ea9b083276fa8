"""The layers of the house, held by reading every import: who may know whom, and who may print."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUND = {"errors", "units", "shell", "paths", "grammar", "text", "files"}
PURE = [
    "secret_words",
    "batch_norm",
    "alike",
    "rebalances",
    "used",
    "homes",
    "launchers",
    "inventory",
    "facts",
    "election",
    "elastic",
    "faults",
    "stall",
    "visible",
    "wheels",
    "nccl",
    "plan",
    "analyse",
    "measure",
    "events",
    "gpu_use",
    "gpu_charts",
    "slowed",
    "straggler",
    "summary",
    "curves",
    "linechart",
    "report",
    "charts",
    "published",
    "collectives",
    "profiles",
    "networks",
    "wire",
    "forecast",
    "simulate",
    "catalogue",
    "advice",
    "imagined",
    "outlook",
    "memory_needed",
    "rounds",
    "command_line",
    "faster",
    "planview",
    "studies",
    "frames",
    "heard",
    "noise",
    "lines",
    "redraw",
    "live",
    "occupied",
    "checks",
    "text",
    "units",
    "shell",
    "grammar",
]
STAGES = [
    "inventory",
    "facts",
    "checks",
    "probe",
    "election",
    "plan",
    "profiles",
    "outlook",
    "faster",
    "planview",
    "job",
    "collect",
    "pull",
    "belongings",
    "consent",
    "clusters",
    "provision",
    "controller",
    "profiling",
    "sweep",
]
STAGES += [
    "console",
    "cli.complete",
    "cli.script_words",
    "cli.common",
    "cli.boards",
    "cli.clusters",
    "cli.current",
    "cli.hosts",
    "cli.jobs",
    "cli.plan",
    "cli.profile",
    "cli.pull",
    "cli.results",
    "cli.sweep",
    "cli",
    "cli.__main__",
]
TORCH_FREE = {"__init__", "__main__", "experiments", "config", "shares", "records", "env", "errors", "interrupt"}
TORCH_FREE |= {"alpha_beta", "microbatches", "estimate", "pace", "gpu_work", "worker"}
SHARED = {"experiments", "config", "shares", "records", "alpha_beta", "gpu_work"}
LAUNCHES = {"remote.launch"}
"""What runs torchrun on a host."""
NOT_PURE = {"socket", "subprocess", "rich", "click", "paramiko", "fabric", "asyncio", "requests", "urllib"}


def modules(folder):
    """Dotted name below the folder -> its syntax tree."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree):
    """Every module that the file names, wherever it does: `a.b` and, for `from a import b`, both `a` and `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module} | {f"{module}.{alias.name}".replace("..", ".") for alias in node.names}
    return found


def tops(tree):
    return {name.partition(".")[0] for name in imports(tree) if not name.startswith(".")}


def ours(tree, known=None):
    """The modules of orchestrator/ that the file imports; a name inside a module counts as the module."""
    found = {name.removeprefix("orchestrator.") for name in imports(tree) if name.startswith("orchestrator.")}
    return {name for name in found if name in (known or ORCHESTRATOR)}


def calls(tree, name):
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == name]


ORCHESTRATOR, TRAINER = modules("orchestrator"), modules("trainer")
REMOTE = {name: tree for name, tree in ORCHESTRATOR.items() if name.startswith("remote.")}
HERE = {name: tree for name, tree in ORCHESTRATOR.items() if name not in REMOTE}


def test_the_names_of_this_test_are_the_modules_there_are():
    assert {*GROUND, *PURE, *STAGES} - ORCHESTRATOR.keys() == set()
    assert TORCH_FREE - TRAINER.keys() == set()


def test_an_import_is_seen_in_every_form():
    forms = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef h():\n    from i.j import k\n"
    assert imports(ast.parse(forms)) == {"a.b", "c", "c.d", ".", ".e", ".f", ".f.g", "i.j", "i.j.k"}


@pytest.mark.parametrize("name", sorted(ORCHESTRATOR.keys() - LAUNCHES))
def test_the_orchestrator_needs_no_torch(name):
    assert tops(ORCHESTRATOR[name]) & {"torch", "torchvision", "numpy"} == set()


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_needs_the_standard_library_and_torch_alone(name):
    assert tops(TRAINER[name]) - set(sys.stdlib_module_names) <= {"torch", "torchvision", "trainer"}


def test_the_orchestrator_knows_of_the_trainer_only_what_both_sides_share():
    found = {name for tree in HERE.values() for name in imports(tree) if name.startswith("trainer.")}
    assert {name.split(".")[1] for name in found} <= SHARED
    assert not [name for tree in HERE.values() for name in imports(tree) if name == "trainer"]


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_what_the_trainer_promises_without_torch_leads_to_none(name):
    """__main__ reaches torch too, but inside its function: a usage mistake is answered before."""
    todo, seen = [name], set()
    while todo:
        tree = TRAINER[todo.pop()]
        top_level = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        assert tops(top_level) & {"torch", "torchvision"} == set()
        found = {module.removeprefix("trainer.") for module in imports(top_level)} & TRAINER.keys()
        todo += found - seen
        seen |= found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_network_process_or_screen(name):
    assert tops(HERE[name]) & NOT_PURE == set()
    assert {found for found in ours(HERE[name]) if found.startswith(("transport", "remote"))} == set()


@pytest.mark.parametrize("name", ["remote.verdict", "remote.generations"])
def test_what_the_hub_decides_is_pure_too(name):
    assert tops(REMOTE[name]) <= {"__future__", "collections", "re", "typing"}


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_stands_on_itself(name):
    assert ours(HERE[name]) <= GROUND
    assert "trainer" not in tops(HERE[name])


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_sees_only_what_stands_to_its_left(name):
    assert ours(HERE[name]) & set(STAGES) <= set(STAGES[: STAGES.index(name)])


@pytest.mark.parametrize("name", sorted(HERE.keys() - set(STAGES)))
def test_what_is_no_stage_knows_neither_the_controller_nor_those_above_it(name):
    assert ours(HERE[name]) & {"clusters", "controller", "console", "cli"} == set()


@pytest.mark.parametrize(
    "name",
    [
        "analyse",
        "measure",
        "events",
        "gpu_use",
        "gpu_charts",
        "slowed",
        "straggler",
        "summary",
        "report",
        "charts",
        "published",
        "used",
    ],
)
def test_a_run_folder_is_read_without_a_cluster(name):
    cluster = {"inventory", "facts", "checks", "probe", "election", "plan", "job", "collect", "store", "call"}
    assert ours(HERE[name]) & cluster == set()


@pytest.mark.parametrize("name", sorted(ORCHESTRATOR))
def test_only_the_command_line_and_the_console_speak_to_people(name):
    if name == "console" or name.partition(".")[0] == "cli":
        return
    assert tops(ORCHESTRATOR[name]) & {"rich", "click"} == set()
    assert calls(ORCHESTRATOR[name], "print") == []


@pytest.mark.parametrize("name", sorted(HERE))
def test_ssh_is_known_to_its_transport_alone(name):
    if not name.startswith("transport."):
        assert tops(HERE[name]) & {"paramiko", "fabric", "invoke"} == set()


@pytest.mark.parametrize("name", sorted(HERE))
def test_what_runs_on_hosts_is_shipped_and_never_imported(name):
    assert {found for found in ours(HERE[name]) if found.startswith("remote")} == set()


@pytest.mark.parametrize("name", REMOTE)
def test_what_runs_on_hosts_needs_the_standard_library_and_its_siblings(name):
    siblings = {found for found in imports(REMOTE[name]) if found.startswith(".")}
    assert not [found for found in siblings if found.startswith("..")]
    assert tops(REMOTE[name]) - ({"torch"} if name in LAUNCHES else set()) <= set(sys.stdlib_module_names)
    if name in ("remote.loader", "remote.workfolder"):
        assert siblings == set()
    if name == "remote.probe":
        assert {sibling.split(".")[1] for sibling in siblings} <= {"", "workfolder", "occupants"}


@pytest.mark.parametrize("name", [*ORCHESTRATOR, *(f"trainer.{name}" for name in TRAINER)])
def test_nothing_unpickles_or_evaluates(name):
    tree = TRAINER[name.removeprefix("trainer.")] if name.startswith("trainer.") else ORCHESTRATOR[name]
    assert tops(tree) & {"pickle", "marshal", "shelve"} == set()
    assert calls(tree, "eval") == []
    assert calls(tree, "exec") == [] or name == "remote.loader"
