"""The student as the model of a reader, in process."""

from __future__ import annotations

from collections.abc import Sequence

from courtside.chat.model_client import Reply
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling
from courtside.recipe.reader import ModelReaderConfig
from courtside.seeds import seed_for
from courtside.types import Message


class StudentClient:
    def __init__(
        self, config: ModelReaderConfig, *, engine: Engine, template: ChatTemplate, seed: int
    ):
        self.engine, self.template, self.seed = engine, template, seed
        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        self.max_prompt_tokens = engine.context_length - config.max_new_tokens

    def __call__(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        if not prompts:
            return []
        requests = []
        for prompt in prompts:
            ids = self.template.prompt_ids(prompt)
            # From the prompt alone, so that a reply does not depend on the rest of the batch.
            seed = seed_for(self.seed, "reader", *(message.content for message in prompt))
            requests.append(SampleRequest(prompt_ids=ids, seed=seed))
        samples = self.engine.sample(requests, self.sampling)
        return [
            Reply(
                text=sample.text,
                input_tokens=len(request.prompt_ids),
                output_tokens=len(sample.token_ids),
            )
            for request, sample in zip(requests, samples, strict=True)
        ]

    def fits(self, prompt: Sequence[Message]) -> bool:
        return len(self.template.prompt_ids(prompt)) <= self.max_prompt_tokens
