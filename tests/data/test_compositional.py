"""The metadata of the bundled compositional prompts agrees with their text."""

import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

from solrl_lightning.data.prompts import read_prompts, read_tags

TAGS = ("counting", "colours", "relations", "attributes")
NUMBERS = ({"a", "an", "one"}, *({word} for word in ("two", "three", "four", "five", "six", "seven", "eight")))
REACH = 3  # words between a number, colour or attribute and its noun, itself included: "three hot-air balloons"

_FILE = files("solrl_lightning") / "assets" / "prompts" / "compositional.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]


def words(prompt: str) -> list[str]:
    return re.findall(r"[\w-]+", prompt.lower())


def before(prompt: str, noun: str) -> list[set[str]]:
    """Sets of the words before each occurrence of the noun, singular or plural."""
    prompt_words = words(prompt)
    places = [i for i, word in enumerate(prompt_words) if word in (noun, f"{noun}s", f"{noun}es")]
    return [set(prompt_words[max(0, place - REACH) : place]) for place in places]


def objects(tag: str) -> list[tuple[str, dict[str, Any]]]:
    return [(row["prompt"], thing) for row in ROWS if row["tag"] == tag for thing in row["include"]]


def test_each_kind_has_sixty_unique_prompts() -> None:
    assert Counter(row["tag"] for row in ROWS) == dict.fromkeys(TAGS, 60)
    assert read_prompts("compositional") == [row["prompt"] for row in ROWS]  # none is dropped as a repetition
    assert len({tuple(sorted(words(row["prompt"]))) for row in ROWS}) == len(ROWS)


def test_named_source_has_the_tags() -> None:
    assert read_tags("compositional") == {row["prompt"]: row["tag"] for row in ROWS}


def test_every_object_is_in_its_prompt() -> None:
    for row in ROWS:
        assert row["include"], row
        for thing in row["include"]:
            assert before(row["prompt"], thing["class"]), row


def test_every_count_precedes_its_object() -> None:
    for prompt, thing in objects("counting"):
        assert any(NUMBERS[thing["count"] - 1] & near for near in before(prompt, thing["class"])), prompt
        assert (thing["count"] == 1) == (thing["class"] in words(prompt)), prompt  # singular exactly for one


def test_every_number_word_of_a_counting_prompt_is_in_its_metadata() -> None:
    for row in (row for row in ROWS if row["tag"] == "counting"):
        said = sum(word in set().union(*NUMBERS[1:]) for word in words(row["prompt"]))
        assert said == sum(thing["count"] > 1 for thing in row["include"]), row


def test_every_colour_and_attribute_precedes_its_object() -> None:
    for tag, key in (("colours", "color"), ("attributes", "attribute")):
        for prompt, thing in objects(tag):
            assert any(thing[key] in near for near in before(prompt, thing["class"])), prompt


def test_prompts_of_colours_and_attributes_have_at_least_two_objects() -> None:
    for row in (row for row in ROWS if row["tag"] in ("colours", "attributes")):
        assert len(row["include"]) >= 2, row


def test_every_relation_is_between_its_two_objects() -> None:
    for row in (row for row in ROWS if row["tag"] == "relations"):
        other, subject = row["include"]
        relation, index = subject["position"]
        assert index == 0 and set(other) == {"class"}, row
        pattern = rf"\b{subject['class']}(s|es)?\b.*\b{relation}\b.*\b{other['class']}(s|es)?\b"
        assert re.search(pattern, row["prompt"].lower()), row
    relations = Counter(thing["position"][0] for _, thing in objects("relations") if "position" in thing)
    assert len(relations) == 10 and min(relations.values()) >= 5
