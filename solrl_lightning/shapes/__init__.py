"""The embedded world: two coloured shapes in a relation, their renderer, captions, and the model pretrained on them."""
