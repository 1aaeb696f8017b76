"""The code that Inductor generates for GPUs that are not here: `make gpu-desk` checks more models and cards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "dev" / "gpu_desk.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ >= "2.16", reason="it replaces functions of torch 2.11 to 2.15")
def test_blocks_compile_for_absent_gpus(tmp_path: Path) -> None:
    rows = ["qwen_image:nvfp4:10.0"]  # the quickest
    command = [sys.executable, str(SCRIPT), *rows]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(" graphs, ") == len(rows)
