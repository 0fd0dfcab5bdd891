"""Softmax along one dimension: rows in one pass, and rows in pieces."""
