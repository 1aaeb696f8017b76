"""Runs the commands of the README at small sizes, those that need a download up to it, and checks those of docs/ and
conf/ as a run does before it begins.

The cells of docs/colab.ipynb run one after the other, each command with the sizes of experiment=smoke. Other tests run
task=audit, benchmark, doctor, plan and prove.
"""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from matplotlib import pyplot as plt
from PIL import Image

from solrl_lightning.__main__ import prepare

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "docs" / "colab.ipynb").read_text())
COMMAND = re.compile(r'(?:python -m solrl_lightning|main\(sys\.argv\[1:\]\)\)") ?([^\n`]*)')
CONTINUED = re.compile(r"\s*\\\n[#\s]*")
NOT_RUN = {
    r"\.\.\.|key=|\$": "a scheme, or a part of a shell script",
    r"--config-dir|mine": "has files of its page: test_extending.py",
    r"hydra/": "needs a plugin",
    r"trainer=(ddp|fsdp)": "starts processes: test_ddp.py",
    r"task.push": "uploads: tasks/test_export.py",
    r"logger=.*wandb": "needs wandb",
    r"task\.host|reward\.http": "a server: tasks/test_serve.py, test_faults.py",
    r"^experiment=smoke$": "training/test_train.py reads what it leaves",
    r"explorers[=.]": "starts a cluster: explorers/test_ray.py",
}
PLACEHOLDERS = {
    "outputs/train/<run>": "outputs/train/done",
    "<run>": "outputs/train/done",
    "<time>": "study",
    "few/lora": "outputs/train/done/lora",
    "<file>": "outputs/train/done/checkpoints/last.ckpt",
    "nft diffusionnft": "sol_rl",  # a group of another study
}
# The same for all, so they are cut off the commands.
SIZES = r" ?\b(seed|iterations|evaluation\.every|prompts_per_iteration|task\.(devices|repeats|rounds)|"
SIZES += r"family\.(pool|keep|compile)|model\.rollout_batch|data\.eval_prompts)=\S+"
SMALL = "prompts_per_iteration=1 data.eval_prompts=1 callbacks.sample_grid.every=0 family.compile=false".split()
SMALL += ["model.eval_steps=2"]
SMALL_NOTEBOOK = (
    "data.eval_prompts=2 data.eval_images=1 model.eval_steps=1 callbacks.rank_correlation.probe_every=2".split()
)
SMALL_TASK = {"train": ["iterations=1", "data.eval_images=1"]}


def cells_of(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def documented() -> dict[str, str]:
    """Command -> file, without options of sizes."""
    actual = {}
    files = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]) + [ROOT / "README.md"]
    texts = [(file, file.read_text()) for file in files]
    texts += [(ROOT / "docs" / "colab.ipynb", "".join(cell["source"]) + "\n") for cell in cells_of("markdown")]
    for file, content in texts:
        for match in COMMAND.finditer(CONTINUED.sub(" ", content)):
            text = re.split(r"\s{2,}|; done", match[1])[0]  # a comment follows several spaces
            if text.count('"') % 2:
                text = text.removesuffix('"')  # the command is in quotes
            if not any(re.search(each, text) for each in NOT_RUN):
                text = re.sub(r"hydra\.run\.dir=\S+", "hydra.run.dir=runs/a", re.sub(SIZES, "", text)).strip()
                actual[text] = str(file.relative_to(ROOT))
    return actual


COMMANDS = documented()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first of these tests keeps the outputs of a finished run."""
    return tmp_path_factory.mktemp("finished") / "outputs"


def write_edits(folder: Path) -> None:
    """Prompts with input images for model=qwen_image_edit."""
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    for split in ("train", "test"):
        rows = [{"prompt": f"{split} {number}", "image": "a.png"} for number in range(48)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("text", COMMANDS, ids=lambda text: f"{COMMANDS[text]} {text[:60]}")
def test_documented_command_runs(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: Path, text: str
) -> None:
    if not outputs.exists():
        fewer = ["callbacks.rank_correlation.probe_every=0", "hydra.run.dir=outputs/train/done"]
        assert command("experiment=smoke", *SMALL, *fewer).status == 0
        shutil.copytree(tmp_path / "outputs" / "train" / "done", tmp_path / "outputs" / "multirun" / "study" / "0")
        shutil.move(tmp_path / "outputs", outputs)
    shutil.copytree(outputs, tmp_path / "outputs")
    (tmp_path / "dataset" / "pickscore").mkdir(parents=True)
    for name in ("mine.txt", "prompts.txt", "dataset/pickscore/train.txt", "dataset/pickscore/test.txt"):
        (tmp_path / name).write_text("a red circle above a blue square\na blue circle\n")
    write_edits(tmp_path / "edits")
    is_run = COMMANDS[text] == "README.md"
    for placeholder, value in PLACEHOLDERS.items():
        text = text.replace(placeholder, value)
    options, words = dict(re.findall(r"([\w.]+)=(\w+)", text)), shlex.split(text)
    task = options.get("task", "train")
    needs_files = "model" in options or not options.get("reward", "shapes").startswith("shapes") or "hf://" in text
    if needs_files and task != "plan" and "model.weights" not in options:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # which refuses connections
        ended = command(*words)
        assert ended.status == 2 and "is not on this machine, and the hub at" in ended.err, ended.err
        return
    resumes = options.get("ckpt") in ("last", "best", "outputs") and task == "train"
    words += ["iterations=3"] if resumes else []  # the run has 2, and keeps its other options
    if task in ("audit", "benchmark", "doctor", "plan", "prove") or not is_run:
        with suppress(SystemExit):  # --help <group>
            prepare(words)
        return
    if task in ("compare", "export") or resumes or "--help" in text:
        pass
    elif "smoke" not in text:
        if "-m" in words and "experiment" in options:
            words += ["seed=1", "family=diffusionnft,race"]
        words += [*SMALL, *SMALL_TASK.get(task, []), "family.pool=8", "family.keep=4"]
    ended = command(*words)
    assert ended.status == 0, ended.err


def test_notebook_has_the_format_of_version_4_and_no_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) == len(cells_of("markdown") + cells_of("code")) > 8
    for cell in cells:
        assert all(re.fullmatch(r"[^\n]*\n", line) for line in cell["source"][:-1])
        assert cell["source"][-1] and not cell["source"][-1].endswith("\n")
        of_code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        others = {key: value for key, value in cell.items() if key not in ("cell_type", "id", "source")}
        assert others == {"metadata": {}} | of_code


def run_python(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell and return the value of its last line, which a notebook shows."""
    *body, last = ast.parse(source).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def test_cells_of_the_notebook_run(command: Callable[..., Any]) -> None:
    plt.switch_backend("agg")
    names: dict[str, Any] = {}
    pictures = []
    for source in ("".join(cell["source"]) for cell in cells_of("code")):
        if source.startswith("!python -m solrl_lightning"):
            words = shlex.split(source)[3:]
            if "task=" not in source:
                words += [*SMALL_NOTEBOOK, *([] if "smoke" in source else ["experiment=smoke"])]
            ended = command(*words)
            assert ended.status == 0, ended.err
        elif source.startswith("!"):
            clone, install = source.splitlines()  # of this package, which is installed
            assert clone.startswith("!git clone ") and install == f"!pip install -q ./{clone.split()[-1]}"
        else:
            shown = run_python(source, names)
            if isinstance(shown, Image.Image):
                pictures.append(shown.convert("L").getextrema())
            else:
                (line,) = shown
                assert line.get_xydata().tolist() == [[e["iteration"], e["shapes"]] for e in names["evaluations"]]
                assert len(names["evaluations"]) == 3
                plt.close("all")
    assert len(pictures) == 2 and all(low < high for low, high in pictures)
