"""The mutation list still fits the source, so that `mutants.py` cannot rot unseen."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest


@pytest.mark.parametrize("mutation", mutants.MUTATIONS, ids=lambda m: f"{m.file}:{m.old[:30]}")
def test_mutation_applies_and_is_a_program(mutation: mutants.Mutation) -> None:
    source = (mutants.PACKAGE / "losses" / mutation.file).read_text("utf-8")
    changed = mutants.mutated(source, mutation)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_the_list_covers_every_loss_file() -> None:
    assert len(set(mutants.MUTATIONS)) == len(mutants.MUTATIONS) >= 40
    folder = mutants.PACKAGE / "losses"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    # Kernels are compared with the torch backend.
    kernels = {"kernels", "tail_kernel", "topk_kernels", "triton_backend", "triton_launch"}
    kernels.add("triton_support")
    without = {f"fused/{name}.py" for name in (*kernels, "__init__")}
    without |= {"__init__.py", "divergences/__init__.py"}
    losses = {m.file for m in mutants.MUTATIONS if not m.file.startswith("../")}
    assert losses == files - without
    assert all((Path(__file__).parent / name).is_file() for name in mutants.TESTS_IN_ORDER)


def test_a_mutation_whose_text_is_gone_or_ambiguous_is_refused() -> None:
    for source in ("b", "a a"):
        with pytest.raises(ValueError, match="not once"):
            mutants.mutated(source, mutants.Mutation("x.py", "a", "c"))
