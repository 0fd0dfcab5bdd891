"""The subcommands of `gla`; their arguments and help texts are in the package `gla_command`."""
