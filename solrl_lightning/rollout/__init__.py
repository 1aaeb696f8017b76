"""From prompts to training samples: seeds, selection, advantages, and the records that pass between the stages."""
