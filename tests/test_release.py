"""The files of a release name what is there: the Docker image, the extras, the versions of Python."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_extras_of_the_docker_image_and_of_the_documentation_exist() -> None:
    extras = metadata.metadata("solrl-lightning").get_all("Provides-Extra")
    (named,) = re.findall(r'whl\)\[(\w+)\]"', text("Dockerfile"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    documented = {extra for page in pages for extra in re.findall(r'"\.\[(\w+)\]"', page.read_text(encoding="utf-8"))}
    assert named == "nvfp4" and {named, *documented} <= set(extras), documented


@pytest.mark.parametrize("name", ["tests", "release"])
def test_workflows_and_makefile_have_the_versions_of_python_that_the_readme_has(name: str) -> None:
    first, last = re.search(r"Python 3\.(\d+) to 3\.(\d+)", text("README.md")).groups()
    expected = [f"3.{minor}" for minor in range(int(first), int(last) + 1)]
    assert re.search(r"^PYTHONS \?= (.*)", text("Makefile"), re.M)[1].split() == [f"python{each}" for each in expected]
    assert f'requires-python = ">={expected[0]}"' in text("pyproject.toml")
    jobs = yaml.safe_load(text(f".github/workflows/{name}.yml"))["jobs"]
    if name == "tests":
        assert jobs["tests"]["strategy"]["matrix"]["python"] == expected
    else:
        setup = next(step for step in jobs["publish"]["steps"] if "setup-python" in step.get("uses", ""))
        assert setup["with"]["python-version"].split() == expected
