"""The identity of a model's files: what decides its images counts, what a library writes beside does not."""

from pathlib import Path

from solrl_lightning.policies.tensor_digest import file_digests


def test_settings_count_and_versions_pages_and_indices_do_not(tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def digests(text: str) -> dict[str, str]:
        config.write_text(text)
        return file_digests({"part": tmp_path, "one": config, "none": tmp_path / "absent"})

    (tmp_path / "merges.txt").write_text("a b")
    before = digests('{"_diffusers_version": "1", "shift": 3}')
    assert before.keys() == {"part/config.json", "part/merges.txt", "one/config.json"}
    for name in ("README.md", "model.safetensors.index.json", ".gitattributes", "LICENSE.txt"):
        (tmp_path / name).write_text("new")
    assert digests('{"_diffusers_version": "2", "shift": 3}') == before
    after = digests('{"_diffusers_version": "1", "shift": 4}')
    assert {key for key in before if after[key] != before[key]} == {"part/config.json", "one/config.json"}
