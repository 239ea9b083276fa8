"""What ranks import, and the tests whose functions they call: imported once, where ranks are forked from.

Torch alone takes seconds; an optimiser needs torch._dynamo with its first step, which takes nearly as long again.
"""

import atexit
import os

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import trainer.measure.collectives
import trainer.measure.profile_run
import trainer.strategies
import trainer.train  # noqa: F401
from tests.support.cheap_forks import make_forks_cheap

make_forks_cheap()
atexit.register(os._exit, 0)  # torch takes most of a second to clear away
