"""The prompts that the options of a run name. Imports no torch before it is needed."""

from typing import TYPE_CHECKING

from solrl_lightning.data.input_images import with_image
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.data.sources import check_text, file_of_split
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Generate

if TYPE_CHECKING:
    from solrl_lightning.data.prompts import PromptSets


def requested_prompts(cfg: Run) -> list[Prompt]:
    """Return the prompts of task=generate, from the command line or from a file.

    Raises:
        UserError: the file cannot be read, or the prompts lack the images that the model edits.
    """
    from solrl_lightning.data.prompts import read_prompts  # imports torch, which --help and mistakes do without

    task = cfg.task_as(Generate)
    if task.prompt_file is not None:
        return read_prompts(task.prompt_file, cfg.data.column, cfg.model.input_image)
    for index, prompt in enumerate(task.prompts):
        check_text(prompt, f"task.prompts.{index}")
    prompts = [Prompt(text) for text in task.prompts]
    return [with_image(prompt, "task.prompts") for prompt in prompts] if cfg.model.input_image else prompts


def sources(cfg: Run) -> dict[str, str]:
    """Return the sources of the prompts that the task reads (``task.reads``): "train", "eval"."""
    files = {"train": file_of_split(cfg.data.train, "train"), "eval": file_of_split(cfg.data.eval, "test")}
    return {name: source for name, source in files.items() if name in cfg.task.reads}


def prompt_sets(cfg: Run) -> "PromptSets":
    """Return the prompts that the task reads (``task.reads``); the other sets are empty."""
    from solrl_lightning.data.prompts import read_prompt_sets  # imports torch

    named = sources(cfg)
    return read_prompt_sets(named.get("train"), named.get("eval"), cfg.data.column, cfg.model.input_image)
