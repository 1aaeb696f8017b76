"""Prompt files, the sets of prompts of a run, and the schedule of its iterations."""

import logging
from collections import Counter
from pathlib import Path

import pytest

from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.data.prompts import PromptSchedule, read_prompt_sets, read_prompts
from solrl_lightning.errors import UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a prompt file that a test writes."""
    return tmp_path / "prompts.txt"


def test_text_file_has_one_prompt_a_line_and_blank_lines_are_dropped(path: Path) -> None:
    path.write_bytes("a red circle\n\n  ein grüner Stern \t\n   \n\u200b\u3000\ufeff\nlast".encode())
    assert read_prompts(path) == read_prompts(str(path))
    assert identities(read_prompts(path)) == ["a red circle", "ein grüner Stern", "last"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_of_any_system_and_byte_order_marks_are_removed(path: Path, newline: str) -> None:
    path.write_bytes(newline.join(["\ufeffone", "\ufefftwo\u2028still two", ""]).encode())  # cat a.txt b.txt
    assert identities(read_prompts(path)) == ["one", "two\u2028still two"]


def test_repetitions_up_to_case_spacing_and_normal_form_are_dropped_and_counted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path.write_bytes("A  red circle\nblé\na red CIRCLE \nblé\nA red circle.\nble\u0301\n".encode())
    assert identities(read_prompts(path)) == ["A  red circle", "blé", "A red circle."]
    path.with_name("unique.txt").write_bytes(b"one\ntwo\n")
    read_prompts(path.with_name("unique.txt"))
    assert caplog.messages == [f"{path}: dropped 3 repeated prompts of 6"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it must have at least one line with text, and has"),
        ("ok\r\nein grüner\n".encode("latin-1"), r"it must be UTF-8, and has the byte 0xfc at offset 10 \(line 2\)"),
        (b"\xef\xbb\xbf\xff", r"byte 0xff at offset 3 \(line 1\)"),
    ],
)
def test_error_about_an_empty_or_damaged_file(path: Path, data: bytes, message: str) -> None:
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"prompts.txt is invalid: .*{message}"):
        read_prompts(path)


def test_error_about_a_missing_file_names_the_folder_and_the_nearest_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        read_prompts("shapes_trian")
    message = str(error.value)
    assert "the prompt source shapes_trian is invalid" in message and str(tmp_path) in message
    assert "shapes-train, shapes-eval, compositional" in message and "Did you mean shapes-train?" in message
    with pytest.raises(UserError, match=r"it is none\. Name a file of prompts\.$"):
        read_prompts("prompts.csv")
    of_splits = "for data.train and data.eval, a folder with train.jsonl or train.txt, and test.jsonl or test.txt; .*"
    with pytest.raises(UserError, match=rf"{of_splits} Name a file of prompts\."):
        read_prompts(tmp_path)
    for file in (tmp_path / "train.txt", tmp_path / "test.txt"):
        file.write_text("a cat\n")
    with pytest.raises(UserError, match=rf"{of_splits} Name a file of prompts, such as {file}, one of 2 there\.$"):
        read_prompts(tmp_path)


def test_tags_belong_to_the_prompts_that_are_kept(path: Path) -> None:
    path = path.with_suffix(".jsonl")
    path.write_text(
        '{"prompt": " three owls ", "tag": "counting"}\n{"prompt": "Three  Owls", "tag": "twice"}\n{"prompt": "fog"}\n'
    )
    assert read_prompts(path) == [Prompt("three owls", {"tag": "counting"}), Prompt("fog")]


def test_sets_have_the_metadata_of_the_prompts_that_are_kept(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    prompts = [(" An owl", 1), ("an  owl", 2), ("Fog", 3), (" An owl", 5)]
    train.write_text("\n".join(f'{{"prompt": "{prompt}", "n": {number}}}' for prompt, number in prompts))
    held_out.write_text('{"prompt": "fog", "n": 4}\n{"prompt": "snow"}\n')
    sets = read_prompt_sets(train, held_out)
    assert [*sets.train, *sets.eval] == [Prompt("An owl", {"n": 1}), Prompt("fog", {"n": 4}), Prompt("snow")]


def test_held_out_prompts_are_removed_from_the_training_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = tmp_path / "train.txt", tmp_path / "eval.txt"
    train.write_text("a red circle\na star\nA  STAR\nfog\nrain\n")
    held_out.write_text("snow\na STAR\n Fog\n")
    with caplog.at_level(logging.INFO):
        sets = read_prompt_sets(train, held_out)
    assert (identities(sets.train), identities(sets.eval)) == (["a red circle", "rain"], ["snow", "a STAR", "Fog"])
    assert sets.notes == [
        f"{train}: dropped 1 repeated prompts of 5",
        f"{train}: dropped 2 of 4 prompts that are held out in {held_out}",
    ]
    assert caplog.messages == []  # the caller logs the notes
    message = "data.train=.*eval.txt is invalid: it has no prompt that data.eval=.*eval.txt lacks"
    with pytest.raises(UserError, match=message):
        read_prompt_sets(held_out, held_out)


def test_embedded_captions_are_disjoint_and_a_set_without_a_source_is_empty() -> None:
    sets = read_prompt_sets("shapes-train", "shapes-eval")
    assert (len(sets.train), len(sets.eval), sets.notes) == (1016, 64, [])
    assert read_prompt_sets(None, "shapes-eval") == ([], sets.eval, [])
    assert read_prompt_sets(None, None) == ([], [], [])


def test_process_reads_a_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def counted(source: str, column: str) -> list[Prompt]:
        sources.append(source)
        return [Prompt(f"{source} in {Path.cwd()}")]

    monkeypatch.setattr("solrl_lightning.data.prompts.read_records", counted)
    monkeypatch.chdir(tmp_path)
    assert read_prompt_sets("a.txt", "b.txt") == read_prompt_sets(Path("a.txt"), "b.txt")
    assert read_prompts("b.txt") == [Prompt(f"b.txt in {tmp_path}")]
    assert sources == ["a.txt", "b.txt"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_prompts("a.txt") == [Prompt(f"a.txt in {tmp_path / 'elsewhere'}")]


PROMPTS = [Prompt(f"prompt {i}") for i in range(23)]
SCHEDULE = PromptSchedule(PROMPTS, 5, seed=1)


def test_prompts_of_an_iteration_are_unique_and_depend_on_seed_and_iteration_alone() -> None:
    backwards = [SCHEDULE.for_iteration(i) for i in reversed(range(20))][::-1]
    assert [PromptSchedule(PROMPTS, 5, seed=1).for_iteration(i) for i in range(20)] == backwards
    assert all(len(set(prompts)) == 5 for prompts in backwards)
    assert PromptSchedule(PROMPTS, 5, seed=2).for_iteration(0) != SCHEDULE.for_iteration(0)


def test_pass_uses_no_prompt_twice_and_over_many_passes_each_equally_often() -> None:
    passes = [[prompt for i in range(4) for prompt in SCHEDULE.for_iteration(4 * n + i)] for n in range(400)]
    assert all(len(set(prompts)) == 20 for prompts in passes)
    assert passes[0] != passes[1] != passes[2]
    counts = Counter(prompt for prompts in passes for prompt in prompts)
    assert set(counts) == set(PROMPTS)
    assert all(count / 400 == pytest.approx(20 / 23, abs=0.08) for count in counts.values())


def test_iteration_may_use_the_whole_set() -> None:
    schedule = PromptSchedule(PROMPTS, 23, seed=0)
    assert set(schedule.for_iteration(0)) == set(schedule.for_iteration(1)) == set(PROMPTS)
    assert schedule.for_iteration(0) != schedule.for_iteration(1)


@pytest.mark.parametrize("per_iteration", [0, 24])
def test_invalid_number_of_prompts_per_iteration_is_an_error(per_iteration: int) -> None:
    with pytest.raises(UserError, match=rf"prompts_per_iteration={per_iteration} is invalid: .* 1 and at most .* 23\."):
        PromptSchedule(PROMPTS, per_iteration, seed=0)
