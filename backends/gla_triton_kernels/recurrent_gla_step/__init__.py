"""One token of gated linear attention, for decoding."""
