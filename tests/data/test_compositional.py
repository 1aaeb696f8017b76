"""The metadata of the bundled compositional prompts agree with their text."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.data.prompts import read_prompts

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


def tagged(tag: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The prompts of a tag with their objects."""
    return ((row["prompt"], row["include"]) for row in ROWS if row["tag"] == tag)


def test_each_tag_has_sixty_unique_prompts_whose_objects_are_in_the_text() -> None:
    assert Counter(row["tag"] for row in ROWS) == dict.fromkeys(TAGS, 60)
    expected = [Prompt(row["prompt"], {key: value for key, value in row.items() if key != "prompt"}) for row in ROWS]
    assert read_prompts("compositional") == expected  # none is dropped as a repetition
    assert len({tuple(sorted(words(row["prompt"]))) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["include"] and all(before(row["prompt"], thing["class"]) for thing in row["include"]), row


def test_counts_are_the_number_words_before_their_objects() -> None:
    for prompt, objects in tagged("counting"):
        for thing in objects:
            assert any(NUMBERS[thing["count"] - 1] & near for near in before(prompt, thing["class"])), prompt
            assert (thing["count"] == 1) == (thing["class"] in words(prompt)), prompt  # singular exactly for one
        number_words = sum(word in set().union(*NUMBERS[1:]) for word in words(prompt))
        assert number_words == sum(thing["count"] > 1 for thing in objects), prompt


def test_colours_and_attributes_precede_their_two_or_more_objects() -> None:
    for tag, key in (("colours", "color"), ("attributes", "attribute")):
        for prompt, objects in tagged(tag):
            assert len(objects) >= 2, prompt
            for thing in objects:
                assert any(thing[key] in near for near in before(prompt, thing["class"])), prompt


def test_every_relation_is_between_its_two_objects() -> None:
    relations: Counter[str] = Counter()
    for prompt, (other, subject) in tagged("relations"):
        relation, index = subject["position"]
        assert index == 0 and set(other) == {"class"}, prompt
        pattern = rf"\b{subject['class']}(s|es)?\b.*\b{relation}\b.*\b{other['class']}(s|es)?\b"
        assert re.search(pattern, prompt.lower()), prompt
        relations[relation] += 1
    assert len(relations) == 10 and min(relations.values()) >= 5
