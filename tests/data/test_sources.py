"""Reads every kind of source with the real libraries. Local folders hold the data sets of the hub."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from solrl_lightning.data.prompts import read_prompts, read_tags
from solrl_lightning.data.sources import (
    DIFFUSION_NFT,
    GENEVAL,
    HPDV2,
    HPDV2_STYLES,
    PARTI,
    PICKAPIC,
    SOURCES,
    Record,
    dataset_of,
    read_records,
)
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
        ("prompts.csv", 'tag,prompt\n1,"one, two"\nb,\nc,"a ""quoted""\nword"\nd,NA\n'),
        ("prompts.TSV", 'tag\tprompt\n1\tone, two\nb\t\nc\t"a ""quoted""\nword"\nd\tNA\n'),
    ],
)
def test_csv_and_tsv_files_give_the_column(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_prompts(tmp_path / name) == ["one, two", 'a "quoted"\nword', "NA"]
    assert read_prompts(tmp_path / name, "tag") == ["1", "b", "c", "d"]
    with pytest.raises(UserError, match="data.column=caption is invalid: .* are tag, prompt"):
        read_prompts(tmp_path / name, "caption")


def test_prompts_of_a_csv_file_may_look_like_numbers(tmp_path: Path) -> None:
    (tmp_path / "years.csv").write_text("prompt\n1984\n2001\n")
    assert read_prompts(tmp_path / "years.csv") == ["1984", "2001"]


def test_error_about_a_json_file_has_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('[{"prompt": "one, two"}, {"prompt": "three"}]', encoding="utf-8")
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
    with pytest.raises(UserError, match=r"it must be a parquet file, and its \d+ bytes .* pyarrow: Parquet magic"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt\n\na cat,2\n", "a.csv line 3 is invalid: a row must have .* 1 columns, and this one has 2 values"),
        (b"tag,prompt\na\n", "a.csv line 2 is invalid: a row must have .* 2 columns, and this one has 1 values"),
        ("prompt\nein grüner Stern\n".encode("latin-1"), r"it must be UTF-8, and has the byte 0xfc at .* \(line 2\)"),
        (b"", "data.column=prompt is invalid: .* the columns of .*a.csv are none"),
        (b"prompt,prompt\na,b\n", "data.column=prompt is invalid: .* the columns of .*a.csv are prompt, prompt"),
        (b"prompt\n" + b"x" * 200_000, "a.csv line 2 is invalid: field larger than field limit"),
    ],
)
def test_malformed_csv_file_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "a.csv")


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


def test_parti_prompts_have_their_category_as_tag(hub: Path) -> None:
    write_table(hub / PARTI / "train.parquet", Prompt=["a cat", "two dogs"], Category=["Animals", "Quantity"])
    assert read_records("partiprompts", "prompt") == [
        Record("a cat", {"tag": "Animals"}),
        Record("two dogs", {"tag": "Quantity"}),
    ]


def test_hpdv2_prompts_are_lists_of_strings_in_a_file_per_style(hub: Path) -> None:
    folder = hub / HPDV2 / "benchmark"
    folder.mkdir(parents=True)
    for style in HPDV2_STYLES:
        (folder / f"{style}.json").write_text(json.dumps([f"{style} {number}" for number in range(3)]))
    assert read_prompts("hpdv2-concept-art") == ["concept-art 0", "concept-art 1", "concept-art 2"]
    assert len(read_prompts("hpdv2")) == 12
    assert read_tags("hpdv2")["photo 2"] == "photo"


@pytest.mark.parametrize("name", SOURCES)
def test_data_set_of_a_named_source_is_what_its_reader_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = set()
    monkeypatch.setattr("solrl_lightning.data.sources._read_hub", lambda dataset, *_, **__: datasets.add(dataset) or [])
    monkeypatch.setattr("solrl_lightning.data.sources._read_github", lambda *_: [])
    SOURCES[name]()
    assert datasets == {dataset_of(name)} - {None}


# GitHub


def test_sets_of_github_are_read_from_the_folder_of_a_clone(hub: Path) -> None:
    folder = hub / DIFFUSION_NFT / "dataset"
    for name, line in (("ocr", 'a sign "open"\n'), ("pickscore", "fog\n")):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.txt").write_text(split + " " + line)
            assert read_prompts(f"{name}-{split}") == [split + " " + line.strip()]
    row = {"tag": "counting", "include": [{"class": "owl", "count": 3}], "exclude": [{"class": "owl", "count": 4}]}
    for source, file in (
        ("geneval-train", hub / DIFFUSION_NFT / "dataset/geneval/train_metadata.jsonl"),
        ("geneval-test", hub / GENEVAL / "prompts/evaluation_metadata.jsonl"),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"prompt": "three owls"} | row) + "\n")
        assert read_records(source, "prompt") == [Record("three owls", row)]


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


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_file_of_github_is_downloaded_once(github: Path) -> None:
    file = github / DIFFUSION_NFT / "main/dataset/drawbench/test.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a brown bird\na blue bear\n" * 5)
    assert read_prompts("drawbench") == ["a brown bird", "a blue bear"]
    file.unlink()
    assert len(read_records("drawbench", "prompt")) == 11  # from the cache; the last line is empty


def test_error_about_a_file_of_github_has_the_command_that_clones_it(github: Path) -> None:
    with pytest.raises(UserError, match=r"/evaluation_metadata.jsonl cannot be downloaded: 404, .*not found") as caught:
        read_prompts("geneval-test")
    assert "`git clone https://github.com/djghosh13/geneval djghosh13/geneval`" in str(caught.value)


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
