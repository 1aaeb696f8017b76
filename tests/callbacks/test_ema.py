import pytest
import torch
from lightning.pytorch import Callback

from solrl_lightning.callbacks.ema import WeightEMA, update_average


def closed_form(iterations: int) -> float:
    """The average after n steps, from 0, of a weight that is 1 - 0.8^t after step t."""
    average = 0.0
    for t in range(iterations):
        decay = min((2 + t) / (11 + t), 0.9)
        average = decay * average + (1 - decay) * (1 - 0.8 ** (t + 1))
    return average


class SaveAt(Callback):
    """Saves one checkpoint in iteration 1, in the given hook."""

    def __init__(self, path, hook: str, batch_idx: int) -> None:
        self.path, self.batch_idx = path, batch_idx
        setattr(self, hook, self.save)

    def save(self, trainer, module, *args) -> None:
        if trainer.current_epoch == 1 and args[-1] == self.batch_idx and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_update_average_is_the_weighted_mean_in_float32_and_in_place():
    average = {"a": torch.tensor([1.0, 2.0])}
    alias = average["a"]
    update_average(average, {"a": torch.tensor([3.0, 6.0], dtype=torch.bfloat16)}, decay=0.75)
    assert alias.dtype == torch.float32
    torch.testing.assert_close(alias, torch.tensor([1.5, 3.0]))


def test_average_has_the_published_decay_and_one_update_per_optimiser_step(tmp_path, stand_in):
    ema, module = WeightEMA(), stand_in.Module()
    stand_in.trainer(tmp_path, [ema], max_epochs=5).fit(module, stand_in.micro_batches())
    assert ema.updates == 5
    torch.testing.assert_close(ema.average["lora"], torch.full((2,), closed_form(5)))
    assert module.ema_state["lora"] is ema.average["lora"]
    assert not any("ema" in name for name in module.state_dict())


@pytest.mark.parametrize(
    ("hook", "batch_idx", "ahead"),
    [("on_train_batch_end", 1, True), ("on_train_batch_end", 0, False), ("on_train_batch_end", 1, False)],
    ids=["after the step, before the average", "between micro-batches", "after the average"],
)
def test_resume_is_bit_exact_from_a_checkpoint_of_any_hook(tmp_path, stand_in, hook, batch_idx, ahead):
    path = tmp_path / "x.ckpt"
    straight, saver = WeightEMA(), SaveAt(path, hook, batch_idx)
    callbacks = [saver, straight] if ahead else [straight, saver]
    module = stand_in.Module()
    stand_in.trainer(tmp_path, callbacks, max_epochs=4).fit(module, stand_in.micro_batches())

    saved = torch.load(path, weights_only=True)
    state = saved["callbacks"]["WeightEMA"]
    assert (saved["global_step"], state["updates"]) == {True: (2, 1), False: (1 + batch_idx, 1 + batch_idx)}[ahead]

    # Resume after the last optimiser step, as ExploreTrainLoop does and Lightning's loop does not.
    resumed, module = WeightEMA(), stand_in.Module()
    module.weight.data.copy_(saved["state_dict"]["weight"])
    resumed.load_state_dict(state)
    trainer = stand_in.trainer(tmp_path, [resumed], max_epochs=4 - saved["global_step"])
    restart_at(trainer, resumed, saved["global_step"])
    trainer.fit(module, stand_in.micro_batches())
    assert torch.equal(resumed.average["lora"], straight.average["lora"])


def restart_at(trainer, ema, step):
    """Make the trainer count optimiser steps from ``step``, as a resumed trainer does."""
    plain = type(trainer).global_step.fget

    class Resumed(type(trainer)):
        global_step = property(lambda self: plain(self) + step)

    trainer.__class__ = Resumed


def test_checkpoint_without_an_average_starts_one_from_its_weights_with_a_warning(tmp_path, stand_in, caplog):
    module, trainer = stand_in.Module(), stand_in.trainer(tmp_path, [], max_epochs=3)
    trainer.fit(module, stand_in.micro_batches())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    ema = WeightEMA()
    trainer = stand_in.trainer(tmp_path, [ema], max_epochs=4)
    trainer.fit(stand_in.Module(), stand_in.micro_batches(), ckpt_path=tmp_path / "x.ckpt")
    assert "the checkpoint has no evaluation average" in caplog.text
    decay = 5 / 14
    expected = decay * (1 - 0.8**3) + (1 - decay) * (1 - 0.8**4)
    torch.testing.assert_close(ema.average["lora"], torch.full((2,), expected))


def test_evaluation_of_a_checkpoint_uses_its_average(tmp_path, stand_in):
    trained = WeightEMA()
    trainer = stand_in.trainer(tmp_path, [trained], max_epochs=3)
    trainer.fit(stand_in.Module(), stand_in.micro_batches())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module, trainer = stand_in.Evaluated(), stand_in.trainer(tmp_path, [WeightEMA()])
    assert module.ema_state is None
    trainer.validate(module, stand_in.micro_batches(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert torch.equal(module.ema_state["lora"], trained.average["lora"])
