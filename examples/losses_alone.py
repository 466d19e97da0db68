"""Where two top-k losses end: one softmax over 200 tokens, exact gradients, no model and no recipe.

The naive form stops at 1/e of the teacher's mass on the support, and warns; with a tail the student
reaches all of it.
"""

import torch

from courtside.losses.top_k import support_mass, top_k_divergence, top_k_ids

torch.manual_seed(0)
teacher_TV = (2 * torch.randn(1, 200, dtype=torch.float64)).log_softmax(-1)
ids_TK, keep_TK = top_k_ids(teacher_TV, teacher_TV, k=20, of="teacher")
teacher_TK = teacher_TV.gather(-1, ids_TK)
mass = support_mass(teacher_TK, keep_TK).item()
print(f"teacher: {mass:.3f} of its mass on its 20 most likely tokens")

for form in ("naive", "tail"):
    logits_TV = torch.randn(1, 200, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits_TV], lr=0.05)
    for _ in range(1000):
        student_TK = logits_TV.log_softmax(-1).gather(-1, ids_TK)
        loss_T = top_k_divergence(student_TK, teacher_TK, keep_TK, name="reverse_kl", form=form)
        optimizer.zero_grad()
        loss_T.sum().backward()
        optimizer.step()
    ratio = support_mass(student_TK, keep_TK).item() / mass
    print(f"{form}: the student ends with {ratio:.3f} of that mass")
