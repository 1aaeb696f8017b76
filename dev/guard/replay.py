"""Apply the guard's rules on metrics to recorded runs: ``python dev/guard/replay.py <run folder> ...``.

Reads ``tensorboard/`` of each folder and prints the alarms that the default limits raise. The rules on rewards and
pictures need the values of single prompts, which only the checkpoint has.
"""

import sys
from pathlib import Path

from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from solrl_lightning.callbacks.alarms import METRICS, Alarm, History, Limits, find_alarms

ROOT = Path(__file__).resolve().parents[2]


def replayed(folder: Path, limits: Limits) -> tuple[int, list[Alarm]]:
    """Return the iterations of a run and the first alarm of each kind."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for metric in set(METRICS) & set(events.Tags()["scalars"]):
        for event in events.Scalars(metric):
            rows.setdefault(event.step, {"iteration": event.step})[metric] = event.value
    history = History([rows[step] for step in sorted(rows)])
    first: dict[str, Alarm] = {}
    for step in sorted(rows):
        for alarm in find_alarms(history.until(step), [], "", {}, limits):
            first.setdefault(alarm.name, alarm)
    return len(rows), list(first.values())


if __name__ == "__main__":
    defaults = OmegaConf.load(ROOT / "conf" / "callbacks" / "default.yaml")
    for name in sys.argv[1:]:
        if not Path(name, "tensorboard").is_dir():
            sys.exit(f"{name} has no tensorboard/, which this reads. Name a run with logger=tensorboard.")
        iterations, alarms = replayed(Path(name), Limits(**defaults.guard.limits))
        seen = "; ".join(f"{a.iteration}: {a.saw}" for a in alarms) or "no alarm on metrics"
        print(name, iterations, "iterations:", seen)
