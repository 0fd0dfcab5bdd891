"""Softmax attention over blocks of keys, and over pieces of them."""
