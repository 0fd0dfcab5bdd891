"""The command `gla` (command.py) and the pytest plugin of the conformance kit (pytest_plugin.py).

They are apart from `gla_core` because `import gla_core` imports torch: `gla --help`, and every run of pytest in an
environment that has gla-core, would wait for that. `import gla_core` cannot put it off, since it registers the torch
ops that saved programs (`torch.export.load`) name.
"""
