"""Names that a configuration is checked against before torch loads. The modules that implement them import them."""

from collections.abc import Mapping
from itertools import chain
from typing import Final, Literal

from solrl_lightning.errors import UserError

Sampler = Literal["shadow", "merged", "policy"]
TrainingSampler = Literal["merged", "policy"]
SolverName = Literal["euler", "dpm2"]
Decoder = Literal["full", "bf16", "preview"]
Training = Literal["lora", "full"]
Storage = Literal["bfloat16", "int8", "nf4"]
Combination = Literal["sum", "gdpo"]
SHADOW: Final = "shadow"
MERGED: Final = "merged"
POLICY: Final = "policy"
REFERENCE: Final = "reference"
"""The base model, whose velocity an objective may read."""
TRAINED: Final = "default"
"""The trained weights; peft names the first adapter so."""
OLD: Final = "old"
"""The weights of the old policy, and its velocity, which an objective may read."""

LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""The file of a LoRA in the folders of diffusers and of peft."""
PEFT_CONFIG = "adapter_config.json"
"""The file beside peft's that has its alpha."""

SHARDED = "solrl_lightning.training.sharding.ShardedBase"
"""The strategy of a trainer whose ranks share the weights."""

AUTO = "auto"
"""The precision that is chosen for the hardware, by ``quantization.choose_precision``; and the fastest backend."""

BACKENDS = {
    "nvfp4": ("auto", "torch", "transformer_engine", "emulated"),
    "fp8": ("auto", "torch", "emulated"),
    "int8": ("auto", "torch", "emulated"),
    "bf16": ("auto",),
}
"""The backends of each precision of the shadow, which ``quantization.backends`` implements."""


def check_backend(precision: str, backend: str) -> None:
    """Raise UserError for an unknown precision, or a backend that it does not have."""
    if precision not in (AUTO, *BACKENDS):
        raise UserError(f"precision={precision} is invalid: it must be one of {', '.join((AUTO, *BACKENDS))}.")
    names = BACKENDS[precision] if precision != AUTO else dict.fromkeys(chain.from_iterable(BACKENDS.values()))
    if backend not in names:
        known = ", ".join(names)
        raise UserError(
            f"precision.backend={backend} is invalid: with precision={precision} it must be one of {known}. Leave it "
            "out for the fastest one here."
        )


SUM: Final = "weighted_sum"
"""The label of several rewards' sum."""

TAKEN_BY_METRICS = frozenset(
    {SUM, "prompt", "mean", "std", "group_std", "zero_std_fraction"}  # reward/<name>
    | {"iteration", "seconds", "evaluations", "samples", "statistics", "parts", "standard_error", "change_error"}
)
"""Names that no reward can have: of metrics beside its own, and of keys beside it in summary.json and evaluate.json."""


def is_packaged(name: str) -> bool:
    """Return whether a module, or what is in one, is of this package; other code is a user's."""
    return name.partition(".")[0] == "solrl_lightning"


def trained_reward(weights: Mapping[str, float]) -> str:
    """Return the name of the reward that is trained on: the only one, of which more is better, or the weighted sum."""
    return next(iter(weights)) if [weight > 0 for weight in weights.values()] == [True] else SUM
