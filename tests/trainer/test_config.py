"""Settings: one flat value, every mistake at once, and no torch needed to check them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.ranks import read_rank_info
from trainer.shared import (
    EXPERIMENTS,
    NAMED,
    SettingsError,
    TrainError,
    declared,
    fields_of,
    help_text,
    parse_arguments,
    parse_settings,
)

ROOT = Path(__file__).parents[2]


def mistakes_of(exp: str, /, **pairs: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(exp, pairs)
    assert str(caught.value) == "\n".join(caught.value.mistakes)
    return caught.value.mistakes


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_a_complete_and_right_set_of_settings(name: str) -> None:
    settings = parse_settings(name, {})
    assert dataclasses.asdict(settings) == EXPERIMENTS[name]
    assert settings.exp == name
    assert type(settings)(**dataclasses.asdict(settings)) == settings


@pytest.mark.parametrize(
    ("exp", "pairs", "expected"),
    [
        ("resnet152_cifar", {}, {"wire": "fp32", "compress_after": -1, "local_overlap": -1}),  # of ways not taken
        ("resnet152_cifar", {"fidelity": "half"}, {"wire": "bf16"}),
        ("resnet152_cifar", {"fidelity": "half", "wire": "fp16"}, {"wire": "fp16"}),
        ("resnet152_cifar", {"fidelity": "compressed"}, {"wire": "fp32", "compress_after": 40}),
        ("resnet152_cifar", {"fidelity": "compressed", "compress_after": "7"}, {"compress_after": 7}),
        (
            "resnet152_cifar",
            {"fidelity": "local", "local_steps": "8", "local_after": "-1"},
            {"local_after": 40, "local_overlap": 2},
        ),
    ],
)
def test_settings_as_a_run_uses_them_hold_no_auto_of_the_way_taken(
    exp: str, pairs: dict[str, str], expected: dict[str, object]
) -> None:
    used = dataclasses.asdict(parse_settings(exp, pairs).as_used(400))
    assert {name: used[name] for name in expected} == expected


def test_pairs_replace_the_experiments_values_with_their_own_types() -> None:
    settings = parse_settings("mnist_lenet", {"batch": "128", "lr": "1e-3", "strategy": "allreduce"})
    assert (settings.batch, settings.lr, settings.strategy) == (128, 1e-3, "allreduce")
    assert settings.epochs == EXPERIMENTS["mnist_lenet"]["epochs"]


def test_all_mistakes_are_reported_at_once_and_the_nearest_right_name_with_them() -> None:
    mistakes = mistakes_of(
        "mnist_lente",
        bacth="3",
        strategy="al_reduce",
        lr="fast",
        epochs="0",
        momentum="1",
        seed="1.5",
        exp="x",
        data_dir=" ",
    )
    assert len(mistakes) == 9
    text = "\n".join(mistakes)
    known = ", ".join([*NAMED, "collectives"])
    assert f"exp: 'mnist_lente' is not one of {known}; did you mean mnist_le" in text
    assert "bacth: no such setting; did you mean batch?" in text
    assert mistakes_of("mnist_lenet", strategy="dpp")[0].endswith("did you mean ddp?")
    assert mistakes_of("mnist_lenet", learning_rate="1") == ("learning_rate: no such setting; did you mean lr?",)
    assert "did you mean accumulate?" in mistakes_of("mnist_lenet", gradient_accumulation_steps="2")[0]
    assert "strategy: 'al_reduce' is not one of ddp, allreduce, allreduce_flat, " in text
    assert "did you mean allreduce?" in text
    assert "lr: 'fast' is not a number" in text
    assert "epochs: 0 is too small; at least 1" in text
    assert "momentum: 1.0 is too large; less than 1" in text
    assert "seed: '1.5' is not a whole number" in text
    assert "data_dir" in text


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_a_learning_rate_must_be_a_positive_finite_number(value: str) -> None:
    (mistake,) = mistakes_of("mnist_lenet", lr=value)
    assert mistake.startswith("lr: ")


def test_a_model_is_refused_data_of_the_wrong_number_of_channels() -> None:
    (mistake,) = mistakes_of("mnist_lenet", model="resnet152")
    assert "3 channels" in mistake
    (mistake,) = mistakes_of("mnist_lenet", model="resnet152", data="synthetic")
    assert "3 channels" in mistake
    assert parse_settings("mnist_lenet", {"model": "resnet152", "data": "cifar10"}).data_set.shape == (3, 32, 32)
    (mistake,) = mistakes_of("resnet50_imagenet", model="lenet")
    assert mistake == "model: lenet takes images of 32 pixels at most, not 224; use resnet50"


@pytest.mark.parametrize("name", ["batch", "seed", "num_workers", "steps"])
def test_a_whole_number_that_nothing_can_hold_is_one_line(name: str) -> None:
    (mistake,) = mistakes_of("mnist_lenet", **{name: "1" + 310 * "0"})
    assert mistake == f"{name}: a number of 311 digits; expected less than 2**63"
    assert len(mistakes_of("mnist_lenet", **{name: str(2**63)})) == 1
    assert parse_settings("mnist_lenet", {"seed": str(2**63 - 1)}).seed == 2**63 - 1


def test_a_batch_has_an_upper_bound() -> None:
    assert mistakes_of("mnist_lenet", batch=str(2**40)) == (f"batch: {2**40} is too large; less than {2**40}",)
    assert parse_settings("mnist_lenet", {"batch": str(2**40 - 1)}).batch == 2**40 - 1


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"strategy": "parameter_average", "local_steps": "8"}, "local_steps: does nothing with fidelity exact"),
        ({"outer_lr": "0.7"}, "outer_lr: does nothing with fidelity exact"),
        ({"fidelity": "local", "compress_rank": "4"}, "compress_rank: does nothing with fidelity local"),
        ({"fidelity": "half", "compress_after": "0"}, "compress_after: does nothing with fidelity half"),
        ({"optimizer": "adamw", "momentum": "0.5"}, "momentum: does nothing with optimizer adamw"),
        ({"optimizer": "adamw", "fused_sgd": "on"}, "fused_sgd: does nothing with optimizer adamw"),
        ({"optimizer": "adamw", "strategy": "parameter_average"}, "optimizer: parameter_average is exact only if"),
        ({"strategy": "parameter_average", "clip_norm": "1"}, "clip_norm: parameter_average has no gradient of the"),
        ({"strategy": "pipeline", "fidelity": "local", "clip_norm": "1"}, "clip_norm: with fidelity local no rank of"),
        ({"strategy": "parameter_average", "ema": "0.9"}, "ema: with strategy parameter_average each rank has"),
        ({"fidelity": "local", "ema": "0.9"}, "ema: with fidelity local each rank has its own weights"),
        ({"sync_bn": "true", "ema": "0.9"}, "ema: each rank estimates BatchNorm's statistics by itself"),
        ({"profile_s": "5", "checkpoint_every": "3"}, "checkpoint_every: does nothing with profile_s"),
        (
            {"strategy": "parameter_average", "shares": "auto"},
            "shares: auto changes the weight of each rank's momentum",
        ),
    ],
)
def test_what_would_do_nothing_or_not_what_it_says_is_refused(pairs: dict[str, str], said: str) -> None:
    (mistake,) = mistakes_of("mnist_lenet", **pairs)
    assert mistake.startswith(said)


def test_weights_may_be_averaged_every_few_updates_and_shares_may_follow_where_nothing_is_called_exact() -> None:
    asked = {"strategy": "parameter_average", "fidelity": "local", "local_steps": "8", "shares": "auto"}
    assert parse_settings("mnist_lenet", asked).local_steps == 8
    plain = {"strategy": "parameter_average", "shares": "auto", "momentum": "0"}
    assert parse_settings("mnist_lenet", plain).momentum == 0


def test_arguments_are_taken_with_blanks_equal_signs_and_dashes() -> None:
    settings = parse_arguments(["--exp", "mnist_lenet", "--data-dir=/data", "--batch", "32", "--weight_decay", "0.1"])
    assert (settings.data_dir, settings.batch, settings.weight_decay) == ("/data", 32, 0.1)


def test_all_mistakes_of_the_arguments_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_arguments(["--batch", "--lr", "x", "epochs", "--seed", "1", "--seed=2"])
    assert len(caught.value.mistakes) == 5
    for part in (
        "--batch",
        "'x' is not a number",
        "'epochs': expected --key value",
        "seed: is given twice",
        "--exp NAME",
    ):
        assert part in str(caught.value)


def test_the_help_names_every_setting_and_its_sentence() -> None:
    text = help_text()
    assert "torchrun --standalone" in text
    for name, field in fields_of("mnist_lenet").items():
        assert f"--{name} " in text
        assert declared(field).help.endswith(".")
        assert declared(field).help in text


def test_a_process_that_nobody_launched_is_rank_0_of_1() -> None:
    info = read_rank_info({})
    assert (info.rank, info.world_size, info.master, info.metrics_path) == (0, 1, None, None)
    assert info.node == info.host


def test_the_rank_is_read_from_torchruns_environment() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "ORCH_NODE": "v100", "ORCH_METRICS": "/m/{rank}"}
    info = read_rank_info(environment)
    assert (info.rank, info.local_rank, info.world_size, info.local_world_size) == (3, 1, 4, 2)
    assert (info.node, info.master, info.metrics_path) == ("v100", "10.0.0.1:29500", Path("/m/3"))


def test_a_broken_environment_is_reported_by_the_variables_name() -> None:
    with pytest.raises(TrainError, match="RANK is 'one'"):
        read_rank_info({"RANK": "one"})
    with pytest.raises(TrainError, match="MASTER_ADDR"):
        read_rank_info({"WORLD_SIZE": "2", "RANK": "0"})


def test_the_shared_modules_import_no_torch() -> None:
    program = (
        "import sys, trainer.shared.config, trainer.shared.experiments, trainer.shared.metrics, trainer.shared.shares\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'torch', 'torchvision', 'numpy', 'orchestrator'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_of_the_trainer_names_the_orchestrator() -> None:
    for path in (ROOT / "trainer").glob("*.py"):
        assert "orchestrator" not in path.read_text(), path


def test_wrong_usage_is_one_line_a_mistake_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "trainer", "--exp", "mnist_lenet", "--bacth", "3", "--lr", "x"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: bacth: no such setting; did you mean batch?",
        "error: lr: 'x' is not a number",
    ]
