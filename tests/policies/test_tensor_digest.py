"""The identity of a model's files: what decides its images counts, what a library writes beside does not."""

import json
from pathlib import Path

from solrl_lightning.policies.tensor_digest import file_digests


def test_settings_count_and_versions_pages_and_indices_do_not(tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def digests(text: str) -> dict[str, str]:
        config.write_text(text)
        return file_digests({"part": tmp_path, "one": config, "none": tmp_path / "absent"})

    (tmp_path / "merges.txt").write_text("a b")
    before = digests('{"_diffusers_version": "1", "shift": 3, "vision_config": {}}')
    assert before.keys() == {"part/config.json", "part/merges.txt", "one/config.json"}
    for name in ("README.md", "model.safetensors.index.json", ".gitattributes", "LICENSE.txt"):
        (tmp_path / name).write_text("new")
    saved_again = {"shift": 3, "_name_or_path": "x", "vision_config": {"transformers_version": "5"}}
    assert digests(json.dumps(saved_again, indent=2)) == before
    after = digests('{"_diffusers_version": "1", "shift": 4}')
    assert {key for key in before if after[key] != before[key]} == {"part/config.json", "one/config.json"}
