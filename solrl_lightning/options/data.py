"""``data``: the prompts."""

from solrl_lightning.options.rules import Count, Group, Images


class Data(Group):
    train: str
    """Source of the training prompts: a file, a named source, or hf://owner/name/split."""
    eval: str
    """Source of the held-out prompts, which are removed from ``train``."""
    column: str
    """Column of the prompts in a table or hub data set, and their key in a .json or .jsonl file."""
    eval_prompts: Count | None
    """Use only the first n of ``eval``; null: all."""
    eval_images: Images
    """Images per held-out prompt, from fixed seeds."""
