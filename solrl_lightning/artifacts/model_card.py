"""README.md of exported weights, in the format of the Hugging Face hub."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from solrl_lightning import __version__
from solrl_lightning.artifacts.formatting import change, counted, measured
from solrl_lightning.artifacts.hub import is_path
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX

PICTURE = Path("images") / "base_and_trained.png"


def model_card(
    *,
    base: str,
    pipeline: str,
    transformer: str,
    dtype: str,
    call: Mapping[str, Any],
    fused_lora: str | None,
    scheduler: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    iterations: int,
    summary: Mapping[str, Any] | None,
    with_lora: bool,
    with_picture: bool,
    name: str | None,
) -> str:
    """Return the card's Markdown with its metadata.

    Args:
        base: ``model.pretrained``: a hub id, a local folder (which the card does not name), or ``tiny``.
        pipeline, transformer: names of diffusers' classes; ``dtype`` is the transformer's.
        call: arguments of the pipeline with which evaluations sample.
        fused_lora: ``model.fused_lora``; a local folder is not named.
        scheduler: values that replace those of the pipeline's scheduler.
        settings: selected configuration keys of the run.
        iterations: those done in the checkpoint.
        summary: the run's summary.json, if there is one.
        with_lora: whether a LoRA was trained; else the whole transformer.
        with_picture: whether ``PICTURE`` is beside the card.
        name: hub id of the repository that gets the card; None: the usage lines take the local folder.
    """
    on_hub, facts = base != "tiny" and not is_path(base), summary or {}
    licence, page = (licence_of(base), f"https://huggingface.co/{base}") if on_hub else (None, None)
    place = repr(base) if on_hub else '"<folder of the base model>"'
    folder, _, file = (fused_lora or "").rpartition("/")
    made = "text-to-video" if "num_frames" in call else "text-to-image"
    used = {"solrl_lightning": __version__} | (facts.get("versions") or {})
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
        pipeline=pipeline,
        transformer=transformer,
        dtype=dtype,
        call=call,
        fused_lora=fused_lora and ("<folder of the fused LoRA>" if is_path(folder) else folder, file),
        scheduler=scheduler,
        settings=settings,
        facts=facts,
        iterations=iterations,
        after=counted(iterations, "iteration"),
        software=", ".join(f"{n} {used[n]}" for n in ("solrl_lightning", "torch", "diffusers") if n in used),
        with_lora=with_lora,
        results=results(facts, iterations),
        picture=PICTURE.as_posix() if with_picture else None,
        name=name or "<this folder>",
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
    """Return the reward, base, trained and change of each reward; empty if the run has not evaluated both."""
    rows = {row["iteration"]: row for row in summary.get("evaluations", [])}
    if iterations == 0 or not {0, iterations} <= rows.keys():
        return []
    base, trained = rows[0], rows[iterations]
    return [
        [
            name,
            measured(base[name], base.get("standard_error", {}).get(name)),
            measured(trained[name], trained.get("standard_error", {}).get(name)),
            change(base[name], trained[name], trained.get("change_error", {}).get(name)),
        ]
        for name in dict.fromkeys([summary["reward"], *summary["other_rewards"]])
        if name in base and name in trained
    ]
