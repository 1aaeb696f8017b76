"""Code, configuration and documentation avoid idioms that have a standard technical term."""

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
    folders = [ROOT / name for name in ("solrl_lightning", "callbacks", "conf", "docs")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".yaml", ".md")]
    assert len(files) > 150
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in [ROOT / "README.md", *files]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"\b{idiom}\b", line, re.IGNORECASE)
    ]
    assert not found, f"say {INSTEAD[idiom]}:\n" + "\n".join(found)
