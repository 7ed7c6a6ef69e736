"""The tiny preset: a small transformer on arithmetic and sorting, made on the spot.

task   the prompts and their answers
model  the model, its tokenizer and its files
"""

from openrlhf_dbb.tiny.model import Recipe, TinyAssets, build_model, build_tokenizer, default_folder, prepare

__all__ = ["Recipe", "TinyAssets", "build_model", "build_tokenizer", "default_folder", "prepare"]
