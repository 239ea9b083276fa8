"""A training loop's own view of a run: its epochs, its batches, its steps."""
