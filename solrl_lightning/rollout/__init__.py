"""Turn prompts into training samples: stages, selection, advantages, micro-batches, and the records between them."""
