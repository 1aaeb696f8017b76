"""Prompt sources: text, JSON lines and parquet files, data sets of the Hugging Face hub, named sources.

A reader returns all rows of its source in order and unchanged; ``prompts`` filters them. Imports are local to the
readers: ``datasets`` alone takes a second, and files do not need it.
"""

import difflib
import json
import re
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from solrl_lightning.errors import UserError, sentence

HUB = "hf://"
PICKAPIC = "yuvalkirstain/pickapic_v1_no_images"
PICKAPIC_SPACES = 5  # the published filter: prompts of at least six words

_TABLES = {  # how pandas reads tables that are no prompt files
    ".csv": "pd.read_csv('{}')",
    ".tsv": "pd.read_csv('{}', sep='\\t')",
    ".json": "pd.read_json('{}')",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One row of a source."""

    text: str
    tag: str | None = None  # the kind of prompt, in sources that tell kinds apart


def _shapes(split: str) -> list[Record]:
    from solrl_lightning.shapes.captions import eval_captions, train_captions

    return [Record(caption) for caption in (train_captions() if split == "train" else eval_captions())]


def _compositional() -> list[Record]:
    with as_file(files("solrl_lightning") / "assets" / "prompts" / "compositional.jsonl") as path:
        return _read_json_lines(path)


def _pickapic(split: str) -> list[Record]:
    return [record for record in _read_hub(PICKAPIC, split, "caption") if record.text.count(" ") >= PICKAPIC_SPACES]


SOURCES: dict[str, Callable[[], list[Record]]] = {
    "shapes-train": lambda: _shapes("train"),
    "shapes-eval": lambda: _shapes("eval"),
    "compositional": _compositional,
    "pickapic-train": lambda: _pickapic("train"),
    "pickapic-test": lambda: _pickapic("test"),
}
"""Named sources by name, read when they are used."""


def read_records(source: str | Path, column: str) -> list[Record]:
    """All rows of a named source, of ``hf://owner/name/split``, or of a .txt, .jsonl or .parquet file.

    ``column`` names the prompts of a table, which is what data sets of the hub and parquet files are.
    """
    name = str(source)
    check_source(name)
    if name in SOURCES:
        return SOURCES[name]()
    if name.startswith(HUB):
        owner, dataset, split = name.removeprefix(HUB).split("/")
        return _read_hub(f"{owner}/{dataset}", split, column)
    path = Path(source)
    if path.suffix == ".parquet":
        return _read_parquet(path, column)
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    return [Record(line) for line in _read_lines(path)]


def check_source(source: str) -> None:
    """Raises UserError for anything but a named source, a data set of the hub or a prompt file. Reads nothing."""
    if source in SOURCES:
        return
    if source.startswith(HUB):
        parts = source.removeprefix(HUB).split("/")
        if len(parts) != 3 or not all(parts):
            raise UserError(f"a data set of the hub is written {HUB}<owner>/<name>/<split>; got {source}")
        return
    path = Path(source)
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        near = difflib.get_close_matches(source, SOURCES, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"prompts come from a file, a named source or {HUB}<owner>/<name>/<split>; the path {path} {problem} "
            f"(looked in {Path.cwd()}) and it is not one of the named sources: {', '.join(SOURCES)}{hint}"
        )
    if path.suffix.lower() in _TABLES:
        convert = _TABLES[path.suffix.lower()].format(path) + f".to_parquet('{path.with_suffix('.parquet')}')"
        raise UserError(
            f"the prompt file {path} is invalid: a table must be a .parquet file, other prompts .jsonl, or text with "
            "one a line. Convert it, and name its column with data.column=<name>: "
            f'python -c "import pandas as pd; {convert}"'
        )


def dataset_of(source: str) -> str | None:
    """The owner/name of a source on the hub; None for other sources."""
    if source.startswith(HUB):
        return source.removeprefix(HUB).rpartition("/")[0]
    return PICKAPIC if source.startswith("pickapic-") else None


# Files


def _read_lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the prompt file {path} cannot be read: {error.strerror}") from error
    text = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        # Only line ends end a prompt: str.splitlines would also cut at form feeds and other rare separators.
        return re.split(r"\r\n|\r|\n", text.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\r|\n", text[: error.start])) + 1
        offset = error.start + len(data) - len(text)
        raise UserError(
            f"a prompt file must be UTF-8; {path} has the byte 0x{data[offset]:02x} at offset {offset} (line {line}), "
            "which is not: save the file as UTF-8"
        ) from error


def _read_json_lines(path: Path) -> list[Record]:
    """One object a line in the layout of GenEval: "prompt", optionally "tag"; other keys are ignored."""
    numbered = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]
    return [_json_record(line, f"{path} line {number}") for number, line in numbered]


def _json_record(line: str, where: str) -> Record:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise UserError(f"every line of a .jsonl file must be a JSON object; {where} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"every line of a .jsonl file must be a JSON object; {where} is none ({error.msg} at character "
            f"{error.pos + 1}). Correct that line."
        ) from error
    if not isinstance(row, dict):
        raise UserError(f"every line of a .jsonl file must be a JSON object; {where} is {line.strip()[:60]}")
    prompt, tag = row.get("prompt"), row.get("tag")
    if not isinstance(prompt, str):
        raise UserError(
            f'every line of a .jsonl file must have a text under "prompt"; {where} has '
            f"{'no such key' if 'prompt' not in row else repr(prompt)} (its keys: {', '.join(row) or 'none'})"
        )
    if tag is not None and not isinstance(tag, str):
        raise UserError(f'the "tag" of a prompt must be a text; {where} has {tag!r}')
    return Record(prompt, tag)


def _read_parquet(path: Path, column: str) -> list[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow.names, column, str(path))
            texts = file.read(columns=[column]).column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as a parquet file: {sentence(error)} Write it again.") from error
    return _table_records(texts, column, str(path))


def _check_column(columns: list[str], column: str, name: str) -> None:
    if column not in columns:
        raise UserError(
            f"data.column must name the column with the prompts; {name} has no {column!r}, it has "
            f"{', '.join(columns)}. Choose one of them with data.column=<name>."
        )


def _table_records(values: list[Any], column: str, name: str) -> list[Record]:
    """Rows without a value become blank prompts, which ``prompts`` drops."""
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"the column that data.column names must hold texts; {column} of {name} holds {value!r} in row {row}. "
                "Choose another with data.column=<name>."
            )
    return [Record(value or "") for value in values]


# The hub


def _read_hub(dataset: str, split: str, column: str) -> list[Record]:
    import datasets

    name = f"{HUB}{dataset}/{split}"
    try:
        table = datasets.load_dataset(dataset, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        step = "Check owner and name. If it is private, log in with `hf auth login`."
        if "gated" in str(error):
            page = f"https://huggingface.co/datasets/{dataset}"
            step = f"Accept its terms on {page}, then log in with `hf auth login` or set HF_TOKEN."
        raise UserError(f"the data set {name} could not be had: {sentence(error)} {step}") from error
    except ConnectionError as error:
        raise UserError(
            f"the data set {name} is not on this machine yet and the hub cannot be reached: {sentence(error)} Check "
            f"the network and HF_HUB_OFFLINE. Or run `hf download --repo-type dataset {dataset} --local-dir {dataset}` "
            f"where there is a network, and copy the folder {dataset} to where you give the command."
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        # A missing split is a ValueError that lists those there.
        raise UserError(
            f"the data set {name} could not be read: {sentence(error)} It is written {HUB}<owner>/<name>/<split>."
        ) from error
    _check_column(table.column_names, column, name)
    return _table_records(table.data.column(column).to_pylist(), column, name)
