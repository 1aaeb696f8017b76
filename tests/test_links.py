"""Links between the pages of the repository hold, and so do the pages that code and configuration name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "dev").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_hold() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 40 and not broken, broken


def test_files_of_dev_that_pages_name_exist() -> None:
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for name in re.findall(r"\bdev/[\w/.-]*\w", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 25 and not [(page, name) for page, name in named if not (ROOT / name).exists()]


def test_measurements_are_listed() -> None:
    folder = ROOT / "dev" / "measurements"
    listed = re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert {file.name for file in folder.glob("*.md")} - {"README.md"} == set(listed)


def test_pages_that_code_names_exist() -> None:
    folders = [ROOT / name for name in ("solrl_lightning", "callbacks", "conf", "dev", "tests")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".yaml")]
    files.append(ROOT / "docs" / "colab.ipynb")
    named = {name for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]
