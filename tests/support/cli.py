"""The command ``alibi-core``, as its installation names it."""

from importlib.metadata import entry_points

(_command,) = entry_points(group="console_scripts", name="alibi-core")
main = _command.load()
