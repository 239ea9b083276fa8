"""Pipelines: costs of blocks (`block_costs`), update times (`clock`), the best cut (`solve`, `choice`)."""
