"""Exploration by actors of Ray: ``cluster`` places them, ``sampler`` sends them chunks, ``actor`` is one of them.

Imported with explorers=ray only, because Ray is an optional dependency.
"""
