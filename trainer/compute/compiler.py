"""Keeps torch's compiler from being imported, which takes three quarters as long as importing torch; executors of
arithmetic.

An optimiser, torchvision and DDP import it for a few functions that do nothing without compiled code. Stand-ins provide
these; any other name loads the real compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainer.shared.gpu_work import Work

COMPILER = "torch._dynamo"
_UTILS, _RULES = f"{COMPILER}.utils", f"{COMPILER}.trace_rules"


def keep_out() -> None:
    if COMPILER in sys.modules:
        return
    # torch's own values for code that is not compiled.
    utils = StandInModule(_UTILS, get_optimize_ddp_mode=lambda: "ddp_optimizer", is_compile_supported=lambda _: False)
    rules = StandInModule(_RULES, clear_lru_cache=_nothing)
    compiler = StandInModule(COMPILER, disable=_as_it_is, graph_break=_nothing, utils=utils, trace_rules=rules)
    sys.modules.update({stand_in.__name__: stand_in for stand_in in (compiler, utils, rules)})


class StandInModule(ModuleType):
    def __init__(self, name: str, **words: Any) -> None:
        super().__init__(name)
        vars(self).update(words)

    def __getattr__(self, word: str) -> Any:
        # The only special name that the import of a submodule needs.
        if word.startswith("__") and (word, self.__name__) != ("__path__", COMPILER):
            raise AttributeError(word)
        return getattr(_real(self.__name__), word)


class _ThereAlready:
    # `import torch._dynamo.NAME` reads the stand-in's path, which loads the compiler and often NAME. Prevents a second
    # load.

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}.") or not (module := sys.modules.get(name)) or not module.__spec__:
            return None
        return ModuleSpec(name, self, loader_state=module.__spec__)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        # The module has been executed; only its spec is restored. The compiler's settings forbid even that.
        if module.__spec__ and isinstance(module.__spec__.loader, _ThereAlready):
            module.__spec__ = module.__spec__.loader_state


def _real(name: str) -> ModuleType:
    if isinstance(sys.modules.get(COMPILER), StandInModule):
        for known in (COMPILER, _UTILS, _RULES):
            del sys.modules[known]
        sys.meta_path.insert(0, _ThereAlready())
    return import_module(name)


def _nothing(*_: object, **__: object) -> None:
    pass


def _as_it_is(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    return function or _as_it_is


# Runs a strategy's arithmetic, or only takes its time if a rank simulates a GPU. Imports no torch.


class Executor:
    """`standin.StandInExecutor` waits for the predicted time of `work` instead."""

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> Executor:
        return self


ON_DEVICE = Executor()
