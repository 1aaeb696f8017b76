"""A record of the training runs that a user has started on this machine, wherever their folders lie."""

import json
import os
from contextlib import suppress
from pathlib import Path


def _record() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "solrl_lightning" / "runs.jsonl"


def remember(folder: Path) -> None:
    """Add the run in ``folder``, with the working directory; where the record cannot be written, do nothing."""
    line = json.dumps({"folder": str(folder.resolve()), "cwd": str(Path.cwd())})
    with suppress(OSError, RuntimeError):  # RuntimeError for a user without a home
        _record().parent.mkdir(parents=True, exist_ok=True)
        with _record().open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def started_runs() -> list[tuple[Path, Path]]:
    """Return the folder of every run in the record and the working directory where it was started."""
    runs = []
    with suppress(OSError, RuntimeError):
        for line in _record().read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # cut by a full disk
                run = json.loads(line)
                runs.append((Path(run["folder"]), Path(run["cwd"])))
    return runs
