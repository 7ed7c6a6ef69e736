"""Stands in for flash-attn's compiled extension, which flash_attn imports; attention that would call it is refused."""
