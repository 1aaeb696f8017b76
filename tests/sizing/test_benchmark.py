"""The benchmark: forward passes and iterations of families."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from nano import prompts_of
from torch.utils.flop_counter import FlopCounterMode

from solrl_lightning.cli.checks import check_prompts
from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Benchmark
from solrl_lightning.policies.bf16 import has_fast_bf16_products
from solrl_lightning.policies.compilation import can_compile
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.sizing import timing
from solrl_lightning.sizing.timing import Lap, peak_since_release
from solrl_lightning.tasks import benchmark as benchmark_module
from solrl_lightning.tasks.benchmark import benchmark, family_configs, forward_times, matmul_peak, times_of_families
from tests.nano import load_model, save_nano

Compose, Patch = Callable[..., Run], pytest.MonkeyPatch

SMALL = (
    "task=benchmark experiment=smoke trainer=cpu task.repeats=1 task.compile=false model.full_steps=2 "
    "model.preview_steps=1 model.prefix_steps=1 evaluation.every=auto"
).split()
OFFLINE = ("model.weights=random", "data=shapes", "reward=shapes", "model.resolution=32")  # with any model
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small FLUX.1."""
    return save_nano(tmp_path_factory.mktemp("nano"))


@pytest.fixture(autouse=True)
def briefly(monkeypatch: Patch) -> None:
    """Reduce the numbers of forward passes and the size of the products."""
    monkeypatch.setattr(benchmark_module, "_WARM_UP", 1)
    monkeypatch.setattr(benchmark_module, "_FORWARDS", 2)
    monkeypatch.setattr(benchmark_module, "_PRODUCT_SIZE", {"cpu": 32})


def test_families_and_forward_passes_are_timed(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str], nano: str
) -> None:
    options = (f"model.pretrained={nano}", "task.sizes.pool=6", "task.sizes.keep=2")
    result = benchmark(compose(*SMALL, *options, "task.families=[naive_scaling,sol_rl]", "task.precisions=[int8]"))
    forward, families = result["forward"], result["families"]
    assert list(forward["seconds"]) == ["bf16 eager", "shadow eager"]
    assert forward["ratios"]["bf16 eager"] == 1
    assert forward["ratios"]["shadow eager"] == forward["seconds"]["shadow eager"] / forward["seconds"]["bf16 eager"]
    assert list(families) == ["naive_scaling", "sol_rl int8"]
    for times in families.values():
        assert (times["pool"], times["keep"], times["compiled"]) == (6, 2, False)
        assert times["rollout"] == pytest.approx(times["requantize"] + times["explore"] + times["regenerate"])
        assert times["rollout"] + times["train"] <= times["iteration"]
        assert times["regenerate"] > 0 and times["train"] > 0 and times["warm_up"] > 0
        assert times["images_per_second"] == pytest.approx(2 * 6 / times["rollout"])  # two prompts
    assert families["naive_scaling"]["explore"] == 0 < families["sol_rl int8"]["explore"]
    for stage in ("rollout", "iteration"):
        ratio = families["naive_scaling"][stage] / families["sol_rl int8"][stage]
        assert families["sol_rl int8"]["speedup"]["naive_scaling"][stage] == pytest.approx(ratio)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    out = capfd.readouterr().out
    assert "sol_rl int8" in out and "the process so far" in out


def test_families_have_the_values_of_the_command_line_and_its_experiment(compose: Compose, monkeypatch: Patch) -> None:
    options = (*SMALL, "family.pool=6", "task.families=[sol_rl,diffusionnft]", "precision.backend=emulated")
    with ConfigTree() as tree:
        monkeypatch.setattr(HydraConfig.instance(), "cfg", tree.compose(options))
    for family, row in family_configs(compose(*options, "task.precisions=[int8]"), CPU).items():
        assert (row.family.pool, row.family.keep, row.precision.backend) == (6, 4, "emulated"), family
    with pytest.raises(UserError, match="no key family.explore.steps with .*family=diffusionnft"):
        monkeypatch.setattr(HydraConfig.get().overrides, "task", ["family.explore.steps=2"])
        family_configs(compose(*options), CPU)


def test_random_weights_and_shapes_captions_need_no_network(
    compose: Compose, tmp_path: Path, monkeypatch: Patch
) -> None:
    def connect(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection")

    folder = save_nano(tmp_path / "sana", "sana")  # only its config files are read
    for file in (tmp_path / "sana").rglob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    sizes = ("prompts_per_iteration=1", "model.rollout_batch=4", "family.pool=4", "family.keep=2")
    cfg = compose(*SMALL, "model=sana", f"model.pretrained={folder}", *OFFLINE, *sizes, "family=sol_rl")
    check_prompts(cfg)
    assert times_of_families({"it": cfg}, 1, CPU)["it"]["images_per_second"] > 0


def test_rate_of_a_forward_pass_is_its_products_over_its_seconds(
    compose: Compose, nano: str, monkeypatch: Patch
) -> None:
    cfg = compose(*SMALL, *OFFLINE, f"model.pretrained={nano}")
    alternate, took = benchmark_module.alternate, dict[str, list[float]]()

    def noted(*args: Any) -> dict[str, list[float]]:
        seconds = alternate(*args)
        took.update({name: [9.0, *values[1:]] for name, values in seconds.items()})  # a slow warm-up
        return {name: took[name] for name in seconds}

    monkeypatch.setattr(benchmark_module, "alternate", noted)
    result = forward_times(cfg, CPU)
    assert result["seconds"] == {name: sum(took[name][1:]) / 2 for name in result["seconds"]}
    shapes: Flux1 = load_model(nano, weights="random", device="meta")
    with torch.no_grad():
        x, sigma = shapes.noise(torch.zeros(1, dtype=torch.int64)), torch.ones(1, device="meta")
        conditioning = shapes.encode(prompts_of(["a prompt"]))
        with FlopCounterMode(display=False) as counter:
            shapes.velocity(shapes.transformer, x, sigma, conditioning)
    assert result["batch"] == 16
    assert result["flops"] == 16 * counter.get_total_flops()
    for name, seconds in result["seconds"].items():
        assert result["tflops"][name] == pytest.approx(result["flops"] / seconds / 1e12)
        assert result["share_of_peak"][name] == pytest.approx(result["tflops"][name] / result["peak"]["tflops"])


def test_peak_is_the_median_rate_of_a_square_product(monkeypatch: Patch) -> None:
    lasting = [9.0] * benchmark_module._WARM_UP + [0.25, 0.5, 0.5, 4.0, 0.25, 0.5, 0.5, 4.0, 0.25, 0.5]
    clock = iter(reading for seconds in lasting for reading in (1.0, 1.0 + seconds))
    monkeypatch.setattr(benchmark_module, "_PRODUCT_SIZE", {"cpu": 20})
    monkeypatch.setattr(timing, "_now", lambda device: next(clock))
    peak = matmul_peak(CPU)
    assert peak["size"] == 20
    assert peak["dtype"] == ("bfloat16" if has_fast_bf16_products() else "float32")
    assert peak["tflops"] == pytest.approx(2 * 20**3 / 0.5 / 1e12)


def test_medians_are_over_alternating_rounds_without_the_first_iteration(compose: Compose, monkeypatch: Patch) -> None:
    rows = {
        name: compose(*SMALL, f"family={name}", "prompts_per_iteration=3") for name in ("compile", "sol_rl", "prefix")
    }
    order = []

    def run_iterations(cfg: Run, device: torch.device) -> list[Lap]:
        order.append(next(name for name, row in rows.items() if row is cfg))
        lap = {"requantize": 0.1, "explore": float(len(order)), "regenerate": 0.4, "train": 1.0}
        return [lap | {"iteration": seconds} for seconds in (70.0, 2.0 * len(order))]

    monkeypatch.setattr(benchmark_module, "run_iterations", run_iterations)
    times = times_of_families(rows, 3, CPU)
    assert order == [*rows, *reversed(rows), *rows]
    assert [row["iteration"] for row in times.values()] == [12, 10, 8]  # of laps 1, 6, 7; 2, 5, 8; 3, 4, 9
    assert [row["warm_up"] for row in times.values()] == [70, 70, 70]
    first = times["compile"]
    assert (first["explore"], first["rollout"]) == (6, pytest.approx(6.5))
    assert first["requantize_share"] == pytest.approx(0.1 / 12)
    assert first["images_per_second"] == pytest.approx(3 * 8 / 6.5)


def test_families_with_compile_auto_follow_the_task(compose: Compose) -> None:
    cfg = compose("task=benchmark")
    compiled = {name: row.family.compile for name, row in family_configs(cfg, CPU).items()}
    can = can_compile(CPU)
    assert compiled == {"naive_scaling": False, "compile": True, "sol_rl": can, "prefix": can}
    cfg.task_as(Benchmark).compile = False
    compiled = {name: row.family.compile for name, row in family_configs(cfg, CPU).items()}
    assert compiled == {"naive_scaling": False, "compile": True, "sol_rl": False, "prefix": False}


def test_rungs_follow_the_sizes_of_the_task(compose: Compose) -> None:
    row = family_configs(
        compose(*SMALL, "model.full_steps=4", "task.families=[race]", "task.sizes={pool:24,keep:6}"), CPU
    )["race"]
    assert row.family.explore is not None and [rung.keep for rung in row.family.explore.rungs or ()] == [12, 6]


def test_no_family_is_an_error(compose: Compose) -> None:
    with pytest.raises(UserError, match="task.families=.* is invalid: it must be a list with at least one entry"):
        compose(*SMALL, "task.families=[]")


def test_families_are_timed_once_with_each_precision_and_decoder_that_they_use(compose: Compose) -> None:
    options = ("task.decoders=[full,preview]", "task.precisions=[nvfp4,int8]", "model.preview_decoder=tiny")
    rows = family_configs(compose("task=benchmark", *options), CPU)
    shadowed = [f"sol_rl {precision} {decoder}" for precision in ("nvfp4", "int8") for decoder in ("full", "preview")]
    assert list(rows) == ["naive_scaling", "compile", *shadowed, "prefix full", "prefix preview"]
    for name, row in rows.items():
        assert row.family.explore is None or row.family.explore.decoder == name.split()[-1]
        assert not name.startswith("sol_rl") or row.precision.name == name.split()[1]


def test_peak_memory_on_a_cpu_is_that_of_the_process() -> None:
    tensor = torch.ones(30_000_000)
    peak = peak_since_release(CPU)
    assert peak["of"] == "the process so far"
    assert tensor.nbytes < peak["bytes"] < 2**40
