from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("gla", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("gla")
