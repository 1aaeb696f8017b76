"""The configuration of a run as typed objects."""
