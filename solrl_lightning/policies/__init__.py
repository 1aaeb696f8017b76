"""Text-to-image architectures, one per file, and what all of them share: their views of one set of weights."""
