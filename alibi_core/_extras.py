"""The command that installs an extra."""


def install_hint(extra: str) -> str:
    """Return the end of an error about a missing extra: how to install it. No package index has this library yet."""
    return f"install with pip install '.[{extra}]' in a checkout of alibi-core"
