import logging
from collections import Counter
from pathlib import Path

import pytest

from solrl_lightning.data.prompts import PromptSchedule, read_prompt_sets, read_prompts, read_tags
from solrl_lightning.data.sources import SOURCES, Record
from solrl_lightning.errors import UserError


def write(folder: Path, data: bytes) -> Path:
    path = folder / "prompts.txt"
    path.write_bytes(data)
    return path


def test_text_file_has_one_prompt_a_line_and_blank_lines_are_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, "a red circle\n\n  ein grüner Stern \t\n   \nlast".encode())
    assert read_prompts(path) == ["a red circle", "ein grüner Stern", "last"]
    assert read_prompts(str(path)) == read_prompts(path)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_of_any_system_and_a_byte_order_mark_are_removed(tmp_path: Path, newline: str) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + newline.join(["one", "two\u2028still two", ""]).encode())
    assert read_prompts(path) == ["one", "two\u2028still two"]


def test_repetitions_up_to_case_and_spacing_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, b"A  red circle\nblue\na red CIRCLE \nblue\nA red circle.\n")
    with caplog.at_level(logging.INFO):
        assert read_prompts(path) == ["A  red circle", "blue", "A red circle."]
    assert caplog.messages == [f"{path}: dropped 2 repeated prompts of 5"]


def test_file_without_repetitions_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read_prompts(write(tmp_path, b"one\ntwo\n"))
    assert caplog.messages == []


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
def test_empty_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UserError, match="prompts.txt is invalid: it must have at least one line with text, and has"):
        read_prompts(write(tmp_path, data))


def test_error_about_encoding_names_the_byte_and_the_line(tmp_path: Path) -> None:
    message = r"prompts.txt is invalid: it must be UTF-8, and has the byte 0xfc at offset 10 \(line 2\)"
    with pytest.raises(UserError, match=message):
        read_prompts(write(tmp_path, "ok\r\nein grüner\n".encode("latin-1")))
    with pytest.raises(UserError, match=r"byte 0xff at offset 3 \(line 1\)"):
        read_prompts(write(tmp_path, b"\xef\xbb\xbf\xff"))
    with pytest.raises(UserError, match=r"byte 0xff at offset 0 \(line 1\)"):
        read_prompts(write(tmp_path, "a circle".encode("utf-16")))


def test_error_about_a_missing_file_names_the_folder_and_the_nearest_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        read_prompts("shapes_trian")
    message = str(caught.value)
    assert "shapes_trian does not exist" in message and str(tmp_path) in message
    assert "shapes-train, shapes-eval, compositional" in message and "Did you mean shapes-train?" in message
    with pytest.raises(UserError, match=r"hpdv2-photo\.$"):
        read_prompts("prompts.csv")


def test_folder_is_not_a_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        read_prompts(tmp_path)


def test_named_source_is_read_by_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "colours", lambda: [Record("red"), Record("Red"), Record("blue")])
    assert read_prompts("colours") == ["red", "blue"]


def test_tags_belong_to_the_prompts_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tagged.jsonl"
    path.write_text(
        '{"prompt": " three owls ", "tag": "counting"}\n{"prompt": "Three  Owls", "tag": "twice"}\n{"prompt": "fog"}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == ["three owls", "fog"]
    assert read_tags(path) == {"three owls": "counting"}
    assert read_tags("shapes-eval") == {}


def test_sets_have_the_metadata_of_the_prompts_that_are_kept(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text(
        '{"prompt": " An owl", "n": 1}\n{"prompt": "an  owl", "n": 2}\n{"prompt": "Fog", "n": 3}\n'
        '{"prompt": " An owl", "n": 5}\n'
    )
    held_out.write_text('{"prompt": "fog", "n": 4}\n{"prompt": "snow"}\n')
    sets = read_prompt_sets(train, held_out)
    assert [*sets.train, *sets.eval] == ["An owl", "fog", "snow"]
    assert {text: sets.metadata.get(text) for text in ("An owl", "fog", "snow")} == {
        "An owl": {"n": 1},
        "fog": {"n": 4},
        "snow": None,
    }


def test_held_out_prompts_are_removed_from_the_training_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = tmp_path / "train.txt", tmp_path / "eval.txt"
    train.write_text("a red circle\na star\nA  STAR\nfog\nrain\n", encoding="utf-8")
    held_out.write_text("snow\na STAR\n Fog\n", encoding="utf-8")
    with caplog.at_level(logging.INFO):
        sets = read_prompt_sets(train, held_out)
    assert sets.train == ["a red circle", "rain"]
    assert sets.eval == ["snow", "a STAR", "Fog"]
    assert sets.notes == [
        f"{train}: dropped 1 repeated prompts of 5",
        f"{train}: dropped 2 of 4 prompts that are held out in {held_out}",
    ]
    assert caplog.messages == []  # the caller logs the notes


def test_disjoint_sets_are_unchanged_and_have_no_notes() -> None:
    sets = read_prompt_sets("shapes-train", "shapes-eval")
    assert (len(sets.train), len(sets.eval), sets.notes) == (1016, 64, [])


def test_set_without_a_source_is_empty() -> None:
    assert read_prompt_sets(None, "shapes-eval") == ([], read_prompts("shapes-eval"), [], {})
    assert read_prompt_sets(None, None) == ([], [], [], {})


def test_process_reads_a_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def counted(source: str, column: str) -> list[Record]:
        sources.append(source)
        return [Record(f"{source} in {Path.cwd()}")]

    monkeypatch.setattr("solrl_lightning.data.prompts.read_records", counted)
    monkeypatch.chdir(tmp_path)
    first = read_prompt_sets("a.txt", "b.txt")
    assert read_prompt_sets(Path("a.txt"), "b.txt") == first
    assert read_prompts("b.txt") == [f"b.txt in {tmp_path}"]
    assert read_tags("b.txt") == {}
    assert sources == ["a.txt", "b.txt"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_prompts("a.txt") == [f"a.txt in {tmp_path / 'elsewhere'}"]


def test_training_set_without_prompts_that_are_not_held_out_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, b"one\ntwo\n")
    message = "data.train=.*prompts.txt is invalid: all of its 2 prompts are also in data.eval=.*prompts.txt"
    with pytest.raises(UserError, match=message):
        read_prompt_sets(path, path)


@pytest.mark.parametrize("name", ["shapes-train", "shapes-eval"])
def test_embedded_captions_are_named_sources(name: str) -> None:
    prompts = read_prompts(name)
    assert len(prompts) > 0 and all(isinstance(prompt, str) for prompt in prompts)


def test_embedded_evaluation_captions_are_held_out() -> None:
    assert not set(read_prompts("shapes-train")) & set(read_prompts("shapes-eval"))


PROMPTS = [f"prompt {i}" for i in range(23)]


def test_prompts_of_an_iteration_are_unique_and_depend_on_seed_and_iteration_alone() -> None:
    schedule = PromptSchedule(PROMPTS, 5, seed=1)
    backwards = [schedule.for_iteration(i) for i in reversed(range(20))][::-1]
    assert [PromptSchedule(PROMPTS, 5, seed=1).for_iteration(i) for i in range(20)] == backwards
    assert all(len(set(prompts)) == 5 for prompts in backwards)
    assert PromptSchedule(PROMPTS, 5, seed=2).for_iteration(0) != schedule.for_iteration(0)


def test_pass_uses_no_prompt_twice_and_the_next_pass_has_another_order() -> None:
    schedule = PromptSchedule(PROMPTS, 5, seed=1)
    passes = [[prompt for i in range(4) for prompt in schedule.for_iteration(4 * n + i)] for n in range(3)]
    assert all(len(set(prompts)) == 20 for prompts in passes)
    assert passes[0] != passes[1] != passes[2]


def test_every_prompt_is_used_equally_often_over_many_passes() -> None:
    schedule = PromptSchedule(PROMPTS, 5, seed=1)
    counts = Counter(prompt for i in range(4 * 400) for prompt in schedule.for_iteration(i))
    assert set(counts) == set(PROMPTS)
    assert all(count / 400 == pytest.approx(20 / 23, abs=0.08) for count in counts.values())


def test_iteration_may_use_the_whole_set() -> None:
    schedule = PromptSchedule(PROMPTS, 23, seed=0)
    assert sorted(schedule.for_iteration(0)) == sorted(schedule.for_iteration(1)) == sorted(PROMPTS)
    assert schedule.for_iteration(0) != schedule.for_iteration(1)


@pytest.mark.parametrize("per_iteration", [0, -1, 24])
def test_invalid_number_of_prompts_per_iteration_is_an_error(per_iteration: int) -> None:
    with pytest.raises(UserError, match=rf"prompts_per_iteration={per_iteration} is invalid: .* 1 and at most .* 23\."):
        PromptSchedule(PROMPTS, per_iteration, seed=0)
