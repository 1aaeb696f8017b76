"""Reads every kind of source with the real libraries. Local folders hold the data sets of the hub."""

import json
import shlex
import shutil
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import numpy
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet
from take_away import POINTER

from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.data.prompts import read_prompts
from solrl_lightning.data.sources import (
    DIFFUSION_NFT,
    GENEVAL,
    HPDV2,
    HPDV2_STYLES,
    PARTI,
    PICKAPIC,
    SOURCES,
    dataset_of,
    file_of_split,
    read_records,
)
from solrl_lightning.errors import UserError


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_table(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


# Files


def test_json_lines_in_the_layout_of_geneval_give_prompts_and_metadata(tmp_path: Path) -> None:
    metadata = {"tag": "counting", "include": [{"class": "owl", "count": 3}]}
    row = json.dumps(metadata | {"prompt": "three owls – drei Käuze"}, ensure_ascii=False)
    path = write(tmp_path / "prompts.jsonl", row, "", '{"prompt": "fog", "seed": 3, "tag": "", "texts": ["", "a"]}')
    records = [Prompt("three owls – drei Käuze", metadata), Prompt("fog", {"seed": 3, "texts": ["", "a"]})]
    assert read_records(path, "prompt") == records
    assert read_records(write(tmp_path / "a.jsonl", '{"caption": "fog", "prompt": "x"}'), "caption") == [
        Prompt("fog", {"prompt": "x"})
    ]


def test_folder_of_flow_factory_has_a_file_for_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = write(tmp_path / "mine/train.jsonl", '{"prompt": "a cat"}'), write(tmp_path / "mine/test.txt", "fog")
    write(tmp_path / "mine/train.txt", "an owl")  # .jsonl comes first there
    assert file_of_split(str(tmp_path / "mine"), "train") == str(train)
    assert file_of_split(str(tmp_path / "mine"), "test") == str(test)
    monkeypatch.chdir(tmp_path / "mine")
    for source in ("", "compositional", "train.txt", "hf://owner/name/train", str(tmp_path)):
        assert file_of_split(source, "train") == source


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a cat"', r"must be a JSON object \(Expecting ',' delimiter at character 19\)"),
        (
            '{"caption": "a cat", "tag": "x"}',
            r"data.column names; this one has no such key \(its keys: caption, tag; data.column=<key> takes another\)",
        ),
        ('{"prompt": "a cat", "tag": "x", "tag": "y"}', "it has the key 'tag' twice"),
        ('{"prompt": "a cat", "score": NaN}', "NaN is no finite number"),
        ('{"prompt": "a cat", "of": [{"score": -1e999}]}', "-1e999 is no finite number"),
        ('{"prompt": "a cat", "tag": 7}', 'the "tag" of a prompt must be a string; got 7'),
    ],
)
def test_error_about_a_malformed_json_line_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=f"prompts.jsonl line 2 is invalid: .*{message}"):
        read_records(write(tmp_path / "prompts.jsonl", '{"prompt": "a dog"}', line), "prompt")


def test_prompts_in_a_column_of_json_are_its_texts(tmp_path: Path) -> None:
    """As DuckDB writes the texts of a JSON column, and fastparquet those of objects."""
    source = ['"a \\"red\\" caf\\u00e9"', None, '"fog"', '["rain", "a \\ud83d\\udc31"]', '""']
    columns = {
        "prompt": pyarrow.array(source, pyarrow.json_()),
        "tag": pyarrow.array(['"a"', *4 * ['"b"']], pyarrow.json_()),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    rows = [row for row in read_records(str(tmp_path / "a.parquet"), "prompt") if row.text]
    assert [(row.text, row.metadata["tag"]) for row in rows] == [
        ('a "red" caf\u00e9', "a"),
        ("fog", "b"),
        ("rain", "b"),
        ("a \U0001f431", "b"),
    ]
    parquet.write_table(
        pyarrow.table({"prompt": pyarrow.array(['{"text": "fog"}'], pyarrow.json_())}), tmp_path / "b.parquet"
    )
    with pytest.raises(UserError, match="row 0 is invalid: the column prompt must hold strings; got {'text': 'fog'}"):
        read_records(str(tmp_path / "b.parquet"), "prompt")


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (b"caf\xe9", pyarrow.string(), "UnicodeDecodeError: .*byte 0xe9"),
        (b"\xed\xa0\xbd", pyarrow.large_string(), "UnicodeDecodeError: .*byte 0xed"),
        (b"{fog", pyarrow.json_(), "JSONDecodeError: Expecting property name"),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "of"])
def test_text_of_a_table_that_cannot_be_decoded_is_an_error(
    tmp_path: Path, content: bytes, kind: pyarrow.DataType, reason: str, column: str
) -> None:
    """As programs in C++, Rust and Java can write it."""
    width = numpy.int64 if kind == pyarrow.large_string() else numpy.int32
    offsets = pyarrow.py_buffer(numpy.array([0, len(content)], width).tobytes())
    storage = getattr(kind, "storage_type", kind)
    wrong = pyarrow.Array.from_buffers(storage, 1, [None, offsets, pyarrow.py_buffer(content)])
    wrong = wrong if storage is kind else pyarrow.ExtensionArray.from_storage(kind, wrong)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "of": ["b"]} | {column: wrong}), tmp_path / "a.parquet")
    rule = f"the prompt file {tmp_path}/a.parquet is invalid: .*{reason}.*[.] Write its texts in UTF-8, and JSON in"
    with pytest.raises(UserError, match=rule):
        read_records(str(tmp_path / "a.parquet"), "prompt")


def test_parquet_file_gives_the_column_and_rows_without_text_are_dropped(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", caption=["a cat", None, "", "a dog", "A cat"], votes=[1, 2, 3, 4, 5])
    assert identities(read_prompts(path, "caption")) == ["a cat", "a dog"]
    message = r"data.column=prompt is invalid: .* of .*a.parquet are caption, votes\. Set data.column=<name>"
    with pytest.raises(UserError, match=message):
        read_prompts(path)
    with pytest.raises(UserError, match="a.parquet row 0 is invalid: the column votes must hold strings; got 1"):
        read_prompts(path, "votes")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="it must be a parquet file: .* Parquet magic"):
        read_records(path, "caption")


def test_the_other_columns_of_a_table_are_metadata_as_the_keys_of_json_lines(tmp_path: Path) -> None:
    include = [{"class": "owl", "count": 3}, {"class": "cat", "color": "red"}]  # arrow fills the keys that one lacks
    rows = [{"prompt": "fog", "tag": "mood", "include": include, "weight": 0.5}, {"prompt": "rain", "seed": 3}]
    rows[0]["box"] = [0, 1]
    lines = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
    names = ("prompt", "tag", "include", "weight", "seed", "box")
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    columns["image"] = [{"bytes": b"x", "path": None}] * 2
    columns |= {"day": [datetime(2026, 1, 1)] * 2, "score": [float("nan")] * 2, "style": pyarrow.array(["oil", None])}
    columns["style"] = columns["style"].dictionary_encode()
    columns["box"] = pyarrow.array(columns["box"], pyarrow.list_(pyarrow.int8(), 2))
    columns["weight"] = [Decimal("0.50"), None]
    first, second = read_records(lines, "prompt")
    of_style = [Prompt(first.text, {**first.metadata, "style": "oil"}), second]
    assert read_records(write_table(tmp_path / "a.parquet", **columns), "prompt") == of_style
    table = write(tmp_path / "a.csv", ",tag, prompt,seed", "0,mood,fog,", "1,,rain,3")
    assert read_records(table, "prompt") == [Prompt("fog", {"tag": "mood"}), Prompt("rain", {"seed": "3"})]
    with pytest.raises(UserError, match="a.parquet row 1 is invalid: the column tag must hold strings; got 2. Rename"):
        read_records(write_table(tmp_path / "a.parquet", prompt=["a", "b"], tag=[None, 2]), "prompt")


def test_each_text_of_a_list_is_a_prompt(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.parquet", prompt=[["a cat", "a dog"], [], None], tag=["x", "y", "z"])
    expected = [Prompt("a cat", {"tag": "x"}), Prompt("a dog", {"tag": "x"}), Prompt("", {"tag": "z"})]
    assert read_records(table, "prompt") == expected
    rows = '{"prompt": ["a cat", "a dog"], "tag": "x"}', '{"prompt": "", "tag": "z"}'
    assert read_records(write(tmp_path / "a.jsonl", *rows), "prompt") == expected
    with pytest.raises(UserError, match="a.jsonl line 1 is invalid: .* or a list of them, under .* has \\['a', 1\\]"):
        read_records(write(tmp_path / "a.jsonl", '{"prompt": ["a", 1]}'), "prompt")
    with pytest.raises(UserError, match="row 0 is invalid: the column prompt must hold strings; got \\[1\\]"):
        read_records(write_table(tmp_path / "b.parquet", prompt=[[1]]), "prompt")


@pytest.mark.parametrize("end", ["\n", "\r"], ids=["LF", "CR"])
@pytest.mark.parametrize("hint", ["", "sep={}"])
@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.TSV", "\t"), ("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|")]
)
def test_csv_and_tsv_files_give_the_column(tmp_path: Path, name: str, separator: str, hint: str, end: str) -> None:
    rows = [
        ("tag", "prompt"),
        ("1", '"one, two"'),
        ("b", ""),
        ("c", '"a ""quoted"" word"'),
        ("d", "NA"),
        ("e", '12" of "snow"'),
    ]
    path = tmp_path / name
    if separator == "\t":
        rows = [("tag", '"prompt"'), *rows[1:]]  # then other values may have quotes that they do not need
    lines = [hint.format(separator)] * bool(hint) + [separator.join(row) for row in rows]
    path.write_text("".join(f"{line}{end}" for line in lines), encoding="utf-8-sig", newline="")
    assert identities(read_prompts(path)) == ["one, two", 'a "quoted" word', "NA", '12" of "snow"']
    assert identities(read_prompts(path, "tag")) == ["1", "b", "c", "d", "e"]


def test_quotes_of_a_tsv_file_that_some_programs_keep_are_an_error(tmp_path: Path) -> None:
    lines = ["prompt\ttag", '"""OPEN"" sign"\t""', '"a\tb"\tx', 'two "cats"\t"STOP"']
    with pytest.raises(UserError, match='line 4 is invalid: the quotes of "STOP" .* Write """STOP""" to keep them'):
        read_records(write(tmp_path / "a.tsv", *lines), "tag")
    lines[3] = lines[3].replace('"STOP"', '"""STOP"""')
    assert [each.text for each in read_records(write(tmp_path / "a.tsv", *lines), "tag")] == ["", "x", '"STOP"']


def test_value_of_a_csv_file_may_be_long_and_have_several_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "tag,prompt", 'x,"one', 'and two"', f"{'y' * 200_000},three")
    assert [record.text for record in read_records(path, "prompt")] == ["one\nand two", "three"]


@pytest.mark.parametrize(
    ("name", "lines", "number"),
    [
        ("a.csv", ['"OPEN" sign', "fog"], 2),
        ("a.tsv", ["fog", '"OPEN" sign'], 3),
        ("a.csv", ['"two', 'lines"', '"OPEN" sign'], 4),
        ("a.csv", ["fog", '"unclosed', "snow", "rain"], 3),
        ("a.tsv", ["fog", '"unclosed', "snow", 'rain"', "owls"], 3),
    ],
)
def test_malformed_quotes_are_an_error(tmp_path: Path, name: str, lines: list[str], number: int) -> None:
    with pytest.raises(UserError, match=rf"{name} line {number} is invalid: .* doubled, as in "):
        read_records(write(tmp_path / name, "prompt", *lines), "prompt")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
@pytest.mark.parametrize(
    ("pointer", "program", "command"),
    [(POINTER, "git-lfs", "git lfs pull"), (b"/annex/objects/SHA256E-s72--56f8.txt\n", "git-annex", "git annex get .")],
)
def test_pointer_to_a_file_is_an_error(tmp_path: Path, name: str, pointer: bytes, program: str, command: str) -> None:
    (tmp_path / name).write_bytes(pointer)
    with pytest.raises(UserError, match=f"{name} is invalid: .*{name} is a pointer of {program}, .* Run {command}"):
        read_records(tmp_path / name, "prompt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt\n\na cat,2\n", "a.csv line 3 is invalid: a row must have .* 1 columns, and this one has 2 values"),
        (
            b"tag,prompt\na\n",
            "a.csv line 2 is invalid: a row must have .* 2 columns, and this one has 1 values.*them\\.$",
        ),
        (b'"prompt"\n"1","a"\n', "this one has 2 values. .* or write the name that line 1 lacks, as of R's row names"),
        ("prompt\nein grüner Stern\n".encode("latin-1"), "it must be UTF-8, and has the byte 0xfc at offset 13"),
        (b"", "data.column=prompt is invalid: .* the columns of .*a.csv are none"),
        (b"prompt,x,,,x\na,1,,,2\n", "no two columns may have one name; the columns of .*a.csv are prompt, x, , , x"),
    ],
)
def test_malformed_csv_file_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "a.csv")


def follow(error: pytest.ExceptionInfo[UserError]) -> None:
    """Run the command of a message."""
    arguments = shlex.split(str(error.value).partition(" python ")[2])
    exec(arguments[arguments.index("-c") + 1])


@pytest.mark.parametrize(("name", "row"), [("a.csv", "{}"), ("b's.csv", '"{}, two"'), ("a.tsv", "1\t{}")])
def test_a_table_without_names_gets_them_and_keeps_every_prompt(tmp_path: Path, name: str, row: str) -> None:
    file = write(tmp_path / name, "\ufeff" + row.format("grüner Stern"), row.format("fog"))
    with pytest.raises(UserError, match="or, if line 1 is no names, put some above: python") as error:
        read_records(file, "prompt")
    follow(error)
    records = read_records(file, "column2" if name.endswith(".tsv") else "prompt")
    assert [record.text.removesuffix(", two") for record in records] == ["grüner Stern", "fog"]


def test_error_about_a_folder_has_the_command_for_a_file_of_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("texts/1.txt"), "\ufeffa cat", "on a mat")
    write(Path("texts/2.txt"), "fog")
    shutil.copytree("texts", "kohya/10_sks circle")
    Path("kohya/10_sks circle/1.png").touch()
    rows = datasets.Dataset.from_dict({"prompt": ["a cat on a mat", "fog"]})
    rows.save_to_disk("one")
    datasets.DatasetDict(test=rows.select([1]), train=rows).save_to_disk("two")
    for shard in range(2):
        rows.select([shard]).to_parquet(f"shards/data/train-0000{shard}-of-00002.parquet")
        rows.select([shard]).to_parquet(f"parts/en/train-0000{shard}-of-00002.parquet")
        rows.select([1 - shard]).to_parquet(f"parts/de/train-0000{shard}-of-00002.parquet")
    configurations = [{"config_name": name, "data_files": f"{name}/*"} for name in ("en", "de")]
    write(Path("parts/README.md"), "---", f"configs: {json.dumps(configurations)}", "---")
    splits = {"two": "<split>.parquet"} | dict.fromkeys(["shards", "parts"], "<configuration>.<split>.parquet")
    for folder, ending in {"texts": "txt", "kohya": "txt", "one": "parquet", **splits}.items():
        file = f"{folder if folder != 'kohya' else 'kohya/10_sks circle'}.{ending}"
        with pytest.raises(UserError, match=f"the prompt source {folder} is invalid: .* and name {file}") as error:
            read_prompts(folder)
        follow(error)
        file = file.replace("<split>", "train").replace("<configuration>", "en" if folder == "parts" else "default")
        assert identities(read_prompts(file)) == ["a cat on a mat", "fog"]
    write_table(Path("owner/name/data/train.parquet"), prompt=["fog"])
    with pytest.raises(UserError, match="Name a file of prompts, such as owner/name/data/train.parquet"):
        read_prompts("owner/name")


def test_key_without_any_value_leaves_the_others_of_its_structure(tmp_path: Path) -> None:
    of = [{"answer": "green", "style": None, "tags": []}, {"answer": "cyan", "style": None, "tags": []}]
    table = write_table(tmp_path / "a.parquet", prompt=["fog", "rain"], of=of, never=[None, None])
    assert pyarrow.types.is_null(parquet.read_schema(table).field("of").type.field("style").type)
    records = read_records(table, "prompt")
    assert [record.metadata["of"]["answer"] for record in records] == ["green", "cyan"]
    assert all("style" not in record.metadata["of"] and "never" not in record.metadata for record in records)


ROWS = [{"prompt": "one, two", "id": "007", "of": {"day": "2024-01-01"}}, {"prompt": "b's", "id": "8", "of": {}}]


BY_ID = json.dumps({f"{number:05}": row for number, row in enumerate(ROWS)})
IN_OTHER_ORDERS = {
    name: {place: values[place] for place in ([0, 1] if name == "prompt" else [1, 0])}
    for name, values in pd.DataFrame(ROWS).to_dict().items()
}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        pd.DataFrame(ROWS).to_json(),
        json.dumps(IN_OTHER_ORDERS),
        json.dumps(pd.DataFrame(ROWS).to_dict("list")),
        BY_ID,
        "\n".join(map(json.dumps, ROWS)),
    ],
)
def test_rows_of_a_json_file_are_read_in_each_layout(tmp_path: Path, content: str) -> None:
    records = read_records(write(tmp_path / "prompts.json", content), "prompt")
    assert [{"prompt": record.text} | {"of": {}} | record.metadata for record in records] == ROWS


@pytest.mark.parametrize(
    "content", [["a", "b"], {"0": "a", "1": "b"}, {"prompt": ["a", "b"]}, [{"prompt": ["a", "b"]}]]
)
def test_texts_of_a_json_file_are_prompts(tmp_path: Path, content: Any) -> None:
    assert read_records(write(tmp_path / "a.json", json.dumps(content)), "prompt") == [Prompt("a"), Prompt("b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"info": {}, "annotations": [{"caption": "a"}]}',
            "is invalid: .* object with the keys info, annotations. Wr",
        ),
        ('{"name": "a", "licence": "b"}', "is invalid: it must be a list .* with the keys name, licence"),
        ("[1, 2]", "is invalid: .*; it is .1, 2."),
        ('[{"prompt": "a"}, {"caption": "b"}]', "row 2 is invalid: each row must .*its keys: caption; data.column"),
        ('[{"prompt": "a", "prompt": "b"}]', "is invalid: it has the key 'prompt' twice"),
        ('[{"prompt": "a", "score": NaN}]', "row 1 is invalid: .*NaN is no finite number"),
        ('["a\\u0000"]', "row 1 is invalid: .*U.0000"),
    ],
)
def test_other_json_files_are_errors(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_records(write(tmp_path / "a.json", content), "prompt")


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which ``datasets`` finds `owner/name`; the hub is offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("page.html", "cp"),
        ("notes.md", "If each line of it is"),
        ("prompts.txt.gz", "gunzip -k"),
        ("prompts.xlsx", "Save its prompts in such a file.$"),
    ],
)
def test_a_file_of_another_ending_is_no_text(tmp_path: Path, name: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"{name} is invalid: its name must end in .txt, .parquet, .csv, .*{fix}"):
        read_prompts(write(tmp_path / name, "PK\0\0" if name == "prompts.xlsx" else "a circle"))
    assert [record.text for record in read_prompts(write(tmp_path / "prompts", "a circle"))] == ["a circle"]


def test_data_set_of_the_hub_is_read_by_split_and_column_and_once(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(hub / "owner/name/data/train-00000-of-00001.parquet", caption=["a cat", None, "a dog"], votes=[1, 2, 3])
    write_table(hub / "owner/name/data/test-00000-of-00001.parquet", caption=["fog"], votes=[1])
    assert read_prompts("hf://owner/name/train", "caption") == [
        Prompt("a cat", {"votes": 1}),
        Prompt("a dog", {"votes": 3}),
    ]
    assert identities(read_prompts("hf://owner/name/test", "caption")) == ["fog"]
    with pytest.raises(UserError, match="the columns of hf://owner/name/train are caption, votes"):
        read_prompts("hf://owner/name/train")
    monkeypatch.delattr(datasets, "load_dataset")
    assert identities(read_prompts("hf://owner/name/test", "caption")) == ["fog"]


def test_clauses_with_different_keys_are_the_same_by_way_of_datasets(hub: Path) -> None:
    include = [[{"class": "dog", "count": 1}], [{"class": "dog", "color": "red"}, {"class": "cat"}]]
    rows = [{"prompt": "dogs", "include": include[0], "exclude": include[0]}, {"prompt": "pets", "include": include[1]}]
    lines = write(hub / "owner/name/train.jsonl", *map(json.dumps, rows))
    data = datasets.load_dataset("owner/name", split="train")
    data.to_parquet("a.parquet")
    data.to_json("a.jsonl")  # null where a key is missing
    expected = [each.metadata for each in read_records(lines, "prompt")]
    for source in ("hf://owner/name/train", "a.parquet", "a.jsonl"):
        assert [each.metadata for each in read_records(source, "prompt")] == expected


def test_what_to_do_about_a_data_set_that_cannot_be_read_works(hub: Path) -> None:
    write_table(hub / "owner/name/data/train-00000-of-00001.parquet", prompt=["a cat"])
    with pytest.raises(UserError, match=r"""Unknown split "x"\. .* \['train'\]. Name a split that it has"""):
        read_prompts("hf://owner/name/x")

    write_table(hub / "owner/two/data/train-00000-of-00001.parquet", prompt=["fog"])
    configs = "configs: [{config_name: a, data_files: data/*}, {config_name: b, data_files: data/*}]"
    write(hub / "owner/two/README.md", f"---\n{configs}\n---\n")
    with pytest.raises(UserError) as error:
        read_prompts("hf://owner/two/train")
    program, _, code = shlex.split(str(error.value).partition("run ")[2].partition(" and name")[0])
    exec(code.replace("<configuration>", "a").replace("<split>", "train"))
    assert program == "python" and identities(read_prompts("prompts.parquet")) == ["fog"]


def test_pick_a_pic_keeps_prompts_of_at_least_six_words(hub: Path) -> None:
    captions = ["a cat on a mat", "a cat on a red mat", "a cat on a red mat", None, "fog"]
    write_table(hub / PICKAPIC / "data/train-00000-of-00001.parquet", caption=captions)
    write_table(hub / PICKAPIC / "data/test-00000-of-00001.parquet", caption=["six owls in a bare tree"])
    assert identities(read_prompts("pickapic-train")) == ["a cat on a red mat"]
    assert identities(read_prompts("pickapic-test")) == ["six owls in a bare tree"]


def test_parti_prompts_have_their_category_as_tag(hub: Path) -> None:
    write_table(hub / PARTI / "train.parquet", Prompt=["a cat", "two dogs"], Category=["Animals", "Quantity"])
    prompts = [Prompt("a cat", {"tag": "Animals"}), Prompt("two dogs", {"tag": "Quantity"})]
    assert read_prompts("partiprompts") == prompts


def test_hpdv2_prompts_are_lists_of_strings_in_a_file_per_style(hub: Path) -> None:
    for style in HPDV2_STYLES:
        write(hub / HPDV2 / "benchmark" / f"{style}.json", json.dumps([f"{style} {number}" for number in range(3)]))
    assert identities(read_prompts("hpdv2-concept-art")) == ["concept-art 0", "concept-art 1", "concept-art 2"]
    assert len(read_prompts("hpdv2")) == 12 and Prompt("photo 2", {"tag": "photo"}) in read_prompts("hpdv2")


@pytest.mark.parametrize("name", SOURCES)
def test_dataset_of_a_named_source_is_the_one_its_reader_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    monkeypatch.setattr("solrl_lightning.data.sources._read_hub", lambda dataset, *_, **__: names.add(dataset) or [])
    monkeypatch.setattr("solrl_lightning.data.sources._read_github", lambda *_: [])
    SOURCES[name]()
    assert names == {dataset_of(name)} - {None}


def test_error_without_a_network_has_the_download_command(hub: Path) -> None:
    with pytest.raises(UserError, match=r"hub cannot be reached: .* `hf download --repo-type dataset no/where"):
        read_prompts("hf://no/where/train")


def test_error_about_a_missing_or_gated_data_set_names_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*args: Any, **kwargs: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'o/n' is a gated dataset.")

    monkeypatch.setattr(datasets, "load_dataset", not_found)
    with pytest.raises(UserError, match="a gated dataset.*accept its terms on https://huggingface.co/datasets/o/n"):
        read_prompts("hf://o/n/train")


@pytest.mark.parametrize("source", ["hf://owner/name", "hf://owner/name/a/b", "hf://owner//train"])
def test_name_of_the_hub_without_owner_or_split_is_an_error(source: str) -> None:
    with pytest.raises(UserError, match=f"{source} is invalid: .* hf://<owner>/<name>/<split> or"):
        read_prompts(source)


# GitHub


def test_sets_of_github_are_read_from_the_folder_of_a_clone(hub: Path) -> None:
    for name in ("ocr-train", "ocr-test", "pickscore-train", "pickscore-test"):
        write(hub / DIFFUSION_NFT / f"dataset/{name.replace('-', '/')}.txt", f'{name} "open"', "")
        assert identities(read_prompts(name)) == [f'{name} "open"']
    row = {"tag": "counting", "include": [{"class": "owl", "count": 3}], "exclude": [{"class": "owl", "count": 4}]}
    for source, file in (
        ("geneval-train", hub / DIFFUSION_NFT / "dataset/geneval/train_metadata.jsonl"),
        ("geneval-test", hub / GENEVAL / "prompts/evaluation_metadata.jsonl"),
    ):
        write(file, json.dumps({"prompt": "three owls"} | row))
        assert read_records(source, "prompt") == [Prompt("three owls", row)]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def github(tmp_path_factory: pytest.TempPathFactory, hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a web server serves in place of GitHub."""
    folder = tmp_path_factory.mktemp("github")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setattr("solrl_lightning.data.sources.GITHUB", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", hub / "downloads")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield folder
        server.shutdown()


def test_file_of_github_is_downloaded_once(github: Path) -> None:
    file = write(github / DIFFUSION_NFT / "main/dataset/drawbench/test.txt", "a brown bird\na blue bear\n" * 5)
    assert identities(read_prompts("drawbench")) == ["a brown bird", "a blue bear"]
    file.unlink()
    assert len(read_records("drawbench", "prompt")) == 11  # from the cache; the last line is empty


def test_error_about_a_file_of_github_has_the_command_that_clones_it(github: Path) -> None:
    message = (
        r"/evaluation_metadata.jsonl cannot be downloaded: 404, .*not found.*"
        "`git clone https://github.com/djghosh13/geneval djghosh13/geneval`"
    )
    with pytest.raises(UserError, match=message):
        read_prompts("geneval-test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a red circle \\ud83d"}\n',
            "a.jsonl line 1 is invalid: .* U\\+D83D after 'a red circle '",
        ),
        ("a.jsonl", '{"prompt": "a", "tags": ["\\ude00"]}', 'a.jsonl line 1 .* U\\+DE00 after .*"tags": '),
        ("a.txt", "a\nb\0\n", "a.txt line 2 is invalid: .* U\\+0000 after 'b'"),
        ("rows.txt", '{"prompt": "a"}\n\n{"prompt": "b"}\n', "these are JSON objects.*mv .*rows.txt .*rows.jsonl"),
    ],
)
def test_texts_that_no_tokenizer_takes_are_errors_with_their_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read_records(tmp_path / name, "prompt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "train.JsonL"])
def test_the_suffix_counts_without_case(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "a", "tag": "t"}\n')
    assert read_records(file_of_split(str(tmp_path), "train") if "train" in name else tmp_path / name, "prompt") == [
        Prompt("a", {"tag": "t"})
    ]
