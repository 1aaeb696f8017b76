"""The embedded world: scenes of two coloured shapes, their captions, renderer, and the recipe of the embedded model."""
