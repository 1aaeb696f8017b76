"""What the program can do: one verb per file, each a function of the composed configuration."""
