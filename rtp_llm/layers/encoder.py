"""The BERT-type encoder (Devlin et al., 2018, arXiv:1810.04805): learned positions, norms behind each block, no cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rtp_llm.errors import Problem
from rtp_llm.layers.attention import Attention, Mask, Step
from rtp_llm.layers.embedding import ReplicatedEmbedding, VocabParallelEmbedding, check_batch, check_ids
from rtp_llm.layers.faults import ForwardError, LayerFault
from rtp_llm.layers.linear import ReplicatedLinear
from rtp_llm.layers.norm import LayerNorm
from rtp_llm.layers.pooling import pool


class EncoderEmbedding(nn.Module):
    """Sum of word, position and token type embeddings, normalised.

    ``padding_id``: positions count real tokens from ``padding_id + 1`` on and padding stays at ``padding_id`` (RoBERTa);
    None: positions are 0, 1, 2, ... (BERT).
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: ReplicatedEmbedding,
        token_type: ReplicatedEmbedding,
        norm: LayerNorm,
        padding_id: int | None,
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.token_type = token_type
        self.norm = norm
        self.padding_id = padding_id

    def positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Position ids, ``[batch, seq]`` or ``[1, seq]``."""
        if self.padding_id is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        real = (input_ids != self.padding_id).long()
        return real.cumsum(dim=1) * real + self.padding_id

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        check_ids("input_ids", input_ids, self.word.vocab_size)
        positions = self.positions(input_ids)
        check_ids("positions of input_ids", positions, self.position.rows)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        else:
            check_batch("token_type_ids", token_type_ids, tuple(input_ids.shape))
            check_ids("token_type_ids", token_type_ids, self.token_type.rows)
        total: torch.Tensor = self.norm(self.word(input_ids) + self.token_type(token_type_ids) + self.position(positions))
        return total


class EncoderLayer(nn.Module):
    """``norm(x + attn(x))``, then ``norm(x + mlp(x))``."""

    def __init__(self, attn: Attention, mlp: nn.Module, attn_norm: LayerNorm, mlp_norm: LayerNorm) -> None:
        super().__init__()
        self.attn = attn
        self.mlp = mlp
        self.attn_norm = attn_norm
        self.mlp_norm = mlp_norm

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = self.attn_norm(x + self.attn(x, step))
        hidden: torch.Tensor = self.mlp_norm(x + self.mlp(x))
        return hidden


class Encoder(nn.Module):
    """An encoder, with a ``pooler`` if the checkpoint has one."""

    def __init__(self, embed: EncoderEmbedding, layers: Sequence[EncoderLayer], pooler: ReplicatedLinear | None) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.pooler = pooler

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Last hidden state ``[batch, seq, hidden]`` of ``input_ids [batch, seq]`` (int64).

        ``attention_mask [batch, seq]``: 1 for real tokens, 0 for padding, which no token sees; None: all are real.
        ``token_type_ids [batch, seq]``: None means 0.

        Raises:
            ForwardError: an argument of another form, ids outside their table, more tokens than there are positions.
        """
        check_batch("input_ids", input_ids)
        mask = Mask()
        if attention_mask is not None:
            check_batch("attention_mask", attention_mask, tuple(input_ids.shape))
            mask = Mask(attention_mask.bool()[:, None, None, :])
        step = Step(masks={None: mask})
        x: torch.Tensor = self.embed(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x, step)
        return x

    def pool(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, mode: str = "pooler") -> torch.Tensor:
        """``[batch, seq, hidden]`` to ``[batch, hidden]``: by the checkpoint's pooler (a dense layer and tanh over the first
        token), or in a mode of :func:`rtp_llm.layers.pooling.pool`, which heeds ``attention_mask [batch, seq]``.

        Raises:
            ForwardError: ``NO_POOLER`` where the checkpoint holds none.
            ConfigError: for a mode that is not there.
        """
        if mode != "pooler":
            return pool(hidden, attention_mask, mode)
        if self.pooler is None:
            raise ForwardError(
                Problem(LayerFault.NO_POOLER, "the checkpoint holds no pooler", fix="pool by another mode: mean, cls, max or lasttoken")
            )
        return torch.tanh(self.pooler(hidden[:, 0]))
