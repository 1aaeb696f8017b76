"""GenEval: whether the objects that a prompt names are in the image, in their number, colours and positions.

The rules of Ghosh et al. 2023 (arXiv 2310.11513; djghosh13/geneval, evaluation/evaluate_images.py), or the terms of
Flow-GRPO (Liu et al. 2025, arXiv 2505.05470), on the objects that OWLv2 finds (Minderer et al. 2023, arXiv 2306.09683);
OpenAI's CLIP ViT-L/14 names the colour of an object. docs/rewards/geneval.md has both formulas.

Shapes: B images, k objects. A box is (left, top, right, bottom) in pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms
from transformers import Owlv2ForObjectDetection, Owlv2Processor

from solrl_lightning.options.rules import Share
from solrl_lightning.rewards.base import Metadata, unique_prompts
from solrl_lightning.rewards.geneval_metadata import COLOURS, MAX_OBJECTS, check_metadata
from solrl_lightning.rewards.loading import load_pretrained, read_parts
from solrl_lightning.rewards.preprocessing import eight_bits
from solrl_lightning.rewards.towers import TransformersCLIP

_TEMPLATES = ("a photo of a {colour} {kind}", "a photo of a {colour}-colored {kind}", "a photo of a {colour} object")
_QUERY = "a photo of a {kind}"  # OWLv2's
_MARGIN = 0.1  # share of both objects' sizes that an offset must exceed
_OVERLAP = 0.5  # intersection over union above which two boxes of a class are one object
_BATCH = 8  # images per pass of the detector
_RULES = ("include", "exclude", "tag")  # the metadata that a score depends on


Box = Sequence[float]
Objects = Mapping[str, Sequence[Box]]
"""class -> objects in the order of falling scores"""

ColoursOf = Callable[[Sequence[Box], str], Sequence[str]]
"""The colour of each of the objects of a class"""


class GenEval(TransformersCLIP):
    """GenEval's rules on the objects that OWLv2 finds, with the arguments of ``TransformersCLIP`` and:

    Args:
        detector: hub id or folder of an OWLv2.
        threshold, counting_threshold: lowest score of an object, for prompts of other tags and of the tag
            "counting"; it depends on the detector.
        strict: 1 if every clause holds, else 0, as GenEval reports; False: the mean of the clauses' terms.

    Raises:
        UserError: the detector is missing, damaged or no OWLv2; see also ``TransformersCLIP``.
    """

    name = "geneval"
    example = ("a photo of a red dog", {"include": [{"class": "dog", "count": 1, "color": "red"}], "tag": "colors"})

    def __init__(
        self,
        pretrained: str,
        processor: str,
        detector: str,
        threshold: Share,
        counting_threshold: Share,
        strict: bool = False,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        super().__init__(pretrained, processor, device, dtype)
        self.thresholds = {"counting": counting_threshold}
        self.threshold, self._rate = threshold, correct if strict else mean_of_terms
        key, kind = "reward.geneval.detector", "detector"
        (self._detector_processor,) = read_parts(key, detector, "config.json", kind, Owlv2Processor)
        model = load_pretrained(Owlv2ForObjectDetection, key, detector, kind)
        self.detector: Any = model.eval().requires_grad_(False).to(self.device, self.dtype)
        self._classifiers: dict[str, Tensor] = {}

    def check_prompts(self, prompts: list[str], metadata: list[Metadata]) -> None:
        """Raise ``UserError`` for a prompt whose metadata are not GenEval's."""
        check_metadata(prompts, metadata)

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        images, scores = eight_bits(images.to(self.device)), torch.zeros(len(prompts), device=self.device)
        rules = [str([prompt, *map(row.get, _RULES)]) for prompt, row in zip(prompts, metadata, strict=True)]
        unique, place = unique_prompts(rules)  # prompts of one text may ask for other objects
        for number in range(len(unique)):
            rows = (place == number).nonzero().flatten()
            row = metadata[int(rows[0])]
            kinds = list(dict.fromkeys(clause["class"] for clause in (*row["include"], *row.get("exclude", []))))
            threshold = self.thresholds.get(row.get("tag", ""), self.threshold)
            for part in rows.split(_BATCH):
                for index, objects in zip(part, self.detect(images[part], kinds, threshold), strict=True):
                    scores[index] = self._rate(row, objects, partial(self.colours, images[index]))
        return scores

    def detect(self, images: Tensor, kinds: list[str], threshold: float) -> list[dict[str, list[Box]]]:
        """Detect the objects of each class in each of the images [B, 3, H, W]: at most 16, and none twice."""
        pixels = self._detector_processor.image_processor((images * 255).round().byte(), return_tensors="pt")
        tokens = self._detector_processor.tokenizer(
            [_QUERY.format(kind=kind) for kind in kinds] * len(images),
            padding="max_length",
            truncation=True,
            max_length=self.detector.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        outputs = self.detector(pixel_values=pixels.pixel_values.to(self.device, self.dtype), **tokens)
        sizes = [tuple(images.shape[-2:])] * len(images)
        results = self._detector_processor.post_process_grounded_object_detection(outputs, threshold, sizes)
        objects = []
        for result in results:
            scores, labels, boxes = result["scores"].float(), result["labels"], result["boxes"].float()
            kept = batched_nms(boxes, scores, labels, _OVERLAP)  # in the order of falling scores
            boxes, labels = boxes[kept], labels[kept]
            objects.append({kind: boxes[labels == label][:MAX_OBJECTS].tolist() for label, kind in enumerate(kinds)})
        return objects

    def colours(self, image: Tensor, objects: Sequence[Box], kind: str) -> list[str]:
        """Classify the colour of each of the objects in the image [3, H, W]: CLIP's zero-shot class of its box."""
        if kind not in self._classifiers:
            texts = [template.format(colour=colour, kind=kind) for colour in COLOURS for template in _TEMPLATES]
            each = F.normalize(self.embed_texts(texts).float(), dim=-1).unflatten(0, (len(COLOURS), len(_TEMPLATES)))
            self._classifiers[kind] = F.normalize(each.mean(1), dim=-1)  # [10, D]
        crops = [crop(image, box)[None] for box in objects]
        likelihoods = [self.embeddings(picture) @ self._classifiers[kind].T for picture in crops]
        return [COLOURS[int(likelihood.argmax())] for likelihood in likelihoods]


def crop(image: Tensor, box: Box) -> Tensor:
    """Crop an image [3, H, W] to a box, to one pixel or more."""
    high, wide = image.shape[-2:]
    left, right = (min(max(round(x), 0), wide) for x in box[0::2])
    top, bottom = (min(max(round(y), 0), high) for y in box[1::2])
    left, top = min(left, wide - 1), min(top, high - 1)
    return image[:, top : max(bottom, top + 1), left : max(right, left + 1)]


# Rules


def correct(metadata: Metadata, objects: Objects, colours: ColoursOf) -> float:
    """Return GenEval's score: 1.0 if every clause of "include" holds and none of "exclude", else 0.0.

    A clause with count m reads the m objects of its class with the highest scores.
    """
    groups: list[Sequence[Box] | None] = []  # the objects of each clause that holds
    for clause in metadata["include"]:
        boxes = objects.get(clause["class"], [])[: clause["count"]]
        holds = len(boxes) == clause["count"]
        if holds and "color" in clause:
            holds = all(colour == clause["color"] for colour in colours(boxes, clause["class"]))
        if holds and "position" in clause:
            holds = all_in_relation(boxes, groups, *clause["position"])
        groups.append(boxes if holds else None)
    excluded = any(len(objects.get(each["class"], [])) >= each["count"] for each in metadata.get("exclude", []))
    return float(None not in groups and not excluded)


def mean_of_terms(metadata: Metadata, objects: Objects, colours: ColoursOf) -> float:
    """Return Flow-GRPO's score: the mean of the terms of the clauses of "include", n objects found and m required:

    - max(0, 1 - |n - m| / m); the published code has no lower bound;
    - with a colour: the share of the objects that have it, 0 unless n = m;
    - with a position: 1 if all objects are in it, 0 otherwise, and unless n = m and the other clause holds.
    """
    groups: list[Sequence[Box] | None] = []
    terms = []
    for clause in metadata["include"]:
        boxes, count = objects.get(clause["class"], []), clause["count"]
        terms.append(max(0.0, 1 - abs(len(boxes) - count) / count))
        holds = len(boxes) == count
        if "color" in clause:
            share = sum(each == clause["color"] for each in colours(boxes, clause["class"])) / count if holds else 0.0
            terms.append(share)
            holds = share == 1
        if "position" in clause:
            holds = holds and all_in_relation(boxes, groups, *clause["position"])
            terms.append(float(holds))
        groups.append(boxes if holds else None)
    return math.fsum(terms) / len(terms)


def all_in_relation(boxes: Sequence[Box], groups: Sequence[Sequence[Box] | None], relation: str, target: int) -> bool:
    """Return whether each object is in the relation to each object of clause number ``target``, which holds."""
    others = groups[target]
    return others is not None and all(relation in relations(one, other) for one in boxes for other in others)


def relations(one: Box, other: Box) -> set[str]:
    """Return where box ``one`` is relative to box ``other``: none, one or two of ``RELATIONS``.

    The offset of the centres counts beyond a tenth of the sum of both sizes, per axis, and as a share of its length.
    """
    offset = [(one[i] + one[i + 2] - other[i] - other[i + 2]) / 2 for i in (0, 1)]
    sizes = [abs(one[i + 2] - one[i]) + abs(other[i + 2] - other[i]) for i in (0, 1)]
    beyond = [math.copysign(max(abs(d) - _MARGIN * size, 0), d) for d, size in zip(offset, sizes, strict=True)]
    if max(map(abs, beyond)) < 1e-3:
        return set()
    x, y = (value / math.hypot(*offset) for value in beyond)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, true in holds.items() if true}
