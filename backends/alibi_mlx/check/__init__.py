"""What the owner of a Mac runs, ``python -m alibi_mlx.check``: numerics and speed of every route on that machine."""
