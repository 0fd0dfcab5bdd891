"""Tables of the sizes of calls: every combination of values."""

import itertools

import pytest


def grid(**axes):
    """Returns every combination of values by their names; an axis that is a list has each of its values in turn."""
    names = [name for name, values in axes.items() if isinstance(values, list)]
    return [{**axes, **dict(zip(names, row, strict=True))} for row in itertools.product(*(axes[x] for x in names))]


def thorough(cases):
    return [pytest.param(case, marks=pytest.mark.thorough) for case in cases]
