"""Control, precision=bf16: no layer is quantised, which isolates the effect of fewer solver steps on the ranking."""

NAME = "none"
DESCRIPTION = "The shadow runs in BF16: no layer is quantised."
