"""`data=text`: samples of bytes, a GPT's losses by every strategy, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.trainer_ranks import of_event, started, trained
from trainer.checkpoints import read_file, write_file
from trainer.compute.models import build_model, stages_of
from trainer.data import RankBatches, SampleStream, TextBatches, read_text
from trainer.shared import SettingsError, TrainError, parse_settings
from trainer.strategies import cross_entropy_sum

PYTHONS_OWN = Path(torch.__file__).parent / "optim"
"""Text that lies on every machine with torch."""
SHORT = [
    "--exp",
    "gpt_text",
    "--model",
    "gpt_tiny",
    "--tokens",
    "32",
    "--device",
    "cpu",
    "--data_dir",
    str(PYTHONS_OWN),
]
SHORT += ["--samples", "48", "--batch", "8", "--lr", "0.003", "--checkpoint_every", "6"]  # 6 updates
WAYS = {
    "ddp": (["--strategy", "ddp"], 2),
    "unequal": (["--strategy", "allreduce", "--shares", "node0=5,node1=3"], 2),
    "pipeline": (["--strategy", "pipeline", "--accumulate", "8"], 2),
    "1f1b": (["--strategy", "pipeline", "--accumulate", "4", "--schedule", "1f1b"], 3),
}


def ran(folder: Path, arguments: list[str], ranks: int) -> list[list[dict[str, Any]]]:
    folder.mkdir()
    return trained(folder, [*SHORT, *arguments, "--checkpoint_dir", str(folder)], ranks)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved, _, _ = read_file(folder / "step-000000006.pt")
    return saved.model


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("text") / "alone"
    return folder, ran(folder, ["--strategy", "none"], 1)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_gpt_has_the_losses_and_weights_of_one_process(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], way: str
) -> None:
    arguments, ranks = WAYS[way]
    records = ran(tmp_path / way, arguments, ranks)
    folder, whole = alone
    for name, weight in weights(folder).items():
        torch.testing.assert_close(weights(tmp_path / way)[name], weight, rtol=0, atol=2e-5)
    (evaluated,), (same,) = of_event(whole, "eval"), of_event(records[0], "eval")
    assert same["samples"] == evaluated["samples"]
    assert same["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)


def test_a_pipelines_weights_are_one_processs_to_the_last_bit(tmp_path: Path) -> None:
    """With the same micro-batches, of one sample each."""
    ranks = ran(tmp_path / "cut", ["--strategy", "pipeline", "--accumulate", "8"], 2)
    assert [row[0] for row in of_event(ranks[1], "tasks")[0]["tasks"]].count("forward") == 8
    ran(tmp_path / "whole", ["--strategy", "none", "--accumulate", "8"], 1)
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(cut[name], whole[name]) for name in whole) and cut.keys() == whole.keys()


def test_a_checkpoint_of_a_version_without_tokens_is_gone_on_from(tmp_path: Path) -> None:
    """A setting that came later has its default in an older run."""
    short = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--samples", "32", "--batch", "16"]
    short += ["--augment", "none", "--eval_every", "0", "--checkpoint_every", "2", "--checkpoint_dir", str(tmp_path)]
    trained(tmp_path, [*short, "--epochs", "1"])
    path = tmp_path / "step-000000002.pt"
    saved = read_file(path)[0]
    saved.settings.pop("tokens")
    write_file(path, saved)
    trained(tmp_path, [*short, "--epochs", "2", "--resume", str(path)])
    assert (tmp_path / "step-000000004.pt").exists()


def test_it_learns(alone: tuple[Path, list[dict[str, Any]]]) -> None:
    losses = [step["loss"] / step["samples"] for step in of_event(alone[1], "step")]
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)  # nats per byte, before anything is learned
    assert losses[-1] < losses[0] - 0.3


def test_labels_are_the_next_bytes_and_every_sample_comes_once(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second " * 40)
    (tmp_path / "a.py").write_text("first\n" * 40)
    (tmp_path / ".hidden").write_text("hidden" * 40)
    (tmp_path / "picture").write_bytes(bytes(range(256)))
    text = read_text(tmp_path, 8)
    whole = bytes(text.train.tolist()) + bytes(text.test.tolist())
    assert whole.startswith(b"first\nfirst") and b"second" in whole and b"hidden" not in whole and b"\x00" not in whole
    stream = SampleStream(size=(len(text.train) - 1) // 8, batch=4, shares=(4,), seed=0)
    found = []
    for inputs, labels in TextBatches(text.train, 8, RankBatches(stream, rank=0)):
        assert inputs.shape == (len(labels), 1, 1, 8)
        assert torch.equal(inputs[:, 0, 0, 1:].long(), labels[:, :-1])
        found += [bytes(row) for row in inputs.flatten(1).tolist()]
    assert sorted(found) == sorted(bytes(text.train[at * 8 : at * 8 + 8].tolist()) for at in range(stream.size))


def test_too_little_text_and_no_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("little")
    with pytest.raises(TrainError, match=r"holds 6 bytes of text, too few .* --data_dir"):
        read_text(tmp_path, 8)
    with pytest.raises(TrainError, match=r"nowhere cannot be read .*DATA_DIR"):
        read_text(tmp_path / "nowhere", 8)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(TrainError, match=r"holds 0 bytes of text, too few"):
        read_text(tmp_path, 4)


def test_text_in_another_encoding_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 400)
    (tmp_path / "b.txt").write_bytes("größe ".encode("latin-1") * 40)
    (tmp_path / "c.txt").write_bytes("text ".encode("utf-16") * 40)
    (tmp_path / "picture").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    assert read_text(tmp_path, 8).left_out == ("b.txt", "c.txt")
    words = ["--exp", "gpt_text", "--model", "gpt_tiny", "--tokens", "8", "--device", "cpu", "--batch", "8"]
    (tmp_path / "records").mkdir()
    with started(tmp_path / "records", [*words, "--steps", "1", "--data_dir", str(tmp_path)], 2) as ranks:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [line for words in said for line in words.splitlines() if line.startswith("warning")] == [
        "warning: b.txt, c.txt: not UTF-8, so not read; convert to UTF-8 (iconv) to train on it"
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:  # root, who runs the tests, may read every file
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("text " * 40)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(TrainError, match=r"a\.txt cannot be read \(Permission denied\): .*DATA_DIR"):
        read_text(tmp_path, 8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_tokens_is_torch_s_own_over_the_second_dimension(smoothing: float) -> None:
    logits, labels = torch.randn(3, 5, 7, 11), torch.randint(7, (3, 5, 11))
    tokens, images = logits[:, 0], logits[:, :, 0, 0]
    for outputs, of in ((tokens, labels[:, 0]), (images, labels[:, 0, 0] % 5)):
        wanted = cross_entropy(outputs, of, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(cross_entropy_sum(outputs, of, smoothing), wanted)


@pytest.mark.parametrize(
    ("exp", "changes", "message"),
    [
        ("gpt_text", {"model": "lenet"}, "model: lenet takes images, not text; use gpt_tiny, gpt_small, gpt2_small"),
        ("gpt_text", {"data": "mnist"}, "model: gpt_small takes text, not the images of mnist; use exp=gpt_text"),
        ("gpt_text", {"data": "folder"}, "data: folder holds images; use text or synthetic"),
        ("gpt_text", {"augment": "affine"}, "augment: varies images, not text; use none"),
        ("gpt_text", {"strategy": "tensor", "clip_norm": "0"}, "strategy: tensor cuts convolutions"),
        ("mnist_lenet", {"model": "gpt_tiny"}, "model: gpt_tiny takes text, not the images of mnist"),
        ("mnist_lenet", {"tokens": "64"}, "tokens: does nothing with data mnist; use exp=gpt_text"),
        ("gpt_text", {"loader": "workers"}, "loader: text is kept on the device"),
    ],
)
def test_settings_that_do_not_go_with_text_are_refused(exp: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings(exp, changes)
    assert message in "\n".join(refused.value.mistakes)


def test_a_gpt_is_a_chain_of_blocks_that_looks_back_only() -> None:
    torch.manual_seed(0)
    network = build_model("gpt_tiny", (1, 1, 16), 256)
    assert len(stages_of(network)) == 2 + 2
    tokens = torch.randint(256, (2, 1, 1, 16))
    later = tokens.clone()
    later[..., 10:] = 0
    with torch.no_grad():
        logits, others = network(tokens), network(later)
    assert logits.shape == (2, 256, 16)
    torch.testing.assert_close(logits[:, :, :10], others[:, :, :10])
    assert not torch.allclose(logits[:, :, 10:], others[:, :, 10:])
    assert cross_entropy(logits, tokens[:, 0, 0]).item() == pytest.approx(math.log(256), rel=0.05)


def test_a_paced_gpt_that_learns_has_the_losses_of_one_that_is_not_paced(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]]
) -> None:
    pace = {"ORCH_PACED": '{"samples_per_s": 200, "like": "gpt_text"}'}
    (tmp_path / "paced").mkdir()
    arguments = [*SHORT[:-2], "--strategy", "ddp"]  # no checkpoints
    records = trained(tmp_path / "paced", arguments, 2, of_ranks=[pace, pace])
    (evaluated,), (same,) = of_event(alone[1], "eval"), of_event(records[0], "eval")
    assert same["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)


def test_paced_ranks_keep_time_for_a_gpt(tmp_path: Path) -> None:
    pace = {"ORCH_PACED": '{"samples_per_s": 400, "fixed_ms": 1}'}
    for strategy in (["--strategy", "ddp"], ["--strategy", "pipeline", "--accumulate", "4"]):
        folder = tmp_path / strategy[1]
        folder.mkdir()
        records = trained(
            folder, ["--exp", "gpt_text", "--model", "gpt_tiny", *strategy, "--steps", "3"], 2, of_ranks=[pace, pace]
        )
        assert [len(of_event(rank, "step")) for rank in records] == [3, 3]
    more = ["--profile_s", "1", "--tokens", "16"]
    (alone,) = trained(tmp_path, ["--exp", "gpt_text", "--model", "gpt_tiny", *more], of_ranks=[pace])
    assert of_event(alone, "profile")
