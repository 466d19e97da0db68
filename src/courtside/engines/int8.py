"""Linear layers with 8-bit weights, for teachers that are only read.

Symmetric, one float32 scale a row: half the memory of bfloat16. The output head stays as it is,
because its logits are the teacher's word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Int8Linear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight_OI = linear.weight.detach().float()
        scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight_OI", (weight_OI / scale_O1).round().to(torch.int8))
        self.register_buffer("scale_O1", scale_O1)
        self.bias = linear.bias

    def forward(self, input_ND: Tensor) -> Tensor:
        weight: Any = self.weight_OI
        scale: Any = self.scale_O1
        # Scaling the output, a row of it per output channel, spares scaling the whole matrix.
        out_NO: Tensor = F.linear(input_ND, weight.to(input_ND.dtype))
        out_NO = out_NO * scale.squeeze(1).to(input_ND.dtype)
        return out_NO if self.bias is None else out_NO + self.bias


def quantize_linear_layers(model: Any) -> Any:
    """Replace every linear layer but the output head, in place."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child))
    return model
