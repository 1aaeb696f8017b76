"""Reads every kind of source with the real libraries. Local folders hold the data sets of the hub."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from solrl_lightning.data.prompts import read_prompts
from solrl_lightning.data.sources import PICKAPIC, Record, read_records
from solrl_lightning.errors import UserError


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_table(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


# JSON lines


def test_json_lines_in_the_layout_of_geneval_give_prompts_and_metadata(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        '{"tag": "counting", "include": [{"class": "owl", "count": 3}], "prompt": "three owls – drei Käuze"}',
        "",
        '{"prompt": "fog", "seed": 3}',
    )
    include = [{"class": "owl", "count": 3}]
    owls = Record("three owls – drei Käuze", {"tag": "counting", "include": include})
    assert read_records(path, "prompt") == [owls, Record("fog", {"seed": 3})]
    assert read_records(path, "caption") == read_records(path, "prompt")  # data.column is for tables


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a cat"', r"must be a JSON object \(Expecting ',' delimiter at character 19\)"),
        ("a cat", "must be a JSON object"),
        ('["a cat"]', r'must be a JSON object; got \["a cat"\]'),
        ('{"caption": "a cat", "tag": "x"}', r"this one has no such key \(its keys: caption, tag\)"),
        ('{"prompt": 7}', "this one has 7"),
        ('{"prompt": "a cat", "tag": 7}', 'the "tag" of a prompt must be a string; got 7'),
    ],
)
def test_error_about_a_malformed_json_line_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=f"prompts.jsonl line 2 is invalid: .*{message}"):
        read_records(write_lines(tmp_path, '{"prompt": "a dog"}', line), "prompt")


# Tables


def test_parquet_file_gives_the_column_and_rows_without_text_are_dropped(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", caption=["a cat", None, "", "a dog", "A cat"], votes=[1, 2, 3, 4, 5])
    assert read_prompts(path, "caption") == ["a cat", "a dog"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.csv", 'prompt,tag\n"one, two",a\nthree,b\n'),
        ("prompts.TSV", "prompt\ttag\none, two\ta\nthree\tb\n"),
        ("prompts.json", '[{"prompt": "one, two"}, {"prompt": "three"}]'),
    ],
)
def test_error_about_another_table_format_has_the_command_that_converts_it(
    tmp_path: Path, name: str, content: str
) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"the prompt file {file} is invalid") as refusal:
        read_records(file, "prompt")
    exec(str(refusal.value).split('python -c "')[1].removesuffix('"'))
    assert [record.text for record in read_records(file.with_suffix(".parquet"), "prompt")] == ["one, two", "three"]


def test_error_about_a_column_names_the_columns_of_the_table(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", caption=["a cat"], votes=[1])
    message = r"data.column=prompt is invalid: .* of .*a.parquet are caption, votes\. Set data.column=<name>"
    with pytest.raises(UserError, match=message):
        read_prompts(path)
    with pytest.raises(UserError, match="data.column=votes is invalid: .*a.parquet holds 1 in row 0"):
        read_prompts(path, "votes")


def test_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", prompt=["a cat"])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="a.parquet cannot be read as a parquet file: "):
        read_prompts(path)


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which ``datasets`` finds `owner/name`; the hub is offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_data_set_of_the_hub_is_read_by_split_and_column(hub: Path) -> None:
    write_table(hub / "owner/name/data/train-00000-of-00001.parquet", caption=["a cat", None, "a dog"], votes=[1, 2, 3])
    write_table(hub / "owner/name/data/test-00000-of-00001.parquet", caption=["fog"], votes=[1])
    assert read_prompts("hf://owner/name/train", "caption") == ["a cat", "a dog"]
    assert read_prompts("hf://owner/name/test", "caption") == ["fog"]
    with pytest.raises(UserError, match="the columns of hf://owner/name/train are caption, votes"):
        read_prompts("hf://owner/name/train")
    with pytest.raises(UserError, match=r"validation cannot be read: Unknown split .*'train', 'test'"):
        read_prompts("hf://owner/name/validation", "caption")


def test_process_loads_a_data_set_of_the_hub_once(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(hub / "owner/name/train.parquet", prompt=["a cat"])
    first = read_prompts("hf://owner/name/train")
    monkeypatch.delattr(datasets, "load_dataset")
    assert read_prompts("hf://owner/name/train") == first == ["a cat"]


def test_pick_a_pic_keeps_prompts_of_at_least_six_words(hub: Path) -> None:
    captions = ["a cat on a mat", "a cat on a red mat", "a cat on a red mat", None, "fog"]
    write_table(hub / PICKAPIC / "data/train-00000-of-00001.parquet", caption=captions, ranking_id=[1, 2, 3, 4, 5])
    write_table(
        hub / PICKAPIC / "data/test-00000-of-00001.parquet", caption=["six owls in a bare tree"], ranking_id=[1]
    )
    assert read_prompts("pickapic-train") == ["a cat on a red mat"]
    assert read_prompts("pickapic-test") == ["six owls in a bare tree"]


def test_error_without_a_network_has_the_download_command(hub: Path) -> None:
    with pytest.raises(UserError, match=r"hub cannot be reached: .* `hf download --repo-type dataset no/where"):
        read_prompts("hf://no/where/train")


@pytest.mark.parametrize(
    ("answer", "step"),
    [
        ("Dataset 'o/n' doesn't exist on the Hub or cannot be accessed.", "If it is private, log in with"),
        (
            "Dataset 'o/n' is a gated dataset on the Hub. You must be authenticated to access it.",
            "Accept its terms on https://huggingface.co/datasets/o/n, then log in with `hf auth login`",
        ),
    ],
)
def test_error_about_a_missing_or_gated_data_set_names_the_next_step(
    hub: Path, monkeypatch: pytest.MonkeyPatch, answer: str, step: str
) -> None:
    def not_found(*args: Any, **kwargs: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(answer)

    monkeypatch.setattr(datasets, "load_dataset", not_found)
    with pytest.raises(UserError) as caught:
        read_prompts("hf://o/n/train")
    assert answer in str(caught.value) and step in str(caught.value)


@pytest.mark.parametrize("source", ["hf://name/train", "hf://owner/name", "hf://owner/name/a/b", "hf://owner//train"])
def test_name_of_the_hub_without_owner_or_split_is_an_error(source: str) -> None:
    with pytest.raises(UserError, match=f"{source} is invalid: .* is written hf://<owner>/<name>/<split>"):
        read_prompts(source)
