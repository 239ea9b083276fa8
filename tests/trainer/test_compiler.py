"""Ranks start without torch's compiler; who asks for more than its few stand-in words gets the real one, whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = {
    "__init__": """
import sys
from . import utils, config, strict
more = 'more of it'
sys.runs = getattr(sys, 'runs', 0) + 1
""",
    "utils": "def is_compile_supported(device):\n    return True\nname = 'its own'",
    "config": "import sys\nsys.loads = getattr(sys, 'loads', 0) + 1\nword = 'set'",
    "strict": """
import sys, types
class Strict(types.ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError(name)
sys.modules[__name__].__class__ = Strict
""",
    "late": "from . import config",
}
BEGIN = "import sys\nfrom trainer.compute.compiler import StandInModule, keep_out\nkeep_out()\n"
IS_OUT = "print(isinstance(sys.modules['torch._dynamo'], StandInModule))"


def said(code: str, *packages: Path) -> str:
    """packages: in place of those that are installed."""
    where = f"import sys; sys.path[:0] = {[str(path) for path in (*packages, ROOT)]!r}\n"
    command = [sys.executable, *(["-S"] if packages else []), "-c", where + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torch that holds a compiler and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    compiler = folder / "torch" / "_dynamo"
    compiler.mkdir(parents=True)
    lazily = "def __getattr__(name):\n    from importlib import import_module\n"
    (folder / "torch" / "__init__.py").write_text(f"{lazily}    return import_module(f'torch.{{name}}')\n")
    for name, text in COMPILER.items():
        (compiler / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("asks", "gets"),
    [
        ("import torch._dynamo\nprint(torch._dynamo.disable(len, True, wrapping=False) is len)", "True True"),
        ("import torch._dynamo\nprint(torch._dynamo.disable(recursive=False)(len) is len)", "True True"),
        ("import torch._dynamo\nprint(torch._dynamo.graph_break())", "None True"),
        ("from torch._dynamo.utils import is_compile_supported as asks\nprint(asks('cpu'))", "False True"),
        ("import torch\nprint(hasattr(sys.modules['torch._dynamo'], '__wrapped__'))", "False True"),
        ("import torch\nprint(torch._dynamo.more)", "more of it False"),
        ("from torch._dynamo import more\nprint(more)", "more of it False"),
        ("from torch._dynamo.utils import name\nprint(name)", "its own False"),
        ("import torch._dynamo.config\nprint(torch._dynamo.config.word, sys.loads)", "set 1 False"),
        ("import torch._dynamo.config as c\nprint(c.__spec__.loader.__class__.__name__)", "SourceFileLoader False"),
        ("import torch._dynamo.strict as c\nprint(c.__spec__.loader.__class__.__name__)", "SourceFileLoader False"),
        ("import torch._dynamo.late as c\nprint(c.config.word, sys.loads, sys.runs)", "set 1 1 False"),
    ],
)
def test_a_word_that_does_nothing_needs_no_compiler_and_any_other_gets_it_once(
    asks: str, gets: str, torch: Path
) -> None:
    assert said(f"{BEGIN}{asks}\n{IS_OUT}", torch).split() == gets.split()


def test_a_compiler_that_is_there_stays(torch: Path) -> None:
    assert said(f"import torch._dynamo\n{BEGIN}print(torch._dynamo.more)\n{IS_OUT}", torch) == "more of it\nFalse\n"


def test_a_rank_that_trains_imports_no_compiler_before_it_is_asked_for() -> None:
    pytest.importorskip("torchvision")
    code = f"""
import trainer.train, tempfile, torch, torchvision.models, torch.distributed as dist
from trainer.compute.compiler import StandInModule
store = tempfile.NamedTemporaryFile()
dist.init_process_group("gloo", init_method=f"file://{{store.name}}", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
dist.destroy_process_group()
{IS_OUT}
import torch._dynamo.config  # as fully_shard does
{IS_OUT}
"""
    assert said(f"{code}\nimport os; sys.stdout.flush(); os._exit(0)") == "True\nFalse\n"
