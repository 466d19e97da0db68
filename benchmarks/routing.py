"""How often the experts of a mixture differ between sampling and an update, and by how many nats.

    python benchmarks/routing.py --out benchmarks/results/routing_cpu.json

Small random mixtures of 8 layers sample 16 answers with a KV cache, a token of each row at a time;
then the same tokens pass as an update passes them, packed and padded. Routers are as sharp as
trained ones: their scores differ by a few nats.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from courtside.engines.base import Sample, SampleRequest, Sampling
from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.local import LocalEngine

VOCAB_SIZE = 258
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "initializer_range": 0.08, "moe_intermediate_size": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
    "deepseek_v3": {"n_routed_experts": 64, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
                    "n_group": 1, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
                    "num_key_value_heads": 8, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
                    "v_head_dim": 32},
    "glm4_moe": {"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}  # fmt: skip
PASS_SEQUENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    model: str
    precision: str
    passes: str
    routers_differ: float
    """Share of (token, layer) with other experts."""
    tokens_differ: float
    """Share of tokens with other experts in any layer."""
    mean_nats: float
    max_nats: float


def make_engine(kind: str, autocast: torch.dtype | None) -> LocalEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind]))
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{id}": id for id in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")),
        eos_token="t1", pad_token="t0",
    )  # fmt: skip
    return LocalEngine(model.eval(), tokenizer, name=kind, vocab_size=VOCAB_SIZE, autocast=autocast)


def sample(engine: LocalEngine) -> tuple[list[SampleRequest], list[Sample]]:
    numbers = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(2, VOCAB_SIZE, (24 + 3 * i,), generator=numbers).tolist())
        for i in range(8)
    ]
    requests = [
        SampleRequest(prompt_ids=prompt, seed=10 * i + n)
        for i, prompt in enumerate(prompts)
        for n in range(2)
    ]
    return requests, engine.sample(
        requests, Sampling(max_new_tokens=48, return_routed_experts=True)
    )


@torch.no_grad()
def compare(
    engine: LocalEngine,
    passes: ForwardPasses,
    requests: list[SampleRequest],
    samples: list[Sample],
) -> dict[str, float]:
    num_tokens = num_tokens_differ = num_routers_differ = 0
    nats: list[float] = []
    ids = [r.prompt_ids + s.token_ids for r, s in zip(requests, samples, strict=True)]
    assert engine.routers is not None
    with engine.autocast_context(), passes.patch_model():
        for start in range(0, len(ids), PASS_SEQUENCES):
            part = slice(start, start + PASS_SEQUENCES)
            hidden_ND, spans = passes.forward(
                ids[part], records=[(s.routed_experts,) for s in samples[part]]
            )
            routing = engine.routers.current
            assert routing is not None
            selected_NLK = routing.stack_selected()
            for request, answer, token_ids, span in zip(
                requests[part], samples[part], ids[part], spans, strict=True
            ):
                assert answer.routed_experts is not None
                recorded_TLK = answer.routed_experts.long().sort(-1).values
                length = len(recorded_TLK)
                ours_TLK = selected_NLK[span.indices(range(length))].sort(-1).values
                differs_TL = (ours_TLK != recorded_TLK).any(-1)
                num_tokens += length
                num_routers_differ += int(differs_TL.sum())
                num_tokens_differ += int(differs_TL.any(-1).sum())
                sources = span.indices(range(len(request.prompt_ids) - 1, len(token_ids) - 1))
                logp_TV = engine.head(hidden_ND[sources]).float().log_softmax(-1)
                logp_T = logp_TV.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
                nats += (logp_T - torch.tensor(answer.logp)).abs().tolist()
    return {
        "routers_differ": num_routers_differ / (num_tokens * engine.routers.num_layers),
        "tokens_differ": num_tokens_differ / num_tokens,
        "mean_nats": sum(nats) / len(nats),
        "max_nats": max(nats),
    }


def measure() -> Iterator[Row]:
    for kind in KINDS:
        for precision, autocast in (("float32", None), ("bfloat16", torch.bfloat16)):
            engine = make_engine(kind, autocast)
            requests, samples = sample(engine)
            ways = {"padded": replace(engine.passes, padding_reason="asked for")}
            if engine.passes.padding_reason is None:
                ways = {"packed": engine.passes} | ways
            for name, passes in ways.items():
                measured = compare(engine, passes, requests, samples)
                yield Row(model=kind, precision=precision, passes=name, **measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for row in measure():
        rows.append(row)
        print(f"{row.model:12} {row.precision:9} {row.passes:7} routers {row.routers_differ:6.1%}  "
              f"tokens {row.tokens_differ:6.1%}  nats {row.mean_nats:.2g}, {row.max_nats:.2g}",
              flush=True)  # fmt: skip
    if options.out is not None:
        machine = {"torch": torch.__version__, "transformers": transformers.__version__,
                   "machine": platform.machine(), "device": "cpu"}  # fmt: skip
        tree = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
