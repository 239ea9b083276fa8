"""A run as a training loop sees it: epochs, batches, steps."""
