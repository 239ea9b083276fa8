"""Keeps torch's compiler out of a rank, which compiles nothing: to import it takes three quarters as long as torch.

    keep_out()          # before torchvision is imported and an optimiser is made

An optimiser, torchvision and DDP import it for a word or two that do nothing where nothing is compiled. These words
stand in for it. Whoever asks for another one, as fully_shard does, gets the real compiler, and so does everybody from
then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
_UTILS, _RULES = f"{COMPILER}.utils", f"{COMPILER}.trace_rules"


def keep_out() -> None:
    """Changes nothing where the compiler is there already."""
    if COMPILER in sys.modules:
        return
    # The modes and answers that torch has by itself for what is not compiled.
    utils = StandInModule(_UTILS, get_optimize_ddp_mode=lambda: "ddp_optimizer", is_compile_supported=lambda _: False)
    rules = StandInModule(_RULES, clear_lru_cache=_nothing)
    compiler = StandInModule(COMPILER, disable=_as_it_is, graph_break=_nothing, utils=utils, trace_rules=rules)
    sys.modules.update({stand_in.__name__: stand_in for stand_in in (compiler, utils, rules)})


class StandInModule(ModuleType):
    """A module of the compiler: some of its words; every other one leads to the real module."""

    def __init__(self, name: str, **words: Any) -> None:
        super().__init__(name)
        vars(self).update(words)

    def __getattr__(self, word: str) -> Any:
        # Of its special names only the one that the import of a module within it asks for.
        if word.startswith("__") and (word, self.__name__) != ("__path__", COMPILER):
            raise AttributeError(word)
        return getattr(_real(self.__name__), word)


class _ThereAlready:
    """For `import torch._dynamo.NAME`: Python asks the stand-in for its path, which brings the real compiler and most
    often NAME with it, and would then load NAME a second time.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}.") or not (module := sys.modules.get(name)) or not module.__spec__:
            return None
        return ModuleSpec(name, self, loader_state=module.__spec__)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It ran when it came; only its own spec is to be put back, unless the module lets nobody change it, as the
        compiler's settings do.
        """
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
