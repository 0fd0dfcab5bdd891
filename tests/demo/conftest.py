import pytest


@pytest.fixture(autouse=True)
def isolated(fresh_registry: None, plain_terminal: None) -> None:
    """Isolates every test here from the environment."""
