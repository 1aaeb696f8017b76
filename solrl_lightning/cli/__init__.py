"""From the shell to a composed, checked configuration. Nothing here imports torch at its top."""
