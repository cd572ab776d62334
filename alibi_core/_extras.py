"""What an extra is installed with."""


def install_hint(extra: str) -> str:
    """Return the end of a message that something of an extra is missing: no package index has this library yet."""
    return f"install with pip install '.[{extra}]' in a checkout of alibi-core"
