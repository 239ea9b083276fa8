"""accel.py with two epochs, an evaluation after each, and the tracker."""

import torch
from accel import Points
from accelerate import Accelerator
from torch import nn

from trainer.integrations.accelerate import OrchTracker

COUNT = 600


def evaluate(accelerator, model, loader):
    model.eval()
    right, loss, total = 0, 0.0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
            right += (outputs.argmax(1) == targets).sum().item()
            loss += nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
            total += len(targets)
    model.train()
    return right / total, loss / total


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(log_with=OrchTracker())
    accelerator.init_trackers("told")
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.utils.data.Subset(Points(), range(COUNT))
    loader, test = (torch.utils.data.DataLoader(points, size, shuffle=size == 16) for size in (16, 50))
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    counted, losses = [], []
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(loss := nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.log({"train_loss": losses[-1], "epoch": epoch})
            counted.append(len(targets))
        accuracy, test_loss = evaluate(accelerator, model, test)
        accelerator.log({"eval_accuracy": accuracy, "eval_loss": test_loss, "epoch": epoch})
    print("COUNTED", counted, "LOSSES", losses, "ACCURACY", accuracy)
    accelerator.end_training()


if __name__ == "__main__":
    main()
