"""`data=text`: all text files below DATA_DIR, cut into samples of `tokens` tokens; labels are the next tokens.

    text = read_text(folder, tokens=256, vocabulary=0)
    len(text.train), samples_in(len(text.train), tokens=256)        tokens; samples

A token is a byte, or one of a byte-pair vocabulary trained on the training part.

The last tenth of all bytes is for tests. Files are read in the order of their names; files that are not UTF-8 are left
out, as are hidden ones.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from trainer.data.bpe import tensor_of, vocabulary_of
from trainer.data.sample_stream import RankBatches, derive_seed
from trainer.shared.errors import TrainError

TEST_PART = 0.1
MOST_BYTES = 2 << 30
BLOCK_BYTES = 1 << 20
MADE, WORDS = 8192, 256
"""Samples and different words of synthetic text."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """train, test: uint8, or int32 with a vocabulary. digest: of all bytes, and the vocabulary's after a blank."""

    train: Tensor
    test: Tensor
    digest: str
    bytes_per_token: float = 1.0
    """Mean over the labels of all test samples."""
    left_out: tuple[str, ...] = ()
    """Files that seem to be text, but not in UTF-8."""


@lru_cache(maxsize=1)
def read_text(folder: Path, tokens: int, vocabulary: int = 0) -> Text:
    """Raises TrainError without text for a sample of each, for unreadable files, and for more than memory holds."""
    content, left_out = _read(folder)
    text = _cut(content, hashlib.sha256(content).hexdigest()[:16], tokens, vocabulary, folder)
    if min(samples_in(len(text.train), tokens), samples_in(len(text.test), tokens)) < 1:
        raise TrainError(
            f"{folder} holds {len(content):,} bytes of text, too few for a training and a test sample of {tokens} "
            "tokens: name a folder with text files by --data_dir (--set data_dir=...)"
        )
    return replace(text, left_out=left_out)


def _cut(content: bytearray, digest: str, tokens: int, vocabulary: int, folder: Path | None) -> Text:
    """folder: keeps a vocabulary. Raises TrainError."""
    test_at = len(content) - round(TEST_PART * len(content))
    train, test = memoryview(content)[:test_at], memoryview(content)[test_at:]
    if not vocabulary:
        return Text(tensor_of(train, torch.uint8), tensor_of(test, torch.uint8), digest)
    pairs = vocabulary_of(train, vocabulary, folder)
    numbers = pairs.encode(test)
    labels = numbers[1 : 1 + tokens * samples_in(len(numbers), tokens)]
    bytes_per_token = pairs.bytes_of(labels) / max(1, len(labels))
    return Text(pairs.encode(train), numbers, f"{digest} {pairs.digest}", bytes_per_token)


@lru_cache(maxsize=1)
def made_text(tokens: int, seed: int, vocabulary: int = 0) -> Text:
    """MADE samples of words in random order: learnable."""
    generator = torch.Generator().manual_seed(derive_seed("words", seed))
    letters = torch.randint(97, 123, (WORDS, 6), generator=generator, dtype=torch.uint8)
    words = torch.cat([letters, torch.full((WORDS, 1), 32, dtype=torch.uint8)], dim=1)
    chosen = torch.randint(0, WORDS, (MADE * tokens // 7 + 2,), generator=generator)
    content = bytearray(words[chosen].flatten().numpy().tobytes())
    return _cut(content, f"synthetic-{seed}", tokens, vocabulary, None)


def samples_in(length: int, tokens: int) -> int:
    """Each needs the token behind its last."""
    return max(0, (length - 1) // tokens)


def _read(folder: Path) -> tuple[bytearray, tuple[str, ...]]:
    """All text, with a line's end between two files; and the names of files in another encoding."""
    texts: list[bytes] = []
    left_out: list[str] = []
    try:
        files = [*_files(folder)]
        whole = sum(path.stat().st_size for path in files)
        if whole > MOST_BYTES:
            raise TrainError(
                f"the files below {folder} have {whole / 2**30:.1f} GiB, and every rank reads them: at most "
                f"{MOST_BYTES / 2**30:.0f} GiB; name a folder that holds only the text, by --data_dir "
                "(--set data_dir=...)"
            )
        for path in files:
            content = path.read_bytes()
            if _is_text(content):
                texts.append(content)
            elif content.startswith(_UTF16) or (content and b"\0" not in content):
                left_out.append(str(path.relative_to(folder)))
        return bytearray(b"\n").join(texts), tuple(left_out)
    except OSError as error:
        raise TrainError(
            f"{error.filename or folder} cannot be read ({error.strerror}): text is read from all files below "
            "DATA_DIR; give it with --data_dir (--set data_dir=...), or copy it to the hosts with `orch data push DIR`"
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    """Regular files, no links. Raises OSError for a folder that cannot be read."""

    def failed(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file() and not path.is_symlink():
                yield path


def _is_text(content: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(content), BLOCK_BYTES):
            decoder.decode(content[begin : begin + BLOCK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content


class TextBatches:
    def __init__(self, text: Tensor, tokens: int, order: RankBatches) -> None:
        """text: token numbers, on the device that trains."""
        self.text, self.order = text, order
        self.within = torch.arange(tokens, device=text.device)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.order.indices():
            yield self.samples(indices)

    def samples(self, indices: list[int]) -> Batch:
        """Numbers of the text's type (samples, 1, 1, tokens), int64 (samples, tokens)."""
        begins = torch.tensor(indices, dtype=torch.long, device=self.text.device) * len(self.within)
        places = begins.unsqueeze(1) + self.within
        return self.text[places][:, None, None], self.text[places + 1].long()
