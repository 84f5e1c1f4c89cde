"""The test matrix of methods, for those of other packages, too. Needs pytest."""

from rankup.testing.methods import Expected, MethodTests
from rankup.testing.setup import NETS, accuracy, answers, learn, make_method, split_digits

__all__ = [
    "NETS",
    "Expected",
    "MethodTests",
    "accuracy",
    "answers",
    "learn",
    "make_method",
    "split_digits",
]
