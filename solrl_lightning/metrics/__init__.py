"""Rank fidelity of the proxy reward, and confidence intervals of means."""
