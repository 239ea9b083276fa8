"""What the callbacks of frameworks are made of, without any framework: tests/lab/test_frameworks.py has those."""

from __future__ import annotations

import pytest

from trainer.integrations.records import ACCURACY, LOSS, TRAINING_LOSS, Batches, Records, finite, found


@pytest.mark.parametrize(
    "name", ["val_acc", "val/accuracy", "valid.acc", "eval_accuracy", "Validation_Acc", "test_acc"]
)
def test_the_accuracy_of_an_evaluation_is_found_by_its_usual_names(name):
    assert found({"val_loss": 1.0, name: 0.5, "acc": 0.9}, None, ACCURACY) == 0.5


@pytest.mark.parametrize("name", ["acc", "accuracy", "train_acc", "val_top5_acc", "val_acc_best", "my_eval_accuracy"])
def test_what_may_be_something_else_is_not_taken_for_it(name):
    assert found({name: 0.5}, None, ACCURACY) is None
    assert found({name: 0.5, "val_acc": 0.9}, name, ACCURACY) == 0.5


@pytest.mark.parametrize(
    ("pattern", "name"), [(LOSS, "val_loss"), (TRAINING_LOSS, "train_loss"), (TRAINING_LOSS, "loss")]
)
def test_the_losses_of_training_and_of_an_evaluation_are_not_mistaken_for_each_other(pattern, name):
    values = {"eval_samples": 1, "val_loss": "val_loss", "train_loss": "train_loss"} | {name: name}
    assert (
        found({key: values[key] for key in values if key in ("eval_samples", "val_loss", name)}, None, pattern) == name
    )


def test_an_update_of_several_batches_has_the_samples_and_the_mean_loss_of_all():
    batches = Batches()
    assert (batches.samples, batches.loss) == (None, None)
    batches.add(16, 0.7)
    assert (batches.samples, batches.loss) == (16, 0.7)
    batches.add(8, 0.4)
    assert (batches.samples, batches.loss) == (24, pytest.approx(0.6))
    batches.add(None, 0.4)
    assert (batches.samples, batches.loss) == (None, pytest.approx(0.5))
    batches.add(8, None)
    assert (batches.samples, batches.loss) == (None, None)


def test_where_no_step_is_measured_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_METRICS", str(tmp_path / "metrics.jsonl"))
    records = Records()
    records.begin(0, 10, counts_samples=True)
    records.begin_epoch()
    records.tell(epoch=0, samples=8, loss=0.5)
    records.evaluated(0, 0.5, 0.5, 1.0)
    records.end_epoch(0)
    assert not records.is_on and not records.has_untold
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "number"), [(0.5, 0.5), (1, 1.0), (float("nan"), None), ("high", None), ([0.5], None), (None, None)]
)
def test_what_is_no_single_number_is_not_known(value, number):
    assert finite(value) == number
