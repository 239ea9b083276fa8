"""What a CUDA graph replays, and what the fused BatchNorm over all ranks computes, is what plain passes compute."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.compute.arithmetic import Bf16, Full
from trainer.compute.batch_norm_kernels import NOTHING
from trainer.compute.graphs import WARM, replayable, why_not
from trainer.compute.models import build_model, stages_of
from trainer.pipeline import Criterion, StageWork, part_of, replay_stage
from trainer.shared import Stage
from trainer.strategies import SynchronisedBatchNorm

pytestmark = pytest.mark.computes
SHAPES = {"lenet": (1, 28, 28), "resnet152": (3, 32, 32)}


@pytest.fixture(autouse=True)
def same_kernels():
    """Those that add up in one order."""
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def amp():
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def trained(name, dtype, graphs, channels_last=False):
    """Weights and statistics after a few updates, some with another size; what the graphs said."""
    torch.manual_seed(0)
    model, said = build_model(name, SHAPES[name], 10).cuda(), []
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if graphs:
        replayable(model, said.append, said.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for samples in (*[16] * (WARM + 3), 6, 16, 16):
        images = torch.randn(samples, *SHAPES[name], generator=generator).cuda()
        labels = torch.randint(0, 10, (samples,), generator=generator).cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()]), said


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_replayed_updates_are_the_plain_ones(name, in_16_bits, channels_last):
    dtype = amp() if in_16_bits else None
    plain, _ = trained(name, dtype, False, channels_last)
    replayed, said = trained(name, dtype, True, channels_last)
    if "capture_error_mode" in torch.cuda.graph.__init__.__code__.co_varnames:
        assert len(said) == 1
        assert "16 samples recorded" in said[0]
    assert ((replayed - plain).norm() / plain.norm()).item() < 1e-7


def staged(name, dtype, splits, graphs):
    """Weights, statistics and the last update's loss of a network in two stages, with several micro-batches in flight
    on the first.
    """
    torch.manual_seed(0)
    blocks = len(stages_of(build_model(name, SHAPES[name], 10)))
    notes, stages = [], []
    for first, last in ((0, blocks // 2 - 1), (blocks // 2, blocks - 1)):
        torch.manual_seed(0)
        part = part_of(build_model(name, SHAPES[name], 10), Stage("a", first, last)).cuda()
        stages.append(StageWork(part, precision(dtype), reads=first == 0, splits=splits))
        if graphs:
            replay_stage(stages[-1], 4, notes.append, notes.append)
    optimizers = [torch.optim.SGD(stage.part.parameters(), lr=0.01, momentum=0.9) for stage in stages]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for stage, optimizer in zip(stages, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            stage.begin([16] * 4)
        passed = [stages[0].forward(torch.randn(16, *SHAPES[name], generator=generator).cuda(), 0) for _ in range(4)]
        # a sender would have copied each output before the recording is used again
        for output in passed:
            gradient = judged(stages[1], output, torch.randint(0, 10, (16,), generator=generator).cuda())
            stages[0].backward(gradient, 64, 0)
        for _ in passed if splits else ():
            stages[0].weights()
        for optimizer in optimizers:
            optimizer.step()
    states = [tensor for stage in stages for tensor in (*stage.part.state_dict().values(), stage.total.cuda())]
    return torch.cat([tensor.detach().double().flatten() for tensor in states]), notes


def loss_sum_of(outputs, labels):
    return cross_entropy(outputs, labels, reduction="sum")


def judged(stage, output, labels):
    inputs = stage.enter(output)
    with stage.precision.autocast():
        loss_sum = stage.part(inputs, Criterion(loss_sum_of, labels))
    stage.judge(inputs, loss_sum, 0)
    gradient = stage.backward(None, 64, 0)
    if stage.splits:
        stage.weights()
    return gradient


def precision(dtype):
    return Bf16(torch.device("cuda")) if dtype == torch.bfloat16 else Full()


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_replayed_stages_are_the_plain_ones(name, in_16_bits, splits):
    dtype = torch.bfloat16 if in_16_bits and torch.cuda.get_device_capability() >= (8, 0) else None
    plain, _ = staged(name, dtype, splits, False)
    replayed, notes = staged(name, dtype, splits, True)
    assert len(notes) == 2 and all("16 samples recorded for 4 in flight" in note for note in notes), notes
    assert ((replayed - plain).norm() / plain.norm()).item() < 1e-7


def test_nothing_is_recorded_by_a_torch_that_cannot():
    class Asked:
        strategy, sync_bn, model = "none", False, "lenet"

    model = build_model("lenet", SHAPES["lenet"], 10).cuda()
    words = why_not(torch.device("cuda"), Asked, model)
    assert words in ("", f"torch {torch.__version__} is older than 2.1")


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="nccl")
    dist.destroy_process_group()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fused_batch_norm_over_all_ranks_is_torchs_own(group, memory_format):
    plain, fused = (nn.BatchNorm2d(7).cuda() for _ in range(2))
    fused.__class__, fused.group = SynchronisedBatchNorm, group
    images = (3 + torch.randn(5, 7, 4, 6, device="cuda")).contiguous(memory_format=memory_format)
    found = []
    for norm in (plain, fused):
        nn.init.constant_(norm.weight, 1.5)
        own = images.clone().requires_grad_()
        output = norm(own)
        (output.square() * images).sum().backward()
        found.append([output, own.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    for expected, other in zip(*found, strict=True):
        assert torch.allclose(expected, other, rtol=1e-4, atol=1e-4)


def test_a_rank_without_samples_counts_for_nothing_wherever_it_stands():
    images = 5 + torch.randn(64, 3, 4, 4, device="cuda")
    mean, inverse_std = torch.batch_norm_stats(images, 1e-5)
    empty = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"), torch.tensor(NOTHING, device="cuda")
    full = mean, inverse_std, torch.tensor(64.0 * 16, device="cuda")
    for rows in ((empty, full), (full, empty), (empty, empty, full)):
        means, stds, counts = (torch.stack(parts) for parts in zip(*rows, strict=True))
        found = torch.batch_norm_gather_stats_with_counts(images, means, stds, None, None, 0.1, 1e-5, counts)
        assert torch.allclose(found[0], mean, rtol=1e-5)
        assert torch.allclose(found[1], inverse_std, rtol=1e-5)
