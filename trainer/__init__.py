"""The trainer: data-parallel training under torchrun, with a record of where every step's time went.

    torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet --epochs 1

It needs the standard library, torch (2.0.1 or newer) and torchvision, and knows nothing of who started it: all it
learns comes through its arguments (`shared.config`) and torchrun's environment. Nothing in `shared` imports torch, so
that a machine without torch can check settings, split batches and read metrics.
"""
