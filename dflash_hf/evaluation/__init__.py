"""Measuring a drafter: the same prompts with and without it, in one process, interleaved."""

from .compare import METHODS, NEAR_TIE, Comparison, Run, compare, first_difference, repeated_share, run


__all__ = ["METHODS", "NEAR_TIE", "Comparison", "Run", "compare", "first_difference", "repeated_share", "run"]
