"""task=doctor: measures in about a minute whether this machine can do the run.

Layers and blocks have the sizes of the chosen model and random weights, so only the rows about files need files.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

import solrl_lightning
from solrl_lightning.artifacts.tables import OK, SKIPPED, SLOW, WRONG, Row, check_right, format_row, write_json
from solrl_lightning.build import device_of, prepare_device
from solrl_lightning.callbacks.common import file_logger
from solrl_lightning.errors import UserError
from solrl_lightning.machine.memory import peak_memory, total_memory
from solrl_lightning.names import SHADOW
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Doctor
from solrl_lightning.policies.compilation import should_compile
from solrl_lightning.quantization import resolve_from
from solrl_lightning.quantization.backends import hardware_of
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.sizing.attention import attention_shapes, check_attention
from solrl_lightning.sizing.blocks import check_blocks
from solrl_lightning.sizing.environment import check_machine, local_path, locate
from solrl_lightning.sizing.footprint import RESERVE, fit
from solrl_lightning.sizing.layers import NO_SHADOW, check_layers, compare_backends, judge_backend
from solrl_lightning.sizing.plan import Json, plan_run, without_files
from solrl_lightning.sizing.trial import check_iterations, check_rewards, footprint_here, judge_memory, run_files


def doctor(cfg: Run) -> Json:
    """Print each row when it is measured, and write it to ``doctor.json``. CheckFailed if a row is wrong."""
    start, rows, path = time.perf_counter(), list[Row](), Path(cfg.run_dir) / "doctor.json"
    logging.disable(logging.INFO)  # messages of a run's start would appear between the rows
    try:
        files = (locate(key, source) for key, source in run_files(cfg).items())
        run = guarded("set-up", check_run(cfg), "a report of this with doctor.json")
        for row in chain(check_machine(), files, run):
            rows.append(row)
            print(format_row(row), flush=True)
            result = report(cfg, rows, time.perf_counter() - start)
            write_json(path, result)
    finally:
        logging.disable(logging.NOTSET)
    counted = ", ".join(f"{n} {status}" for status, n in result["counts"].items())
    whole = f"{result['seconds_since_process_start']:.0f} s with start-up"
    print(f"{counted}, in {result['seconds']:.0f} s ({whole})\n  {path}")
    check_right(dict.fromkeys(row.check for row in rows if row.status == WRONG))
    return result


def report(cfg: Run, rows: Sequence[Row], seconds: float) -> Json:
    """Return the content of ``doctor.json``, with the rows so far."""
    return {
        "model": cfg.model.pretrained,
        "weights": cfg.model.weights,
        "precision": cfg.precision.model_dump(),
        "family": cfg.tree()["family"],
        "rewards": list(cfg.reward.members),
        "counts": {status: sum(row.status == status for row in rows) for status in (OK, SLOW, WRONG, SKIPPED)},
        "rows": [row._asdict() for row in rows],
        "peak_memory": peak_memory(torch.device("cpu"))[0],
        "seconds": seconds,
        "seconds_since_process_start": time.perf_counter() - solrl_lightning.BEGAN,
    }


def guarded(check: str, rows: Iterator[Row], way_out: str) -> Iterator[Row]:
    """Yield the rows, and a wrong row in place of an error, so that the report is complete."""
    try:
        yield from rows
    except UserError as error:  # its message has the way out
        yield Row(check, WRONG, str(error))
    except Exception as error:
        file_logger.exception("%s", check)
        yield Row(check, WRONG, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", way_out)


def check_run(cfg: Run) -> Iterator[Row]:
    """Yield the rows about the run: precision, layers, compilation, memory, reward, iterations."""
    device = device_of(cfg.trainer)
    prepare_device(device)  # the rows are about the kernels of a run
    on_gpu = device.type == "cuda"
    backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
    compiled, _ = should_compile("family.compile", "rollouts", cfg.family.compile, device)
    shadow = backend if SHADOW in cfg.samplers else None
    total = total_memory(device)
    run = plan_run(without_files(cfg), backend, room=(room := total - RESERVE * 1e9))
    advice = first_run(hardware_of(device), shadow_fits=fit(run.footprint, run.options, room)["family"] is None)
    yield Row("first run", OK, f"{' '.join(advice.options)}: {advice.why}", "", advice._asdict())
    yield judge_backend(backend, device, shadow is not None)
    if shadow is not None and shadow.linear_cls is not None:
        rows = check_layers(run, shadow, cfg.model.rollout_batch, device, compiled)
        yield from guarded("layers", rows, f"another precision, or {NO_SHADOW}")
        if on_gpu:
            rows = compare_backends(run, shadow, cfg.model.rollout_batch, device, compiled)
            yield from guarded("backends", rows, "another precision.backend")
    yield from guarded("compilation", check_blocks(cfg, run, shadow, device, compiled), "family.compile=false")
    if on_gpu:
        batches = cfg.model.rollout_batch, cfg.model.micro_batch
        yield from guarded(
            "attention", check_attention(attention_shapes(run.model), batches, device), "another version of torch"
        )
    is_random = cfg.model.weights == "random"
    parts = run.bytes | ({"text_encoders": 0} if is_random else {})
    memory = judge_memory(footprint_here(run, cfg.model.weights, on_gpu), run.here, total, parts)
    if run.options != run.here:
        peaks = f"{'with text encoders, ' * is_random}{run.footprint.explain(run.options, room)}"
        memory = memory._replace(result=f"{memory.result}; {peaks}")
    yield memory
    absent = [key for key, source in cfg.reward.files.items() if local_path(source) is None]
    if absent:
        reward_rows = [Row("reward", SKIPPED, f"the files of {', '.join(absent)} are not on this machine")]
    else:
        reward_rows = list(guarded("reward", check_rewards(cfg, device), "reward.pretrained=<folder>"))
    yield from reward_rows
    count = cfg.task_as(Doctor).iterations
    if count is None:
        count = 2 if cfg.model.pretrained == "tiny" or (cfg.model.weights == "random" and on_gpu) else 0
    obstacles = [*absent, *(row.check for row in (memory, *reward_rows) if row.status == WRONG)]
    if count and obstacles:
        yield Row("iterations", SKIPPED, f"because of {', '.join(obstacles)}: see above")
    elif count:
        rows = check_iterations(cfg, run, device, count)
        yield from guarded("iterations", rows, "a smaller model.rollout_batch or model.micro_batch, if memory is short")
