"""task=export: saves a checkpoint's weights in the formats of diffusers, and a model card; uploads them if asked.

Runs on the CPU for any trainer: export samples nothing, and the host usually has more memory.
"""

from pathlib import Path

import torch
from diffusers import ModelMixin

from solrl_lightning.artifacts.files import iterations_done, read_checkpoint, write_atomically
from solrl_lightning.artifacts.finished_runs import read_summary
from solrl_lightning.artifacts.hub import create_repository, upload
from solrl_lightning.artifacts.model_card import PICTURE, model_card
from solrl_lightning.artifacts.run_folder import run_of
from solrl_lightning.build import build_model, load_trained
from solrl_lightning.names import MERGED
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Export
from solrl_lightning.tasks.generate import without_training
from solrl_lightning.training.module import SolRLModule

_LORA, _MERGED = "lora_ema", "transformer"
_CARD = "README.md"


def export(cfg: Run) -> None:
    """Write lora_ema/, lora_trained/, transformer/ (the base with the merged average) and README.md (a model card).

    With model.train=full these are transformer/ (the average), transformer_trained/ and README.md. With
    ``cfg.task.push`` it uploads them.

    Raises:
        UserError: the hub refuses the upload.
    """
    task = cfg.task_as(Export)
    if task.push is not None:
        create_repository(task.push)  # an error must precede the work
    folder = Path(cfg.run_dir)
    module = build_model(without_training(cfg), torch.device("cpu"))
    ckpt = Path(str(cfg.ckpt))
    load_trained(module, ckpt)
    exports = module.transformers.trained.exports
    for part, weights in exports.items():
        module.save_policy(folder / part, weights)
    transformer = module.transformers.replicas[MERGED]
    with module.merged_with("ema"):
        assert isinstance(transformer, ModelMixin)
        module.model.save_transformer(folder / _MERGED, transformer)
    name, dtype = type(transformer).__name__, str(transformer.dtype).removeprefix("torch.")
    write_card(cfg, ckpt, module, name, dtype)
    if _LORA in exports:
        print(f"pipe.load_lora_weights({str(folder / _LORA)!r})  # or lora_trained, without averaging")
    print(
        f"{name}.from_pretrained({str(folder / _MERGED)!r}, dtype=torch.{dtype})  # merged\n"
        f"{folder / _CARD}  # model card"
    )
    if task.push is not None:
        print(upload(task.push, folder, [*exports, _MERGED, PICTURE.parts[0], _CARD]))


def write_card(cfg: Run, ckpt: Path, module: SolRLModule, transformer: str, dtype: str) -> None:
    """Write README.md and its picture, from the summary and the last sample grid of the checkpoint's run."""
    folder, run = Path(cfg.run_dir), run_of(ckpt)
    state, summary = read_checkpoint(ckpt), read_summary(run)
    done = iterations_done(state)
    with_lora = _LORA in module.transformers.trained.exports
    settings = summary.get("config") or {"reward": ", ".join(cfg.reward.members)}
    settings = {key: value for key, value in settings.items() if key != "lora_rank"} | {"iterations": done}
    if with_lora:
        settings |= {"lora_rank": cfg.model.lora.rank, "lora_alpha": cfg.model.lora.alpha}
    precision = state.get("precision_backend", "nvfp4")
    grid = run / "samples" / f"grid_{done:06d}.png"
    if grid.is_file():
        write_atomically(folder / PICTURE, grid.read_bytes())
    card = model_card(
        base=str(cfg.model.pretrained),
        pipeline=module.model.pipeline_class.__name__,
        transformer=transformer,
        dtype=dtype,
        call={"num_inference_steps": cfg.model.eval_steps}
        | dict.fromkeys(("height", "width"), cfg.model.resolution)
        | ({"num_frames": cfg.model.num_frames} if cfg.model.num_frames else {})
        | module.model.call_options,
        fused_lora=cfg.model.fused_lora,
        scheduler=cfg.model.scheduler,
        settings=settings | {"train": cfg.model.train, "precision": precision},  # instead of auto
        iterations=done,
        summary=summary if "config" in summary else None,
        with_lora=with_lora,
        with_picture=grid.is_file(),
        name=cfg.task_as(Export).push,
    )
    write_atomically(folder / _CARD, card.encode())
