"""Messages carry everything that decides how a chunk is sampled."""

import torch

from solrl_lightning.data.prompt import Prompt
from solrl_lightning.explorers.messages import Request, pack_request, unpack_request
from solrl_lightning.rollout.chunks import SamplingSpec
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.sampling import start

SIGMAS = torch.tensor([1.0, 0.5, 0.0])


def test_request_arrives_whole() -> None:
    options = {"solver": "dpm2", "stop_step": 1, "decoder": "preview", "with_states": False}
    state = start(torch.randn(3, 4))
    spec = SamplingSpec(sigmas=SIGMAS, initial_state=state, **options)
    tested = options.keys() | {"sigmas", "initial_state", "transitions"}
    assert tested == set(SamplingSpec._fields), "give the new field a value above that is not its default"
    prompts = EncodedPrompts([Prompt("a", {"n": [1]}), Prompt("a", {"n": 2}, "b.png")], {"embeds": torch.randn(2, 5)})
    request = Request("merged", prompts, torch.tensor([0, 1, 1]), torch.arange(3), spec)
    weights, arrived = unpack_request(pack_request(request, "identity"), torch.device("cpu"))
    assert weights == "identity" and arrived.sampler == "merged"
    assert arrived.prompts.prompts == prompts.prompts
    assert arrived.prompts.conditioning["embeds"].equal(prompts.conditioning["embeds"])
    assert arrived.owner.equal(request.owner) and arrived.seeds.equal(request.seeds)
    assert {name: getattr(arrived.spec, name) for name in options} == options
    assert arrived.spec.sigmas.equal(SIGMAS) and not arrived.spec.transitions
    assert arrived.spec.initial_state is not None and arrived.spec.initial_state.x.equal(state.x)
    assert arrived.spec.initial_state.step == 0
