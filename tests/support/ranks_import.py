"""What ranks import, and the tests whose functions they call: imported once, where ranks are forked from.

Torch alone takes seconds; an optimiser needs torch._dynamo with its first step, which takes nearly as long again.
"""

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import trainer.measure.collectives
import trainer.measure.profile
import trainer.strategies
import trainer.train  # noqa: F401
