"""The job in NVlabs DiffusionNFT, on its own defaults. The working directory is the folder of build_models.py."""

from config import base  # of the checkout, which the launcher puts on sys.path
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base.get_config()
    config.base_model, config.pretrained.model, config.dataset = "sd3", "tiny-sd3", "data"
    config.debug = True  # neither evaluates nor saves
    config.mixed_precision = "bf16"
    config.resolution = 64
    config.prompt_fn, config.reward_fn = "general_ocr", {"jpeg_compressibility": 1.0}  # the launcher's reward
    config.decay_type, config.beta, config.train.adv_mode = 1, 1.0, "all"
    config.sample.num_steps = 4
    config.sample.guidance_scale = 1.0
    config.sample.deterministic, config.sample.solver = True, "dpm1"  # of first order: Euler
    config.sample.num_image_per_prompt = config.sample.train_batch_size = config.train.batch_size = 8
    config.sample.num_batches_per_epoch = config.train.gradient_accumulation_steps = 2  # one optimiser step
    config.sample.global_std = False
    config.train.timestep_fraction = 0.5
    return config
