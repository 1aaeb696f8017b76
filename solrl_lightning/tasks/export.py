"""task=export: saves a checkpoint's weights in the formats of diffusers, and a model card; uploads them if asked.

Runs on the CPU for any trainer: export samples nothing, and the host usually has more memory.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from huggingface_hub import ModelCard, ModelCardData
from omegaconf import DictConfig

from solrl_lightning import __version__
from solrl_lightning.artifacts.files import iterations_done, write_atomically
from solrl_lightning.artifacts.finished_runs import RECORDED_CONFIG, read_summary
from solrl_lightning.artifacts.formatting import change, counted, measured
from solrl_lightning.artifacts.hub import create_repository, is_path, upload
from solrl_lightning.artifacts.run_folder import run_of
from solrl_lightning.build import build_model, load_trained
from solrl_lightning.cli.resume import read_record
from solrl_lightning.names import MERGED
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Export
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX
from solrl_lightning.policies.loading import files_of_variant
from solrl_lightning.tasks.generate import without_training
from solrl_lightning.training.module import SolRLModule

_LORA, _MERGED = "lora_ema", "transformer"
_CARD, _PICTURE = "README.md", Path("images") / "base_and_trained.png"


def export(cfg: Run) -> None:
    """Write lora_ema/, lora_trained/, transformer/ (the base with the merged average) and README.md (a model card).

    With model.train=full these are transformer/ (the average), transformer_trained/ and README.md. The average of a run
    without callbacks.ema is its trained weights. With ``cfg.task.push`` it uploads the files. UserError if the hub
    refuses the upload.
    """
    task = cfg.task_as(Export)
    if task.push is not None:
        create_repository(task.push)  # an error must precede the work
    folder = Path(cfg.run_dir)
    whole = without_training(cfg)
    whole.base_weights = "bfloat16"  # stored ones are no tensors that diffusers saves
    module = build_model(whole, torch.device("cpu"))
    state = load_trained(module, str(cfg.ckpt))  # which a run that trains may replace
    exports = module.transformers.trained.exports
    for part, weights in exports.items():
        module.save_policy(folder / part, weights)
    transformer = module.transformers.replicas[MERGED]
    with module.merged_with("ema"):
        assert isinstance(transformer, ModelMixin)
        module.model.save_transformer(folder / _MERGED, transformer)
    name, dtype = type(transformer).__name__, str(transformer.dtype).removeprefix("torch.")
    without = write_card(cfg, state, module, name, dtype)
    if _LORA in exports and not altered_by(cfg):
        other = "" if module.ema_state is None else "  # or lora_trained, without averaging"
        print(f"pipe.load_lora_weights({str(folder / _LORA)!r}){other}")
    print(
        f"{name}.from_pretrained({str(folder / _MERGED)!r}, dtype=torch.{dtype})  # merged\n"
        f"{folder / _CARD}  # model card{without}"
    )
    if task.push is not None:
        print(upload(task.push, folder, [*exports, _MERGED, _PICTURE.parts[0], _CARD]))


def altered_by(cfg: Run) -> list[str]:
    """Return the hub ids, or names of local files, of what changes the weights of ``model.pretrained``."""
    weights, lora = cfg.model.transformer_weights, cfg.model.fused_lora
    places = {weights: weights, lora: lora and lora.rpartition("/")[0]}  # the hub id or path of each
    return [Path(source).name if is_path(place or ".") else source for source, place in places.items() if source]


def weighted_names(weights: Mapping[str, float], combine: str) -> str:
    """Return the rewards with a weight as a sum, such as ``pickscore - 0.5 clipscore``."""
    terms = [name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items() if weight]
    total = " + ".join(terms).replace("+ -", "- ")
    return total if combine == "sum" else f"{combine} of {total}"


def reward_of(run: Path) -> str:
    """Return `weighted_names` of what the run trained on, by its record; empty without one."""
    if not (run / RECORDED_CONFIG).is_file():
        return ""
    reward = read_record(run / RECORDED_CONFIG, DictConfig, "reward").reward
    weights = {name: member.weight for name, member in reward.items() if isinstance(member, DictConfig)}
    return weighted_names(weights, reward.get("combine", "sum"))


def write_card(cfg: Run, state: dict[str, Any], module: SolRLModule, transformer: str, dtype: str) -> str:
    """Write README.md and its picture, from the checkpoint's ``state`` and its run's summary and sample grid.

    Return why it is without results, if it is.
    """
    folder, run = Path(cfg.run_dir), run_of(Path(str(cfg.ckpt)))
    summary = read_summary(run)
    done = iterations_done(state)
    with_lora = _LORA in module.transformers.trained.exports
    trained = reward_of(run) or weighted_names(
        {name: member["weight"] for name, member in cfg.reward.entries.items()}, cfg.reward.combine
    )
    facts = summary if "config" in summary else {}
    settings = facts["config"] | {"iterations": done, "reward": trained} if facts else {"iterations": done}
    settings = {key: value for key, value in settings.items() if key != "lora_rank"}
    if with_lora:
        settings |= {"lora_rank": cfg.model.lora.rank, "lora_alpha": cfg.model.lora.alpha}
    if cfg.base_weights != "bfloat16":
        settings["base_weights"] = cfg.base_weights
    settings["solver"] = cfg.model.solver
    precision = state.get("precision_backend", "nvfp4")
    grid = run / "samples" / f"grid_{done:06d}.png"
    if grid.is_file():
        write_atomically(folder / _PICTURE, grid.read_bytes())
    call = {"num_inference_steps": cfg.model.eval_steps, "height": cfg.model.resolution, "width": cfg.model.resolution}
    if cfg.model.num_frames:
        call["num_frames"] = cfg.model.num_frames
    base, variant = Path(str(module.model.pipeline.config.get("_name_or_path"))), cfg.model.variant
    card = model_card(
        str(cfg.model.pretrained),
        call | module.model.call_options,
        altered_by(cfg),
        done,
        facts,
        with_lora,
        averaged=module.ema_state is not None,
        pipeline=module.model.pipeline_class.__name__,
        custom=cfg.model.custom.get("_target_"),
        transformer=transformer,
        dtype=dtype,
        variant=variant if any(files_of_variant(part, variant) for part in base.glob("*")) else None,
        edits=cfg.model.input_image,
        scheduler=cfg.model.scheduler,
        scheduler_class=type(module.model.pipeline.scheduler).__name__,
        scheduler_shift=module.model.euler_shift,
        began_as=cfg.model.init_lora and Path(cfg.model.init_lora).name,
        settings=settings | {"train": cfg.model.train, "precision": precision},  # instead of auto
        picture=_PICTURE.as_posix() if grid.is_file() else None,
        name=cfg.task_as(Export).push or "<this folder>",
    )
    write_atomically(folder / _CARD, card.encode())
    return "" if facts else f", without results; {run}: {summary['status']}"


def model_card(
    base: str,
    call: Mapping[str, Any],
    altered_by: Sequence[str],
    iterations: int,
    summary: Mapping[str, Any],
    with_lora: bool,
    **shown: Any,
) -> str:
    """Return the card's Markdown with its metadata, in the format of the Hugging Face hub.

    Args:
        base: ``model.pretrained``: a hub id, a local folder (which the card does not name), or ``tiny``.
        call: arguments of the pipeline with which evaluations sample.
        altered_by: what changes its weights, so that the LoRA alone cannot be loaded into it.
        iterations: those done in the checkpoint.
        summary: the run's summary.json; empty without one.
        with_lora: whether a LoRA was trained; else the whole transformer.
        shown: other variables of the template.
    """
    on_hub = base != "tiny" and not is_path(base)
    licence, page = (licence_of(base), f"https://huggingface.co/{base}") if on_hub else (None, None)
    place = repr(base) if on_hub else '"<folder of the base model>"'
    made = "image-to-image" if shown["edits"] else "text-to-video" if "num_frames" in call else "text-to-image"
    used = {"solrl_lightning": __version__} | (summary.get("versions") or {})
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base if on_hub else None,
            library_name="diffusers",
            pipeline_tag=made,
            tags=[made, "diffusers", *(["lora"] if with_lora else []), "reinforcement-learning", "solrl_lightning"],
            **licence_metadata(licence, page),
        ),
        template_str=(files("solrl_lightning") / "assets" / "model_card.md.jinja").read_text(encoding="utf-8"),
        base=base,
        page=page,
        licence=licence,
        place='files("solrl_lightning") / "assets" / "tiny"' if base == "tiny" else place,
        call=call,
        altered_by=" and ".join(f"`{source}`" for source in altered_by),
        facts=summary,
        iterations=iterations,
        after=counted(iterations, "iteration"),
        software=", ".join(f"{n} {used[n]}" for n in ("solrl_lightning", "torch", "diffusers", "peft") if n in used),
        with_lora=with_lora,
        results=results(summary, iterations),
        **shown,
    )
    return f"{card}\n"


def licence_of(base: str) -> str | None:
    """Return the licence of a hub id whose config files the package has; other cards name the page only."""
    index = ARCHITECTURES / base / INDEX
    return json.loads(index.read_text())["_licence"] if index.is_file() else None


def licence_metadata(licence: str | None, page: str | None) -> dict[str, Any]:
    if licence is None:
        return {}
    if " " not in licence:  # an SPDX identifier
        return {"license": licence.lower()}
    name = "-".join(re.findall(r"[a-z0-9.]+", licence.lower()))
    return {"license": "other", "license_name": name, "license_link": page}


def results(summary: Mapping[str, Any], iterations: int) -> list[list[str]]:
    """Return name, reward before and after, and change of each reward; empty if the run has not evaluated both."""
    rows = {row["iteration"]: row for row in summary.get("evaluations", [])}
    if iterations == 0 or not {0, iterations} <= rows.keys():
        return []
    base, trained, others = rows[0], rows[iterations], summary["other_rewards"]
    return [
        [
            f"{name}, not trained on" if name in others and others[name]["weight"] == 0 else name,
            measured(base[name], base.get("standard_error", {}).get(name)),
            measured(trained[name], trained.get("standard_error", {}).get(name)),
            change(base[name], trained[name], trained.get("change_error", {}).get(name)),
        ]
        for name in dict.fromkeys([summary["reward"], *others])
        if name in base and name in trained
    ]
