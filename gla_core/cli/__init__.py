"""What the subcommands of `gla` do; their arguments and help texts are in the package `gla_command`."""
