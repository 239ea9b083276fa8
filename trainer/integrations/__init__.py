"""Callbacks for Lightning, Accelerate and Hugging Face's Trainer.

They add loss, epoch, exact samples and evaluations to the records of `orch run`; without it they do nothing.
"""
# Each module imports its framework, and only this package of orch.
