"""How large and how scattered the code is: files, single-use modules, repeated names, walks, docstrings, tests.

    python tests/bench/shape.py [--json] [--job] [--at REVISION ...]

Prints one column for this checkout and one for each revision, about 10 s each. Needs no network and no GPU. Without the
product's dependencies the walks stay empty. --job runs a job on this machine, for the walks of its commands.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.plain_words import DOCSTRING, PATTERNS, Text, hits, python_texts

ROOT = Path(__file__).resolve().parents[2]
SHORT_LINES = 60
SHARED_NAMES = {"__init__.py", "__main__.py", "base.py"}
WORST = 5
NOTES = """modules entered: modules of ours of which a function is called. moves: each function counts once, at its
first call; a move is a change of module from one function to the next in that order. Lambdas, comprehensions, calls
during an import and other threads do not count (`tests/support/walk.py FOLDER plan` lists the calls). one importer: one
module of the product imports it, at its top or in a function; `programs` in this file says what a program is.
docstrings: strings that are statements. code lines: neither blank nor comment nor docstring. private names:
`from orchestrator... import _x`, and `name._x` and `setattr(name, "_x")` of an imported name."""
WALKS = {"plan": "orch plan --exp resnet152_cifar", "train": "python -m trainer, 2 steps on the CPU"}
JOB = {
    "up": "up local.yaml",
    "run": "run --detach --exp mnist_lenet --set data=synthetic --set samples=64 --set batch=8 --set eval_every=0",
    "follow": "logs --follow",
    "collect": "collect --out runs",
    "report": "report --out runs",
}
NODES = """cluster: walk
defaults: {{transport: local, device: cpu, ranks: 1}}
nodes:
  - {{name: a, address: 127.0.0.1, workdir: {folder}/a}}
  - {{name: b, address: 127.0.0.1, workdir: {folder}/b}}
"""


@dataclass(frozen=True)
class Source:
    """module: the dotted name; a package's own file ends in `.__init__`."""

    path: Path
    module: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def package(self) -> str:
        return self.module.rpartition(".")[0]


@dataclass(frozen=True)
class Row:
    """value: one or more numbers, separated by " / ". worst: names, the worst first."""

    name: str
    value: str
    worst: tuple[str, ...] = ()


def sources(root: Path, *tops: str) -> list[Source]:
    found = []
    for path in sorted(path for top in tops for path in (root / top).rglob("*.py")):
        found.append(Source(path, ".".join(path.relative_to(root).with_suffix("").parts), path.read_text()))
    return found


def measure(root: Path, runs_job: bool) -> list[Row]:
    product, tests = sources(root, "orchestrator", "trainer"), sources(root, "tests")
    modules = {source.module for source in product}
    return [
        files(product),
        Row("product lines", f"{sum(source.lines for source in product):,}"),
        single_use(product, modules),
        repeated_names(product),
        *(walk(root, name) for name in WALKS),
        *(job_walks(root) if runs_job else ()),
        Row("CONTRIBUTING / CHANGELOG / README, kB", pages(root)),
        *docstring_rows(product),
        *test_rows(tests, modules),
    ]


def files(product: list[Source]) -> Row:
    count = Counter(source.module.partition(".")[0] for source in product)
    return Row("orchestrator files / trainer files", f"{count['orchestrator']} / {count['trainer']}")


def pages(root: Path) -> str:
    names = ("CONTRIBUTING.md", "CHANGELOG.md", "README.md")
    return " / ".join(f"{(root / name).stat().st_size / 1000:.1f}" for name in names)


# ---- modules --------------------------------------------------------------------------------------------------------


def named(source: Source, node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of an import statement; name is "" for `import module`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = source.module.split(".")[: -node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from ((base, alias.name) for alias in node.names)


def imported(source: Source, modules: set[str]) -> set[str]:
    """The modules of ours that a file imports, wherever it does; a name of a package counts as its `__init__`."""
    found = set()
    for node in source.nodes:
        for base, name in named(source, node):
            tries = (f"{base}.{name}", f"{base}.{name}.__init__", base, f"{base}.__init__")
            found |= set(next(([word] for word in tries if word in modules), ()))
    return found


def programs(product: list[Source]) -> set[str]:
    """Modules that are started, not imported: `__main__` and files with that guard, and of `orchestrator/remote/` those
    with a `main`, those shipped to be started later (`_STARTED`) and those named as `orch_remote.NAME`. Packages' own
    files count as programs, too.
    """
    found = {source.module for source in product if source.path.name in ("__init__.py", "__main__.py")}
    for source in product:
        if "__name__ == " in source.text or (
            ".remote." in source.module and re.search(r"^def main\(", source.text, re.M)
        ):
            found.add(source.module)
        started = re.search(r"^_STARTED = (\{.*\})", source.text, re.M)
        names = [name for many in ast.literal_eval(started[1]).values() for name in many] if started else []
        names += re.findall(r"\borch_remote\.(\w+)", source.text)
        found |= {f"orchestrator.remote.{name}" for name in names}
    return found


def single_use(product: list[Source], modules: set[str]) -> Row:
    importers = Counter(module for source in product for module in imported(source, modules) - {source.module})
    started = programs(product)
    single = [source for source in product if importers[source.module] == 1]
    short = [source for source in single if source.lines < SHORT_LINES and source.module not in started]
    worst = [f"{source.module} ({source.lines})" for source in sorted(short, key=lambda source: source.lines)]
    title = f"modules with one importer / below {SHORT_LINES} lines and no program"
    return Row(title, f"{len(single)} / {len(short)}", tuple(worst))


def repeated_names(product: list[Source]) -> Row:
    count = Counter(source.path.name for source in product if source.path.name not in SHARED_NAMES)
    several = [f"{name} x{number}" for name, number in count.most_common() if number > 1]
    return Row("file names that occur more than once", str(len(several)), (", ".join(several),))


def walk(root: Path, name: str) -> Row:
    return walked(root, WALKS[name], [name])


def job_walks(root: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "local.yaml").write_text(NODES.format(folder=folder))
        for name, line in JOB.items():
            yield walked(root, f"orch {name} of a job on two nodes", ["orch", *line.split()], folder)


def walked(root: Path, what: str, words: list[str], folder: str | None = None) -> Row:
    command = [sys.executable, str(ROOT / "tests/support/walk.py"), str(root), *words]
    title = f"modules entered / moves: {what}"
    home = {**os.environ, "ORCH_HOME": f"{folder}/home"} if folder else None
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=home)
    if done.returncode:
        return Row(title, "-", (done.stderr.strip().rpartition("\n")[2],))
    order = [module for module, _ in json.loads(done.stdout)]
    moves = sum(one != other for one, other in pairwise(order))
    count = Counter(order)
    single = sum(number == 1 for number in count.values())
    return Row(title, f"{len(count)} / {moves}", (f"{len(order)} functions, {single} modules with one of them",))


# ---- words ----------------------------------------------------------------------------------------------------------


def code_lines(source: Source, docstrings: list[Text]) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    docs = {doc.line + number for doc in docstrings for number in range(doc.words.count("\n") + 1)}
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and number not in docs for number, line in lines)


def docstring_rows(product: list[Source]) -> Iterator[Row]:
    words, code, sentences = Counter[str](), Counter[str](), Counter[str]()
    hit = {pattern.name: Counter[str]() for pattern in PATTERNS} | {"any": Counter[str]()}
    for source in product:
        docs = [text for text in python_texts(source.text) if text.kind == DOCSTRING]
        code[source.package] += code_lines(source, docs)
        for doc in docs:
            words[source.package] += len(doc.words.split())
            for number, sentence in enumerate(re.split(r"(?<=[.!?])\s+|\n\s*\n", doc.words.strip())):
                sentences[source.package] += 1
                names = {h.pattern.name for h in hits(Text(1, DOCSTRING, sentence))} - (
                    {"the same"} if number else set()
                )
                for name in names | ({"any"} if names else set()):
                    hit[name][source.package] += 1
    packages = sorted(code, key=lambda package: -words[package] / max(1, code[package]))
    per_100 = {package: 100 * words[package] / max(1, code[package]) for package in packages}
    for top in ("orchestrator", "trainer"):
        inside = [package for package in packages if package.split(".")[0] == top]
        total = 100 * sum(words[package] for package in inside) / sum(code[package] for package in inside)
        worst = tuple(f"{package} {per_100[package]:.0f}" for package in inside if code[package] > 50)
        yield Row(f"docstring words per 100 code lines, {top}", f"{total:.0f}", worst)
    for name, count in hit.items():
        shares = {package: 100 * count[package] / sentences[package] for package in packages if sentences[package] > 20}
        worst = sorted(shares, key=lambda package: -shares[package])
        total = 100 * sum(count.values()) / sum(sentences.values())
        yield Row(
            f'docstring sentences with "{name}", %',
            f"{total:.1f}",
            tuple(f"{package} {shares[package]:.0f}" for package in worst),
        )


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_rows(tests: list[Source], modules: set[str]) -> Iterator[Row]:
    functions = asserts = deep_lines = 0
    private: Counter[str] = Counter()
    deep: Counter[str] = Counter()
    for source in tests:
        ours = {}
        for node in source.nodes:
            asserts += isinstance(node, ast.Assert)
            functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if isinstance(node, ast.Import | ast.ImportFrom):
                ours.update(names_of_ours(node))
                inner = {base for base, _ in named(source, node) if base in modules and base.count(".") > 1}
                deep_lines += bool(inner)
                deep.update(inner)
        private[source.module] += sum(is_private_use(node, ours) for node in source.nodes)
    users = [f"{module} x{count}" for module, count in private.most_common() if count]
    yield Row("test functions / asserts", f"{functions:,} / {asserts:,}")
    yield Row("uses of private names in tests / files that do", f"{private.total()} / {len(users)}", tuple(users))
    worst = tuple(f"{module} x{count}" for module, count in deep.most_common())
    yield Row(
        "import lines in tests of a module inside a package / such modules", f"{deep_lines:,} / {len(deep)}", worst
    )


def names_of_ours(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The name in the file -> what it is imported as, of orchestrator and trainer."""
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    found = {alias.asname or alias.name.partition(".")[0]: base + alias.name for alias in node.names}
    return {name: path for name, path in found.items() if path.split(".")[0] in ("orchestrator", "trainer")}


def is_private_use(node: ast.AST, ours: dict[str, str]) -> bool:
    """`from orchestrator... import _x`, `module._x`, or `setattr(module, "_x", ...)` of a module or class of ours."""
    if isinstance(node, ast.ImportFrom):
        return any(is_private(path.rpartition(".")[2]) for path in names_of_ours(node).values())
    if isinstance(node, ast.Attribute):
        return is_private(node.attr) and root_name(node.value) in ours
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and len(node.args) > 1:
        name = getattr(node.args[1], "value", None)
        return root_name(node.args[0]) in ours and isinstance(name, str) and is_private(name)
    return False


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# ---- the table ------------------------------------------------------------------------------------------------------


def measured_at(revision: str, runs_job: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return measure(Path(folder).resolve(), runs_job)


def show(columns: dict[str, list[Row]]) -> None:
    names = {row.name: None for rows in columns.values() for row in rows}
    values = {title: {row.name: row for row in rows} for title, rows in columns.items()}
    width = max(map(len, names))
    print(f"{'':{width}}  " + "  ".join(f"{title[:16]:>16}" for title in columns))
    for name in names:
        print(f"{name:{width}}  " + "  ".join(f"{values[title][name].value:>16}" for title in columns))
    print("\nthe worst here")
    for row in values["here"].values():
        if row.worst:
            print(f"  {row.name}: {', '.join(row.worst[:WORST])}")
    print(f"\n{NOTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--at", action="append", default=[], metavar="REVISION", help="measure this one too; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print a document")
    parser.add_argument("--job", action="store_true", help="run a job on this machine, for the walks of its commands")
    asked = parser.parse_args()
    columns = {revision: measured_at(revision, asked.job) for revision in asked.at}
    columns["here"] = measure(ROOT, asked.job)
    if asked.json:
        document: dict[str, Any] = {
            title: {row.name: {"value": row.value, "worst": row.worst} for row in rows}
            for title, rows in columns.items()
        }
        print(json.dumps(document, indent=2))
    else:
        show(columns)


if __name__ == "__main__":
    main()
