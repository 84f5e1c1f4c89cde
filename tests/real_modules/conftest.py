"""Makes timm importable beside a torch without torchvision's operators, as the CPU build is."""

import torch

_torchvision = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        _torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
