"""`python -m gla_core` is the command `gla`."""

from gla_tools.command import main

if __name__ == "__main__":
    main()
