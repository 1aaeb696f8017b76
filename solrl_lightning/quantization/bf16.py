"""precision=bf16: the shadow keeps every layer as it is, a control of what few steps alone do to the ranking."""

NAME = "none"
LINE = "The shadow runs in BF16: no layer is quantised."
