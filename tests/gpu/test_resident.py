"""The resident loader on a GPU, in a stream beside the one that computes."""

import pytest
import torch

from trainer.data import AUGMENTATIONS, RankBatches, SampleStream, resident
from trainer.shared import DATA_SETS


def batches_of(ahead, device, augment):
    pixels = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = resident.ResidentSet(pixels, torch.arange(50) % 10, DATA_SETS["cifar10"], torch.device(device))
    order = RankBatches(SampleStream(50, 8, (8,), seed=0), rank=0)
    return resident.ResidentBatches(data, order, AUGMENTATIONS[augment], 0, ahead)


@pytest.mark.computes
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_a_gpu_prepares_what_a_cpu_does(augment):
    """Up to the last bit of a division: one step of brightness is 0.016."""
    on_gpu, on_cpu = (batches_of(*way, augment) for way in ((resident.in_stream, "cuda"), (resident.in_turn, "cpu")))
    for (images, labels), (others, other_labels) in zip(on_gpu, on_cpu, strict=True):
        assert images.is_cuda
        assert torch.allclose(images.cpu(), others, atol=1e-5)
        assert torch.equal(labels.cpu(), other_labels)
