"""A small GPT with AdamW, as nanoGPT trains one: batches cut from a text by hand, gradients accumulated and clipped."""

# by hand: from by_hand import Hand
import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 512, 64, 128, 4, 2
BATCH, ACCUMULATED, STEPS = 6, 2, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        parts = self.heads(self.before(x)).split(WIDTH, dim=2)
        asked, keys, values = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(asked, keys, values, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.behind(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, targets):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        logits = self.head(self.blocks(x))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.randint(WORDS, (100_000,))
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())

    def get_batch():
        begins = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
        cut = torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])
        return cut[:, :-1], cut[:, 1:]

    words, targets = get_batch()
    # by hand: hand = Hand(model)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        # by hand: hand.ends("load")
        for part in range(ACCUMULATED):
            model.require_backward_grad_sync = part == ACCUMULATED - 1
            _, loss = model(words, targets)
            words, targets = get_batch()
            (loss / ACCUMULATED).backward()
            # by hand: hand.ends_backward() if model.require_backward_grad_sync else hand.ends("compute")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # by hand: hand.ends_step()
        optimizer.zero_grad(set_to_none=True)
    print("loss", loss.item())
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    print("weights", digest.hexdigest())
    # by hand: hand.show()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
