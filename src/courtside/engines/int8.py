"""Int8 weight-only linear layers, for teachers: half the memory of bfloat16.

Symmetric, with one float32 scale per output channel. The LM head is not quantized, because the
losses are functions of its logits.
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
        quantized_OI = (weight_OI / scale_O1).round().to(torch.int8)
        # Parameters, so that memory budgets and parameter counts include them.
        self.weight_OI = nn.Parameter(quantized_OI, requires_grad=False)
        self.scale_O = nn.Parameter(scale_O1.squeeze(1), requires_grad=False)
        self.bias = linear.bias

    def forward(self, input_ND: Tensor) -> Tensor:
        # Integers up to 127 are exact in bfloat16; scaling the output instead of the weight leaves
        # the matmul as the only rounding.
        output_NO = F.linear(input_ND, self.weight_OI.to(input_ND.dtype))
        output_NO = output_NO * self.scale_O.to(input_ND.dtype)
        return output_NO if self.bias is None else output_NO + self.bias


def quantize_linear_layers(model: Any) -> Any:
    """Replace every linear layer but the LM head, in place."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child))
    return model
