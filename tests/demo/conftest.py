import pytest


@pytest.fixture(autouse=True)
def isolated(fresh_registry, plain_terminal):
    """Isolates every test here from the environment."""
