"""ImageReward at its true size, the package's against ours: are the scores the same, and what does 24 in a group cost?

Two environments, one folder between them (2 GB); the first is that of requirements.txt:

    oracle/bin/python dev/oracle/compare_full_size.py package imagereward-at-full-size
    python dev/oracle/compare_full_size.py ours imagereward-at-full-size

The first builds the package's model (ViT-L/16 and BERT-base) with random weights, saves it as the hub's files, loads
it with the package's ``load`` and records scores and times; the second loads the same files here, and prints both.

Fair times: one thread, the same torch in both environments, no gradients (the package's methods do not switch them
off), a warm-up of each model; seconds are of this process on the CPU, so that others on the machine do not count.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

GROUP, POOL = 24, 96
POOLED = f"a prompt per image of {POOL}, for {GROUP} of them (4 timed)"
PROMPT = "a red circle above a blue square, light of the night"
SAME_PIXELS = [(224, 224)] * 4  # width, height; nothing to resize
OTHER_SHAPES = [(512, 512), (768, 512), (512, 768), (130, 96)]


def seconds(call: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def pool_seconds(model: torch.nn.Module, pictures: list[Image.Image]) -> float:
    """Per group's worth of a pool's images, each of which the package puts before the prompts of all."""
    part = pictures[:4]
    return seconds(lambda: model.inference_rank([PROMPT] * POOL, part))[0] * GROUP / len(part)


@torch.no_grad()
def run_package(folder: Path) -> None:
    """Write the hub's files, the pictures and package.json into the folder."""
    import ImageReward
    import record

    folder.mkdir(parents=True)
    os.chdir(folder)
    tokenizer = Path("bert-base-uncased")  # the name that the package asks for, here in the working directory
    tokenizer.mkdir()
    vocabulary = [*record.VOCABULARY, *(f"[unused{n}]" for n in range(30522 - len(record.VOCABULARY)))]
    (tokenizer / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    release = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    config = record.MED_CONFIG | release | {"max_position_embeddings": 512, "vocab_size": 30524}
    Path("med_config.json").write_text(json.dumps(config))

    group = [record.picture(512, 512, seed) for seed in range(GROUP)]
    same = [record.picture(*size, 100 + seed) for seed, size in enumerate(SAME_PIXELS)]
    other = [record.picture(*size, 200 + seed) for seed, size in enumerate(OTHER_SHAPES)]
    for name, pictures in (("group", group), ("same", same), ("other", other)):
        for number, image in enumerate(pictures):
            image.save(f"{name}{number}.png")

    model = ImageReward.ImageReward(med_config="med_config.json").eval()
    record.randomise(model)
    raw = torch.tensor(model.inference_rank(PROMPT, other)[1])
    model.mlp.layers[-1].weight.data /= raw.std()
    model.mlp.layers[-1].bias.data = (model.mlp.layers[-1].bias.data - raw.mean()) / raw.std()
    torch.save(model.state_dict(), "ImageReward.pt")

    model = ImageReward.load("ImageReward.pt", device="cpu", med_config="med_config.json")
    content = {name: model.inference_rank(PROMPT, pictures)[1] for name, pictures in (("same", same), ("other", other))}
    one_prompt, (_, content["group"]) = seconds(lambda: model.inference_rank(PROMPT, group))
    a_prompt_each, _ = seconds(lambda: model.inference_rank([PROMPT] * GROUP, group))
    content["seconds"] = {"one prompt": one_prompt, "a prompt per image": a_prompt_each}
    content["seconds"][POOLED] = pool_seconds(model, group)
    Path("package.json").write_text(json.dumps(content))
    print(content)


def run_ours(folder: Path) -> None:
    """Print the distances from the package's scores and both times."""
    from torchvision.transforms.functional import pil_to_tensor

    from solrl_lightning.rewards import ImageReward

    package = json.loads((folder / "package.json").read_text())

    def read(name: str, number: int) -> torch.Tensor:
        return pil_to_tensor(Image.open(folder / f"{name}{number}.png"))[None] / 255

    reward = ImageReward(str(folder), str(folder / "bert-base-uncased"))
    for name in ("same", "other"):
        scores = [float(reward(read(name, number), [PROMPT])) for number in range(len(package[name]))]
        distance = (torch.tensor(scores) - torch.tensor(package[name])).abs().max()
        print(f"{name}: |difference| <= {distance:.1e}, scores {min(scores):.2f} to {max(scores):.2f}")
    group = torch.cat([read("group", number) for number in range(GROUP)])
    spent, scores = seconds(lambda: reward(group, [PROMPT] * GROUP))
    print(f"group: |difference| <= {(scores - torch.tensor(package['group'])).abs().max():.1e}; {spent:.1f} s")
    for call, seconds_there in package["seconds"].items():
        print(f"package, {call}: {seconds_there:.1f} s, {seconds_there / spent:.2f} times ours")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("half", choices=["package", "ours"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"package": run_package, "ours": run_ours}[arguments.half](arguments.folder.resolve())
