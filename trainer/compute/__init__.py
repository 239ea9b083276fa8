"""What one rank computes: the network, its arithmetic and precision, CUDA graphs."""

from trainer.compute.compiler import keep_out

keep_out()
