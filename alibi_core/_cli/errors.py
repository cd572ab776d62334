"""The error of a command line."""


class UnusableError(Exception):
    """The command cannot do what it is asked for; the message says why and tells the fix."""
