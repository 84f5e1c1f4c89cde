"""Tasks to and from the formats of other libraries."""
