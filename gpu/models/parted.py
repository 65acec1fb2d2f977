"""Decoders whose layers differ in the parts they have (`ModelShape.parts`): a recurrent layer,
attention, or both; and an MLP, or none."""

from __future__ import annotations

from actorium.gpu.families.model_shape import LayerParts, MambaShape, ModelShape
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense
from actorium.gpu.models.recurrent import RecurrentLayer, mamba2


class PartedLM(Decoder):
    """Layers of the parts that the shape says."""

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s, w = self.shape, w.at("")
        parts = s.parts[i]
        mlp = dense(w.at(parts.mlp), s.mlp_bias, s.activation, s.dense_names)
        return Layer(_mixer(w, s, i, parts), mlp, s.norm_eps, w.norm(parts.norm),
                     w.norm(parts.mlp_norm))


def _mixer(w: LayerWeights, s: ModelShape, i: int, parts: LayerParts) -> Mixer:
    if parts.recurrent:
        return _recurrent(w.at(parts.recurrent), s, s.recurrent.index(i))
    return attention(w.at(parts.attention), s, i)


def _recurrent(w: LayerWeights, s: ModelShape, index: int) -> RecurrentLayer:
    assert isinstance(s.recurrence, MambaShape)
    return mamba2(w, s.recurrence, index)
