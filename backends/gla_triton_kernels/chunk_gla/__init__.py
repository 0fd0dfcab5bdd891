"""Gated linear attention over sequences, and over segments of them: one file per kernel and architecture."""
