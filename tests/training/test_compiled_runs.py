"""Runs that compile everything a GPU compiles: policy and replicas, at least three blocks of a kind, two batch sizes.

torch.compile traces the blocks; their graphs run eagerly. Weights are random, so the folder needs config files only.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from nano import MAX_WORDS, save_nano

from solrl_lightning.options.run import Run
from solrl_lightning.rollout import chunks
from solrl_lightning.tasks.train import train

SMALL = (
    "model=sana family=sol_rl family.compile=true compile_training=true model.rollout_batch=6 model.micro_batch=2 "
    "reward=shapes model.weights=random data=shapes trainer=cpu iterations=2 prompts_per_iteration=1 family.pool=6 "
    f"family.keep=2 model.resolution=32 model.max_sequence_length={MAX_WORDS} model.full_steps=2 model.preview_steps=1 "
    "model.eval_steps=1 model.train_timestep_fraction=1.0 data.eval_prompts=1 "
    "data.eval_images=1 ~logger callbacks.sample_grid.every=0 model.gradient_checkpointing=false "
    "model.quantization.include=['*.to_k'] "
    "model.lora.target_modules=[to_q] "  # which makes the graphs small
    "+callbacks.graphs._target_=test_compiled_runs.GraphsOfIterations"
).split()
graphs: list[Any] = []  # that have been compiled


class GraphsOfIterations(Callback):
    """Records the number of compiled graphs at the end of each iteration."""

    counts: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.counts.append(len(graphs))


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds every graph that torch.compile traces to `graphs`."""

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    graphs.clear()
    GraphsOfIterations.counts.clear()
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compile_with(*args, **(kw | {"backend": counted})))
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own access
def test_all_samplers_are_compiled_once_also_after_running_out_of_memory(
    compose: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_nano(tmp_path / "sana", "sana")
    file = Path(folder) / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 3}))
    retry, calls = chunks.retry_with_empty_cache, []

    def sample(chunk: Callable[[], Any]) -> Any:
        calls.append(chunk)
        if len(calls) == 2:  # the first one after the evaluation of the base
            raise torch.OutOfMemoryError("CUDA out of memory")
        return retry(chunk)

    monkeypatch.setattr(chunks, "retry_with_empty_cache", sample)
    train(compose(*SMALL, f"model.pretrained={folder}"))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert "out of memory: sampling continues with 3 candidates" in caplog.text
    first, second = GraphsOfIterations.counts
    assert first == second == len(graphs)
