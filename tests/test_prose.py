"""Code, tests, configuration and documentation use standard technical terms, and variables name the thing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"(go(es|ne|ing)?|went) on": "resume, continue",
    r"mend(s|ed|ing)?": "fix",
    r"at hand": "available",
    r"to the bit": "bit for bit",
    r"in turn": "alternately, one after the other",
    r"for good": "permanently",
}


@pytest.mark.parametrize("idiom", INSTEAD)
def test_standard_terms_are_used(idiom: str) -> None:
    folders = [ROOT / name for name in ("solrl_lightning", "callbacks", "conf", "docs", "dev", "tests")]
    suffixes = (".py", ".yaml", ".md", ".ipynb")
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in suffixes]
    files.remove(Path(__file__))
    assert len(files) > 300
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in [ROOT / "README.md", *files]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"\b{idiom}\b", line, re.IGNORECASE)
    ]
    assert not lines, f"say {INSTEAD[idiom]}:\n" + "\n".join(lines)


def test_names_say_what_a_thing_is() -> None:
    files = [*ROOT.glob("solrl_lightning/**/*.py"), *ROOT.glob("callbacks/*.py"), *ROOT.glob("tests/**/*.py")]
    participles = {"own", "found", "given", "held", "asked", "begun", "told", "meant"}
    names = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in participles
            argument = isinstance(node, ast.arg) and node.arg in participles
            test = isinstance(node, ast.FunctionDef) and re.search(r"_(refuses|is_refused|told|asked)(_|$)", node.name)
            if stored or argument or test:
                names.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    assert not names, "\n".join(names)
