"""Completion in bash, which splits `--set strategy=dd` at `=` and `:` (COMP_WORDBREAKS)."""

from __future__ import annotations

import os
from itertools import pairwise

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

_BREAKS = ("=", ":")


class WholeWords(BashComplete):
    """Joins the parts again, and offers only the text after the last break."""

    _before = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        typed, at = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        parts = [*typed, ""][: at + 1]
        words = parts[:1]
        for before, part in pairwise(parts):
            if part in _BREAKS or before in _BREAKS:
                words[-1] += part
            else:
                words.append(part)
        self._before = words[-1][: len(words[-1]) - len(parts[-1].lstrip("=:"))] if words[-1] != parts[-1] else ""
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{str(item.value).removeprefix(self._before)}"


def install() -> None:
    add_completion_class(WholeWords)
