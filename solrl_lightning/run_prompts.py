"""The prompts that the options of a run name. Imports no torch before it is needed."""

from typing import TYPE_CHECKING

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.data.sources import check_text, file_of_split
from solrl_lightning.errors import UserError
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
    if cfg.model.input_image:
        raise UserError(
            f"task.prompts={task.prompts} is invalid: this model edits an image, and a text has none. Use "
            'task.prompt_file=<file>.jsonl with a row {"prompt": ..., "image": <file>} for each image.'
        )
    for index, prompt in enumerate(task.prompts):
        check_text(prompt, f"task.prompts.{index}")
    return [Prompt(text) for text in task.prompts]


def sources(cfg: Run) -> dict[str, str]:
    """Return the sources of the prompts that the task reads (``task.reads``): "train", "eval"."""
    files = {"train": file_of_split(cfg.data.train, "train"), "eval": file_of_split(cfg.data.eval, "test")}
    return {name: source for name, source in files.items() if name in cfg.task.reads}


def prompt_sets(cfg: Run) -> "PromptSets":
    """Return the prompts that the task reads (``task.reads``); the other sets are empty."""
    from solrl_lightning.data.prompts import read_prompt_sets  # imports torch

    named = sources(cfg)
    return read_prompt_sets(named.get("train"), named.get("eval"), cfg.data.column, cfg.model.input_image)
