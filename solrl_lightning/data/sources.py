"""Reads prompt sources: text, JSON lines and tables, data sets of the Hugging Face hub, named sources.

A reader returns all rows of its source in order and unchanged; ``prompts`` filters them. Readers import libraries
locally, because ``datasets`` takes a second to import and files do not need it.
"""

import csv
import difflib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.formatting import shell_quoted
from solrl_lightning.artifacts.hub import check_fetched
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import UserError, did_you_mean, sentence
from solrl_lightning.policies.config_files import ASSETS

if TYPE_CHECKING:
    import pyarrow

HUB = "hf://"
GITHUB = "https://raw.githubusercontent.com"
# Repositories on GitHub, and data sets of the hub.
DANCE_GRPO, DIFFUSION_NFT, GENEVAL = "XueZeyue/DanceGRPO", "NVlabs/DiffusionNFT", "djghosh13/geneval"
HPDV2, PARTI, PICKAPIC = "zhwang/HPDv2", "nateraw/parti-prompts", "yuvalkirstain/pickapic_v1_no_images"
PICKAPIC_SPACES = 5  # the published filter: prompts of at least six words
HPDV2_STYLES = ("anime", "concept-art", "paintings", "photo")

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_TABLES = (".parquet", *_SEPARATORS)
_JSON, _JSON_LINES, _PROMPT = ".json", (".jsonl", ".ndjson"), "prompt"
_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_NEEDLESS_QUOTES = re.compile(r'(?<![^\t])"[^"\t]+"(?![^\t])')  # around a whole value without quotes and tabs
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(parquet|jsonl|csv)$")  # as the hub names one of several files of a split
_LINE_END = r"\r\n|\r|\n"
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")


def _shapes(split: str) -> list[Prompt]:
    from solrl_lightning.shapes.world import eval_captions, train_captions

    return [Prompt(caption) for caption in (train_captions() if split == "train" else eval_captions())]


def _pickapic(split: str) -> list[Prompt]:
    return [
        record
        for record in _read_hub(PICKAPIC, split, "caption", others={})
        if record.text.count(" ") >= PICKAPIC_SPACES
    ]


def _hpdv2(*styles: str) -> list[Prompt]:
    files = {style: _read_hub(HPDV2, "train", "text", f"benchmark/{style}.json", {}) for style in styles}
    return [Prompt(record.text, {"tag": style}) for style, records in files.items() for record in records]


# name -> reader of a named source
SOURCES: dict[str, Callable[[], list[Prompt]]] = {
    "shapes-train": lambda: _shapes("train"),
    "shapes-eval": lambda: _shapes("eval"),
    "compositional": lambda: _read_json_lines(ASSETS / "prompts" / "compositional.jsonl"),
    "pickapic-train": lambda: _pickapic("train"),
    "pickapic-test": lambda: _pickapic("test"),
    "pickscore-train": lambda: _read_github(DIFFUSION_NFT, "dataset/pickscore/train.txt"),
    "pickscore-test": lambda: _read_github(DIFFUSION_NFT, "dataset/pickscore/test.txt"),
    "geneval-train": lambda: _read_github(DIFFUSION_NFT, "dataset/geneval/train_metadata.jsonl"),
    "geneval-test": lambda: _read_github(GENEVAL, "prompts/evaluation_metadata.jsonl"),
    "ocr-train": lambda: _read_github(DIFFUSION_NFT, "dataset/ocr/train.txt"),
    "ocr-test": lambda: _read_github(DIFFUSION_NFT, "dataset/ocr/test.txt"),
    "drawbench": lambda: _read_github(DIFFUSION_NFT, "dataset/drawbench/test.txt"),
    "partiprompts": lambda: _read_hub(PARTI, "train", "Prompt", others={"Category": "tag"}),
    "hpdv2-train": lambda: _read_github(DANCE_GRPO, "assets/prompts.txt"),
    "hpdv2": lambda: _hpdv2(*HPDV2_STYLES),
    **{f"hpdv2-{style}": partial(_hpdv2, style) for style in HPDV2_STYLES},
}
_DATASETS = {"pickapic-train": PICKAPIC, "pickapic-test": PICKAPIC, "partiprompts": PARTI, "hpdv2": HPDV2} | {
    f"hpdv2-{style}": HPDV2 for style in HPDV2_STYLES
}


def read_records(source: str | Path, column: str) -> list[Prompt]:
    """Return all rows of a named source, of ``hf://owner/name/split``, or of a text file or table.

    ``column`` is the column with the prompts in data sets of the hub and in tables, and their key in .jsonl files.
    Others ignore it.

    Raises:
        UserError: the source does not exist, cannot be read, or has another format.
    """
    name = str(source)
    check_source(name)
    if name in SOURCES:
        return SOURCES[name]()
    if name.startswith(HUB):
        owner, dataset, split = name.removeprefix(HUB).split("/")
        return _read_hub(f"{owner}/{dataset}", split, column)
    path, suffix = Path(source), Path(source).suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, column)
    if suffix == _JSON:
        return _read_json(path, column)
    if suffix in _SEPARATORS:
        return _read_separated(path, column, _SEPARATORS[suffix])
    return _read_text(path, suffix, column)


def check_text(text: str, place: str) -> None:
    """Raise UserError for characters that no tokenizer takes: NUL, and half of a surrogate pair."""
    wrong = _NO_TEXT.search(text)
    if wrong:
        raise UserError(
            f"{place} is invalid: a prompt must be text, and this one has the character U+{ord(wrong[0]):04X} after "
            f"{text[: wrong.start()][-40:]!r}. Remove that character."
        )


def file_of_split(source: str, split: str) -> str:
    """Return ``<split>.jsonl`` or ``<split>.txt`` of a source that is a folder with it, as Flow-Factory's; else
    ``source``.
    """
    if not source or source in SOURCES:
        return source
    names = [f"{split}{suffix}" for suffix in (".jsonl", ".txt")]
    files = {file.name.lower(): file for file in sorted(Path(source).glob("*")) if file.is_file()}
    return next((str(files[name]) for name in names if name in files), source)


def check_source(source: str) -> None:
    """Raise UserError unless ``source`` names a named source, a data set of the hub or a file. Reads no prompts."""
    path = Path(source)
    if source in SOURCES or re.fullmatch(rf"{HUB}[^/]+/[^/]+/[^/]+", source):
        return
    if not path.is_file():
        raise UserError(
            f"the prompt source {shell_quoted(source)} is invalid: it must be a file, {HUB}<owner>/<name>/<split> or a "
            f"named source ({', '.join(SOURCES)}), or, for data.train and data.eval, a folder with train.jsonl or "
            f"train.txt, and test.jsonl or test.txt; in {Path.cwd()} it is none."
            f"{did_you_mean(difflib.get_close_matches(source, SOURCES, n=1, cutoff=0.7))} {_file_of(path)}"
        )
    endings = (".txt", *_TABLES, *_JSON_LINES, _JSON)
    if path.suffix.lower() not in ("", *endings):
        raise UserError(
            f"the prompt file {path} is invalid: its name must end in {', '.join(endings)}, or have no "
            f"ending. {_renamed(path)}"
        )


def _renamed(path: Path) -> str:
    """Return how to get a file with a known ending from one with another."""
    file, text = (shell_quoted(str(path.with_suffix(suffix))) for suffix in (path.suffix, ".txt"))
    if path.suffix.lower() == ".gz":
        return f"Unpack it: gunzip -k {file}"
    with open(path, "rb") as content:
        if b"\0" in content.read(4096):  # no text, as an archive or a spreadsheet
            return "Save its prompts in such a file."
    return f"If each line of it is a prompt, give it another name: cp {file} {text}"


def _file_of(folder: Path) -> str:
    """Return how to get a file of prompts from a folder of texts, of ``datasets``, or of files of prompts."""
    source, files = str(folder), sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")])
    of_pictures = {file.parent for file in files if file.suffix.lower() in _PICTURES}  # with a caption for each
    texts_of = {place: {file.name for file in place.glob("[!.]*.txt")} for place in (folder, *sorted(of_pictures))}
    of_texts = [place for place, names in texts_of.items() if len(names - {"train.txt", "test.txt"}) > 1]
    if of_texts:
        source = str(of_texts[0])
        texts = (
            f"(' '.join(file.read_text('utf-8-sig').split()) for file in sorted(Path({source!r}).glob('[!.]*.txt')))"
        )
        code = f"from pathlib import Path; Path({source + '.txt'!r}).write_text(chr(10).join{texts}, 'utf-8')"
        return f"Where each text in it is a prompt, run python -c {shell_quoted(code)} and name {source}.txt."
    saved = [str(file.parent) for file in files if file.name == "state.json"]  # by save_to_disk
    if len(saved) == 1:
        code = f"import datasets; datasets.load_from_disk({saved[0]!r}).to_parquet({source + '.parquet'!r})"
        return f"Run python -c {shell_quoted(code)} and name {source}.parquet."
    if saved or any(_SHARD.search(file.name) for file in files):
        names = "split" if saved else "name + '.' + split"
        read = f"datasets.load_from_disk({source!r})" if saved else f"datasets.load_dataset({source!r}, name)"
        each = "" if saved else f"for name in datasets.get_dataset_config_names({source!r}) "
        write = f"rows.to_parquet({source + '.'!r} + {names} + '.parquet')"
        code = shell_quoted(f"import datasets; [{write} {each}for split, rows in {read}.items()]")
        file = f"{source}.{'' if saved else '<configuration>.'}<split>.parquet"
        return f"Run python -c {code} and name {file}, of the files that it writes."
    named = [str(file) for file in files if file.suffix.lower() in (".txt", _JSON, *_TABLES, *_JSON_LINES)]
    such = f", such as {named[0]}" if named else ""
    return f"Name a file of prompts{such}{f', one of {len(named)} there' if len(named) > 1 else ''}."


def dataset_of(source: str) -> str | None:
    """Return owner/name of the data set of the hub that a source reads; None for other sources."""
    if source.startswith(HUB):
        return source.removeprefix(HUB).rpartition("/")[0]
    return _DATASETS.get(source)


# Files


def _read_text(path: Path, suffix: str, column: str = _PROMPT) -> list[Prompt]:
    if suffix.lower() in _JSON_LINES:
        return _read_json_lines(path, column)
    lines = _read_lines(path)
    for number, line in enumerate(lines, 1):
        check_text(line, f"{path} line {number}")
    prompts = [line for line in lines if line.strip()]
    if prompts and not any(isinstance(_json_records(line, _PROMPT), str) for line in prompts):
        raise UserError(
            f"the prompt file {path} is invalid: each line of a text file is a prompt, and these are JSON objects. "
            f"Name it as a .jsonl file: mv {shell_quoted(str(path))} "
            f"{shell_quoted(str(path.with_suffix('.jsonl')))}"
        )
    return [Prompt(line) for line in lines]


def _read_lines(path: Path) -> list[str]:
    # str.splitlines would also split at form feeds and other separators that are not line ends.
    lines = re.split(_LINE_END, _read_utf8(path))
    return [line.removeprefix("\ufeff") for line in lines]  # the byte order mark of a file that `cat` has appended


def _read_utf8(path: Path) -> str:
    check_fetched(path, f"the prompt file {path} is invalid")
    data = path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # byte order mark
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\r|\n", data[: error.start])) + 1
        raise UserError(
            f"the prompt file {path} is invalid: it must be UTF-8, and has the byte 0x{data[error.start]:02x} at "
            f"offset {error.start} (line {line}). Save the file as UTF-8."
        ) from error


def _read_json_lines(path: Path, column: str = _PROMPT) -> list[Prompt]:
    """Read a file with one JSON object a line, in GenEval's layout: "prompt", and metadata under other keys."""
    records = []
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            records += _valid(_json_records(line, column), path, "line", number)
    return records


def _valid(records: list[Prompt] | str, path: Path, kind: str, number: int) -> list[Prompt]:
    """Return the records of a line or row. Raises UserError for a rule that it breaks, and as ``check_text``."""
    place = f"{path} {kind} {number}"
    if isinstance(records, str):
        raise UserError(f"{place} is invalid: {records}. Correct that {kind}.")
    for record in records:
        for text in (record.text, json.dumps(record.metadata, ensure_ascii=False)):
            check_text(text, place)
    return records


def _read_json(path: Path, column: str) -> list[Prompt]:
    """Read a file with all rows in one JSON value, or with one JSON object a line."""
    named = f"the prompt file {path} is invalid"
    try:
        content = json.loads(_read_utf8(path), object_pairs_hook=_object)
    except (json.JSONDecodeError, RecursionError):
        return _read_json_lines(path, column)
    except ValueError as error:
        raise UserError(f"{named}: {sentence(error)} Correct it.") from error
    rows = _rows(content, column)
    if rows is None:
        keys = f"an object with the keys {', '.join(content)}" if isinstance(content, dict) else repr(content)[:60]
        raise UserError(
            f"{named}: it must be a list of objects or of texts, one of them for each id, or a table by columns, one "
            f"of which data.column={column} names; it is {keys}. Write its rows alone, as a list."
        )
    records = []
    for number, row in enumerate(rows, 1):
        of_row = [Prompt(row)] if isinstance(row, str) else _json_records(json.dumps(row), column)
        records += _valid(of_row, path, "row", number)
    return records


def _rows(content: Any, column: str) -> list[Any] | None:
    """Return the rows in a JSON value: a list, rows by id, one object, or a table by columns, as pandas writes it."""
    if isinstance(content, dict) and column in content:
        ids, columns = content[column], list(content.values())
        if all(isinstance(each, dict) and each.keys() == ids.keys() for each in (ids, *columns)):
            columns = [[values[row] for row in ids] for values in columns]  # which may be in another order
        is_table = all(isinstance(values, list) and len(values) == len(columns[0]) for values in columns)
        if not is_table:
            return [content]
        return [dict(zip(content, values, strict=True)) for values in zip(*columns, strict=True)]
    rows = [*content.values()] if isinstance(content, dict) else content
    kinds = dict if isinstance(content, dict) and not all(map(str.isdigit, content)) else dict | str
    return rows if isinstance(rows, list) and all(isinstance(row, kinds) for row in rows) else None


def _json_records(line: str, column: str) -> list[Prompt] | str:
    """Return the record of a line, or of each of its prompts, or the rule that the line breaks."""
    rule = "every line of a .jsonl file must be a JSON object"
    try:
        row = json.loads(line, object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        return f"{rule}, and this one is nested too deeply"
    except json.JSONDecodeError as error:
        return f"{rule} ({error.msg.removesuffix(' at')} at character {error.pos + 1})"
    except ValueError as error:
        return f"{rule}: {sentence(error).rstrip('.')}"
    if not isinstance(row, dict):
        return f"{rule}; got {line.strip()[:60]}"
    texts, tag = _texts(row.get(column)), row.get("tag")
    if texts is None:
        keys = f"its keys: {', '.join(row)}; data.column=<key> takes another" if row else "it has none"
        value = f"no such key ({keys})" if column not in row else repr(row[column])
        rule = "each row must have a string, or a list of them, under"
        return f'{rule} "{column}", the key that data.column names; this one has {value}'
    if tag is not None and not isinstance(tag, str):
        return f'the "tag" of a prompt must be a string; got {tag!r}'
    metadata = _present({key: value for key, value in row.items() if key != column})
    return [Prompt(text, metadata) for text in texts]


def _texts(value: Any) -> list[str] | None:
    """Return the prompts in a row: one, or several, as captions of one image are written; None for other values."""
    texts = value if isinstance(value, list) else [value]
    return texts if all(isinstance(text, str) for text in texts) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {repeated!r} twice")
    return row


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number, and servers of rewards would refuse it")
    return value


def _read_separated(path: Path, column: str, separator: str) -> list[Prompt]:
    """Read a table by RFC 4180, whose quotes begin only at the start of a value; one of a .tsv file ends on its line.

    The last rule finds a quotation mark of a prompt that would open a value up to the next one, lines below.
    """
    text = _read_utf8(path)
    heading, *rest = re.split(_LINE_END, text, maxsplit=1)
    hint, before = re.fullmatch('"?sep=(.)"?', heading, re.IGNORECASE), 0  # a line for spreadsheets
    if hint:
        separator, text, before = hint[1], "".join(rest), 1
    elif separator not in heading:  # a spreadsheet writes semicolons where the comma is the decimal mark
        separator = next((mark for mark in ";\t|" if mark in heading), separator)
    if separator == "\t":
        _check_needless_quotes(text, path)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a picture in base64 exceeds the default
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    records: list[Prompt] = []
    line = 1 + before  # on which the row begins
    try:
        names = [name.strip() for name in next(rows, [])]
        _check_column(names, column, str(path), _name_columns(path, names, column, separator))
        place = names.index(column)
        line = rows.line_num + 1 + before
        lacking = ", or write the name that line 1 lacks, as of R's row names (or write.table with row.names=FALSE)"
        for row in rows:
            if row and len(row) != len(names):
                raise UserError(
                    f"{path} line {line} is invalid: a row must have a value for each of the {len(names)} "
                    f"columns, and this one has {len(row)} values. Put a value that contains {separator!r} in double "
                    f"quotes, without a blank before them{lacking if len(row) > len(names) else ''}."
                )
            if separator == "\t" and rows.line_num + before > line:
                raise csv.Error("the value continues on the next line, which only values of a .csv file may")
            for value in row[place : place + 1]:
                check_text(value, f"{path} line {line}")
                others = {key: other for key, other in zip(names, row, strict=True) if key != column}
                # An index that pandas has written has no name.
                records.append(Prompt(value, {key: other for key, other in others.items() if key and other}))
            line = rows.line_num + 1 + before
    except csv.Error as error:
        raise UserError(
            f"{path} line {line} is invalid: {error}. A value that begins with a double quote must end with one, and "
            'each between them is doubled, as in """OPEN"" sign". Correct that line.'
        ) from error
    return records


def _name_columns(path: Path, first: list[str], column: str, separator: str) -> str:
    """Return a command that puts names above the ``first`` row: ``column``, or column1, column2, ..."""
    names = separator.join([column] if len(first) == 1 else [f"column{n}" for n, _ in enumerate(first, 1)])
    code = f"file = Path({str(path)!r}); file.write_text({names!r} + chr(10) + file.read_text('utf-8-sig'), 'utf-8')"
    return f", or, if line 1 is no names, put some above: python -c {shell_quoted(f'from pathlib import Path; {code}')}"


def _check_needless_quotes(text: str, path: Path) -> None:
    """Raise UserError for a value of a .tsv file in quotes that it does not need, unless the names have them, too.

    The registration of text/tab-separated-values at IANA has no quoting, so there they are part of the value. Programs
    with quoting, as pandas and spreadsheets, write them only where a value needs them, or in all lines.
    """
    names, *lines = re.split(_LINE_END, text)
    for number, line in enumerate(lines, 2):
        if (value := _NEEDLESS_QUOTES.search(line)) and not _NEEDLESS_QUOTES.search(names):
            raise UserError(
                f"{path} line {number} is invalid: the quotes of {value[0]} are part of the value for some programs, "
                f'and not for others. Write ""{value[0]}"" to keep them, or the value without them.'
            )


def _read_parquet(path: Path, column: str) -> list[Prompt]:
    from pyarrow import parquet

    with reading(f"the prompt file {path} is invalid: it must be a parquet file"):
        check_fetched(path, f"the prompt file {path} is invalid")
        table = parquet.ParquetFile(path)
        schema = table.schema_arrow
        _check_column(schema.names, column, str(path))
        read = table.read([field.name for field in schema if field.name == column or _is_json(field.type)])
    return _table_records(read, column, str(path))


def _check_column(columns: list[str], column: str, name: str, other_fix: str = "") -> None:
    """Raise UserError unless ``column`` is one of the ``columns``, no two of which have one name; one may have none."""
    if column not in columns or any(each and count > 1 for each, count in Counter(columns).items()):
        raise UserError(
            f"data.column={column} is invalid: it must name the column with the prompts, and no two columns may have "
            f"one name; the columns of {name} are {', '.join(columns) or 'none'}. Set data.column=<name>, rename a "
            f"column{other_fix or '.'}"
        )


def _is_json(kind: "pyarrow.DataType") -> bool:
    """Return whether JSON has the values of a column, as metadata must be: not bytes of images, and no times."""
    from pyarrow import JsonType, types

    if types.is_struct(kind):
        return all(_is_json(kind.field(place).type) for place in range(kind.num_fields))
    if hasattr(kind, "value_type"):  # of a list or a dictionary
        return _is_json(kind.value_type)
    texts = types.is_string, types.is_large_string, types.is_string_view
    others = types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_null
    is_scalar = any(is_kind(kind) for is_kind in (*texts, *others))
    return is_scalar or isinstance(kind, JsonType)


def _present(value: Any, kind: "pyarrow.DataType | None" = None) -> Any:
    """Return a value, of a table's column of a type, without the missing ones in it; None for a missing one, as NaN.

    An empty text under a key is missing, too: pandas and datasets write a blank cell so.
    """
    if getattr(kind, "extension_name", "") == "arrow.json" and value is not None:  # rows of which differ in their keys
        value, kind = json.loads(value), None
    if isinstance(value, dict):
        values = ((key, _present(each, kind and kind.field(key).type)) for key, each in value.items())
        return {key: each for key, each in values if each not in (None, "")}
    if isinstance(value, list):
        return [_present(each, kind and kind.value_type) for each in value]
    if isinstance(value, Decimal):  # of a column of databases
        return float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_records(table: "pyarrow.Table", column: str, name: str) -> list[Prompt]:
    """Return the records of a table. A row without a value in ``column`` is a blank prompt, which ``prompts`` drops."""
    import pyarrow

    others = table.select([field.name for field in table.schema if field.name != column and _is_json(field.type)])
    kind, kinds = table.field(column).type, pyarrow.struct(others.schema)
    with reading(f"the prompt file {name} is invalid", fix="Write its texts in UTF-8, and JSON in columns of JSON."):
        prompts = [_present(value, kind) for value in table.column(column).to_pylist()]
        rows = [_present(row, kinds) for row in others.to_pylist()]
    records = []
    for row, (value, metadata) in enumerate(zip(prompts, rows, strict=True)):
        texts, tag = _texts("" if value is None else value), metadata.get("tag")
        if texts is None or not isinstance(tag, str | None):
            key, text = (column, value) if texts is None else ("tag", tag)
            raise UserError(
                f"{name} row {row} is invalid: the column {key} must hold strings; got {text!r}. Rename it, or "
                "write it with strings; data.column=<name> reads the prompts from another column."
            )
        for text in texts:
            check_text(text, f"{name} row {row}")
            records.append(Prompt(text, metadata))
    return records


# The hub


def _read_hub(
    dataset: str, split: str, column: str, file: str | None = None, others: Mapping[str, str] | None = None
) -> list[Prompt]:
    """Read a split of a data set, or one of its files.

    ``others`` maps columns to keys of the metadata; by default each column but ``column`` keeps its name.
    """
    import datasets

    name = f"{HUB}{dataset}/{split}"
    try:
        table = datasets.load_dataset(dataset, data_files=file, split=split)
    except ConnectionError as error:
        raise UserError(
            f"the data set {name} is not on this machine and the hub cannot be reached: {sentence(error)} Check the "
            f"network and HF_HUB_OFFLINE. Or run `hf download --repo-type dataset {dataset} --local-dir {dataset}` "
            f"where there is a network, and copy the folder {dataset} into the working directory."
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        load = f"datasets.load_dataset({dataset!r}, '<configuration>', split='<split>')"
        code = f"import datasets; {load}.to_parquet('prompts.parquet')"
        raise UserError(
            f"the data set {name} cannot be read: {reason}. Name a split that it has. For a gated or private one, "
            f"accept its terms on https://huggingface.co/datasets/{dataset}, and log in: hf auth login. Of one with "
            f"several configurations, run python -c {shell_quoted(code)} and name that file; of any other, write the "
            "prompts to a text file, one a line, and name that."
        ) from error
    _check_column(table.column_names, column, name)
    if others is not None:
        table = table.select_columns([column, *others]).rename_columns(dict(others))
    return _table_records(table.data.table, column, name)


def _read_github(repository: str, file: str) -> list[Prompt]:
    return _read_text(github_file(repository, file), Path(file).suffix)


def github_file(repository: str, file: str) -> Path:
    """Return the path of a file in the folder ``repository`` of the working directory or, downloaded, on GitHub."""
    import datasets

    path, url = Path(repository, file), f"{GITHUB}/{repository}/main/{file}"
    if path.is_file():
        return path
    # Without etag a file in the cache needs no network.
    manager = datasets.DownloadManager(download_config=datasets.DownloadConfig(use_etag=False))
    try:
        return Path(manager.download(url))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{url} cannot be downloaded: {sentence(error.__cause__ or error)} Check the network and "
            f"HF_HUB_OFFLINE. Or run `git clone https://github.com/{repository} {repository}` where there is a "
            f"network, and copy the folder {repository} into the working directory."
        ) from error
