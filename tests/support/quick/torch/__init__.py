"""Names itself, and starts ranks (`distributed/run.py`): in torch's place on hosts where no test trains anything.

To import the real one takes seconds of the processor, for each host that is asked what it has and each launcher.
"""

from . import cuda, distributed, version

__all__ = ["__version__", "cuda", "distributed", "version"]
__version__ = "2.9.0"
