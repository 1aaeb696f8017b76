"""Check at start that the Hugging Face hub answers, and that an upload is possible.

huggingface_hub tries every request six times without an option for fewer, which takes half a minute without a network
and a minute and a half with a server that accepts connections and does not respond.
"""

import os
from functools import cache
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from solrl_lightning.artifacts.hub import HUB_ID
from solrl_lightning.data.sources import dataset_of
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.run_prompts import sources


def check_hub(options: Run) -> list[str]:
    """Return notes on the downloads of a run; sets HF_HUB_OFFLINE if the hub does not answer.

    UserError if the hub does not answer, and a model is not in its cache.
    """
    from huggingface_hub import constants, get_token  # imported here because most runs do not use the hub

    model, reads = options.model, options.task.reads
    models = {"model.preview_decoder": model.preview_decoder} if options.uses_model else {}
    if options.uses_model and model.weights == "pretrained":
        models |= {"model.pretrained": model.pretrained, "model.transformer_weights": model.transformer_weights}
        models |= {"model.fused_lora": model.fused_lora and model.fused_lora.rpartition("/")[0]}
    if not {"train", "eval", "reward"}.isdisjoint(reads):  # only these tasks load rewards
        models |= options.reward.files
    remote = {k: name for k, name in models.items() if name and HUB_ID.fullmatch(name) and not Path(name).exists()}
    datasets = filter(None, map(dataset_of, sources(options).values()))
    if constants.HF_HUB_OFFLINE or not remote and all(Path(name).exists() for name in datasets):
        return []
    cache = Path(constants.HF_HUB_CACHE)
    missing = {key: name for key, name in remote.items() if not (cache / f"models--{name.replace('/', '--')}").is_dir()}
    notes = []
    if "model.pretrained" in missing and model.needs:
        import torch  # which takes seconds

        needs = model.needs + ("" if torch.cuda.is_available() else "; torch finds no GPU on this machine")
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
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=seconds).close()
    except (HTTPError, HTTPException):
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        # huggingface_hub has its own certificates, so it may connect where this verification fails.
        return "" if isinstance(reason, SSLError) else str(reason)
    return ""


def check_push(push: str) -> None:
    """Raise ``UserError`` if nothing can be uploaded to ``push``: offline by choice, or without a token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE or get_token() is None:
        rule = "an upload needs a token, and HF_HUB_OFFLINE must not be set"
        raise UserError(f"task.push={push} is invalid: {rule}. Log in with `hf auth login`, and unset HF_HUB_OFFLINE.")
