"""Files of a saved model: those that libraries replace by defaults, and damaged ones, which they do not name."""

import json
import logging
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from solrl_lightning.artifacts.formatting import path_option
from solrl_lightning.artifacts.hub import check_fetched, is_path
from solrl_lightning.errors import (
    NonFiniteError,
    RewardError,
    ServerError,
    UserError,
    WriteError,
    causes_of,
    is_of_machine,
    sentence,
)
from solrl_lightning.names import LORA_FILES, is_packaged

log = logging.getLogger(__name__)

_PASSING = (UserError, NonFiniteError, RewardError, ServerError, WriteError)


@contextmanager
def reading(named: str, by: str = "solrl_lightning", fix: str = "Download or save it again, whole.") -> Iterator[None]:
    """Raise UserError for any error of libraries that read files or compute with them.

    It begins with ``named`` and ends with ``fix``. Errors of the program itself, and of memory, disk and GPU, pass, and
    so do all errors if ``by``, the module or class that reads, is custom: its author needs the traceback.
    """
    try:
        yield
    except Exception as error:
        causes = causes_of(error)
        if not is_packaged(by) or any(isinstance(each, _PASSING) or is_of_machine(each) for each in causes):
            raise
        if isinstance(causes[-1], ImportError):
            raise UserError(f"{named}: a package is missing: {' '.join(str(causes[-1]).split())}") from error
        reason = f"{type(causes[-1]).__name__}: {sentence(causes[-1]).partition('. ')[0].rstrip('.')}"
        raise UserError(
            f"{named}: a file is missing or damaged, or its parts do not fit together ({reason}). {fix}"
        ) from error


def check_complete(key: str, name: str, cls: Any, part: str = "", chats: bool = False) -> None:
    """Raise UserError unless the folder ``part`` of the local folder ``name`` has the files that ``cls`` reads, whole.

    Hub ids are not checked: what the hub holds is whole. ``chats``: prompts are put into the tokenizer's chat template.
    """
    if not is_path(name):
        return
    check_undamaged(key, name, part)
    folder = Path(name).expanduser() / part
    for files in _files_of(cls, folder, chats):
        if not any((folder / file).is_file() for file in files):
            rest = f" (or {', '.join(files[1:])})" if files[1:] else ""
            raise UserError(
                f"{key}={name} is invalid: it has no {Path(part, files[0])}{rest}. Download or save it again, whole."
            )


def check_undamaged(key: str, name: str, part: str = "") -> None:
    """Raise UserError for a damaged JSON or safetensors file in a local folder, and for a pointer to such a file."""
    if not is_path(name):
        return
    for file in sorted(file for file in (Path(name).expanduser() / part).glob("[!.]*") if file.is_file()):
        if file.suffix == ".json":
            check_json(key, name, file)
        elif file.suffix == ".safetensors":
            check_header(file, f"{key}={name} is invalid")
        else:
            check_fetched(file, f"{key}={name} is invalid")
        if file.suffix == ".jinja":  # any other text would be the same prompt in all rows
            with reading(f"{key}={name} is invalid: {file} must have a loop over messages"):
                file.read_text(encoding="utf-8").index("messages")


def check_header(file: Path, named: str) -> None:
    """Raise UserError, which begins with ``named``, unless a file is of safetensors and as long as its header says."""
    check_fetched(file, named)
    if zipfile.is_zipfile(file):
        fix = f"Set {path_option('ckpt', file)}, if it is the checkpoint of a run"
        if file.suffix != ".ckpt":
            fix = "Save its tensors by safetensors.torch.save_file"
        raise UserError(f"{named}: {file} must be of safetensors, and is of torch.save, or an archive. {fix}.")
    with reading(f"{named}: {file}"), safe_open(file, framework="np"):
        pass


def lora_file(path: Path) -> Path | None:
    """Return the LoRA file ``path``, or the one of a folder as diffusers and peft write it; None if there is none."""
    files = [path / name for name in LORA_FILES] if path.is_dir() else [path]
    return next((file for file in files if file.is_file()), None)


def note_unused(folder: Path | str, names: Iterable[str]) -> None:
    """Warn of the weights with these ``names`` in the files of a model, for which its configuration has no layers."""
    if unused := sorted(names):
        message = "%s has weights that its config.json has no layers for, which are left out: %d, such as %s"
        log.warning(message, folder, len(unused), unused[0])


def check_json(key: str, name: str, file: Path) -> None:
    """Raise UserError for a file of ``name`` that is no JSON object."""
    check_fetched(file, f"{key}={name} is invalid")
    with reading(f"{key}={name} is invalid: {file} must be a JSON object"):
        _keys_of(file, file.stat().st_mtime_ns)


@cache
def _keys_of(file: Path, written: int) -> list[str]:
    """Return the keys of a JSON object, which was ``written`` then."""
    return list(json.loads(file.read_text(encoding="utf-8")).keys())


def _files_of(cls: Any, folder: Path, chats: bool) -> Iterator[tuple[str, ...]]:
    """Yield names of files, of which the folder must have one each."""
    import transformers
    from diffusers import ModelMixin, SchedulerMixin

    if issubclass(cls, (transformers.PreTrainedModel, transformers.PretrainedConfig, ModelMixin)):
        yield ("config.json",)
        for shard in folder.glob("[!.]*-00001-of-*.safetensors"):
            if shard.name.count(".") == 1:  # else of a variant
                yield (f"{shard.name.partition('-00001-of-')[0]}.safetensors.index.json",)
    if issubclass(cls, SchedulerMixin):
        yield ("scheduler_config.json",)
    if issubclass(cls, transformers.ProcessorMixin | transformers.image_processing_utils.ImageProcessingMixin):
        names = ("preprocessor_config.json", "processor_config.json")
        beside = (folder / names[1]).is_file() and "image_processor" not in (folder / names[1]).read_text()
        yield names[:1] if beside else names
    if issubclass(cls, transformers.ProcessorMixin | transformers.PreTrainedTokenizerBase):
        yield ("tokenizer_config.json",)
        yield from _vocabulary(folder)
        if chats and "chat_template" not in (folder / "tokenizer_config.json").read_text():
            yield "chat_template.jinja", "chat_template.json"


def _vocabulary(folder: Path) -> Iterator[tuple[str, ...]]:
    """Return the words of a tokenizer: tokenizer.json, or the files of its class from before there was one."""
    import transformers

    if (folder / "tokenizer.json").is_file():
        return
    config = json.loads((folder / "tokenizer_config.json").read_text())
    cls = getattr(transformers, str(config.get("tokenizer_class")), transformers.PreTrainedTokenizerBase)
    for argument, file in cls.vocab_files_names.items():
        if argument != "tokenizer_file":
            yield file, "tokenizer.json"
    if not cls.vocab_files_names.keys() - {"tokenizer_file"}:
        yield "tokenizer.json", "tokenizer.model"
