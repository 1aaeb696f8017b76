"""A default run does not import what other runs need. Reads the imports in the source, so it runs nothing."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from solrl_lightning.options.run import Run

REPOSITORY = Path(__file__).parents[1]
ROOTS = ["__main__", "options.run", "tasks.train"]
WINGS = (
    *("explorers", "training.sharding", "training.sharded_full", "training.full", "sizing", "cli.sweep_job"),
    *("policies.architectures", "policies.preview", "policies.lora_files"),
    *("quantization.transformer_engine", "quantization.nvfp4_packed", "rewards.client", "rewards.server"),
    *("study.run_groups", "study.elsewhere", "study.learning_curves", "study.time_to_reward"),
)


def file_of(module: str) -> Path | None:
    """Return the file of a module below solrl_lightning."""
    folder = "" if module.startswith("callbacks") else "solrl_lightning"
    path = REPOSITORY.joinpath(folder, *module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports of solrl_lightning when it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("solrl_lightning"):
            module = str(node.module).removeprefix("solrl_lightning").lstrip(".")
            yield from (f"{module}.{each.name}".lstrip(".") for each in node.names)
            yield module
        elif not isinstance(node, ast.FunctionDef) and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]:
            yield from imports(node)


def targets(node: Any) -> Iterator[str]:
    """Yield the modules of the classes that a configuration names."""
    if isinstance(node, dict):
        yield from [str(node["_target_"]).rpartition(".")[0]] if "_target_" in node else []
        for value in node.values():
            yield from targets(value)


def test_a_default_run_imports_no_wing(compose: Callable[..., Run]) -> None:
    named = [module.removeprefix("solrl_lightning.") for module in targets(compose().tree()) if "solrl" in module]
    waiting, imported = [*ROOTS, *named], set[str]()
    while waiting:
        module = waiting.pop()
        if module not in imported and (file := file_of(module)) is not None:
            imported.add(module)
            waiting += imports(ast.parse(file.read_text()))
    assert len(imported) > 100 and "training.loop" in imported and all(file_of(wing) for wing in WINGS)
    wings = [module for module in imported for wing in WINGS if f"{module}.".startswith(f"{wing}.")]
    assert wings == []
