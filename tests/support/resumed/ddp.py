"""A small network, plain DDP: saves out/last.pt after each epoch, and goes on from there with --resume."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--samples", type=int, default=2048)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
images = torch.randn(args.samples, 1, 12, 12)
labels = (images.mean(dim=(1, 2, 3)) * 40).long() % 10
data = TensorDataset(images, labels)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

begin = 0
if args.resume:
    saved = torch.load("out/last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["epoch"] + 1
    print(f"resumed after epoch {saved['epoch']}", flush=True)

for epoch in range(begin, args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(saved, "out/new.pt")
        os.replace("out/new.pt", "out/last.pt")
    dist.barrier()
    print(f"saved: epoch {epoch} loss {loss.item():.4f}", flush=True)

digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
print("weights", digest.hexdigest(), flush=True)
dist.destroy_process_group()
