"""task=prove: what this machine computes, step by step, as a page.

A step runs commands of this application in processes of their own, with a time limit. Its rows are as those of
task=doctor: what is slow or wrong has the next command to run. The page is complete after every step.
"""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_lightning import __version__
from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.formatting import command_line, counted, duration
from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row, format_row, write_json
from solrl_lightning.build import device_of
from solrl_lightning.errors import CheckFailed, UserError
from solrl_lightning.machine.environment import machine, versions
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Prove
from solrl_lightning.quantization.backends import hardware_of
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.sizing.proof import CutOff, Failed, Runner, Step, steps_of
from solrl_lightning.study.report import Page, Section, Table, Tile, render

_LEAST = 20.0  # seconds in which a step may still begin
_FEW = 5  # rows of a step that the page shows
_AGAIN = command_line(["task=prove"])


def prove(cfg: Run) -> dict[str, Any]:
    """Run the steps that have not ended on this machine, and write ``proof.html`` and ``proof.json`` after each.

    Raises:
        CheckFailed: a row is wrong.
    """
    task, device = cfg.task_as(Prove), device_of(cfg.trainer)
    folder, end = Path(task.folder).absolute(), time.monotonic() + 60 * task.minutes
    steps = {step.name: step for step in steps_of(hardware_of(device))}
    unknown = set(task.steps or ()) - steps.keys()
    if unknown:
        raise UserError(
            f"task.steps is invalid: there is no step {', '.join(sorted(unknown))} on this machine. The steps are "
            f"{', '.join(steps)}."
        )
    options = ["trainer=cpu"] if device.type == "cpu" else ["trainer=gpu", f"trainer.devices=[{device.index or 0}]"]
    here = {"machine": machine(device, 1), "versions": versions(), "first_run": first_run(hardware_of(device)).options}
    with claimed(folder, new=False):
        done = _ended(folder, here)
        result = write_result(folder, here, {name: done.get(name) for name in steps})
        for name in task.steps or result["steps_left"]:
            done[name] = run_step(steps[name], folder / name.replace(" ", "_"), options, end - time.monotonic())
            print("\n".join(format_row(Row(**row)) for row in done[name]["rows"]), flush=True)
            result = write_result(folder, here, {name: done.get(name) for name in steps})
    print(f"{summary_of(result)}\n  {folder / 'proof.html'}")
    wrong = [name for name, step in result["steps"].items() if any(row["status"] == WRONG for row in step["rows"])]
    if wrong:
        raise CheckFailed(f"wrong here: {', '.join(wrong)}; the lines above say what to do.")
    return result


def write_result(folder: Path, here: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return the results of ``steps``; None of one that has not run."""
    done = {name: step for name, step in steps.items() if step is not None}
    statuses = [row["status"] for step in done.values() for row in step["rows"]]
    counts = {status: statuses.count(status) for status in (OK, SLOW, WRONG, SKIPPED)}
    left = [name for name in steps if name not in done or not done[name]["ended"]]
    result = {**here, "counts": counts, "steps_left": left, "steps": done}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "proof.json", result)
    write_atomically(folder / "proof.html", render(proof_page(result)))
    return result


def _ended(folder: Path, here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the steps that have ended in ``folder`` on this machine."""
    file = folder / "proof.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    if any(_without_threads(before.get(key)) != _without_threads(value) for key, value in here.items()):
        return {}
    return {name: step for name, step in before["steps"].items() if step["ended"]}


def _without_threads(facts: Any) -> Any:
    """Leave out the number of threads, which follows the load of the machine."""
    return {key: value for key, value in facts.items() if key != "threads"} if isinstance(facts, dict) else facts


def run_step(step: Step, folder: Path, options: list[str], seconds: float) -> dict[str, Any]:
    """Run a step in a new ``folder`` for at most ``seconds``, and return its result."""
    print(f"\n{step.name}, at most {duration(min(step.seconds, max(0, seconds)))}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runner, rows, begin = Runner(folder, options, min(step.seconds, seconds)), list[Row](), time.monotonic()
    ended = seconds >= min(_LEAST, step.seconds)
    try:
        if ended:
            rows.extend(step.run(runner))
        else:
            rows.append(Row(step.name, SKIPPED, "there is no time left", _AGAIN))
    except CutOff:
        ended = seconds >= step.seconds  # otherwise it has a whole limit next time
        way_out = runner.commands[-1] if ended else _AGAIN
        rows.append(Row(step.name, SKIPPED, f"cut off after {duration(time.monotonic() - begin)}", way_out))
    except Failed as error:
        ended = False
        log = f"a report of this with {runner.log}"
        rows.append(Row(step.name, WRONG, f"{runner.commands[-1]} has failed: {error}", log))
    spent = time.monotonic() - begin
    return {"ended": ended, "seconds": spent, "commands": runner.commands, "rows": [row._asdict() for row in rows]}


def summary_of(result: Mapping[str, Any]) -> str:
    counted_rows = ", ".join(f"{number} {status}" for status, number in result["counts"].items())
    left = f"; left: {', '.join(result['steps_left'])}" if result["steps_left"] else ""
    return f"{counted_rows}{left}"


def proof_page(result: Mapping[str, Any]) -> Page:
    """Return proof.html: what is outside its expected range first, then each step with all its rows."""
    outside = [
        (name, row["check"], row["status"], row["result"], row["way_out"])
        for name, step in result["steps"].items()
        for row in step["rows"]
        if row["status"] != OK
    ]
    table = Table(("step", "row", "status", "result", "next"), outside, is_text=True)
    steps = [
        Section(
            name,
            [f"{duration(step['seconds'])}."],
            command="\n".join(step["commands"]),
            tables=[
                Table(
                    ("row", "status", "result"),
                    [(row["check"], row["status"], row["result"]) for row in step["rows"]],
                    folded=counted(len(step["rows"]), "row") if len(step["rows"]) > _FEW else "",
                    is_text=True,
                )
            ],
        )
        for name, step in result["steps"].items()
    ]
    spent = sum(step["seconds"] for step in result["steps"].values())
    tiles = [
        *(Tile(status, str(number), "rows") for status, number in result["counts"].items()),
        Tile("steps", str(len(result["steps"])), f"{len(result['steps_left'])} left"),
        Tile("first run", " ".join(option.partition("=")[2] for option in result["first_run"]), "on this hardware"),
    ]
    return Page(
        f"Proof: {result['machine']['device']}",
        f"{summary_of(result)}." + f" {_AGAIN} continues." * bool(result["steps_left"]),
        tiles,
        [*([Section("Outside the expected range", tables=[table])] if outside else []), *steps],
        footer=f"solrl_lightning {__version__}, torch {result['versions']['torch']}; {duration(spent)}",
    )
