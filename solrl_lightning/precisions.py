"""Names of the shadow's precisions and of their backends, which ``quantization.backends`` implements."""

from solrl_lightning.errors import UserError

AUTO = "auto"
"""The precision that is chosen for the hardware, by ``quantization.choose_precision``."""

BACKENDS = {
    "nvfp4": ("auto", "transformer_engine", "torch", "emulated"),
    "fp8": ("auto", "torch", "emulated"),
    "int8": ("auto", "torch", "emulated"),
    "bf16": ("auto",),
}


def check_backend(precision: str, backend: str) -> None:
    """UserError for an unknown precision, or a backend that it does not have."""
    if precision not in (AUTO, *BACKENDS):
        raise UserError(f"precision={precision} is invalid: it must be one of {', '.join((AUTO, *BACKENDS))}.")
    names = BACKENDS[precision] if precision != AUTO else BACKENDS["nvfp4"]  # which has them all
    if backend not in names:
        known = ", ".join(names)
        raise UserError(
            f"precision.backend={backend} is invalid: with precision={precision} it must be one of {known}. Leave it "
            "out for the fastest one here."
        )
