"""A LoRA that is part of the base model, such as the one that distils Qwen-Image to few steps."""

from pathlib import Path

from diffusers import DiffusionPipeline
from safetensors import SafetensorError

from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.errors import UserError, sentence


def fuse_lora(pipeline: DiffusionPipeline, source: str) -> None:
    """Add a LoRA to the transformer's weights, in place: W + alpha / rank B A, rounded to the dtype of W.

    Args:
        pipeline: reads the names of its own LoRA files, and of other trainers where diffusers converts them.
        source: ``<hub id or folder>/<file>``.

    Raises:
        UserError: the file cannot be read, or adapts layers or shapes that the transformer does not have.
    """
    folder, _, name = source.rpartition("/")
    file: Path = fetch(folder or ".", name, key="model.fused_lora", kind="LoRA")
    named, fix = f"model.fused_lora={source} is invalid", "Name a LoRA of this model."
    try:
        state = pipeline.lora_state_dict(str(file.parent), weight_name=file.name)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{named}: it cannot be read: {sentence(error)} {fix}") from error
    layers = {name.partition(".lora_")[0] for name in state}
    unknown = sorted(layers - {f"transformer.{name}" for name, _ in pipeline.transformer.named_modules()})
    if unknown or not layers:
        model, names = type(pipeline.transformer).__name__, ", ".join(unknown[:3]) or "no weights"
        raise UserError(f"{named}: it must adapt layers of {model} as transformer.<layer>; it has {names}. {fix}")
    if not all(value.isfinite().all() for value in state.values()):
        raise UserError(f"{named}: its weights must be finite. {fix}")
    try:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)  # with the alpha of its metadata
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{named}: it does not fit: {sentence(error)} {fix}") from error
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
