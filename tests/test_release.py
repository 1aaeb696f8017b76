"""The files of a release name what is there: the Docker image, the extras, the versions of Python."""

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile as (INSTRUCTION, arguments), in order."""
    lines = [line for line in text("Dockerfile").splitlines() if not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def test_stages_of_the_docker_image_are_made_before_they_are_used() -> None:
    stages: list[str] = []
    for instruction, arguments in instructions():
        if instruction == "FROM":
            base, *name = re.fullmatch(r"(\S+)(?: AS (\w+))?", arguments).groups()
            assert base in stages or re.fullmatch(r"python:3\.\d+-slim", base), base
            stages += [each or "" for each in name]
        used = re.findall(r"from=(\w+)", arguments)
        assert instruction in ("FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT") and set(used) <= set(stages), arguments
        if instruction == "COPY":
            assert all((ROOT / source).exists() for source in shlex.split(arguments)[:-1])
    assert instructions()[-1] == ("FROM", "plain")  # what is built without a target
    targets = re.findall(r"--target (\w+)", text("Dockerfile") + text("docs/precision.md"))
    assert targets and set(targets) <= set(stages)


def test_extras_of_the_docker_image_and_of_the_documentation_exist() -> None:
    extras = metadata.metadata("solrl-lightning").get_all("Provides-Extra")
    (named,) = re.findall(r'whl\)\[(\w+)\]"', text("Dockerfile"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    documented = {extra for page in pages for extra in re.findall(r'"\.\[(\w+)\]"', page.read_text(encoding="utf-8"))}
    assert named == "nvfp4" and {named, *documented} <= set(extras), documented


def test_docker_gets_the_files_of_the_wheel() -> None:
    sent = re.findall(r"^!(.+)$", text(".dockerignore"), re.M)
    project = text("pyproject.toml")
    folders = re.findall(r'= "(\w+)"', re.search(r"package-dir = (.*)", project)[1])
    needed = ["pyproject.toml", "solrl_lightning", *folders, re.search(r'readme = "(.*)"', project)[1]]
    needed += re.findall(r'"(.*?)"', re.search(r"license-files = (.*)", project)[1])
    assert set(needed) <= set(sent) and all((ROOT / name).exists() for name in sent)


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
