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
    fix = "Name a LoRA of this model."
    try:
        names = pipeline.lora_state_dict(str(file.parent), weight_name=file.name)
        layers = {name.removeprefix("transformer.").partition(".lora_")[0] for name in names}
        unknown = sorted(layers - {name for name, _ in pipeline.transformer.named_modules()})
        if unknown or not layers:
            listed = f"which has no {', '.join(unknown[:3])}" if unknown else "and has no weights"
            raise UserError(
                f"model.fused_lora={source} is invalid: it must adapt layers of {type(pipeline.transformer).__name__}, "
                f"{listed}. {fix}"
            )
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)  # with the alpha of its metadata
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.fused_lora={source} is invalid: it does not fit: {sentence(error)} {fix}") from error
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
