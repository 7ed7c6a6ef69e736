"""The tiny preset: a small transformer on arithmetic and sorting, made on the spot.

task   the problems and their answers
steps  other problems, to work out step by step
model  the model, its tokenizer and its files
"""

from openrlhf_dbb.tiny.model import Recipe, TinyAssets, build_model, build_tokenizer, default_folder, prepare

__all__ = ["Recipe", "TinyAssets", "build_model", "build_tokenizer", "default_folder", "prepare"]
