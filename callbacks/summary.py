"""Summarises a run when it ends: ``summary.json``, ``report.html``, TensorBoard's HParams, and a table on the terminal.

A run that fails before training starts does not overwrite an earlier summary. All values are from rank 0, because
collectives are not possible after an exception.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

import solrl_lightning
from solrl_lightning.artifacts.files import finite_only, iterations_done, read_checkpoint, write_atomically
from solrl_lightning.artifacts.formatting import (
    counted,
    difference,
    gibibytes,
    number,
    numbers,
    path_option,
    two_decimals,
)
from solrl_lightning.artifacts.loggers import trackers_of
from solrl_lightning.artifacts.run_folder import BEST, LAST, RECORD
from solrl_lightning.callbacks.checkpoints import BestCheckpoint
from solrl_lightning.callbacks.common import file_logger, find_callback, loop_of, module_of, stop_reason
from solrl_lightning.callbacks.guard import Guard
from solrl_lightning.callbacks.history import MetricHistory
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.timings import StageTimings
from solrl_lightning.errors import WriteError, sentence
from solrl_lightning.machine.environment import machine, versions
from solrl_lightning.machine.memory import peak_memory
from solrl_lightning.metrics.selection_gain import GAIN_EXPONENT
from solrl_lightning.study.report import best_text, parts_learned, render, run_page, selection_text, shown_stages

_OUTPUTS = {name: Path(name) for name in ("lora", "transformer", "tensorboard", "csv", "wandb", "mlflow", "samples")}
_PATHS = {"last_checkpoint": LAST, "best_checkpoint": BEST, **_OUTPUTS, "config": RECORD}
_STATE = "run_summary"  # key in the checkpoint
_COLUMNS = ("family", "lora_rank", "lr", "objective", "precision", "reward", "seed")  # of HParams, which shows five
_POLICY_METRICS = ("train/", "policy/", "reward/group_std", "reward/zero_std_fraction")  # of summary.json


class RunSummary(Callback):
    """Writes the files into ``trainer.default_root_dir``. Must be the last callback: it lists what the others write.

    Args:
        hparams: name -> value of selected configuration keys; `config` in summary.json.
    """

    def __init__(self, hparams: Mapping[str, Any]) -> None:
        self.hparams = dict(hparams)
        self._started: float | None = None
        self._open = False  # True from the start of training until the summary is written
        self._seconds_before = 0.0  # of the runs that this one resumes
        self._first: dict[str, float] = {}  # what the policy did in its first iteration, and in the last one
        self._last: dict[str, float] = {}
        self._stopped_by: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._started is None:  # the evaluation before training calls setup, too
            self._started = time.perf_counter()
        for tracker in trackers_of(trainer):
            tracker.log_options(self.hparams)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open = True  # the evaluation before training; a resumed run has none

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = trainer.callback_metrics.items()
        self._last = {name: float(value) for name, value in logged if name.startswith(_POLICY_METRICS)}
        self._first = self._last | self._first

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped_by = stop_reason(trainer)
        whole = trainer.current_epoch >= (trainer.max_epochs or 0) or loop_of(trainer).is_time_up
        self._finish(trainer, pl_module, "completed" if whole else "stopped early")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An error after SIGTERM may be of what the signal ended, too, such as a compiler.
        interrupted = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        interrupted |= loop_of(trainer).termination.requested
        self._finish(trainer, pl_module, "interrupted" if interrupted else "failed", exception)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        module = module_of(pl_module)
        metrics = {"first_metrics": self._first, "last_metrics": self._last}
        evaluations = {"eval_history": list(module.evaluation.history), "eval_base": module.evaluation.base}
        checkpoint[_STATE] = {"seconds": self._seconds(), **evaluations, **metrics}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A checkpoint saved without this callback has no such key.
        state = checkpoint.get(_STATE, {"seconds": 0.0, "eval_history": []})
        self._seconds_before = state["seconds"]
        self._first, self._last = state.get("first_metrics", {}), state.get("last_metrics", {})
        module = module_of(pl_module)
        if module.evaluation.comparable:
            module.evaluation.history[:0] = state["eval_history"]
            module.evaluation.base = state.get("eval_base")  # an older version has none

    def _seconds(self) -> float:
        return self._seconds_before + (time.perf_counter() - self._started if self._started is not None else 0.0)

    def _finish(
        self, trainer: Trainer, pl_module: LightningModule, status: str, exception: BaseException | None = None
    ) -> None:
        if not self._open or not trainer.is_global_zero:
            return
        error = f"{type(exception).__name__}: {sentence(exception)}" if exception and status == "failed" else None
        facts, run = finite_only(self.collect(trainer, pl_module, status, error)), Path(trainer.default_root_dir)
        # A WriteError means that the disk is full; a second one, of the large report, would hide the first.
        with_report = not isinstance(exception, WriteError)
        if with_report:
            facts["paths"]["report"] = str(run.resolve() / "report.html")
            history = find_callback(trainer, MetricHistory)
            write_atomically(run / "report.html", render(run_page(facts, history.rows if history else [], run)))
        # The last file, as a run that has it has ended; one without it is finished by the same command.
        write_atomically(run / "summary.json", (json.dumps(facts, indent=2, default=str) + "\n").encode())
        file_logger.info(format_summary(facts))
        self._open = False  # a later exception must not overwrite the summary
        values = {key: facts[key] for key in ("final_reward", "improvement", "base_reward", "seconds_total")}
        values["rank_spearman"] = ((facts["rank_fidelity"] or {}).get("mean") or {}).get("spearman")
        results = {f"summary/{key}": value for key, value in values.items() if value is not None}
        for tracker in trackers_of(trainer):
            columns = {name: self.hparams[name] for name in _COLUMNS if name in self.hparams}
            tracker.log_results(columns, results, trainer.current_epoch)
        print(format_summary(facts), flush=True)  # last, as the reader of the output may be gone

    def collect(self, trainer: Trainer, pl_module: LightningModule, status: str, error: str | None) -> dict[str, Any]:
        """Return the content of summary.json."""
        module = module_of(pl_module)
        # A resume repeats an interrupted iteration and its evaluation: keep the later one.
        latest = {row["iteration"]: row for row in module.evaluation.history}
        evaluations = [latest[iteration] for iteration in sorted(latest)]
        reward = module.rewards.name
        base, final, evaluated_at = base_and_final(evaluations, reward)
        others = {
            name: {"weight": weight, "base": of_base, "final": of_final}
            for name, weight in module.rewards.weights.items()
            if name != reward
            for of_base, of_final, _ in [base_and_final(evaluations, name)]
        }
        run = Path(trainer.default_root_dir).resolve()
        guard, best = find_callback(trainer, Guard), find_callback(trainer, BestCheckpoint)
        if best is not None and not best.path.is_file():  # nothing was evaluated, or the disk was full
            best = None
        timings, last = find_callback(trainer, StageTimings), run / LAST
        allocated, reserved = peak_memory(trainer.strategy.root_device)
        held_out = {
            "prompts": len(module.evaluation.prompts),
            "images_per_prompt": module.evaluation.images,
            "steps": module.evaluation.steps,
            "digest": module.evaluation.digest,
            **module.evaluation.digests,
        }
        seconds = timings.seconds_per_stage() if timings else {}
        ranks = rank_fidelity(find_callback(trainer, RankCorrelation))
        paths = {name: str(run / relative) for name, relative in _PATHS.items() if (run / relative).exists()}
        return {
            "status": status,
            "error": error,
            "stopped_by": self._stopped_by,
            "reward": reward,
            "base_reward": base,
            "final_reward": final,
            "final_reward_iteration": evaluated_at,
            "best_reward": best.reward if best else None,
            "best_iteration": best.iteration if best else None,
            "best_monitor": (best.monitor or reward) if best else None,
            "improvement": final - base if base is not None and final is not None else None,
            "other_rewards": others,
            "iterations": loop_of(trainer).iterations_done,
            "time_is_up": loop_of(trainer).is_time_up,
            "ckpt": trainer.ckpt_path and str(trainer.ckpt_path),
            "last_checkpoint_iterations": iterations_done(read_checkpoint(last)) if last.exists() else None,
            "seconds_total": self._seconds(),
            "seconds_since_process_start": time.perf_counter() - solrl_lightning.BEGAN,
            "seconds_before_resume": self._seconds_before,
            "seconds_per_stage": seconds,
            "rank_fidelity": ranks,
            "selection": selection(loop_of(trainer), ranks, seconds),
            "policy_metrics": {
                name: {"first": first, "last": self._last.get(name)} for name, first in self._first.items()
            },
            "alarms": [alarm._asdict() for alarm in guard.alarms] if guard else [],
            "guarded": guard is not None,
            "precision_backend": str(module.transformers.precision_backend),
            "peak_memory_bytes": allocated,
            "peak_memory_reserved_bytes": reserved,
            "held_out": held_out,
            "digests": {"data.train": loop_of(trainer).digest_of_prompts, "model.pretrained": module.model.base_digest},
            "evaluations": evaluations,
            "config": self.hparams,
            "versions": versions(),
            "machine": machine(trainer.strategy.root_device, trainer.world_size),
            "paths": {"run": str(run), **paths},
        }


def base_and_final(
    evaluations: Sequence[Mapping[str, Any]], reward: str
) -> tuple[float | None, float | None, int | None]:
    """Return a held-out reward before training, its latest one, and the iteration of the latest; None if missing.

    Before training: of the base or, where a branch is evaluated in another way, of the state that it starts from.
    """
    scored = [row for row in evaluations if reward in row]
    first = scored[:1] if len(scored) > 1 else [row for row in scored if row["iteration"] == 0]
    base = float(first[0][reward]) if first else None
    if len(scored) == len(first):
        return base, None, None
    return base, float(scored[-1][reward]), scored[-1]["iteration"]


def rank_fidelity(ranks: RankCorrelation | None) -> dict[str, Any] | None:
    """Return first, last and mean of the probes, and the latest correlation on the kept set; None without a proxy.

    Means are over the "ranked" of all "probes", whose candidates have an order, and the spread ratio's over "spreads".
    """
    if ranks is None or not (ranks.history or ranks.last_kept):
        return None
    fidelity: dict[str, Any] = {"probes": len(ranks.history), **ranks.last_kept}
    if ranks.history:
        names = [name for name in ranks.history[0] if name != "iteration"]
        columns = {name: [row[name] for row in ranks.history if math.isfinite(row[name])] for name in names}
        mean = {name: fmean(values) if values else None for name, values in columns.items()}
        fidelity |= {"ranked": len(columns["spearman"]), "spreads": len(columns.get("spread_ratio", []))}
        fidelity |= {"first": ranks.history[0], "last": ranks.history[-1], "mean": mean}
    return fidelity


def selection(
    loop: Any, ranks: Mapping[str, Any] | None, seconds: Mapping[str, Mapping[str, float | None]]
) -> dict[str, float] | None:
    """Return the expected gain of selection (`metrics/selection_gain.py`) and its cost, both of an iteration.

    The cost is the median iteration over the same one without exploration and with ``keep`` samples from their noise.
    None without a probe, or of fewer than three iterations: the first one may compile, which their median leaves out.
    """
    if ranks is None or loop.explored is None or loop.iterations_done < 3:
        return None
    ratio = (ranks.get("mean") or {}).get("spread_ratio")
    whole, explore, regenerate = (
        seconds.get(name, {}).get("median") for name in ("iteration", "explore", "regenerate")
    )
    if ratio is None or whole is None or explore is None or regenerate is None:
        return None
    cost = whole / (whole - explore - regenerate + loop.passes_without_selection * regenerate)
    return {"gain": ratio**GAIN_EXPONENT, "cost": cost, "probes": ranks["spreads"]}


def format_summary(facts: Mapping[str, Any]) -> str:
    """Return the table that a run prints at its end; report.html has the rest."""
    rows = [("status", _status(facts))]
    saved_at, evaluated_at = facts["last_checkpoint_iterations"], facts["final_reward_iteration"]
    if saved_at is None and facts["iterations"] and facts["status"] in ("interrupted", "failed"):
        again = f"the same overrides with ckpt=auto {path_option('hydra.run.dir', facts['paths']['run'])} begin again"
        if facts.get("ckpt"):  # of another run, with which ckpt=auto would not begin
            again = "the same command with another hydra.run.dir begins again"
        rows.append(("last checkpoint", f"none was written yet; {again}"))
    elif saved_at is not None and saved_at < facts["iterations"]:
        rows.append(("last checkpoint", f"after {counted(saved_at, 'iteration')}; a resume repeats the later ones"))
    when = "" if evaluated_at is None else f", evaluated after {counted(evaluated_at, 'iteration')}"
    rows.append((f"{facts['reward']} reward", change(facts["base_reward"], facts["final_reward"]) + when))
    for name, other in facts["other_rewards"].items():
        watched = ", weight 0: not trained on" if other["weight"] == 0 else ""
        rows.append((f"{name} reward", change(other["base"], other["final"]) + watched))
    if learned := [f"{name} {' -> '.join(two_decimals(base, last))}" for name, base, last in parts_learned(facts)]:
        rows.append(("in detail", ", ".join(learned)))
    if facts["best_reward"] is not None:
        best = f"{number(facts['best_reward'])} after {best_text(facts)}"
        branch = path_option("ckpt", Path(facts["paths"]["run"]) / BEST)
        rows.append((f"best {facts['best_monitor']}", f"{best}; {branch} branches from it"))
    for alarm in facts["alarms"]:
        when = f"after iteration {alarm['iteration']}, since iteration {alarm['since']}"
        rows.append(("alarm", f"{when}: {alarm['saw']}"))
    if not facts["alarms"]:
        rows.append(("alarms", "none" if facts["guarded"] else "nothing watched: callbacks.guard is off"))
    medians = {name: seconds["median"] for name, seconds in shown_stages(facts).items()}
    if (each := medians.pop("iteration", None)) is not None:
        stages = ", ".join(f"{name} {median:.2f}" for name, median in medians.items() if median is not None)
        rows.append(("an iteration", f"median {each:.2f} s ({stages}), without evaluation, probe, grid"))
        if each and (explore := medians.get("explore")) is not None:
            verdict = selection_text(facts) or "task=audit measures whether selection pays here"
            rows.append(("exploring", f"{100 * explore / each:.0f} % of an iteration; {verdict}"))
    fidelity = facts["rank_fidelity"] or {}
    if "last" in fidelity:
        first, last, mean = numbers([fidelity[which]["spearman"] for which in ("first", "last", "mean")])
        ranks = facts["machine"]["devices"]
        prompts = "another prompt" if ranks == 1 else f"{ranks} other prompts"
        ranked, made = fidelity["ranked"], fidelity["probes"]
        of_all = f"{made} probes" if ranked == made else f"{ranked} of {made} probes (the others have no order)"
        probes = f"mean of {of_all}, each of {prompts} ({first} first, {last} last)"
        rows.append(("proxy spearman", f"{mean}, {probes if made > 1 else 'of 1 probe'}"))
    rows.append(("precision", facts["precision_backend"]))
    reserved, memory = facts["peak_memory_reserved_bytes"], gibibytes(facts["peak_memory_bytes"])
    rows.append(("peak memory", memory + ("" if reserved is None else f", {gibibytes(reserved)} reserved")))
    rows.append(("run folder", facts["paths"]["run"] + (", with report.html" if "report" in facts["paths"] else "")))
    if facts["status"] == "completed" and "config" not in facts["paths"]:
        rows.append(("moved", f"the folder was renamed or removed during the run; to resume, copy its {RECORD} here"))
    elif facts["status"] == "completed":
        folder = facts["paths"]["run"]
        longer = f"ckpt=last {path_option('hydra.run.dir', folder)} iterations={2 * facts['iterations']}"
        longer += " max_seconds=null" * facts["time_is_up"]
        doubt = "task=audit says which family a next run should have; " if "explore" in medians else ""
        use = f"task=generate and task=export use the result, {path_option('ckpt', f'{folder}/{LAST}')}"
        rows.append(("next", f"{doubt}{longer} trains on; {use}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"  {name:<{width}}  {value}" for name, value in rows), ""])


def _status(facts: Mapping[str, Any]) -> str:
    status = f"{facts['status']} after {counted(facts['iterations'], 'iteration')} in {facts['seconds_total']:.0f} s"
    if facts["seconds_before_resume"] > 0:
        status += f", {facts['seconds_before_resume']:.0f} s of them before it was resumed"
    status += f" ({facts['seconds_since_process_start']:.0f} s with start-up)"
    if facts["stopped_by"] is not None:
        status += f", by {facts['stopped_by']}"
        result = "transformer" if "transformer" in facts["paths"] else "lora"
        status += f"; {result}/ has the weights of the best checkpoint" if facts["best_reward"] is not None else ""
    elif facts["status"] == "stopped early":
        status += ", by a callback that set trainer.should_stop"
    return status  # the error follows


def change(base: float | None, final: float | None) -> str:
    """Return ``base -> final (difference)``."""
    if base is None and final is None:
        return "not evaluated"
    if base is None or final is None:
        return f"{number(base)} before training, not evaluated after it" if final is None else number(final)
    return " -> ".join(numbers([base, final])) + f" ({difference(base, final)})"
