"""Measures of how faithfully the proxy ranks a pool, as torchmetrics."""
