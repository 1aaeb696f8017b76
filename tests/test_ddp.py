"""Two processes on gloo, through the command: the same prompts, seeds and gradient as one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ARGUMENTS = [
    "experiment=smoke",
    "family=diffusionnft",  # no selection: a rounding that flips a choice would change the samples
    "iterations=1",
    "prompts_per_iteration=3",  # one rank gets two prompts, the other one
    "data.eval_prompts=3",
    "trainer.accelerator=cpu",
    # Plain gradient descent: Adam would blow the rounding of near-zero gradients up to full steps.
    "optimizer._target_=torch.optim.SGD",
    "optimizer.lr=1.0",
    "~optimizer.betas",
    "~optimizer.eps",
    "callbacks.sample_grid.every=0",
]


def run(folder: Path, *arguments: str) -> tuple[dict[str, torch.Tensor], dict]:
    command = [sys.executable, "-m", "solrl_lightning", *ARGUMENTS, *arguments, f"hydra.run.dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = load_file(folder / "lora" / "pytorch_lora_weights.safetensors")
    return weights, json.loads((folder / "summary.json").read_text())


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    one, summary = run(tmp_path / "one", "trainer.devices=1")
    two, summary_of_two = run(tmp_path / "two", "trainer.devices=2", "trainer.strategy=ddp")
    assert one.keys() == two.keys()
    ups = [name for name in one if name.endswith("lora_B.weight")]
    a, b = (torch.cat([weights[name].flatten().double() for name in ups]) for weights in (one, two))
    assert a.abs().max() > 0
    # bf16 forward passes over other batch shapes, twice: a few percent of the update's norm
    assert torch.linalg.vector_norm(a - b) <= 0.05 * torch.linalg.vector_norm(a)
    assert abs(summary["base_reward"] - summary_of_two["base_reward"]) <= 1e-3
    assert abs(summary["final_reward"] - summary_of_two["final_reward"]) <= 5e-3


def test_two_nodes_of_torchrun_leave_one_folder(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    job = ["-m", "solrl_lightning", *ARGUMENTS, "prompts_per_iteration=2", "data.eval_prompts=2"]
    job += ["trainer.strategy=ddp", "trainer.num_nodes=2", "trainer.devices=1"]
    commands = [
        [sys.executable, "-m", "torch.distributed.run", *node, f"--node_rank={rank}", *job] for rank in range(2)
    ]
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}) for command in commands]
    assert [process.wait(timeout=280) for process in nodes] == [0, 0]
    (folder,) = tmp_path.glob("outputs/train/*")
    assert {file.name for file in folder.iterdir()} == {
        ".hydra",
        "checkpoints",
        "lora",
        "solrl_lightning.log",
        "summary.json",
        "tensorboard",
    }
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
