from solrl_lightning.callbacks.requantize import Requantize


def test_replicas_are_synchronised_before_every_exploration_and_after_a_resume(fit, stand_in):
    module, resumed = stand_in.StandIn(), stand_in.StandIn()
    trainer = fit(Requantize(), module=module, iterations=2)
    assert module.events == ["requantize 0", "explore", "train", "requantize 1", "explore", "train"]
    fit(Requantize(), module=resumed, iterations=3, resumed=trainer)
    assert resumed.events == ["requantize 2", "explore", "train"]
