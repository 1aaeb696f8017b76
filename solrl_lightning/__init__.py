"""Sol-RL for text-to-image flow models on PyTorch Lightning: FP4 explores, BF16 trains."""

__version__ = "0.1.0"
