"""Where the config files of a model are on this machine. Imports no torch: the configuration is checked with it."""

from importlib.resources import files
from pathlib import Path

ASSETS = Path(str(files("solrl_lightning"))) / "assets"
TINY = ASSETS / "tiny"  # the embedded model, with weights
ARCHITECTURES = ASSETS / "architectures"  # config files of published pipelines, by hub id
INDEX = "model_index.json"


def config_folder(pretrained: str) -> Path | None:
    """Return the folder with the config files of ``model.pretrained``; None for a hub id without packaged files.

    Args:
        pretrained: ``tiny``, a local folder or a hub id.
    """
    folders = (TINY,) if pretrained == "tiny" else (Path(pretrained).expanduser(), ARCHITECTURES / pretrained)
    return next((folder for folder in folders if (folder / INDEX).is_file()), None)
