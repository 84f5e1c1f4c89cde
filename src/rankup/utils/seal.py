"""The seal of a file of JSON: a hash of all that it says, which tells whether it was edited."""

import hashlib
import json


def seal(data: object) -> str:
    """The SHA-256 of JSON, whatever the order of its entries."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
