from types import SimpleNamespace

import torch

from solrl_lightning.callbacks.ema import WeightEMA, update_average


def closed_form(iterations: int) -> float:
    """The average after n steps, from 0, of a weight that is 1 - 0.8^t after step t."""
    average = 0.0
    for t in range(iterations):
        decay = min((2 + t) / (11 + t), 0.9)
        average = decay * average + (1 - decay) * (1 - 0.8 ** (t + 1))
    return average


def test_update_average_is_the_weighted_mean_in_float32_and_in_place():
    average = {"a": torch.tensor([1.0, 2.0])}
    alias = average["a"]
    update_average(average, {"a": torch.tensor([3.0, 6.0], dtype=torch.bfloat16)}, decay=0.75)
    assert alias.dtype == torch.float32
    torch.testing.assert_close(alias, torch.tensor([1.5, 3.0]))


def test_average_has_the_published_decay_and_one_update_per_optimizer_step(fit, stand_in):
    ema, module = WeightEMA(), stand_in.StandIn()
    fit(ema, module=module, iterations=5)
    assert ema.updates == 5
    torch.testing.assert_close(ema.average["lora"], torch.full((2,), closed_form(5)))
    assert module.ema_state["lora"] is ema.average["lora"]
    assert not any("ema" in name for name in module.state_dict())


def test_a_step_that_the_checkpoint_s_average_lacks_is_in_it_before_the_first_evaluation(stand_in):
    ema, module = WeightEMA(), stand_in.StandIn()
    module.weight.data.fill_(1.0)
    ema.load_state_dict({"updates": 1, "average": {"lora": torch.zeros(2)}})
    ema.on_train_start(SimpleNamespace(global_step=2), module)
    assert ema.updates == 2 and module.ema_state is ema.average
    torch.testing.assert_close(ema.average["lora"], torch.full((2,), 1 - 3 / 12))


def test_checkpoint_without_an_average_starts_one_from_its_weights_with_a_warning(fit, caplog):
    ema = WeightEMA()
    fit(ema, iterations=4, resumed=fit(iterations=3))
    assert "the checkpoint has no evaluation average" in caplog.text
    decay = 5 / 14
    expected = decay * (1 - 0.8**3) + (1 - decay) * (1 - 0.8**4)
    torch.testing.assert_close(ema.average["lora"], torch.full((2,), expected))


def test_evaluation_of_a_checkpoint_uses_its_average(tmp_path, fit, stand_in):
    trained, module = WeightEMA(), stand_in.Evaluated()
    fit(trained, iterations=3).save_checkpoint(tmp_path / "x.ckpt")
    trainer = stand_in.make_trainer(tmp_path, [WeightEMA()])
    trainer.validate(module, stand_in.MicroBatches(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert torch.equal(module.ema_state["lora"], trained.average["lora"])
