"""A small convolutional network with DistributedDataParallel, as tutorials have it."""

# by hand: from by_hand import Hand
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        picture = torch.randn(12, 32, 32, generator=numbers)
        return picture.sort().values[::4].contiguous(), index % 10


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, test = Pictures(16 * 12 * dist.get_world_size()), Pictures(64)
    sampler = DistributedSampler(data)
    loader, test_loader = DataLoader(data, 16, sampler=sampler), DataLoader(test, 32)
    layers = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten())
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # by hand: hand = Hand(model)
    for epoch in range(int(os.environ.get("EPOCHS", "2"))):
        sampler.set_epoch(epoch)
        # by hand: hand.begin()
        for pictures, labels in loader:
            # by hand: hand.ends("load")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            # by hand: hand.ends_backward()
            optimizer.step()
            # by hand: hand.ends_step()
        model.eval()
        with torch.no_grad():
            right = sum((model(pictures).argmax(1) == labels).sum() for pictures, labels in test_loader)
        model.train()
        print(f"epoch {epoch}: loss {loss.item()}, {right} of {len(test)} right")
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    print("weights", digest.hexdigest())
    # by hand: hand.show()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
