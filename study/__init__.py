"""The study: what history buys, with controls, seeds and tests, through the real pipeline."""
