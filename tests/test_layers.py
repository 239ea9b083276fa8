"""The layers of the house, held by reading every import: who may know whom, and who may print."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ORDER = [
    "ground",
    "transport",
    "slurm",
    "hosts",
    "planning",
    "jobs",
    "store",
    "results",
    "forecast",
    "studies",
    "sweeps",
    "doctor",
    "views",
    "exports",
    "clusters",
    "provision",
    "starting",
    "controller",
    "api",
    "integrations",
    "measuring",
    "ui",
    "cli",
]
"""The rooms of orchestrator/: packages, and files at its root. Each knows those above it in this list alone."""
GROUND = {"__init__", "errors", "units", "files", "paths", "record", "owner"}
"""Files at the root that everybody may import."""
MOST_AT_ROOT = 11

PURE_PACKAGES = {"forecast", "results", "studies"}
"""Their modules know no network, process or screen, and reach no host: nor does one that calls itself pure."""
PURE_AT_LEAST = 68

SHARED = "trainer.shared"
"""All that orchestrator/ may know of the trainer."""
TORCH_FREE = {"__init__", "__main__", "ranks", "ranks.ending", "ranks.rank_info", "ranks.slurm"}
TORCH_FREE |= {"rebalance", "rebalance.estimate", "compute", "compute.compiler", "compute.microbatches"}
"""Of the trainer, beside all of shared/."""
SPEAKS = {
    f"views.{name}"
    for name in (
        "host_tables",
        "run_comparison",
        "console",
        "following",
        "job_table",
    )
}
SPEAKS |= {"views.host_tables", "views.job_table", "views.top"}
SPEAKS |= {
    f"views.{name}"
    for name in (
        "dry_run",
        "host_tables",
        "following",
        "study_table",
        "sweep_table",
        "console",
    )
}
"""With cli, the only files that know a screen and print: the streams, and what is put on them."""
TRAINER_ORDER = [
    "shared",
    "ranks",
    "compute",
    "data",
    "paced",
    "strategies",
    "pipeline",
    "tensor",
    "rebalance",
    "training",
    "setup",
    "checkpoints",
    "measure",
    "session",
    "integrations",
]
"""The packages of trainer/: each knows those above it in this list alone; the files at its root know all."""
MOST_AT_TRAINERS_ROOT = 5
SAME_NAME = {"Cluster", "OrchCallback"}
"""A Python program's cluster and what is remembered of one; and a callback for each framework."""
FRAMEWORKS = {
    "data.bpe": {"tokenizers"},
    "integrations.accelerate": {"accelerate"},
    "integrations.huggingface": {"transformers"},
    "integrations.lightning": {"lightning", "pytorch_lightning"},
    "strategies.horovod": {"horovod"},
}
"""What these files of trainer/ may import beside torch: who names one of them has its framework."""
LAUNCHES = {"remote.launch"}
"""What runs torchrun on a host."""
NOT_PURE = {"socket", "subprocess", "rich", "click", "paramiko", "fabric", "asyncio", "requests", "urllib"}


def modules(folder):
    """Dotted name below the folder -> its syntax tree; a package by its own name."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return found


@cache
def nodes(tree):
    return list(ast.walk(tree))


@cache
def imports(tree):
    """Every module that the file names, wherever it does: `a.b` and, for `from a import b`, both `a` and `a.b`."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module} | {f"{module}.{alias.name}".replace("..", ".") for alias in node.names}
    return found


@cache
def tops(tree):
    return {name.partition(".")[0] for name in imports(tree) if not name.startswith(".")}


@cache
def ours(tree, folder="orchestrator"):
    """The modules of that folder that the file imports; a name inside a module counts as the module."""
    known = ORCHESTRATOR if folder == "orchestrator" else TRAINER
    found = {name.removeprefix(f"{folder}.") for name in imports(tree) if name.startswith(f"{folder}.")}
    return {name for name in found & known.keys() if not any(f"{name}.{rest}" in found for rest in _below(name, known))}


def _below(package, known):
    return [name.removeprefix(f"{package}.") for name in known if name.startswith(f"{package}.")]


def room(name):
    """Of orchestrator/: the package that the module lies in, the root's own file, or the ground."""
    top = name.partition(".")[0]
    return "ground" if top in GROUND else top


def calls_itself_pure(tree):
    return re.search(r"\bPure\b", ast.get_docstring(tree) or "") is not None


def calls(tree, name):
    return [n.lineno for n in nodes(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == name]


ORCHESTRATOR, TRAINER = modules("orchestrator"), modules("trainer")
REMOTE = {name: tree for name, tree in ORCHESTRATOR.items() if name.partition(".")[0] == "remote"}
HERE = {name: tree for name, tree in ORCHESTRATOR.items() if name not in REMOTE}
PURE = {name for name, tree in HERE.items() if room(name) in PURE_PACKAGES or calls_itself_pure(tree)}
PURE_ELSEWHERE = sorted(name for name, tree in REMOTE.items() if calls_itself_pure(tree))
PURE_ELSEWHERE += sorted(f"trainer.{name}" for name, tree in TRAINER.items() if calls_itself_pure(tree))
WITHOUT_TORCH = {name for name in TRAINER if name in TORCH_FREE or name.partition(".")[0] == "shared"}


@pytest.fixture(autouse=True)
def _nobody_in_particular():
    """Nothing runs here: no folder for each of so many tests."""


def test_the_names_of_this_test_are_the_modules_there_are():
    assert SPEAKS - ORCHESTRATOR.keys() == set()
    assert TORCH_FREE - TRAINER.keys() == set()
    assert GROUND - ORCHESTRATOR.keys() == set()
    assert {room(name) for name in HERE} == set(ORDER)
    assert len(PURE) >= PURE_AT_LEAST, "a docstring says Pure no more: its module is no longer looked at"


def test_an_import_is_seen_in_every_form():
    forms = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef h():\n    from i.j import k\n"
    assert imports(ast.parse(forms)) == {"a.b", "c", "c.d", ".", ".e", ".f", ".f.g", "i.j", "i.j.k"}


def test_few_files_lie_at_the_root():
    assert (
        len([name for name in ORCHESTRATOR if name == "__init__" or (ROOT / f"orchestrator/{name}.py").is_file()])
        <= MOST_AT_ROOT
    )


def test_few_files_lie_at_the_root_of_the_trainer():
    assert len(list((ROOT / "trainer").glob("*.py"))) <= MOST_AT_TRAINERS_ROOT


def test_no_module_has_the_name_of_one_of_pythons_own():
    """A reader of `profile.run` asks whose it is, and a script beside it imports the wrong one."""
    named = {part for name in [*ORCHESTRATOR, *TRAINER] for part in name.split(".")}
    assert named & sys.stdlib_module_names <= {"__main__"}


@pytest.mark.parametrize("trees", [HERE, REMOTE, TRAINER], ids=["orchestrator", "remote", "trainer"])
def test_no_two_classes_that_others_see_have_one_name(trees):
    defined = [node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert {name for name in defined if name[0] != "_" and defined.count(name) > 1} <= SAME_NAME


# ---- who may know whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HERE))
def test_a_room_knows_only_the_rooms_above_it_in_the_list(name):
    if name == "__init__":  # the way into the package for other programs, which imports it when it is asked for
        assert ours(HERE[name]) == {"api"}
        return
    allowed = ORDER[: ORDER.index(room(name)) + 1]
    assert {found for found in ours(HERE[name]) if room(found) not in [*allowed, "remote"]} == set()


@pytest.mark.parametrize("name", sorted(name for name in TRAINER if name.partition(".")[0] in TRAINER_ORDER))
def test_a_package_of_the_trainer_knows_only_those_above_it_in_the_list(name):
    allowed = TRAINER_ORDER[: TRAINER_ORDER.index(name.partition(".")[0]) + 1]
    assert {found for found in ours(TRAINER[name], "trainer") if found.partition(".")[0] not in allowed} == set()


def test_the_trainer_asks_no_tensor_for_what_torch_2_0_1_does_not_know():
    """`tensor.nbytes` is of 2.1 (`buffers.bytes_of`); `storage.nbytes()` has always been there."""
    called = {id(node.func) for tree in TRAINER.values() for node in nodes(tree) if isinstance(node, ast.Call)}
    asking = {
        name
        for name, tree in TRAINER.items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and node.attr == "nbytes" and id(node) not in called
    }
    assert asking == set()


def test_the_trainer_calls_no_function_over_many_tensors_that_torch_2_0_1_lacks():
    """`_foreach_copy_` is of 2.1: a function that calls a newer one asks `hasattr` for it."""
    known = {f"_foreach_{name}" for name in ("add_", "mul_", "norm", "zero_")}
    lacking = {
        (name, call.attr)
        for name, tree in TRAINER.items()
        for function in nodes(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Attribute) and call.attr.startswith("_foreach_") and call.attr not in known
        if not any(isinstance(node, ast.Constant) and node.value == call.attr for node in ast.walk(function))
    }
    assert lacking == set()


def test_the_list_names_all_packages_of_the_trainer():
    assert {path.parent.name for path in (ROOT / "trainer").glob("*/__init__.py")} == set(TRAINER_ORDER)


@pytest.mark.parametrize("folder", ["orchestrator", "trainer"])
def test_no_file_imports_itself_around_a_corner(folder):
    trees = ORCHESTRATOR if folder == "orchestrator" else TRAINER
    knows = {name: ours(tree, folder) - {name} for name, tree in trees.items() if name not in REMOTE}
    assert circles(knows) == []


def test_no_file_on_a_host_imports_itself_around_a_corner():
    knows = {name: siblings(tree) for name, tree in REMOTE.items()}
    assert knows["remote.keeper"] >= {"remote.supervisor", "remote.layout"}  # they are seen at all
    assert circles(knows) == []


def siblings(tree):
    """The modules of remote/ that one of them imports, each by a relative import."""
    found = {f"remote{name}" for name in imports(tree) if name.startswith(".")} & REMOTE.keys()
    return {name for name in found if name != "remote"}


def circles(knows):
    """Who can be reached from itself."""
    reach = {name: set(found) for name, found in knows.items()}
    grew = True
    while grew:
        grew = False
        for found in reach.values():
            more = set().union(*(reach.get(other, set()) for other in found)) - found
            grew |= bool(more)
            found |= more
    return sorted(name for name, found in reach.items() if name in found)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


@pytest.mark.parametrize("name", sorted(ORCHESTRATOR.keys() - LAUNCHES))
def test_the_orchestrator_needs_no_torch(name):
    assert tops(ORCHESTRATOR[name]) & {"torch", "torchvision", "numpy"} == set()


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_needs_the_standard_library_and_torch_alone(name):
    allowed = {"torch", "torchvision", "trainer", *FRAMEWORKS.get(name, ())}
    assert tops(TRAINER[name]) - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", sorted(name for name in TRAINER if name.partition(".")[0] == "integrations"))
def test_a_callback_knows_its_framework_and_its_siblings_alone(name):
    assert {found.partition(".")[0] for found in ours(TRAINER[name], "trainer")} <= {"integrations"}
    assert "torch" not in tops(TRAINER[name])


def test_the_orchestrator_knows_of_the_trainer_only_what_both_sides_share():
    found = {name for tree in HERE.values() for name in imports(tree) if name.partition(".")[0] == "trainer"}
    assert {name for name in found if not f"{name}.".startswith(f"{SHARED}.")} == set()


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
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


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_know_no_network_process_or_screen(name):
    assert tops(HERE[name]) & NOT_PURE == set()
    reached = {found for found in ours(HERE[name]) if room(found) in ("transport", "remote")}
    assert reached - {"transport.shell", "transport.ask"} == set()


@pytest.mark.parametrize("name", PURE_ELSEWHERE)
def test_what_runs_on_hosts_is_pure_where_it_says_so(name):
    tree = REMOTE[name] if name in REMOTE else TRAINER[name.removeprefix("trainer.")]
    assert tops(tree) & NOT_PURE == set()


@pytest.mark.parametrize("name", ["remote.verdict", "remote.messages"])
def test_what_the_hub_decides_is_pure_too(name):
    assert tops(REMOTE[name]) <= {"__future__", "collections", "re", "typing"}


@pytest.mark.parametrize("name", sorted(name for name in HERE if room(name) == "ground"))
def test_the_ground_knows_nothing_of_the_trainer(name):
    assert "trainer" not in tops(HERE[name])


@pytest.mark.parametrize(
    "name", sorted(name for name in HERE if room(name) == "results" or (name in PURE and room(name) == "views"))
)
def test_a_run_folder_is_read_without_a_cluster(name):
    if name == "views.documents":
        return  # a cluster has its document, too
    cluster = {f"hosts.{each}" for each in ("inventory", "facts", "checks", "probe", "election", "connections")}
    cluster |= {"planning.build", "jobs.launch", "jobs.collect", "transport.ask"}
    assert ours(HERE[name]) & cluster == set()
    assert "store" not in ours(HERE[name])


@pytest.mark.parametrize("name", sorted(ORCHESTRATOR))
def test_only_the_command_line_and_the_console_speak_to_people(name):
    if name in SPEAKS or name.partition(".")[0] == "cli":
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
        parts = {"commands", "health", "occupants", "probe"}
        assert {sibling.split(".")[1] for sibling in siblings} <= {"", "workfolder", *parts}


@pytest.mark.parametrize("name", [*ORCHESTRATOR, *(f"trainer.{name}" for name in TRAINER)])
def test_nothing_unpickles_or_evaluates(name):
    tree = TRAINER[name.removeprefix("trainer.")] if name.startswith("trainer.") else ORCHESTRATOR[name]
    assert tops(tree) & {"pickle", "marshal", "shelve"} == set()
    assert calls(tree, "eval") == []
    assert calls(tree, "exec") == [] or name == "remote.loader"
