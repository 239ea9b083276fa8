"""A Python for hosts of tests that are not about torch: its own (`quick/`) takes no time, the real one takes seconds.

It is a virtual environment made by hand, for `python:` of an inventory. Hosts of a lab have to be shown its folder:

    with lab(INVENTORY.format(python=quick_python(folder)), binds=[str(folder)]) as hosts: ...
"""

from __future__ import annotations

import compileall
import importlib.util
import shutil
import sys
import warnings
from pathlib import Path

from tests.support.warm_python import listen_at

TESTS = Path(__file__).resolve().parent


REAL_TORCH = """import os, sys
if CONDITION:
    sys.path[-1:-1] = PACKAGES
    from warm_client import run_warm
    run_warm(SERVER)
"""
FOR_RANKS = '"RANK" in os.environ'
FOR_JOBS = 'sys.orig_argv[1] != "-c"'


def quick_python(folder: Path, *, trains: bool = False, torchrun: bool = False) -> str:
    """Makes it there. For every user: its path.

    trains: ranks have the real torch, and only who asks what a host has, or starts ranks, has the quick one.
    torchrun: what starts ranks has the real one, too.
    """
    base = Path(sys._base_executable)
    packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    shutil.copytree(TESTS / "quick", packages)
    for program in ("fake_torchrun.py", "warm_client.py"):
        shutil.copy(TESTS / program, packages)
    if trains or torchrun:
        real = [path for path in sys.path if path.endswith("site-packages")]
        text = REAL_TORCH.replace("CONDITION", FOR_JOBS if torchrun else FOR_RANKS).replace("PACKAGES", repr(real))
        listen_at(folder / "warm")
        _run_at_start(packages, "quick_start", text.replace("SERVER", repr(str(folder / "warm"))))
    compileall.compile_dir(packages, quiet=1)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    folder.chmod(0o755)
    return str(folder / "bin" / "python")


AT_START = """import site
before = site.execsitecustomize
def execsitecustomize():
    before()
    exec(TEXT, {"__name__": "__main__"})
site.execsitecustomize = execsitecustomize
"""


def _run_at_start(packages: Path, name: str, text: str) -> None:
    """Has each Python that has these packages run it when it has begun, behind any `sitecustomize`: that would be the
    place for it, but Debian's Python has one of its own, which comes first.
    """
    (packages / f"{name}.py").write_text(AT_START.replace("TEXT", repr(text)))
    (packages / f"{name}.pth").write_text(f"import {name}\n")


PIP_FROM = """import sys
if sys.orig_argv[1:3] == ["-m", "venv"]:
    import shutil, venv
    def copied(self, context):
        version = "python{}.{}".format(*sys.version_info)
        shutil.copytree(PREPARED, context.env_dir + f"/lib/{version}/site-packages", dirs_exist_ok=True)
    venv.EnvBuilder._setup_pip = copied
"""


def with_quick_venv(python: str, folder: Path) -> str:
    """Has this Python's `-m venv` copy the pip that the tests have, which it keeps in `folder`: to install it from
    Python's own wheel takes 5 s of the processor each time. Environments above its own install it as ever, and so do
    all of them where the tests have none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setuptools' finder complains if another test has imported distutils
        pip = importlib.util.find_spec("pip")
    if pip:
        here = Path(str(pip.origin)).parents[1]
        for part in (here / "pip", *here.glob("pip-*.dist-info")):
            shutil.copytree(part, folder / part.name)
        folder.chmod(0o755)
        (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
        _run_at_start(packages, "quick_pip", PIP_FROM.replace("PREPARED", repr(str(folder))))
    return python
