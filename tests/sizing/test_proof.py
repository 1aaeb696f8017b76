"""task=prove: steps with time limits that a later command continues, and rows with the next command."""

import csv
import html
import json
import os
import re
import select
import shlex
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row
from solrl_lightning.cli.checks import check_overrides
from solrl_lightning.errors import UserError, WriteError
from solrl_lightning.options.run import Run
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.sizing import proof
from solrl_lightning.sizing.proof import CutOff, Failed, Runner, Step, examine, judge_seconds, steps_of
from solrl_lightning.tasks.prove import CUT, ENDED, FAILED, read_outcomes, replaces, run_step

Compose = Callable[..., Run]
H100 = Hardware("an H100", capability=(9, 0))
LAPS = (
    {"time/iteration": 9.0},
    {"time/iteration": 1.0, "time/explore": 0.5, "time/regenerate": 0.2, "time/train": 0.2},
)


class Files(Runner):
    """Writes what the commands of a step write on a GPU, after checking their options."""

    def __init__(self, folder: Path, compose: Compose, arguments: tuple[str, ...] = (), **facts: Any) -> None:
        super().__init__(folder, [], 100)
        self.compose, self.arguments, self.facts = compose, arguments, facts

    def watch(self, *arguments: str, **how: Any) -> Iterator[None]:
        cfg = self.compose(*(argument for argument in arguments if not argument.startswith("hydra.")))
        self.commands.append(" ".join(arguments))
        words = cfg.tree()["task"].get("overrides", [])
        card = {"memory": 84.9, "fits": True, "peak": 50, "arguments": [*arguments, *words, *self.arguments]}
        files = {
            "plan/plan.json": {"cards": [card]},
            "run/doctor.json": {"rows": [Row("machine", OK, "fine")._asdict()]},
            "run/summary.json": {"peak_memory_bytes": 40, "precision_backend": "fp8 (torch)", "iterations": 72}
            | {"base_reward": 0.5, "final_reward": 0.9, "evaluations": []}
            | self.facts,
        }
        for name, content in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True, parents=True)
            (self.folder / name).write_text(json.dumps(content))
        table = self.folder / "run" / "csv" / "version_0" / "metrics.csv"
        table.parent.mkdir(exist_ok=True, parents=True)
        with table.open("w") as file:
            writer = csv.DictWriter(file, [*LAPS[1]])
            writer.writeheader()
            writer.writerows([*LAPS, {}])
        self.log.write_text("before training\niteration 1/2 | reward 0.4\n" + self.facts.get("log", ""))
        yield


def test_steps_of_a_gpu_run_valid_commands_and_are_sorted_by_what_they_tell(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "counts", lambda run: {"bf16": 1.0, "shadow": 1.0, "image": 1.0, "row": 1.0})
    steps = {step.name: step for step in steps_of(H100)}
    assert [*steps][:5] == ["doctor", "sol_rl", "flux1 sol_rl", "flux1 prefix", "resume"] and len(steps) == 19
    assert {"doctor fp8", "doctor int8"} <= steps.keys() and "doctor nvfp4" not in steps
    for name in set(steps) - {"resume"}:  # runs below
        family = name.split()[-1]
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        runner = Files(folder, compose, evaluations=[dict(seconds=9.0, shapes=0.5), dict(seconds=19.0, shapes=0.9)])
        rows = list(steps[name].run(runner))
        assert all(row.status in (OK, SLOW) for row in rows), (name, rows)
        assert family == "doctor" or "doctor" in name or f"family={family}" in runner.commands[-1]


@pytest.mark.parametrize(
    ("name", "arguments", "facts", "status", "text"),
    [
        ("sol_rl", (), {"evaluations": [dict(seconds=9.0, shapes=0.79)]}, WRONG, "0.8 is not reached"),
        ("sol_rl", (), {"log": "Recompiling function forward\n" * 2}, WRONG, "2 recompilations"),
        ("flux1 sol_rl", (), {"peak_memory_bytes": 51}, WRONG, "peak 5.1e-08 GB, planned 5e-08 GB"),
        ("flux1 prefix", ("base_weights=int8",), {"peak_memory_bytes": 51}, WRONG, "base_weights=int8"),
    ],
)
def test_what_is_outside_its_range_has_the_next_command(
    compose: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: tuple[str, ...],
    facts: dict[str, Any],
    status: str,
    text: str,
) -> None:
    monkeypatch.setattr(proof, "counts", lambda run: {"bf16": 1e6, "shadow": 0, "image": 0, "row": 1e6})
    (step,) = (step for step in steps_of(H100) if step.name == name)
    rows = list(step.run(Files(tmp_path, compose, arguments, **facts)))
    assert any(row.status == status and text in row.result and row.way_out and row.expected for row in rows), rows


def test_run_without_a_line_of_its_first_iteration_is_no_proof_of_its_compilation(
    compose: Compose, tmp_path: Path
) -> None:
    class Silent(Files):
        def watch(self, *arguments: str, **how: Any) -> Iterator[None]:
            yield from super().watch(*arguments, **how)
            self.log.write_text("iteration 2/60 | reward 0.4\n")

    (step,) = (step for step in steps_of(H100) if step.name == "sol_rl")
    with pytest.raises(Failed, match="no line of its first iteration"):
        list(step.run(Silent(tmp_path, compose)))


def test_family_without_room_is_left_out(compose: Compose, tmp_path: Path) -> None:
    class NoRoom(Files):
        def read(self, file: str) -> Any:
            return {"cards": [{"memory": 25.2, "fits": True, "arguments": ["family=prefix"]}]}

    (step,) = (step for step in steps_of(H100) if step.name == "flux1 sol_rl")
    (row,) = step.run(NoRoom(tmp_path, compose))
    assert row.status == SKIPPED and "no room" in row.result


def test_seconds_are_those_of_the_tables_of_the_card() -> None:
    # FLUX.1 on an H100, 6 prompts: 69 + 42 + 8 s, and 87 s for 576 rows.
    units = {"shadow": 6 * 96 * 6, "bf16": 6 * 24 * 10, "image": 6 * 120, "row": 576}
    for rollout, train, status in ((119 * 1.49, 87 * 1.49, OK), (119 * 1.51, 87, SLOW), (119, 87 * 1.51, SLOW)):
        lap = {"time/explore": rollout - 10, "time/regenerate": 10, "time/train": train}
        row = judge_seconds("flux1", "sol_rl", H100, units, lap)
        assert row.status == status and "estimate 119 s" in row.result and "estimate 87.0 s" in row.result
        assert bool(row.way_out) == (status == SLOW)
    assert "no estimate" in judge_seconds("flux1", "race", Hardware("", capability=(8, 0)), units, lap).result


def test_rows_of_a_step_that_is_cut_off_are_kept(tmp_path: Path) -> None:
    class Cut(Runner):
        def watch(self, *arguments: str, **how: Any) -> Iterator[None]:
            rows = [Row(name, OK, "fine")._asdict() for name in "abc"]
            for number in (0, 1, 3):
                if number:
                    (self.folder / "run").mkdir(exist_ok=True)
                    (self.folder / "run" / "doctor.json").write_text(json.dumps({"rows": rows[:number]}))
                yield
            raise CutOff

    rows = examine((), Cut(tmp_path, [], 100))
    assert [next(rows).check for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(CutOff):
        next(rows)


def test_steps_have_limits_and_errors_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> Callable[[Runner], Iterator[Row]]:
        def run(runner: Runner) -> Iterator[Row]:
            yield Row("before", OK, "fine")
            runner.run(*arguments)

        return run

    outcomes = run_step(Step("late", 0.1, command("task=plan")), tmp_path / "a", [], 100)
    first = next(outcomes)
    begin, row = f"late, at most 0 s; output: {tmp_path / 'a.new' / 'log.txt'}\n", f"{'before':<20}ok       fine\n"
    assert capsys.readouterr().out == begin  # the row follows when its outcome is saved
    (late,) = outcomes
    assert capsys.readouterr().out.startswith(row)
    assert first.rows == [Row("before", OK, "fine")] and first.end == late.end == CUT
    assert [row.status for row in late.rows] == [OK, SKIPPED] and late.seconds >= late.limit
    assert "its whole limit" in late.rows[1].result and late.rows[1].way_out == "repeat it when nothing else runs"
    assert late.commands == ["python -m solrl_lightning task=plan"]
    assert replaces(late, first) and not replaces(first, late) and not replaces(late, first._replace(end=ENDED))
    _, cut = run_step(Step("cut", 1000, command("task=plan")), tmp_path / "a", [], 0.1)
    assert cut.end == CUT and cut.seconds < cut.limit and "task.minutes" in cut.rows[1].way_out
    _, failed = run_step(Step("failed", 100, command("no.such=1")), tmp_path / "a", [], 100)
    assert failed.end == FAILED and failed.rows[1].status == WRONG
    assert "has failed: error: " in failed.rows[1].result and "no.such" in failed.rows[1].result


def run_a_step(arguments: list[str]) -> int:
    """A target of forks: a step whose command is a program."""
    proof.sys.executable = arguments[0]
    Runner(Path.cwd(), [], 100).run()
    return 0


@pytest.mark.slow
def test_command_ends_with_a_killed_proof(forks: Forks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")  # readable when its writers have ended
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec > alive\nsleep 60 &\nsleep 1\n: > started\nwait\n")  # its ender starts after it
    program.chmod(0o700)
    ended = forks.run(tmp_path, str(program), target="sizing/test_proof:run_a_step", kill_at="started")
    assert ended.status == -signal.SIGKILL, ended.output
    assert select.select([alive], [], [], 30)[0] and os.read(alive, 1) == b""
    os.close(alive)


class Steps:
    """Stands for the steps of this machine; ``ends`` says how each ends. Step a has no time."""

    def __init__(self, **ends: Exception | signal.Signals | None) -> None:
        self.ends, self.run = ends, list[str]()

    def __call__(self, hardware: Hardware) -> list[Step]:
        return [Step(name, 0.0 if name == "a" else 100.0, partial(self.step, name)) for name in self.ends]

    def step(self, name: str, runner: Runner) -> Iterator[Row]:
        self.run.append(name)
        runner.commands.append("task=plan")
        yield Row("place", OK, f"{runner.folder} in {Path.home()} by run {len(self.run)}", expected="any")
        if isinstance(end := self.ends[name], signal.Signals):
            signal.raise_signal(end)
        elif end is not None:
            raise end


def test_command_continues_where_the_last_one_ended(
    command: Callable[..., Any], compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somebody/home")
    steps = Steps(a=CutOff(), b=Failed("no file"), c=None)
    monkeypatch.setattr("solrl_lightning.tasks.prove.steps_of", steps)
    here = ("task=prove", "trainer=cpu", "task.folder=its own")
    file, page = (tmp_path / "its own" / f"proof.{kind}" for kind in ("json", "html"))

    def proved(*arguments: str, status: int = 0) -> tuple[Any, dict[str, Any]]:
        finished = command(*here, *arguments)
        assert finished.status == status, finished.out + finished.err
        return finished, json.loads(file.read_text())

    finished, result = proved(status=1)
    again = finished.out.partition("continue with: ")[2].splitlines()[0]
    assert shlex.split(again)[3:] == ["task=prove", "trainer=cpu", "task.folder='its own'"]
    assert html.unescape(page.read_text()).count(again) == 1
    sent = "There is no need to send proof.json: only proofs of GPUs are collected."
    assert finished.out.startswith("a, at most") and finished.out.count(f"{file}\n{sent}\n") == 1
    assert sent in page.read_text() and "skipped; cut off: a; left: b, a" in finished.out
    assert result["counts"] == {"ok": 3, "slow": 0, "wrong": 1, "skipped": 1}
    assert result["steps_left"] == ["b", "a"]  # that which was too slow comes last
    assert [step["end"] for step in result["steps"].values()] == ["cut off", "failed", "whole"]
    assert result["steps"]["a"]["rows"][0]["result"] == "its own/a.new in ~ by run 1"
    assert result["steps"]["a"]["rows"][0]["expected"] == "any"
    absolute = f"task.folder='{file.parent}'"
    proved(absolute, "task.steps=[b]", status=1)
    assert html.unescape(page.read_text()).count(again) == 1  # its last name
    assert not {str(tmp_path), "/somebody/home"} & {*re.findall(r"/[\w/-]+", file.read_text() + page.read_text())}

    file.write_text(json.dumps(result | {"machine": result["machine"] | {"threads": 99}}))  # as on a less busy machine
    steps.run, steps.ends["b"] = [], None
    _, result = proved()
    assert steps.run == ["b", "a"] and result["steps_left"] == ["a"]
    steps.ends["c"] = CutOff()  # too little time for what has ended
    (file.parent / "c" / "kept").touch()
    finished, unchanged = proved("task.steps=[c]")
    assert "the earlier result of c stays" in finished.out and unchanged == result
    assert (file.parent / "c" / "kept").exists()
    finished, unchanged = proved("task.steps=[c]", "task.minutes=1e-9")
    assert "there is no time left" in finished.out and unchanged == result
    for end, status, said in (
        (signal.SIGINT, 130, f"{page} stays; continue with: {again}\ninterrupted\n"),
        (signal.SIGTERM, 143, f"{page} stays; continue with: {again}\nterminated\n"),
        (WriteError.of(file, OSError(28, "No space left")), 1, "has this name, then give the same command again.\n"),
    ):
        steps.ends["c"] = end
        assert proved("task.steps=[c]", status=status)[0].err.endswith(said)
    steps.ends["c"] = Failed("no file")
    assert proved("task.steps=[c]", status=1)[1]["steps_left"] == ["c", "a"]

    with claimed(file.parent, new=False):
        finished = command(*here)
    assert finished.status == 2 and "with task.folder=<folder>" in finished.err and "hydra" not in finished.err
    text, here_now = file.read_text(), {key: result[key] for key in ("machine", "versions", "first_run")}
    for content, message in (
        (text[:99], "or damaged (JSONDecodeError: "),
        ("[]", "or damaged (TypeError: list indices must be integers or slices, not str). Choose another folder with "),
        (text.replace('"end"', '"ended"'), "or damaged (TypeError: "),
        (text.replace('"torch"', '"touch"'), "and differs in versions. Begin another one with task.folder="),
    ):
        file.write_text(content)
        with pytest.raises(UserError) as error:
            read_outcomes(file.parent, here_now)
        assert message in str(error.value) and "\n" not in str(error.value), error.value
    for override in ("precision=fp8", "seed=7", "trainer.devices=2", "++model.lora.rank=4"):
        with pytest.raises(UserError, match=f"^{re.escape(override)} is invalid: task=prove runs fixed"):
            check_overrides(compose(*here), [*here, override])
    wrong = command(*here, "task.steps=[flux1]")
    assert wrong.status == 2 and "there is no step flux1 on this machine" in wrong.err


@pytest.mark.slow
def test_step_runs(command: Callable[..., Any], tmp_path: Path) -> None:
    finished = command("task=prove", "trainer=cpu", "task.steps=[sol_rl]")
    assert finished.status == 0 and "left: doctor, resume" in finished.out, finished.out + finished.err
    result = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert result["counts"] == {"ok": 2, "slow": 0, "wrong": 0, "skipped": 0} and [*result["steps"]] == ["sol_rl"]
    assert "nvfp4 (emulated): reward 0.5" in (tmp_path / "proof" / "proof.html").read_text()
    assert not (tmp_path / "outputs" / "train").exists()
