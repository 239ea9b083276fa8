"""Training data: from a name to batches on the device."""

import trainer.compute  # noqa: F401 - before torchvision, for what it keeps out
