"""The subcommands of `gla`; their arguments and help texts are in `gla_tools.command`."""
