"""Byte-pair vocabularies (Sennrich et al. 2016), trained on a run's own text by the package `tokenizers`.

vocabulary = vocabulary_of(b"some text " * 100, size=300, folder=None)
numbers = vocabulary.encode(b"text")                                        int32
b"".join(vocabulary.tokens[number] for number in numbers) == b"text"        for any bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.shared.errors import TrainError
from trainer.shared.experiments import BYTES

Content = bytes | memoryview
Merges = Sequence[tuple[str, str]]
"""Tokens that are joined, in this order. A byte is a character of Latin-1, so that any bytes are text."""
NEEDED = "tokenizers>=0.20"
_WORD = re.compile(rb" ?[A-Za-z\x80-\xff]{1,24}| ?[0-9]{1,24}| ?[^\sA-Za-z0-9\x80-\xff]{1,24}|\s{1,24}(?= )|\s{1,24}")
"""Every byte is in a word, and every token within one. Letters of other alphabets have bytes above 0x7f."""
_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 32
"""The vocabulary is trained on this number of blocks, evenly spread."""
_MOST_WORDS = 1 << 18
"""Different words whose tokens are kept while encoding."""


class Vocabulary:
    def __init__(self, merges: Merges) -> None:
        """Raises ValueError for a merge of unknown tokens, and TrainError without the package."""
        numbers = {chr(byte): byte for byte in range(BYTES)}
        for left, right in merges:
            if left not in numbers or right not in numbers:
                raise ValueError(f"{left!r} or {right!r} is no token")
            numbers.setdefault(left + right, len(numbers))
        self.tokens = [name.encode("latin-1") for name in numbers]
        self.digest = hashlib.sha256(json.dumps(merges).encode()).hexdigest()[:16]
        package = _package()
        self._encoder = package.Tokenizer(package.models.BPE(numbers, merges))

    def encode(self, content: Content) -> Tensor:
        """int32."""
        known: dict[str, list[int]] = {}
        numbers = array("i")
        for words in _words(content):
            new = [*{*words} - known.keys()]
            known.update(zip(new, (found.ids for found in self._encoder.encode_batch(new)), strict=True))
            numbers.extend(chain.from_iterable(map(known.__getitem__, words)))
            if len(known) > _MOST_WORDS:
                known.clear()
        return tensor_of(numbers, torch.int32)

    def bytes_of(self, numbers: Tensor) -> int:
        lengths = torch.tensor([len(token) for token in self.tokens])
        return int((torch.bincount(numbers, minlength=len(lengths)) * lengths).sum())


def tensor_of(content: memoryview | array[int], kind: torch.dtype) -> Tensor:
    """In the same memory."""
    return torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)


def vocabulary_of(content: Content, size: int, folder: Path | None) -> Vocabulary:
    """At most `size` tokens. folder: keeps the merges for the next run, if it is writable. Raises TrainError."""
    name = f".orch-bpe-{size}-{hashlib.sha256(content).hexdigest()[:16]}.json"
    if kept := _kept(folder / name, size) if folder else None:
        return kept
    merges = _trained(content, size)
    if folder:
        _keep(folder / name, merges)
    return Vocabulary(merges)


def _kept(path: Path, size: int) -> Vocabulary | None:
    """None if the file is absent or damaged."""
    try:
        vocabulary = Vocabulary([(left, right) for left, right in json.loads(path.read_bytes())])
    except (OSError, ValueError, TypeError):
        return None
    return vocabulary if len(vocabulary.tokens) <= size else None


def _keep(path: Path, merges: Merges) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # hosts may share the folder
    with contextlib.suppress(OSError):
        try:
            temporary.write_text(json.dumps(merges), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _trained(content: Content, size: int) -> Merges:
    """Depends on nothing but the arguments and the package's version: equal counts are ordered by tokens' numbers."""
    package = _package()
    encoder = package.Tokenizer(package.models.BPE())
    alphabet = [chr(byte) for byte in range(BYTES)]
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    blocks = -(-len(content) // _BLOCK_BYTES)
    encoder.train_from_iterator(_words(content, every=max(1, -(-blocks // _MOST_BLOCKS))), trainer)
    return [(left, right) for left, right in json.loads(encoder.to_str())["model"]["merges"]]


def _words(content: Content, every: int = 1) -> Iterator[list[str]]:
    """A list for each block, or for one in `every` blocks."""
    for begin in range(0, len(content), every * _BLOCK_BYTES):
        yield [word.decode("latin-1") for word in _WORD.findall(content, begin, begin + _BLOCK_BYTES)]


def _package() -> Any:
    """Raises TrainError if it is not installed, or too old."""
    why = "is not installed"
    with contextlib.suppress(ImportError):
        import tokenizers

        if [*map(int, tokenizers.__version__.split(".")[:2])] >= [0, 20]:  # merges may contain blanks since then
            return tokenizers
        why = f"is {tokenizers.__version__}"
    raise TrainError(
        f"vocabulary: needs the package {NEEDED}, which {why} here: `pip install '{NEEDED}'`, or on all hosts `orch "
        "setup -r requirements.txt` with this line in the file; or leave vocabulary out"
    )
