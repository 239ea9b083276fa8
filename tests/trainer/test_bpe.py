"""`vocabulary=N`: byte-pair tokens of the package `tokenizers`, for text that ships with Python."""

from __future__ import annotations

import email
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.forecast import gradient_bytes, layers_in, network_of
from tests.support.trainer_ranks import ROOT, of_event, started, trained
from trainer.checkpoints import read_file
from trainer.compute.models import build_model
from trainer.data import Vocabulary, read_text, samples_in, vocabulary_of
from trainer.shared import SettingsError, TrainError, parse_settings

TEXT = Path(email.__file__).parent
CONTENT = b"\n".join(path.read_bytes() for path in sorted(TEXT.glob("*.py")))
SIZE, TOKENS = 400, 32
TRAINED = vocabulary_of(CONTENT, SIZE, None)
SHORT = ["--exp", "gpt_text", "--model", "gpt_tiny", "--tokens", str(TOKENS), "--vocabulary", str(SIZE)]
SHORT += ["--device", "cpu", "--samples", "48", "--batch", "8", "--lr", "0.003", "--checkpoint_every", "6"]
WAYS = {
    "ddp": (["--strategy", "ddp"], 2),
    "pipeline": (["--strategy", "pipeline", "--accumulate", "4"], 2),
}


def decoded(vocabulary: Vocabulary, numbers: torch.Tensor) -> bytes:
    return b"".join(vocabulary.tokens[number] for number in numbers)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that may be written."""
    return Path(shutil.copytree(TEXT, tmp_path_factory.mktemp("bpe") / "text", ignore=shutil.ignore_patterns("*.pyc")))


def ran(folder: Path, text: Path, arguments: list[str], ranks: int) -> list[list[dict[str, Any]]]:
    folder.mkdir()
    return trained(folder, [*SHORT, "--data_dir", str(text), *arguments, "--checkpoint_dir", str(folder)], ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bpe") / "alone"
    return folder, ran(folder, text, ["--strategy", "none"], 1)[0]


@given(
    st.one_of(st.binary(), st.text().map(str.encode), st.sampled_from([CONTENT[:5000], "ä € 漢字  \n\t x".encode()]))
)
def test_what_was_encoded_is_decoded_to_the_same_bytes(content: bytes) -> None:
    numbers = TRAINED.encode(content)
    assert decoded(TRAINED, numbers) == content and TRAINED.bytes_of(numbers) == len(content)


def test_text_longer_than_a_block_is_decoded_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TRAINED.encode(CONTENT)
    assert len(whole) < 0.6 * len(CONTENT)
    monkeypatch.setattr("trainer.data.bpe._BLOCK_BYTES", 1000)
    monkeypatch.setattr("trainer.data.bpe._MOST_WORDS", 100)
    cut = TRAINED.encode(CONTENT)
    assert decoded(TRAINED, cut) == CONTENT == decoded(TRAINED, whole) and len(cut) > len(whole)


def test_every_process_trains_the_same_vocabulary() -> None:
    program = "from tests.trainer.test_bpe import TRAINED; print(TRAINED.digest)"
    found = [
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert {line.strip() for line in found} == {TRAINED.digest}


def test_a_vocabulary_is_kept_next_to_the_text_and_read_from_there(tmp_path: Path) -> None:
    first = vocabulary_of(CONTENT, SIZE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text())[:5]))  # in place of training it again
    assert first.digest == TRAINED.digest and len(vocabulary_of(CONTENT, SIZE, tmp_path).tokens) == 256 + 5
    assert len(vocabulary_of(CONTENT + b"!", SIZE, tmp_path).tokens) == SIZE  # of other text
    assert len(vocabulary_of(CONTENT, SIZE, tmp_path / "nowhere").tokens) == SIZE


@pytest.mark.parametrize("content", ["", "[[", '[["a"]]', "7", '[["zz", "a"]]', "[[1, 2]]", '[["€", "a"]]', "too many"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    vocabulary_of(CONTENT, 300, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(json.dumps([(chr(a), chr(b)) for a in range(65, 91) for b in range(65, 91)]))
    if content != "too many":
        path.write_text(content)
    assert len(vocabulary_of(CONTENT, 300, tmp_path).tokens) == 300
    assert path.read_text() == whole and [*tmp_path.iterdir()] == [path]


def test_a_missing_or_old_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    with monkeypatch.context() as patched, pytest.raises(TrainError, match=r"which is 0\.19\.1 here: `pip install"):
        patched.setattr(tokenizers, "__version__", "0.19.1")
        read_text(tmp_path, TOKENS, SIZE)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TrainError, match=r"tokenizers>=0\.20, which is not installed here: `pip install 'tokenizers>="):
        read_text(tmp_path, TOKENS, SIZE)


def test_a_network_has_the_vocabulary_s_size_and_so_has_its_forecast() -> None:
    for changes, size in (({}, 256), ({"vocabulary": "8192"}, 8192), ({"model": "gpt2_small"}, 50_257)):
        settings = parse_settings("gpt_text", changes)
        with torch.device("meta"):
            network = build_model(settings.model, settings.data_set.shape, settings.data_set.classes)
        assert network[-1].vocabulary.out_features == network[0].tokens.num_embeddings == size
        held = sum(weight.nbytes for weight in network.parameters())
        assert gradient_bytes(layers_in(network_of(settings))) == held


@pytest.mark.parametrize(
    ("exp", "size", "message"),
    [
        ("gpt_text", 256, "vocabulary: 256 leaves no token but the 256 bytes; use 0, or 8192"),
        ("mnist_lenet", 8192, "vocabulary: does nothing with data mnist; use exp=gpt_text"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(exp: str, size: int, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings(exp, {"vocabulary": str(size)})
    assert message in refused.value.mistakes


def test_the_loss_is_in_bits_of_the_test_s_own_bytes(text: Path, alone: tuple[Path, list[dict[str, Any]]]) -> None:
    (evaluated,) = of_event(alone[1], "eval")
    found = read_text(text, TOKENS, SIZE)
    merges = json.loads(next(text.glob(".orch-bpe-*")).read_text())
    vocabulary = Vocabulary([(left, right) for left, right in merges])
    labels = found.test[1 : 1 + TOKENS * samples_in(len(found.test), TOKENS)]
    told = len(decoded(vocabulary, labels))
    assert evaluated["samples"] == len(labels)
    bits = evaluated["loss"] * len(labels) / math.log(2) / told
    assert evaluated["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    losses = [step["loss"] / step["samples"] for step in of_event(alone[1], "step")]
    assert losses[0] == pytest.approx(math.log(SIZE), rel=0.02) and losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("way", WAYS)
def test_all_strategies_have_the_losses_and_weights_of_one_process(
    tmp_path: Path, text: Path, alone: tuple[Path, list[dict[str, Any]]], way: str
) -> None:
    arguments, ranks = WAYS[way]
    records = ran(tmp_path / way, text, arguments, ranks)
    (one,), (other,) = of_event(alone[1], "eval"), of_event(records[0], "eval")
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5) and other["samples"] == one["samples"]
    assert other["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-5)
    weights: Callable[[Path], dict[str, torch.Tensor]] = lambda at: read_file(at / "step-000000006.pt")[0].model  # noqa: E731
    for name, weight in weights(alone[0]).items():
        torch.testing.assert_close(weights(tmp_path / way)[name], weight, rtol=0, atol=2e-5)


def test_ranks_with_other_vocabularies_end_with_one_clear_line(tmp_path: Path, text: Path) -> None:
    homes = []
    for rank in range(2):
        homes.append(tmp_path / f"{rank}")
        shutil.copytree(text, homes[-1] / "text")
        read_text(homes[-1] / "text", TOKENS, SIZE)
    (kept,) = (homes[1] / "text").glob(".orch-bpe-*")
    kept.write_text(json.dumps(json.loads(kept.read_text())[:-1]))
    of_ranks = [{"HOME": str(home)} for home in homes]
    with started(tmp_path, [*SHORT, "--data_dir", "~/text", "--strategy", "ddp"], 2, of_ranks=of_ranks) as ranks:
        said = [rank.communicate(timeout=60) for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "vocabulary: the tokens differ between node0 and node1, although the text is the same" in said[0][1]
    assert "Traceback" not in said[0][1] + said[1][1]
