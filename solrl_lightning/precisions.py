"""Names of the shadow's precisions and of their backends, which ``quantization.backends`` implements."""

from solrl_lightning.errors import UserError

BACKENDS = {
    "nvfp4": ("auto", "transformer_engine", "torch", "emulated"),
    "fp8": ("auto", "torch", "emulated"),
    "int8": ("auto", "torch", "emulated"),
    "bf16": ("auto",),
}


def check_backend(precision: str, backend: str) -> None:
    """UserError for an unknown precision, or a backend that it does not have."""
    if precision not in BACKENDS:
        raise UserError(f"precision={precision} is invalid: it must be one of {', '.join(BACKENDS)}.")
    if backend not in BACKENDS[precision]:
        known = ", ".join(BACKENDS[precision])
        raise UserError(
            f"precision.backend={backend} is invalid: with precision={precision} it must be one of {known}. Leave it "
            "out for the fastest one here."
        )
