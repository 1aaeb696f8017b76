"""task=prove: what this machine computes, step by step, as a page.

A step runs commands of this application in processes of their own, with a time limit. Its rows are as in
task=doctor: what is slow or wrong has the next command to run. Both files are written before a row is printed.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

from solrl_lightning.artifacts.files import finite_only, write_atomically
from solrl_lightning.artifacts.formatting import command_line, counted, duration, path_option, shell_quoted
from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row, check_right, format_row, write_json
from solrl_lightning.build import device_of
from solrl_lightning.errors import UserError
from solrl_lightning.machine.environment import machine, versions
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Prove
from solrl_lightning.quantization.backends import hardware_of
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.sizing.proof import CutOff, Failed, Runner, Step, steps_of
from solrl_lightning.study.report import Page, Section, Table, Tile, render

ENDED, CUT, FAILED = "whole", "cut off", "failed"
_LEAST = 20.0  # seconds in which a step may still begin
_FEW = 5  # rows of a step that the page shows
_OTHER = "task.folder=<folder>"


class Outcome(NamedTuple):
    """What a step has shown."""

    end: str
    """ENDED, CUT (by a time limit, or killed) or FAILED."""
    seconds: float
    limit: float
    """Seconds that the step may take."""
    commands: list[str]
    rows: list[Row]


def prove(cfg: Run) -> dict[str, Any]:
    """Run the steps that have not ended on this machine, and write ``proof.html`` and ``proof.json`` after each row.

    Raises:
        UserError: another proof runs in the folder, or the one in it is damaged or of another machine.
        CheckFailed: a row is wrong.
        SIGTERMException: SIGTERM has ended this process and the command that it ran.
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
    command = command_line(["task=prove", *options])
    again = f"{command} {path_option('task.folder', task.folder)}"
    # The page shows no absolute folder.
    shown = f"{command} {path_option('task.folder', folder.name if Path(task.folder).is_absolute() else task.folder)}"
    here = {"machine": machine(device, 1), "versions": versions(), "first_run": first_run(hardware_of(device)).options}
    with (
        claimed(folder, new=False, other=_OTHER),
        _line_at_interrupt(f"{folder / 'proof.html'} stays; continue with: {again}"),
    ):
        done = read_outcomes(folder, here)
        result = write_result(folder, here, {name: done.get(name) for name in steps}, shown)
        for name in task.steps or result["steps_left"]:
            left = end - time.monotonic()
            if left < min(_LEAST, steps[name].seconds):
                print(f"{name} has not begun: there is no time left\n")
                break
            for outcome in run_step(steps[name], folder / name.replace(" ", "_"), options, left):
                if replaces(outcome, done.get(name)):
                    done[name] = outcome
                    result = write_result(folder, here, {name: done.get(name) for name in steps}, shown)
            print("" if done[name] is outcome else f"the earlier result of {name} stays\n")
    print(f"{summary_of(result)}\n  {folder / 'proof.html'}\n  {folder / 'proof.json'}\n{use_of(result)}")
    if result["steps_left"]:
        print(f"continue with: {again}")
    check_right([name for name, step in result["steps"].items() if WRONG in [row["status"] for row in step["rows"]]])
    return result


@contextmanager
def _line_at_interrupt(line: str) -> Iterator[None]:
    """Print a line at Ctrl-C and SIGTERM before they end this process."""

    def terminate(*_: object) -> NoReturn:
        raise SIGTERMException

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, SIGTERMException):
        print(line, file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def write_result(
    folder: Path, here: Mapping[str, Any], steps: Mapping[str, Outcome | None], again: str
) -> dict[str, Any]:
    """Write and return the results of ``steps``, None of one that has not run, without the machine's paths.

    ``again``: the command that continues.
    """
    done = {name: step for name, step in steps.items() if step is not None}
    statuses = [row.status for step in done.values() for row in step.rows]
    counts = {status: statuses.count(status) for status in (OK, SLOW, WRONG, SKIPPED)}
    left = [name for name in steps if name not in done or done[name].end != ENDED]
    left.sort(key=lambda name: name in done and done[name].seconds >= done[name].limit)  # too slow here: the last ones
    rows = {name: [row._asdict() for row in step.rows] for name, step in done.items()}
    facts = {name: {**step._asdict(), "rows": rows[name]} for name, step in done.items()}
    text = json.dumps(finite_only({**here, "counts": counts, "steps_left": left, "steps": facts}), ensure_ascii=False)
    places = {folder: folder.name, Path.cwd(): ".", Path.home(): "~", Path(sys.prefix): "<python>"}
    for place, name in places.items():
        if place != Path(place.anchor):
            text = text.replace(str(place), name)
    result: dict[str, Any] = json.loads(text)
    write_json(folder / "proof.json", result)
    write_atomically(folder / "proof.html", render(proof_page(result, again)))
    return result


def read_outcomes(folder: Path, here: Mapping[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes of the steps that ``folder`` has.

    Raises:
        UserError: ``proof.json`` is damaged, or of another machine or other versions.
    """
    file = folder / "proof.json"
    if not file.is_file():
        return {}
    option = path_option("task.folder", folder)
    try:
        before = json.loads(file.read_text())
        changed = [key for key, value in here.items() if _without_threads(before[key]) != _without_threads(value)]
        rows = {name: [Row(**row) for row in step["rows"]] for name, step in before["steps"].items()}
        outcomes = {name: Outcome(**step | {"rows": rows[name]}) for name, step in before["steps"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{option} is invalid: its proof.json is none of task=prove, or damaged ({type(error).__name__}: {error}). "
            f"Choose another folder with {_OTHER}; rm {shell_quoted(str(file))} begins a damaged proof again."
        ) from error
    if changed:
        raise UserError(
            f"{option} is invalid: its proof must be of this machine and these versions, and differs in "
            f"{', '.join(changed)}. Begin another one with {_OTHER}."
        )
    return outcomes


def _without_threads(facts: Any) -> Any:
    """Leave out the number of threads, which follows the load of the machine."""
    return {key: value for key, value in facts.items() if key != "threads"} if isinstance(facts, dict) else facts


def replaces(new: Outcome, old: Outcome | None) -> bool:
    """Return whether a step's new outcome replaces the old one; one that is cut off does not if it shows less."""
    return old is None or new.end != CUT or (old.end == CUT and len(new.rows) >= len(old.rows))


def run_step(step: Step, folder: Path, options: list[str], seconds: float) -> Iterator[Outcome]:
    """Run a step for at most ``seconds``, and yield its outcome after each row, which is then printed, and at the end.

    It runs in ``<folder>.new``, which replaces ``folder`` when the step has ended.
    """
    attempt = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(attempt, ignore_errors=True)
    attempt.mkdir(parents=True)
    begin, rows = time.monotonic(), list[Row]()
    runner = Runner(attempt, options, min(step.seconds, seconds))
    print(f"{step.name}, at most {duration(min(step.seconds, seconds))}; output: {runner.log}", flush=True)

    def outcome(end: str) -> Outcome:
        return Outcome(end, time.monotonic() - begin, step.seconds, list(runner.commands), list(rows))

    def with_row(end: str, row: Row) -> Iterator[Outcome]:
        rows.append(row)
        yield outcome(end)
        print(format_row(row), flush=True)

    try:
        for row in step.run(runner):
            yield from with_row(CUT, row)
    except CutOff:
        text = f"cut off after {duration(time.monotonic() - begin)}"
        way_out = "repeat it with more time (task.minutes)"
        if step.seconds <= seconds:
            text += ", its whole limit: this machine was busy, or is too slow"
            way_out = "repeat it when nothing else runs"
        yield from with_row(CUT, Row(step.name, SKIPPED, text, way_out))
    except Failed as error:
        text = f"{runner.commands[-1]} has failed: {error}"
        yield from with_row(FAILED, Row(step.name, WRONG, text, f"a report of this with {runner.log}"))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        attempt.rename(folder)
        yield outcome(ENDED)


def summary_of(result: Mapping[str, Any]) -> str:
    counted_rows = ", ".join(f"{number} {status}" for status, number in result["counts"].items())
    cut = [name for name, step in result["steps"].items() if step["end"] == CUT]
    cut_off = f"; cut off: {', '.join(cut)}" if cut else ""
    left = f"; left: {', '.join(result['steps_left'])}" if result["steps_left"] else ""
    return f"{counted_rows}{cut_off}{left}"


def use_of(result: Mapping[str, Any]) -> str:
    """Return what to do with proof.json, as a sentence."""
    if result["machine"]["device"].startswith("CPU"):
        return "There is no need to send proof.json: only proofs of GPUs are collected."
    return 'Please attach proof.json to an issue of the form "A proof of a GPU", also where all is well.'


def proof_page(result: Mapping[str, Any], again: str) -> Page:
    """Return proof.html: what is left, what is outside its expected range, and each step with all its rows."""
    outside = [
        (name, row["check"], row["status"], row["result"], row["expected"], row["way_out"])
        for name, step in result["steps"].items()
        for row in step["rows"]
        if row["status"] != OK
    ]
    first = [Section("To continue", command=again)] if result["steps_left"] else []
    if outside:
        table = Table(("step", "row", "status", "result", "expected", "next"), outside, is_text=True)
        first.append(Section("Outside the expected range", tables=[table]))
    steps = [
        Section(
            name,
            [f"{duration(step['seconds'])}, {step['end']}."],
            command="\n".join(step["commands"]),
            tables=[
                Table(
                    ("row", "status", "result", "expected"),
                    [(row["check"], row["status"], row["result"], row["expected"]) for row in step["rows"]],
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
        f"{summary_of(result)}. {use_of(result)}",
        tiles,
        [*first, *steps],
        footer=f"torch {result['versions']['torch']}; {duration(spent)}",
    )
