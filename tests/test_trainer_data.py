"""Models and data: the right sizes, real file formats, and one clear line where data are absent."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torchvision.datasets import CIFAR10

from trainer import data
from trainer.config import Settings, parse_settings
from trainer.errors import TrainError
from trainer.models import build_model, gradient_bytes, has_batch_norm, trainable
from trainer.stream import RankBatches, SampleStream

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request goes to a port of this machine where nothing listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def settings_for(exp: str, folder: Path, **pairs: str) -> Settings:
    return parse_settings(exp, {"data_dir": str(folder), "num_workers": "0", **pairs})


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("lenet", (1, 28, 28), 61_706),
        ("lenet", (1, 32, 32), 61_706),
        ("lenet", (3, 32, 32), 62_006),
        ("resnet152", (3, 32, 32), 58_164_298),
    ],
)
def test_models_have_their_known_number_of_parameters(name: str, shape: Any, parameters: int) -> None:
    model = build_model(name, shape, 10)
    assert sum(parameter.numel() for parameter in trainable(model)) == parameters
    assert gradient_bytes(model) == 4 * parameters
    assert has_batch_norm(model) == (name == "resnet152")
    if name == "lenet":
        assert model(torch.zeros((2, *shape))).shape == (2, 10)


def test_synthetic_data_follow_from_seed_and_index_alone(tmp_path: Path) -> None:
    settings = settings_for("mnist_lenet", tmp_path, data="synthetic")
    data.prepare(settings)
    train, test = data.open_data(settings)
    again, _ = data.open_data(settings)
    image, label = train[0, 7]
    assert (tuple(image.shape), label) == ((1, 28, 28), 7)
    assert torch.equal(image, again[3, 7][0])
    assert not torch.equal(image, train[0, 17][0])
    assert not torch.equal(image, test[7][0])
    other, _ = data.open_data(settings_for("mnist_lenet", tmp_path, data="synthetic", seed="1"))
    assert not torch.equal(image, other[0, 7][0])
    assert len(test) == 10_000
    assert not list(tmp_path.iterdir())


def make_cifar_archive(folder: Path, monkeypatch: pytest.MonkeyPatch, samples: int = 4) -> None:
    """The real archive's format with few random images; torchvision is told their md5."""
    generator = torch.Generator().manual_seed(0)
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    files = {"batches.meta": pickle.dumps({"label_names": [str(n) for n in range(10)]})}
    for name in names:
        pixels = torch.randint(0, 256, (samples, 3072), generator=generator, dtype=torch.uint8).numpy()
        files[name] = pickle.dumps({"data": pixels, "labels": [n % 10 for n in range(samples)]})
    with tarfile.open(folder / CIFAR10.filename, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((folder / CIFAR10.filename).read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})


def test_cifar_is_unpacked_from_its_archive_and_augmented_by_seed_epoch_and_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    settings = settings_for("resnet152_cifar", tmp_path)
    data.prepare(settings)
    train, test = data.open_data(settings)
    assert (len(train.samples), len(test)) == (20, 4)
    image, label = train[0, 5]
    assert (tuple(image.shape), label) == ((3, 32, 32), 1)
    torch.rand(1)  # whatever else draws from the generator
    assert torch.equal(image, train[0, 5][0])
    assert any(not torch.equal(image, train[epoch, 5][0]) for epoch in range(1, 4))
    assert torch.equal(test[0][0], test[0][0])


def test_a_damaged_cifar_archive_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    archive = tmp_path / CIFAR10.filename
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(TrainError, match=f"no cifar10 data in {tmp_path}"):
        data.prepare(settings_for("resnet152_cifar", tmp_path))
    assert not (tmp_path / CIFAR10.base_folder).exists()


def test_loading_processes_change_nothing_about_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    stream = SampleStream(size=20, batch=8, shares=(8,), seed=0)
    batches_of = {}
    for workers in ("0", "2"):
        settings = settings_for("resnet152_cifar", tmp_path, num_workers=workers)
        data.prepare(settings)
        loader = data.train_loader(data.open_data(settings)[0], RankBatches(stream, 0), settings, CPU)
        epochs = []
        for epoch in range(2):
            loader.batch_sampler.epoch = epoch
            epochs += list(loader)
        batches_of[workers] = epochs
    assert [len(labels) for _, labels in batches_of["0"]] == [8, 8, 4] * 2
    for (images, labels), (others, other_labels) in zip(batches_of["0"], batches_of["2"], strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_a_rank_without_samples_gets_an_empty_batch(tmp_path: Path) -> None:
    settings = settings_for("mnist_lenet", tmp_path, data="synthetic")
    stream = SampleStream(size=4, batch=2, shares=(2, 0), seed=0)
    loader = data.train_loader(data.open_data(settings)[0], RankBatches(stream, 1), settings, CPU)
    assert [(tuple(images.shape), len(labels)) for images, labels in loader] == [((0, 1, 28, 28), 0)] * 2


def make_mnist_archives(raw: Path, monkeypatch: pytest.MonkeyPatch, samples: int = 3) -> None:
    """The real files' format with few images, packed."""
    raw.mkdir(parents=True)
    images = struct.pack(">4i", 2051, samples, 28, 28) + bytes(range(196)) * 4 * samples
    labels = struct.pack(">2i", 2049, samples) + bytes(range(samples))
    files = {name: images if "images" in name else labels for name in data._MNIST_MD5}
    for name, content in files.items():
        (raw / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(data, "_MNIST_MD5", {name: hashlib.md5(files[name]).hexdigest() for name in files})


def test_mnist_is_unpacked_from_archives_packed_by_anyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mnist_archives(tmp_path / "MNIST" / "raw", monkeypatch)
    settings = settings_for("mnist_lenet", tmp_path)
    data.prepare(settings)
    train, test = data.open_data(settings)
    assert (len(train.samples), len(test)) == (3, 3)
    assert train[0, 2][1] == 2
    assert not list((tmp_path / "MNIST" / "raw").glob(".*"))


def test_archives_that_are_not_mnist_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(TrainError, match=r"t10k-labels-idx1-ubyte\.gz is damaged, or is not MNIST"):
        data.prepare(settings_for("mnist_lenet", tmp_path))


def test_a_truncated_archive_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    archive = raw / "train-images-idx3-ubyte.gz"
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(TrainError, match="cannot get mnist into") as caught:
        data.prepare(settings_for("mnist_lenet", tmp_path))
    assert "\n" not in str(caught.value)


def test_unpacked_files_that_do_not_load_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    settings = settings_for("mnist_lenet", tmp_path)
    data.prepare(settings)
    (raw / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(TrainError, match="delete them there and start again"):
        data.open_data(settings)


@pytest.mark.parametrize("exp", ["mnist_lenet", "resnet152_cifar"])
def test_absent_data_are_one_line_with_the_folder_and_the_way_out(exp: str, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(TrainError) as caught:
        data.prepare(settings_for(exp, folder))
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(folder), "--data_dir", "--set data_dir=", "data=synthetic"):
        assert part in message
    assert not folder.exists()


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.folder(parse_settings("mnist_lenet", {})) == tmp_path / "data"


def test_archives_that_cannot_be_unpacked_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    (raw / f".train-images-idx3-ubyte.{os.getpid()}").mkdir()  # in the way of the file, for root as well
    with pytest.raises(TrainError, match="a folder that this user may write"):
        data.prepare(settings_for("mnist_lenet", tmp_path))
