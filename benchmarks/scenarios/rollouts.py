"""Reinforcement learning with rollouts by the engine: GRPO on a small model, weights changed while
the engine serves."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import torch
from harness import Rows, scenario
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from actorium import Engine, SamplingParams
from actorium.actors.client.requests import Completion
from actorium.actors.models.model_dir import resolve

STARTS = tuple(f"Once upon a time, there was a {kind} named" for kind in (
    "lazy frog", "tiny bear", "clever mole", "lonely robin", "sleepy turkey", "lazy shark"))
CLIP = 0.2
"""How far the ratio of new and old probability counts (PPO, arXiv 1707.06347)."""


class Rollout(NamedTuple):
    """A completion of a prompt, and how much better it is than its group."""

    prompt: list[int]
    completion: Completion
    advantage: float


@scenario
def grpo(model: str = "", word: str = "garden", steps: int = 40, prompts: int = 4, n: int = 16,
         max_tokens: int = 32, lr: float = 2e-4, dtype: str = "auto",
         threads: int = 1, seed: int = 0) -> Rows:
    """GRPO (arXiv 2402.03300): stories are rewarded that have a `word`; each step n of a prompt.

    Each row: the mean reward; the largest and the mean difference between the engine's
    log-probabilities of the sampled tokens and those of the model that is trained; seconds of
    rollouts, of training, and of giving the engine the new weights.
    """
    torch.set_num_threads(threads)
    chance = random.Random(seed)
    policy: Any = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    with Engine(model, dtype=dtype, max_n=n) as engine:
        client = engine.client
        for step in range(steps):
            began = time.perf_counter()
            starts = [client.tokenize(start) for start in chance.sample(STARTS, prompts)]
            params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, top_k=0, top_p=1.0,
                                    logprobs=0, seed=chance.getrandbits(32))
            groups: list[list[Completion]] = client.generate(starts, params)
            rewards = torch.tensor([[float(word in one.text) for one in group]
                                    for group in groups])
            sampled = time.perf_counter()
            gap = train(policy, optimizer, [
                Rollout(start, one, advantage)
                for start, group, own in zip(starts, groups, advantages(rewards), strict=True)
                for one, advantage in zip(group, own.tolist(), strict=True)])
            trained = time.perf_counter()
            update = client.update_weights(dict(policy.named_parameters()))
            yield {"step": step, "version": update["version"],
                   "reward": round(rewards.mean().item(), 3),
                   "largest_gap": round(gap.max().item(), 6),
                   "mean_gap": round(gap.mean().item(), 7),
                   "rollouts_s": round(sampled - began, 2),
                   "training_s": round(trained - sampled, 2),
                   "update_s": round(time.perf_counter() - trained, 2)}


def advantages(rewards: Tensor) -> Tensor:
    """[prompts, n]: how much better than its group each completion is, in standard deviations."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


def train(policy: Any, optimizer: torch.optim.Optimizer, rollouts: list[Rollout]) -> Tensor:
    """One step of the optimizer. Returns how far the policy's log-probabilities of the sampled
    tokens are from those that the engine sampled them with."""
    rows = [torch.tensor(own.prompt + own.completion.token_ids) for own in rollouts]
    tokens = pad_sequence(rows, batch_first=True)  # at the end, where no earlier token sees it
    logits = policy(tokens[:, :-1]).logits.log_softmax(-1)
    new = logits.gather(2, tokens[:, 1:, None])[:, :, 0]
    old, wanted = torch.zeros_like(new), torch.zeros_like(new, dtype=torch.bool)
    for row, own in enumerate(rollouts):
        first, count = len(own.prompt) - 1, len(own.completion.token_ids)
        assert own.completion.logprobs is not None
        old[row, first:first + count] = torch.tensor(
            [one.logprob for one in own.completion.logprobs])
        wanted[row, first:first + count] = True
    ratio = (new - old).exp()
    advantage = torch.tensor([own.advantage for own in rollouts])[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    optimizer.zero_grad()
    (-gain[wanted].mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return (new - old)[wanted].detach().abs()
