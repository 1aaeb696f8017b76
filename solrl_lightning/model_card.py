"""README.md of exported weights, in the format of the Hugging Face hub: what they are, and what was measured."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from solrl_lightning import __version__
from solrl_lightning.formatting import counted, measured
from solrl_lightning.hub import is_path
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX

PICTURE = Path("images") / "base_and_trained.png"
_WEIGHTS = "pytorch_lora_weights.safetensors"


def model_card(
    *,
    base: str,
    pipeline: str,
    transformer: str,
    dtype: str,
    call: Mapping[str, Any],
    settings: Mapping[str, Any],
    iterations: int,
    summary: Mapping[str, Any] | None,
    with_picture: bool,
    name: str | None,
) -> str:
    """Return the card's Markdown with its metadata.

    Args:
        base: ``model.pretrained``: a hub id, a local folder (which the card does not name), or ``tiny``.
        pipeline, transformer: names of diffusers' classes; ``dtype`` is the transformer's.
        call: arguments of the pipeline with which evaluations sample.
        settings: selected configuration keys of the run.
        iterations: those done in the checkpoint.
        summary: the run's summary.json, if there is one.
        with_picture: whether ``PICTURE`` is beside the card.
        name: hub id of the repository that gets the card; None: the usage lines take the local folder.
    """
    on_hub = base != "tiny" and not is_path(base)
    parts = [
        f"# {settings.get('reward', 'reward')} LoRA for {base if on_hub else settings.get('model', 'a local model')}",
        _origin(base, on_hub, settings, iterations, summary),
        "## Use",
        _usage(base, on_hub, pipeline, transformer, dtype, call, name or "<this folder>"),
        *_results(summary, iterations),
    ]
    if with_picture:
        parts += [
            f"![base and trained model on the same prompts and noise]({PICTURE.as_posix()})",
            "Left the base, right the trained model: the same held-out prompts, the same noise.",
        ]
    parts += ["## Settings", _table(["key", "value"], [[key, str(value)] for key, value in settings.items()])]
    parts += ["## Licence", _licence(base, on_hub)]
    return str(ModelCard(f"---\n{_metadata(base, on_hub).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _metadata(base: str, on_hub: bool) -> ModelCardData:
    known = _licence_name(base) if on_hub else None
    licence: dict[str, Any] = {}
    if known is not None:
        is_spdx = " " not in known
        own = {"license": "other", "license_name": _slug(known), "license_link": _page(base)}
        licence = {"license": known.lower()} if is_spdx else own
    return ModelCardData(
        base_model=base if on_hub else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["text-to-image", "diffusers", "lora", "reinforcement-learning", "solrl_lightning"],
        **licence,
    )


def _slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9.]+", name.lower()))


def _page(base: str) -> str:
    return f"https://huggingface.co/{base}"


def _licence_name(base: str) -> str | None:
    """The licence of a hub id whose config files the package has; of other bases the card names the page only."""
    index = ARCHITECTURES / base / INDEX
    return json.loads(index.read_text())["_licence"] if index.is_file() else None


def _licence(base: str, on_hub: bool) -> str:
    if not on_hub:
        return "That of the base model, of which these weights are a derivative."
    known = _licence_name(base)
    named = f"{base} is under the {known}" if known else f"The licence of {base} is"
    return f"{named} ([its page]({_page(base)})). These weights are a derivative of it."


def _origin(
    base: str, on_hub: bool, settings: Mapping[str, Any], iterations: int, summary: Mapping[str, Any] | None
) -> str:
    model = f"[{base}]({_page(base)})" if on_hub else f"the model `{settings.get('model')}`"
    own = {"solrl_lightning": __version__} | ((summary or {}).get("versions") or {})
    used = ", ".join(f"{name} {own[name]}" for name in ("solrl_lightning", "torch", "diffusers") if name in own)
    machine = ((summary or {}).get("machine") or {}).get("device")
    where = f" on {machine}" if machine else ""
    return (
        f"Adapters of {model}, trained by reinforcement learning on the reward `{settings.get('reward')}` with "
        "solrl_lightning, an implementation of Sol-RL ([arXiv 2604.06916](https://arxiv.org/abs/2604.06916)): family "
        f"`{settings.get('family')}`, objective `{settings.get('objective')}`, iterations: {iterations}{where}. "
        f"Software: {used}."
    )


def _usage(
    base: str, on_hub: bool, pipeline: str, transformer: str, dtype: str, call: Mapping[str, Any], name: str
) -> str:
    start = [f"from diffusers import {pipeline}, {transformer}", "import torch"]
    place = repr(base) if on_hub else '"<folder of the base model>"'
    if base == "tiny":
        start.append("from importlib.resources import files")
        place = 'files("solrl_lightning") / "assets" / "tiny"'
    options = "".join(f", {key}={value!r}" for key, value in call.items())
    lines = [
        *start,
        "",
        f"pipe = {pipeline}.from_pretrained({place}, dtype=torch.{dtype})",
        f'pipe.load_lora_weights("{name}", subfolder="lora_ema", weight_name="{_WEIGHTS}")',
        f'image = pipe(prompt="a prompt"{options}).images[0]',
    ]
    return "\n".join(
        [
            "```python",
            *lines,
            "```",
            "",
            "`lora_ema` is the average of the trained adapter, which was evaluated; `lora_trained` is the adapter as "
            "the optimiser left it. `transformer` is the base transformer with `lora_ema` merged into it:",
            "",
            "```python",
            f'merged = {transformer}.from_pretrained("{name}", subfolder="transformer", dtype=torch.{dtype})',
            f"pipe = {pipeline}.from_pretrained({place}, transformer=merged, dtype=torch.{dtype})",
            "```",
        ]
    )


def _results(summary: Mapping[str, Any] | None, iterations: int) -> list[str]:
    """The evaluations of the base and of these weights; nothing if the run has not evaluated both."""
    rows = {row["iteration"]: row for row in (summary or {}).get("evaluations", [])}
    if summary is None or iterations not in rows or 0 not in rows or iterations == 0:
        return ["## Results", f"The run has no evaluation of the base and after {counted(iterations, 'iteration')}."]
    base, trained = rows[0], rows[iterations]
    names = dict.fromkeys([summary["reward"], *summary["other_rewards"]])
    cells = [
        [
            name,
            measured(base[name], base.get("standard_error", {}).get(name)),
            measured(trained[name], trained.get("standard_error", {}).get(name)),
            measured(trained[name] - base[name], trained.get("change_error", {}).get(name), "+.4f"),
        ]
        for name in names
        if name in base and name in trained
    ]
    size = summary.get("held_out")
    text = "Means over the held-out prompts of the run."
    if size:
        text = (
            f"Means over {size['prompts']} held-out prompts, {size['images_per_prompt']} images each, "
            f"{size['steps']} steps; ± is one standard error over prompts. The change is taken prompt by prompt, with "
            "the same noise."
        )
    columns = ["reward", "base", f"after {counted(iterations, 'iteration')}", "change"]
    return ["## Results", text, _table(columns, cells)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
