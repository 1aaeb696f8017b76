"""precision=bf16: the shadow keeps every layer as it is. A control: what remains of exploration's error is its fewer steps."""

NAME = "none"
LINE = "The shadow runs in BF16: no layer is quantised."
