"""Text that comes from files."""

import unicodedata


def is_printable(text: str) -> bool:
    """Whether text can neither move a terminal's cursor nor break a sentence in two.

    >>> is_printable("café au lait"), is_printable("a\\x1b[2J"), is_printable("a\\u2028b")
    (True, False, False)
    """
    kinds = map(unicodedata.category, text)
    return not any(kind.startswith("C") or kind in ("Zl", "Zp") for kind in kinds)
