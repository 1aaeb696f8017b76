"""Where prompts come from, and which of them an iteration gets."""
