"""The steps of task=prove. Each runs commands of this application and yields rows about the files that they write."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from solrl_lightning.artifacts.finished_runs import Run
from solrl_lightning.artifacts.formatting import command_line, number
from solrl_lightning.artifacts.run_folder import LAST
from solrl_lightning.artifacts.tables import OK, SKIPPED, Row, judged
from solrl_lightning.names import AUTO
from solrl_lightning.quantization import resolve
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.quantization.formats import FORMATS
from solrl_lightning.sizing.footprint import OPTIONS
from solrl_lightning.study.elsewhere import GPUS, TABLES, counts
from solrl_lightning.study.time_to_reward import first_reached

FAMILIES = ("sol_rl", "prefix", "race")
MODELS = sorted({name.partition("_")[0] for name in TABLES})  # that have estimates
_REWARD = 0.8  # of the embedded model, whose base has .574
_SLOWEST = 1.5  # times an estimate of seconds, whose error is 30 %
_QUIET = "logger=csv callbacks.sample_grid.every=0 callbacks.rank_correlation.probe_every=0".split()
_FULL_SIZE = (
    "model.weights=random data=shapes iterations=2 prompts_per_iteration=1 family.pool=48 family.keep=12 "
    "model.rollout_batch=12 data.eval_prompts=1 data.eval_images=1 model.eval_steps=1 evaluation.every=2"
).split()


class CutOff(Exception):
    """A step has reached its time limit."""


class Failed(Exception):
    """A command of a step has ended with an error."""


# Ends a command, with all its processes, when the write end of its input closes: also where this process is killed.
_ENDER = ["sh", "-c", 'read -r _; kill -KILL "-$0"']


class Runner:
    """Runs the commands of a step in its folder.

    Args:
        folder: new; holds the output of all commands as ``log.txt``.
        options: of every command, such as the device's.
        seconds: limit of all commands together.
    """

    def __init__(self, folder: Path, options: list[str], seconds: float) -> None:
        self.folder, self.options, self.end = folder, options, time.monotonic() + seconds
        self.log, self.commands = folder / "log.txt", list[str]()

    def run(self, *arguments: str, accepted: tuple[int, ...] = (0,), kill_at: Path | None = None) -> None:
        """Run a command as `watch` does."""
        for _ in self.watch(*arguments, accepted=accepted, kill_at=kill_at):
            pass

    def watch(self, *arguments: str, accepted: tuple[int, ...] = (0,), kill_at: Path | None = None) -> Iterator[None]:
        """Run a command, and kill it when the file ``kill_at`` exists. Yield many times while it runs, and at its end.

        Raises:
            CutOff: the time is up.
            Failed: the command has another exit status than those ``accepted``.
        """
        words = [*arguments, *self.options]
        self.commands.append(command_line(words))
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "PYTHONUNBUFFERED": "1", "TORCH_LOGS": "recompiles"}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "solrl_lightning", *words],
                cwd=self.folder,
                env=os.environ | state,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            ender = [*_ENDER, str(process.pid)]
            with (
                process,
                subprocess.Popen(ender, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True),
            ):
                running = True
                while running:
                    running = process.poll() is None and not (kill_at and kill_at.exists())
                    yield
                    if running and time.monotonic() > self.end:
                        raise CutOff
                    time.sleep(0.05 * running)
        if process.returncode not in accepted:
            lines = self.log.read_text(errors="replace").split("\n")
            raise Failed(next((line for line in reversed(lines) if line.strip()), "no output"))

    def read(self, file: str) -> Any:
        """Return a JSON file in the folder."""
        return json.loads((self.folder / file).read_text())


class Step(NamedTuple):
    name: str
    seconds: float
    """Time limit."""
    run: Callable[[Runner], Iterator[Row]]


def steps_of(hardware: Hardware) -> list[Step]:
    """Return the steps on ``hardware``, those that tell most in the least time first."""
    if hardware.type == "cpu":
        small = ("experiment=smoke", *_QUIET)
        return [
            Step("doctor", 120, partial(examine, ("task.iterations=0",))),
            Step("sol_rl", 120, partial(train, "sol_rl", small, None)),
            Step("resume", 240, resume),
        ]
    real = ("iterations=60", "evaluation.every=6", "data.eval_images=4", *_QUIET)
    random = ("model.weights=random", "task.iterations=0")
    at_full_size = [
        Step(f"{model} {family}", 360, partial(full_size, model, family, hardware))
        for model in MODELS
        for family in FAMILIES
    ]
    trained = [
        Step(family, 300, partial(train, family, real, _REWARD)) for family in ("sol_rl", "diffusionnft", "race")
    ]
    examined = [Step(f"doctor {model}", 180, partial(examine, (f"model={model}", *random))) for model in MODELS]
    others = [
        Step(f"doctor {precision}", 90, partial(examine, (f"precision={precision}", "task.iterations=0")))
        for precision in FORMATS
        if resolve(precision, AUTO, hardware).name != "emulated"
    ]
    first = [Step("doctor", 180, partial(examine, ())), trained[0], *at_full_size[:2], Step("resume", 240, resume)]
    return [*first, *trained[1:], examined[0], *at_full_size[2:], *examined[1:], *others]


def examine(options: tuple[str, ...], runner: Runner) -> Iterator[Row]:
    """Yield the rows of task=doctor as it writes them."""
    file, known = "run/doctor.json", 0
    for _ in runner.watch("task=doctor", *options, "hydra.run.dir=run", accepted=(0, 1)):
        rows = runner.read(file)["rows"] if (runner.folder / file).exists() else []
        yield from (Row(**row) for row in rows[known:])
        known = len(rows)


def train(family: str, options: tuple[str, ...], reward: float | None, runner: Runner) -> Iterator[Row]:
    """Train the embedded model, and yield the row on the seconds to ``reward``, if any is to be reached."""
    runner.run(f"family={family}", *options, "hydra.run.dir=run")
    facts, laps = runner.read("run/summary.json"), _laps(runner.folder)
    yield _compiled_once(runner)
    rows = facts["evaluations"]
    base, last = facts["base_reward"], facts["final_reward"]
    text = (
        f"{facts['precision_backend']}: reward {base:.3f} -> {last:.3f} in {facts['iterations']} iterations, "
        f"{number(laps[-1]['time/iteration'], 3)} s the last one"
    )
    measured = {"evaluations": rows, "laps": laps, "precision_backend": facts["precision_backend"]}
    if reward is None:
        expected = "any reward: too few iterations to raise it"
        yield Row("reward", OK, f"{text}; not expected to rise in so few", "", measured, expected)
        return
    expected = f"at least {reward:g}: runs on a CPU have it after 36 iterations (docs/measurements.md)"
    reached = first_reached([row["seconds"] for row in rows], [row["shapes"] - reward for row in rows])
    first = max(0, laps[0]["time/iteration"] - laps[-1]["time/iteration"])
    measured |= {"reward": reward, "seconds": reached, "first_iteration": first}
    if reached is None:
        text += f"; {reward:g} is not reached"
    else:
        text += f"; {reward:g} after {reached:.1f} s, {max(0, reached - first):.1f} without compilation"
    way_out = command_line([f"family={family}", "precision=bf16"])
    yield judged("reward", text, way_out, measured, expected, wrong=reached is None)


def resume(runner: Runner) -> Iterator[Row]:
    """Kill a run after its first iteration, resume it, and yield the row on its weights and a whole run's."""
    options = ("experiment=smoke", "trainer.deterministic=true", "iterations=6", "evaluation.every=6", *_QUIET)
    runner.run(*options, "hydra.run.dir=whole")
    runner.run(*options, "hydra.run.dir=killed", accepted=(-signal.SIGKILL,), kill_at=runner.folder / "killed" / LAST)
    runner.run("ckpt=auto", *options, "hydra.run.dir=killed")
    file = Path("lora") / "pytorch_lora_weights.safetensors"
    whole, resumed = (load_file(runner.folder / name / file) for name in ("whole", "killed"))
    largest = max((whole[key] - resumed[key]).abs().max().item() for key in whole)
    text = "killed after its first iteration and resumed, trainer.deterministic=true: "
    text += f"weights differ by {largest:.1e}" if largest else "the weights of a whole run, bit for bit"
    expected = "a difference of 0: with trainer.deterministic=true a run resumes bit for bit (docs/resume.md)"
    measured = {"difference": largest}
    yield judged("resume", text, "trainer.deterministic=warn", measured, expected, wrong=largest > 0)


def full_size(model: str, family: str, hardware: Hardware, runner: Runner) -> Iterator[Row]:
    """Train a model with random weights for two iterations, and yield rows on its seconds, memory and compilations."""
    options = (f"model={model}", f"family={family}", *_FULL_SIZE)
    runner.run("task=plan", *options, "task.cards=[]", "hydra.run.dir=plan")
    plan = runner.read("plan/plan.json")["cards"][0]
    chosen = {argument for argument in plan["arguments"] if argument.partition("=")[0] in OPTIONS[1:]}
    smaller = sorted(chosen.difference(options))
    if not plan["fits"] or f"family={family}" not in plan["arguments"]:
        yield Row("memory", SKIPPED, f"the plan has no room for it in {plan['memory']:.1f} GB")
        return
    runner.run(*options, *smaller, *_QUIET, "hydra.run.dir=run")
    yield _compiled_once(runner)
    facts, lap = runner.read("run/summary.json"), _laps(runner.folder)[-1]
    peak, planned = facts["peak_memory_bytes"], plan["peak"]
    text = f"peak {peak / 1e9:.3g} GB, planned {planned / 1e9:.3g} GB; {' '.join(smaller) or 'no option changed'}"
    way_out = f"a report of this, and the options of the next smaller card: task=plan model={model}"
    measured, expected = {"peak": peak, "planned": planned}, f"at most {planned / 1e9:.3g} GB: the peak of task=plan"
    yield judged("memory", text, way_out, measured, expected, wrong=peak > planned)
    yield judge_seconds(model, family, hardware, counts(Run(str(runner.folder / "run"), facts)), lap)


def judge_seconds(model: str, family: str, hardware: Hardware, units: dict[str, float], lap: dict[str, float]) -> Row:
    """Return the row on an iteration's seconds: slow if the rollout or the training exceed the card's estimate."""
    seconds = {"rollout": lap.get("time/explore", 0.0) + lap["time/regenerate"], "train": lap["time/train"]}
    card = GPUS.get(hardware.capability[0])
    if card is None:
        text = ", ".join(f"{stage} {number(value, 3)} s" for stage, value in seconds.items())
        return Row("seconds", OK, f"{text}; there is no estimate for this card", "", {"seconds": seconds, "lap": lap})
    table = TABLES[f"{model}_{card}"]
    estimates = {
        "rollout": table.seconds({unit: count for unit, count in units.items() if unit != "row"}),
        "train": table.seconds({"row": units["row"]}),
    }
    text = ", ".join(
        f"{stage} {number(seconds[stage], 3)} s, estimate {number(estimates[stage], 3)} s" for stage in seconds
    )
    measured = {"seconds": seconds, "estimates": estimates, "lap": lap}
    expected = f"at most {_SLOWEST:g} times the seconds that task=compare estimates with task.cost={model}_{card}"
    slow = any(seconds[stage] > _SLOWEST * estimates[stage] for stage in seconds)
    way_out = f"task=benchmark model={model} model.weights=random data=shapes prompts_per_iteration=1".split()
    again = command_line([*way_out, f"task.families=[{family}]"])
    return judged("seconds", text, again, measured, expected, slow=slow)


def _compiled_once(runner: Runner) -> Row:
    """Return the row on the code that the last command has compiled after its first iteration."""
    _, first, later = runner.log.read_text(errors="replace").rpartition("\niteration 1/")
    if not first:
        raise Failed("it has printed no line of its first iteration")
    again = later.count("Recompiling function")
    way_out = "family.compile=false compile_training=false, and a report of this with log.txt"
    text = f"{again} recompilations after the first iteration"
    expected = "0: all later iterations have the shapes of the first"
    return judged("compilation", text, way_out, {"recompilations": again}, expected, wrong=again > 0)


def _laps(folder: Path) -> list[dict[str, float]]:
    """Return the seconds that each iteration of the run in ``folder`` has logged."""
    (file,) = (folder / "run" / "csv").rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    times = [{key: float(value) for key, value in row.items() if key.startswith("time/") and value} for row in rows]
    return [lap for lap in times if "time/iteration" in lap]
