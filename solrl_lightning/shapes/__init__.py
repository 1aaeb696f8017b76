"""The embedded world: scenes of two coloured shapes and their captions. dev/pretrain.py trains the embedded model."""
