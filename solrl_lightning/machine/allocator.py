"""The environment of PyTorch's allocator on a GPU, which reads it once, at the first call of CUDA."""

import os

VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def configure() -> None:
    """Set expandable segments, unless the user has configured the allocator.

    Text encoders come and go beside other sizes, and free memory of one size cannot serve another otherwise. Call it
    before anything asks for the capability of a GPU.
    """
    if not VARIABLES & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
