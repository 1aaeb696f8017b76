"""Files of a folder or of the Hugging Face hub, and uploads to it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from solrl_lightning.artifacts.formatting import shell_quoted
from solrl_lightning.errors import UserError, sentence

_POINTERS = {  # how they begin -> the program, and its command
    b"version https://git-lfs": ("git-lfs", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get ."),  # of an unlocked file
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_path(name: str) -> bool:
    """Return whether ``name`` is a local path, existing or not, rather than a hub id."""
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or path.suffix in (".pt", ".pth")


def fetch(
    name: str, *files: str, key: str, kind: str, hint: str = "Or give a local folder.", value: str | None = None
) -> Path:
    """Return the path of the first of ``files`` in the folder ``name``; of a hub id, download the first of them.

    In messages, ``key`` is the configuration key of ``name`` or of a ``value`` with it, ``kind`` names the expected
    model, ``hint`` is the end.
    UserError if the folder has none of the files, or the download fails.
    """
    named = f"{key}={name if value is None else value}"
    if not is_path(name):
        return _download(name, files[0], named, kind, hint)
    folder = Path(name).expanduser()
    for file in files:
        if (folder / file).is_file():
            check_fetched(folder / file, f"{named} is invalid")
            return folder / file
    raise UserError(
        f"{named} is invalid: {'it' if value is None else name} must be a hub id or a local folder; it holds no "
        f"{' or '.join(files)}. {hint}"
    )


def check_fetched(file: Path, named: str) -> None:
    """Raise UserError, which begins with ``named``, for a file that git-lfs or git-annex has not fetched yet."""
    with open(file, "rb") as content:
        head = content.read(max(map(len, _POINTERS)))
    for pointer, (program, command) in _POINTERS.items():
        if head.startswith(pointer):
            raise UserError(
                f"{named}: {file} is a pointer of {program}, which has not fetched it. Run {command} in its folder."
            )


def _download(hub_id: str, file: str, named: str, kind: str, hint: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, file))
    except (OSError, errors.HTTPError, errors.HFValidationError) as error:
        page, failed = f"https://huggingface.co/{hub_id}", sentence(error.__cause__ or error)
        if isinstance(error, errors.HFValidationError | errors.RepositoryNotFoundError):  # or GatedRepoError
            reason = (
                f"is neither a folder here nor a model that you may read on the hub. Check the name at {page}, accept "
                "its licence there if it is gated, and log in with `hf auth login`."
            )
        elif isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            reason = f"exists on the hub, but is no {kind}: it holds no {file}. Look at {page} for one that does."
        else:
            reason = (
                f"is neither a folder here nor in the hub's cache {constants.HF_HUB_CACHE}, and its download fails: "
                f"{failed} Check the network and its proxy, HF_HUB_OFFLINE, and the token (`hf auth whoami`)."
            )
        raise UserError(f"{named} {reason} {hint}") from error


# Uploads


def create_repository(name: str) -> None:
    """Create a private repository on the hub unless it exists. Raises ``UserError`` if the hub refuses."""
    import huggingface_hub

    with _refused(name, "Then give the same command again"):
        huggingface_hub.create_repo(name, private=True, exist_ok=True)


def upload(name: str, folder: Path, entries: Sequence[str]) -> str:
    """Upload files and whole folders of ``folder``; return the address. Raises ``UserError`` if the hub refuses."""
    import huggingface_hub
    from huggingface_hub import constants

    patterns = [pattern for entry in entries for pattern in (entry, f"{entry}/*")]
    include = " ".join(f"--include {shell_quoted(pattern)}" for pattern in patterns)
    with _refused(name, f"{folder} is whole. Then run hf upload {name} {shell_quoted(str(folder))} . {include}"):
        message = "Weights and model card by solrl_lightning"
        huggingface_hub.upload_folder(repo_id=name, folder_path=folder, allow_patterns=patterns, commit_message=message)
    return f"{constants.ENDPOINT}/{name}"


@contextmanager
def _refused(name: str, again: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except (OSError, ValueError, errors.HTTPError) as error:  # ValueErrors about the name, or what the hub answered
        reason, fix = sentence(error), ""
        if isinstance(error, errors.HfHubHTTPError):
            reason += f" {error.server_message.rstrip('.')}." if error.server_message else ""
            if error.response.status_code in (401, 403, 404):
                fix = " Log in with `hf auth login`; `hf auth whoami` says whether the token may write there."
        raise UserError(f"task.push={name} failed: {reason}{fix} {again}.") from error
