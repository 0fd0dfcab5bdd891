"""Runs tests marked `gpu` if there is a CUDA device, and deselects them otherwise."""

import torch


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
