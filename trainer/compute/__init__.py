"""Networks, arithmetic, precision and CUDA graphs of one rank."""

from trainer.compute.compiler import keep_out

keep_out()
