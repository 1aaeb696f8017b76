"""Turn prompts into scored samples: stages, chunks, selection, and the records between them."""
