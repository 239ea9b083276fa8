"""`data=text`: bytes of all text files below DATA_DIR, cut into samples of `tokens` bytes; labels are the next bytes.

    text = read_text(folder, tokens=256)
    len(text.train), samples_in(len(text.train), tokens=256)        bytes; samples

The last tenth of all bytes is for tests. Files are read in the order of their names; files that are not UTF-8 are left
out, as are hidden ones.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from trainer.data.sample_stream import RankBatches, derive_seed
from trainer.shared.errors import TrainError

TEST_PART = 0.1
MOST_BYTES = 2 << 30
BLOCK_BYTES = 1 << 20
MADE, WORDS = 8192, 256
"""Samples and different words of synthetic text."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """train, test: uint8. digest: of all bytes."""

    train: Tensor
    test: Tensor
    digest: str


@lru_cache(maxsize=1)
def read_text(folder: Path, tokens: int) -> Text:
    """Raises TrainError without text for a sample of each, and for more than memory holds."""
    files = [*_files(folder)]
    whole = sum(path.stat().st_size for path in files)
    if whole > MOST_BYTES:
        raise TrainError(
            f"the files below {folder} have {whole / 2**30:.1f} GiB, and every rank reads them: at most "
            f"{MOST_BYTES / 2**30:.0f} GiB; name a folder that holds only the text, by --data_dir (--set data_dir=...)"
        )
    content = b"\n".join(content for path in files if _is_text(content := path.read_bytes()))
    test_at = _test_at(len(content))
    train, test = content[:test_at], content[test_at:]
    if min(samples_in(len(train), tokens), samples_in(len(test), tokens)) < 1:
        raise TrainError(
            f"{folder} holds {len(content):,} bytes of text, too few for a training and a test sample of {tokens} "
            "tokens: name a folder with text files by --data_dir (--set data_dir=...)"
        )
    return Text(_numbers(train), _numbers(test), hashlib.sha256(content).hexdigest()[:16])


def _numbers(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@lru_cache(maxsize=1)
def made_text(tokens: int, seed: int) -> Text:
    """MADE samples of words in random order: learnable."""
    generator = torch.Generator().manual_seed(derive_seed("words", seed))
    letters = torch.randint(97, 123, (WORDS, 6), generator=generator, dtype=torch.uint8)
    words = torch.cat([letters, torch.full((WORDS, 1), 32, dtype=torch.uint8)], dim=1)
    chosen = torch.randint(0, WORDS, (MADE * tokens // 7 + 2,), generator=generator)
    text = words[chosen].flatten()
    test_at = _test_at(len(text))
    return Text(text[:test_at], text[test_at:], f"synthetic-{seed}")


def _test_at(length: int) -> int:
    return length - round(TEST_PART * length)


def samples_in(length: int, tokens: int) -> int:
    """Each needs the byte behind its last."""
    return max(0, (length - 1) // tokens)


def _files(folder: Path) -> Iterator[Path]:
    """Regular files, no links. Raises TrainError for a folder that cannot be read."""

    def failed(error: OSError) -> None:
        raise TrainError(
            f"{error.filename or folder} cannot be read ({error.strerror}): text is read from all files below "
            "DATA_DIR; give it with --data_dir (--set data_dir=...)"
        ) from error

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
        """text: uint8, on the device that trains."""
        self.text, self.order = text, order
        self.within = torch.arange(tokens, device=text.device)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.order.indices():
            yield self.samples(indices)

    def samples(self, indices: list[int]) -> Batch:
        """uint8 (samples, 1, 1, tokens), int64 (samples, tokens)."""
        begins = torch.tensor(indices, dtype=torch.long, device=self.text.device) * len(self.within)
        places = begins.unsqueeze(1) + self.within
        return self.text[places][:, None, None], self.text[places + 1].long()
