"""Classes of their own for single objects."""

from typing import Any


def derived_class(kind: type, attributes: dict[str, Any]) -> Any:
    """A class derived from `kind` with more attributes, and of the same name.

    >>> derived_class(int, {"is_even": property(lambda self: self % 2 == 0)})(6).is_even
    True
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | attributes)
