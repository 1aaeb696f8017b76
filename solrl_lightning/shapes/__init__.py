"""The embedded world: scenes of two coloured shapes and their captions. dev/pretrain.py made the embedded model."""
