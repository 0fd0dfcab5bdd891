"""Holds the ops of softmax attention, one file each."""
