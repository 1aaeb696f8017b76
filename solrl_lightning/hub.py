"""Check at start that the Hugging Face hub answers, and fetch files from a folder or the hub.

huggingface_hub tries every request six times without an option for fewer, which takes half a minute without a network
and a minute and a half with a server that accepts connections and does not respond.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from solrl_lightning.errors import UserError, sentence

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_hub(models: Mapping[str, str], datasets: Sequence[str], needs: str | None) -> list[str]:
    """Return notes on the downloads of a run; sets HF_HUB_OFFLINE if the hub does not answer.

    Args:
        models: names of models, hub ids or paths, by configuration key.
        datasets: names of data sets, hub ids or folders.
        needs: disk and GPU that ``model.pretrained`` takes.

    Raises:
        UserError: the hub does not answer, and a model is not in its cache.
    """
    from huggingface_hub import constants, get_token  # imported here because most runs do not use the hub

    remote = {key: name for key, name in models.items() if HUB_ID.fullmatch(name) and not Path(name).exists()}
    if constants.HF_HUB_OFFLINE or not remote and all(Path(name).exists() for name in datasets):
        return []
    cache = Path(constants.HF_HUB_CACHE)
    missing = {key: name for key, name in remote.items() if not (cache / f"models--{name.replace('/', '--')}").is_dir()}
    notes = []
    if "model.pretrained" in missing and needs:
        name, token = missing["model.pretrained"], "found" if get_token() else "none (`hf auth login`)"
        page = f"https://huggingface.co/{name}"
        notes.append(f"model.pretrained={name} needs {needs}. Its page: {page}; your token: {token}.")
    silence = _silence(constants.ENDPOINT, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "8")))
    if silence and missing:
        key, name = next(iter(missing.items()))
        refusal = (
            f"{key}={name} is invalid: it is not on this machine, and the hub at {constants.ENDPOINT} does not answer: "
            f"{silence}. Check the network and its proxy (HF_HUB_ETAG_TIMEOUT=<seconds> waits longer), or use "
            f"{key}=<local folder>."
        )
        raise UserError("\n".join([refusal, *notes]))
    if silence:
        notes.append(f"the hub at {constants.ENDPOINT} does not answer: {silence}. Using its cache {cache}.")
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
    return notes


@cache
def _silence(endpoint: str, seconds: float) -> str:
    """Return why the hub does not answer, or an empty string if it does, with any HTTP status."""
    outcome = [f"no response within {seconds:g} s"]

    def ask() -> None:
        try:
            urlopen(Request(endpoint, method="HEAD"), timeout=seconds).close()
            outcome.append("")
        except (HTTPError, HTTPException):
            outcome.append("")
        except OSError as error:
            reason = getattr(error, "reason", error)
            # huggingface_hub has its own certificates, so it may connect where this verification fails.
            outcome.append("" if isinstance(reason, SSLError) else str(reason))

    thread = Thread(target=ask, daemon=True)  # DNS lookups have no timeout
    thread.start()
    thread.join(seconds)
    return outcome[-1]


# Uploads


def check_push(push: str) -> None:
    """Raise ``UserError`` if ``task.push`` is no hub id, or if there is no token."""
    from huggingface_hub import constants, get_token

    if not HUB_ID.fullmatch(push):
        raise UserError(f"task.push={push} is invalid: it must be a hub id. Use task.push=<your account>/<name>.")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"task.push={push} is invalid: HF_HUB_OFFLINE is set. Unset it for the upload.")
    if get_token() is None:
        raise UserError(
            f"task.push={push} is invalid: an upload needs a token that may write, and there is none. Log in with "
            "`hf auth login`, or set HF_TOKEN."
        )


def create_repository(name: str) -> None:
    """Create a private repository on the hub unless it exists. Raises ``UserError`` if the hub refuses."""
    import huggingface_hub

    with _refused(name):
        huggingface_hub.create_repo(name, private=True, exist_ok=True)


def upload(name: str, folder: Path, entries: Sequence[str]) -> str:
    """Upload files and whole folders of ``folder``; return the address. Raises ``UserError`` if the hub refuses."""
    import huggingface_hub
    from huggingface_hub import constants

    patterns = [pattern for entry in entries for pattern in (entry, f"{entry}/*")]
    with _refused(name):
        message = "Weights and model card by solrl_lightning"
        huggingface_hub.upload_folder(repo_id=name, folder_path=folder, allow_patterns=patterns, commit_message=message)
    return f"{constants.ENDPOINT}/{name}"


@contextmanager
def _refused(name: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except (OSError, errors.HTTPError, errors.HFValidationError) as error:
        raise UserError(
            f"task.push={name} failed: {sentence(error)} Check with `hf auth whoami` that the token may write there, "
            "and give the same command again."
        ) from error


# Files of a folder or of the hub


def is_path(name: str) -> bool:
    """Return whether ``name`` is a local path, existing or not, rather than a hub id."""
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or path.suffix in (".pt", ".pth")


def fetch(name: str, *files: str, key: str, kind: str, hint: str = "Or give a local folder.") -> Path:
    """Return the path of the first of ``files`` in the folder ``name``; of a hub id, download the first of them.

    In messages, ``key`` is the configuration key of ``name``, ``kind`` names the expected model, ``hint`` is the end.

    Raises:
        UserError: the folder has none of the files, or the download fails.
    """
    if not is_path(name):
        return _download(name, files[0], key, kind, hint)
    folder = Path(name).expanduser()
    for file in files:
        if (folder / file).is_file():
            return folder / file
    raise UserError(
        f"{key}={name} is invalid: it must be a hub id or a local folder; it holds no {' or '.join(files)}. {hint}"
    )


def _download(hub_id: str, file: str, key: str, kind: str, hint: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, file))
    except (OSError, errors.HTTPError, errors.HFValidationError) as error:
        page, answer = f"https://huggingface.co/{hub_id}", getattr(error.__cause__, "response", None)
        has_token = bool(huggingface_hub.get_token())
        login = "with the account of your token" if has_token else "and give your token with `hf auth login`"
        if constants.HF_HUB_OFFLINE:
            silence = "HF_HUB_OFFLINE is set: unset it for the download"
        elif answer is not None:
            silence = f"the hub answered {answer.status_code}: try again later"
        else:
            silence = "the hub cannot be reached: check the network and its proxy"
        # The first class that fits: GatedRepoError and LocalEntryNotFoundError derive from the class below them.
        reasons: dict[type[Exception], str] = {
            errors.HFValidationError: f"is neither a local path nor a hub id (owner/name). Check the name. {hint}",
            errors.GatedRepoError: f"is gated: accept its licence at {page} {login}, then give the same command again.",
            errors.RepositoryNotFoundError: "is neither a folder here nor a model that you may read on the hub. Check "
            f"the name at {page}; if it is private, log in with `hf auth login`. {hint}",
            errors.LocalEntryNotFoundError: "is neither a folder here nor in the hub's cache "
            f"{constants.HF_HUB_CACHE}, and {silence}; for a gated model log in with `hf auth login`. {hint}",
            errors.EntryNotFoundError: f"exists on the hub, but is no {kind}: it holds no {file}. Look for a "
            f"repository that does; {page} may name it. {hint}",
            Exception: f"could not be loaded from the hub: {sentence(error)} Check the network and the token (`hf auth "
            f"whoami`). {hint}",
        }
        reason = next(text for kind_of_error, text in reasons.items() if isinstance(error, kind_of_error))
        raise UserError(f"{key}={hub_id} {reason}") from error
