"""Rows about compiled blocks: graphs, requantisation, and the blocks of each model."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nano import save_nano
from torch import Tensor, nn

from solrl_lightning.artifacts.tables import OK, WRONG
from solrl_lightning.options.run import Run
from solrl_lightning.policies import replica
from solrl_lightning.policies.architectures import read_architecture
from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX
from solrl_lightning.quantization import resolve
from solrl_lightning.sizing import blocks
from solrl_lightning.sizing.blocks import check_blocks, check_gradients, write_short
from solrl_lightning.sizing.plan import plan_run, without_files

Compose, Patch = Callable[..., Run], pytest.MonkeyPatch
CPU = torch.device("cpu")
# Layers with LoRA and quantised ones, which make graphs large.
FEW_LAYERS = (
    "model.lora.target_modules=[to_q]",
    "model.quantization.include=['*.to_k']",
)


@pytest.fixture
def doctor(compose: Compose, tmp_path: Path) -> Compose:
    """doctor("model.micro_batch=1") are the options of a doctor of a model with one kind of block."""
    model = f"model=qwen_image model.pretrained={save_nano(tmp_path, 'qwen_image')} model.resolution=32"
    return partial(compose, "task=doctor", *model.split(), *FEW_LAYERS)


def test_requantising_that_compiles_again_is_wrong(doctor: Compose, monkeypatch: Patch) -> None:
    written: set[tuple[nn.Module, str]] = set()

    def write(module: nn.Module, weights: Any) -> None:
        for name, _ in weights:
            if (module, name) in written:
                module.get_submodule(name.removesuffix(".weight")).bias = None
            written.add((module, name))

    monkeypatch.setattr(replica, "write_parameters", write)
    cfg = doctor()
    (row,) = check_blocks(cfg, plan_run(without_files(cfg), resolve("bf16", "auto", CPU)), None, CPU, compiled=False)
    assert row.status == WRONG and "family.compile=false" in row.way_out
    assert row.measured == {"graphs": 1, "recompilations": 1, "backend": "eager"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own access
def test_all_samplers_of_a_run_are_compiled_with_both_batch_sizes(doctor: Compose, monkeypatch: Patch) -> None:
    monkeypatch.setattr(blocks, "_CPU_PRODUCTS", 10**12)
    cfg = doctor("model.rollout_batch=2", "model.micro_batch=1", "compile_training=true")
    shadow = resolve("int8", "emulated", CPU)
    gradients, row, _ = check_blocks(cfg, plan_run(without_files(cfg), shadow), shadow, CPU, compiled=False)
    assert gradients.check == "gradients" and gradients.status == OK
    assert row.status == OK and row.measured is not None
    assert "policy, reference, merged, shadow in batches of 2 and 1" in row.result
    # The policy with and without gradients, reference, merged, shadow.
    assert row.measured == {"graphs": 5, "recompilations": 0, "backend": "eager"}


@pytest.mark.parametrize(
    ("factor", "status"), [(1.0, OK), (1.04, OK), (1.06, WRONG), (0.9, WRONG), (0.0, WRONG), (float("nan"), WRONG)]
)
def test_gradients_of_compiled_code_must_be_those_of_eager_code(factor: float, status: str) -> None:
    class Linear(nn.Linear):  # torch 2.11 compiles no class of its own
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    linear = Linear(3, 2)
    trained: Any = SimpleNamespace(weights=linear, current=lambda: nullcontext(linear))

    def compiled(graph: Any, inputs: Any) -> Any:  # its gradients of the squares have factor ** 2
        return lambda *inputs: [factor * output for output in graph(*inputs)]

    linear.compile(backend=compiled)
    row = check_gradients(lambda transformer: transformer(torch.ones(4, 3)), trained)
    assert row.status == status and ("compile_training=false" in row.way_out) == (status == WRONG)
    assert linear.weight.grad is None


@pytest.mark.parametrize(
    "folder", [index.parent for index in ARCHITECTURES.rglob(INDEX)], ids=lambda folder: folder.name
)
def test_blocks_are_a_few_of_the_model(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(blocks, "_BLOCKS", 2)
    architecture = read_architecture(folder)
    write_short(architecture, tmp_path)
    short, whole = (a.components["transformer"].config for a in (read_architecture(tmp_path), architecture))
    dual = whole.get("dual_attention_layers") or []
    changed = {"num_layers", "num_single_layers", "n_layers"} | ({"dual_attention_layers"} if dual else set())
    assert {key for key in whole if short[key] != whole[key]} == changed & whole.keys()
    assert short["n_layers" if "n_layers" in whole else "num_layers"] == 2 + len(dual[:2])
    assert short.get("dual_attention_layers", [])[:2] == dual[:2]
    assert read_architecture(tmp_path).components["vae"].config == architecture.components["vae"].config
