"""Holds the ops of gated linear attention, one file each."""
