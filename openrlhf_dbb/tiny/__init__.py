"""The tiny preset: a small transformer on arithmetic and sorting, made on the spot.

task   the problems and their answers
model  the model, its tokenizer and its files
"""
