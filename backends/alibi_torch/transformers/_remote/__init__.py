"""Models whose own code came with their checkpoint, made to attend by this library.

In go models of which nothing was imported: classes are known by name, by their parts, and by a probe of a few tokens.
Everything around their attention goes on being their own code.
"""

from alibi_torch.transformers._remote.recognition import accelerate_remote, remote_bases, restore_remote

__all__ = ["accelerate_remote", "remote_bases", "restore_remote"]
