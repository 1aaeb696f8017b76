"""NVFP4 and the shadow: the format, which layers are quantised, and the backends that run them."""
