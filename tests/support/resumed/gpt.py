"""A language model over characters in one file: saves its own checkpoint every so many steps, --resume goes on."""

import hashlib
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BLOCK, WIDTH, HEADS, LAYERS, BATCH, STEPS, EVERY = 32, 48, 4, 2, 8, 300, 25
CHECKPOINT = "out-char/ckpt.pt"
TEXT = "".join(f"{n} and {n} is {n + n}, and {n} times {n} is {n * n}. " for n in range(400))
CHARACTERS = sorted(set(TEXT))
DATA = torch.tensor([CHARACTERS.index(character) for character in TEXT])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.attend(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.think(self.after(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, x):
        return self.head(self.blocks(self.letter(x) + self.place(torch.arange(x.shape[1]))))


def batch_of(step, rank):
    at = torch.randint(len(DATA) - BLOCK - 1, (BATCH,), generator=torch.Generator().manual_seed(step * 100 + rank))
    return torch.stack([DATA[i : i + BLOCK] for i in at]), torch.stack([DATA[i + 1 : i + BLOCK + 1] for i in at])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = 0
    if "--resume" in sys.argv:
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
        print(f"resumed after step {begin}", flush=True)
    for step in range(begin, STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        inputs, targets = batch_of(step, rank)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            if rank == 0:
                os.makedirs(os.path.dirname(CHECKPOINT), exist_ok=True)
                saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(saved, f"{CHECKPOINT}.new")
                os.replace(f"{CHECKPOINT}.new", CHECKPOINT)
            dist.barrier()
            print(f"saved: step {step + 1} loss {loss.item():.4f}", flush=True)
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    print("weights", digest.hexdigest(), flush=True)
    dist.destroy_process_group()


main()
