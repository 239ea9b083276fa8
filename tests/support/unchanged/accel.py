"""A small network whose loop is written with Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        inputs = torch.randn(256, generator=torch.Generator().manual_seed(index))
        return inputs, (inputs.sum() > 0).long()


def main():
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Points(), 16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        steps += 1
    weights = sum(weight.double().sum().item() for weight in model.parameters())
    print(f"ranks {accelerator.num_processes}, steps {steps}, weights {weights!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
