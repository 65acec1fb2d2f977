"""Training EAGLE-3 heads: what is trained is what an engine runs, and it learns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_eagle import EagleOracle, load_with_head
from helpers_models import write_checkpoint
from helpers_parity import tokens

from actorium.tools.training.eagle_net import (
    EagleNet,
    Teacher,
    draft_loss,
    frequent_tokens,
    new_net,
    save_head,
    shuffled,
)
from actorium.tools.training.eagle_texts import WrittenConversation
from actorium.tools.training.trainer import Trainer

TEXTS = [WrittenConversation(tokens(5, seed), tokens(12 + seed % 4, seed % 3))
         for seed in range(20)]


@pytest.fixture
def teacher(tmp_path: Path) -> Teacher:
    write_checkpoint(tmp_path / "model", "LlamaForCausalLM", 5, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2)
    return Teacher(tmp_path / "model")


def test_streams_are_the_chain_of_drafts(teacher: Teacher, tmp_path: Path) -> None:
    targets = frequent_tokens(TEXTS, 40)
    net: EagleNet = new_net(teacher, targets).bfloat16().float()  # as it is saved
    save_head(teacher, net, targets, tmp_path / "head")
    model = load_with_head(tmp_path / "model", tmp_path / "head")
    oracle = EagleOracle(tmp_path / "head", teacher.embedding)
    ids = tokens(9)
    with torch.no_grad():
        states = teacher.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        taken = torch.cat([states[i] for i in teacher.taps], -1)
        embedded = teacher.embedding[F.pad(torch.tensor([ids[1:]]), (0, 1))]
        streams = list(net.streams(embedded, taken, 3))
    assert model.shape.eagle.taps == tuple(teacher.taps)
    hidden = oracle.joined([states[i][0] for i in teacher.taps])
    for at in range(3, 8):  # draft i + 1 of the token at + 2 follows on the tokens up to at + 1 - i
        for i, logits in enumerate(streams):
            known = hidden[:at + 1 - i]
            for _ in range(i):
                out = oracle.forward(ids[1:len(known) + 1], known)
                known = torch.cat((known, out[-1:]))
            out = oracle.forward(ids[1:len(known) + 1], known)
            torch.testing.assert_close(oracle.logits(out[-1:])[0], logits[0, at], atol=1e-4,
                                       rtol=0)


def test_a_head_learns(teacher: Teacher) -> None:
    targets = frequent_tokens(TEXTS, 40)
    assert len(targets) == len(set(targets.tolist())) == 40
    batches, net = teacher.batches(TEXTS), new_net(teacher, targets)
    trainer = Trainer(net, partial(draft_loss, teacher, net, targets), shuffled(batches, 1))
    losses = [trainer.step(0.1)[0] for _ in range(30)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
