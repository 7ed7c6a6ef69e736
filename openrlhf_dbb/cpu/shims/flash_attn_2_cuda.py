"""Stands in for flash-attn's compiled extension, which flash_attn imports but nothing calls on CPU."""
