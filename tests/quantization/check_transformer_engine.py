"""Check our calls of Transformer Engine against the source of the installed version.

    python tests/quantization/check_transformer_engine.py

Parses the Python files of both without importing them, because Transformer Engine needs a CUDA library to import; so it
runs anywhere. ``make contract`` runs it with the oldest supported version and the newest. It is not a pytest test,
because peft would import the incomplete package from a test environment.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

_OURS = Path(__file__).parents[2] / "solrl_lightning" / "quantization" / "transformer_engine.py"


def main() -> None:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        sys.exit("transformer_engine is not installed; pip install --no-deps transformer-engine brings its source")
    root = Path(spec.origin).parent
    for name, positional, keywords in our_calls():
        callable_signature(root, name).bind(*[None] * positional, **dict.fromkeys(keywords))
        print(f"te.{name}({positional} positional, {', '.join(keywords)}): fits")
    check_recipe(root)
    print(f"transformer_engine {version('transformer_engine')}: the contract holds")


def our_calls() -> Iterator[tuple[str, int, list[str]]]:
    """Yield (name, number of positional arguments, keywords) of every call of ``te.<name>`` or ``self._<name>``."""
    calls = [node for node in ast.walk(ast.parse(_OURS.read_text())) if isinstance(node, ast.Call)]
    count = 0
    for call in calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id="te"), attr=name) | ast.Attribute(attr="_autocast" as name):
                count += 1
                yield name.lstrip("_"), len(call.args), [str(keyword.arg) for keyword in call.keywords]
    assert count == 3, f"{_OURS} calls quantized_model_init, Linear and autocast; found {count} calls"


def our_constant(name: str) -> Any:
    for node in ast.parse(_OURS.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                return ast.literal_eval(node.value)
    raise AssertionError(f"{_OURS} has no {name}")


def callable_signature(root: Path, name: str) -> inspect.Signature:
    """Return the signature of a name that ``transformer_engine.pytorch`` exports by a plain ``from ... import``."""
    module = exporting_module(root, "transformer_engine.pytorch", name)
    node = next(n for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        node.args.args.pop(0)  # self
    arguments = node.args
    optional = len(arguments.args) - len(arguments.defaults)
    kind, empty = inspect.Parameter, inspect.Parameter.empty
    parameters = [
        kind(argument.arg, kind.POSITIONAL_OR_KEYWORD, default=empty if index < optional else None)
        for index, argument in enumerate(arguments.args)
    ]
    return inspect.Signature(parameters)


def exporting_module(root: Path, package: str, name: str) -> ast.Module:
    """Return the parsed module that defines the name of ``from package import name``."""
    parts = package.split(".")[1:]
    folder = root.joinpath(*parts)
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    module = ast.parse(file.read_text())
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            above = package if node.level == 1 else package.rpartition(".")[0]
            source = f"{above}.{node.module}" if node.level else str(node.module)
            return exporting_module(root, source, name)
    return module


def check_recipe(root: Path) -> None:
    """Check that the recipe accepts our arguments and that they select 1 x 16 blocks without further transforms."""
    file = root / "common" / "recipe" / "__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine_recipe", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    arguments = our_constant("ROLLOUT_RECIPE")
    recipe = module.NVFP4BlockScaling(**arguments)
    assert not getattr(recipe, "row_scaled_activation", False), recipe  # one scale for an input; an option since 2.16
    for forward in (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight):
        assert not forward.random_hadamard_transform, recipe
        assert not forward.stochastic_rounding, recipe
        assert not forward.fp4_2d_quantization, recipe
    print(f"NVFP4BlockScaling({', '.join(arguments)}): fits")


if __name__ == "__main__":
    main()
