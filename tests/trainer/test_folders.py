"""data=folder: a person's own images in the experiment's shape; whatever is wrong with them is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torchvision.transforms import functional

from tests.support.trainer_ranks import of_event, trained
from trainer.data import RankBatches, SampleStream, find_facts, list_folder, loading, open_data, whole
from trainer.ranks import join, read_rank_info
from trainer.shared import TrainError, parse_settings
from trainer.shared.settings import Settings

CPU = torch.device("cpu")
ALONE = read_rank_info({})
COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0), "white": (255, 255, 255)}


def save(path: Path, colour: tuple[int, int, int], height: int = 40, width: int = 60) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.tensor(colour, dtype=torch.uint8).view(3, 1, 1).expand(3, height, width)
    functional.to_pil_image(pixels.contiguous()).save(path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Four images of each class to train on, one of each to test on, and files that are none."""
    root = tmp_path / "data"
    for name, colour in COLOURS.items():
        for number in range(4):
            save(root / "train" / name / f"{number}.png", colour, height=20 + 20 * number)
        save(root / "val" / name / "deeper" / "0.JPG", colour)
    (root / "train" / "red" / "notes.txt").write_text("none")
    (root / "train" / ".hidden").mkdir()
    return root


def settings_for(root: Path, **pairs: str) -> Settings:
    return parse_settings("resnet152_cifar", {"data": "folder", "data_dir": str(root), "augment": "none", **pairs})


def test_imagenet_is_such_a_folder_in_its_own_shape(images: Path) -> None:
    settings = parse_settings("resnet50_imagenet", {"data_dir": str(images)})
    facts, mark = find_facts(settings)
    assert (facts.shape, facts.classes, facts.train_samples) == ((3, 224, 224), 3, 12)
    train, _ = open_data(settings, facts)
    image, label = train[4]
    assert (image.size, label, mark) == ((224, 224), 1, list_folder(images).digest)


def test_classes_and_images_are_found_and_cut_to_the_experiments_shape(images: Path) -> None:
    settings = settings_for(images)
    facts, _ = find_facts(settings)
    assert (facts.shape, facts.classes, facts.train_samples, facts.test_samples) == ((3, 32, 32), 3, 12, 3)
    train, test = open_data(settings, facts)
    pixels, labels = whole(train, 12)
    assert (pixels.shape, labels.tolist()) == ((12, 3, 32, 32), [0] * 4 + [1] * 4 + [2] * 4)
    for image, label in zip(pixels, labels, strict=True):
        assert image.flatten(1).unique(dim=1).T.tolist() == [list(list(COLOURS.values())[label])]
    assert [test[index][1] for index in range(3)] == [0, 1, 2]
    assert find_facts(settings_for(images, samples="5"))[0].train_samples == 5


def test_the_middle_is_cut_out_and_nothing_is_squeezed(tmp_path: Path) -> None:
    stripes = torch.zeros((3, 32, 96), dtype=torch.uint8)
    stripes[:, :, 32:64] = 200
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        functional.to_pil_image(stripes).save(tmp_path / part / "a" / "0.png")
    for exp, channels in (("resnet152_cifar", 3), ("mnist_lenet", 1)):
        settings = parse_settings(exp, {"data": "folder", "data_dir": str(tmp_path)})
        pixels = whole(open_data(settings, find_facts(settings)[0])[0], 1)[0]
        assert pixels.shape[1] == channels
        assert pixels.min() > 150 or exp == "mnist_lenet"
        assert pixels[0, 0, 14, 14] == 200


def test_a_class_that_val_lacks_keeps_the_numbers_of_the_others(images: Path) -> None:
    (images / "val" / "blue" / "deeper" / "0.JPG").unlink()
    assert [label for _, label in list_folder(images).val] == [1, 2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda root: root.rename(root.with_name("gone")),
            r"data/train cannot be listed \(No such file",
        ),
        (lambda root: (root / "val").rename(root / "test"), r"data/val cannot be listed \(No such file"),
        (lambda root: (root / "train" / "red").rename(root / "train" / "green"), "data/val/red: train has no class of"),
        (lambda root: (root / "train" / "empty").mkdir(), "data/train/empty holds no image of a known type: .jpg"),
        (lambda root: [file.unlink() for file in (root / "val").rglob("*.JPG")], "data/val holds no image"),
    ],
)
def test_a_folder_that_is_not_as_it_should_be_is_one_line_with_the_place(images: Path, change, line: str) -> None:
    change(images)
    with pytest.raises(TrainError, match=line) as caught:
        find_facts(settings_for(images))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("loader", "processes"), [("resident", "0"), ("workers", "0"), ("workers", "1")])
@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_broken_image_is_one_line_with_its_name(images: Path, loader: str, processes: str, content) -> None:
    broken = images / "train" / "red" / "2.png"
    broken.write_bytes(broken.read_bytes()[:-40] if content is None else content)
    settings = settings_for(images, loader=loader, num_workers=processes)
    join(ALONE, "gloo", CPU)
    try:
        facts = loading.agree_on_facts(settings, ALONE)
        order = RankBatches(SampleStream(facts.train_samples, 4, (4,), 0), 0)
        with pytest.raises(TrainError) as caught:
            list(loading.open_batches(settings, facts, order, ALONE, CPU)[0])
    finally:
        torch.distributed.destroy_process_group()
    line = str(caught.value).removeprefix(f"{ALONE.node}: ")
    assert line == f"{broken} cannot be read as an image: replace or remove it"


def test_hosts_whose_folders_differ_are_named(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(images)
    join(ALONE, "gloo", CPU)
    try:
        other = json.dumps(["elsewhere", "another digest", 3, 12, 3])
        gather_lines = loading.gather_lines
        monkeypatch.setattr(loading, "gather_lines", lambda own: [*gather_lines(own), other if own else ""])
        with pytest.raises(TrainError, match=f"the files in {images} differ between .* and elsewhere: bring the same"):
            loading.agree_on_facts(settings, ALONE)
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_learns_the_classes_of_a_folder(images: Path, tmp_path: Path) -> None:
    arguments = ["--exp", "mnist_lenet", "--data", "folder", "--data_dir", str(images), "--device", "cpu"]
    (lines,) = trained(tmp_path, [*arguments, "--batch", "4", "--epochs", "8", "--strategy", "none"])
    assert lines[0]["settings"]["loader"] == "resident"
    assert sum(step["samples"] for step in of_event(lines, "step")) == 8 * 12
    evaluation = of_event(lines, "eval")[-1]
    assert (evaluation["samples"], len(evaluation["per_class"])) == (3, 3)
    assert evaluation["accuracy"] == 1
