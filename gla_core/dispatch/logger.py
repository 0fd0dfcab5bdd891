"""The logger of this package, `gla_core`: silent, as that of any library, until the program configures logging."""

import logging

logger = logging.getLogger("gla_core")
logger.addHandler(logging.NullHandler())
