"""Sol-RL for text-to-image flow models on PyTorch Lightning: FP4 explores, BF16 trains."""

import time

__version__ = "0.2.0"
IMPORTED = time.perf_counter()
"""When this process began, but for Python's own start: `python -m solrl_lightning` imports this first."""
