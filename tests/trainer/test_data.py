"""Models and data: the right sizes, real file formats, the same samples from both loaders, and one clear line where
data are absent.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms.functional import pil_to_tensor

from trainer.compute.models import build_model, gradient_bytes, has_batch_norm, trainable
from trainer.data import RankBatches, SampleStream, fetch, find_facts, loading, open_data, resident, whole
from trainer.ranks import join, read_rank_info
from trainer.shared import DATA_SETS, DataSet, TrainError, parse_settings
from trainer.shared.settings import Settings

CPU = torch.device("cpu")
ALONE = read_rank_info({})


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request goes to a port of this machine where nothing listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def settings_for(exp: str, folder: Path, **pairs: str) -> Settings:
    return parse_settings(exp, {"data_dir": str(folder), "num_workers": "0", **pairs})


def facts_of(settings: Settings, train: int, test: int) -> DataSet:
    return dataclasses.replace(find_facts(settings)[0], train_samples=train, test_samples=test)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process, which opening the data asks whether all ranks fare well."""
    join(ALONE, "gloo", CPU)
    yield
    torch.distributed.destroy_process_group()


def epochs_of(settings: Settings, facts: DataSet, shares: Sequence[int], rank: int, epochs: int = 2) -> list[Any]:
    """All batches of a rank, and its test batches."""
    order = RankBatches(SampleStream(facts.train_samples, sum(shares), shares, settings.seed), rank)
    batches, test_batches, _ = loading.open_batches(settings, facts, order, ALONE, CPU)
    found = []
    for order.epoch in range(epochs):
        found += list(batches)
    return [*found, *test_batches()]


def assert_same(batches: list[Any], others: list[Any]) -> None:
    assert len(batches) == len(others)
    for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def test_test_data_are_split_as_the_shares_of_now_are():
    facts = dataclasses.replace(DATA_SETS["mnist"], test_samples=1001)
    order = RankBatches(SampleStream(640, 64, (48, 16, 0), seed=0), 0)
    orders = [order, RankBatches(order.stream, 1), RankBatches(order.stream, 2)]
    assert [loading.own_part(facts.test_samples, each) for each in orders] == [
        range(751),
        range(751, 1001),
        range(1001, 1001),
    ]
    for each in orders:
        each.reshare((16, 16, 32))
    assert [len(loading.own_part(facts.test_samples, each)) for each in orders] == [250, 250, 501]


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
    fetch.prepare(settings)
    facts, _ = find_facts(settings)
    train, test = open_data(settings, facts)
    pixels, labels = whole(train, 40)
    assert (pixels.shape, pixels.dtype, len(test)) == ((40, 1, 28, 28), torch.uint8, 10_000)
    assert labels.tolist() == list(range(10)) * 4
    image, label = train[17]
    assert label == 7
    assert torch.equal(pil_to_tensor(image), pixels[17])
    assert not torch.equal(pixels[7], pixels[17])
    assert not torch.equal(pixels[7], pil_to_tensor(test[7][0]))
    other, _ = open_data(settings_for("mnist_lenet", tmp_path, data="synthetic", seed="1"), facts)
    assert not torch.equal(pixels[7], pil_to_tensor(other[7][0]))
    assert not list(tmp_path.iterdir())


def test_synthetic_images_of_imagenets_size_are_made_one_by_one(tmp_path: Path) -> None:
    settings = settings_for("resnet50_imagenet", tmp_path, data="synthetic", samples="12800")
    train, test = open_data(settings, find_facts(settings)[0])
    image, label = train[1003]
    assert (len(train), len(test), label, image.size) == (12_800, 50_000, 3, (224, 224))


def test_synthetic_classes_can_be_distinguished(tmp_path: Path) -> None:
    settings = settings_for("resnet152_cifar", tmp_path, data="synthetic")
    pixels, labels = (part for part in whole(open_data(settings, find_facts(settings)[0])[0], 200))
    means = torch.stack([pixels[labels == label].double().mean(0) for label in range(10)])
    nearest = torch.cdist(pixels.double().flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == labels).double().mean() > 0.95


def make_cifar_archive(folder: Path, monkeypatch: pytest.MonkeyPatch, samples: int = 4) -> None:
    """The real archive's format with few random images; torchvision is given their md5."""
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


def test_cifar_is_unpacked_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    settings = settings_for("resnet152_cifar", tmp_path)
    fetch.prepare(settings)
    train, test = open_data(settings, find_facts(settings)[0])
    assert (len(train), len(test)) == (20, 4)
    pixels, labels = whole(train, 20)
    for index in (0, 5, 19):
        image, label = train[index]
        assert torch.equal(pil_to_tensor(image), pixels[index])
        assert label == labels[index]


def test_a_damaged_cifar_archive_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    archive = tmp_path / CIFAR10.filename
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(TrainError, match=f"no cifar10 data in {tmp_path}"):
        fetch.prepare(settings_for("resnet152_cifar", tmp_path))
    assert not (tmp_path / CIFAR10.base_folder).exists()


@pytest.mark.parametrize("augment", ["none", "affine", "crop_flip"])
def test_both_loaders_and_any_number_of_processes_give_the_same_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None, augment: str
) -> None:
    make_cifar_archive(tmp_path, monkeypatch)
    found = {}
    for loader, processes in (("resident", "0"), ("workers", "0"), ("workers", "2")):
        if processes != "0" and augment != "affine":
            continue
        settings = settings_for("resnet152_cifar", tmp_path, augment=augment, loader=loader, num_workers=processes)
        found[loader, processes] = epochs_of(settings, facts_of(settings, 20, 4), shares=(8,), rank=0)
    batches = found.pop(("resident", "0"))
    assert [len(labels) for _, labels in batches] == [8, 8, 4, 8, 8, 4, 4]
    assert not torch.equal(batches[0][0], batches[3][0])
    for others in found.values():
        assert_same(batches, others)


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_a_sample_looks_the_same_on_whichever_rank_it_lands(tmp_path: Path, alone: None, loader: str) -> None:
    settings = settings_for("mnist_lenet", tmp_path, data="synthetic", loader=loader)
    facts = facts_of(settings, 21, 0)
    (*whole_batches,) = epochs_of(settings, facts, shares=(8,), rank=0)
    parts = [epochs_of(settings, facts, shares=(3, 0, 5), rank=rank) for rank in range(3)]
    assert {tuple(images.shape) for images, _ in parts[1]} == {(0, 1, 28, 28)}
    together = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*parts, strict=True)]
    assert_same(whole_batches, together)


def make_mnist_archives(raw: Path, monkeypatch: pytest.MonkeyPatch, samples: int = 3) -> None:
    """The real files' format with few images, packed."""
    raw.mkdir(parents=True)
    images = struct.pack(">4i", 2051, samples, 28, 28) + bytes(range(196)) * 4 * samples
    labels = struct.pack(">2i", 2049, samples) + bytes(range(samples))
    files = {name: images if "images" in name else labels for name in fetch.MNIST_MD5}
    for name, content in files.items():
        (raw / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(fetch, "MNIST_MD5", {name: hashlib.md5(files[name]).hexdigest() for name in files})


def test_mnist_is_unpacked_from_archives_packed_by_anyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mnist_archives(tmp_path / "MNIST" / "raw", monkeypatch)
    settings = settings_for("mnist_lenet", tmp_path)
    fetch.prepare(settings)
    train, test = open_data(settings, find_facts(settings)[0])
    assert (len(train), len(test)) == (3, 3)
    assert train[2][1] == 2
    pixels, labels = whole(train, 2)
    assert torch.equal(pil_to_tensor(train[1][0]), pixels[1])
    assert (pixels.shape, labels.tolist()) == ((2, 1, 28, 28), [0, 1])
    assert not list((tmp_path / "MNIST" / "raw").glob(".*"))


def test_archives_that_are_not_mnist_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(TrainError, match=r"t10k-labels-idx1-ubyte\.gz is damaged, or is not MNIST"):
        fetch.prepare(settings_for("mnist_lenet", tmp_path))


def test_a_truncated_archive_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    archive = raw / "train-images-idx3-ubyte.gz"
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(TrainError, match="cannot get mnist into") as caught:
        fetch.prepare(settings_for("mnist_lenet", tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_truncated_file_is_there_and_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    settings = settings_for("mnist_lenet", tmp_path)
    fetch.prepare(settings)
    whole = (raw / name).read_bytes()
    (raw / name).write_bytes(whole[:kept])
    with pytest.raises(TrainError, match=rf"{name} is damaged \(it has \d.* bytes\): delete it and start again"):
        fetch.prepare(settings)


def test_unpacked_files_that_do_not_load_give_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    settings = settings_for("mnist_lenet", tmp_path)
    fetch.prepare(settings)
    (raw / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(TrainError, match="delete them there and start again"):
        open_data(settings, find_facts(settings)[0])


@pytest.mark.parametrize("exp", ["mnist_lenet", "resnet152_cifar"])
def test_absent_data_are_one_line_with_the_folder_and_the_way_out(exp: str, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(TrainError) as caught:
        fetch.prepare(settings_for(exp, folder))
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(folder), "--data_dir", "--set data_dir=", "data=synthetic"):
        assert part in message
    assert not folder.exists()


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.folder(parse_settings("mnist_lenet", {})) == tmp_path / "data"
    monkeypatch.setenv("TMPDIR", "/local/7")
    assert str(fetch.folder(parse_settings("mnist_lenet", {"data_dir": "$TMPDIR/data"}))) == "/local/7/data"


def test_archives_that_cannot_be_unpacked_give_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    make_mnist_archives(raw, monkeypatch)
    (raw / f".train-images-idx3-ubyte.{os.getpid()}").mkdir()  # in the way of the file, for root as well
    with pytest.raises(TrainError, match="a folder that this user may write"):
        fetch.prepare(settings_for("mnist_lenet", tmp_path))


# ---- which loader -------------------------------------------------------------------------------------------------


def chosen(monkeypatch: pytest.MonkeyPatch, loader: str, free: int, ranks_here: int = 1) -> str:
    """The loader of MNIST, which takes 55 MB, where so many bytes are free."""
    monkeypatch.setattr(loading, "free_bytes", lambda device: free)
    settings = parse_settings("mnist_lenet", {"loader": loader})
    info = read_rank_info({"LOCAL_WORLD_SIZE": str(ranks_here)})
    return loading.choose_loader(settings, find_facts(settings)[0], info, CPU).loader


def test_a_set_is_resident_where_all_ranks_copies_take_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(monkeypatch, "auto", 10**9) == "resident"
    assert chosen(monkeypatch, "auto", 10**9, ranks_here=5) == "workers"
    assert chosen(monkeypatch, "auto", 10**8) == "workers"
    assert chosen(monkeypatch, "resident", 10**8) == "resident"
    assert chosen(monkeypatch, "workers", 10**12) == "workers"


def test_a_resident_set_that_cannot_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=r"takes 0\.1 GiB on cpu, and 0\.0 GiB are free: use loader=workers"):
        chosen(monkeypatch, "resident", 10**7)


def test_a_thread_prepares_ahead_only_where_a_core_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    ways = {}
    for threads, ranks_here in ((1, 1), (4, 1), (1, 4), (2, 2), (1, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        info = read_rank_info({"LOCAL_WORLD_SIZE": str(ranks_here)})
        ways[threads, ranks_here] = loading.prepare_ahead(info, CPU)
    threaded = {key for key, way in ways.items() if way is resident.in_thread}
    assert threaded == {(1, 1), (1, 2)}
    assert set(ways.values()) == {resident.in_thread, resident.in_turn}


def test_the_free_memory_of_this_host_is_found() -> None:
    assert 10**7 < loading.free_bytes(CPU) < 10**14
