"""Makes timm importable beside a torch without torchvision's operators, as the CPU build is."""

import helpers.published  # noqa: F401
