"""task=prove: steps with time limits that a later command continues, and rows with the next command."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row
from solrl_lightning.options.run import Run
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.sizing import proof
from solrl_lightning.sizing.proof import Runner, Step, judge_seconds, steps_of
from solrl_lightning.tasks.prove import run_step

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

    def run(self, *arguments: str, **how: Any) -> None:
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
        self.log.write_text("iteration 1/2 | reward 0.4\n" + self.facts.get("log", ""))


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
    assert any(row.status == status and text in row.result and row.way_out for row in rows), rows


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


def test_steps_have_limits_and_errors_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> Callable[[Runner], Iterator[Row]]:
        def run(runner: Runner) -> Iterator[Row]:
            yield Row("before", OK, "fine")
            runner.run(*arguments)

        return run

    late = run_step(Step("late", 0.1, command("task=plan")), tmp_path / "a", [], 100)
    assert [row["status"] for row in late["rows"]] == [OK, SKIPPED] and late["ended"]
    assert late["rows"][1]["way_out"] == late["commands"][0] == "python -m solrl_lightning task=plan"
    cut = run_step(Step("cut", 1000, command("task=plan")), tmp_path / "a", [], 0.1)
    assert not cut["ended"] and not cut["commands"] and "task=prove" in cut["rows"][0]["way_out"]
    failed = run_step(Step("failed", 100, command("no.such=1")), tmp_path / "a", [], 100)
    assert not failed["ended"] and failed["rows"][1]["status"] == WRONG
    assert "has failed: error: " in failed["rows"][1]["result"] and "no.such" in failed["rows"][1]["result"]


@pytest.mark.slow
def test_command_continues_where_the_last_one_ended(command: Callable[..., Any], tmp_path: Path) -> None:
    finished = command("task=prove", "trainer=cpu", "task.steps=[sol_rl]")
    assert finished.status == 0, finished.out + finished.err
    file = tmp_path / "proof" / "proof.json"
    first = json.loads(file.read_text())
    file.write_text(json.dumps(first | {"machine": first["machine"] | {"threads": 99}}))  # as on a less busy machine
    finished = command("task=prove", "trainer=cpu", "task.minutes=0.01")
    assert finished.status == 0 and "left: doctor, resume" in finished.out, finished.out + finished.err
    result = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert result["counts"] == {"ok": 2, "slow": 0, "wrong": 0, "skipped": 2}
    assert [*result["steps"]] == ["doctor", "sol_rl", "resume"] and result["steps_left"] == ["doctor", "resume"]
    page = (tmp_path / "proof" / "proof.html").read_text()
    assert "nvfp4 (emulated): reward 0.5" in page and "there is no time left" in page
    with claimed(tmp_path / "proof", new=False):
        second = command("task=prove", "trainer=cpu", "task.minutes=0.01")
    assert second.status == 2 and "proof" in second.err and json.loads(file.read_text()) == result
    wrong = command("task=prove", "trainer=cpu", "task.steps=[flux1]")
    assert wrong.status == 2 and "there is no step flux1 on this machine" in wrong.err
    assert not (tmp_path / "outputs" / "train").exists()
