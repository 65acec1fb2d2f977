"""The first rows of a tensor, as the files have them that a worker serves."""

from __future__ import annotations

import msgspec
from safetensors import SafetensorError, safe_open

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel, shown
from actorium.actors.messages import MAX_VALUES, ReadTensor, TensorAnswer, WeightsSource
from actorium.actors.models.gguf_folder import gguf_source
from actorium.actors.models.model_dir import resolve
from actorium.gpu.weights.safetensors_reader import checkpoint_files
from actorium.gpu.weights.weight_files import WeightFiles, files_of

ERROR = 4000
"""Characters of an error that are sent."""


def tensor_values(config: Config, source: WeightsSource, message: ReadTensor) -> TensorAnswer:
    """What is answered. source: of the weights that are served."""
    try:
        return TensorAnswer(message.epoch, message.number, _read(
            config, files_of(source, resolve(config.model.model)), message))
    except (BadModel, OSError, SafetensorError) as error:
        return TensorAnswer(message.epoch, message.number, error=str(error)[:ERROR])


def _read(config: Config, files: WeightFiles, message: ReadTensor) -> bytes:
    if not files.over and config.model.load_format == "dummy":
        raise BadModel("the weights are random (--load-format dummy): no file has them")
    if gguf_source(files.path) is not None:
        raise BadModel(f"{files.path}: tensors of a GGUF file are not told")
    shards = [*reversed(files.over), *(files.path / name for name in checkpoint_files(files.path))]
    for file in shards:
        with safe_open(str(file), framework="pt") as shard:
            if message.name not in shard.keys():  # noqa: SIM118 (not a dict)
                continue
            tensor = shard.get_tensor(message.name)
            first = tensor[:message.most] if tensor.dim() else tensor
            if first.numel() > MAX_VALUES:
                raise BadModel(f"truncate_size: {len(first)} rows of {shown(message.name)} have "
                               f"{first.numel():,} numbers, more than {MAX_VALUES:,}")
            values = first.float() if first.is_floating_point() else first
            return msgspec.json.encode({"shape": list(tensor.shape), "values": values.tolist(),
                                        "dtype": str(tensor.dtype).removeprefix("torch.")})
    raise BadModel(f"name: the checkpoint has no tensor {shown(message.name)}")
