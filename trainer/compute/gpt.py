"""GPT networks (Radford et al. 2019): a chain of an embedding, equal layers and a head, so that a pipeline can cut it.

    build_gpt(TEXT_MODELS["gpt_small"], tokens=256)       inputs: token numbers; outputs: (samples, vocabulary, tokens)

The head has weights of its own. GPT-2 shares them with the embedding, which would put first and last block on one rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from trainer.shared.experiments import GptSize

WEIGHT_STD = 0.02
"""Initial weights, as in GPT-2; divided by sqrt(2 * layers) if they add to the residual stream."""


class GptEmbedding(nn.Module):
    """Takes token numbers of any type and shape (samples, ..., tokens)."""

    def __init__(self, size: GptSize, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(tokens, size.width)

    def forward(self, numbers: Tensor) -> Tensor:
        # A profile gives random numbers.
        tokens = numbers.flatten(1).long().remainder(self.tokens.num_embeddings)
        embedded: Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class GptLayer(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.widened, self.narrowed = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, stream: Tensor) -> Tensor:
        """(samples, tokens, width)."""
        stream = stream + self.attended(self._attention(self.before_attention(stream)))
        output: Tensor = stream + self.narrowed(gelu(self.widened(self.before_mlp(stream)), approximate="tanh"))
        return output

    def _attention(self, stream: Tensor) -> Tensor:
        samples, tokens, width = stream.shape
        parts = self.queries_keys_values(stream).view(samples, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(samples, tokens, width)


class GptHead(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.vocabulary = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.vocabulary(self.norm(stream))
        return logits.transpose(1, 2)  # cross_entropy expects classes in the second dimension


def build_gpt(size: GptSize, tokens: int) -> nn.Sequential:
    network = nn.Sequential(GptEmbedding(size, tokens), *(GptLayer(size) for _ in range(size.layers)), GptHead(size))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1:
                adds = name.endswith(("attended.weight", "narrowed.weight"))
                weight.normal_(0.0, WEIGHT_STD / (math.sqrt(2 * size.layers) if adds else 1.0))
            elif name.endswith(("queries_keys_values.bias", "attended.bias", "widened.bias", "narrowed.bias")):
                weight.zero_()
    return network
