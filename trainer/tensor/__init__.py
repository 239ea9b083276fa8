"""Tensor parallelism: each rank computes some channels of every layer, for the whole batch."""
