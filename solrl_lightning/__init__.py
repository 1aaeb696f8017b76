"""Sol-RL for text-to-image flow models on PyTorch Lightning: FP4 explores, BF16 trains."""

import time

__version__ = "0.2.0"
BEGAN = time.perf_counter()
"""When this job began: with the process, but for Python's own start, or later if the process had one before it."""
