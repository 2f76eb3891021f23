"""Attention over a draft tree and its prefix."""

from kernels.tree_attention.reference import TreeMask, tree_attention

__all__ = ["TreeMask", "tree_attention"]
