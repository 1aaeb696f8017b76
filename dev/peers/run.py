"""Time the same job in this project and in its peers: see README.md beside this file.

Runs one process at a time, one program after the other, in rounds. Prints a table of CPU seconds: medians over the
iterations of all rounds, without the first iteration of a process, which warms up and compiles.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
ATTENTION = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out"
ATTENTION_LAYERS = ",".join("attn." + name for name in ATTENTION.split())
FEED_FORWARD = "ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2"


class Job(NamedTuple):
    pipeline: str  # folder of build_models.py
    peer: str
    flow_factory: dict[str, Any]  # replaces values of flow_factory.yaml
    product: str  # overrides


JOBS = {
    "flux": Job(
        "tiny-flux",
        "flow-factory",
        dict(model_type="flux1", guidance_scale=3.5),
        "model=flux1 model.max_sequence_length=512 model.guidance=3.5 objective.kl_weight=0 "
        f"model.lora.target_modules=[{ATTENTION_LAYERS},{FEED_FORWARD}]",
    ),
    "sd3": Job(
        "tiny-sd3",
        "flow-factory",
        dict(model_type="sd3-5", guidance_scale=1.0),
        f"model=sd3 model.max_sequence_length=256 objective.kl_weight=0 model.lora.target_modules=[{ATTENTION_LAYERS}]",
    ),
    "sd3-reference": Job(
        "tiny-sd3",
        "diffusion-nft",
        {},
        "model=sd3 model.max_sequence_length=128 objective.kl_weight=1e-4 "
        f"model.lora.target_modules=[{ATTENTION_LAYERS}]",
    ),
}
COMMON = """
family=diffusionnft family.pool=8 family.keep=8 prompts_per_iteration=2 iterations=1000 trainer=cpu reward=red
data.train=data/train.txt data.eval=data/test.txt data.eval_prompts=1 data.eval_images=1 evaluation.every=1000
model.resolution=64 model.solver=euler model.full_steps=4 model.eval_steps=4 model.train_timestep_fraction=0.5
model.rollout_batch=8 model.micro_batch=8 model.decode_batch=8 model.gradient_checkpointing=false
model.lora.rank=8 model.lora.alpha=16 model.max_grad_norm=1 ~callbacks.sample_grid
"""


def command(program: str, job: Job, home: Path, scratch: Path) -> list[str]:
    """Return the command of a peer, or of a product given as the path of its checkout and further overrides."""
    if program == "flow-factory":
        config = yaml.safe_load((HERE / "flow_factory.yaml").read_text())
        config["data"]["cache_dir"] = f"cache-{job.pipeline}"
        config["model"] |= dict(model_name_or_path=job.pipeline, model_type=job.flow_factory["model_type"])
        for part in ("train", "eval"):
            config[part]["guidance_scale"] = job.flow_factory["guidance_scale"]
        (scratch / "flow_factory.yaml").write_text(yaml.safe_dump(config))
        python = home / "venv-flow-factory/bin/python"
        return [str(python), str(HERE / "run_flow_factory.py"), str(scratch / "flow_factory.yaml")]
    if program == "diffusion-nft":
        python, checkout = home / "venv-diffusion-nft/bin/python", home / "DiffusionNFT"
        options = ["--config", str(HERE / "diffusion_nft_config.py"), f"--config.logdir={scratch}"]
        return [str(python), str(HERE / "run_diffusion_nft.py"), str(checkout), *options]
    path, *extra = shlex.split(program)
    overrides = [*COMMON.split(), *job.product.split(), f"model.pretrained={job.pipeline}", *extra]
    run = [f"hydra.run.dir={scratch}/run", f"model.embeddings={scratch}/embeddings", "--config-dir", str(HERE / "conf")]
    return [f"{path}/.venv/bin/python", str(HERE / "run_product.py"), *overrides, *run]


def measure(program: str, job: Job, home: Path, log: Path, iterations: int) -> list[dict[str, Any]]:
    """Run a process and return its iterations: CPU seconds by phase, the work done, and the sizes it saw."""
    environment = os.environ | dict(
        ITERATIONS=str(1 + iterations),
        PYTHONPATH=f"{HERE}:{home}/Flow-Factory/src",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
        arguments = command(program, job, home, Path(scratch))
        code = subprocess.run(
            arguments, env=environment, cwd=home, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    marks = [json.loads(line.removeprefix("MARK ")) for line in lines if line.startswith("MARK ")]
    if code != 0 or len(marks) != 3 * (1 + iterations) + 1:
        raise SystemExit(f"{program} failed with status {code} after {len(marks)} marks: see {log}")
    rows = []
    for begin in range(0, 3 * (1 + iterations), 3):
        start, trains, ends, following = marks[begin : begin + 4]
        assert [start["phase"], trains["phase"], ends["phase"]] == ["rollout", "train", "rest"], log
        spans = dict(rollout=trains["cpu"] - start["cpu"], train=ends["cpu"] - trains["cpu"])
        spans |= dict(iteration=ends["cpu"] - start["cpu"], rest=following["cpu"] - ends["cpu"])
        done = {
            f"{phase}, {what}": n
            for phase, end in (("rollout", trains), ("train", ends))
            for what, n in end["work"].items()
        }
        sizes = {name: ends.get(name) for name in ("text tokens", "training batch", "trained parameters")}
        rows.append(spans | dict(work=done | sizes, gb=ends["gb"], reward=trains["reward"], std=trains["reward_std"]))
    return rows


def table(results: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return the medians of each program, the base of the ratios first, then the work of each in one iteration."""
    columns, width = ("rollout", "train", "iteration", "rest"), max(map(len, results)) + 2
    lines = [" " * width + "".join(f"{name:>10}" for name in (*columns, "ratio", "first", "GB", "reward")) + "  each"]
    base = next(iter(results.values()))
    for program, rounds in results.items():
        timed = [row for rows in rounds for row in rows[1:]]
        values = [median(row[name] for row in timed) for name in columns]
        values += [median(row["iteration"] for rows in base for row in rows[1:]) / values[2]]
        values += [median(rows[0]["iteration"] for rows in rounds), max(row["gb"] for row in timed)]
        cells = "".join(f"{value:>10.2f}" for value in values) + f"{rounds[0][0]['reward']:>10.4f}  "
        lines.append(program.ljust(width) + cells + " ".join(f"{row['iteration']:.2f}" for row in timed))
    work = base[0][1]["work"]
    lines.append("work: " + ", ".join(f"{name} {number}" for name, number in work.items()))
    for program, rounds in results.items():
        other = {name: number for name, number in rounds[0][1]["work"].items() if number != work.get(name)}
        lines.append(f"DIFFERENT WORK: {program}: {other}" if other else f"same work: {program}")
    return "\n".join(lines)


def machine() -> str:
    """Return the processor and its BF16 units, as Linux names them."""
    text = Path("/proc/cpuinfo").read_text()
    model = next(line.split(": ")[1] for line in text.splitlines() if line.startswith("model name"))
    return f"{model} with " + (
        " ".join(unit for unit in ("avx512_bf16", "amx_bf16") if unit in text) or "no BF16 units"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="folder of the peers, prepared as README.md says")
    parser.add_argument("--product", action="append", default=[], help="checkout with a .venv; may repeat")
    parser.add_argument("--extra", action="append", default=[], help="also run the first product with these overrides")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each program (%(default)s)")
    parser.add_argument("--iterations", type=int, default=2, help="timed iterations of a process (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="ratios to the first product")
    parser.add_argument("--json", type=Path, help="file for all iterations")
    arguments = parser.parse_args()
    home = arguments.home.resolve()
    paths = [shlex.quote(str(Path(path).resolve())) for path in arguments.product]
    products = [*paths[:1], *(f"{paths[0]} {extra}" for extra in arguments.extra), *paths[1:]]
    (home / "logs").mkdir(exist_ok=True)
    results: dict[str, dict[str, list[list[dict[str, Any]]]]] = {name: {} for name in arguments.jobs}
    for number in range(arguments.rounds):
        for name, programs in results.items():
            job = JOBS[name]
            for position, program in enumerate([*([] if arguments.no_peer else [job.peer]), *products]):
                log = home / "logs" / f"{name}-{position}-{number}.txt"
                rows = measure(program, job, home, log, arguments.iterations)
                programs.setdefault(program, []).append(rows)
                print(f"{name}, round {number + 1}, {program}: {rows[-1]['iteration']:.2f} s", file=sys.stderr)
    print(f"CPU seconds on {machine()}, medians of {arguments.rounds} x {arguments.iterations} iterations")
    for name, programs in results.items():
        print(f"\n{name}\n{table(programs)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
